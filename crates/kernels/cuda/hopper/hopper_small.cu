// hopper_small: attention for problems that do not fill the machine (short sequences, decoding).
//
// The keys of one block of query rows are split over the WG_N warpgroups of a CTA and the CLUSTER CTAs of a cluster
// (PARTS in all). Every warpgroup owns a ring of STAGES key tiles, filled by the copy engine before anything is
// waited for; with one tile per part there is no loop. At the end every part pushes its unnormalised O to the CTA
// that finalises those columns (distributed shared memory), one cluster barrier, and each CTA adds up and stores
// its slice of the columns.
//
//   rows:    64·WG_M, made of PACK_HEADS query heads (of one key head) × 64·WG_M / PACK_HEADS positions
//   smem:    | Q | (K tile, V tile) × STAGES × WG_N | partial O [PARTS][rows][slice] | (m, l) [PARTS][rows] | mbarriers |
#include "band.cuh"
#include "warpgroup_softmax.cuh"

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
#ifndef ALIAS_MERGE  // 1: partial results reuse the key ring (saves shared memory, costs one more barrier)
#define ALIAS_MERGE 0
#endif
#ifndef MIN_CTAS
#define MIN_CTAS 1
#endif

namespace {

constexpr int THREADS = 128 * WG_M * WG_N;
constexpr int ROWS = 64 * WG_M;
constexpr int POSITIONS = ROWS / PACK_HEADS;  // query positions of one block
constexpr int PARTS = CLUSTER * WG_N;
constexpr int SLICE = VALUE_DIM / CLUSTER;  // output columns finalised by one CTA
constexpr int SLICE_PITCH = SLICE + 8;      // floats; keeps the eight rows of one store in different banks
constexpr int QK_PANELS = (HEAD_DIM + PANEL - 1) / PANEL;
constexpr int V_PANELS = (VALUE_DIM + PANEL - 1) / PANEL;
constexpr int Q_PANEL_BYTES = ROWS * 128;
constexpr int KV_PANEL_BYTES = TILE_N * 128;
constexpr int K_BYTES = QK_PANELS * KV_PANEL_BYTES;
constexpr int V_BYTES = V_PANELS * KV_PANEL_BYTES;

constexpr int KV_OFFSET = QK_PANELS * Q_PANEL_BYTES;
constexpr int RING_END = KV_OFFSET + WG_N * STAGES * (K_BYTES + V_BYTES);
constexpr int PARTIAL_OFFSET = ALIAS_MERGE ? KV_OFFSET : RING_END;
constexpr int STATS_OFFSET = PARTIAL_OFFSET + PARTS * ROWS * SLICE_PITCH * 4;
constexpr int MERGE_END = STATS_OFFSET + PARTS * ROWS * 8;
constexpr int BARRIER_OFFSET = RING_END > MERGE_END ? RING_END : MERGE_END;
// barriers: Q, then (K, V) per key warpgroup and stage
constexpr int SMEM_BYTES = BARRIER_OFFSET + 8 * (1 + 2 * WG_N * STAGES);
static_assert(SLICE % 8 == 0 && HEAD_DIM % 16 == 0 && TILE_N % 16 == 0 && TILE_N <= 256, "tile shapes");
static_assert(ROWS % PACK_HEADS == 0 && POSITIONS <= 256, "head packing");
static_assert(SMEM_BYTES <= 232448, "shared memory of one CTA on sm_90");

__device__ __forceinline__ bool aligned16(const void* p, long long stride) {
  return ((reinterpret_cast<u64>(p) | u64(stride * 2)) & 15) == 0;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS)
    hopper_small(const __grid_constant__ SdpaParams p, const __grid_constant__ TensorMap q_map,
                 const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map) {
  extern __shared__ __align__(1024) unsigned char smem_raw[];
  const u32 smem = smem_address(smem_raw);
  const int warpgroup = threadIdx.x / 128;
  const int wg_n = warpgroup % WG_N;
  const int wg_m = warpgroup / WG_N;
  const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
  const int part = int(rank) * WG_N + wg_n;

  const int group = p.heads_q / p.heads_kv;  // query heads per key head
  const int head_blocks = (group + PACK_HEADS - 1) / PACK_HEADS;
  const int head_kv = blockIdx.y / head_blocks;
  const int group_first = blockIdx.y % head_blocks * PACK_HEADS;  // first query head within the group
  const int head = head_kv * group + group_first;
  const int batch = blockIdx.z;
  const int m0 = int(blockIdx.x / CLUSTER) * POSITIONS;
  const int m_last = min(m0 + POSITIONS, p.seq_q) - 1;

  // Visible keys of the block, cut into tiles from the first visible key on; part i takes tiles i, i+PARTS, ...
  const int key_first = max(0, m0 + p.band_lo);
  const int key_last = min(p.seq_kv - 1, m_last + p.band_hi);
  const int tiles = key_last >= key_first ? (key_last - key_first) / TILE_N + 1 : 0;
  const int own_tiles = tiles > part ? (tiles - part - 1) / PARTS + 1 : 0;
  const bool precise = PRECISE_KEYS > 0 && any_row_sees_fewer(p, m0, m_last, PRECISE_KEYS);

  const u32 q_full = smem + BARRIER_OFFSET;
  const u32 k_full = q_full + 8 + wg_n * STAGES * 16;
  const u32 v_full = k_full + 8;
  const u32 ring = smem + KV_OFFSET + wg_n * STAGES * (K_BYTES + V_BYTES);
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
    if (tile_needs_mask(p, m0, m_last, n0, TILE_N))
      mask_scores<TILE_N>(s, rows, n0 + 2 * (lane % 4), p.band_lo, p.band_hi, p.seq_kv);
    softmax_scores<TILE_N, true>(s, state, p.scale_log2, shrink);
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

  // Push: columns [r·SLICE, (r+1)·SLICE) of this part go to the CTA of rank r.
  if (CLUSTER > 1) cluster_wait();
  if (ALIAS_MERGE) {  // every ring in the cluster has been read
    if (CLUSTER > 1) {
      cluster_arrive_release();
      cluster_wait();
    } else {
      __syncthreads();
    }
  }
#pragma unroll
  for (int r = 0; r < CLUSTER; ++r) {
    const u32 partial = smem + PARTIAL_OFFSET + part * ROWS * SLICE_PITCH * 4;
    const u32 stats = smem + STATS_OFFSET + part * ROWS * 8;
    const u32 partial_at = CLUSTER > 1 ? cluster_address(partial, r) : partial;
    const u32 stats_at = CLUSTER > 1 ? cluster_address(stats, r) : stats;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + half * 8;
#pragma unroll
      for (int j = 0; j < SLICE / 8; ++j) {
        const int i = 4 * (r * (SLICE / 8) + j) + 2 * half;
        cluster_store(partial_at + (row * SLICE_PITCH + 8 * j + 2 * (lane % 4)) * 4, make_float2(o[i], o[i + 1]));
      }
      if (lane % 4 == 0) cluster_store(stats_at + row * 8, make_float2(state.max[half], state.sum[half]));
    }
  }
  if (CLUSTER > 1) {
    cluster_arrive_release();
    cluster_wait();
  } else {
    __syncthreads();
  }

  // Add up the parts of this CTA's columns, eight at a time.
  half_type* o_base = static_cast<half_type*>(p.o) + batch * p.o_stride[0] + rank * SLICE;
  const bool o_aligned = aligned16(o_base, p.o_stride[2] | p.o_stride[1]);
  const float* partials = reinterpret_cast<const float*>(smem_raw + PARTIAL_OFFSET);
  const float2* stats = reinterpret_cast<const float2*>(smem_raw + STATS_OFFSET);
  constexpr int CHUNKS = SLICE / 8;
#pragma unroll
  for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
    const int row = i / CHUNKS;
    const int chunk = i % CHUNKS;
    const int position = m0 + row % POSITIONS;
    const int in_group = group_first + row / POSITIONS;
    if (position >= p.seq_q || in_group >= group) continue;
    float top = NEG_INF;
#pragma unroll
    for (int w = 0; w < PARTS; ++w) top = fmaxf(top, stats[w * ROWS + row].x);
    const float safe = top == NEG_INF ? 0.f : top;
    float sum = 0.f, out[8] = {};
#pragma unroll
    for (int w = 0; w < PARTS; ++w) {
      const float2 stat = stats[w * ROWS + row];
      const float weight = exp2_approx((stat.x - safe) * p.scale_log2);
      sum = fmaf(weight, stat.y, sum);
      const float4* from = reinterpret_cast<const float4*>(partials + (w * ROWS + row) * SLICE_PITCH + chunk * 8);
      const float4 a = from[0], b = from[1];
      out[0] = fmaf(weight, a.x, out[0]), out[1] = fmaf(weight, a.y, out[1]);
      out[2] = fmaf(weight, a.z, out[2]), out[3] = fmaf(weight, a.w, out[3]);
      out[4] = fmaf(weight, b.x, out[4]), out[5] = fmaf(weight, b.y, out[5]);
      out[6] = fmaf(weight, b.z, out[6]), out[7] = fmaf(weight, b.w, out[7]);
    }
    const float inverse = sum > 0.f ? 1.f / sum : 0.f;
    const int out_head = head_kv * group + in_group;
    half_type* o_row = o_base + out_head * p.o_stride[1] + position * p.o_stride[2];
    const int columns = p.dim_v - int(rank) * SLICE - chunk * 8;
    u32 bits[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) bits[e] = pack_pair(out[2 * e] * inverse, out[2 * e + 1] * inverse);
    if (o_aligned && columns >= 8) {
      *reinterpret_cast<uint4*>(o_row + chunk * 8) = make_uint4(bits[0], bits[1], bits[2], bits[3]);
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e)
        if (e < columns) reinterpret_cast<u16*>(o_row)[chunk * 8 + e] = u16(bits[e / 2] >> (16 * (e % 2)));
    }
    if (p.lse && rank == 0 && chunk == 0)
      p.lse[batch * p.lse_stride[0] + out_head * p.lse_stride[1] + position] =
          sum > 0.f ? fmaf(top, p.scale, __logf(sum)) : NEG_INF;
  }
}
