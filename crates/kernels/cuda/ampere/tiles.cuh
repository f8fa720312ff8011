// ampere_fwd, ampere_f32: which Q tiles a CTA works on, and which KV tiles each of them needs.
#pragma once
#include "blocks.cuh"
#include "layout.cuh"
#include "packed.cuh"

namespace {

constexpr bool OWN_LENGTHS = PACKED_QUERIES || PACKED_KEYS || USED_LENGTHS;
constexpr bool OWN_BOUNDS = OWN_LENGTHS || CHUNKED;

// Equal numbers of Q tiles, one for each CTA: HEAD_GROUP heads at a time, few enough for their K and V to stay in L2; among them the last
// (under a causal mask the longest) Q tiles start first, so that short ones fill the gaps at the end. Parts of a head's values count as heads.
__device__ __forceinline__ TilePlace place_of_cta(const SdpaParams& p) {
  const int m_blocks = (p.seq_q + BLOCK_M - 1) / BLOCK_M;
  const int group_first = int(blockIdx.x) / (HEAD_GROUP * m_blocks) * HEAD_GROUP;
  const int heads = p.heads_q * VALUE_PARTS;
  const int group_heads = HEAD_GROUP == 1 ? 1 : min(HEAD_GROUP, heads * p.batch - group_first);
  const int in_group = int(blockIdx.x) - group_first * m_blocks;
  const int m_block = m_blocks - 1 - in_group / group_heads;
  const int head_index = group_first + in_group % group_heads;
  return {m_block, head_index % heads, head_index / heads};
}

// Packed sequences have as many Q tiles as only the device knows. Every CTA takes one after the other: from an atomic counter, so that
// long ones hold nobody up, or in turns where there is none.
struct TileQueue {
  int turn = blockIdx.x;

  // The next number; `scratch` is a word of shared memory that nobody uses.
  __device__ __forceinline__ int take(const SdpaParams& p, volatile int* scratch) {
    if (!p.counter) {
      const int number = turn;
      turn += gridDim.x;
      return number;
    }
    __syncthreads();
    if (threadIdx.x == 0) *scratch = atomicAdd(p.counter, 1u);
    __syncthreads();
    const int number = *scratch;
    __syncthreads();
    return number;
  }
  // Every CTA asks once in vain; the last of them leaves a zero.
  __device__ __forceinline__ void finish(const SdpaParams& p, int number, int tiles) const {
    if (p.counter && threadIdx.x == 0 && number == tiles + int(gridDim.x) - 1) atomicExch(p.counter, 0u);
  }
};

// A Q tile's rows and the KV tiles that they see: those without a visible key are never touched.
struct Work : BlockWork<(BLOCK_MASK > 0)> {
  int head, batch, head_kv, m0, m_last;
  int value_first;  // of the columns of V and O
  int tile_first, tiles;
  bool precise;
  Sequence sequence;

  // The lengths and the band that count.
  __device__ __forceinline__ const auto& bounds(const SdpaParams& p) const {
    if constexpr (OWN_BOUNDS)
      return sequence;
    else
      return p;
  }

  __device__ __forceinline__ Work(const SdpaParams& p, const TilePlace& place) {
    head = place.head / VALUE_PARTS;
    value_first = VALUE_PARTS > 1 ? place.head % VALUE_PARTS * VALUE_DIM : 0;
    batch = place.batch;
    head_kv = head / (p.heads_q / p.heads_kv);
    if (OWN_BOUNDS) sequence = sequence_of<OWN_LENGTHS>(p, batch);
    const auto& b = bounds(p);
    m0 = place.m_block * BLOCK_M;
    m_last = min(m0 + BLOCK_M, b.seq_q) - 1;
    const int key_first = max(0, band_first(b, m0));
    const int key_last = min(b.seq_kv - 1, band_last(b, m_last));
    tile_first = key_first / BLOCK_N;
    tiles = key_last >= key_first && (!OWN_LENGTHS || m_last >= m0) ? key_last / BLOCK_N - tile_first + 1 : 0;
    precise = PRECISE_KEYS > 0 && any_row_sees_fewer(b, m0, m_last, PRECISE_KEYS);
    if constexpr (BLOCK_MASK) leave_hidden_out(p, b);
  }

  // Counts the tiles that the block table shows. Rows see at least those of them that need no other mask.
  template <typename Bounds>
  __device__ __forceinline__ void leave_hidden_out(const SdpaParams& p, const Bounds& b) {
    set_blocks(tiles > 0 ? block_row(p, batch, head, m0) : nullptr, tile_first + tiles);
    int clear = 0;
    tiles = 0;
    for (int first = tile_first; first < tile_end; first += 32) {
      const int tile = first + threadIdx.x % 32;
      const u32 seen = seen_tiles<BLOCK_N>(p, table_row, tile, tile_end);
      tiles += __popc(seen);
      clear += __popc(seen & __ballot_sync(~0u, !tile_needs_mask(b, m0, m_last, tile * BLOCK_N, BLOCK_N)));
    }
    precise = clear < (PRECISE_KEYS + BLOCK_N - 1) / BLOCK_N;
  }
};

// From a number among the KV tiles of a Q tile, asked for in order, to the tile.
template <bool MASKED>
struct TileWalk {
  __device__ __forceinline__ explicit TileWalk(const Work&) {}
  __device__ __forceinline__ int tile(const SdpaParams&, const Work& work, int number) { return work.tile_first + number; }
};

// Those that the block table shows: 32 are looked at together.
template <>
struct TileWalk<true> {
  int taken = -1, first, current = 0;
  u32 rest = 0;  // of the 32 tiles from `first` on, those that come after the current one

  __device__ __forceinline__ explicit TileWalk(const Work& work) : first(work.tile_first - 32) {}

  // For whole warps.
  __device__ __forceinline__ int tile(const SdpaParams& p, const Work& work, int number) {
    if (number == taken) return current;
    while (rest == 0 && first + 32 < work.tile_end) {
      first += 32;
      rest = seen_tiles<BLOCK_N>(p, work.table_row, first + threadIdx.x % 32, work.tile_end);
    }
    current = first + __ffs(rest) - 1;
    rest &= rest - 1;
    taken = number;
    return current;
  }
};

}  // namespace
