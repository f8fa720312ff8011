// hopper_small: finished columns to O, the log-sum-exp, and the fallback for rows with hidden scores that are not finite.
#pragma once
#include "lse.cuh"
#include "nonfinite_fallback.cuh"
#include "small_merge.cuh"
#include "store.cuh"

namespace {

// Where this thread's two rows go: the columns from `column` on.
struct Destination {
  int column;
  element* out[2];
  int out_head[2];
  bool inside[2];

  __device__ __forceinline__ Destination(const Share& at, int warp_row, const int (&rows)[2]) {
    column = at.wg_n * WG_COLUMNS + int(at.rank) * SLICE;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int in_group = at.group_first + (warp_row + 8 * r) / POSITIONS;
      inside[r] = rows[r] < at.p.seq_q && in_group < at.group;
      out_head[r] = at.head_kv * at.group + in_group;
      out[r] = static_cast<element*>(at.p.o) + at.batch * at.p.o_stride[0] + out_head[r] * at.p.o_stride[1] + rows[r] * at.p.o_stride[2];
    }
  }
};

__device__ __forceinline__ void store_slice(const Share& at, const Destination& to, const float (&slice)[SLICE / 2], const RowPair& state,
                                            const int (&rows)[2], int lane) {
  // Mostly that is all, and a launch ends with its last warp: what else there may be is behind the way out.
  const bool stored = store_whole_rows<SLICE>(slice, to.out, to.inside, to.column, at.p.dim_v);
  const bool nonfinite = Part::MASK_IN_ADVANCE && isnan(state.sum[0] + state.sum[1]);
  if (__all_sync(~0u, stored && !at.p.lse && !nonfinite)) return;

  if (!__all_sync(~0u, stored))
#pragma unroll
    for (int r = 0; r < 2; ++r) store_row<SLICE>(slice, r, to.out[r], to.inside[r], to.column, at.p.dim_v);
  if (at.p.lse && to.column == 0 && lane % 4 == 0)
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (to.inside[r])
        LSE_OF(at.p, at.batch, to.out_head[r], rows[r]) = log_sum_exp(state.max[r], state.sum[r], ScoreHook::scale(at.p));

  // A hidden score of +infinity or NaN does not stay hidden behind a mask in advance: it shows in the sum.
  if (!Part::MASK_IN_ADVANCE || !__any_sync(~0u, nonfinite)) return;
  __syncwarp();  // the lanes of a row have stored each other's columns
#pragma unroll 1
  for (int r = 0; r < 2; ++r) {
    const int row = r ? rows[1] : rows[0], in_head = r ? to.out_head[1] : to.out_head[0];
    if (isnan(r ? state.sum[1] : state.sum[0]) && (r ? to.inside[1] : to.inside[0]))
      nonfinite_fallback(at.p, at.batch, in_head, at.head_kv, row, to.column, min(to.column + SLICE, at.p.dim_v), r ? to.out[1] : to.out[0],
                        at.p.lse && to.column == 0 ? at.p.lse + at.batch * at.p.lse_stride[0] + in_head * at.p.lse_stride[1] + row : nullptr);
  }
}

}  // namespace
