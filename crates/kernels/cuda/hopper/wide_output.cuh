// An output warpgroup of hopper_wide: O += P · V of half of the columns, with P as the scores' warpgroup tells it, and the store.
#pragma once
#include "softmax.cuh"
#include "store.cuh"
#include "wgmma.cuh"
#include "wide_layout.cuh"

namespace {

// ptxas has no more than the 128 registers of the launch for one instruction: an MMA has at most 128 columns.
// More are two, the second from a panel's beginning.
constexpr int LEFT = COLUMNS > 128 ? V_PANELS / 2 * PANEL : COLUMNS;
constexpr int RIGHT = COLUMNS - LEFT;
constexpr int STEPS = BLOCK_N / 16, V_STEPS = VALUE_KEYS / 16;  // MMAs over the keys of a tile, and of a slot

struct Output {
  const SdpaParams& p;
  const Layout& layout;
  const QTile& tile;
  const int half;
  const int thread = threadIdx.x % 128, lane = threadIdx.x % 32;
  const int warp = __shfl_sync(~0u, thread / 32, 0);
  Ring<V_SLOTS> ahead, done;  // slots of V that MMAs were issued for, and those that were read
  Ring<MESSAGES> message;
  float left[LEFT / 2], right[RIGHT > 0 ? RIGHT / 2 : 1];

  __device__ u32 await_message(float (&factor)[2]) {
    mbarrier_wait(layout.message_full(warp, message.slot), message.parity);
    const u32 from = layout.message(message.slot);
    const float2 two = shared_load_pair(from + 8 * thread);
    factor[0] = two.x, factor[1] = two.y;
    return from;
  }
  __device__ void release_message() {
    mbarrier_arrive(Layout::empty(layout.message_full(warp, message.slot)));
    message.advance();
  }
  // Weights of 16 keys, from the step-th on.
  __device__ void load_weights(u32 from, int step, u32 (&w)[4]) const {
    shared_load(from + FACTOR_BYTES + 16 * (128 * step + thread), w[0], w[1], w[2], w[3]);
  }
  __device__ u32 v_step(int step) const {
    return wgmma_descriptor(layout.v(half, ahead.slot), V_PANEL_BYTES) + step % V_STEPS * (2048 >> 4);
  }
  __device__ void release_v() {
    release_slot(layout.v_full(half, done.slot));
    done.advance();
  }

  // O += P · V of 16 keys.
  __device__ void multiply(const u32 (&w)[4], u32 v) {
    multiply_part(left, w, v);
    multiply_part(right, w, v + LEFT / PANEL * (V_PANEL_BYTES >> 4));
  }
  template <int COUNT>
  __device__ void multiply_part(float (&o)[COUNT], const u32 (&w)[4], u32 v) {
    if constexpr (COUNT > 1) Wgmma<2 * COUNT>::rs(o, w[0], w[1], w[2], w[3], v, 1);
  }
  __device__ void scale(const float (&factor)[2]) {
    scale_rows(left, factor);
    if (RIGHT > 0) scale_rows(right, factor);
  }
  __device__ void pin() {
    pin_registers(left);
    if (RIGHT > 0) pin_registers(right);
  }

  // Once the maxima have settled, as they soon do, O stays as it is.
  __device__ void rescale(const float (&shrink)[2]) {
    if (__any_sync(~0u, shrink[0] != 1.f || shrink[1] != 1.f)) scale(shrink);
  }

  // A KV tile. Slots are given back as they are read.
  __device__ void step() {
    float shrink[2];
    u32 weights[STEPS][4];
    const u32 from = await_message(shrink);
#pragma unroll
    for (int i = 0; i < STEPS; ++i) load_weights(from, i, weights[i]);
    release_message();
    rescale(shrink);
    pin();
    for (auto& w : weights) pin_registers(w);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      if (i % V_STEPS == 0) mbarrier_wait(layout.v_full(half, ahead.slot), ahead.parity);
      multiply(weights[i], v_step(i));
      if ((i + 1) % V_STEPS != 0) continue;
      wgmma_commit();
      ahead.advance();
      if (i < V_STEPS) continue;
      wgmma_wait<1>();
      release_v();
    }
    wgmma_wait<0>();
    pin();
    for (auto& w : weights) pin_registers(w);
    release_v();
  }

  // The same with what rounding left of P in a second PV; one after the other, for which there are registers.
  __device__ void step_precisely() {
    float shrink[2];
    const u32 from = await_message(shrink);
    rescale(shrink);
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      u32 weights[4], residual[4];
      load_weights(from, i, weights);
      load_weights(from + P_BYTES, i, residual);
      if (i % V_STEPS == 0) mbarrier_wait(layout.v_full(half, ahead.slot), ahead.parity);
      pin();
      wgmma_fence();
      multiply(weights, v_step(i));
      multiply(residual, v_step(i));
      wgmma_commit();
      wgmma_wait<0>();
      pin();
      pin_registers(weights);
      pin_registers(residual);
      if ((i + 1) % V_STEPS != 0) continue;
      ahead.advance();
      release_v();
    }
    release_message();
  }

  __device__ void run() {
    for (float& x : left) x = 0.f;
    for (float& x : right) x = 0.f;
    if (PRECISE_KEYS > 0 && tile.precise)
#pragma unroll 1
      for (int n = tile.tiles.begin; n < tile.tiles.end; ++n) step_precisely();
    else
#pragma unroll 1
      for (int n = tile.tiles.begin; n < tile.tiles.end; ++n) step();
    store();
  }

  template <int COUNT>
  __device__ void store_part(const float (&o)[COUNT], int r, element* row, bool inside, int first) const {
    if constexpr (COUNT > 1) store_row<2 * COUNT>(o, r, row, inside, first, p.dim_v);
  }

  __device__ void store() {
    float inverse[2];
    await_message(inverse);
    release_message();
    scale(inverse);
    element* const o_head = static_cast<element*>(p.o) + tile.batch * p.o_stride[0] + tile.head * p.o_stride[1];
    const int row = tile.m0 + thread / 32 * 16 + lane / 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      element* const to = o_head + (row + 8 * r) * p.o_stride[2];
      const bool inside = row + 8 * r < p.seq_q;
      store_part(left, r, to, inside, half * COLUMNS);
      store_part(right, r, to, inside, half * COLUMNS + LEFT);
    }
  }
};

}  // namespace
