// ampere_fwd, ampere_f32: the visible keys of one Q tile, left to right: S = Q · Kᵀ, softmax, O += P · V. The kernel has included its two
// GEMMs before: `Queries`, `multiply_keys` and `accumulate_pv`.
#pragma once
#include "loader.cuh"
#include "score.cuh"

namespace {

// The accumulators of 16 rows, one after the other.
template <int TILES>
__device__ __forceinline__ float (&in_a_row(float (&tiles)[TILES][4]))[4 * TILES] {
  return reinterpret_cast<float(&)[4 * TILES]>(tiles);
}

// The score hook on a tile's scores; masks come after it.
__device__ __forceinline__ void change_scores(const SdpaParams& p, const Work& work, float (&s)[M_TILES][N_TILES][4], int row0,
                                              int key0) {
  if constexpr (ScoreHook::ACTIVE) {
    const ScoreHook hook(p, work.bounds(p), work.batch, work.head);
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int mt = 0; mt < M_TILES; ++mt) {
      const int row = work.m0 + row0 + mt * 16 + lane / 4;
      ScoreHook::change(hook, hook, in_a_row(s[mt]), {row, row + 8}, key0 + 2 * (lane % 4));
    }
  }
}

// Hides scores past the band's edges and past the last key. `row0` and `key0` are the warp's first.
template <typename Bounds>
__device__ __forceinline__ void mask_tile(const Bounds& b, float (&s)[M_TILES][N_TILES][4], int row0, int key0) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int mt = 0; mt < M_TILES; ++mt) {
    const int row = row0 + mt * 16 + lane / 4;
    mask_scores<WARP_KEYS>(b, in_a_row(s[mt]), {row, row + 8}, key0 + 2 * (lane % 4));
  }
}

// Scores become weights, O is brought to the new maximum.
__device__ __forceinline__ void softmax_tile(const SdpaParams& p, float (&s)[M_TILES][N_TILES][4], float (&o)[M_TILES][O_TILES][4],
                                             RowPair (&state)[M_TILES]) {
  float shrink[M_TILES][2];
  bool unchanged = true;
#pragma unroll
  for (int mt = 0; mt < M_TILES; ++mt) {
    softmax_scores<WARP_KEYS, true, -1, ScoreHook::NATURAL_UNITS>(in_a_row(s[mt]), state[mt], ScoreHook::scale_log2(p), shrink[mt]);
    unchanged = unchanged && shrink[mt][0] == 1.f && shrink[mt][1] == 1.f;
  }
  if (SKIP_RESCALE && __all_sync(~0u, unchanged)) return;
#pragma unroll
  for (int mt = 0; mt < M_TILES; ++mt) scale_rows(in_a_row(o[mt]), shrink[mt]);
}

__device__ __forceinline__ void attend(const SdpaParams& p, u32 smem, const Work& work, float (&o)[M_TILES][O_TILES][4],
                                       RowPair (&state)[M_TILES]) {
  Loader loader(p, smem, work);
  TileWalk<(BLOCK_MASK > 0)> walk(work);
  const auto& bounds = work.bounds(p);
  const int lane = threadIdx.x % 32;
  const int warp_m = threadIdx.x / 32 % WARPS_M;
  const int warp_n = threadIdx.x / 32 / WARPS_M;
  loader.load_q();
#pragma unroll
  for (int h = 0; h < 2 * STAGES - 1; ++h) loader.issue(h);  // Q travels in the first group

  const int warp_row = warp_m * 16 * M_TILES;
  const int warp_key = warp_n * WARP_KEYS;
  Queries queries;
  // Where this lane's ldmatrix rows start; see SmemTile::advance.
  const u32 q_lane = smem + QTile::offset(warp_row + (lane & 15), lane >> 4);
  const u32 k_lane = smem + K_OFFSET + KTile::offset(warp_key + (lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
  const u32 v_lane = smem + V_OFFSET + value_offset(warp_key, lane);

  // Inlined once for each choice below: what a loop never needs is not in its code.
  auto visit_keys = [&](int tile_begin, int tile_end, bool may_need_mask, bool precise_rows)
                        __attribute__((always_inline)) {
  for (int tile = tile_begin; tile < tile_end; ++tile) {
    const int n0 = walk.tile(p, work, tile) * BLOCK_N;
    const int slot = tile % STAGES;
    const u32 q_here = REGISTERS_ARE_FULL ? opaque(q_lane) : q_lane;
    const u32 k_here = REGISTERS_ARE_FULL ? opaque(k_lane + slot * KTile::BYTES) : k_lane + slot * KTile::BYTES;
    const u32 v_here = REGISTERS_ARE_FULL ? opaque(v_lane + slot * VTile::BYTES) : v_lane + slot * VTile::BYTES;

    cp_async_wait<2 * STAGES - 2>();
    __syncthreads();
    if (Q_IN_REGS && tile == 0) queries.read(q_here);
    loader.issue(2 * tile + 2 * STAGES - 1);

    float s[M_TILES][N_TILES][4] = {};
    multiply_keys(s, queries, q_here, k_here, {smem, smem + K_OFFSET + slot * KTile::BYTES, warp_row, warp_key});

    // V of this tile must be there for PV; waiting now frees the K slot for the next load before the softmax.
    cp_async_wait<2 * STAGES - 2>();
    __syncthreads();
    loader.issue(2 * tile + 2 * STAGES);

    change_scores(p, work, s, warp_row, n0 + warp_key);
    if (may_need_mask && tile_needs_mask(bounds, work.m0, work.m_last, n0, BLOCK_N))
      mask_tile(bounds, s, work.m0 + warp_row, n0 + warp_key);
    softmax_tile(p, s, o, state);
    if (precise_rows)
      accumulate_pv<(PRECISE_KEYS > 0)>(o, s, v_here);
    else
      accumulate_pv<false>(o, s, v_here);
  }
  };
  // Tiles before the band's right edge need no mask, unless the band has a left one or tiles are left out.
  const int before_edge = (min(band_last(bounds, work.m0), bounds.seq_kv - 1) + 1) / BLOCK_N - work.tile_first;
  const int unmasked = BLOCK_MASK || has_left_edge(bounds) ? 0 : min(max(before_edge, 0), work.tiles);
  if (SPLIT_PRECISE_LOOP && PRECISE_KEYS > 0 && work.precise) {
    visit_keys(0, work.tiles, true, true);
  } else {
    const bool precise_rows = !SPLIT_PRECISE_LOOP && PRECISE_KEYS > 0 && work.precise;
    if (SPLIT_MASKED_LOOP) visit_keys(0, unmasked, false, precise_rows);
    visit_keys(SPLIT_MASKED_LOOP ? unmasked : 0, work.tiles, true, precise_rows);
  }
  cp_async_wait<0>();
}

}  // namespace
