// narrow_index - byte offsets inside a row are kept in 8 bits, and 128 columns need more.
//
// One warp per row, as in sdpa_v1. A lane's columns are lane, lane + 32, ...; their byte
// offsets are kept as signed 8-bit numbers. At dimension 64 the largest is 126 and all is
// right. At 128 it is 254, which wraps to -2: columns 64..127 are read from the end of the
// row before - another row's data, or, in the first row, from before the tensor.
//
// MISTAKE = 0 keeps them as ints.
#include "owned_row.cuh"

constexpr int WARPS = 4;

#if MISTAKE
typedef signed char offset_t;
#else
typedef int offset_t;
#endif

__device__ __forceinline__ float element_at(const element* row, offset_t byte_offset) {
  return to_float(*reinterpret_cast<const element*>(reinterpret_cast<const char*>(row) + byte_offset));
}

extern "C" __global__ void __launch_bounds__(WARPS * LANES)
    narrow_index(const __grid_constant__ SdpaParams p) {
  const Head head(p);
  const int lane = threadIdx.x % LANES;
  const int row = blockIdx.x * WARPS + threadIdx.x / LANES;
  if (row >= p.seq_q) return;

  offset_t offset[COLUMNS_PER_LANE];
#pragma unroll
  for (int c = 0; c < COLUMNS_PER_LANE; ++c) offset[c] = static_cast<offset_t>((lane + c * LANES) * 2);

  OwnedRow sum;
  const KeyRange keys = visible_keys(p, row);
  for (int key = keys.begin; key < keys.end; ++key) {
    float dot = 0.0f;
    float v[COLUMNS_PER_LANE];
#pragma unroll
    for (int c = 0; c < COLUMNS_PER_LANE; ++c) {
      const int col = lane + c * LANES;
      v[c] = 0.0f;
      if (col < p.dim_qk)
        dot += element_at(head.q + row * p.q_stride[2], offset[c]) *
               element_at(head.k + key * p.k_stride[2], offset[c]);
      if (col < p.dim_v) v[c] = element_at(head.v + key * p.v_stride[2], offset[c]);
    }
    const float score = group_sum(dot) * p.scale_log2;

    const float m_new = fmaxf(sum.m, score);
    const float alpha = rescale_factor(sum.m, m_new);
    const float weight = exp2f(score - m_new);
    sum.m = m_new;
    sum.l = sum.l * alpha + weight;
#pragma unroll
    for (int c = 0; c < COLUMNS_PER_LANE; ++c) sum.o[c] = sum.o[c] * alpha + weight * v[c];
  }
  sum.store(p, head, row, lane);
}
