// hopper_fwd: fused attention for sm_90a on TMA, mbarriers and wgmma.
//
// One producer thread streams Q, K and V tiles into shared memory; CONSUMERS warpgroups own 64 query rows each and
// walk the visible keys right to left, so that the masked tiles come first. K and V have rings of STAGES tiles with
// a full barrier (filled by the copy engine) and an empty barrier (one arrival per consumer warp) per slot. A scheduler thread
// tells them which row block comes next, in a ring of its own.
//
// S of tile n is computed together with O += P·V of tile n+1, and the softmax of tile n runs while P·V is
// still on the tensor cores. PINGPONG: the warpgroups take turns to issue their products, so that one's softmax
// falls under another's products.
//
//   rows: 64·CONSUMERS, made of PACK_HEADS query heads (of one key head) × POSITIONS positions
//   smem: | Q (later O) × Q_STAGES | K × STAGES | V × STAGES | mbarriers | row blocks |, in 128-byte-swizzled panels of 64 columns
#include "barrier.cuh"
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

#ifndef CONSUMERS
#define CONSUMERS 2
#endif
#ifndef BLOCK_N
#define BLOCK_N 128
#endif
#ifndef STAGES
#define STAGES 2
#endif
#ifndef PINGPONG  // warpgroups take turns: 0 never, 1 inside the loop, 2 with the first product of a row block too
#define PINGPONG 1
#endif
#ifndef PERSISTENT  // 0: one unit of work per CTA, 1: divided up beforehand, 2: handed out by a counter
#define PERSISTENT 1
#endif
#ifndef PACK_HEADS  // query heads of one key head that share a row block
#define PACK_HEADS 1
#endif
#ifndef LONGEST_FIRST  // 1: row blocks that see most keys come first
#define LONGEST_FIRST 0
#endif
#ifndef SECTION_MIB  // heads are worked on in sections whose keys and values take this much; 0: all at once
#define SECTION_MIB 0
#endif
#ifndef PAIRED  // 1: a long and a short row block of a causal mask go to the same CTA, one after the other; 2: see row_blocks.cuh
#define PAIRED 0
#endif
#ifndef Q_STAGES  // 2: the next tile's queries arrive while this tile is still being worked on
#define Q_STAGES 2
#endif
#ifndef Q_IN_REGS  // 1: the queries of a row block are held in registers; 0: every product reads them from shared memory
#define Q_IN_REGS 0
#endif
#ifndef STORE_DIRECT  // 1: O goes from registers to global memory; 0: through shared memory and the copy engine
#define STORE_DIRECT 1
#endif
#ifndef CTAS_PER_SM
#define CTAS_PER_SM 1
#endif
#ifndef SCALE_LATE  // 1: O is rescaled after P·V has finished; 0: before the next P·V is issued, under Q·Kᵀ
#define SCALE_LATE 1
#endif
#ifndef WAIT_AT  // P·V is waited for after so many eighths of the next tile's exponentials; -1: before its maximum
#define WAIT_AT 4
#endif
#ifndef USE_VIMNMX3  // 1: maxima of unmasked tiles are found as integers, three at a time
#define USE_VIMNMX3 0
#endif
#ifndef SPLIT_MASKED_LOOP  // 1: tiles with and without a mask have code of their own; 0: one code that asks
#define SPLIT_MASKED_LOOP 1
#endif
#ifndef WHOLE_TILES  // 1: every key tile is full and nothing is masked
#define WHOLE_TILES 0
#endif
#ifndef PRECISE_KEYS  // rows that see fewer keys than this keep P to 16 mantissa bits (bf16 only); 0 = never
#define PRECISE_KEYS (DTYPE_BF16 ? 256 : 0)
#endif
#include "row_blocks.cuh"  // for the values above

namespace {

constexpr int THREADS = 128 * (CONSUMERS + 1);
// Registers per thread at the start, and how the warpgroups share them out afterwards.
constexpr int ENTRY_REGS = 65536 / (CTAS_PER_SM * THREADS) / 8 * 8;
constexpr int PRODUCER_REGS = CONSUMERS >= 3 ? 32 : 24;
constexpr int CONSUMER_SHARE = (ENTRY_REGS * (CONSUMERS + 1) - PRODUCER_REGS) / CONSUMERS / 8 * 8;
constexpr int CONSUMER_REGS = CONSUMER_SHARE < 240 ? CONSUMER_SHARE : 240;
// Whether what rounding leaves of P has room beside everything else while products and softmax overlap.
constexpr bool RESIDUAL_FITS =
    PRECISE_KEYS > 0 && BLOCK_N + VALUE_DIM / 2 + (Q_IN_REGS ? HEAD_DIM / 4 : 0) + 40 <= CONSUMER_REGS;
constexpr int QK_PANELS = (HEAD_DIM + PANEL - 1) / PANEL;
constexpr int V_PANELS = (VALUE_DIM + PANEL - 1) / PANEL;
constexpr int Q_PANEL_BYTES = BLOCK_M * 128;
constexpr int KV_PANEL_BYTES = BLOCK_N * 128;
constexpr int Q_BYTES = QK_PANELS * Q_PANEL_BYTES;
constexpr int O_BYTES = V_PANELS * Q_PANEL_BYTES;
constexpr int K_BYTES = QK_PANELS * KV_PANEL_BYTES;
constexpr int V_BYTES = V_PANELS * KV_PANEL_BYTES;
constexpr int Q_SLOT_BYTES = !STORE_DIRECT && O_BYTES > Q_BYTES ? O_BYTES : Q_BYTES;
constexpr int K_OFFSET = Q_STAGES * Q_SLOT_BYTES;
constexpr int V_OFFSET = K_OFFSET + STAGES * K_BYTES;
constexpr int BARRIER_OFFSET = V_OFFSET + STAGES * V_BYTES;
// barriers: (full, empty) of every Q slot and of every Q tile published, the next row block asked for, one spare, then K full, K empty,
// V full, V empty per stage
constexpr int WORK_SLOTS = 2;
constexpr int WORK_OFFSET = BARRIER_OFFSET + 16 * Q_STAGES + 16 * WORK_SLOTS + 16 + 32 * STAGES;
constexpr int SMEM_BYTES = WORK_OFFSET + WORK_SLOTS * int(sizeof(Work));
static_assert(HEAD_DIM % 16 == 0 && VALUE_DIM % 16 == 0 && BLOCK_N % 16 == 0 && BLOCK_N <= 256, "tile shapes");
static_assert(SMEM_BYTES <= 232448, "shared memory of one CTA on sm_90");

// The copy engine's reading of a stored row block is waited for under the first product of the next one, which has another slot.
constexpr bool STORE_LATER = !STORE_DIRECT && Q_STAGES > 1;

constexpr int PINGPONG_BARRIER = 1;                             // + warpgroup
constexpr int EPILOGUE_BARRIER = PINGPONG_BARRIER + CONSUMERS;  // + warpgroup

// How often a ring of SLOTS has been used: the slot, and the parity of its current round.
template <int SLOTS>
struct RingPosition {
  u32 uses = 0;
  __device__ __forceinline__ int slot() const { return uses % SLOTS; }
  __device__ __forceinline__ u32 parity() const { return uses / SLOTS & 1; }
  __device__ __forceinline__ void advance() { ++uses; }
};

// The first row of this thread's warp in the row block. Worked out where it is needed instead of kept in a register.
__device__ __forceinline__ int first_row_of_warp() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread / 32 * 16 - 64;
}

// A warpgroup's queries as the A operand of Q·Kᵀ: where they lie or, Q_IN_REGS, four registers for each k16 step.
struct Queries {
  u32 descriptor;
  u32 fragments[Q_IN_REGS ? HEAD_DIM / 16 : 1][4];

  __device__ __forceinline__ void read(u32 q_smem, int warpgroup, int warp_row, int lane) {
    descriptor = wgmma_descriptor(q_smem + warpgroup * 64 * 128);
#pragma unroll
    for (int k = 0; k < (Q_IN_REGS ? HEAD_DIM / 16 : 0); ++k)
      ldmatrix_x4(fragments[k], q_smem + (k / 4) * Q_PANEL_BYTES + panel_offset(warp_row + (lane & 15), (k % 4) * 2 + (lane >> 4)));
  }
};

__device__ __forceinline__ void multiply_qk(float (&s)[BLOCK_N / 2], const Queries& q, u32 k_smem) {
  const u32 k_desc = wgmma_descriptor(k_smem);
#pragma unroll
  for (int k = 0; k < HEAD_DIM / 16; ++k) {
    const int inside = (k % 4) * 2;  // 32 bytes per k16 step, in units of 16
    const u32 b = k_desc + inside + (k / 4) * (KV_PANEL_BYTES >> 4);
    if (Q_IN_REGS) {
      const u32(&a)[4] = q.fragments[Q_IN_REGS ? k : 0];
      Wgmma<BLOCK_N>::template rs<0>(s, a[0], a[1], a[2], a[3], b, k > 0);
    } else {
      Wgmma<BLOCK_N>::ss(s, q.descriptor + inside + (k / 4) * (Q_PANEL_BYTES >> 4), b, k > 0);
    }
  }
  wgmma_commit();
}

__device__ __forceinline__ void multiply_pv(float (&o)[VALUE_DIM / 2], const u32 (&packed)[BLOCK_N / 4], u32 v_smem) {
  const u32 v_desc = wgmma_descriptor(v_smem, KV_PANEL_BYTES);
#pragma unroll
  for (int k = 0; k < BLOCK_N / 16; ++k)
    Wgmma<VALUE_DIM>::rs(o, packed[4 * k], packed[4 * k + 1], packed[4 * k + 2], packed[4 * k + 3], v_desc + k * (2048 >> 4), 1);
  wgmma_commit();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    hopper_fwd(const __grid_constant__ SdpaParams p, const __grid_constant__ TensorMap q_map,
               const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
               const __grid_constant__ TensorMap o_map) {
  extern __shared__ __align__(1024) unsigned char smem_raw[];
  const u32 smem = shared_address(smem_raw);
  const u32 barriers = smem + BARRIER_OFFSET;
  const u32 work_barriers = barriers + 16 * Q_STAGES;
  const u32 work_wanted = work_barriers + 16 * WORK_SLOTS;
  const u32 ring_barriers = work_wanted + 16;
  auto work_slot = [&](int slot) { return smem + WORK_OFFSET + slot * int(sizeof(Work)); };
  auto q_full = [&](int slot) { return barriers + slot * 16; };
  auto q_empty = [&](int slot) { return barriers + slot * 16 + 8; };
  auto work_full = [&](int slot) { return work_barriers + slot * 16; };
  auto work_empty = [&](int slot) { return work_barriers + slot * 16 + 8; };
  auto k_full = [&](int slot) { return ring_barriers + slot * 32; };
  auto k_empty = [&](int slot) { return ring_barriers + slot * 32 + 8; };
  auto v_full = [&](int slot) { return ring_barriers + slot * 32 + 16; };
  auto v_empty = [&](int slot) { return ring_barriers + slot * 32 + 24; };
  if (threadIdx.x == 0) {
    tma_prefetch_map(&q_map);
    tma_prefetch_map(&k_map);
    tma_prefetch_map(&v_map);
#pragma unroll
    for (int slot = 0; slot < Q_STAGES; ++slot) {
      mbarrier_init(q_full(slot), 1);
      mbarrier_init(q_empty(slot), 4 * CONSUMERS);
    }
    mbarrier_init(work_wanted, 1);
#pragma unroll
    for (int slot = 0; slot < WORK_SLOTS; ++slot) {
      mbarrier_init(work_full(slot), 1);
      mbarrier_init(work_empty(slot), 4 * CONSUMERS + 1);
    }
#pragma unroll
    for (int slot = 0; slot < STAGES; ++slot) {
      mbarrier_init(k_full(slot), 1);
      mbarrier_init(k_empty(slot), 4 * CONSUMERS);
      mbarrier_init(v_full(slot), 1);
      mbarrier_init(v_empty(slot), 4 * CONSUMERS);
    }
    mbarrier_init_fence();
    grid_launch_dependents();
  }
  __syncthreads();

  if (threadIdx.x < 128) {
    // Waiting on an empty barrier with the opposite parity succeeds at once in the first round.
    registers_release<PRODUCER_REGS>();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (warp == 1 && elect_lane()) {
      // Scheduler. Consumers give a slot back when they have stored the Q tile it published. A counter is asked for the next one as
      // late as the producer can bear: who takes a long one early is the last to finish.
      Schedule schedule;
      RingPosition<WORK_SLOTS> work_at;
      for (bool more = true; more; work_at.advance()) {
        const Work work = schedule.work(p);
        more = work.head >= 0;
        mbarrier_wait(work_empty(work_at.slot()), work_at.parity() ^ 1);
        publish_work(work_slot(work_at.slot()), work);
        mbarrier_arrive(work_full(work_at.slot()));
        if (PERSISTENT == 2 && work_at.uses == 0) grid_wait();  // the launch before may use the same counter
        if (PERSISTENT == 2 && more) mbarrier_wait(work_wanted, work_at.uses & 1);
        if (more) schedule.advance(p);
      }
    } else if (warp == 0 && elect_lane()) {
      // Producer.
      RingPosition<WORK_SLOTS> work_at;
      RingPosition<Q_STAGES> q_at;
      RingPosition<STAGES> k_at, v_at;
      auto load_k = [&](const Tile& t, int n) {
        mbarrier_wait(k_empty(k_at.slot()), k_at.parity() ^ 1);
        mbarrier_expect_bytes(k_full(k_at.slot()), K_BYTES);
#pragma unroll
        for (int panel = 0; panel < QK_PANELS; ++panel)
          tma_load(smem + K_OFFSET + k_at.slot() * K_BYTES + panel * KV_PANEL_BYTES, &k_map, k_full(k_at.slot()), panel * PANEL,
                   n * BLOCK_N, t.head_kv, t.batch, L2_EVICT_LAST);
        k_at.advance();
      };
      auto load_v = [&](const Tile& t, int n) {
        mbarrier_wait(v_empty(v_at.slot()), v_at.parity() ^ 1);
        mbarrier_expect_bytes(v_full(v_at.slot()), V_BYTES);
#pragma unroll
        for (int panel = 0; panel < V_PANELS; ++panel)
          tma_load(smem + V_OFFSET + v_at.slot() * V_BYTES + panel * KV_PANEL_BYTES, &v_map, v_full(v_at.slot()), panel * PANEL,
                   n * BLOCK_N, t.head_kv, t.batch, L2_EVICT_LAST);
        v_at.advance();
      };
      auto load_q = [&](const Tile& t) {
        mbarrier_wait(q_empty(q_at.slot()), q_at.parity() ^ 1);
        mbarrier_expect_bytes(q_full(q_at.slot()), Q_BYTES);
#pragma unroll
        for (int panel = 0; panel < QK_PANELS; ++panel)
          tma_load(smem + q_at.slot() * Q_SLOT_BYTES + panel * Q_PANEL_BYTES, &q_map, q_full(q_at.slot()), panel * PANEL,
                   t.m0, t.head, t.batch, L2_EVICT_FIRST);
        q_at.advance();
      };
      auto next_tile = [&](Tile& t) {  // false: there is no more
        mbarrier_wait(work_full(work_at.slot()), work_at.parity());
        const Work work = read_work(work_slot(work_at.slot()));
        mbarrier_arrive(work_empty(work_at.slot()));
        work_at.advance();
        if (work.head >= 0) t = tile_of(p, work);
        return work.head >= 0;
      };
      grid_wait();  // the inputs may be another kernel's outputs
      Tile t;
      bool more = next_tile(t);
      if (more) {
        load_q(t);
        if (t.count > 0) load_k(t, t.last());
      }
      // Everything in the order in which it is consumed: the next row block's first keys come before this one's last
      // values. Its queries too, unless they have to wait until this block's have been used.
      while (more) {
        auto want_more = [&] {
          if (PERSISTENT == 2) mbarrier_arrive(work_wanted);
        };
        if (t.count < 2) want_more();
        for (int n = t.last(); n > t.first; --n) {
          if (n == min(t.last(), t.first + 2)) want_more();
          load_k(t, n - 1);
          load_v(t, n);
        }
        Tile next = t;
        more = next_tile(next);
        if (more && Q_STAGES > 1) load_q(next);
        if (more && next.count > 0) load_k(next, next.last());
        if (t.count > 0) load_v(t, t.first);
        if (more && Q_STAGES == 1) load_q(next);
        t = next;
      }
    }
  } else {
    registers_claim<CONSUMER_REGS>();
    const int warpgroup = threadIdx.x / 128 - 1;
    const int lane = threadIdx.x % 32;
    RingPosition<Q_STAGES> q_at;
    RingPosition<STAGES> k_at;
    // Values are used behind keys: their place follows from that of the next keys, which saves a register.
    auto v_at = [&](int behind) { return RingPosition<STAGES>{k_at.uses - behind}; };
    auto release = [&](u32 barrier) {
      if (lane == 0) mbarrier_arrive(barrier);
    };
    constexpr bool TAKES_TURNS = PINGPONG > 0 && CONSUMERS > 1;
    constexpr bool FIRST_TOO = TAKES_TURNS && PINGPONG > 1;
    auto await_turn = [&] { named_barrier_sync(PINGPONG_BARRIER + warpgroup, 256); };
    auto pass_turn = [&] { named_barrier_arrive(PINGPONG_BARRIER + (warpgroup + 1) % CONSUMERS, 256); };
    if (TAKES_TURNS && warpgroup == CONSUMERS - 1) pass_turn();

    float o[VALUE_DIM / 2];
    float s[BLOCK_N / 2];
    u32 packed[BLOCK_N / 4];
    float shrink[2];
    bool rescale;
    RowPair state;
    auto k_tile = [&] { return smem + K_OFFSET + k_at.slot() * K_BYTES; };
    auto v_tile = [&] { return smem + V_OFFSET + v_at(1).slot() * V_BYTES; };
    // Queries in registers are needed no more in shared memory, others by whoever has read its last keys of a row block.
    auto release_k = [&](const Tile& t, int n) {
      release(k_empty(k_at.slot()));
      k_at.advance();
      if (STORE_DIRECT && !Q_IN_REGS && n == t.first) release(q_empty(q_at.slot()));
    };
    auto release_v = [&](int behind = 1) { release(v_empty(v_at(behind).slot())); };
    auto await_product = [&] {  // of P·V, in the middle of the next tile's softmax
      wgmma_wait<0>();
      pin_registers(o);
      pin_registers(packed);
      release_v(2);
      // Where O is not rescaled right behind the softmax, an accumulator that is looked at would have to be kept, and ptxas would
      // serialise the products.
      return SCALE_LATE && !SKIP_RESCALE ? o[0] : 0.f;
    };
    auto needs_mask = [&](const Tile& t, int n) {
      const int wg_first = PACK_HEADS > 1 ? t.m0 : t.m0 + warpgroup * 64;
      const int wg_last = PACK_HEADS > 1 ? t.m_last : min(wg_first + 63, p.seq_q - 1);
      return !WHOLE_TILES && tile_needs_mask(p, wg_first, wg_last, n * BLOCK_N, BLOCK_N);
    };
    auto mask_tile = [&](const Tile& t, int n) {
      const int row = t.m0 + first_row_of_warp() % POSITIONS + lane / 4;
      const int rows[2] = {row, row + 8};
      mask_scores<BLOCK_N>(s, rows, n * BLOCK_N + 2 * (lane % 4), p.band_lo, p.band_hi, p.seq_kv);
    };
    auto softmax = [&](auto maybe_masked, bool masked, auto wait) {
      constexpr bool MAYBE_MASKED = decltype(maybe_masked)::value;
      rescale = softmax_scores<BLOCK_N, MAYBE_MASKED, SKIP_RESCALE, WAIT_AT>(
          s, state, p.scale_log2, shrink, wait, USE_VIMNMX3 && !masked);
    };
    auto mask_and_softmax = [&](const Tile& t, int n) {  // of a tile with nothing else under way: mostly one with a mask
      if (needs_mask(t, n)) mask_tile(t, n);
      softmax(Constant<!WHOLE_TILES>(), !WHOLE_TILES, NoWait());
    };
    auto rescale_output = [&] {
      if (!SKIP_RESCALE || rescale) scale_rows(o, shrink);
    };
    auto finish_store = [&] {  // of the row block before
      if (STORE_LATER && q_at.uses > 0 && elect_lane()) {
        tma_store_wait_read();
        mbarrier_arrive(q_empty((q_at.uses - 1) % Q_STAGES));
      }
    };
    auto await_k = [&] { mbarrier_wait(k_full(k_at.slot()), k_at.parity()); };
    auto await_v = [&] { mbarrier_wait(v_full(v_at(1).slot()), v_at(1).parity()); };

    for (;;) {
      const RingPosition<WORK_SLOTS> work_at = {q_at.uses};
      mbarrier_wait(work_full(work_at.slot()), work_at.parity());
      const Work work = read_work_for_warp(work_slot(work_at.slot()));
      if (work.head < 0) break;
      const Tile t = tile_of(p, work);
      int n = PACK_HEADS > 1 ? t.last() : last_seen(p, t, t.m0 + warpgroup * 64 + 63);
#pragma unroll
      for (int i = 0; i < VALUE_DIM / 2; ++i) o[i] = 0.f;
      row_pair_reset(state);
      mbarrier_wait(q_full(q_at.slot()), q_at.parity());
      Queries q;
      q.read(smem + q_at.slot() * Q_SLOT_BYTES, warpgroup, first_row_of_warp(), lane);
      if (STORE_DIRECT && (Q_IN_REGS || t.count == 0)) {
        __syncwarp();
        release(q_empty(q_at.slot()));
      }

      const bool precise = PRECISE_KEYS > 0 && t.precise;
      // Tiles to the right of all that this warpgroup's rows see: it only keeps step with the others.
      auto skip_hidden = [&](bool turns) {
        for (int skipped = t.last(); skipped > n; --skipped) {
          await_k();
          release_k(t, skipped);
          await_v();
          release_v();
          if (turns) await_turn(), pass_turn();
        }
      };
      auto run_one_by_one = [&] {
        finish_store();
        skip_hidden(false);
        for (; n >= t.first; --n) {
          await_k();
          wgmma_fence();
          multiply_qk(s, q, k_tile());
          wgmma_wait<0>();
          pin_registers(s);
          release_k(t, n);
          mask_and_softmax(t, n);
          pack_probabilities<BLOCK_N>(s, packed);
          rescale_output();
          await_v();
          pin_registers(o);
          pin_registers(packed);
          wgmma_fence();
          multiply_pv(o, packed, v_tile());
          if (precise) {  // the remainder of P is worked out under the product of P
            u32 residual[BLOCK_N / 4];
            pack_residual<BLOCK_N>(s, packed, residual);
            pin_registers(residual);
            wgmma_fence();
            multiply_pv(o, residual, v_tile());
            wgmma_wait<0>();
            pin_registers(residual);
          } else {
            wgmma_wait<0>();
          }
          pin_registers(o);
          release_v();
        }
      };
      auto run_overlapped = [&](auto with_residual) {
        constexpr bool WITH_RESIDUAL = decltype(with_residual)::value;
        u32 residual[WITH_RESIDUAL ? BLOCK_N / 4 : 1];
        auto pack = [&] {
          pack_probabilities<BLOCK_N>(s, packed);
          if constexpr (WITH_RESIDUAL) pack_residual<BLOCK_N>(s, packed, residual);
        };
        auto multiply_values = [&] {
          pin_registers(o);
          if constexpr (WITH_RESIDUAL) pin_registers(residual);
          wgmma_fence();
          multiply_pv(o, packed, v_tile());
          if constexpr (WITH_RESIDUAL) multiply_pv(o, residual, v_tile());
        };
        skip_hidden(TAKES_TURNS);
        await_k();
        if (FIRST_TOO) await_turn();
        wgmma_fence();
        multiply_qk(s, q, k_tile());
        if (FIRST_TOO) pass_turn();
        finish_store();
        wgmma_wait<0>();
        pin_registers(s);
        release_k(t, n);
        mask_and_softmax(t, n);
        pack();
        auto step = [&](auto maybe_masked, bool masked) {
          await_k();
          if (TAKES_TURNS) await_turn();
          pin_registers(s);
          pin_registers(packed);
          pin_registers(o);
          wgmma_fence();
          multiply_qk(s, q, k_tile());
          if (!SCALE_LATE) rescale_output();
          await_v();
          multiply_values();
          if (TAKES_TURNS) pass_turn();
          wgmma_wait<WITH_RESIDUAL ? 2 : 1>();
          pin_registers(s);
          release_k(t, n);
          if (masked) mask_tile(t, n);
          softmax(maybe_masked, masked, await_product);
          pack();
          if (SCALE_LATE) rescale_output();
        };
        for (--n; n >= t.first; --n) {
          const bool masked = needs_mask(t, n);
          if (!SPLIT_MASKED_LOOP || WITH_RESIDUAL)
            step(Constant<!WHOLE_TILES>(), masked);
          else if (masked)
            step(Constant<!WHOLE_TILES>(), true);
          else
            step(Constant<false>(), false);
        }
        if (!SCALE_LATE) rescale_output();
        await_v();
        pin_registers(packed);
        multiply_values();
        wgmma_wait<0>();
        pin_registers(o);
        release_v();
      };
      if (t.count == 0) {  // no key: zeros are stored
        finish_store();
      } else if (precise && !RESIDUAL_FITS) {
        run_one_by_one();
      } else if (RESIDUAL_FITS && precise) {
        run_overlapped(Constant<RESIDUAL_FITS>());
      } else {
        run_overlapped(Constant<false>());
      }

      // Read again, so that rows, head and batch are not kept in registers over the loop.
      const int slot = RingPosition<WORK_SLOTS>{q_at.uses}.slot();
      const int warp_row = first_row_of_warp();
      int m0, head, batch;
      locate(p, read_work_for_warp(work_slot(slot)), m0, head, batch);
      if (PACK_HEADS > 1) head += warp_row / POSITIONS;
      m0 += warp_row % POSITIONS;
      const int rows[2] = {m0 + lane / 4, m0 + lane / 4 + 8};
      reduce_row_sums(state);
      float inverse[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) inverse[r] = state.sum[r] > 0.f ? 1.f / state.sum[r] : 0.f;
      scale_rows(o, inverse);
      release(work_empty(slot));
      if (STORE_DIRECT) {
        element* o_head = static_cast<element*>(p.o) + batch * p.o_stride[0] + head * p.o_stride[1];
#pragma unroll
        for (int r = 0; r < 2; ++r)
          store_row<VALUE_DIM>(o, r, o_head + rows[r] * p.o_stride[2], rows[r] < p.seq_q, 0, p.dim_v);
      } else {
        // Stage this warp's 16 rows where its Q rows were, and let the copy engine store them.
        const u32 o_smem = smem + q_at.slot() * Q_SLOT_BYTES;
        named_barrier_sync(EPILOGUE_BARRIER + warpgroup, 128);  // no warp still reads this warpgroup's Q
        const int store_row = warp_row + (lane & 15);
#pragma unroll
        for (int j = 0; j < VALUE_DIM / 8; j += 2) {
          const int chunk = j % 8 + (lane >> 4);
          stmatrix_x4(o_smem + (j / 8) * Q_PANEL_BYTES + panel_offset(store_row, chunk), pack_pair(o[4 * j], o[4 * j + 1]),
                      pack_pair(o[4 * j + 2], o[4 * j + 3]), pack_pair(o[4 * j + 4], o[4 * j + 5]),
                      pack_pair(o[4 * j + 6], o[4 * j + 7]));
        }
        async_proxy_fence();
        __syncwarp();
        if (elect_lane()) {  // always the same one
#pragma unroll
          for (int panel = 0; panel < V_PANELS; ++panel)
            tma_store(&o_map, o_smem + panel * Q_PANEL_BYTES + warp_row * 128, panel * PANEL, m0, head, batch);
          tma_store_commit();
          if (!STORE_LATER) {
            tma_store_wait_read();
            mbarrier_arrive(q_empty(q_at.slot()));
          }
        }
        __syncwarp();
      }
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (p.lse && lane % 4 == 0 && rows[r] < p.seq_q)
          LSE_OF(p, batch, head, rows[r]) = log_sum_exp(state.max[r], state.sum[r], p.scale);
      q_at.advance();
    }
    if (STORE_LATER && elect_lane()) tma_store_wait_read();
  }
}
