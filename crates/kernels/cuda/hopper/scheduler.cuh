// The tile scheduler of hopper_fwd: which Q tiles a CTA works on, in which order, and which KV tiles each of them needs. One thread of
// the CTA walks the list and publishes it to the producer and the consumers (producer.cuh).
#pragma once
#include "mask.cuh"

namespace {

constexpr int BLOCK_M = 64 * CONSUMERS;
constexpr int POSITIONS = BLOCK_M / PACK_HEADS;  // query positions of one Q tile
static_assert(BLOCK_M % PACK_HEADS == 0 && POSITIONS % 16 == 0, "the 16 rows of a warp are of one head");

// A Q tile: its number in its head, and the head, or group of PACK_HEADS heads, counted through all batches; negative: the list ends.
struct Work {
  int m_block, head;
};

__device__ __forceinline__ void publish_work(u32 smem, const Work& work) {
  asm volatile("st.shared.v2.s32 [%0], {%1, %2};" ::"r"(smem), "r"(work.m_block), "r"(work.head) : "memory");
}

__device__ __forceinline__ Work read_work(u32 smem) {
  Work work;
  asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];" : "=r"(work.m_block), "=r"(work.head) : "r"(smem) : "memory");
  return work;
}

// For a whole warp: its first lane reads, which is also the one that says that it has read.
__device__ __forceinline__ Work read_work_for_warp(u32 smem) {
  Work work = {};
  if (threadIdx.x % 32 == 0) work = read_work(smem);
  return {__shfl_sync(~0u, work.m_block, 0), __shfl_sync(~0u, work.head, 0)};
}

// The Q tiles of one CTA, in order.
//
// LONGEST_FIRST: the heads are cut into sections whose keys and values fit L2; in each, the Q tiles that see most keys come first.
// PAIRED: a unit of work is the Q tile i from the end of a head and the Q tile i from its start, all equally long. PAIRED 2: but
// precise ones, which take longer than their KV tiles say, go with the next shorter one from the end. The longest is then alone and
// one short one of every head left over, for CTAs that no pair is left for.
//
// Dynamic (PERSISTENT 2): units are taken from an atomic counter that all CTAs share. Static: in turns, and longest first
// forwards in even rounds and backwards in odd ones, so that whoever got the longest of a round gets the shortest of the next.
struct TileScheduler {
  int unit = worker(), round = 0, second = 0;

  static __device__ __forceinline__ int worker() { return blockIdx.x; }
  static __device__ __forceinline__ int workers() { return gridDim.x; }
  // Q tiles of one head.
  static __device__ __forceinline__ int m_blocks(const SdpaParams& p) {
    return (p.seq_q + POSITIONS - 1) / POSITIONS;
  }
  static __device__ __forceinline__ int heads(const SdpaParams& p) { return p.heads_q / PACK_HEADS * p.batch; }
  static __device__ __forceinline__ int units_per_head(const SdpaParams& p) {
    return PAIRED ? (m_blocks(p) + 1) / 2 : m_blocks(p);
  }
  static __device__ __forceinline__ int pairs(const SdpaParams& p) { return units_per_head(p) * heads(p); }
  // Precise blocks at the start of a head that go with other blocks; the next one is left over. 0: all go with their own.
  static __device__ __forceinline__ int moved(const SdpaParams& p) {
    constexpr int PRECISE_BLOCKS = (PRECISE_KEYS + POSITIONS - 1) / POSITIONS;
    return PAIRED == 2 && m_blocks(p) > 2 * PRECISE_BLOCKS + 1 ? PRECISE_BLOCKS : 0;
  }
  static __device__ __forceinline__ int units(const SdpaParams& p) { return pairs(p) + (moved(p) ? heads(p) : 0); }
  // Heads whose keys and values are worked on at the same time.
  static __device__ __forceinline__ int section_heads(const SdpaParams& p) {
    if (SECTION_MIB == 0) return heads(p);
    constexpr int SECTION_KEYS = (SECTION_MIB << 20) / (2 * (HEAD_DIM + VALUE_DIM));
    return min(max(1, SECTION_KEYS / p.seq_kv) * (p.heads_q / p.heads_kv / PACK_HEADS), heads(p));
  }
  __device__ __forceinline__ bool done(const SdpaParams& p) const { return unit >= units(p); }

  __device__ __forceinline__ Work work(const SdpaParams& p) const {
    if (done(p)) return {0, -1};
    const int blocks = units_per_head(p);
    if (LONGEST_FIRST) {
      const int most = section_heads(p);
      const int section = unit / (most * blocks);
      const int here = min(most, heads(p) - section * most);
      const int inside = unit - section * most * blocks;
      return {blocks - 1 - inside / here, section * most + inside % here};
    }
    if (PAIRED == 2 && unit >= pairs(p)) return {moved(p), unit - pairs(p)};
    const int inside = unit % blocks;
    return {second ? partner(p, inside) : m_blocks(p) - 1 - inside, unit / blocks};
  }

  // The short block that goes with the block `inside` from the end; -1: none.
  static __device__ __forceinline__ int partner(const SdpaParams& p, int inside) {
    if (inside <= moved(p) && moved(p)) return inside - 1;
    return 2 * inside == m_blocks(p) - 1 ? -1 : inside;
  }

  __device__ __forceinline__ void advance(const SdpaParams& p) {
    second = PAIRED && !second && unit < pairs(p) && partner(p, unit % units_per_head(p)) >= 0;
    if (second) return;
    ++round;
    if (!PERSISTENT) {
      unit = units(p);
    } else if (PERSISTENT == 2 && p.counter) {
      // Everybody asks until there is no more, so there are as many questions as units; the last one leaves a zero.
      const int taken = atomicAdd(p.counter, 1u);
      if (taken == units(p) - 1) atomicExch(p.counter, 0u);
      unit = workers() + taken;
    } else {
      unit = round * workers() + (LONGEST_FIRST && round % 2 ? workers() - 1 - worker() : worker());
    }
  }
};

// POSITIONS rows of one head, or of each of PACK_HEADS heads, and the KV tiles that they see.
struct QTile {
  int m0, m_last, head, head_kv, batch;
  int first, count;  // KV tiles [first, first + count)
  bool precise;
  __device__ __forceinline__ int last() const { return first + count - 1; }
};

// The rightmost KV tile that rows up to `row` see, at least the first of the Q tile.
__device__ __forceinline__ int last_seen(const SdpaParams& p, const QTile& t, int row) {
  return max(t.first, min(t.last(), min(min(row, p.seq_q - 1) + p.band_hi, p.seq_kv - 1) / BLOCK_N));
}

// Where a Q tile starts: position, first head and batch.
__device__ __forceinline__ void locate(const SdpaParams& p, const Work& work, int& m0, int& head, int& batch) {
  const int heads = p.heads_q / PACK_HEADS;
  m0 = work.m_block * POSITIONS;
  batch = work.head / heads;
  head = (work.head - batch * heads) * PACK_HEADS;
}

__device__ __forceinline__ QTile q_tile_of(const SdpaParams& p, const Work& work) {
  QTile t;
  locate(p, work, t.m0, t.head, t.batch);
  t.m_last = min(t.m0 + POSITIONS, p.seq_q) - 1;
  t.head_kv = t.head / (p.heads_q / p.heads_kv);
  const int key_first = max(0, t.m0 + p.band_lo);
  // Not from m_last: one value less would be shared, and the register allocation another.
  const int key_last = min(p.seq_kv - 1, min(t.m0 + POSITIONS, p.seq_q) - 1 + p.band_hi);
  t.first = key_first / BLOCK_N;
  t.count = key_last >= key_first ? key_last / BLOCK_N - t.first + 1 : 0;
  t.precise = PRECISE_KEYS > 0 && any_row_sees_fewer(p, t.m0, t.m_last, PRECISE_KEYS);
  return t;
}

}  // namespace
