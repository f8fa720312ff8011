// What the mutants share, and none of them gets wrong: one query row, owned by one warp.
//
// A lane takes one key of a tile of 32 for the score, and the columns lane, lane + 32, ...
// for the output. Running maximum, sum and output stay in the owner's registers; only K and
// V tiles are in shared memory, and how they get there is what the mutants get wrong.
//
// Set by the manifests: DTYPE_BF16, HEAD_DIM (head and value dimension rounded up to 32).
#pragma once

#include "copy.cuh"
#include "lse.cuh"
#include "mask.cuh"
#include "softmax.cuh"

constexpr int LANES = 32;
constexpr int TILE_KEYS = LANES;
constexpr int PITCH = HEAD_DIM + 8;
constexpr int COLUMNS_PER_LANE = HEAD_DIM / LANES;

using KvTile = TileShape<TILE_KEYS, HEAD_DIM, PITCH>;
constexpr int TILE_ELEMENTS = TILE_KEYS * PITCH;

// The head this CTA works on.
struct Head {
  const element* q;
  const element* k;
  const element* v;
  element* o;
  float* lse;  // null: not wanted

  __device__ __forceinline__ explicit Head(const SdpaParams& p) {
    const int head = blockIdx.y;
    const int batch = blockIdx.z;
    const int kv_head = kv_head_of(p, head);
    q = head_of(static_cast<const element*>(p.q), p.q_stride, batch, head);
    k = head_of(static_cast<const element*>(p.k), p.k_stride, batch, kv_head);
    v = head_of(static_cast<const element*>(p.v), p.v_stride, batch, kv_head);
    o = head_of(static_cast<element*>(p.o), p.o_stride, batch, head);
    lse = p.lse == nullptr ? nullptr : p.lse + batch * p.lse_stride[0] + head * p.lse_stride[1];
  }

  // Where all rows start 16-byte aligned, tiles can be copied asynchronously.
  __device__ __forceinline__ bool kv_aligned(const SdpaParams& p) const {
    return rows_are_16_byte_aligned(k, p.k_stride[2]) && rows_are_16_byte_aligned(v, p.v_stride[2]);
  }
};

// The tiles of 32 keys that this CTA's rows may see.
__device__ __forceinline__ KeyRange tiles_of_rows(const SdpaParams& p, int first_row, int rows) {
  return visible_tiles(p, first_row, min(first_row + rows, p.seq_q) - 1, TILE_KEYS);
}

// Starts (or, unaligned, does) the copy of one K and one V tile by THREADS threads.
template <int THREADS>
__device__ __forceinline__ void copy_kv(const SdpaParams& p, const Head& head, int tile, element* k,
                                        element* v, int thread) {
  const int first_key = tile * TILE_KEYS;
  const int valid_keys = min(TILE_KEYS, p.seq_kv - first_key);
  const bool aligned = head.kv_aligned(p);
  copy_tile<KvTile, THREADS>(aligned, k, head.k + first_key * p.k_stride[2], p.k_stride[2],
                             valid_keys, p.dim_qk, thread);
  copy_tile<KvTile, THREADS>(aligned, v, head.v + first_key * p.v_stride[2], p.v_stride[2],
                             valid_keys, p.dim_v, thread);
}

struct OwnedRow {
  float m = NEG_INF;
  float l = 0.0f;
  float o[COLUMNS_PER_LANE] = {};

  // One streaming-softmax step over a tile in shared memory.
  __device__ __forceinline__ void attend(const SdpaParams& p, const Head& head, int row, int tile,
                                         const element* k, const element* v, int lane) {
    const element* q_row = head.q + row * p.q_stride[2];
    float dot = 0.0f;
#pragma unroll 4
    for (int col = 0; col < p.dim_qk; ++col)
      dot += to_float(q_row[col]) * to_float(k[lane * PITCH + col]);
    absorb(p, row, tile, dot, v, lane);
  }

  // The same from the product of q with this lane's key on.
  __device__ __forceinline__ void absorb(const SdpaParams& p, int row, int tile, float dot,
                                         const element* v, int lane) {
    const bool visible = is_visible(p, row, tile * TILE_KEYS + lane);
    const float score = visible ? dot * p.scale_log2 : NEG_INF;
    const float m_new = fmaxf(m, group_max(score));
    const float alpha = rescale_factor(m, m_new);
    const float weight = exp2f(score - subtrahend(m_new));
    m = m_new;
    l = l * alpha + group_sum(weight);
#pragma unroll
    for (int c = 0; c < COLUMNS_PER_LANE; ++c) o[c] *= alpha;
#pragma unroll 4
    for (int key = 0; key < TILE_KEYS; ++key) {
      const float w = __shfl_sync(WHOLE_WARP, weight, key);
#pragma unroll
      for (int c = 0; c < COLUMNS_PER_LANE; ++c)
        o[c] += w * to_float(v[key * PITCH + lane + c * LANES]);
    }
  }

  __device__ __forceinline__ void store(const SdpaParams& p, const Head& head, int row,
                                        int lane) const {
    const float inverse_l = inverse_sum(l);
#pragma unroll
    for (int c = 0; c < COLUMNS_PER_LANE; ++c) {
      const int col = lane + c * LANES;
      if (col < p.dim_v)
        head.o[row * p.o_stride[2] + col] = from_float<element>(o[c] * inverse_l);
    }
    if (head.lse != nullptr && lane == 0) head.lse[row] = log_sum_exp(m, l);
  }
};
