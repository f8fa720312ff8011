// hopper_small: which Q tile and which KV tiles are this warpgroup's, and how they are loaded. Everything is requested before anyone
// waits, by one lane, in the order in which it will be needed.
#pragma once
#include "cluster.cuh"
#include "launch.cuh"
#include "small_layout.cuh"

namespace {

// This warpgroup's share of the problem: one Q tile, and of its visible keys, cut into tiles from the first visible key on, the
// tiles part, part + PARTS, …
struct Share {
  const SdpaParams& p;
  u32 smem;
  int warpgroup, wg_n, wg_m;
  u32 rank;
  int part;
  int group, head_kv, group_first, head, batch;  // group_first: first query head within the group of one key head
  int m0, m_last;
  int key_first, tiles;
  bool precise;
  int own_tiles, at_once;

  __device__ __forceinline__ Share(const SdpaParams& params, u32 shared) : p(params), smem(shared) {
    // By a shuffle ptxas knows that it is the same in a warp, and with it descriptors and loop bounds. Straight code over whole tiles of
    // one head is 1 % faster without.
    constexpr bool BY_SHUFFLE = !WHOLE_TILES || PACK_HEADS > 1;
    warpgroup = THREADS == 128 ? 0 : BY_SHUFFLE ? __shfl_sync(~0u, int(threadIdx.x / 128), 0) : threadIdx.x / 128;
    wg_n = warpgroup % WG_N;
    wg_m = warpgroup / WG_N;
    rank = CLUSTER > 1 ? cluster_rank() : 0;
    part = int(rank) * WG_N + wg_n;
    // Divisions are slow, and the first loads wait for these.
    group = p.heads_q == p.heads_kv ? 1 : p.heads_q / p.heads_kv;
    const int head_blocks = (group + PACK_HEADS - 1) / PACK_HEADS;
    head_kv = head_blocks == 1 ? blockIdx.y : blockIdx.y / head_blocks;
    group_first = (int(blockIdx.y) - head_kv * head_blocks) * PACK_HEADS;
    head = head_kv * group + group_first;
    batch = blockIdx.z;
    m0 = int(blockIdx.x / CLUSTER) * POSITIONS;
    m_last = min(m0 + POSITIONS, p.seq_q) - 1;
    key_first = WHOLE_TILES ? 0 : max(0, m0 + p.band_lo);
    const int key_last = WHOLE_TILES ? p.seq_kv - 1 : min(p.seq_kv - 1, m_last + p.band_hi);
    tiles = key_last >= key_first ? (key_last - key_first) / BLOCK_N + 1 : 0;
    precise = PRECISE_KEYS > 0 && any_row_sees_fewer(p, m0, m_last, PRECISE_KEYS);
    own_tiles = tiles_of(part);
    at_once = straight_tiles(own_tiles);
  }

  __device__ __forceinline__ int tiles_of(int part) const {
    return OWN_TILES > 0 ? OWN_TILES : tiles > part ? (tiles - part - 1) / PARTS + 1 : 0;
  }
  // Tiles worked on without a loop, hidden ones at their end included; 0: the loop takes them.
  __device__ __forceinline__ int straight_tiles(int own) const {
    if (KNOWN_TILES > 0) return KNOWN_TILES;
    if (LOOP && (own > STRAIGHT_MAX || (precise && own > 1))) return 0;
    return LOOP ? max(own, FEW_TILES) : FEW_TILES;
  }
  // Tiles whose keys, or values, a warpgroup waits for: nothing may be on its way when a CTA ends.
  __device__ __forceinline__ int used_tiles(int wg_n, bool values) const {
    const int own = tiles_of(int(rank) * WG_N + wg_n), straight = straight_tiles(own);
    return values && precise && straight > 1 ? 1 : max(own, straight);
  }
  __device__ __forceinline__ int first_key(int tile) const { return key_first + (part + tile * PARTS) * BLOCK_N; }

  __device__ __forceinline__ u32 q_full() const { return smem + BARRIER_OFFSET; }
  __device__ __forceinline__ u32 arrived() const { return q_full() + 8; }             // columns from the cluster
  __device__ __forceinline__ u32 statistics_arrived() const { return arrived() + 8; }
  __device__ __forceinline__ u32 k_full(int wg_n) const { return q_full() + 32 + wg_n * STAGES * 16; }
  __device__ __forceinline__ u32 ring(int wg_n) const { return smem + KV_OFFSET + wg_n * RING_BYTES; }
};

struct Loader {
  const Share& at;
  const TensorMap& q_map;
  const TensorMap& k_map;
  const TensorMap& v_map;

  __device__ __forceinline__ void load_k(int wg_n, int tile, int stage) const {
    const int n0 = at.key_first + (int(at.rank) * WG_N + wg_n + tile * PARTS) * BLOCK_N;
    const u32 k_smem = at.ring(wg_n) + stage * (K_BYTES + V_BYTES);
    const u32 full = at.k_full(wg_n) + stage * 16;
    mbarrier_expect_bytes(full, K_BYTES);
#pragma unroll
    for (int panel = 0; panel < QK_PANELS; ++panel)
      tma_load(k_smem + panel * KV_PANEL_BYTES, &k_map, full, panel * PANEL, n0, at.head_kv, at.batch);
  }
  __device__ __forceinline__ void load_v(int wg_n, int tile, int stage) const {
    const int n0 = at.key_first + (int(at.rank) * WG_N + wg_n + tile * PARTS) * BLOCK_N;
    const u32 v_smem = at.ring(wg_n) + stage * (K_BYTES + V_BYTES) + K_BYTES;
    const u32 full = at.k_full(wg_n) + stage * 16 + 8;
    mbarrier_expect_bytes(full, V_BYTES);
#pragma unroll
    for (int panel = 0; panel < V_PANELS; ++panel)
      tma_load(v_smem + panel * KV_PANEL_BYTES, &v_map, full, panel * PANEL, n0, at.head_kv, at.batch);
  }

  // By one lane of the CTA.
  __device__ __forceinline__ void init_barriers() const {
    mbarrier_init(at.q_full(), 1);
    if (CLUSTER > 1) {
      mbarrier_init(at.arrived(), 1);
      mbarrier_expect_bytes(at.arrived(), WG_M * WG_N * (CLUSTER - 1) * CTA_MESSAGE_BYTES);
      mbarrier_init(at.statistics_arrived(), 1);
      mbarrier_expect_bytes(at.statistics_arrived(), (CLUSTER - 1) * WG_N * ROWS * 8);
    }
#pragma unroll
    for (int i = 0; i < 2 * WG_N * STAGES; ++i) mbarrier_init(at.q_full() + 32 + i * 8, 1);
    mbarrier_init_fence();
  }
  __device__ __forceinline__ void load_first_stages() const {
    mbarrier_expect_bytes(at.q_full(), QK_PANELS * Q_PANEL_BYTES);
#pragma unroll
    for (int panel = 0; panel < QK_PANELS; ++panel)
      tma_load(at.smem + panel * Q_PANEL_BYTES, &q_map, at.q_full(), panel * PANEL, at.m0, at.head, at.batch);
#pragma unroll
    for (int i = 0; i < STAGES * WG_N; ++i)
      if (i / WG_N < at.used_tiles(i % WG_N, false)) load_k(i % WG_N, i / WG_N, i / WG_N);
#pragma unroll
    for (int i = 0; i < STAGES * WG_N; ++i)  // behind all keys, which would come later otherwise
      if (i / WG_N < at.used_tiles(i % WG_N, true)) load_v(i % WG_N, i / WG_N, i / WG_N);
  }
};

}  // namespace
