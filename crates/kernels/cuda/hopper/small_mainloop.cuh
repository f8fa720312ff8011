// hopper_small: a warpgroup's part of the keys. Where all tiles of a part fit its ring there is no loop: the MMAs of one tile run under
// the softmax of its neighbours (two sets of scores), in straight code for each number of tiles.
#pragma once
#include "barrier.cuh"
#include "gemm.cuh"
#include "score.cuh"
#include "small_loader.cuh"

namespace {

// A value that a lambda can be compiled for.
template <int VALUE>
struct Constant {
  static constexpr int value = VALUE;
};

// wgmma_wait for a number that is constant once the loop around it is unrolled.
__device__ __forceinline__ void wgmma_wait_all_but(int pending) {
  if (pending == 0) wgmma_wait<0>();
  if (pending == 1) wgmma_wait<1>();
  if (pending == 2) wgmma_wait<2>();
}

// What this warpgroup has accumulated, and how it goes on. Hidden scores: a hook that changes scores would change what a mask in
// advance has hidden, so with one the mask comes behind it.
struct Part {
  const Share& at;
  const Loader& loader;
  const int lane;
  const int warp_row;  // this thread's rows in the Q tile: +0 and +8
  const int rows[2];   // and their positions
  float o[VALUE_DIM / 2] = {};
  RowPair state;
  const u32 q_desc;
  static constexpr bool MASK_IN_ADVANCE = !WHOLE_TILES && !ScoreHook::ACTIVE;

  __device__ __forceinline__ Part(const Share& share, const Loader& load)
      : at(share),
        loader(load),
        lane(threadIdx.x % 32),
        warp_row(share.wg_m * 64 + (threadIdx.x % 128) / 32 * 16 + lane / 4),
        rows{share.m0 + warp_row % POSITIONS, share.m0 + (warp_row + 8) % POSITIONS},
        q_desc(wgmma_descriptor(share.smem + share.wg_m * 64 * 128)) {
    row_pair_reset(state);
  }

  __device__ __forceinline__ void apply_hook(float (&s)[BLOCK_N / 2], int tile) const {
    if constexpr (ScoreHook::ACTIVE) {
      const ScoreHook hook(at.p, at.p, at.batch, PACK_HEADS > 1 ? at.head + warp_row / POSITIONS : at.head);
      ScoreHook::change(hook, hook, s, rows, column(tile));
    }
  }
  __device__ __forceinline__ u32 stage_smem(int stage) const { return at.ring(at.wg_n) + stage * (K_BYTES + V_BYTES); }
  __device__ __forceinline__ int column(int tile) const { return at.first_key(tile) + 2 * (lane % 4); }

  // Waits for the tile's keys and issues QKᵀ; ONTO: onto what `s` holds.
  template <bool ONTO>
  __device__ __forceinline__ void multiply_qk(float (&s)[BLOCK_N / 2], int tile) const {
    const int stage = tile % STAGES;
    mbarrier_wait(at.k_full(at.wg_n) + stage * 16, (tile / STAGES) & 1);
    const u32 k_desc = wgmma_descriptor(stage_smem(stage));
    if (ONTO) pin_registers(s);
    wgmma_fence();
    issue_qk<ONTO, BLOCK_N, Q_PANEL_BYTES, KV_PANEL_BYTES>(s, q_desc, k_desc);
  }
  __device__ __forceinline__ void multiply_pv(u32 (&packed)[BLOCK_N / 4], int tile) {
    const int stage = tile % STAGES;
    mbarrier_wait(at.k_full(at.wg_n) + 8 + stage * 16, (tile / STAGES) & 1);
    const u32 v_desc = wgmma_descriptor(stage_smem(stage) + K_BYTES, KV_PANEL_BYTES);
    pin_registers(o);
    pin_registers(packed);
    wgmma_fence();
    issue_pv<BLOCK_N>(o, packed, v_desc);
  }

  // Masks are laid out before the keys are there, where they cost nothing.
  __device__ __forceinline__ void mask_before(float (&s)[BLOCK_N / 2], int tile) const {
    if (!MASK_IN_ADVANCE) return;
    mask_in_advance<BLOCK_N>(at.p, s, rows, column(tile));
    pin_registers(s);  // here, not behind the wait for the keys
  }
  __device__ __forceinline__ void mask_after(float (&s)[BLOCK_N / 2], int tile) const {
    mask_scores<BLOCK_N>(at.p, s, rows, column(tile));
  }
  __device__ __forceinline__ void change_scores(float (&s)[BLOCK_N / 2], int tile) const {
    apply_hook(s, tile);
    if (ScoreHook::ACTIVE && !WHOLE_TILES) mask_after(s, tile);
  }

  // TILES tiles of a part at once, of which the last ones may be hidden: QKᵀ of tile i+1 is on the tensor cores before the softmax of
  // tile i begins (of the second tile, NEXT_LATE, before the exponentials of the first), and PV of tile i while that of tile i+1 runs.
  // `finish()` is what can be done under the last MMA.
  //
  // Precise rows: all tiles but the first are hidden, and what rounding left of P is multiplied instead of a second tile. All Q tiles of
  // a problem thus run the same code: a path of its own for each kind would have to come from L2, again and again, which takes longer
  // than what it saves.
  template <int TILES, typename Finish>
  __device__ __forceinline__ void run_straight(Finish finish) {
    constexpr int LAST = TILES - 1;
    const float scale_log2 = ScoreHook::scale_log2(at.p);
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
    auto scores = [&](int tile) {
      if (tile == 0) mbarrier_wait(at.q_full(), 0);
      multiply_qk<MASK_IN_ADVANCE>(s[tile % 2], tile);
    };
    mask_before(s[0], 0);
    if (TILES > 1) mask_before(s[1], 1);
    scores(0);
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      const bool next_now = tile < LAST && !(NEXT_LATE && tile == 0);
      if (tile > 0 && tile < LAST) mask_before(s[(tile + 1) % 2], tile + 1);
      if (next_now) scores(tile + 1);
      // In flight behind this tile's scores: PV of the tile before, and the scores of the next.
      wgmma_wait_all_but((tile > 0) + next_now);
      pin_registers(s[tile % 2]);
      if (PRECISE_KEYS > 0 && TILES == 2 && tile == 1 && at.precise) {
        multiply_residual();
        break;
      }
      change_scores(s[tile % 2], tile);
      float shrink[2];
      if (tile == 0) {
        softmax_scores<BLOCK_N, !WHOLE_TILES, NEXT_LATE ? 0 : -1>(s[0], state, scale_log2, shrink, [&] {
          if (LAST > 0 && NEXT_LATE) scores(1);
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
      if (PRECISE_KEYS > 0 && TILES == 1 && at.precise) multiply_residual();
    }
    finish();
    wgmma_wait<0>();
    pin_registers(o);
  }

  // Any number of tiles, one after the other; rows with few keys have a second PV with what rounding left of P.
  template <typename Finish>
  __device__ __forceinline__ void run_loop(int warp, Finish finish) {
    mbarrier_wait(at.q_full(), 0);
    for (int tile = 0; tile < at.own_tiles; ++tile) {
      float s[BLOCK_N / 2];
      u32 packed[BLOCK_N / 4];
      float shrink[2];
      multiply_qk<false>(s, tile);
      wgmma_wait<0>();
      pin_registers(s);
      apply_hook(s, tile);
      if (!WHOLE_TILES && tile_needs_mask(at.p, at.m0, at.m_last, at.first_key(tile), BLOCK_N)) mask_after(s, tile);
      softmax_scores<BLOCK_N, !WHOLE_TILES>(s, state, ScoreHook::scale_log2(at.p), shrink);
      pack_probabilities<BLOCK_N>(s, packed);
      if (tile > 0) scale_rows(o, shrink);
      multiply_pv(packed, tile);
      wgmma_wait<0>();
      pin_registers(o);
      if (PRECISE_KEYS > 0 && at.precise) {
        pack_residual<BLOCK_N>(s, packed, packed);
        multiply_pv(packed, tile);
        wgmma_wait<0>();
        pin_registers(o);
      }
      if (tile + STAGES < at.own_tiles) {
        named_barrier_sync(1 + at.wg_n, 128 * WG_M);  // all readers of this stage are done
        if (warp % 4 == 0 && at.wg_m == 0 && elect_lane())
          loader.load_k(at.wg_n, tile + STAGES, tile % STAGES), loader.load_v(at.wg_n, tile + STAGES, tile % STAGES);
        __syncwarp();
      }
    }
    finish();
  }

  // Straight code for the part's number of tiles, or the loop.
  template <typename Finish>
  __device__ __forceinline__ void run(int warp, Finish finish) {
    if constexpr (KNOWN_TILES > 0)
      run_straight<KNOWN_TILES == 0 ? 1 : KNOWN_TILES>(finish);
    else if (!LOOP || at.at_once == FEW_TILES)
      run_straight<FEW_TILES>(finish);
    else if (STRAIGHT_MAX > 2 && at.at_once == 3)
      run_straight<STRAIGHT_MAX < 3 ? 1 : 3>(finish);
    else if (STRAIGHT_MAX > 3 && at.at_once == 4)
      run_straight<STRAIGHT_MAX < 4 ? 1 : 4>(finish);
    else if (LOOP)
      run_loop(warp, finish);
  }
};

}  // namespace
