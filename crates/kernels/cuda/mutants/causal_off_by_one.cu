// causal_off_by_one - every row sees one key too many at the end of its band.
//
// One warp per row, as in sdpa_v1. The last visible key is row + band_hi, so the range of
// keys ends, exclusively, one further; here it ends two further. Without a mask the end is
// cut at the sequence's, and everything is right: only a masked problem shows it, and of
// the rows only those that are not cut.
//
// MISTAKE = 0 ends the range where the band ends.
#include "owned_row.cuh"

constexpr int WARPS = 4;

extern "C" __global__ void __launch_bounds__(WARPS * LANES)
    causal_off_by_one(const __grid_constant__ SdpaParams p) {
  const Head head(p);
  const int lane = threadIdx.x % LANES;
  const int row = blockIdx.x * WARPS + threadIdx.x / LANES;
  if (row >= p.seq_q) return;

  const int begin = max(0, row + p.band_lo);
  const int end = min(p.seq_kv, row + p.band_hi + 1 + MISTAKE);

  OwnedRow sum;
  for (int key = begin; key < end; ++key) {
    float dot = 0.0f;
    for (int col = lane; col < p.dim_qk; col += LANES)
      dot += to_float(head.q[row * p.q_stride[2] + col]) * to_float(head.k[key * p.k_stride[2] + col]);
    const float score = group_sum(dot) * p.scale_log2;

    const float m_new = fmaxf(sum.m, score);
    const float alpha = rescale_factor(sum.m, m_new);
    const float weight = exp2f(score - m_new);
    sum.m = m_new;
    sum.l = sum.l * alpha + weight;
#pragma unroll
    for (int c = 0; c < COLUMNS_PER_LANE; ++c) {
      const int col = lane + c * LANES;
      const float v = col < p.dim_v ? to_float(head.v[key * p.v_stride[2] + col]) : 0.0f;
      sum.o[c] = sum.o[c] * alpha + weight * v;
    }
  }
  sum.store(p, head, row, lane);
}
