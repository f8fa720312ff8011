// What brings Q, K and V of hopper_wide to shared memory: a thread for queries and keys, and one for values.
//
// Waiting on an empty barrier with the opposite parity succeeds at once in the first round.
#pragma once
#include "launch.cuh"
#include "wide_layout.cuh"

namespace {

// Waits until a slot is empty, and says what will fill it.
__device__ __forceinline__ void open_slot(u32 full, u32 parity, u32 bytes) {
  mbarrier_wait(Layout::empty(full), parity ^ 1);
  mbarrier_expect_bytes(full, bytes);
}

__device__ __forceinline__ void load_keys(const Layout& layout, const TensorMap& q_map, const TensorMap& k_map, const QTile& t) {
  mbarrier_expect_bytes(layout.q_full(), Q_BYTES);
  for (int panel = 0; panel < QK_PANELS; ++panel)
    tma_load(layout.smem + panel * Q_PANEL_BYTES, &q_map, layout.q_full(), panel * PANEL, t.m0, t.head, t.batch, L2_EVICT_FIRST);
  Ring<K_SLOTS> at;
  for (int n = t.tiles.end - 1; n >= t.tiles.begin; --n)
    for (int panel = 0; panel < QK_PANELS; ++panel, at.advance()) {
      const u32 full = layout.k_full(at.slot);
      open_slot(full, at.parity, K_SLOT_BYTES);
      tma_load(layout.k(at.slot), &k_map, full, panel * PANEL, n * BLOCK_N, t.head_kv, t.batch, L2_EVICT_LAST);
    }
}

__device__ __forceinline__ void load_values(const Layout& layout, const TensorMap& v_map, const QTile& t) {
  Ring<V_SLOTS> at;
  for (int n = t.tiles.end - 1; n >= t.tiles.begin; --n)
    for (int key = 0; key < BLOCK_N; key += VALUE_KEYS, at.advance())
      for (int half = 0; half < 2; ++half) {
        const u32 full = layout.v_full(half, at.slot);
        open_slot(full, at.parity, V_SLOT_BYTES);
#pragma unroll
        for (int panel = 0; panel < V_PANELS; ++panel)
          tma_load(layout.v(half, at.slot) + panel * V_PANEL_BYTES, &v_map, full, half * COLUMNS + panel * PANEL, n * BLOCK_N + key,
                   t.head_kv, t.batch, L2_EVICT_LAST);
      }
}

}  // namespace
