// hopper_fwd: fused attention for sm_90a on TMA, mbarriers and wgmma.
//
// One producer thread streams Q, K and V tiles into shared memory; CONSUMERS warpgroups own 64 query rows each and
// walk the visible keys right to left, so that the masked tiles come first. K and V have rings of STAGES tiles with
// a full barrier (filled by the copy engine) and an empty barrier (one arrival per consumer warp) per slot.
//
// OVERLAP: S of tile n is computed together with O += P·V of tile n+1, and the softmax of tile n runs while P·V is
// still on the tensor cores. PINGPONG: the warpgroups take turns to issue their products, so that one's softmax
// falls under another's products.
//
//   smem: | Q (later O) | K × STAGES | V × STAGES | mbarriers |, all in 128-byte-swizzled panels of 64 columns
#include "band.cuh"
#include "warpgroup_softmax.cuh"

#ifndef CONSUMERS
#define CONSUMERS 2
#endif
#ifndef BLOCK_N
#define BLOCK_N 128
#endif
#ifndef STAGES
#define STAGES 2
#endif
#ifndef OVERLAP
#define OVERLAP 1
#endif
#ifndef PINGPONG
#define PINGPONG 1
#endif
#ifndef PERSISTENT  // 0: one tile per CTA, 1: each CTA walks tiles with a fixed stride
#define PERSISTENT 1
#endif
#ifndef LONGEST_FIRST  // order of tiles: 1 = longest rows of all heads first (causal), 0 = row blocks of one head together
#define LONGEST_FIRST 0
#endif
#ifndef SCALE_LATE  // 1: O is rescaled after P·V has finished; 0: before the next P·V is issued, under Q·Kᵀ
#define SCALE_LATE 1
#endif
#ifndef PRECISE_KEYS  // rows that see fewer keys than this keep P to 16 mantissa bits (bf16 only); 0 = never
#define PRECISE_KEYS (DTYPE_BF16 ? 128 : 0)
#endif
#ifndef CONSUMER_REGS
#define CONSUMER_REGS (CONSUMERS == 3 ? 160 : 240)
#endif
#ifndef PRODUCER_REGS
#define PRODUCER_REGS (CONSUMERS == 3 ? 32 : 24)
#endif

namespace {

constexpr int BLOCK_M = 64 * CONSUMERS;
constexpr int THREADS = 128 * (CONSUMERS + 1);
constexpr int QK_PANELS = (HEAD_DIM + PANEL - 1) / PANEL;
constexpr int V_PANELS = (VALUE_DIM + PANEL - 1) / PANEL;
constexpr int Q_PANEL_BYTES = BLOCK_M * 128;
constexpr int KV_PANEL_BYTES = BLOCK_N * 128;
constexpr int Q_BYTES = QK_PANELS * Q_PANEL_BYTES;
constexpr int O_BYTES = V_PANELS * Q_PANEL_BYTES;
constexpr int K_BYTES = QK_PANELS * KV_PANEL_BYTES;
constexpr int V_BYTES = V_PANELS * KV_PANEL_BYTES;
constexpr int K_OFFSET = Q_BYTES > O_BYTES ? Q_BYTES : O_BYTES;
constexpr int V_OFFSET = K_OFFSET + STAGES * K_BYTES;
constexpr int BARRIER_OFFSET = V_OFFSET + STAGES * V_BYTES;
// barriers: Q full, Q empty, then K full, K empty, V full, V empty per stage
constexpr int SMEM_BYTES = BARRIER_OFFSET + 8 * (2 + 4 * STAGES);
static_assert(HEAD_DIM % 16 == 0 && VALUE_DIM % 16 == 0 && BLOCK_N % 16 == 0 && BLOCK_N <= 256, "tile shapes");
static_assert(SMEM_BYTES <= 232448, "shared memory of one CTA on sm_90");

constexpr int PINGPONG_BARRIER = 1;                     // + warpgroup
constexpr int EPILOGUE_BARRIER = PINGPONG_BARRIER + 3;  // + warpgroup

// A slot of a ring and the parity of its current round.
struct RingPosition {
  int slot = 0;
  u32 parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == STAGES) slot = 0, parity ^= 1;
  }
};

// One unit of work: 64·CONSUMERS rows of one head, and the key tiles that it sees.
struct Tile {
  int m0, m_last, head, head_kv, batch;
  int first, count;  // key tiles [first, first + count)
  bool precise;
};

__device__ __forceinline__ Tile tile_at(const SdpaParams& p, int index) {
  const int m_blocks = (p.seq_q + BLOCK_M - 1) / BLOCK_M;
  int m_block, head;
  if (LONGEST_FIRST) {
    // Sections of heads whose keys and values stay in L2 together; inside one, the longest rows first.
    const int heads = p.heads_q * p.batch;
    constexpr long long L2_BUDGET_BYTES = 24ll << 20;
    const long long kv_bytes = (long long)p.seq_kv * (p.dim_qk + p.dim_v) * 2;
    const int fit = int(min((long long)heads, max(1ll, L2_BUDGET_BYTES / kv_bytes))) * (p.heads_q / p.heads_kv);
    const int section = index / (fit * m_blocks);
    const int inside = index - section * fit * m_blocks;
    const int section_heads = min(fit, heads - section * fit);
    m_block = m_blocks - 1 - inside / section_heads;
    head = section * fit + inside % section_heads;
  } else {
    m_block = m_blocks - 1 - index % m_blocks;
    head = index / m_blocks;
  }
  Tile t;
  t.m0 = m_block * BLOCK_M;
  t.m_last = min(t.m0 + BLOCK_M, p.seq_q) - 1;
  t.head = head % p.heads_q;
  t.batch = head / p.heads_q;
  t.head_kv = t.head / (p.heads_q / p.heads_kv);
  const int key_first = max(0, t.m0 + p.band_lo);
  const int key_last = min(p.seq_kv - 1, t.m_last + p.band_hi);
  t.first = key_first / BLOCK_N;
  t.count = key_last >= key_first ? key_last / BLOCK_N - t.first + 1 : 0;
  t.precise = PRECISE_KEYS > 0 && any_row_sees_fewer(p, t.m0, t.m_last, PRECISE_KEYS);
  return t;
}

// The tiles of this CTA: every other round runs backwards, so that no CTA always gets the longest of a round.
struct Schedule {
  int total, round = 0;
  __device__ __forceinline__ explicit Schedule(const SdpaParams& p)
      : total((p.seq_q + BLOCK_M - 1) / BLOCK_M * p.heads_q * p.batch) {}
  __device__ __forceinline__ int index() const {
    if (!PERSISTENT) return round == 0 ? int(blockIdx.x) : total;
    const int offset = LONGEST_FIRST && (round & 1) ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    return round * int(gridDim.x) + offset;
  }
  // A backward round may leave this CTA without a tile while others still have one: rounds end, not tiles.
  __device__ __forceinline__ bool done() const { return PERSISTENT ? round * int(gridDim.x) >= total : round > 0; }
};

__device__ __forceinline__ void multiply_qk(float (&s)[BLOCK_N / 2], u64 q_desc, u32 k_smem) {
  const u64 k_desc = wgmma_descriptor(k_smem);
#pragma unroll
  for (int k = 0; k < HEAD_DIM / 16; ++k) {
    const int inside = (k % 4) * 2;  // 32 bytes per k16 step, in units of 16
    Wgmma<BLOCK_N>::ss(s, q_desc + inside + (k / 4) * (Q_PANEL_BYTES >> 4), k_desc + inside + (k / 4) * (KV_PANEL_BYTES >> 4), k > 0);
  }
  wgmma_commit();
}

__device__ __forceinline__ void multiply_pv(float (&o)[VALUE_DIM / 2], const u32 (&packed)[BLOCK_N / 4], u32 v_smem) {
  const u64 v_desc = wgmma_descriptor(v_smem, KV_PANEL_BYTES);
#pragma unroll
  for (int k = 0; k < BLOCK_N / 16; ++k)
    Wgmma<VALUE_DIM>::rs(o, packed[4 * k], packed[4 * k + 1], packed[4 * k + 2], packed[4 * k + 3], v_desc + k * (2048 >> 4), 1);
  wgmma_commit();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_fwd(const __grid_constant__ SdpaParams p, const __grid_constant__ TensorMap q_map,
               const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
               const __grid_constant__ TensorMap o_map) {
  extern __shared__ __align__(1024) unsigned char smem_raw[];
  const u32 smem = smem_address(smem_raw);
  const u32 q_full = smem + BARRIER_OFFSET;
  const u32 q_empty = q_full + 8;
  const u32 ring_barriers = q_empty + 8;
  auto k_full = [&](int slot) { return ring_barriers + slot * 32; };
  auto k_empty = [&](int slot) { return ring_barriers + slot * 32 + 8; };
  auto v_full = [&](int slot) { return ring_barriers + slot * 32 + 16; };
  auto v_empty = [&](int slot) { return ring_barriers + slot * 32 + 24; };
  if (threadIdx.x == 0) {
    mbarrier_init(q_full, 1);
    mbarrier_init(q_empty, 4 * CONSUMERS);
#pragma unroll
    for (int slot = 0; slot < STAGES; ++slot) {
      mbarrier_init(k_full(slot), 1);
      mbarrier_init(k_empty(slot), 4 * CONSUMERS);
      mbarrier_init(v_full(slot), 1);
      mbarrier_init(v_empty(slot), 4 * CONSUMERS);
    }
    mbarrier_init_fence();
  }
  __syncthreads();

  if (threadIdx.x < 128) {
    // Producer. Waiting on an empty barrier with the opposite parity succeeds at once in the first round.
    registers_release<PRODUCER_REGS>();
    if (threadIdx.x == 0) {
      tma_prefetch_map(&q_map);
      tma_prefetch_map(&k_map);
      tma_prefetch_map(&v_map);
      RingPosition k_at, v_at;
      u32 q_parity = 0;
      for (Schedule schedule(p); !schedule.done(); ++schedule.round) {
        const int index = schedule.index();
        if (index >= schedule.total) continue;
        const Tile t = tile_at(p, index);
        auto load_k = [&](int n) {
          mbarrier_wait(k_empty(k_at.slot), k_at.parity ^ 1);
          mbarrier_expect_bytes(k_full(k_at.slot), K_BYTES);
#pragma unroll
          for (int panel = 0; panel < QK_PANELS; ++panel)
            tma_load(smem + K_OFFSET + k_at.slot * K_BYTES + panel * KV_PANEL_BYTES, &k_map, k_full(k_at.slot), panel * PANEL,
                     n * BLOCK_N, t.head_kv, t.batch, L2_EVICT_LAST);
          k_at.advance();
        };
        auto load_v = [&](int n) {
          mbarrier_wait(v_empty(v_at.slot), v_at.parity ^ 1);
          mbarrier_expect_bytes(v_full(v_at.slot), V_BYTES);
#pragma unroll
          for (int panel = 0; panel < V_PANELS; ++panel)
            tma_load(smem + V_OFFSET + v_at.slot * V_BYTES + panel * KV_PANEL_BYTES, &v_map, v_full(v_at.slot), panel * PANEL,
                     n * BLOCK_N, t.head_kv, t.batch, L2_EVICT_LAST);
          v_at.advance();
        };
        const int last = t.first + t.count - 1;
        if (t.count > 0) load_k(last);
        mbarrier_wait(q_empty, q_parity ^ 1);
        mbarrier_expect_bytes(q_full, Q_BYTES);
#pragma unroll
        for (int panel = 0; panel < QK_PANELS; ++panel)
          tma_load(smem + panel * Q_PANEL_BYTES, &q_map, q_full, panel * PANEL, t.m0, t.head, t.batch, L2_EVICT_FIRST);
        q_parity ^= 1;
        for (int n = last; n >= t.first; --n) {
          if (n > t.first) load_k(n - 1);
          load_v(n);
        }
      }
    }
  } else {
    registers_claim<CONSUMER_REGS>();
    const int warpgroup = threadIdx.x / 128 - 1;
    const int lane = threadIdx.x % 32;
    const int warp_row = warpgroup * 64 + (threadIdx.x % 128) / 32 * 16;  // first of this warp's 16 rows
    const u64 q_desc = wgmma_descriptor(smem + warpgroup * 64 * 128);
    RingPosition k_at, v_at;
    u32 q_parity = 0;
    auto release = [&](u32 barrier) {
      if (lane == 0) mbarrier_arrive(barrier);
    };
    constexpr bool TAKES_TURNS = OVERLAP && PINGPONG && CONSUMERS > 1;
    if (TAKES_TURNS && warpgroup == CONSUMERS - 1) named_barrier_arrive(PINGPONG_BARRIER, 256);

    for (Schedule schedule(p); !schedule.done(); ++schedule.round) {
      const int index = schedule.index();
      if (index >= schedule.total) continue;
      const Tile t = tile_at(p, index);
      const int rows[2] = {t.m0 + warp_row + lane / 4, t.m0 + warp_row + lane / 4 + 8};
      float o[VALUE_DIM / 2];
#pragma unroll
      for (int i = 0; i < VALUE_DIM / 2; ++i) o[i] = 0.f;
      RowState state;
      row_state_reset(state);
      float s[BLOCK_N / 2];
      u32 packed[BLOCK_N / 4];
      float shrink[2];
      auto mask_and_softmax = [&](int n) {
        if (tile_needs_mask(p, t.m0, t.m_last, n * BLOCK_N, BLOCK_N))
          mask_scores<BLOCK_N>(s, rows, n * BLOCK_N + 2 * (lane % 4), p.band_lo, p.band_hi, p.seq_kv);
        softmax_scores<BLOCK_N, true>(s, state, p.scale_log2, shrink);
      };
      mbarrier_wait(q_full, q_parity);
      q_parity ^= 1;

      if (!OVERLAP || (PRECISE_KEYS > 0 && t.precise)) {
        for (int n = t.first + t.count - 1; n >= t.first; --n) {
          mbarrier_wait(k_full(k_at.slot), k_at.parity);
          wgmma_fence();
          multiply_qk(s, q_desc, smem + K_OFFSET + k_at.slot * K_BYTES);
          wgmma_wait<0>();
          pin_registers(s);
          release(k_empty(k_at.slot));
          k_at.advance();
          mask_and_softmax(n);
          pack_probabilities<BLOCK_N>(s, packed);
          scale_rows(o, shrink);
          mbarrier_wait(v_full(v_at.slot), v_at.parity);
          pin_registers(o);
          pin_registers(packed);
          wgmma_fence();
          multiply_pv(o, packed, smem + V_OFFSET + v_at.slot * V_BYTES);
          wgmma_wait<0>();
          pin_registers(o);
          if (PRECISE_KEYS > 0 && t.precise) {
            pack_residual<BLOCK_N>(s, packed);
            pin_registers(packed);
            wgmma_fence();
            multiply_pv(o, packed, smem + V_OFFSET + v_at.slot * V_BYTES);
            wgmma_wait<0>();
            pin_registers(o);
          }
          release(v_empty(v_at.slot));
          v_at.advance();
        }
      } else if (t.count > 0) {
        int n = t.first + t.count - 1;
        mbarrier_wait(k_full(k_at.slot), k_at.parity);
        wgmma_fence();
        multiply_qk(s, q_desc, smem + K_OFFSET + k_at.slot * K_BYTES);
        wgmma_wait<0>();
        pin_registers(s);
        release(k_empty(k_at.slot));
        k_at.advance();
        mask_and_softmax(n);
        pack_probabilities<BLOCK_N>(s, packed);
        for (--n; n >= t.first; --n) {
          mbarrier_wait(k_full(k_at.slot), k_at.parity);
          if (TAKES_TURNS) named_barrier_sync(PINGPONG_BARRIER + warpgroup, 256);
          pin_registers(s);
          pin_registers(packed);
          pin_registers(o);
          wgmma_fence();
          multiply_qk(s, q_desc, smem + K_OFFSET + k_at.slot * K_BYTES);
          if (!SCALE_LATE) scale_rows(o, shrink);
          mbarrier_wait(v_full(v_at.slot), v_at.parity);
          pin_registers(o);
          wgmma_fence();
          multiply_pv(o, packed, smem + V_OFFSET + v_at.slot * V_BYTES);
          if (TAKES_TURNS) named_barrier_arrive(PINGPONG_BARRIER + (warpgroup + 1) % CONSUMERS, 256);
          wgmma_wait<1>();
          pin_registers(s);
          release(k_empty(k_at.slot));
          k_at.advance();
          mask_and_softmax(n);
          wgmma_wait<0>();
          pin_registers(o);
          pin_registers(packed);
          release(v_empty(v_at.slot));
          v_at.advance();
          pack_probabilities<BLOCK_N>(s, packed);
          if (SCALE_LATE) scale_rows(o, shrink);
        }
        if (!SCALE_LATE) scale_rows(o, shrink);
        mbarrier_wait(v_full(v_at.slot), v_at.parity);
        pin_registers(o);
        pin_registers(packed);
        wgmma_fence();
        multiply_pv(o, packed, smem + V_OFFSET + v_at.slot * V_BYTES);
        wgmma_wait<0>();
        pin_registers(o);
        release(v_empty(v_at.slot));
        v_at.advance();
      }

      // Normalise, stage this warp's 16 rows where its Q rows were, and let the copy engine store them.
      reduce_row_sums(state);
      float inverse[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        inverse[r] = state.sum[r] > 0.f ? 1.f / state.sum[r] : 0.f;
        if (p.lse && lane % 4 == 0 && rows[r] < p.seq_q)
          p.lse[t.batch * p.lse_stride[0] + t.head * p.lse_stride[1] + rows[r]] =
              state.sum[r] > 0.f ? fmaf(state.max[r], p.scale, __logf(state.sum[r])) : NEG_INF;
      }
      scale_rows(o, inverse);
      named_barrier_sync(EPILOGUE_BARRIER + warpgroup, 128);  // no warp still reads this warpgroup's Q
      const int store_row = warp_row + (lane & 15);
#pragma unroll
      for (int j = 0; j < VALUE_DIM / 8; j += 2) {
        const int chunk = j % 8 + (lane >> 4);
        stmatrix_x4(smem + (j / 8) * Q_PANEL_BYTES + panel_offset(store_row, chunk), pack_pair(o[4 * j], o[4 * j + 1]),
                    pack_pair(o[4 * j + 2], o[4 * j + 3]), pack_pair(o[4 * j + 4], o[4 * j + 5]),
                    pack_pair(o[4 * j + 6], o[4 * j + 7]));
      }
      async_proxy_fence();
      __syncwarp();
      if (lane == 0) {
#pragma unroll
        for (int panel = 0; panel < V_PANELS; ++panel)
          tma_store(&o_map, smem + panel * Q_PANEL_BYTES + warp_row * 128, panel * PANEL, t.m0 + warp_row, t.head, t.batch);
        tma_store_commit();
        tma_store_wait_read();
        mbarrier_arrive(q_empty);
      }
      __syncwarp();
    }
  }
}
