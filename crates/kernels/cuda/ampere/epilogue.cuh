// ampere_fwd: from the accumulators of a finished Q tile to O and the log-sum-exp.
#pragma once
#include "lse.cuh"
#include "mainloop.cuh"
#include "store.cuh"

namespace {

__device__ __forceinline__ void store_lse(const SdpaParams& p, const Work& work, int row, float top, float sum) {
  if (p.lse && work.m0 + row < work.bounds(p).seq_q)
    LSE_OF(p, work.batch, work.head, first_query(work.bounds(p)) + work.m0 + row) = ScoreHook::lse(p, work.head, top, sum);
}

// One warp per row: each stages its own rows where its Q rows were, then writes them in 16-byte chunks.
__device__ __forceinline__ void store_rows(const SdpaParams& p, unsigned char* smem_raw, const Work& work, float (&o)[M_TILES][O_TILES][4],
                                           const RowPair (&state)[M_TILES]) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const u32 smem = shared_address(smem_raw);
  const int warp_row = warp % WARPS_M * 16 * M_TILES;
  element* o_base = head_of(static_cast<element*>(p.o), p.o_stride, work.batch, work.head);
  if (PACKED_QUERIES) o_base += first_query(work.bounds(p)) * p.o_stride[2];
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
      store_chunk(o_base + (work.m0 + row) * p.o_stride[2], chunk * 8, p.dim_v, o_aligned, bits);
    }
  }
}

// WARPS_N warps per row bring their partial O to the common maximum and add them up in shared memory.
__device__ __forceinline__ void merge_rows(const SdpaParams& p, unsigned char* smem_raw, const Work& work, float (&o)[M_TILES][O_TILES][4],
                                           const RowPair (&state)[M_TILES]) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int warp_n = warp / WARPS_M;
  const int warp_row = warp % WARPS_M * 16 * M_TILES;
  element* o_base = head_of(static_cast<element*>(p.o), p.o_stride, work.batch, work.head);
  if (PACKED_QUERIES) o_base += first_query(work.bounds(p)) * p.o_stride[2];
  const bool o_aligned = rows_are_16_byte_aligned(o_base, p.o_stride[2]);
  float* stats = reinterpret_cast<float*>(smem_raw);                  // [WARPS_N][BLOCK_M] maxima, then sums
  float* partial = stats + 2 * WARPS_N * BLOCK_M;                     // [WARPS_N][BLOCK_M][MERGE_PITCH]
  __syncthreads();
#pragma unroll
  for (int mt = 0; mt < M_TILES; ++mt)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = warp_row + mt * 16 + r * 8 + lane / 4;
      if (lane % 4 == 0) {
        stats[warp_n * BLOCK_M + row] = state[mt].max[r];
        stats[(WARPS_N + warp_n) * BLOCK_M + row] = state[mt].sum[r];
      }
#pragma unroll
      for (int c = 0; c < O_TILES; ++c)
        *reinterpret_cast<float2*>(&partial[(warp_n * BLOCK_M + row) * MERGE_PITCH + c * 8 + 2 * (lane % 4)]) =
            make_float2(o[mt][c][2 * r], o[mt][c][2 * r + 1]);
    }
  __syncthreads();
  for (int i = threadIdx.x; i < BLOCK_M * OTile::CHUNKS; i += THREADS) {
    const int row = i / OTile::CHUNKS;
    const int chunk = i % OTile::CHUNKS;
    if (work.m0 + row >= work.bounds(p).seq_q) continue;
    float top = NEG_INF;
#pragma unroll
    for (int w = 0; w < WARPS_N; ++w) top = fmaxf(top, stats[w * BLOCK_M + row]);
    const float safe = top == NEG_INF ? 0.f : top;
    float sum = 0.f, out[8] = {};
#pragma unroll
    for (int w = 0; w < WARPS_N; ++w) {
      const float weight = exp2_approx((stats[w * BLOCK_M + row] - safe) * ScoreHook::scale_log2(p));
      sum += weight * stats[(WARPS_N + w) * BLOCK_M + row];
      const float* from = &partial[(w * BLOCK_M + row) * MERGE_PITCH + chunk * 8];
#pragma unroll
      for (int e = 0; e < 8; ++e) out[e] = fmaf(weight, from[e], out[e]);
    }
    const float inverse = ScoreHook::inverse(p, work.head, top, sum);
    if (chunk == 0) store_lse(p, work, row, top, sum);
    const uint4 bits = make_uint4(pack_pair(out[0] * inverse, out[1] * inverse), pack_pair(out[2] * inverse, out[3] * inverse),
                                  pack_pair(out[4] * inverse, out[5] * inverse), pack_pair(out[6] * inverse, out[7] * inverse));
    store_chunk(o_base + (work.m0 + row) * p.o_stride[2], chunk * 8, p.dim_v, o_aligned, bits);
  }
}

}  // namespace
