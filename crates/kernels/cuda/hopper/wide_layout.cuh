// hopper_wide: who has what of a Q tile, and what lies where in shared memory.
//
//   warpgroups: the loaders (two threads of them), the scores, and two of the output, each with half of O's columns
//   K:          a ring of panels, BLOCK_N keys × 64 columns: a KV tile need not fit as a whole
//   V:          a ring for each half of the columns, VALUE_KEYS keys a slot
//   message:    what a thread of the scores tells the thread of its number in both output warpgroups: factors of its two rows, P, and
//               where rows see few keys what rounding left of P
//   smem:       | Q | K × K_SLOTS | V × V_SLOTS × 2 | messages × MESSAGES | mbarriers |, in 128-byte-swizzled panels of 64 columns
#pragma once
#include "cluster.cuh"
#include "mask.cuh"
#include "tma.cuh"

namespace {

constexpr int THREADS = 4 * 128;
constexpr int LOADER_REGS = 24, SCORE_REGS = 136, OUTPUT_REGS = 176;
static_assert(LOADER_REGS + SCORE_REGS + 2 * OUTPUT_REGS <= 65536 / 128, "the registers of one SM");

constexpr int ROWS = 64;
constexpr int COLUMNS = VALUE_DIM / 2;  // of O, of one output warpgroup
constexpr int QK_PANELS = (HEAD_DIM + PANEL - 1) / PANEL;
constexpr int V_PANELS = (COLUMNS + PANEL - 1) / PANEL;
constexpr int Q_PANEL_BYTES = ROWS * 128;
constexpr int Q_BYTES = QK_PANELS * Q_PANEL_BYTES;
constexpr int K_SLOT_BYTES = BLOCK_N * 128;
constexpr int V_PANEL_BYTES = VALUE_KEYS * 128;
constexpr int V_SLOT_BYTES = V_PANELS * V_PANEL_BYTES;
constexpr int P_BYTES = ROWS * BLOCK_N * 2;
constexpr int FACTOR_BYTES = 128 * 8;
constexpr int MESSAGE_BYTES = FACTOR_BYTES + P_BYTES * (PRECISE_KEYS > 0 ? 2 : 1);

constexpr int K_OFFSET = Q_BYTES;
constexpr int V_OFFSET = K_OFFSET + K_SLOTS * K_SLOT_BYTES;
constexpr int MESSAGE_OFFSET = V_OFFSET + 2 * V_SLOTS * V_SLOT_BYTES;
constexpr int BARRIER_OFFSET = MESSAGE_OFFSET + MESSAGES * MESSAGE_BYTES;
// barriers: Q and a spare one, then (full, empty) of every K slot, of every V slot of either half, and of every warp's messages
constexpr int LAYOUT_BYTES = BARRIER_OFFSET + 16 * (1 + K_SLOTS + 2 * V_SLOTS + 4 * MESSAGES);
static_assert(HEAD_DIM % 16 == 0 && VALUE_DIM % 32 == 0 && BLOCK_N % VALUE_KEYS == 0 && VALUE_KEYS % 16 == 0, "tile shapes");
static_assert(K_SLOTS >= 2 && V_SLOTS >= 2, "one slot is read while the next one is awaited");
static_assert(LAYOUT_BYTES == DYNAMIC_SMEM_BYTES, "the manifest's dynamic_smem is the size of this layout");

// A place in a ring, and the parity of its current round.
template <int SLOTS>
struct Ring {
  int slot = 0;
  u32 parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == SLOTS) slot = 0, parity ^= 1;
  }
};

// Addresses in shared memory, of what lies there and of its barriers: (full, empty) pairs.
struct Layout {
  const u32 smem;

  __device__ __forceinline__ u32 k(int slot) const { return smem + K_OFFSET + slot * K_SLOT_BYTES; }
  __device__ __forceinline__ u32 v(int half, int slot) const { return smem + V_OFFSET + (half * V_SLOTS + slot) * V_SLOT_BYTES; }
  __device__ __forceinline__ u32 message(int slot) const { return smem + MESSAGE_OFFSET + slot * MESSAGE_BYTES; }
  __device__ __forceinline__ u32 q_full() const { return smem + BARRIER_OFFSET; }
  __device__ __forceinline__ u32 k_full(int slot) const { return smem + BARRIER_OFFSET + 16 * (1 + slot); }
  __device__ __forceinline__ u32 v_full(int half, int slot) const {
    return smem + BARRIER_OFFSET + 16 * (1 + K_SLOTS + half * V_SLOTS + slot);
  }
  __device__ __forceinline__ u32 message_full(int warp, int slot) const {
    return smem + BARRIER_OFFSET + 16 * (1 + K_SLOTS + 2 * V_SLOTS + warp * MESSAGES + slot);
  }
  static __device__ __forceinline__ u32 empty(u32 full) { return full + 8; }

  // By one thread, before any other thread may use them. Full: one arrival, and bytes where TMA brings them; empty: one arrival per
  // warp that reads. Of a message every lane writes what the same lanes of two warps read, and arrives for itself.
  __device__ __forceinline__ void init_barriers() const {
    const auto pair = [](u32 full, int writers, int readers) {
      mbarrier_init(full, writers);
      mbarrier_init(empty(full), readers);
    };
    mbarrier_init(q_full(), 1);
    for (int slot = 0; slot < K_SLOTS; ++slot) pair(k_full(slot), 1, 4);
    for (int slot = 0; slot < 2 * V_SLOTS; ++slot) pair(v_full(0, slot), 1, 4);
    for (int slot = 0; slot < 4 * MESSAGES; ++slot) pair(message_full(0, slot), 32, 64);
    mbarrier_init_fence();
  }
};

// A Q tile, and the KV tiles that its rows see, which are worked on from the last to the first.
struct QTile {
  int m0, m_last, head, head_kv, batch;
  KeyRange tiles;
  bool precise;

  // Those that see most keys come first, so that CTAs end together.
  __device__ __forceinline__ explicit QTile(const SdpaParams& p) {
    m0 = (gridDim.x - 1 - blockIdx.x) * ROWS;
    m_last = min(m0 + ROWS, p.seq_q) - 1;
    head = blockIdx.y, batch = blockIdx.z;
    head_kv = head / (p.heads_q / p.heads_kv);
    tiles = visible_tiles(p, m0, m_last, BLOCK_N);
    precise = PRECISE_KEYS > 0 && any_row_sees_fewer(p, m0, m_last, PRECISE_KEYS);
  }
};

// This warp has read a slot.
__device__ __forceinline__ void release_slot(u32 full) {
  if (threadIdx.x % 32 == 0) mbarrier_arrive(Layout::empty(full));
}

}  // namespace
