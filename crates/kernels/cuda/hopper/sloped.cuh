// ALiBi's loop over the KV tiles of one Q tile, for bf16 rows that see all keys to their left: tiles are worth less the farther they are.
//
// - Near tiles keep P to 16 bits by a second PV. Beyond NEAR keys one PV is enough: where weights fall by e^-slope from key to key, those
//   farther away count as 190 equal ones or more whatever the slope is (scores of variance 1), and the rounding of P averages out.
// - Far tiles lie on a line, which costs each score an FMA beside its exponential. What weights are relative to is no maximum there but a
//   bound on it, in log2 units, and O is rescaled only where that bound rises.
// - Once all weights of a tile are faint beside their rows' largest, tiles are looked at before anything else is done with them: those that
//   are faint as well get neither exponentials nor a PV. An element of O moves by less than 2^-40 of the sum of their values. A NaN is not faint.
#pragma once
#include "mainloop.cuh"

namespace {

constexpr int NEAR = 128;       // keys
constexpr float FAINT = -40.f;  // in log2 units

__device__ __forceinline__ void run_sloped(Consumer& c, const QTile& t, const Queries& q, int n) {
  if constexpr (!SLOPED) return;
  float(&s)[BLOCK_N / 2] = c.s;
  u32 residual[BLOCK_N / 4];
  const auto pack_twice = [&] {
    pack_probabilities<BLOCK_N>(s, c.packed);
    pack_residual<BLOCK_N>(s, c.packed, residual);
  };
  c.mask_and_softmax(t, c.first_scores(t, q, n));
  pack_twice();
  // Tiles on both sides of the diagonal, or cut.
  const int row = c.first_row(t);
  const int nearest = min(row + c.p.position, visible_keys(c.p, row).end - 1);  // of the first row's keys to its left
  for (--n; n >= t.first && ((n + 1) * BLOCK_N > nearest || c.needs_mask(t, n)); --n) {
    c.next_scores<true>(t, q, n, residual);
    c.change_scores(t, n, false, Consumer::EarlyReads<false>());
    if (c.needs_mask(t, n)) c.mask_tile(t, n);
    c.softmax<true, false>([&] { return c.await_pv(); });
    pin_registers(residual);
    pack_twice();
    c.rescale_output();
  }
  bool pending = true, remains = true;  // whether a tile's P waits for its PV, and the residual of it
  if (n >= t.first) {
    const float step = c.p.alibi_slopes[t.head] * LOG2_E, unit = c.p.scale_log2;
    float reference[2] = {c.state.max[0] * LOG2_E, c.state.max[1] * LOG2_E};
    float base[2], top[2];
    const auto is_faint = [&] {
      const int distance = t.m0 + first_row_of_warp() + c.lane / 4 + c.p.position - n * BLOCK_N - 2 * (c.lane % 4);
      base[0] = -step * float(distance), base[1] = -step * float(distance + 8);
      line_bounds<BLOCK_N>(s, unit, step, base, top);
      const float least = FAINT - step * LINE_KEYS;  // a reference is less than this much above the largest score
      return top[0] - reference[0] < least && top[1] - reference[1] < least;
    };
    const auto weigh = [&](auto wait) {
      const bool rises = softmax_line<BLOCK_N>(s, c.state.sum, unit, step, base, top, reference, c.shrink, wait);
      pack_probabilities<BLOCK_N>(s, c.packed);
      if (rises) c.rescale_output();
    };
    for (; n >= t.first && remains; --n) {
      c.next_scores<true>(t, q, n, residual);
      is_faint();
      weigh([&] { return c.await_pv(); });
      pin_registers(residual);
      remains = t.precise || (n + 1) * BLOCK_N > nearest - NEAR;
      if (remains) pack_residual<BLOCK_N>(s, c.packed, residual);
    }
    bool faint = false;
    while (n >= t.first) {
      if (!c.all_agree(faint)) {
        c.next_scores<false>(t, q, n, residual);
        faint = is_faint();
        weigh([&] { return c.await_pv(); });
        --n;
        continue;
      }
      c.await_v();
      c.release_v();
      for (pending = false; n >= t.first && !pending; --n) {
        c.await_k();
        if (TAKES_TURNS) c.await_turn();
        pin_registers(s);
        wgmma_fence();
        c.multiply_qk(q);
        if (TAKES_TURNS) c.pass_turn();
        wgmma_wait<0>();
        pin_registers(s);
        c.release_k(t, n);
        pending = !c.all_agree(is_faint());
        if (pending) {
          weigh(NoWait());
          faint = false;
        } else {
          c.await_v();
          c.release_v();
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) c.state.max[r] = reference[r] * (1.f / LOG2_E);
  }
  if (pending) {
    c.await_v();
    pin_registers(c.packed);
    if (remains)
      c.multiply_values<true>(residual);
    else
      c.multiply_values<false>(residual);
  }
  wgmma_wait<0>();
  pin_registers(c.o);
  if (pending) c.release_v();
}

}  // namespace
