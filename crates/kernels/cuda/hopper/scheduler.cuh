// The tile scheduler of hopper_fwd: which Q tiles a CTA works on, in which order, and which KV tiles each of them needs. One thread of
// the CTA walks the list and publishes it to the producer and the consumers (producer.cuh).
#pragma once
#include "blocks.cuh"
#include "packed.cuh"

namespace {

constexpr int BLOCK_M = 64 * CONSUMERS;
constexpr int POSITIONS = BLOCK_M / PACK_HEADS;  // query positions of one Q tile
static_assert(BLOCK_M % PACK_HEADS == 0 && POSITIONS % 16 == 0, "the 16 rows of a warp are of one head");

// Lengths that are data, and bounds that are not the parameters' own (sequence.cuh).
constexpr bool OWN_QUERIES = PACKED_QUERIES || USED_QUERIES;
constexpr bool OWN_LENGTHS = OWN_QUERIES || PACKED_KEYS || USED_LENGTHS;
constexpr bool OWN_BOUNDS = OWN_LENGTHS || CHUNKED;

// A Q tile: its number in its head, and the head, or group of PACK_HEADS heads, counted through all batches; negative: the list ends.
struct Work {
  int m_block, head;
};

// Keys of a section.
constexpr int SECTION_KEYS = (SECTION_MIB << 20) / (2 * (HEAD_DIM + VALUE_DIM));

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

// The same of packed sequences, whose Q tiles only the device can count: found by the whole warp, sequence by sequence. LONGEST_FIRST:
// as above, among the heads of a sequence; otherwise head by head.
struct PackedScheduler {
  int number = blockIdx.x;
  PackedTiles<POSITIONS> list;

  __device__ __forceinline__ Work work(const SdpaParams& p) {
    const int heads = p.heads_q / PACK_HEADS;
    const int lane = list.find(p, heads, number);
    if (lane < 0) {
      // As for all lists: as many questions as Q tiles, and the last one leaves a zero.
      if (p.counter && threadIdx.x % 32 == 0 && number - int(gridDim.x) == list.tiles - 1) atomicExch(p.counter, 0u);
      return {0, -1};
    }
    const int blocks = list.blocks_of(lane), inside = list.inside(heads, number, lane), before = (list.first + lane) * heads;
    const int most = LONGEST_FIRST ? section_heads(p, heads, list.keys_of(lane)) : 1;
    const int section = inside / (most * blocks);
    const int here = min(most, heads - section * most);
    const int rest = inside - section * most * blocks;
    return {blocks - 1 - rest / here, before + section * most + rest % here};
  }
  static __device__ __forceinline__ int section_heads(const SdpaParams& p, int heads, int keys) {
    if (SECTION_MIB == 0) return heads;
    return min(max(1, SECTION_KEYS / max(1, keys)) * (p.heads_q / p.heads_kv / PACK_HEADS), heads);
  }
  __device__ __forceinline__ void advance(const SdpaParams& p) {
    if (p.counter && threadIdx.x % 32 == 0) number = gridDim.x + atomicAdd(p.counter, 1u);
    number = p.counter ? __shfl_sync(~0u, number, 0) : number + gridDim.x;
  }
};

template <bool PACKED>
struct SchedulerOf {
  using type = TileScheduler;
};
template <>
struct SchedulerOf<true> {
  using type = PackedScheduler;
};

// Of a sequence whose lengths are data.
template <bool OWN>
struct OwnTokens {};
template <>
struct OwnTokens<true> {
  int q_first, kv_first, seq_kv, block;
};

// POSITIONS rows of one head, or of each of PACK_HEADS heads, and the KV tiles that they see.
struct QTile : OwnTokens<OWN_LENGTHS> {
  int m0, m_last, head, head_kv, batch;
  int first, count;  // KV tiles [first, first + count); under a block mask the numbers of those that it shows
  int rightmost;     // under a block mask, the last KV tile that may be one of them
  bool precise;
  __device__ __forceinline__ int last() const { return first + count - 1; }
};

// The rightmost KV tile that rows up to `row` see, at least the first of the Q tile.
template <typename Bounds>
__device__ __forceinline__ int last_seen(const Bounds& b, const QTile& t, int row) {
  return max(t.first, min(t.last(), min(band_last(b, min(row, b.seq_q - 1)), b.seq_kv - 1) / BLOCK_N));
}

template <typename Bounds>
__device__ __forceinline__ int last_row_of(const Bounds& b, int m0) {
  return min(m0 + POSITIONS, b.seq_q) - 1;
}

// A published Q tile, eight words: m0, head, batch, head_kv, then first, count, precise, and whether there is one at all. All that takes
// divisions is worked out once, by the scheduler thread; the first four are stored before the others are, to spare its registers.
// Where lengths are data, the sequence's follow, in eight words more.
constexpr int WORK_BYTES = OWN_LENGTHS ? 64 : 32;

__device__ __forceinline__ void store_four(u32 smem, int a, int b, int c, int d) {
  asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

__device__ __forceinline__ void load_four(u32 smem, int& a, int& b, int& c, int& d) {
  asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(smem) : "memory");
}

// The bounds of a published Q tile. Read where they are needed instead of kept in registers.
template <bool OWN = OWN_BOUNDS>
__device__ __forceinline__ decltype(auto) bounds_of(u32 smem, const SdpaParams& p) {
  if constexpr (!OWN) {
    return (p);
  } else {
    Sequence s = sequence_of<false>(p, 0);
    if (OWN_LENGTHS) {
      load_four(smem + 32, s.seq_q, s.seq_kv, s.band_lo, s.band_hi);
      load_four(smem + 48, s.position, s.q_first, s.kv_first, s.block);
    }
    return s;
  }
}

// The same under a block mask: how many KV tiles it shows, where the last may be, and whether those that need no other mask are few.
template <typename Bounds>
__device__ __forceinline__ void publish_shown_keys(u32 smem, const SdpaParams& p, const Bounds& b, int batch, int head, int m0) {
  const int m_last = last_row_of(b, m0);
  const int key_first = max(0, band_first(b, m0)), key_last = min(b.seq_kv - 1, band_last(b, m_last));
  int count = 0, clear = 0;
  if (key_last >= key_first) {
    const unsigned char* const row = block_row(p, batch, head, m0);
#pragma unroll 4
    for (int tile = key_first / BLOCK_N; tile <= key_last / BLOCK_N; ++tile) {
      const bool shown = row[tile * BLOCK_N / p.block_kv];
      count += shown;
      clear += shown && !tile_needs_mask(b, m0, m_last, tile * BLOCK_N, BLOCK_N);
    }
  }
  const int precise = clear < (PRECISE_KEYS + BLOCK_N - 1) / BLOCK_N;
  store_four(smem + 16, 0, count, precise | (key_last / BLOCK_N) << 1, 1);
}

// What rows see, of a Q tile whose place is published already.
template <typename Bounds>
__device__ __forceinline__ void publish_keys(u32 smem, const Bounds& b, int m0) {
  const int m_last = last_row_of(b, m0);
  const int key_first = max(0, band_first(b, m0)), key_last = min(b.seq_kv - 1, band_last(b, m_last));
  const int first = key_first / BLOCK_N;
  const int count = key_last >= key_first && m_last >= m0 ? key_last / BLOCK_N - first + 1 : 0;
  const int precise = PRECISE_KEYS > 0 && any_row_sees_fewer(b, m0, m_last, PRECISE_KEYS);
  store_four(smem + 16, first, count, precise, 1);
}

__device__ __forceinline__ void publish_own_work(u32 smem, const SdpaParams& p, const Work& work) {
  if (work.head < 0) {
    store_four(smem, 0, 0, 0, 0);
    store_four(smem + 16, 0, 0, 0, 0);
    if (OWN_LENGTHS) store_four(smem + 32, 0, 0, 0, 0), store_four(smem + 48, 0, 0, 0, 0);  // whoever reads it reads all of it
    return;
  }
  const int heads = p.heads_q / PACK_HEADS;
  const int m0 = work.m_block * POSITIONS, batch = work.head / heads;
  const int head = (work.head - batch * heads) * PACK_HEADS;
  store_four(smem, m0, head, batch, head / (p.heads_q / p.heads_kv));
  const Sequence s = sequence_of<OWN_LENGTHS>(p, batch);
  if (OWN_LENGTHS) {
    store_four(smem + 32, s.seq_q, s.seq_kv, s.band_lo, s.band_hi);
    store_four(smem + 48, s.position, s.q_first, s.kv_first, s.block);
  }
  if (BLOCK_MASK) return publish_shown_keys(smem, p, s, batch, head, m0);
  publish_keys(smem, s, m0);
}

__device__ __forceinline__ void publish_work(u32 smem, const SdpaParams& p, const Work& work) {
  if constexpr (OWN_BOUNDS) return publish_own_work(smem, p, work);
  int first = 0, count = 0, precise = 0;
  if (work.head < 0) {
    store_four(smem, 0, 0, 0, 0);
  } else {
    const int heads = p.heads_q / PACK_HEADS;
    const int m0 = work.m_block * POSITIONS, batch = work.head / heads;
    const int head = (work.head - batch * heads) * PACK_HEADS;
    store_four(smem, m0, head, batch, head / (p.heads_q / p.heads_kv));
    if (BLOCK_MASK) return publish_shown_keys(smem, p, p, batch, head, m0);
    const int m_last = last_row_of(p, m0);
    const int key_first = max(0, m0 + p.band_lo), key_last = min(p.seq_kv - 1, m_last + p.band_hi);
    first = key_first / BLOCK_N;
    count = key_last >= key_first ? key_last / BLOCK_N - first + 1 : 0;
    precise = PRECISE_KEYS > 0 && any_row_sees_fewer(p, m0, m_last, PRECISE_KEYS);
  }
  store_four(smem + 16, first, count, precise, work.head >= 0);
}

__device__ __forceinline__ void set_tokens(OwnTokens<true>& t, const Sequence& s) {
  t.q_first = s.q_first, t.kv_first = s.kv_first, t.seq_kv = s.seq_kv, t.block = s.block;
}
__device__ __forceinline__ void set_tokens(OwnTokens<false>&, const SdpaParams&) {}

// Where a Q tile's sequence begins, its block of the cache or row of the page table, and its number of keys.
__device__ __forceinline__ int first_query(const OwnTokens<true>& t) { return t.q_first; }
__device__ __forceinline__ int first_query(const OwnTokens<false>&) { return 0; }
__device__ __forceinline__ int first_key(const OwnTokens<true>& t) { return t.kv_first; }
__device__ __forceinline__ int first_key(const OwnTokens<false>&) { return 0; }
__device__ __forceinline__ int block_of(const OwnTokens<true>& t, int) { return t.block; }
__device__ __forceinline__ int block_of(const OwnTokens<false>&, int batch) { return batch; }
__device__ __forceinline__ int keys_of(const SdpaParams&, const OwnTokens<true>& t) { return t.seq_kv; }
__device__ __forceinline__ int keys_of(const SdpaParams& p, const OwnTokens<false>&) { return p.seq_kv; }

// For one thread; false: the list has ended.
__device__ __forceinline__ bool read_work(u32 smem, const SdpaParams& p, QTile& t) {
  int precise, more;
  load_four(smem, t.m0, t.head, t.batch, t.head_kv);
  load_four(smem + 16, t.first, t.count, precise, more);
  const auto& b = bounds_of<OWN_LENGTHS>(smem, p);
  t.m_last = last_row_of(b, t.m0);
  set_tokens(t, b);
  t.precise = BLOCK_MASK ? precise & 1 : precise;
  t.rightmost = precise >> 1;
  return more;
}

// For a whole warp: eight lanes read a word each. A shuffle gives one to all lanes, and ptxas then knows that it is the same in all of them.
struct WarpWork {
  int words = 0;

  __device__ __forceinline__ explicit WarpWork(u32 smem) {
    const int lane = threadIdx.x % 32;
    if (lane < WORK_BYTES / 4) asm volatile("ld.shared.s32 %0, [%1];" : "=r"(words) : "r"(smem + 4 * lane) : "memory");
  }
  __device__ __forceinline__ int word(int index) const { return __shfl_sync(~0u, words, index); }
  __device__ __forceinline__ int m0() const { return word(0); }
  __device__ __forceinline__ int head() const { return word(1); }
  __device__ __forceinline__ int batch() const { return word(2); }
  __device__ __forceinline__ bool more() const { return word(7); }
  __device__ __forceinline__ QTile tile(const SdpaParams& p, u32 smem) const {
    QTile t;
    t.m0 = m0(), t.head = head(), t.batch = batch(), t.head_kv = word(3);
    t.first = word(4), t.count = word(5), t.precise = PRECISE_KEYS > 0 && (BLOCK_MASK ? word(6) & 1 : word(6));
    t.m_last = last_row_of(bounds_of(smem, p), t.m0);
    return t;
  }
};

}  // namespace
