// ampere_fwd: rows of O that one warp has.
#pragma once
#include "epilogue.cuh"

namespace {

// Each warp stages its own rows where its Q rows were, then writes them in 16-byte chunks.
__device__ __forceinline__ void store_rows(const SdpaParams& p, unsigned char* smem_raw, const Work& work, float (&o)[M_TILES][O_TILES][4],
                                           const RowPair (&state)[M_TILES]) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const u32 smem = shared_address(smem_raw);
  const int warp_row = warp % WARPS_M * 16 * M_TILES;
  Scalar* o_base = output_rows(p, work);
  const bool o_aligned = rows_are_16_byte_aligned(o_base, p.o_stride[2]);
  // Without a key tile nothing has waited yet for the other warps' copies of Q.
  if (HEAD_DIM != VALUE_DIM || work.tiles == 0) __syncthreads();
#pragma unroll
  for (int mt = 0; mt < M_TILES; ++mt)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = state[mt].sum[r];
      const float inverse = ScoreHook::inverse(p, work.head, state[mt].max[r], sum);
      const int row = warp_row + mt * 16 + r * 8 + lane / 4;
      if (lane % 4 == 0) store_lse(p, work, row, state[mt].max[r], sum);
#pragma unroll
      for (int c = 0; c < O_TILES; ++c) {
        const u32 bits = pack_pair(o[mt][c][2 * r] * inverse, o[mt][c][2 * r + 1] * inverse);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(smem + OTile::offset(row, c) + 4 * (lane % 4)), "r"(bits)
                     : "memory");
      }
    }
  __syncwarp();
#pragma unroll
  for (int i = lane; i < 16 * M_TILES * OTile::CHUNKS; i += 32) {
    const int row = warp_row + i / OTile::CHUNKS;
    const int chunk = i % OTile::CHUNKS;
    if (work.m0 + row < work.bounds(p).seq_q) {
      const uint4 bits = *reinterpret_cast<const uint4*>(smem_raw + OTile::offset(row, chunk));
      store_chunk(o_base + (work.m0 + row) * p.o_stride[2], chunk * 8, p.dim_v - work.value_first, o_aligned, bits);
    }
  }
}

}  // namespace
