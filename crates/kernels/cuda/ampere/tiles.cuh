// ampere_fwd, ampere_f32: which Q tiles a CTA works on, and which KV tiles each of them needs.
#pragma once
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
struct Work {
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
  }
};

}  // namespace
