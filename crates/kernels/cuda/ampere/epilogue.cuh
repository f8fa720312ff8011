// ampere_fwd, ampere_f32: from the accumulators of a finished Q tile to O and the log-sum-exp, but for `store_rows`, which
// the kernel includes.
#pragma once
#include "lse.cuh"
#include "mainloop.cuh"
#include "store.cuh"

namespace {

__device__ __forceinline__ void store_lse(const SdpaParams& p, const Work& work, int row, float top, float sum) {
  if (p.lse && work.value_first == 0 && work.m0 + row < work.bounds(p).seq_q)
    LSE_OF(p, work.batch, work.head, first_query(work.bounds(p)) + work.m0 + row) = ScoreHook::lse(p, work.head, top, sum);
}

// A chunk of columns of a row, from f32.
__device__ __forceinline__ void store_columns(element* row, int column, int dim, bool aligned, const float (&x)[8]) {
  const uint4 bits = make_uint4(pack_pair(x[0], x[1]), pack_pair(x[2], x[3]), pack_pair(x[4], x[5]), pack_pair(x[6], x[7]));
  store_chunk(row, column, dim, aligned, bits);
}
__device__ __forceinline__ void store_columns(float* row, int column, int dim, bool aligned, const float (&x)[4]) {
  if (aligned && column + 4 <= dim) {
    *reinterpret_cast<float4*>(row + column) = make_float4(x[0], x[1], x[2], x[3]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (column + i < dim) row[column + i] = x[i];
  }
}

// Where the rows of a Q tile's head begin in O, at the first of its columns.
__device__ __forceinline__ Scalar* output_rows(const SdpaParams& p, const Work& work) {
  Scalar* base = head_of(static_cast<Scalar*>(p.o), p.o_stride, work.batch, work.head) + work.value_first;
  return PACKED_QUERIES ? base + first_query(work.bounds(p)) * p.o_stride[2] : base;
}

// WARPS_N warps per row bring their partial O to the common maximum and add them up in shared memory.
__device__ __forceinline__ void merge_rows(const SdpaParams& p, unsigned char* smem_raw, const Work& work, float (&o)[M_TILES][O_TILES][4],
                                           const RowPair (&state)[M_TILES]) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int warp_n = warp / WARPS_M;
  const int warp_row = warp % WARPS_M * 16 * M_TILES;
  Scalar* o_base = output_rows(p, work);
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
    float sum = 0.f, out[CHUNK] = {};
#pragma unroll
    for (int w = 0; w < WARPS_N; ++w) {
      const float weight = exp2_approx((stats[w * BLOCK_M + row] - safe) * ScoreHook::scale_log2(p));
      sum += weight * stats[(WARPS_N + w) * BLOCK_M + row];
      const float* from = &partial[(w * BLOCK_M + row) * MERGE_PITCH + chunk * CHUNK];
#pragma unroll
      for (int e = 0; e < CHUNK; ++e) out[e] = fmaf(weight, from[e], out[e]);
    }
    const float inverse = ScoreHook::inverse(p, work.head, top, sum);
    if (chunk == 0) store_lse(p, work, row, top, sum);
#pragma unroll
    for (int e = 0; e < CHUNK; ++e) out[e] *= inverse;
    store_columns(o_base + (work.m0 + row) * p.o_stride[2], chunk * CHUNK, p.dim_v - work.value_first, o_aligned, out);
  }
}

}  // namespace
