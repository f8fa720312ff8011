// What a consumer warpgroup of hopper_fwd does with one Q tile: QKᵀ, softmax and PV over its KV tiles, right to left, so that the masked
// ones come first. S of tile n is computed together with O += P · V of tile n+1, and the softmax of tile n runs while PV is still on the
// tensor cores. PINGPONG: the warpgroups take turns to issue their MMAs, so that one's softmax falls under another's MMAs.
#pragma once
#include "barrier.cuh"
#include "epilogue.cuh"
#include "gemm.cuh"
#include "layout.cuh"
#include "mma.cuh"
#include "score.cuh"

namespace {

// A value that a lambda can be compiled for.
template <int VALUE>
struct Constant {
  static constexpr int value = VALUE;
};

constexpr int THREADS = 128 * (CONSUMERS + 1);
// Registers per thread at the start, and how the warpgroups share them out afterwards.
constexpr int ENTRY_REGS = 65536 / (CTAS_PER_SM * THREADS) / 8 * 8;
constexpr int PRODUCER_REGS = CONSUMERS >= 3 ? 32 : 24;
constexpr int CONSUMER_SHARE = (ENTRY_REGS * (CONSUMERS + 1) - PRODUCER_REGS) / CONSUMERS / 8 * 8;
constexpr int CONSUMER_REGS = CONSUMER_SHARE < 240 ? CONSUMER_SHARE : 240;
// Whether what rounding leaves of P has room beside everything else while MMAs and softmax overlap.
constexpr bool RESIDUAL_FITS =
    PRECISE_KEYS > 0 && BLOCK_N + VALUE_DIM / 2 + (Q_IN_REGS ? HEAD_DIM / 4 : 0) + 40 <= CONSUMER_REGS;
constexpr bool TAKES_TURNS = PINGPONG > 0 && CONSUMERS > 1;
constexpr bool FIRST_TOO = TAKES_TURNS && PINGPONG > 1;

// A warpgroup's queries as the A operand of QKᵀ: where they lie or, Q_IN_REGS, four registers for each k16 step.
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

// QKᵀ and PV of one KV tile, issued.
__device__ __forceinline__ void multiply_qk(float (&s)[BLOCK_N / 2], const Queries& q, u32 k_smem) {
  if constexpr (Q_IN_REGS)
    issue_qk<BLOCK_N, KV_PANEL_BYTES>(s, q.fragments, wgmma_descriptor(k_smem));
  else
    issue_qk<false, BLOCK_N, Q_PANEL_BYTES, KV_PANEL_BYTES>(s, q.descriptor, wgmma_descriptor(k_smem));
}
__device__ __forceinline__ void multiply_pv(float (&o)[VALUE_DIM / 2], const u32 (&packed)[BLOCK_N / 4], u32 v_smem) {
  issue_pv<BLOCK_N>(o, packed, wgmma_descriptor(v_smem, KV_PANEL_BYTES));
}

// Q tile after Q tile, until the scheduler has no more.
__device__ __forceinline__ void consume(const SdpaParams& p, const TensorMap& o_map, const Layout& layout) {
  const int warpgroup = threadIdx.x / 128 - 1;
  const int lane = threadIdx.x % 32;
  RingPosition<Q_STAGES> q_at;
  RingPosition<STAGES> k_at;
  // Values are used behind keys: their place follows from that of the next keys, which saves a register.
  auto v_at = [&](int behind) { return RingPosition<STAGES>{k_at.uses - behind}; };
  auto release = [&](u32 barrier) {
    if (lane == 0) mbarrier_arrive(barrier);
  };
  auto await_turn = [&] { named_barrier_sync(PINGPONG_BARRIER + warpgroup, 256); };
  auto pass_turn = [&] { named_barrier_arrive(PINGPONG_BARRIER + (warpgroup + 1) % CONSUMERS, 256); };
  if (TAKES_TURNS && warpgroup == CONSUMERS - 1) pass_turn();

  float o[VALUE_DIM / 2];
  float s[BLOCK_N / 2];
  u32 packed[BLOCK_N / 4];
  float shrink[2];
  bool rescale;
  RowPair state;
  auto k_tile = [&] { return layout.k(k_at.slot()); };
  auto v_tile = [&] { return layout.v(v_at(1).slot()); };
  // Queries in registers are needed no more in shared memory, others by whoever has read its last keys of a Q tile.
  auto release_k = [&](const QTile& t, int n) {
    release(layout.k_empty(k_at.slot()));
    k_at.advance();
    if (STORE_DIRECT && !Q_IN_REGS && n == t.first) release(layout.q_empty(q_at.slot()));
  };
  auto release_v = [&](int behind = 1) { release(layout.v_empty(v_at(behind).slot())); };
  auto await_pv = [&] {  // in the middle of the next tile's softmax
    wgmma_wait<0>();
    pin_registers(o);
    pin_registers(packed);
    release_v(2);
    // Where O is not rescaled right behind the softmax, an accumulator that is looked at would have to be kept, and ptxas would
    // serialise the MMAs.
    return SCALE_LATE && !SKIP_RESCALE ? o[0] : 0.f;
  };
  auto needs_mask = [&](const QTile& t, int n) {
    const int wg_first = PACK_HEADS > 1 ? t.m0 : t.m0 + warpgroup * 64;
    const int wg_last = PACK_HEADS > 1 ? t.m_last : min(wg_first + 63, p.seq_q - 1);
    return !WHOLE_TILES && tile_needs_mask(p, wg_first, wg_last, n * BLOCK_N, BLOCK_N);
  };
  auto mask_tile = [&](const QTile& t, int n) {
    const int row = t.m0 + first_row_of_warp() % POSITIONS + lane / 4;
    const int rows[2] = {row, row + 8};
    mask_scores<BLOCK_N>(s, rows, n * BLOCK_N + 2 * (lane % 4), p.band_lo, p.band_hi, p.seq_kv);
  };
  // The score hook, then the mask, then the softmax.
  auto change_scores = [&](const QTile& t, int n) {
    if constexpr (ScoreHook::ACTIVE) {
      const int warp_row = first_row_of_warp(), row = t.m0 + warp_row % POSITIONS + lane / 4;
      const int rows[2] = {row, row + 8};
      apply_hook<BLOCK_N>(ScoreHook(p, t.batch, t.head + warp_row / POSITIONS), s, rows, n * BLOCK_N + 2 * (lane % 4));
    }
  };
  auto softmax = [&](auto maybe_masked, bool masked, auto wait) {
    constexpr bool MAYBE_MASKED = decltype(maybe_masked)::value;
    rescale = softmax_scores<BLOCK_N, MAYBE_MASKED, SKIP_RESCALE, WAIT_AT>(
        s, state, ScoreHook::scale_log2(p), shrink, wait, USE_VIMNMX3 && !masked);
  };
  auto mask_and_softmax = [&](const QTile& t, int n) {  // of a tile with nothing else under way: mostly one with a mask
    change_scores(t, n);
    if (needs_mask(t, n)) mask_tile(t, n);
    softmax(Constant<!WHOLE_TILES>(), !WHOLE_TILES, NoWait());
  };
  auto rescale_output = [&] {
    if (!SKIP_RESCALE || rescale) scale_rows(o, shrink);
  };
  auto finish_store = [&] {  // the TMA store of the Q tile before has read its slot
    if (STORE_LATER && q_at.uses > 0 && elect_lane()) {
      tma_store_wait_read();
      mbarrier_arrive(layout.q_empty((q_at.uses - 1) % Q_STAGES));
    }
  };
  auto await_k = [&] { mbarrier_wait(layout.k_full(k_at.slot()), k_at.parity()); };
  auto await_v = [&] { mbarrier_wait(layout.v_full(v_at(1).slot()), v_at(1).parity()); };

  for (;;) {
    const RingPosition<WORK_SLOTS> work_at = {q_at.uses};
    mbarrier_wait(layout.work_full(work_at.slot()), work_at.parity());
    const Work work = read_work_for_warp(layout.work_slot(work_at.slot()));
    if (work.head < 0) break;
    const QTile t = q_tile_of(p, work);
    int n = PACK_HEADS > 1 ? t.last() : last_seen(p, t, t.m0 + warpgroup * 64 + 63);
#pragma unroll
    for (int i = 0; i < VALUE_DIM / 2; ++i) o[i] = 0.f;
    ScoreHook::begin(p, t.head, state);
    mbarrier_wait(layout.q_full(q_at.slot()), q_at.parity());
    Queries q;
    q.read(layout.q(q_at.slot()), warpgroup, first_row_of_warp(), lane);
    if (STORE_DIRECT && (Q_IN_REGS || t.count == 0)) {
      __syncwarp();
      release(layout.q_empty(q_at.slot()));
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
        if (precise) {  // the remainder of P is worked out under its PV
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
        change_scores(t, n);
        if (masked) mask_tile(t, n);
        softmax(maybe_masked, masked, await_pv);
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

    store_tile(p, o_map, layout, q_at, warpgroup, o, state);
    q_at.advance();
  }
}

}  // namespace
