// hopper_small: the parts of one Q tile become its output, in registers and in two steps: first each warpgroup of a CTA collects its
// share of the columns from the others (through shared memory), then each CTA of the cluster collects its share of those (through
// distributed shared memory, whose bandwidth is low: this order halves the traffic). Sender and receiver are the same thread of
// two warpgroups, so what is exchanged needs no layout: one float4 per thread and eight columns. Between CTAs the stores themselves
// report their arrival to an mbarrier of the receiver, which saves a cluster barrier.
#pragma once
#include "small_mainloop.cuh"

namespace {

// Lists of MEMBERS that leave one out: the place of `other` in `self`'s list, and who stands in a place.
template <int MEMBERS>
__device__ __forceinline__ int place_without(int self, int other) {
  return MEMBERS == 2 ? 0 : other < self ? other : other - 1;
}
template <int MEMBERS>
__device__ __forceinline__ int member_without(int self, int place) {
  return MEMBERS == 2 ? 1 - self : place < self ? place : place + 1;
}

// Part `own` of `all`. Selects, not a branch on `own`: inside `if (i == own)` the compiler would replace i by `own` and
// put the array into local memory to index it.
template <int PARTS, int N>
__device__ __forceinline__ void take_own_part(const float (&all)[PARTS * N], int own, float (&part)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    part[i] = all[i];
#pragma unroll
    for (int k = 1; k < PARTS; ++k) part[i] = own == k ? all[k * N + i] : part[i];
  }
}

// The columns for the member in a place of `own`'s list.
template <int PARTS, int N, typename Store>
__device__ __forceinline__ void send_part(const float (&all)[PARTS * N], int own, int place, Store store) {
  const bool behind = place >= own;
#pragma unroll
  for (int j = 0; j < N / 4; ++j) {
    float4 v;
    const int here = place * N + 4 * j, next = here + N;
    v.x = behind ? all[next] : all[here], v.y = behind ? all[next + 1] : all[here + 1];
    v.z = behind ? all[next + 2] : all[here + 2], v.w = behind ? all[next + 3] : all[here + 3];
    store(128 * j * 16, v);
  }
}

// Adds a message's columns, which come in this thread's accumulator order, eight of them to a float4.
template <int COLUMNS>
__device__ __forceinline__ void add_columns(float (&o)[COLUMNS / 2], const float (&weight)[2], u32 message) {
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j) {
    const float4 part = shared_load(message + 128 * j * 16);
    o[4 * j] = fmaf(weight[0], part.x, o[4 * j]), o[4 * j + 1] = fmaf(weight[0], part.y, o[4 * j + 1]);
    o[4 * j + 2] = fmaf(weight[1], part.z, o[4 * j + 2]), o[4 * j + 3] = fmaf(weight[1], part.w, o[4 * j + 3]);
  }
}

// Adds the share of the CTA's other warpgroups: `from(place)` is the message of the sender in that place of the list, its
// columns and behind them its (m, l) of two rows. The order of the sum is fixed, so the result does not depend on who
// arrives first.
template <int OTHERS, int COLUMNS, typename From>
__device__ __forceinline__ void merge_messages(float (&o)[COLUMNS / 2], RowPair& state, float scale_log2, From from) {
  float4 stats[OTHERS == 0 ? 1 : OTHERS];  // max and sum of the first row, then of the second
  float top[2] = {state.max[0], state.max[1]};
#pragma unroll
  for (int i = 0; i < OTHERS; ++i) {
    stats[i] = shared_load(from(i) + 128 * (COLUMNS / 8) * 16);
    top[0] = fmaxf(top[0], stats[i].x), top[1] = fmaxf(top[1], stats[i].z);
  }
  const float safe[2] = {top[0] == NEG_INF ? 0.f : top[0], top[1] == NEG_INF ? 0.f : top[1]};
  const float keep[2] = {exp2_approx((state.max[0] - safe[0]) * scale_log2), exp2_approx((state.max[1] - safe[1]) * scale_log2)};
  scale_rows(o, keep);
  state.sum[0] *= keep[0], state.sum[1] *= keep[1];
#pragma unroll
  for (int i = 0; i < OTHERS; ++i) {
    const float weight[2] = {exp2_approx((stats[i].x - safe[0]) * scale_log2), exp2_approx((stats[i].z - safe[1]) * scale_log2)};
    state.sum[0] = fmaf(weight[0], stats[i].y, state.sum[0]), state.sum[1] = fmaf(weight[1], stats[i].w, state.sum[1]);
    add_columns<COLUMNS>(o, weight, from(i));
  }
  state.max[0] = top[0], state.max[1] = top[1];
}

// 1 / sum of a row's weights, one of which is 1 unless there is none.
__device__ __forceinline__ float reciprocal(float sum) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(sum));
  return sum > 0.f ? r : 0.f;
}

// What can be done under the last MMA. (m, l) of this warpgroup's rows go to every other CTA: they arrive before the columns do.
__device__ __forceinline__ void send_statistics(const Share& at, RowPair& state, int lane, int warp_row) {
  if (LATE_TRIGGER) grid_launch_dependents();
  reduce_row_sums(state);
  if (CLUSTER > 1) {
    cluster_wait();
    if (lane % 4 == 0) {
      const u32 mine = at.smem + STATISTICS_OFFSET + ((at.rank * WG_N + at.wg_n) * ROWS + warp_row) * 8;
#pragma unroll
      for (int place = 0; place < CLUSTER - 1; ++place) {
        const int to = member_without<CLUSTER>(at.rank, place);
        const u32 there = cluster_address(mine, to), reports = cluster_address(at.statistics_arrived(), to);
        cluster_store_async(there, make_float2(state.max[0], state.sum[0]), reports);
        cluster_store_async(there + 64, make_float2(state.max[1], state.sum[1]), reports);
      }
    }
  }
}

// Step 1: columns [j·WG_COLUMNS, …) go to warpgroup j of this CTA.
__device__ __forceinline__ void merge_warpgroups(const Share& at, const float (&o)[VALUE_DIM / 2], RowPair& state, float scale_log2,
                                                 float (&mine)[WG_COLUMNS / 2]) {
  const int thread = threadIdx.x % 128;
  take_own_part<WG_N>(o, at.wg_n, mine);
  if (WG_N > 1) {
    auto message = [&](int sender, int receiver) {
      return at.smem + KV_OFFSET + sender * RING_BYTES +
             (at.wg_m * (WG_N - 1) + place_without<WG_N>(sender, receiver)) * WG_MESSAGE_BYTES + thread * 16;
    };
    named_barrier_sync(1 + at.wg_n, 128 * WG_M);  // all readers of this ring are done
#pragma unroll
    for (int place = 0; place < WG_N - 1; ++place) {
      const u32 to = message(at.wg_n, member_without<WG_N>(at.wg_n, place));
      send_part<WG_N, WG_COLUMNS / 2>(o, at.wg_n, place, [&](int offset, float4 v) { shared_store(to + offset, v); });
      shared_store(to + 128 * (WG_COLUMNS / 8) * 16, make_float4(state.max[0], state.sum[0], state.max[1], state.sum[1]));
    }
    __syncthreads();
    merge_messages<WG_N - 1, WG_COLUMNS>(mine, state, scale_log2,
                                         [&](int place) { return message(member_without<WG_N>(at.wg_n, place), at.wg_n); });
  }
}

// Step 2: of these, columns [r·SLICE, …) go to the CTA of rank r, and are divided by the sum of their row.
__device__ __forceinline__ void merge_cluster(const Share& at, const float (&mine)[WG_COLUMNS / 2], RowPair& state, float scale_log2,
                                              int warp_row, float (&slice)[SLICE / 2]) {
  const int thread = threadIdx.x % 128;
  take_own_part<CLUSTER>(mine, int(at.rank), slice);
  float inverse[2];
  if (CLUSTER == 1) {
#pragma unroll
    for (int r = 0; r < 2; ++r) inverse[r] = reciprocal(state.sum[r]);
    scale_rows(slice, inverse);
  } else {
    auto arrival = [&](int receiver, int sender) {
      return at.smem + ARRIVALS_OFFSET + (at.warpgroup * (CLUSTER - 1) + place_without<CLUSTER>(receiver, sender)) * CTA_MESSAGE_BYTES + thread * 16;
    };
#pragma unroll
    for (int place = 0; place < CLUSTER - 1; ++place) {
      const int to = member_without<CLUSTER>(at.rank, place);
      const u32 message = cluster_address(arrival(to, at.rank), to);
      const u32 reports = cluster_address(at.arrived(), to);
      send_part<CLUSTER, SLICE / 2>(mine, at.rank, place, [&](int offset, float4 v) { cluster_store_async(message + offset, v, reports); });
    }
    // While the columns travel: every CTA's weight from the statistics, which are already here.
    mbarrier_wait_cluster<SPIN_WAIT>(at.statistics_arrived(), 0);
    float top[2] = {state.max[0], state.max[1]};
    float their_max[CLUSTER - (CLUSTER > 1)][2], their_sum[CLUSTER - (CLUSTER > 1)][2];
#pragma unroll
    for (int place = 0; place < CLUSTER - 1; ++place)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const u32 from = at.smem + STATISTICS_OFFSET + (member_without<CLUSTER>(at.rank, place) * WG_N * ROWS + warp_row + 8 * r) * 8;
        float2 part[WG_N];
        float m = NEG_INF, l = 0.f;
#pragma unroll
        for (int i = 0; i < WG_N; ++i) part[i] = shared_load_pair(from + i * ROWS * 8), m = fmaxf(m, part[i].x);
#pragma unroll
        for (int i = 0; i < WG_N; ++i)
          l = WG_N == 1 ? part[i].y : fmaf(part[i].y, exp2_approx((part[i].x - (m == NEG_INF ? 0.f : m)) * scale_log2), l);
        their_max[place][r] = m, their_sum[place][r] = l;
        top[r] = fmaxf(top[r], m);
      }
    float keep[2], weight[CLUSTER - (CLUSTER > 1)][2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float safe = top[r] == NEG_INF ? 0.f : top[r];
      keep[r] = exp2_approx((state.max[r] - safe) * scale_log2);
      float sum = state.sum[r] * keep[r];
#pragma unroll
      for (int place = 0; place < CLUSTER - 1; ++place) {
        weight[place][r] = exp2_approx((their_max[place][r] - safe) * scale_log2);
        sum = fmaf(their_sum[place][r], weight[place][r], sum);
      }
      inverse[r] = reciprocal(sum);
      keep[r] *= inverse[r];
#pragma unroll
      for (int place = 0; place < CLUSTER - 1; ++place) weight[place][r] *= inverse[r];
      state.max[r] = top[r], state.sum[r] = sum;
    }
    scale_rows(slice, keep);
    mbarrier_wait_cluster<SPIN_WAIT>(at.arrived(), 0);
#pragma unroll
    for (int place = 0; place < CLUSTER - 1; ++place)
      add_columns<SLICE>(slice, weight[place], arrival(at.rank, member_without<CLUSTER>(at.rank, place)));
  }
}

}  // namespace
