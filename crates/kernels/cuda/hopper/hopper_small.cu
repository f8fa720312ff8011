// hopper_small: attention for problems that do not fill the machine (short sequences, decoding).
//
// The keys of one block of query rows are split over the WG_N warpgroups of a CTA and the CLUSTER CTAs of a cluster
// (PARTS in all). Every warpgroup owns a ring of STAGES key tiles, filled by the copy engine before anything is
// waited for; with one tile per part there is no loop.
//
// The merge happens in registers, in two steps: first each warpgroup of a CTA collects its share of the columns from
// the others (through shared memory), then each CTA of the cluster collects its share of those (through distributed
// shared memory, whose bandwidth is low: this order halves the traffic). Sender and receiver are the same thread of
// two warpgroups, so what is exchanged needs no layout: one float4 per thread and eight columns.
//
//   rows:    64·WG_M, made of PACK_HEADS query heads (of one key head) × 64·WG_M / PACK_HEADS positions
//   columns: of VALUE_DIM, warpgroup n collects [n·WG_COLUMNS, …), of which the CTA of rank r finishes [r·SLICE, …)
//   smem:    | Q | (K tile, V tile) × STAGES, later messages, × WG_N | arrivals from the cluster | mbarriers |
#include "band.cuh"
#include "warpgroup_softmax.cuh"
#include "warpgroup_store.cuh"

#ifndef WG_M
#define WG_M 1
#endif
#ifndef WG_N
#define WG_N 2
#endif
#ifndef CLUSTER
#define CLUSTER 2
#endif
#ifndef TILE_N
#define TILE_N 128
#endif
#ifndef STAGES
#define STAGES 1
#endif
#ifndef PACK_HEADS
#define PACK_HEADS 1
#endif
#ifndef PRECISE_KEYS  // rows that see fewer keys than this keep P to 16 mantissa bits (bf16 only); 0 = never
#define PRECISE_KEYS (DTYPE_BF16 ? 128 : 0)
#endif
#ifndef WHOLE_TILES  // 1: every tile is full and nothing is masked
#define WHOLE_TILES 0
#endif
#ifndef MIN_CTAS
#define MIN_CTAS 1
#endif

namespace {

constexpr int THREADS = 128 * WG_M * WG_N;
constexpr int ROWS = 64 * WG_M;
constexpr int POSITIONS = ROWS / PACK_HEADS;  // query positions of one block
constexpr int PARTS = CLUSTER * WG_N;
constexpr int WG_COLUMNS = VALUE_DIM / WG_N;    // columns collected by one warpgroup of a CTA
constexpr int SLICE = WG_COLUMNS / CLUSTER;     // columns finished by one warpgroup
constexpr int QK_PANELS = (HEAD_DIM + PANEL - 1) / PANEL;
constexpr int V_PANELS = (VALUE_DIM + PANEL - 1) / PANEL;
constexpr int Q_PANEL_BYTES = ROWS * 128;
constexpr int KV_PANEL_BYTES = TILE_N * 128;
constexpr int K_BYTES = QK_PANELS * KV_PANEL_BYTES;
constexpr int V_BYTES = V_PANELS * KV_PANEL_BYTES;

constexpr int KV_OFFSET = QK_PANELS * Q_PANEL_BYTES;
// What one warpgroup sends to another: per thread one float4 for every eight columns, then its (m, l) for two rows.
constexpr int WG_MESSAGE_BYTES = 128 * (WG_COLUMNS / 8 + 1) * 16;
constexpr int CTA_MESSAGE_BYTES = 128 * (SLICE / 8 + 1) * 16;
// Messages inside the CTA lie in the sender's ring, which it has finished reading: [sender's ring][wg_m][receiver].
constexpr int RING_BYTES = STAGES * (K_BYTES + V_BYTES);
static_assert(WG_M * (WG_N - 1) * WG_MESSAGE_BYTES <= RING_BYTES, "messages fit the ring");
constexpr int ARRIVALS_OFFSET = KV_OFFSET + WG_N * RING_BYTES;  // [warpgroup][sender's rank]
constexpr int BARRIER_OFFSET = ARRIVALS_OFFSET + WG_M * WG_N * (CLUSTER - 1) * CTA_MESSAGE_BYTES;
// barriers: Q, one spare, then (K, V) per key warpgroup and stage
constexpr int SMEM_BYTES = BARRIER_OFFSET + 16 * (1 + WG_N * STAGES);
static_assert(SLICE % 8 == 0 && HEAD_DIM % 16 == 0 && TILE_N % 16 == 0 && TILE_N <= 256, "tile shapes");
static_assert(ROWS % PACK_HEADS == 0 && POSITIONS <= 256, "head packing");
static_assert(SMEM_BYTES <= 232448, "shared memory of one CTA on sm_90");

// The place of `other` in a list that leaves `self` out.
__device__ __forceinline__ int place_without(int self, int other) { return other < self ? other : other - 1; }

// The part of `all` that is this one's own. Selects, not a branch on `own`: inside `if (i == own)` the compiler would
// replace i by `own` and put the array into local memory to index it.
template <int PARTS, int N>
__device__ __forceinline__ void take_own_part(const float (&all)[PARTS * N], int own, float (&part)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    part[i] = all[i];
#pragma unroll
    for (int k = 1; k < PARTS; ++k) part[i] = own == k ? all[k * N + i] : part[i];
  }
}

// Adds the other warpgroups' or CTAs' share: `from(i)` is the message of sender i, `own` is this one. The columns come
// in this thread's accumulator order, eight of them to a float4; all senders' statistics are behind their columns.
template <int SENDERS, int COLUMNS, typename From>
__device__ __forceinline__ void merge_messages(float (&o)[COLUMNS / 2], RowState& state, int own, float scale_log2, From from) {
  float4 stats[SENDERS];  // max and sum of the first row, then of the second
  float top[2] = {state.max[0], state.max[1]};
#pragma unroll
  for (int i = 0; i < SENDERS; ++i) {
    if (i == own) {
      stats[i] = make_float4(state.max[0], state.sum[0], state.max[1], state.sum[1]);
    } else {
      stats[i] = shared_load(from(i) + 128 * (COLUMNS / 8) * 16);
      top[0] = fmaxf(top[0], stats[i].x), top[1] = fmaxf(top[1], stats[i].z);
    }
  }
  const float safe[2] = {top[0] == NEG_INF ? 0.f : top[0], top[1] == NEG_INF ? 0.f : top[1]};
  const float keep[2] = {exp2_approx((state.max[0] - safe[0]) * scale_log2), exp2_approx((state.max[1] - safe[1]) * scale_log2)};
  scale_rows(o, keep);
  state.sum[0] *= keep[0], state.sum[1] *= keep[1];
  // Always in the order of the senders after the own part: the result does not depend on who arrives first.
#pragma unroll
  for (int i = 0; i < SENDERS; ++i) {
    if (i == own) continue;
    const float weight[2] = {exp2_approx((stats[i].x - safe[0]) * scale_log2), exp2_approx((stats[i].z - safe[1]) * scale_log2)};
    state.sum[0] = fmaf(weight[0], stats[i].y, state.sum[0]), state.sum[1] = fmaf(weight[1], stats[i].w, state.sum[1]);
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {
      const float4 part = shared_load(from(i) + 128 * j * 16);
      o[4 * j] = fmaf(weight[0], part.x, o[4 * j]), o[4 * j + 1] = fmaf(weight[0], part.y, o[4 * j + 1]);
      o[4 * j + 2] = fmaf(weight[1], part.z, o[4 * j + 2]), o[4 * j + 3] = fmaf(weight[1], part.w, o[4 * j + 3]);
    }
  }
  state.max[0] = top[0], state.max[1] = top[1];
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS)
    hopper_small(const __grid_constant__ SdpaParams p, const __grid_constant__ TensorMap q_map,
                 const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map) {
  extern __shared__ __align__(1024) unsigned char smem_raw[];
  const u32 smem = smem_address(smem_raw);
  if (threadIdx.x == 0) {  // the copy engine reads the maps before anything else
    tma_prefetch_map(&q_map);
    tma_prefetch_map(&k_map);
    tma_prefetch_map(&v_map);
  }
  const int warpgroup = threadIdx.x / 128;
  const int wg_n = warpgroup % WG_N;
  const int wg_m = warpgroup / WG_N;
  const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
  const int part = int(rank) * WG_N + wg_n;

  // Query heads per key head; divisions are slow, and the first loads wait for these.
  const int group = p.heads_q == p.heads_kv ? 1 : p.heads_q / p.heads_kv;
  const int head_blocks = (group + PACK_HEADS - 1) / PACK_HEADS;
  const int head_kv = head_blocks == 1 ? blockIdx.y : blockIdx.y / head_blocks;
  const int group_first = (int(blockIdx.y) - head_kv * head_blocks) * PACK_HEADS;  // first query head within the group
  const int head = head_kv * group + group_first;
  const int batch = blockIdx.z;
  const int m0 = int(blockIdx.x / CLUSTER) * POSITIONS;
  const int m_last = min(m0 + POSITIONS, p.seq_q) - 1;

  // Visible keys of the block, cut into tiles from the first visible key on; part i takes tiles i, i+PARTS, ...
  const int key_first = WHOLE_TILES ? 0 : max(0, m0 + p.band_lo);
  const int key_last = WHOLE_TILES ? p.seq_kv - 1 : min(p.seq_kv - 1, m_last + p.band_hi);
  const int tiles = key_last >= key_first ? (key_last - key_first) / TILE_N + 1 : 0;
  const int own_tiles = tiles > part ? (tiles - part - 1) / PARTS + 1 : 0;
  const bool precise = PRECISE_KEYS > 0 && any_row_sees_fewer(p, m0, m_last, PRECISE_KEYS);

  const u32 q_full = smem + BARRIER_OFFSET;
  const u32 k_full = q_full + 16 + wg_n * STAGES * 16;
  const u32 v_full = k_full + 8;
  const u32 ring = smem + KV_OFFSET + wg_n * RING_BYTES;
  auto load_keys = [&](int tile, int stage) {
    const int n0 = key_first + (part + tile * PARTS) * TILE_N;
    const u32 k_smem = ring + stage * (K_BYTES + V_BYTES);
    mbarrier_expect_bytes(k_full + stage * 16, K_BYTES);
#pragma unroll
    for (int panel = 0; panel < QK_PANELS; ++panel)
      tma_load(k_smem + panel * KV_PANEL_BYTES, &k_map, k_full + stage * 16, panel * PANEL, n0, head_kv, batch, L2_EVICT_LAST);
    mbarrier_expect_bytes(v_full + stage * 16, V_BYTES);
#pragma unroll
    for (int panel = 0; panel < V_PANELS; ++panel)
      tma_load(k_smem + K_BYTES + panel * KV_PANEL_BYTES, &v_map, v_full + stage * 16, panel * PANEL, n0, head_kv, batch, L2_EVICT_LAST);
  };

  // Everything is requested before anyone waits: each key warpgroup's first thread serves its own ring.
  const bool leader = threadIdx.x % 128 == 0 && wg_m == 0;
  if (leader) {
    if (wg_n == 0) mbarrier_init(q_full, 1);
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) mbarrier_init(k_full + stage * 16, 1), mbarrier_init(v_full + stage * 16, 1);
    mbarrier_init_fence();
    if (wg_n == 0) {
      mbarrier_expect_bytes(q_full, QK_PANELS * Q_PANEL_BYTES);
#pragma unroll
      for (int panel = 0; panel < QK_PANELS; ++panel)
        tma_load(smem + panel * Q_PANEL_BYTES, &q_map, q_full, panel * PANEL, m0, head, batch, L2_EVICT_FIRST);
    }
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage)
      if (stage < own_tiles) load_keys(stage, stage);
  }
  __syncwarp();
  // While the loads travel.
  if (CLUSTER > 1) cluster_arrive_relaxed();  // answered before the first remote write: every CTA has started
  __syncthreads();

  const int lane = threadIdx.x % 32;
  const int warp_row = wg_m * 64 + (threadIdx.x % 128) / 32 * 16 + lane / 4;  // this thread's rows: +0 and +8
  const int rows[2] = {m0 + warp_row % POSITIONS, m0 + (warp_row + 8) % POSITIONS};

  float o[VALUE_DIM / 2] = {};
  RowState state;
  row_state_reset(state);
  mbarrier_wait(q_full, 0);
  const u64 q_desc = wgmma_descriptor(smem + wg_m * 64 * 128);

  for (int tile = 0; tile < own_tiles; ++tile) {
    const int stage = tile % STAGES;
    const u32 parity = (tile / STAGES) & 1;
    const u32 k_smem = ring + stage * (K_BYTES + V_BYTES);
    float s[TILE_N / 2];
    mbarrier_wait(k_full + stage * 16, parity);
    const u64 k_desc = wgmma_descriptor(k_smem);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; ++k) {
      const int inside = (k % 4) * 2;  // 32 bytes per k16 step, in units of 16
      Wgmma<TILE_N>::ss(s, q_desc + inside + (k / 4) * (Q_PANEL_BYTES >> 4), k_desc + inside + (k / 4) * (KV_PANEL_BYTES >> 4), k > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin_registers(s);

    const int n0 = key_first + (part + tile * PARTS) * TILE_N;
    float shrink[2];
    if (!WHOLE_TILES && tile_needs_mask(p, m0, m_last, n0, TILE_N))
      mask_scores<TILE_N>(s, rows, n0 + 2 * (lane % 4), p.band_lo, p.band_hi, p.seq_kv);
    softmax_scores<TILE_N, !WHOLE_TILES>(s, state, p.scale_log2, shrink);
    u32 packed[TILE_N / 4];
    pack_probabilities<TILE_N>(s, packed);
    if (tile > 0) scale_rows(o, shrink);

    mbarrier_wait(v_full + stage * 16, parity);
    const u64 v_desc = wgmma_descriptor(k_smem + K_BYTES, KV_PANEL_BYTES);
    pin_registers(o);
    pin_registers(packed);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < TILE_N / 16; ++k)
      Wgmma<VALUE_DIM>::rs(o, packed[4 * k], packed[4 * k + 1], packed[4 * k + 2], packed[4 * k + 3], v_desc + k * (2048 >> 4), 1);
    wgmma_commit();
    wgmma_wait<0>();
    pin_registers(o);
    if (PRECISE_KEYS > 0 && precise) {
      pack_residual<TILE_N>(s, packed);
      pin_registers(packed);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < TILE_N / 16; ++k)
        Wgmma<VALUE_DIM>::rs(o, packed[4 * k], packed[4 * k + 1], packed[4 * k + 2], packed[4 * k + 3], v_desc + k * (2048 >> 4), 1);
      wgmma_commit();
      wgmma_wait<0>();
      pin_registers(o);
    }
    if (tile + STAGES < own_tiles) {
      named_barrier_sync(1 + wg_n, 128 * WG_M);  // all readers of this stage are done
      if (leader) load_keys(tile + STAGES, stage);
      __syncwarp();
    }
  }
  reduce_row_sums(state);

  const int thread = threadIdx.x % 128;
  // Step 1: columns [j·WG_COLUMNS, …) go to warpgroup j of this CTA.
  float mine[WG_COLUMNS / 2];
  take_own_part<WG_N>(o, wg_n, mine);
  if (WG_N > 1) {
    auto message = [&](int sender, int receiver) {
      return smem + KV_OFFSET + sender * RING_BYTES +
             (wg_m * (WG_N - 1) + place_without(sender, receiver)) * WG_MESSAGE_BYTES + thread * 16;
    };
    named_barrier_sync(1 + wg_n, 128 * WG_M);  // all readers of this ring are done
#pragma unroll
    for (int to = 0; to < WG_N; ++to) {
      if (to != wg_n) {
#pragma unroll
        for (int j = 0; j < WG_COLUMNS / 8; ++j) {
          const int i = to * (WG_COLUMNS / 2) + 4 * j;
          shared_store(message(wg_n, to) + 128 * j * 16, make_float4(o[i], o[i + 1], o[i + 2], o[i + 3]));
        }
        shared_store(message(wg_n, to) + 128 * (WG_COLUMNS / 8) * 16,
                     make_float4(state.max[0], state.sum[0], state.max[1], state.sum[1]));
      }
    }
    __syncthreads();
    merge_messages<WG_N, WG_COLUMNS>(mine, state, wg_n, p.scale_log2, [&](int i) { return message(i, wg_n); });
  }

  // Step 2: of these, columns [r·SLICE, …) go to the CTA of rank r.
  float slice[SLICE / 2];
  take_own_part<CLUSTER>(mine, int(rank), slice);
  if (CLUSTER > 1) {
    auto arrival = [&](int receiver, int sender) {
      return smem + ARRIVALS_OFFSET + (warpgroup * (CLUSTER - 1) + place_without(receiver, sender)) * CTA_MESSAGE_BYTES + thread * 16;
    };
    cluster_wait();
#pragma unroll
    for (int to = 0; to < CLUSTER; ++to) {
      if (to != int(rank)) {
        const u32 message = cluster_address(arrival(to, rank), to);
#pragma unroll
        for (int j = 0; j < SLICE / 8; ++j) {
          const int i = to * (SLICE / 2) + 4 * j;
          cluster_store(message + 128 * j * 16, make_float4(mine[i], mine[i + 1], mine[i + 2], mine[i + 3]));
        }
        cluster_store(message + 128 * (SLICE / 8) * 16, make_float4(state.max[0], state.sum[0], state.max[1], state.sum[1]));
      }
    }
    cluster_arrive_release();
    cluster_wait();
    merge_messages<CLUSTER, SLICE>(slice, state, int(rank), p.scale_log2, [&](int i) { return arrival(rank, i); });
  }

  float inverse[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) inverse[r] = state.sum[r] > 0.f ? __fdividef(1.f, state.sum[r]) : 0.f;
  scale_rows(slice, inverse);
  const int column = wg_n * WG_COLUMNS + int(rank) * SLICE;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int in_group = group_first + (warp_row + 8 * r) / POSITIONS;
    const bool inside = rows[r] < p.seq_q && in_group < group;
    const int out_head = head_kv * group + in_group;
    half_type* row = static_cast<half_type*>(p.o) + batch * p.o_stride[0] + out_head * p.o_stride[1] + rows[r] * p.o_stride[2];
    store_row<SLICE>(slice, r, row, inside, column, p.dim_v);
    if (p.lse && column == 0 && inside && lane % 4 == 0)
      p.lse[batch * p.lse_stride[0] + out_head * p.lse_stride[1] + rows[r]] =
          state.sum[r] > 0.f ? fmaf(state.max[r], p.scale, __logf(state.sum[r])) : NEG_INF;
  }
}
