// The loop over the KV tiles of one Q tile for bf16 rows with capped scores, of which only the weights say how many keys count.
//
// Weights p with rounding errors of their own move O as (Σp)²/Σp² equal ones would. Where the tiles of a Q tile that did without the second PV,
// and this one, are COUNTED of them or more in every row, it does without: the rounding of P averages out. Others keep P to 16 bits.
#pragma once
#include "mainloop.cuh"

namespace {

constexpr float COUNTED = 100.f;

__device__ __forceinline__ void run_watched(Consumer& c, const QTile& t, const Queries& q, int n) {
  if constexpr (!WATCHED) return;
  float(&s)[BLOCK_N / 2] = c.s;
  u32 residual[BLOCK_N / 4];
  float dropped[2] = {0.f, 0.f};  // Σp² of the tiles that did without
  bool remains = true;            // whether the tile that waits for its PV has a residual
  const auto cut = [&] {
    c.next_scores<true>(t, q, n, residual);
    c.change_scores(t, n, true, Consumer::EarlyReads<false>());
    c.mask_tile(t, n);
    c.softmax<true, false>([&] { return c.await_pv(); });
    pin_registers(residual);
    pack_probabilities<BLOCK_N>(s, c.packed);
    pack_residual<BLOCK_N>(s, c.packed, residual);
    c.rescale_output();
  };
  const auto whole = [&](auto with) {
    c.next_scores<decltype(with)::value>(t, q, n, residual);
    float squares[2];
    const bool rises = ScoreHook(c.p, c.p, t.batch, c.head_of_warp(t)).template weigh_capped<BLOCK_N>(s, c.state, c.shrink, squares, [&] { return c.await_pv(); });
    if constexpr (decltype(with)::value) pin_registers(residual);
    bool spread = true;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = c.state.sum[r];
#pragma unroll
      for (int lanes = 1; lanes <= 2; lanes *= 2) {
        squares[r] += __shfl_xor_sync(~0u, squares[r], lanes);
        sum += __shfl_xor_sync(~0u, sum, lanes);
      }
      dropped[r] *= c.shrink[r] * c.shrink[r];
      spread = spread && (dropped[r] + squares[r]) * COUNTED <= sum * sum;
    }
    remains = t.precise || !c.all_agree(spread);
    pack_probabilities<BLOCK_N>(s, c.packed);
    if (remains)
      pack_residual<BLOCK_N>(s, c.packed, residual);
    else
      dropped[0] += squares[0], dropped[1] += squares[1];
    if (rises) c.rescale_output();
  };
  c.mask_and_softmax(t, c.first_scores(t, q, n));
  pack_probabilities<BLOCK_N>(s, c.packed);
  pack_residual<BLOCK_N>(s, c.packed, residual);
  const auto drop_nothing = [&] {
    if (remains) return;
#pragma unroll
    for (int i = 0; i < BLOCK_N / 4; ++i) residual[i] = 0;
  };
  for (--n; n >= t.first; --n) {
    if (c.needs_mask(t, n)) {
      drop_nothing();
      remains = true;
      cut();
    } else if (remains) {
      whole(Constant<true>());
    } else {
      whole(Constant<false>());
    }
  }
  drop_nothing();
  c.await_v();
  pin_registers(c.packed);
  c.multiply_values<true>(residual);
  wgmma_wait<0>();
  pin_registers(c.o);
  pin_registers(residual);
  c.release_v();
}

}  // namespace
