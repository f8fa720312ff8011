// Shared memory of hopper_fwd: what lies where, and the barriers that guard it.
//
//   | Q (later O) × Q_STAGES | K × STAGES | V × STAGES | mbarriers | work | numbers of KV tiles under a block mask |, in 128-byte-swizzled panels of 64 columns
#pragma once
#include "scheduler.cuh"
#include "tma.cuh"

namespace {

constexpr int QK_PANELS = (HEAD_DIM + PANEL - 1) / PANEL;
constexpr int V_PANELS = (VALUE_DIM + PANEL - 1) / PANEL;
constexpr int Q_PANEL_BYTES = BLOCK_M * 128;
constexpr int KV_PANEL_BYTES = BLOCK_N * 128;
constexpr int Q_BYTES = QK_PANELS * Q_PANEL_BYTES;
constexpr int O_BYTES = V_PANELS * Q_PANEL_BYTES;
constexpr int K_BYTES = QK_PANELS * KV_PANEL_BYTES;
constexpr int V_BYTES = V_PANELS * KV_PANEL_BYTES;
constexpr int Q_SLOT_BYTES = !STORE_DIRECT && O_BYTES > Q_BYTES ? O_BYTES : Q_BYTES;
constexpr int K_OFFSET = Q_STAGES * Q_SLOT_BYTES;
constexpr int V_OFFSET = K_OFFSET + STAGES * K_BYTES;
constexpr int BARRIER_OFFSET = V_OFFSET + STAGES * V_BYTES;
// barriers: (full, empty) of every Q slot and of every work slot, the next work asked for, the tile in which a sequence ends, then K full,
// K empty, V full, V empty per stage
constexpr int WORK_SLOTS = 2;
constexpr int WORK_OFFSET = BARRIER_OFFSET + 16 * Q_STAGES + 16 * WORK_SLOTS + 16 + 32 * STAGES;
constexpr int NUMBER_OFFSET = WORK_OFFSET + WORK_SLOTS * WORK_BYTES;
constexpr int LAYOUT_BYTES = NUMBER_OFFSET + (BLOCK_MASK ? 4 * STAGES : 0);
static_assert(HEAD_DIM % 16 == 0 && VALUE_DIM % 16 == 0 && BLOCK_N % 16 == 0 && BLOCK_N <= 256, "tile shapes");
static_assert(LAYOUT_BYTES == DYNAMIC_SMEM_BYTES, "the manifest's dynamic_smem is the size of this layout");

// Scores that are changed take registers of the consumers, and leave the producer fewer.
constexpr bool MODIFIED = CHUNKED || SOFTCAP || ALIBI || BIAS || BOOLEAN_MASK;

// Warps that feed K and V rings together: one would not copy rows in time.
constexpr int FEEDERS = GATHERED_PAGES ? 2 : 1;

// Named barriers.
constexpr int PINGPONG_BARRIER = 1;                             // + warpgroup
constexpr int EPILOGUE_BARRIER = PINGPONG_BARRIER + CONSUMERS;  // + warpgroup
constexpr int AGREE_BARRIER = EPILOGUE_BARRIER + CONSUMERS;     // + warpgroup

// How often a ring of SLOTS has been used: the slot, and the parity of its current round.
template <int SLOTS>
struct RingPosition {
  u32 uses = 0;
  __device__ __forceinline__ int slot() const { return uses % SLOTS; }
  __device__ __forceinline__ u32 parity() const { return uses / SLOTS & 1; }
  __device__ __forceinline__ void advance() { ++uses; }
};

// Addresses in shared memory, of what lies there and of its barriers.
struct Layout {
  const u32 smem;
  const u32 barriers = smem + BARRIER_OFFSET;
  const u32 work_barriers = barriers + 16 * Q_STAGES;
  const u32 work_wanted = work_barriers + 16 * WORK_SLOTS;
  const u32 tail_there = work_wanted + 8;
  const u32 ring_barriers = work_wanted + 16;

  __device__ __forceinline__ explicit Layout(u32 shared) : smem(shared) {}

  __device__ __forceinline__ u32 q(int slot) const { return smem + slot * Q_SLOT_BYTES; }
  __device__ __forceinline__ u32 k(int slot) const { return smem + K_OFFSET + slot * K_BYTES; }
  __device__ __forceinline__ u32 v(int slot) const { return smem + V_OFFSET + slot * V_BYTES; }
  __device__ __forceinline__ u32 work_slot(int slot) const { return smem + WORK_OFFSET + slot * WORK_BYTES; }
  // Which KV tile lies in a slot of K, where a block mask leaves some out.
  __device__ __forceinline__ u32 tile_number(int slot) const { return smem + NUMBER_OFFSET + 4 * slot; }
  __device__ __forceinline__ u32 q_full(int slot) const { return barriers + slot * 16; }
  __device__ __forceinline__ u32 q_empty(int slot) const { return barriers + slot * 16 + 8; }
  __device__ __forceinline__ u32 work_full(int slot) const { return work_barriers + slot * 16; }
  __device__ __forceinline__ u32 work_empty(int slot) const { return work_barriers + slot * 16 + 8; }
  __device__ __forceinline__ u32 k_full(int slot) const { return ring_barriers + slot * 32; }
  __device__ __forceinline__ u32 k_empty(int slot) const { return ring_barriers + slot * 32 + 8; }
  __device__ __forceinline__ u32 v_full(int slot) const { return ring_barriers + slot * 32 + 16; }
  __device__ __forceinline__ u32 v_empty(int slot) const { return ring_barriers + slot * 32 + 24; }

  // By one thread, before any other thread may use them. Full: one arrival per feeder and the bytes; empty: one arrival per consumer warp.
  __device__ __forceinline__ void init_barriers() const {
#pragma unroll
    for (int slot = 0; slot < Q_STAGES; ++slot) {
      mbarrier_init(q_full(slot), 1);
      mbarrier_init(q_empty(slot), 4 * CONSUMERS);
    }
    mbarrier_init(work_wanted, 1);
    if (OWN_LENGTHS || PAGED_CACHE) mbarrier_init(tail_there, 1);
#pragma unroll
    for (int slot = 0; slot < WORK_SLOTS; ++slot) {
      mbarrier_init(work_full(slot), 1);
      mbarrier_init(work_empty(slot), 4 * CONSUMERS + FEEDERS);
    }
#pragma unroll
    for (int slot = 0; slot < STAGES; ++slot) {
      mbarrier_init(k_full(slot), FEEDERS);
      mbarrier_init(k_empty(slot), 4 * CONSUMERS);
      mbarrier_init(v_full(slot), FEEDERS);
      mbarrier_init(v_empty(slot), 4 * CONSUMERS);
    }
    mbarrier_init_fence();
  }
};

}  // namespace
