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
// Pairs and packed heads take more to work out, lengths still more, pages most; packed sequences as little as leaves the consumers 232.
constexpr bool ONLY_PACKED = PACKED_QUERIES && !(USED_LENGTHS || PAGED_CACHE || MODIFIED);
constexpr int PRODUCER_REGS = ONLY_PACKED ? 40 : PAGED_CACHE ? 72 : OWN_LENGTHS ? 56 : BLOCK_MASK ? 40 : CONSUMERS >= 3 || PAIRED || PACK_HEADS > 1 || CHUNKED ? 32 : 24;
constexpr int CONSUMER_SHARE = (ENTRY_REGS * (CONSUMERS + 1) - PRODUCER_REGS) / CONSUMERS / 8 * 8;
constexpr int CONSUMER_REGS = CONSUMER_SHARE < 240 ? CONSUMER_SHARE : 240;
// Whether what rounding leaves of P has room beside everything else while MMAs and softmax overlap.
constexpr bool RESIDUAL_FITS =
    PRECISE_KEYS > 0 && BLOCK_N + VALUE_DIM / 2 + (Q_IN_REGS ? HEAD_DIM / 4 : 0) + (PAGED_CACHE ? 48 : 40) <= CONSUMER_REGS;
// Whether a tile's bias or mask is read before its scores are there: where registers are left for it.
constexpr bool FETCHES = ScoreHook::READS && !(BIAS && BOOLEAN_MASK) && !(SOFTCAP || ALIBI) && VALUE_DIM <= 128 && HEAD_DIM <= 128 &&
                         WHOLE_TILES && PRECISE_KEYS == 0 && !BLOCK_MASK && !(Q_IN_REGS && HEAD_DIM > 64);
// Whether far tiles of ALiBi have a loop of their own (sloped.cuh).
constexpr bool SLOPED = ScoreHook::MOVES && DTYPE_BF16 && RESIDUAL_FITS && PRECISE_KEYS <= 256 && PACK_HEADS == 1 && !OWN_BOUNDS && !BLOCK_MASK;
// Whether the weights of capped scores say which tiles get a second PV (watched.cuh).
constexpr bool WATCHED = ScoreHook::BOUNDED && RESIDUAL_FITS && PRECISE_KEYS <= 256 && !OWN_BOUNDS && !BLOCK_MASK;
// Whether whole tiles of settled rows (softmax.cuh) have a loop of their own.
constexpr bool SETTLES = SETTLE_KEYS > 0 && !ScoreHook::ACTIVE && !CHUNKED && !PAGED_CACHE && !BLOCK_MASK;
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

struct Consumer;
__device__ void run_sloped(Consumer& c, const QTile& t, const Queries& q, int n);   // sloped.cuh
__device__ void run_watched(Consumer& c, const QTile& t, const Queries& q, int n);  // watched.cuh

// One warpgroup, through all its Q tiles: its place in the rings, and what it has accumulated.
struct Consumer {
  const SdpaParams& p;
  const Layout& layout;
  const int warpgroup;  // by a shuffle: ptxas then knows that it is the same in a warp, and with it descriptors and loop bounds
  const int lane;
  RingPosition<Q_STAGES> q_at;
  RingPosition<STAGES> k_at;
  float o[VALUE_DIM / 2];
  float s[BLOCK_N / 2];
  u32 packed[BLOCK_N / 4];
  float shrink[2];
  RowPair state;
  bool settled;         // whether the Q tile's rows were
  float unit, base[2];  // what scores are multiplied with and moved by, where ScoreHook::MOVES

  __device__ Consumer(const SdpaParams& params, const Layout& where)
      : p(params), layout(where), warpgroup(__shfl_sync(~0u, int(threadIdx.x / 128), 0) - 1), lane(threadIdx.x % 32) {
    if (TAKES_TURNS && warpgroup == CONSUMERS - 1) pass_turn();
  }

  __device__ void await_turn() const { named_barrier_sync(PINGPONG_BARRIER + warpgroup, 256); }
  __device__ void pass_turn() const { named_barrier_arrive(PINGPONG_BARRIER + (warpgroup + 1) % CONSUMERS, 256); }
  __device__ void release(u32 barrier) const {
    if (lane == 0) mbarrier_arrive(barrier);
  }
  // Values are used behind keys: their place follows from that of the next keys, which saves a register.
  __device__ RingPosition<STAGES> v_at(int behind) const { return RingPosition<STAGES>{k_at.uses - behind}; }
  __device__ u32 k_tile() const { return layout.k(k_at.slot()); }
  __device__ u32 v_tile() const { return layout.v(v_at(1).slot()); }
  __device__ void await_k() const { mbarrier_wait(layout.k_full(k_at.slot()), k_at.parity()); }
  __device__ void await_v() const { mbarrier_wait(layout.v_full(v_at(1).slot()), v_at(1).parity()); }
  // PROBE_AHEAD: asked early, so that nobody has to wait for the answer where the tile is there already, as it mostly is.
  __device__ bool probe_k() const { return PROBE_AHEAD && mbarrier_test(layout.k_full(k_at.slot()), k_at.parity()); }
  __device__ bool probe_v() const { return PROBE_AHEAD && mbarrier_test(layout.v_full(v_at(1).slot()), v_at(1).parity()); }
  // The KV tile of number n. Under a block mask it is known as long as its keys are there.
  __device__ int tile_of(int n) const {
    if (BLOCK_MASK && (ScoreHook::ACTIVE || !WHOLE_TILES)) {
      asm volatile("ld.shared.s32 %0, [%1];" : "=r"(n) : "r"(layout.tile_number(k_at.slot())) : "memory");
      __syncwarp();  // all lanes have read it before one gives the slot back
    }
    return n;
  }
  // Queries in registers are needed no more in shared memory, others by whoever has read its last keys of a Q tile.
  __device__ void release_k(const QTile& t, int n) {
    release(layout.k_empty(k_at.slot()));
    k_at.advance();
    if (STORE_DIRECT && !Q_IN_REGS && n == t.first) release(layout.q_empty(q_at.slot()));
  }
  __device__ void release_v(int behind = 1) const { release(layout.v_empty(v_at(behind).slot())); }

  __device__ void multiply_qk(const Queries& q) {
    if constexpr (Q_IN_REGS)
      issue_qk<BLOCK_N, KV_PANEL_BYTES>(s, q.fragments, wgmma_descriptor(k_tile()));
    else
      issue_qk<false, BLOCK_N, Q_PANEL_BYTES, KV_PANEL_BYTES>(s, q.descriptor, wgmma_descriptor(k_tile()));
  }
  __device__ void multiply_pv(const u32 (&weights)[BLOCK_N / 4]) {
    issue_pv<BLOCK_N>(o, weights, wgmma_descriptor(v_tile(), KV_PANEL_BYTES));
  }

  // The lengths and the band that count.
  __device__ decltype(auto) bounds() const { return bounds_of(layout.work_slot(RingPosition<WORK_SLOTS>{q_at.uses}.slot()), p); }
  // The positions of this warpgroup's rows.
  __device__ int first_row(const QTile& t) const { return PACK_HEADS > 1 ? t.m0 : t.m0 + warpgroup * 64; }
  __device__ int last_row(const QTile& t) const { return PACK_HEADS > 1 ? t.m_last : min(first_row(t) + 63, bounds().seq_q - 1); }
  __device__ bool needs_mask(const QTile& t, int n) const {
    return !WHOLE_TILES && tile_needs_mask(bounds(), first_row(t), last_row(t), n * BLOCK_N, BLOCK_N);
  }
  __device__ void mask_tile(const QTile& t, int n) {
    const int row = t.m0 + first_row_of_warp() % POSITIONS + lane / 4;
    const int rows[2] = {row, row + 8};
    mask_scores<BLOCK_N>(bounds(), s, rows, n * BLOCK_N + 2 * (lane % 4));
  }
  // What is read of a tile's bias or mask before its scores are there, if anything is.
  template <bool FETCHED>
  struct EarlyReads {
    typename ScoreHook::template Fetched<FETCHED ? BLOCK_N / 2 : 4> read;
  };
  template <bool FETCHED>
  __device__ void fetch(EarlyReads<FETCHED>& early, const QTile& t, int n) {
    if constexpr (FETCHED) {
      const int row = t.m0 + first_row_of_warp() % POSITIONS + lane / 4;
      const int rows[2] = {row, row + 8};
      early.read.fill(ScoreHook(p, bounds(), t.batch, head_of_warp(t)), rows, n * BLOCK_N + 2 * (lane % 4));
    }
  }
  // The score hook on this tile's scores. `hides`: some of its keys may be hidden.
  template <bool FETCHED>
  __device__ void change_scores(const QTile& t, int n, bool hides, const EarlyReads<FETCHED>& early) {
    if constexpr (ScoreHook::ACTIVE) {
      const int row = t.m0 + first_row_of_warp() % POSITIONS + lane / 4;
      const int rows[2] = {row, row + 8};
      const int column = n * BLOCK_N + 2 * (lane % 4);
      const ScoreHook hook(p, bounds(), t.batch, head_of_warp(t));
      if constexpr (ScoreHook::MOVES) {
        const int last_keys[2] = {band_last(bounds(), rows[0]), band_last(bounds(), rows[1])};
        hook.move(s, rows, column, last_keys, unit, base);
      } else if constexpr (ScoreHook::BOUNDED) {
        if (hides)
          ScoreHook::change(hook, hook, s, rows, column);
        else
          hook.cap_visible(s);
      } else if constexpr (FETCHED) {
        ScoreHook::change(hook, early.read, s, rows, column);
      } else {
        ScoreHook::change(hook, hook, s, rows, column);
      }
    }
  }
  __device__ int head_of_warp(const QTile& t) const { return PACK_HEADS > 1 ? t.head + first_row_of_warp() / POSITIONS : t.head; }

  template <bool MAYBE_MASKED, bool BOUNDED, typename Wait>
  __device__ void softmax(Wait wait) {
    if constexpr (BOUNDED)
      softmax_bounded<BLOCK_N>(s, state, ScoreHook::scale_log2(p), wait);
    else if constexpr (ScoreHook::MOVES)
      softmax_moved<BLOCK_N, MAYBE_MASKED>(s, state, unit, base, LOG2_E, shrink, wait);
    else
      softmax_scores<BLOCK_N, MAYBE_MASKED || ScoreHook::HIDES, -1, ScoreHook::NATURAL_UNITS>(s, state, ScoreHook::scale_log2(p), shrink,
                                                                                              wait);
  }
  // Of a tile with nothing else under way: mostly one with a mask.
  template <bool BOUNDED = false>
  __device__ void mask_and_softmax(const QTile& t, int n) {
    change_scores(t, n, !WHOLE_TILES, EarlyReads<false>());
    if (needs_mask(t, n)) mask_tile(t, n);
    softmax<!WHOLE_TILES, BOUNDED>(NoWait());
  }
  template <bool BOUNDED = false>
  __device__ void rescale_output() {
    if (!BOUNDED) scale_rows(o, shrink);
  }
  // The wait for PV stands before the next tile's softmax. It has no operands: ptxas mixes the two as it likes, and does it well.
  __device__ float await_pv() {
    wgmma_wait<0>();
    pin_registers(o);
    pin_registers(packed);
    release_v(2);
    return 0.f;
  }
  // The TMA store of the Q tile before has read its slot.
  __device__ void finish_store() const {
    if (STORE_LATER && q_at.uses > 0 && elect_lane()) {
      tma_store_wait_read();
      mbarrier_arrive(layout.q_empty((q_at.uses - 1) % Q_STAGES));
    }
  }

  // Tiles to the right of all that this warpgroup's rows see: it only keeps step with the others.
  template <bool TURNS>
  __device__ void skip_hidden(const QTile& t, int n) {
    for (int skipped = t.last(); skipped > n; --skipped) {
      await_k();
      release_k(t, skipped);
      await_v();
      release_v();
      if (TURNS) await_turn(), pass_turn();
    }
  }

  // Whether all threads of this warpgroup say so.
  __device__ bool all_agree(bool mine) const { return named_barrier_all(AGREE_BARRIER + warpgroup, 128, mine); }

  // S of the first tile, with nothing else under way; which KV tile it is.
  __device__ int first_scores(const QTile& t, const Queries& q, int n) {
    skip_hidden<TAKES_TURNS>(t, n);
    await_k();
    if (FIRST_TOO) await_turn();
    wgmma_fence();
    multiply_qk(q);
    if (FIRST_TOO) pass_turn();
    finish_store();
    wgmma_wait<0>();
    pin_registers(s);
    const int tile = tile_of(n);
    release_k(t, n);
    return tile;
  }
  // O += P · V of the tile before, with what rounding left of P or without.
  template <bool WITH_RESIDUAL, int COUNT>
  __device__ void multiply_values(u32 (&residual)[COUNT]) {
    pin_registers(o);
    if constexpr (WITH_RESIDUAL) pin_registers(residual);
    wgmma_fence();
    multiply_pv(packed);
    if constexpr (WITH_RESIDUAL) multiply_pv(residual);
  }
  // S of tile n while that runs.
  template <bool WITH_RESIDUAL, int COUNT>
  __device__ void next_scores(const QTile& t, const Queries& q, int n, u32 (&residual)[COUNT]) {
    await_k();
    if (TAKES_TURNS) await_turn();
    pin_registers(s);
    pin_registers(packed);
    pin_registers(o);
    wgmma_fence();
    multiply_qk(q);
    await_v();
    multiply_values<WITH_RESIDUAL>(residual);
    if (TAKES_TURNS) pass_turn();
    wgmma_wait<WITH_RESIDUAL ? 2 : 1>();
    pin_registers(s);
    release_k(t, n);
  }

  // One tile after the other; PRECISE, with what rounding left of P in a second PV.
  __device__ void run_one_by_one(const QTile& t, const Queries& q, int n, bool precise) {
    finish_store();
    skip_hidden<false>(t, n);
    for (; n >= t.first; --n) {
      await_k();
      wgmma_fence();
      multiply_qk(q);
      wgmma_wait<0>();
      pin_registers(s);
      const int tile = tile_of(n);
      release_k(t, n);
      mask_and_softmax(t, tile);
      pack_probabilities<BLOCK_N>(s, packed);
      rescale_output();
      await_v();
      pin_registers(o);
      pin_registers(packed);
      wgmma_fence();
      multiply_pv(packed);
      if (precise) {  // the remainder of P is worked out under its PV
        u32 residual[BLOCK_N / 4];
        pack_residual<BLOCK_N>(s, packed, residual);
        pin_registers(residual);
        wgmma_fence();
        multiply_pv(residual);
        wgmma_wait<0>();
        pin_registers(residual);
      } else {
        wgmma_wait<0>();
      }
      pin_registers(o);
      release_v();
    }
  }

  // Whether a weight of this warp's, or what was added up with it, is no longer finite. Then neither is its product with 0.
  __device__ bool overflowed() const {
    if (!SETTLES || !settled) return false;
    float zero = (state.sum[0] + state.sum[1]) * 0.f;
#pragma unroll
    for (int i = 0; i < VALUE_DIM / 2; ++i) zero = fmaf(o[i], 0.f, zero);
    return __any_sync(~0u, zero != 0.f);
  }

  // MMAs and softmax overlapped.
  template <bool WITH_RESIDUAL, bool BOUNDED = false>
  __device__ void run_overlapped(const QTile& t, const Queries& q, int n) {
    u32 residual[WITH_RESIDUAL ? BLOCK_N / 4 : 1];
    auto pack = [&] {
      pack_probabilities<BLOCK_N>(s, packed);
      if constexpr (WITH_RESIDUAL) pack_residual<BLOCK_N>(s, packed, residual);
    };
    if (BOUNDED) state.max[0] = state.max[1] = 0.f;  // above every score, and never to be changed
    mask_and_softmax<BOUNDED>(t, first_scores(t, q, n));
    pack();
    bool k_ready = probe_k();
    float offset[2];  // of settled rows: minus the reference, in log2 units
    auto step = [&](auto maybe_masked, bool masked, auto is_settled) {
      if (!k_ready) await_k();
      const bool v_ready = probe_v();
      EarlyReads<FETCHES> early;
      if (BOOLEAN_MASK) fetch(early, t, n);  // a bias, of twice the bytes, is better read behind the MMAs
      if (TAKES_TURNS) await_turn();
      pin_registers(s);
      pin_registers(packed);
      pin_registers(o);
      wgmma_fence();
      multiply_qk(q);
      if (!SCALE_LATE && !decltype(is_settled)::value) rescale_output<BOUNDED>();
      if (!v_ready) await_v();
      multiply_values<WITH_RESIDUAL>(residual);
      if (TAKES_TURNS) pass_turn();
      if (!BOOLEAN_MASK) fetch(early, t, n);
      if (FETCHES && BOOLEAN_MASK) early.read.share(lane);
      wgmma_wait<WITH_RESIDUAL ? 2 : 1>();
      pin_registers(s);
      const int tile = tile_of(n);
      release_k(t, n);
      if (FETCHES && !BOOLEAN_MASK) early.read.share(lane);
      k_ready = probe_k();
      if constexpr (decltype(is_settled)::value) {
        const float scale_log2 = ScoreHook::scale_log2(p);
        const bool beyond = softmax_settled<BLOCK_N>(s, state, scale_log2, offset, [&] { return await_pv(); });
        pack();
        return beyond;
      } else if constexpr (BOUNDED && !decltype(maybe_masked)::value) {
        ScoreHook(p, bounds(), t.batch, head_of_warp(t)).template weigh_bounded<BLOCK_N>(s, state, [&] { return await_pv(); });
      } else {
        change_scores(t, tile, BLOCK_MASK || masked, early);
        if (BLOCK_MASK ? needs_mask(t, tile) : masked) mask_tile(t, tile);
        softmax<decltype(maybe_masked)::value, BOUNDED>([&] { return await_pv(); });
      }
      pack();
      if (SCALE_LATE) rescale_output<BOUNDED>();
      return false;
    };
    --n;
    const auto run_plain = [&](int first) {
      for (; n >= first; --n) step(Constant<false>(), false, Constant<false>());
    };
    const auto run_settled = [&](int first) {
      settled = true;
      if (!SCALE_LATE) rescale_output<BOUNDED>(), shrink[0] = shrink[1] = 1.f;
#pragma unroll
      for (int r = 0; r < 2; ++r) offset[r] = -state.max[r] * ScoreHook::scale_log2(p);
      while (n >= first) {
        bool beyond = false;
        for (; n >= first && !beyond; --n) beyond = step(Constant<false>(), false, Constant<true>());
        if (!beyond) return;
        raise_reference<BLOCK_N>(s, o, state, ScoreHook::scale_log2(p), offset);
        pack();
      }
    };
    // Down to tile `first`. Whether rows have settled is asked ever less often.
    const auto run_whole = [&](int first) {
      if constexpr (SETTLES && !WITH_RESIDUAL) {
        for (int span = (SETTLE_KEYS + BLOCK_N - 1) / BLOCK_N; n >= first; span *= 2) {
          run_plain(max(first, n - span + 1));
          if (n > first && all_agree(are_settled(state))) return run_settled(first);
        }
      } else {
        run_plain(first);
      }
    };
    if constexpr (WHOLE_TILES) {
      run_whole(t.first);
    } else if constexpr (WITH_RESIDUAL || BLOCK_MASK) {  // few tiles, or any in any order: one loop is enough
      for (; n >= t.first; --n) step(Constant<true>(), !BLOCK_MASK && needs_mask(t, n), Constant<false>());
    } else {
      // Loops of their own for tiles that the right edge cuts, whole ones, and tiles that the left edge cuts.
      const auto& b = bounds();
      const int last_whole = max(t.first - 1, min(band_last(b, first_row(t)) + 1, b.seq_kv) / BLOCK_N - 1);
      const int first_whole = max(t.first, (max(0, band_first(b, last_row(t))) + BLOCK_N - 1) / BLOCK_N);
      for (; n > last_whole; --n) step(Constant<true>(), true, Constant<false>());
      run_whole(first_whole);
      for (; n >= t.first; --n) step(Constant<true>(), true, Constant<false>());
    }
    if (!SCALE_LATE) rescale_output<BOUNDED>();
    await_v();
    pin_registers(packed);
    multiply_values<WITH_RESIDUAL>(residual);
    wgmma_wait<0>();
    pin_registers(o);
    release_v();
  }

  // All KV tiles of one Q tile. O and the rows' state are complete, but for their division and the sum over the lanes.
  __device__ __forceinline__ void attend(const QTile& t) {
    int n = PACK_HEADS > 1 || BLOCK_MASK ? t.last() : last_seen(bounds(), t, t.m0 + warpgroup * 64 + 63);
#pragma unroll
    for (int i = 0; i < VALUE_DIM / 2; ++i) o[i] = 0.f;
    row_pair_reset(state);
    settled = false;
    mbarrier_wait(layout.q_full(q_at.slot()), q_at.parity());
    Queries q;
    q.read(layout.q(q_at.slot()), warpgroup, first_row_of_warp(), lane);
    if (STORE_DIRECT && (Q_IN_REGS || t.count == 0)) {
      __syncwarp();
      release(layout.q_empty(q_at.slot()));
    }
    const bool precise = PRECISE_KEYS > 0 && (t.precise || ScoreHook::is_steep(p) || ScoreHook::BOUNDED && any_row_sees_fewer(p, t.m0, t.m_last, FLAT_KEYS));
    if (t.count == 0)  // no key: zeros are stored
      finish_store();
    else if (SLOPED && !has_left_edge(p) && ScoreHook::is_gentle(p, t.head))
      run_sloped(*this, t, q, n);
    else if (WATCHED && precise)
      run_watched(*this, t, q, n);
    else if (precise && !RESIDUAL_FITS)
      run_one_by_one(t, q, n, precise);
    else if (RESIDUAL_FITS && !WATCHED && precise)
      run_overlapped<RESIDUAL_FITS>(t, q, n);
    else  // a cap that is not steep bounds scores
      run_overlapped<false, ScoreHook::BOUNDED>(t, q, n);
  }
};

}  // namespace
