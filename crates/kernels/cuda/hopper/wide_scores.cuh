// The warpgroup of hopper_wide that has the scores: QKᵀ and the softmax of 64 rows. QKᵀ of the next KV tile is on the tensor cores
// while the softmax of this one runs, in two sets of registers that take turns.
#pragma once
#include "score.cuh"
#include "wgmma.cuh"
#include "wide_layout.cuh"

namespace {

// Panels of the next tile that the tensor cores work on under a softmax.
constexpr int AHEAD = PANELS_AHEAD < QK_PANELS ? PANELS_AHEAD : QK_PANELS;
static_assert(K_SLOTS >= AHEAD, "panels that are not given back before others are awaited have slots of their own");

struct Scores {
  const SdpaParams& p;
  const Layout& layout;
  const QTile& tile;
  const int thread = threadIdx.x % 128, lane = threadIdx.x % 32;
  const int warp = __shfl_sync(~0u, thread / 32, 0);
  Ring<K_SLOTS> ahead, done;  // panels of K that MMAs were issued for, and those that were read
  Ring<MESSAGES> message;
  RowPair state;

  __device__ int row() const { return tile.m0 + thread / 32 * 16 + lane / 4; }

  // S = Q · Kᵀ, a commit group for each panel: the first ones are issued, and a softmax may run under them, before the others stream by.
  __device__ void begin_qk(float (&s)[BLOCK_N / 2]) {
    pin_registers(s);
    wgmma_fence();
#pragma unroll
    for (int panel = 0; panel < AHEAD; ++panel) multiply_panel(s, panel);
  }
  __device__ void finish_qk(float (&s)[BLOCK_N / 2]) {
    await_panels<AHEAD, 1>();
#pragma unroll
    for (int panel = AHEAD; panel < QK_PANELS; ++panel) {
      multiply_panel(s, panel);
      await_panels<2, 1>();
    }
    await_panels<1, 0>();
    pin_registers(s);
  }
  __device__ void multiply_panel(float (&s)[BLOCK_N / 2], int panel) {
    const u32 q = wgmma_descriptor(layout.smem) + panel * (Q_PANEL_BYTES >> 4), k = wgmma_descriptor(layout.k(ahead.slot));
    mbarrier_wait(layout.k_full(ahead.slot), ahead.parity);
#pragma unroll
    for (int step = 0; step < 4 && 4 * panel + step < HEAD_DIM / 16; ++step)  // 32 bytes per k16 step, in units of 16
      Wgmma<BLOCK_N>::ss(s, q + 2 * step, k + 2 * step, panel + step > 0);
    wgmma_commit();
    ahead.advance();
  }
  // Waits until of FROM panels TO are left to be read, and gives back the others.
  template <int FROM, int TO>
  __device__ void await_panels() {
    if constexpr (FROM > TO) {
      wgmma_wait<FROM - 1>();
      release_slot(layout.k_full(done.slot));
      done.advance();
      await_panels<FROM - 1, TO>();
    }
  }

  // Factors of this thread's rows and, WITH_P, the weights to both output warpgroups.
  template <bool WITH_P>
  __device__ void tell(const float (&factor)[2], const float (&s)[BLOCK_N / 2]) {
    const u32 full = layout.message_full(warp, message.slot);
    mbarrier_wait(Layout::empty(full), message.parity ^ 1);
    const u32 to = layout.message(message.slot);
    shared_store(to + 8 * thread, factor[0], factor[1]);
    if (WITH_P) {
      u32 packed[BLOCK_N / 4];
      pack_probabilities<BLOCK_N>(s, packed);
      store_words(to + FACTOR_BYTES, packed);
      if (PRECISE_KEYS > 0 && tile.precise) {
        u32 residual[BLOCK_N / 4];
        pack_residual<BLOCK_N>(s, packed, residual);
        store_words(to + FACTOR_BYTES + P_BYTES, residual);
      }
    }
    mbarrier_arrive(full);
    message.advance();
  }
  __device__ void store_words(u32 to, const u32 (&words)[BLOCK_N / 4]) const {
#pragma unroll
    for (int i = 0; i < BLOCK_N / 16; ++i)
      shared_store(to + 16 * (128 * i + thread), words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
  }

  __device__ void softmax(int n, float (&s)[BLOCK_N / 2]) {
    float shrink[2];
    if (!WHOLE_TILES && tile_needs_mask(p, tile.m0, tile.m_last, n * BLOCK_N, BLOCK_N)) {
      const int rows[2] = {row(), row() + 8};
      mask_scores<BLOCK_N>(p, s, rows, n * BLOCK_N + 2 * (lane % 4));
    }
    softmax_scores<BLOCK_N, !WHOLE_TILES>(s, state, p.scale_log2, shrink);
    tell<true>(shrink, s);
  }

  // The softmax of tile n under QKᵀ of the tile before it.
  __device__ void step(int n, float (&s)[BLOCK_N / 2], float (&next)[BLOCK_N / 2]) {
    begin_qk(next);
    softmax(n, s);
    finish_qk(next);
  }

  __device__ void run() {
    float even[BLOCK_N / 2], odd[BLOCK_N / 2];
    row_pair_reset(state);
    mbarrier_wait(layout.q_full(), 0);
    const int first = tile.tiles.begin;
    int n = tile.tiles.end - 1;
    if (n >= first) {
      begin_qk(even);
      finish_qk(even);
#pragma unroll 1
      for (; n > first + 1; n -= 2) {
        step(n, even, odd);
        step(n - 1, odd, even);
      }
      if (n > first) {
        step(n, even, odd);
        softmax(first, odd);
      } else {
        softmax(first, even);
      }
    }
    finish(even);
  }

  // The last factors are one over the sums.
  __device__ void finish(const float (&unused)[BLOCK_N / 2]) {
    reduce_row_sums(state);
    const float inverse[2] = {inverse_sum(state.sum[0]), inverse_sum(state.sum[1])};
    tell<false>(inverse, unused);
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (p.lse && lane % 4 == 0 && row() + 8 * r < p.seq_q)
        LSE_OF(p, tile.batch, tile.head, row() + 8 * r) = log_sum_exp(state.max[r], state.sum[r], p.scale);
  }
};

}  // namespace
