// sdpa_v2c - the same ownership of rows as sdpa_v2b, with tensor cores (WMMA 16x16x16).
//
// Each warp owns 16 query rows, the height of a WMMA tile. A key tile is consumed in
// steps of KEYS_PER_STEP keys: scores of a step go through a small strip private to the
// warp, so there is no score buffer for the whole tile. The layout of a WMMA fragment is
// unspecified, hence everything that is done per row (softmax, rescaling) happens in
// shared memory, where element (row, column) has an address.
//
// K is needed transposed: cp.async can only move it, so it lands as it is and one pass
// transposes it, swizzled, into k_transposed. Pipeline over the tiles t:
//
//   wait for K(t), V(t) | barrier A | transpose K(t) | barrier B | issue K(t+1), V(t+1) | compute t
//   barrier A : tile t has landed for everybody; everybody is done with tile t-1
//   barrier B : k_transposed is complete; the landing buffer of K is free again
//
// Set by the manifest: DTYPE_BF16, HEAD_DIM (multiple of 32), BLOCK_M, BLOCK_N,
// KEYS_PER_STEP, WEIGHT_PARTS.
#include <mma.h>

#include "copy.cuh"
#include "dtype.cuh"
#include "mask.cuh"
#include "params.h"
#include "softmax.cuh"

namespace wmma = nvcuda::wmma;

constexpr int LANES = 32;
constexpr int FRAG = 16;  // WMMA tiles are 16 x 16 x 16
constexpr int WARPS = BLOCK_M / FRAG;
constexpr int THREADS = WARPS * LANES;
constexpr int V_STAGES = 2;
constexpr int MAX_REGISTERS = 72;

constexpr int PADDING = 8;  // elements; spreads rows over the banks, see sdpa_v2b
constexpr int PITCH = HEAD_DIM + PADDING;
constexpr int KT_PITCH = BLOCK_N + PADDING;
constexpr int O_PITCH = HEAD_DIM + 4;
constexpr int SCORE_PITCH = KEYS_PER_STEP + 4;
constexpr int WEIGHT_PITCH = KEYS_PER_STEP + PADDING;

using QTile = TileShape<BLOCK_M, HEAD_DIM, PITCH>;
using KvTile = TileShape<BLOCK_N, HEAD_DIM, PITCH>;

// Two lanes share a row in the softmax, each taking half of a step's keys.
constexpr int LANES_PER_ROW = LANES / FRAG;
constexpr int KEYS_PER_LANE = KEYS_PER_STEP / LANES_PER_ROW;

static_assert(HEAD_DIM % FRAG == 0 && BLOCK_M % FRAG == 0, "whole WMMA tiles");
static_assert(KEYS_PER_STEP % FRAG == 0 && BLOCK_N % KEYS_PER_STEP == 0, "whole steps");

// The shared-memory map, in bytes. A warp's strip holds first scores, then weights.
constexpr int Q_BYTES = BLOCK_M * PITCH * 2;
constexpr int KV_BYTES = BLOCK_N * PITCH * 2;
constexpr int KT_BYTES = HEAD_DIM * KT_PITCH * 2;
constexpr int O_BYTES = BLOCK_M * O_PITCH * 4;
constexpr int SCORE_STRIP_BYTES = FRAG * SCORE_PITCH * 4;
constexpr int WEIGHT_STRIP_BYTES = WEIGHT_PARTS * FRAG * WEIGHT_PITCH * 2;
constexpr int STRIP_BYTES =
    SCORE_STRIP_BYTES > WEIGHT_STRIP_BYTES ? SCORE_STRIP_BYTES : WEIGHT_STRIP_BYTES;
constexpr int K_OFFSET = Q_BYTES;
constexpr int KT_OFFSET = K_OFFSET + KV_BYTES;
constexpr int V_OFFSET = KT_OFFSET + KT_BYTES;
constexpr int O_OFFSET = V_OFFSET + V_STAGES * KV_BYTES;
constexpr int STRIP_OFFSET = O_OFFSET + O_BYTES;

extern __shared__ __align__(128) unsigned char shared_memory[];

__device__ __forceinline__ element* q_tile() { return reinterpret_cast<element*>(shared_memory); }
__device__ __forceinline__ element* k_landing() {
  return reinterpret_cast<element*>(shared_memory + K_OFFSET);
}
__device__ __forceinline__ element* k_transposed() {
  return reinterpret_cast<element*>(shared_memory + KT_OFFSET);
}
__device__ __forceinline__ element* v_tile(int stage) {
  return reinterpret_cast<element*>(shared_memory + V_OFFSET + stage * KV_BYTES);
}
__device__ __forceinline__ float* o_tile() {
  return reinterpret_cast<float*>(shared_memory + O_OFFSET);
}
__device__ __forceinline__ float* score_strip(int warp) {
  return reinterpret_cast<float*>(shared_memory + STRIP_OFFSET + warp * STRIP_BYTES);
}
__device__ __forceinline__ element* weight_strip(int warp, int part) {
  return reinterpret_cast<element*>(shared_memory + STRIP_OFFSET + warp * STRIP_BYTES) +
         part * FRAG * WEIGHT_PITCH;
}

// The column of k_transposed's row `dim` that holds key `key`. Blocks of 8 keys are XORed
// with the dimension's block, so that lanes which write 8 blocks of dimensions of one key
// hit different banks. The block of dimensions counts in pairs: a 16x16 fragment spans two
// of them and must find its 16 keys side by side and in order in all of its rows.
__device__ __forceinline__ int swizzled_column(int dim, int key) {
  constexpr int KEY_BLOCKS = BLOCK_N / 8;
  const int dim_block = dim / FRAG * 2 % KEY_BLOCKS;
  return ((key / 8) ^ dim_block) * 8 + key % 8;
}

__device__ __forceinline__ void issue_tile(const SdpaParams& p, const element* k, const element* v,
                                           int tile, int stage, bool aligned) {
  const int first_key = tile * BLOCK_N;
  const int valid_keys = min(BLOCK_N, p.seq_kv - first_key);
  copy_tile<KvTile, THREADS>(aligned, k_landing(), k + first_key * p.k_stride[2], p.k_stride[2],
                             valid_keys, p.dim_qk, threadIdx.x);
  copy_tile<KvTile, THREADS>(aligned, v_tile(stage), v + first_key * p.v_stride[2], p.v_stride[2],
                             valid_keys, p.dim_v, threadIdx.x);
  cp_async_commit();
}

__device__ __forceinline__ void transpose_k() {
#pragma unroll 1
  for (int chunk = threadIdx.x; chunk < KvTile::CHUNKS; chunk += THREADS) {
    const int key = chunk / KvTile::CHUNKS_PER_ROW;
    const int dim = chunk % KvTile::CHUNKS_PER_ROW * ELEMENTS_PER_CHUNK;
    const Chunk8 eight = *reinterpret_cast<const Chunk8*>(k_landing() + key * PITCH + dim);
    element* column = k_transposed() + dim * KT_PITCH + swizzled_column(dim, key);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      column[(2 * i) * KT_PITCH] = eight.pair[i].x;
      column[(2 * i + 1) * KT_PITCH] = eight.pair[i].y;
    }
  }
}

// strip[16][KEYS_PER_STEP] = Q(the warp's rows) x K^T(one step's keys), unscaled.
__device__ __forceinline__ void score_step(int warp, int step_key) {
#pragma unroll 1
  for (int n = 0; n < KEYS_PER_STEP; n += FRAG) {
    wmma::fragment<wmma::accumulator, FRAG, FRAG, FRAG, float> scores;
    wmma::fill_fragment(scores, 0.0f);
#pragma unroll 2
    for (int dim = 0; dim < HEAD_DIM; dim += FRAG) {
      wmma::fragment<wmma::matrix_a, FRAG, FRAG, FRAG, element, wmma::row_major> q;
      wmma::fragment<wmma::matrix_b, FRAG, FRAG, FRAG, element, wmma::row_major> kt;
      wmma::load_matrix_sync(q, q_tile() + warp * FRAG * PITCH + dim, PITCH);
      wmma::load_matrix_sync(
          kt, k_transposed() + dim * KT_PITCH + swizzled_column(dim, step_key + n), KT_PITCH);
      wmma::mma_sync(scores, q, kt, scores);
    }
    wmma::store_matrix_sync(score_strip(warp) + n, scores, SCORE_PITCH, wmma::mem_row_major);
  }
  __syncwarp();
}

// Writes a weight in the precision the tensor cores read and returns what they will see.
// One 16-bit part is exact enough for fp16 (11 bits); bf16 has only 8, which in rows with
// few visible keys costs more than 1e-3, so the remainder goes into a second part.
__device__ __forceinline__ float store_weight(int warp, int row, int key, float weight) {
  const element high = from_float<element>(weight);
  weight_strip(warp, 0)[row * WEIGHT_PITCH + key] = high;
  if (WEIGHT_PARTS == 1) return to_float(high);
  const element low = from_float<element>(weight - to_float(high));
  weight_strip(warp, WEIGHT_PARTS - 1)[row * WEIGHT_PITCH + key] = low;
  return weight;
}

// The streaming-softmax step of the warp's 16 rows, two lanes a row. Scores become
// weights, (m, l) move on, and the accumulator rows move to the new maximum.
__device__ __forceinline__ void softmax_step(const SdpaParams& p, int warp, int lane,
                                             int first_row, int first_key, float& m, float& l) {
  const int r = lane / LANES_PER_ROW;
  const int half = lane % LANES_PER_ROW;
  const int row = first_row + warp * FRAG + r;
  const float* scores = score_strip(warp) + r * SCORE_PITCH + half * KEYS_PER_LANE;

  float x[KEYS_PER_LANE];
  float step_max = NEGATIVE_INFINITY;
#pragma unroll
  for (int i = 0; i < KEYS_PER_LANE; ++i) {
    const bool visible = is_visible(p, row, first_key + half * KEYS_PER_LANE + i);
    x[i] = visible ? scores[i] * p.scale_log2 : NEGATIVE_INFINITY;
    step_max = fmaxf(step_max, x[i]);
  }
  const float m_new = fmaxf(m, group_max<LANES_PER_ROW>(step_max));
  const float alpha = rescale_factor(m, m_new);
  m = m_new;
  __syncwarp();  // all scores are read: the strip may now hold weights

  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < KEYS_PER_LANE; ++i)
    sum += store_weight(warp, r, half * KEYS_PER_LANE + i, exp2f(x[i] - subtrahend(m)));
  l = l * alpha + group_sum<LANES_PER_ROW>(sum);

  // Most steps do not move any maximum of the 16 rows once the first tiles are through.
  if (__any_sync(WHOLE_WARP, alpha != 1.0f)) {
    float4* o = reinterpret_cast<float4*>(o_tile() + (warp * FRAG + r) * O_PITCH);
#pragma unroll 4
    for (int c = half; c < HEAD_DIM / 4; c += LANES_PER_ROW) {
      const float4 old = o[c];
      o[c] = make_float4(old.x * alpha, old.y * alpha, old.z * alpha, old.w * alpha);
    }
  }
  __syncwarp();
}

// O(the warp's rows) += weights x V(one step's keys)
__device__ __forceinline__ void accumulate_step(int warp, const element* v, int step_key) {
#pragma unroll 1
  for (int col = 0; col < HEAD_DIM; col += FRAG) {
    float* o = o_tile() + warp * FRAG * O_PITCH + col;
    wmma::fragment<wmma::accumulator, FRAG, FRAG, FRAG, float> sum;
    wmma::load_matrix_sync(sum, o, O_PITCH, wmma::mem_row_major);
#pragma unroll
    for (int key = 0; key < KEYS_PER_STEP; key += FRAG) {
      wmma::fragment<wmma::matrix_b, FRAG, FRAG, FRAG, element, wmma::row_major> values;
      wmma::load_matrix_sync(values, v + (step_key + key) * PITCH + col, PITCH);
#pragma unroll
      for (int part = 0; part < WEIGHT_PARTS; ++part) {
        wmma::fragment<wmma::matrix_a, FRAG, FRAG, FRAG, element, wmma::row_major> weights;
        wmma::load_matrix_sync(weights, weight_strip(warp, part) + key, WEIGHT_PITCH);
        wmma::mma_sync(sum, weights, values, sum);
      }
    }
    wmma::store_matrix_sync(o, sum, O_PITCH, wmma::mem_row_major);
  }
  __syncwarp();
}

__device__ __forceinline__ void store_rows(const SdpaParams& p, int batch, int head, int first_row,
                                           int warp, int lane, float m, float l) {
  element* o = head_of(static_cast<element*>(p.o), p.o_stride, batch, head);
  const float inverse_l = inverse_sum(l);
  for (int r = 0; r < FRAG; ++r) {
    const int row = first_row + warp * FRAG + r;
    // Every lane takes part in the shuffle, whether or not the row exists.
    const float factor = __shfl_sync(WHOLE_WARP, inverse_l, r * LANES_PER_ROW);
    if (row >= p.seq_q) continue;
    for (int col = lane; col < p.dim_v; col += LANES)
      o[row * p.o_stride[2] + col] =
          from_float<element>(o_tile()[(warp * FRAG + r) * O_PITCH + col] * factor);
  }
  const int own_row = first_row + warp * FRAG + lane / LANES_PER_ROW;
  if (p.lse != nullptr && lane % LANES_PER_ROW == 0 && own_row < p.seq_q)
    p.lse[batch * p.lse_stride[0] + head * p.lse_stride[1] + own_row] = log_sum_exp(m, l);
}

extern "C" __global__ void __maxnreg__(MAX_REGISTERS)
    sdpa_v2c(const __grid_constant__ SdpaParams p) {
  const int lane = threadIdx.x % LANES;
  const int warp = threadIdx.x / LANES;
  const int first_row = blockIdx.x * BLOCK_M;
  const int head = blockIdx.y;
  const int batch = blockIdx.z;
  const int kv_head = kv_head_of(p, head);
  const element* q = head_of(static_cast<const element*>(p.q), p.q_stride, batch, head);
  const element* k = head_of(static_cast<const element*>(p.k), p.k_stride, batch, kv_head);
  const element* v = head_of(static_cast<const element*>(p.v), p.v_stride, batch, kv_head);
  const bool kv_aligned =
      rows_are_16_byte_aligned(k, p.k_stride[2]) && rows_are_16_byte_aligned(v, p.v_stride[2]);

  const int valid_rows = min(BLOCK_M, p.seq_q - first_row);
  const KeyRange tiles = visible_tiles(p, first_row, first_row + valid_rows - 1, BLOCK_N);

  copy_tile<QTile, THREADS>(rows_are_16_byte_aligned(q, p.q_stride[2]), q_tile(),
                            q + first_row * p.q_stride[2], p.q_stride[2], valid_rows, p.dim_qk,
                            threadIdx.x);
  cp_async_commit();
  if (tiles.begin < tiles.end) issue_tile(p, k, v, tiles.begin, 0, kv_aligned);
  for (int i = threadIdx.x; i < BLOCK_M * O_PITCH; i += THREADS) o_tile()[i] = 0.0f;

  float m = NEGATIVE_INFINITY;  // of row lane/2, the same in both of its lanes
  float l = 0.0f;

  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    const int stage = (tile - tiles.begin) % V_STAGES;
    cp_async_wait<0>();
    __syncthreads();  // A
    transpose_k();
    __syncthreads();  // B
    if (tile + 1 < tiles.end) issue_tile(p, k, v, tile + 1, (stage + 1) % V_STAGES, kv_aligned);

#pragma unroll 1
    for (int step_key = 0; step_key < BLOCK_N; step_key += KEYS_PER_STEP) {
      score_step(warp, step_key);
      softmax_step(p, warp, lane, first_row, tile * BLOCK_N + step_key, m, l);
      accumulate_step(warp, v_tile(stage), step_key);
    }
  }

  cp_async_wait<0>();  // a CTA without visible keys still has its Q copy in flight
  __syncthreads();     // and its accumulator was cleared by other threads than its readers
  store_rows(p, batch, head, first_row, warp, lane, m, l);
}
