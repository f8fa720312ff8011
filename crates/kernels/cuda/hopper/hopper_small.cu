// hopper_small: attention for problems that do not fill the machine (short sequences, decoding).
//
// The keys of one block of query rows are split over the WG_N warpgroups of a CTA and the CLUSTER CTAs of a cluster
// (PARTS in all). Every warpgroup owns a ring of STAGES key tiles, filled by the copy engine before anything is
// waited for. Where all tiles of a part fit its ring there is no loop: the products of one tile run under the softmax of
// its neighbours (two sets of scores), in straight code for each number of tiles.
//
// The merge happens in registers, in two steps: first each warpgroup of a CTA collects its share of the columns from
// the others (through shared memory), then each CTA of the cluster collects its share of those (through distributed
// shared memory, whose bandwidth is low: this order halves the traffic). Sender and receiver are the same thread of
// two warpgroups, so what is exchanged needs no layout: one float4 per thread and eight columns. Between CTAs the stores
// themselves report their arrival to an mbarrier of the receiver, which saves a cluster barrier.
//
//   rows:    64·WG_M, made of PACK_HEADS query heads (of one key head) × 64·WG_M / PACK_HEADS positions
//   columns: of VALUE_DIM, warpgroup n collects [n·WG_COLUMNS, …), of which the CTA of rank r finishes [r·SLICE, …)
//   smem:    | Q | (K tile, V tile) × STAGES, later messages, × WG_N | columns, statistics of the cluster | mbarriers |
#include "nonfinite_fallback.cuh"
#include "barrier.cuh"
#include "cluster.cuh"
#include "launch.cuh"
#include "lse.cuh"
#include "mask.cuh"
#include "mma.cuh"
#include "score.cuh"
#include "store.cuh"
#include "wgmma.cuh"

template <int VALUE>
struct Constant {
  static constexpr int value = VALUE;
};

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
constexpr int KV_PANEL_BYTES = BLOCK_N * 128;
constexpr int K_BYTES = QK_PANELS * KV_PANEL_BYTES;
constexpr int V_BYTES = V_PANELS * KV_PANEL_BYTES;

constexpr int KV_OFFSET = QK_PANELS * Q_PANEL_BYTES;
// What one warpgroup sends to another: per thread one float4 for every eight columns, then its (m, l) for two rows.
constexpr int WG_MESSAGE_BYTES = 128 * (WG_COLUMNS / 8 + 1) * 16;
constexpr int CTA_MESSAGE_BYTES = 128 * (SLICE / 8) * 16;
// Messages inside the CTA lie in the sender's ring, which it has finished reading: [sender's ring][wg_m][receiver].
constexpr int RING_BYTES = STAGES * (K_BYTES + V_BYTES);
static_assert(WG_M * (WG_N - 1) * WG_MESSAGE_BYTES <= RING_BYTES, "messages fit the ring");
constexpr int ARRIVALS_OFFSET = KV_OFFSET + WG_N * RING_BYTES;  // [warpgroup][sender's rank]
constexpr int STATISTICS_OFFSET = ARRIVALS_OFFSET + WG_M * WG_N * (CLUSTER - 1) * CTA_MESSAGE_BYTES;  // [rank][wg_n][row]
constexpr int STATISTICS_BYTES = CLUSTER > 1 ? PARTS * ROWS * 8 : 0;
constexpr int BARRIER_OFFSET = STATISTICS_OFFSET + STATISTICS_BYTES;
// barriers: Q, columns and statistics from the cluster, one spare, then (K, V) per key warpgroup and stage
constexpr int LAYOUT_BYTES = BARRIER_OFFSET + 16 * (2 + WG_N * STAGES);
// ONE_CTA_PER_SM: more than half of an SM's shared memory.
constexpr int ASKED_BYTES = ONE_CTA_PER_SM && LAYOUT_BYTES < 116736 ? 116736 : LAYOUT_BYTES;
// Straight code: where two sets of scores fit the registers beside P and O any number of tiles that fits the ring, otherwise one.
constexpr bool TWO_SETS = THREADS * CTAS_PER_SM <= 256 && 5 * BLOCK_N / 4 + VALUE_DIM / 2 <= 200;
constexpr int STRAIGHT_MAX = TWO_SETS ? STAGES : 1;
constexpr int KNOWN_TILES = OWN_TILES <= STRAIGHT_MAX ? OWN_TILES : 0;
constexpr int FEW_TILES = STRAIGHT_MAX > 1 ? 2 : 1;  // worked on by the same code, the missing ones as hidden ones
static_assert(LOOP || FEW_TILES == 2, "two tiles at once");
static_assert(SLICE % 8 == 0 && HEAD_DIM % 16 == 0 && BLOCK_N % 16 == 0 && BLOCK_N <= 256, "tile shapes");
static_assert(ROWS % PACK_HEADS == 0 && POSITIONS <= 256, "head packing");
static_assert(ASKED_BYTES == DYNAMIC_SMEM_BYTES, "the manifest's dynamic_smem is the size of this layout");

// Lists of MEMBERS that leave one out: the place of `other` in `self`'s list, and who stands in a place.
template <int MEMBERS>
__device__ __forceinline__ int place_without(int self, int other) {
  return MEMBERS == 2 ? 0 : other < self ? other : other - 1;
}
template <int MEMBERS>
__device__ __forceinline__ int member_without(int self, int place) {
  return MEMBERS == 2 ? 1 - self : place < self ? place : place + 1;
}

// Part `own` of `all`. Selects, not a branch on `own`: inside `if (i == own)` the compiler would replace i by `own` and
// put the array into local memory to index it.
template <int PARTS, int N>
__device__ __forceinline__ void take_own_part(const float (&all)[PARTS * N], int own, float (&part)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    part[i] = all[i];
#pragma unroll
    for (int k = 1; k < PARTS; ++k) part[i] = own == k ? all[k * N + i] : part[i];
  }
}

// The columns for the member in a place of `own`'s list.
template <int PARTS, int N, typename Store>
__device__ __forceinline__ void send_part(const float (&all)[PARTS * N], int own, int place, Store store) {
  const bool behind = place >= own;
#pragma unroll
  for (int j = 0; j < N / 4; ++j) {
    float4 v;
    const int here = place * N + 4 * j, next = here + N;
    v.x = behind ? all[next] : all[here], v.y = behind ? all[next + 1] : all[here + 1];
    v.z = behind ? all[next + 2] : all[here + 2], v.w = behind ? all[next + 3] : all[here + 3];
    store(128 * j * 16, v);
  }
}

// Adds a message's columns, which come in this thread's accumulator order, eight of them to a float4.
template <int COLUMNS>
__device__ __forceinline__ void add_columns(float (&o)[COLUMNS / 2], const float (&weight)[2], u32 message) {
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j) {
    const float4 part = shared_load(message + 128 * j * 16);
    o[4 * j] = fmaf(weight[0], part.x, o[4 * j]), o[4 * j + 1] = fmaf(weight[0], part.y, o[4 * j + 1]);
    o[4 * j + 2] = fmaf(weight[1], part.z, o[4 * j + 2]), o[4 * j + 3] = fmaf(weight[1], part.w, o[4 * j + 3]);
  }
}

// Adds the share of the CTA's other warpgroups: `from(place)` is the message of the sender in that place of the list, its
// columns and behind them its (m, l) of two rows. The order of the sum is fixed, so the result does not depend on who
// arrives first.
template <int OTHERS, int COLUMNS, typename From>
__device__ __forceinline__ void merge_messages(float (&o)[COLUMNS / 2], RowPair& state, float scale_log2, From from) {
  float4 stats[OTHERS == 0 ? 1 : OTHERS];  // max and sum of the first row, then of the second
  float top[2] = {state.max[0], state.max[1]};
#pragma unroll
  for (int i = 0; i < OTHERS; ++i) {
    stats[i] = shared_load(from(i) + 128 * (COLUMNS / 8) * 16);
    top[0] = fmaxf(top[0], stats[i].x), top[1] = fmaxf(top[1], stats[i].z);
  }
  const float safe[2] = {top[0] == NEG_INF ? 0.f : top[0], top[1] == NEG_INF ? 0.f : top[1]};
  const float keep[2] = {exp2_approx((state.max[0] - safe[0]) * scale_log2), exp2_approx((state.max[1] - safe[1]) * scale_log2)};
  scale_rows(o, keep);
  state.sum[0] *= keep[0], state.sum[1] *= keep[1];
#pragma unroll
  for (int i = 0; i < OTHERS; ++i) {
    const float weight[2] = {exp2_approx((stats[i].x - safe[0]) * scale_log2), exp2_approx((stats[i].z - safe[1]) * scale_log2)};
    state.sum[0] = fmaf(weight[0], stats[i].y, state.sum[0]), state.sum[1] = fmaf(weight[1], stats[i].w, state.sum[1]);
    add_columns<COLUMNS>(o, weight, from(i));
  }
  state.max[0] = top[0], state.max[1] = top[1];
}

// 1 / sum of a row's weights, one of which is 1 unless there is none.
__device__ __forceinline__ float reciprocal(float sum) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(sum));
  return sum > 0.f ? r : 0.f;
}

// wgmma_wait for a number that is constant once the loop around it is unrolled.
__device__ __forceinline__ void wgmma_wait_all_but(int pending) {
  if (pending == 0) wgmma_wait<0>();
  if (pending == 1) wgmma_wait<1>();
  if (pending == 2) wgmma_wait<2>();
}

// TILES tiles of a part at once, of which the last ones may be hidden: Q·Kᵀ of tile i+1 is on the tensor cores before the softmax of
// tile i begins (of the second tile, NEXT_LATE, before the exponentials of the first), and P·V of tile i while that of tile i+1 runs. `multiply_qk(s, tile)` and `multiply_pv(packed, tile)` wait for their
// operands and issue a product, `mask(s, tile)` hides scores in advance, and `finish()` is what can be done under the last product.
// Masks are laid out before the keys are there, where they cost nothing.
//
// `precise`: all tiles but the first are hidden, and what rounding left of P is multiplied instead of a second tile. All row blocks of a
// problem thus run the same code: a path of its own for each kind would have to come from the second-level cache, again and
// again, which takes longer than what it saves.
template <int TILES, typename MultiplyQk, typename MultiplyPv, typename Mask, typename Finish>
__device__ __forceinline__ void run_straight(float (&o)[VALUE_DIM / 2], RowPair& state, float scale_log2, bool precise,
                                             MultiplyQk multiply_qk, MultiplyPv multiply_pv, Mask mask, Finish finish) {
  constexpr int LAST = TILES - 1;
  float s[2][BLOCK_N / 2];
  u32 packed[BLOCK_N / 4];
  auto multiply_residual = [&] {
    u32 residual[BLOCK_N / 4];
    pack_residual<BLOCK_N>(s[0], packed, residual);
    multiply_pv(residual, 0);
    wgmma_wait<0>();
    pin_registers(residual);
    pin_registers(packed);
  };
  mask(s[0], 0);
  if (TILES > 1) mask(s[1], 1);
  multiply_qk(s[0], 0);
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    const bool next_now = tile < LAST && !(NEXT_LATE && tile == 0);
    if (tile > 0 && tile < LAST) mask(s[(tile + 1) % 2], tile + 1);
    if (next_now) multiply_qk(s[(tile + 1) % 2], tile + 1);
    // In flight behind this tile's scores: P·V of the tile before, and the scores of the next.
    wgmma_wait_all_but((tile > 0) + next_now);
    pin_registers(s[tile % 2]);
    if (PRECISE_KEYS > 0 && TILES == 2 && tile == 1 && precise) {
      multiply_residual();
      break;
    }
    float shrink[2];
    if (tile == 0) {
      softmax_scores<BLOCK_N, !WHOLE_TILES, NEXT_LATE ? 0 : -1>(s[0], state, scale_log2, shrink, [&] {
        if (LAST > 0 && NEXT_LATE) multiply_qk(s[1], 1);
        return 0.f;
      });
    } else {
      softmax_scores<BLOCK_N, !WHOLE_TILES, WAIT_AT>(s[tile % 2], state, scale_log2, shrink, [&] {
        wgmma_wait_all_but(tile < LAST);
        pin_registers(o);
        pin_registers(packed);
        return o[0];
      });
      scale_rows(o, shrink);
    }
    pack_probabilities<BLOCK_N>(s[tile % 2], packed);
    multiply_pv(packed, tile);
    if (PRECISE_KEYS > 0 && TILES == 1 && precise) multiply_residual();
  }
  finish();
  wgmma_wait<0>();
  pin_registers(o);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    hopper_small(const __grid_constant__ SdpaParams p, const __grid_constant__ TensorMap q_map,
                 const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map) {
  extern __shared__ __align__(1024) unsigned char smem_raw[];
  const u32 smem = shared_address(smem_raw);
  if (threadIdx.x == 0) {  // the copy engine reads the maps before anything else
    tma_prefetch_map(&q_map);
    tma_prefetch_map(&k_map);
    tma_prefetch_map(&v_map);
    if (!LATE_TRIGGER) grid_launch_dependents();
  }
  // By a shuffle: ptxas then knows that it is the same in a warp, and with it descriptors and loop bounds.
  const int warpgroup = THREADS == 128 ? 0 : __shfl_sync(~0u, int(threadIdx.x / 128), 0);
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
  const int tiles = key_last >= key_first ? (key_last - key_first) / BLOCK_N + 1 : 0;
  auto tiles_of = [&](int part) { return OWN_TILES > 0 ? OWN_TILES : tiles > part ? (tiles - part - 1) / PARTS + 1 : 0; };
  const bool precise = PRECISE_KEYS > 0 && any_row_sees_fewer(p, m0, m_last, PRECISE_KEYS);

  // Tiles worked on without a loop, hidden ones at their end included; 0: the loop takes them.
  auto straight_tiles = [&](int own) {
    if (KNOWN_TILES > 0) return KNOWN_TILES;
    if (LOOP && (own > STRAIGHT_MAX || (precise && own > 1))) return 0;
    return LOOP ? max(own, FEW_TILES) : FEW_TILES;
  };
  const int own_tiles = tiles_of(part);
  const int at_once = straight_tiles(own_tiles);

  const u32 q_full = smem + BARRIER_OFFSET;
  const u32 arrived = q_full + 8;
  auto k_full_of = [&](int wg_n) { return q_full + 32 + wg_n * STAGES * 16; };
  auto ring_of = [&](int wg_n) { return smem + KV_OFFSET + wg_n * RING_BYTES; };
  const u32 k_full = k_full_of(wg_n);
  const u32 v_full = k_full + 8;
  const u32 ring = ring_of(wg_n);
  auto load_k = [&](int wg_n, int tile, int stage) {
    const int n0 = key_first + (int(rank) * WG_N + wg_n + tile * PARTS) * BLOCK_N;
    const u32 k_smem = ring_of(wg_n) + stage * (K_BYTES + V_BYTES);
    const u32 full = k_full_of(wg_n) + stage * 16;
    mbarrier_expect_bytes(full, K_BYTES);
#pragma unroll
    for (int panel = 0; panel < QK_PANELS; ++panel)
      tma_load(k_smem + panel * KV_PANEL_BYTES, &k_map, full, panel * PANEL, n0, head_kv, batch);
  };
  auto load_v = [&](int wg_n, int tile, int stage) {
    const int n0 = key_first + (int(rank) * WG_N + wg_n + tile * PARTS) * BLOCK_N;
    const u32 v_smem = ring_of(wg_n) + stage * (K_BYTES + V_BYTES) + K_BYTES;
    const u32 full = k_full_of(wg_n) + stage * 16 + 8;
    mbarrier_expect_bytes(full, V_BYTES);
#pragma unroll
    for (int panel = 0; panel < V_PANELS; ++panel)
      tma_load(v_smem + panel * KV_PANEL_BYTES, &v_map, full, panel * PANEL, n0, head_kv, batch);
  };

  // Everything is requested before anyone waits, by one lane, in the order in which it will be needed.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (warp == 0 && elect_lane()) {
    mbarrier_init(q_full, 1);
    if (CLUSTER > 1) {
      mbarrier_init(arrived, 1);
      mbarrier_expect_bytes(arrived, WG_M * WG_N * (CLUSTER - 1) * CTA_MESSAGE_BYTES);
      mbarrier_init(arrived + 8, 1);
      mbarrier_expect_bytes(arrived + 8, (CLUSTER - 1) * WG_N * ROWS * 8);
    }
#pragma unroll
    for (int i = 0; i < 2 * WG_N * STAGES; ++i) mbarrier_init(q_full + 32 + i * 8, 1);
    mbarrier_init_fence();
    grid_wait();  // the inputs may be another kernel's outputs
    mbarrier_expect_bytes(q_full, QK_PANELS * Q_PANEL_BYTES);
#pragma unroll
    for (int panel = 0; panel < QK_PANELS; ++panel)
      tma_load(smem + panel * Q_PANEL_BYTES, &q_map, q_full, panel * PANEL, m0, head, batch);
    // Tiles whose keys, or values, a warpgroup waits for: nothing may be on its way when a CTA ends.
    auto used = [&](int wg_n, bool values) {
      const int own = tiles_of(int(rank) * WG_N + wg_n), straight = straight_tiles(own);
      return values && precise && straight > 1 ? 1 : max(own, straight);
    };
#pragma unroll
    for (int i = 0; i < STAGES * WG_N; ++i)
      if (i / WG_N < used(i % WG_N, false)) load_k(i % WG_N, i / WG_N, i / WG_N);
#pragma unroll
    for (int i = 0; i < STAGES * WG_N; ++i)  // behind all keys, which would come later otherwise
      if (i / WG_N < used(i % WG_N, true)) load_v(i % WG_N, i / WG_N, i / WG_N);
  }
  __syncwarp();
  // While the loads travel.
  if (CLUSTER > 1) cluster_arrive_relaxed();  // answered before the first remote write: every CTA has started
  __syncthreads();

  const int lane = threadIdx.x % 32;
  const int warp_row = wg_m * 64 + (threadIdx.x % 128) / 32 * 16 + lane / 4;  // this thread's rows: +0 and +8
  const int rows[2] = {m0 + warp_row % POSITIONS, m0 + (warp_row + 8) % POSITIONS};

  float o[VALUE_DIM / 2] = {};
  RowPair state;
  row_pair_reset(state);
  const u32 q_desc = wgmma_descriptor(smem + wg_m * 64 * 128);

  auto stage_smem = [&](int stage) { return ring + stage * (K_BYTES + V_BYTES); };
  auto multiply_qk_onto = [&](float(&s)[BLOCK_N / 2], int tile, bool onto) {  // onto what s holds
    const int stage = tile % STAGES;
    mbarrier_wait(k_full + stage * 16, (tile / STAGES) & 1);
    const u32 k_desc = wgmma_descriptor(stage_smem(stage));
    if (onto) pin_registers(s);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; ++k) {
      const int inside = (k % 4) * 2;  // 32 bytes per k16 step, in units of 16
      Wgmma<BLOCK_N>::ss(s, q_desc + inside + (k / 4) * (Q_PANEL_BYTES >> 4), k_desc + inside + (k / 4) * (KV_PANEL_BYTES >> 4), onto || k > 0);
    }
    wgmma_commit();
  };
  auto multiply_qk = [&](float(&s)[BLOCK_N / 2], int tile) {
    if (tile == 0) mbarrier_wait(q_full, 0);
    multiply_qk_onto(s, tile, !WHOLE_TILES);
  };
  auto multiply_pv = [&](u32(&packed)[BLOCK_N / 4], int tile) {
    const int stage = tile % STAGES;
    mbarrier_wait(v_full + stage * 16, (tile / STAGES) & 1);
    const u32 v_desc = wgmma_descriptor(stage_smem(stage) + K_BYTES, KV_PANEL_BYTES);
    pin_registers(o);
    pin_registers(packed);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < BLOCK_N / 16; ++k)
      Wgmma<VALUE_DIM>::rs(o, packed[4 * k], packed[4 * k + 1], packed[4 * k + 2], packed[4 * k + 3], v_desc + k * (2048 >> 4), 1);
    wgmma_commit();
  };
  auto first_key = [&](int tile) { return key_first + (part + tile * PARTS) * BLOCK_N; };
  auto mask = [&](float(&s)[BLOCK_N / 2], int tile) {
    if (WHOLE_TILES) return;
    mask_in_advance<BLOCK_N>(s, rows, first_key(tile) + 2 * (lane % 4), p.band_lo, p.band_hi, p.seq_kv);
    pin_registers(s);  // here, not behind the wait for the keys
  };

  // What can be done under the last product. (m, l) of this warpgroup's rows go to every other CTA: they arrive before the columns do.
  auto finish = [&] {
    if (LATE_TRIGGER) grid_launch_dependents();
    reduce_row_sums(state);
    if (CLUSTER > 1) {
      cluster_wait();
      if (lane % 4 == 0) {
        const u32 mine = smem + STATISTICS_OFFSET + ((rank * WG_N + wg_n) * ROWS + warp_row) * 8;
#pragma unroll
        for (int place = 0; place < CLUSTER - 1; ++place) {
          const int to = member_without<CLUSTER>(rank, place);
          const u32 there = cluster_address(mine, to), reports = cluster_address(arrived + 8, to);
          cluster_store_async(there, make_float2(state.max[0], state.sum[0]), reports);
          cluster_store_async(there + 64, make_float2(state.max[1], state.sum[1]), reports);
        }
      }
    }
  };

  // Any number of tiles, one after the other; rows with few keys have a second product with what rounding left of P.
  auto run_loop = [&] {
    mbarrier_wait(q_full, 0);
    for (int tile = 0; tile < own_tiles; ++tile) {
      float s[BLOCK_N / 2];
      u32 packed[BLOCK_N / 4];
      float shrink[2];
      multiply_qk_onto(s, tile, false);
      wgmma_wait<0>();
      pin_registers(s);
      if (!WHOLE_TILES && tile_needs_mask(p, m0, m_last, first_key(tile), BLOCK_N))
        mask_scores<BLOCK_N>(s, rows, first_key(tile) + 2 * (lane % 4), p.band_lo, p.band_hi, p.seq_kv);
      softmax_scores<BLOCK_N, !WHOLE_TILES>(s, state, p.scale_log2, shrink);
      pack_probabilities<BLOCK_N>(s, packed);
      if (tile > 0) scale_rows(o, shrink);
      multiply_pv(packed, tile);
      wgmma_wait<0>();
      pin_registers(o);
      if (PRECISE_KEYS > 0 && precise) {
        pack_residual<BLOCK_N>(s, packed, packed);
        multiply_pv(packed, tile);
        wgmma_wait<0>();
        pin_registers(o);
      }
      if (tile + STAGES < own_tiles) {
        named_barrier_sync(1 + wg_n, 128 * WG_M);  // all readers of this stage are done
        if (warp % 4 == 0 && wg_m == 0 && elect_lane())
          load_k(wg_n, tile + STAGES, tile % STAGES), load_v(wg_n, tile + STAGES, tile % STAGES);
        __syncwarp();
      }
    }
    finish();
  };

  auto straight = [&](auto tiles) {
    run_straight<decltype(tiles)::value>(o, state, p.scale_log2, precise, multiply_qk, multiply_pv, mask, finish);
  };
  if (KNOWN_TILES > 0)
    straight(Constant<KNOWN_TILES == 0 ? 1 : KNOWN_TILES>());
  else if (!LOOP || at_once == FEW_TILES)
    straight(Constant<FEW_TILES>());
  else if (STRAIGHT_MAX > 2 && at_once == 3)
    straight(Constant<STRAIGHT_MAX < 3 ? 1 : 3>());
  else if (STRAIGHT_MAX > 3 && at_once == 4)
    straight(Constant<STRAIGHT_MAX < 4 ? 1 : 4>());
  else if (LOOP)
    run_loop();
  const int thread = threadIdx.x % 128;
  // Step 1: columns [j·WG_COLUMNS, …) go to warpgroup j of this CTA.
  float mine[WG_COLUMNS / 2];
  take_own_part<WG_N>(o, wg_n, mine);
  if (WG_N > 1) {
    auto message = [&](int sender, int receiver) {
      return smem + KV_OFFSET + sender * RING_BYTES +
             (wg_m * (WG_N - 1) + place_without<WG_N>(sender, receiver)) * WG_MESSAGE_BYTES + thread * 16;
    };
    named_barrier_sync(1 + wg_n, 128 * WG_M);  // all readers of this ring are done
#pragma unroll
    for (int place = 0; place < WG_N - 1; ++place) {
      const u32 to = message(wg_n, member_without<WG_N>(wg_n, place));
      send_part<WG_N, WG_COLUMNS / 2>(o, wg_n, place, [&](int offset, float4 v) { shared_store(to + offset, v); });
      shared_store(to + 128 * (WG_COLUMNS / 8) * 16, make_float4(state.max[0], state.sum[0], state.max[1], state.sum[1]));
    }
    __syncthreads();
    merge_messages<WG_N - 1, WG_COLUMNS>(mine, state, p.scale_log2,
                                         [&](int place) { return message(member_without<WG_N>(wg_n, place), wg_n); });
  }

  // Where this thread's rows go.
  const int column = wg_n * WG_COLUMNS + int(rank) * SLICE;
  element* out[2];
  int out_head[2];
  bool inside[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int in_group = group_first + (warp_row + 8 * r) / POSITIONS;
    inside[r] = rows[r] < p.seq_q && in_group < group;
    out_head[r] = head_kv * group + in_group;
    out[r] = static_cast<element*>(p.o) + batch * p.o_stride[0] + out_head[r] * p.o_stride[1] + rows[r] * p.o_stride[2];
  }

  // Step 2: of these, columns [r·SLICE, …) go to the CTA of rank r.
  float slice[SLICE / 2];
  take_own_part<CLUSTER>(mine, int(rank), slice);
  float inverse[2];
  if (CLUSTER == 1) {
#pragma unroll
    for (int r = 0; r < 2; ++r) inverse[r] = reciprocal(state.sum[r]);
    scale_rows(slice, inverse);
  } else {
    auto arrival = [&](int receiver, int sender) {
      return smem + ARRIVALS_OFFSET + (warpgroup * (CLUSTER - 1) + place_without<CLUSTER>(receiver, sender)) * CTA_MESSAGE_BYTES + thread * 16;
    };
#pragma unroll
    for (int place = 0; place < CLUSTER - 1; ++place) {
      const int to = member_without<CLUSTER>(rank, place);
      const u32 message = cluster_address(arrival(to, rank), to);
      const u32 reports = cluster_address(arrived, to);
      send_part<CLUSTER, SLICE / 2>(mine, rank, place, [&](int offset, float4 v) { cluster_store_async(message + offset, v, reports); });
    }
    // While the columns travel: every CTA's weight from the statistics, which are already here.
    mbarrier_wait_cluster<SPIN_WAIT>(arrived + 8, 0);
    float top[2] = {state.max[0], state.max[1]};
    float their_max[CLUSTER - (CLUSTER > 1)][2], their_sum[CLUSTER - (CLUSTER > 1)][2];
#pragma unroll
    for (int place = 0; place < CLUSTER - 1; ++place)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const u32 from = smem + STATISTICS_OFFSET + (member_without<CLUSTER>(rank, place) * WG_N * ROWS + warp_row + 8 * r) * 8;
        float2 part[WG_N];
        float m = NEG_INF, l = 0.f;
#pragma unroll
        for (int i = 0; i < WG_N; ++i) part[i] = shared_load_pair(from + i * ROWS * 8), m = fmaxf(m, part[i].x);
#pragma unroll
        for (int i = 0; i < WG_N; ++i)
          l = WG_N == 1 ? part[i].y : fmaf(part[i].y, exp2_approx((part[i].x - (m == NEG_INF ? 0.f : m)) * p.scale_log2), l);
        their_max[place][r] = m, their_sum[place][r] = l;
        top[r] = fmaxf(top[r], m);
      }
    float keep[2], weight[CLUSTER - (CLUSTER > 1)][2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float safe = top[r] == NEG_INF ? 0.f : top[r];
      keep[r] = exp2_approx((state.max[r] - safe) * p.scale_log2);
      float sum = state.sum[r] * keep[r];
#pragma unroll
      for (int place = 0; place < CLUSTER - 1; ++place) {
        weight[place][r] = exp2_approx((their_max[place][r] - safe) * p.scale_log2);
        sum = fmaf(their_sum[place][r], weight[place][r], sum);
      }
      inverse[r] = reciprocal(sum);
      keep[r] *= inverse[r];
#pragma unroll
      for (int place = 0; place < CLUSTER - 1; ++place) weight[place][r] *= inverse[r];
      state.max[r] = top[r], state.sum[r] = sum;
    }
    scale_rows(slice, keep);
    mbarrier_wait_cluster<SPIN_WAIT>(arrived, 0);
#pragma unroll
    for (int place = 0; place < CLUSTER - 1; ++place)
      add_columns<SLICE>(slice, weight[place], arrival(rank, member_without<CLUSTER>(rank, place)));
  }

  // Mostly that is all, and a launch ends with its last warp: what else there may be is behind the way out.
  const bool stored = store_whole_rows<SLICE>(slice, out, inside, column, p.dim_v);
  const bool nonfinite = !WHOLE_TILES && isnan(state.sum[0] + state.sum[1]);
  if (__all_sync(~0u, stored && !p.lse && !nonfinite)) return;

  if (!__all_sync(~0u, stored))
#pragma unroll
    for (int r = 0; r < 2; ++r) store_row<SLICE>(slice, r, out[r], inside[r], column, p.dim_v);
  if (p.lse && column == 0 && lane % 4 == 0)
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (inside[r])
        LSE_OF(p, batch, out_head[r], rows[r]) = log_sum_exp(state.max[r], state.sum[r], p.scale);

  // A hidden score of +infinity or NaN does not stay hidden behind a mask in advance: it shows in the sum.
  if (WHOLE_TILES || !__any_sync(~0u, nonfinite)) return;
  __syncwarp();  // the lanes of a row have stored each other's columns
#pragma unroll 1
  for (int r = 0; r < 2; ++r) {
    const int row = r ? rows[1] : rows[0], in_head = r ? out_head[1] : out_head[0];
    if (isnan(r ? state.sum[1] : state.sum[0]) && (r ? inside[1] : inside[0]))
      nonfinite_fallback(p, batch, in_head, head_kv, row, column, min(column + SLICE, p.dim_v), r ? out[1] : out[0],
                        p.lse && column == 0 ? p.lse + batch * p.lse_stride[0] + in_head * p.lse_stride[1] + row : nullptr);
  }
}
