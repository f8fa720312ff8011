// Rows of one warp once more, straight from global memory and with a maximum for every 16 keys: the way out where a weight has overflowed
// (softmax.cuh, rows that are settled). Takes about ten times as long as the loop that it stands in for.
//
// Reads are 16 bytes wide. QKᵀ may add up columns in any order and PV may have them in any, so lanes take eight columns that lie side by side:
// for QKᵀ lane t of a row two k16 steps of 32, for PV lanes 4g to 4g+3 one of each of eight n8 tiles.
#pragma once
#include "layout.cuh"
#include "lse.cuh"
#include "mask.cuh"
#include "mma.cuh"
#include "score.cuh"

namespace {

// Eight elements of a row, 0 behind its end. Rows are whole chunks of eight.
__device__ __forceinline__ uint4 eight_of(const void* elements, long long row, int column, int columns) {
  uint4 eight = {0, 0, 0, 0};
  if (column < columns) eight = *reinterpret_cast<const uint4*>(static_cast<const element*>(elements) + row + column);
  return eight;
}

// The low or the high halves of two words.
__device__ __forceinline__ u32 halves(u32 a, u32 b, bool high) { return __byte_perm(a, b, high ? 0x7632 : 0x5410); }

// The block that a sequence's keys are in.
__device__ __forceinline__ int block_of(const SdpaParams&, int batch) { return batch; }
__device__ __forceinline__ int block_of(const Sequence& s, int) { return s.block; }

// 16 rows of a head, from `row` on, of the sequence with these bounds.
template <typename Bounds>
__device__ __forceinline__ void recompute_rows(const SdpaParams& p, const Bounds& bounds, int batch, int head, int row) {
  constexpr int KEYS = 16, STEPS = (HEAD_DIM + 31) / 32, BLOCKS = (VALUE_DIM + 63) / 64;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int rows[2] = {row + g, row + g + 8};
  const int head_kv = head / (p.heads_q / p.heads_kv), block = block_of(bounds, batch);
  const long long first_row = first_query(bounds), key_before = first_key(bounds);
  const long long q = batch * p.q_stride[0] + head * p.q_stride[1] + first_row * p.q_stride[2];
  const long long k = block * p.k_stride[0] + head_kv * p.k_stride[1] + key_before * p.k_stride[2];
  const long long v = block * p.v_stride[0] + head_kv * p.v_stride[1] + key_before * p.v_stride[2];
  uint4 queries[2][STEPS];
#pragma unroll
  for (int i = 0; i < 2 * STEPS; ++i)
    queries[i % 2][i / 2] = eight_of(p.q, q + min(rows[i % 2], bounds.seq_q - 1) * p.q_stride[2], 32 * (i / 2) + 8 * t, p.dim_qk);
  float o[BLOCKS][8][4] = {};
  RowPair state;
  row_pair_reset(state);
  const KeyRange seen = {visible_keys(bounds, row).begin, visible_keys(bounds, min(row + 15, bounds.seq_q - 1)).end};
#pragma unroll 1
  for (int first = seen.begin / KEYS * KEYS; first < seen.end; first += KEYS) {
    float s[KEYS / 2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float scores[4] = {};
      const long long key = k + min(first + 8 * half + g, bounds.seq_kv - 1) * p.k_stride[2];
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const uint4 keys = eight_of(p.k, key, 32 * step + 8 * t, p.dim_qk), &a = queries[0][step], &b = queries[1][step];
        mma_m16n8k16(scores, {a.x, b.x, a.y, b.y}, keys.x, keys.y);
        mma_m16n8k16(scores, {a.z, b.z, a.w, b.w}, keys.z, keys.w);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) s[4 * half + i] = scores[i];
    }
    mask_scores<KEYS>(bounds, s, rows, first + 2 * t);
    float shrink[2];
    softmax_scores<KEYS, true>(s, state, ScoreHook::scale_log2(p), shrink);
    u32 weights[4];
    pack_probabilities<KEYS>(s, weights);
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
      u32 values[4][4];  // of keys 2t, 2t+1, 2t+8, 2t+9
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = first + 2 * t + i % 2 + 8 * (i / 2), column = 64 * block + 8 * g;
        const uint4 eight = eight_of(p.v, v + key * p.v_stride[2], column, key < bounds.seq_kv ? p.dim_v : 0);
        values[i][0] = eight.x, values[i][1] = eight.y, values[i][2] = eight.z, values[i][3] = eight.w;
      }
#pragma unroll
      for (int tile = 0; tile < 8; ++tile) {
        scale_rows(o[block][tile], shrink);
        mma_m16n8k16(o[block][tile], weights, halves(values[0][tile / 2], values[1][tile / 2], tile % 2),
                     halves(values[2][tile / 2], values[3][tile / 2], tile % 2));
      }
    }
  }
  reduce_row_sums(state);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (rows[r] >= bounds.seq_q) continue;
    const float inverse = ScoreHook::inverse(p, head, state.max[r], state.sum[r]);
    element* const out = static_cast<element*>(p.o) + batch * p.o_stride[0] + head * p.o_stride[1] + (first_row + rows[r]) * p.o_stride[2];
#pragma unroll
    for (int i = 0; i < 2 * BLOCKS; ++i) {  // of each 64 columns a lane has two times eight
      const int column = 64 * (i / 2) + 16 * t + 8 * (i % 2);
      u32 words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        words[j] = pack_pair(o[i / 2][2 * j][2 * r + i % 2] * inverse, o[i / 2][2 * j + 1][2 * r + i % 2] * inverse);
      if (column < p.dim_v) *reinterpret_cast<uint4*>(out + column) = make_uint4(words[0], words[1], words[2], words[3]);
    }
    if (p.lse && t == 0) LSE_OF(p, batch, head, first_row + rows[r]) = ScoreHook::lse(p, head, state.max[r], state.sum[r]);
  }
}

}  // namespace
