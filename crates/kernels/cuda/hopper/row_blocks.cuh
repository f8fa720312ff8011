// Which row blocks a CTA of hopper_fwd works on, in which order, and which key tiles each of them needs. Producer and consumers walk
// the same list without a word between them.
#pragma once
#include "band.cuh"

namespace {

constexpr int BLOCK_M = 64 * CONSUMERS;

// The row blocks of one CTA, in order.
//
// LONGEST_FIRST: the heads are cut into sections whose keys and values fit the second-level cache; in each, the row blocks that see
// most keys come first, and CTAs pick in turns, forwards in even rounds and backwards in odd ones, so that whoever got the
// longest of a round gets the shortest of the next: a fixed assignment is then fair under a causal mask too.
//
// PAIRED: a unit of work is the block i from the end of a head and the block i from its start, all equally long.
struct Schedule {
  int round = 0, second = 0;

  // Row blocks of one head; those of a cluster count as one.
  static __device__ __forceinline__ int m_blocks(const SdpaParams& p) {
    return (p.seq_q + CLUSTER * BLOCK_M - 1) / (CLUSTER * BLOCK_M);
  }
  static __device__ __forceinline__ int units_per_head(const SdpaParams& p) {
    return PAIRED ? (m_blocks(p) + 1) / 2 : m_blocks(p);
  }
  // Query heads whose keys and values are worked on at the same time.
  static __device__ __forceinline__ int section_heads(const SdpaParams& p) {
    constexpr int SECTION_KEYS = (32 << 20) / (2 * (HEAD_DIM + VALUE_DIM));
    return min(max(1, SECTION_KEYS / p.seq_kv) * (p.heads_q / p.heads_kv), p.heads_q * p.batch);
  }
  __device__ __forceinline__ int unit() const {
    const int workers = gridDim.x / CLUSTER, worker = blockIdx.x / CLUSTER;
    return round * workers + (LONGEST_FIRST && round % 2 ? workers - 1 - worker : worker);
  }
  __device__ __forceinline__ bool done(const SdpaParams& p) const {
    return (!PERSISTENT && round > 0) || unit() >= units_per_head(p) * p.heads_q * p.batch;
  }
  // The row block and its head, counted through all batches.
  __device__ __forceinline__ void find(const SdpaParams& p, int& m_block, int& head) const {
    const int blocks = units_per_head(p);
    if (LONGEST_FIRST) {
      const int heads = section_heads(p);
      const int section = unit() / (heads * blocks);
      const int here = min(heads, p.heads_q * p.batch - section * heads);
      const int inside = unit() - section * heads * blocks;
      head = section * heads + inside % here;
      m_block = blocks - 1 - inside / here;
    } else {
      const int inside = unit() % blocks;
      head = unit() / blocks;
      m_block = second ? inside : m_blocks(p) - 1 - inside;
    }
  }
  __device__ __forceinline__ void advance(const SdpaParams& p) {
    const bool has_second = PAIRED && !second && 2 * (unit() % units_per_head(p)) != m_blocks(p) - 1;
    second = has_second;
    round += !has_second;
  }
};

// 64·CONSUMERS rows of one head, and the key tiles that they, or others of their cluster, see.
struct Tile {
  int m0, m_last, head, head_kv, batch;
  int first, count;  // key tiles [first, first + count)
  bool precise;
  __device__ __forceinline__ int last() const { return first + count - 1; }
};

// The rightmost key tile that rows up to `row` see, at least the first of the row block.
__device__ __forceinline__ int last_seen(const SdpaParams& p, const Tile& t, int row) {
  return max(t.first, min(t.last(), min(min(row, p.seq_q - 1) + p.band_hi, p.seq_kv - 1) / BLOCK_N));
}

__device__ __forceinline__ int rank_in_cluster() { return CLUSTER > 1 ? int(blockIdx.x % CLUSTER) : 0; }

__device__ __forceinline__ Tile tile_at(const SdpaParams& p, const Schedule& schedule) {
  Tile t;
  int m_block, head;
  schedule.find(p, m_block, head);
  const int cluster_m0 = m_block * CLUSTER * BLOCK_M;
  t.m0 = cluster_m0 + rank_in_cluster() * BLOCK_M;
  t.m_last = min(t.m0 + BLOCK_M, p.seq_q) - 1;
  t.head = head % p.heads_q;
  t.batch = head / p.heads_q;
  t.head_kv = t.head / (p.heads_q / p.heads_kv);
  const int key_first = max(0, cluster_m0 + p.band_lo);
  const int key_last = min(p.seq_kv - 1, min(cluster_m0 + CLUSTER * BLOCK_M, p.seq_q) - 1 + p.band_hi);
  t.first = key_first / BLOCK_N;
  t.count = key_last >= key_first ? key_last / BLOCK_N - t.first + 1 : 0;
  t.precise = PRECISE_KEYS > 0 && any_row_sees_fewer(p, t.m0, t.m_last, PRECISE_KEYS);
  return t;
}

}  // namespace
