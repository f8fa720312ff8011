// sdpa_v2b - correctness first: every row has exactly one owner.
//
// A CTA takes BLOCK_M query rows. Of its 8 warps, warps 0-6 compute and own disjoint,
// contiguous rows: a row's scores, its (m, l) and its output accumulator are touched by
// its owner alone, so inside a tile a __syncwarp() is all the ordering they need. Warp 7
// owns no rows; it only prefetches K and V tiles into a ring of two stages.
//
//   tile t      : warp 7 issues t+1, waits for t | barrier A | warps 0-6 compute t | barrier B
//   barrier A   : tile t is in shared memory for everybody
//   barrier B   : nobody reads stage t%2 any more; warp 7 may refill it with t+2
//
// Set by the manifest: DTYPE_BF16, HEAD_DIM (multiple of 16), BLOCK_N (32 or 64; less
// where 64 does not fit the device's shared memory).
#include "copy.cuh"
#include "lse.cuh"
#include "mask.cuh"
#include "softmax.cuh"

constexpr int LANES = 32;
constexpr int COMPUTE_WARPS = 7;
constexpr int PRODUCER_WARP = COMPUTE_WARPS;  // the eighth
constexpr int MAX_REGISTERS = 72;             // the kernel's budget, enforced by ptxas
constexpr int STAGES = 2;
constexpr int BLOCK_M = 64;

// Eight elements of padding: rows then start 4 banks apart, so eight lanes that read 16
// bytes from eight consecutive rows touch all 32 banks once.
constexpr int ROW_PADDING = 8;
constexpr int PITCH = HEAD_DIM + ROW_PADDING;
constexpr int SCORE_PITCH = BLOCK_N + ROW_PADDING;

using QTile = TileShape<BLOCK_M, HEAD_DIM, PITCH>;
using KvTile = TileShape<BLOCK_N, HEAD_DIM, PITCH>;

// Rows a warp works on together, so that one read of K or V serves several rows.
constexpr int ROWS_AT_ONCE = 3;
constexpr int KEYS_PER_LANE = BLOCK_N / LANES;
// A lane owns pairs of neighbouring output columns: 2*lane, 2*lane + 64, ...
constexpr int PAIRS_PER_LANE = (HEAD_DIM + 63) / 64;
constexpr int KEYS_PER_WEIGHT_LOAD = 4;

static_assert(HEAD_DIM % 16 == 0 && BLOCK_N % LANES == 0, "tile sizes");

// The shared-memory map, in bytes.
constexpr int Q_BYTES = BLOCK_M * PITCH * 2;
constexpr int KV_STAGE_BYTES = BLOCK_N * PITCH * 2;
constexpr int SCORE_BYTES = BLOCK_M * SCORE_PITCH * 4;
constexpr int O_BYTES = BLOCK_M * PITCH * 4;
constexpr int K_OFFSET = Q_BYTES;
constexpr int V_OFFSET = K_OFFSET + STAGES * KV_STAGE_BYTES;
constexpr int SCORE_OFFSET = V_OFFSET + STAGES * KV_STAGE_BYTES;
constexpr int O_OFFSET = SCORE_OFFSET + SCORE_BYTES;
constexpr int ROW_STATE_OFFSET = O_OFFSET + O_BYTES;
static_assert(ROW_STATE_OFFSET + BLOCK_M * int(sizeof(RowState)) == DYNAMIC_SMEM_BYTES,
              "the manifest's dynamic_smem is the size of this layout");

extern __shared__ __align__(16) unsigned char shared_memory[];

__device__ __forceinline__ element* q_tile() { return reinterpret_cast<element*>(shared_memory); }
__device__ __forceinline__ element* k_tile(int stage) {
  return reinterpret_cast<element*>(shared_memory + K_OFFSET + stage * KV_STAGE_BYTES);
}
__device__ __forceinline__ element* v_tile(int stage) {
  return reinterpret_cast<element*>(shared_memory + V_OFFSET + stage * KV_STAGE_BYTES);
}
__device__ __forceinline__ float* score_row(int row) {
  return reinterpret_cast<float*>(shared_memory + SCORE_OFFSET) + row * SCORE_PITCH;
}
__device__ __forceinline__ float* o_row(int row) {
  return reinterpret_cast<float*>(shared_memory + O_OFFSET) + row * PITCH;
}
__device__ __forceinline__ RowState* row_state(int row) {
  return reinterpret_cast<RowState*>(shared_memory + ROW_STATE_OFFSET) + row;
}

struct Rows {
  int begin;
  int end;
};

// The rows of the tile that a compute warp owns: 64 rows over 7 warps are 9 or 10 each.
__device__ __forceinline__ Rows rows_owned_by(int warp) {
  return {warp * BLOCK_M / COMPUTE_WARPS, (warp + 1) * BLOCK_M / COMPUTE_WARPS};
}

// Warp 7: brings tile `tile` into its stage of the ring.
__device__ __forceinline__ void prefetch_tile(const SdpaParams& p, const element* k,
                                              const element* v, int tile, int stage, bool aligned,
                                              int lane) {
  const int first_key = tile * BLOCK_N;
  const int valid_keys = min(BLOCK_N, p.seq_kv - first_key);
  copy_tile<KvTile, LANES>(aligned, k_tile(stage), k + first_key * p.k_stride[2], p.k_stride[2],
                           valid_keys, p.dim_qk, lane);
  copy_tile<KvTile, LANES>(aligned, v_tile(stage), v + first_key * p.v_stride[2], p.v_stride[2],
                           valid_keys, p.dim_v, lane);
  cp_async_commit();
}

// An owner's first acts: its Q rows (zero past the end), an empty accumulator, an empty (m, l).
__device__ __forceinline__ void prepare_rows(const SdpaParams& p, const element* q, int first_row,
                                             Rows rows, int lane) {
#pragma unroll 1
  for (int r = rows.begin; r < rows.end; ++r) {
    const bool row_exists = first_row + r < p.seq_q;
    for (int col = lane; col < HEAD_DIM; col += LANES) {
      const bool exists = row_exists && col < p.dim_qk;
      q_tile()[r * PITCH + col] =
          exists ? q[(first_row + r) * p.q_stride[2] + col] : from_float<element>(0.0f);
      o_row(r)[col] = 0.0f;
    }
    if (lane == 0) *row_state(r) = RowState{};
  }
  __syncwarp();
}

// Scores of up to ROWS_AT_ONCE rows against the tile; a lane takes the keys lane, lane+32.
__device__ __forceinline__ void score_rows(const SdpaParams& p, const element* k, int first_row,
                                           int first_key, Rows rows, int lane) {
  float dot[ROWS_AT_ONCE][KEYS_PER_LANE] = {};
#pragma unroll 1
  for (int col = 0; col < HEAD_DIM; col += ELEMENTS_PER_CHUNK) {
    float k_part[KEYS_PER_LANE][ELEMENTS_PER_CHUNK];
#pragma unroll
    for (int u = 0; u < KEYS_PER_LANE; ++u)
      unpack(*reinterpret_cast<const Chunk8*>(k + (lane + u * LANES) * PITCH + col), k_part[u]);
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; ++i) {
      // Past its last row the warp repeats it; the result is dropped below.
      const int r = min(rows.begin + i, rows.end - 1);
      float q_part[ELEMENTS_PER_CHUNK];
      unpack(*reinterpret_cast<const Chunk8*>(q_tile() + r * PITCH + col), q_part);
#pragma unroll
      for (int u = 0; u < KEYS_PER_LANE; ++u)
#pragma unroll
        for (int e = 0; e < ELEMENTS_PER_CHUNK; ++e) dot[i][u] += q_part[e] * k_part[u][e];
    }
  }
#pragma unroll
  for (int i = 0; i < ROWS_AT_ONCE; ++i) {
    const int r = rows.begin + i;
    if (r >= rows.end) break;
#pragma unroll
    for (int u = 0; u < KEYS_PER_LANE; ++u) {
      const int key = lane + u * LANES;
      const bool visible = is_visible(p, first_row + r, first_key + key);
      score_row(r)[key] = visible ? dot[i][u] * p.scale_log2 : NEG_INF;
    }
  }
  __syncwarp();
}

// One row's streaming-softmax step: scores become weights in place, (m, l) moves on, and
// the accumulator is brought to the new maximum.
__device__ __forceinline__ void update_row(int r, int lane) {
  float score[KEYS_PER_LANE];
  float tile_max = NEG_INF;
#pragma unroll
  for (int u = 0; u < KEYS_PER_LANE; ++u) {
    score[u] = score_row(r)[lane + u * LANES];
    tile_max = fmaxf(tile_max, score[u]);
  }
  const RowState before = *row_state(r);
  const float m = fmaxf(before.m, group_max(tile_max));
  const float alpha = rescale_factor(before.m, m);

  float tile_sum = 0.0f;
#pragma unroll
  for (int u = 0; u < KEYS_PER_LANE; ++u) {
    const float weight = exp2f(score[u] - subtrahend(m));
    tile_sum += weight;
    score_row(r)[lane + u * LANES] = weight;
  }
  // The reduction is also the point after which every lane has read the old (m, l).
  const float l = before.l * alpha + group_sum(tile_sum);
  __syncwarp();
  if (lane == 0) *row_state(r) = {m, l};
  for (int col = lane; col < HEAD_DIM; col += LANES) o_row(r)[col] *= alpha;
  __syncwarp();
}

// Adds weights x V to the accumulators of up to ROWS_AT_ONCE rows.
__device__ __forceinline__ void accumulate_rows(const element* v, Rows rows, int lane) {
  float sum[ROWS_AT_ONCE][PAIRS_PER_LANE][2] = {};
#pragma unroll 1
  for (int key = 0; key < BLOCK_N; key += KEYS_PER_WEIGHT_LOAD) {
    float2 v_pair[KEYS_PER_WEIGHT_LOAD][PAIRS_PER_LANE];
#pragma unroll
    for (int u = 0; u < KEYS_PER_WEIGHT_LOAD; ++u)
#pragma unroll
      for (int c = 0; c < PAIRS_PER_LANE; ++c) {
        // Lanes past the last column repeat the first pair; they store nothing.
        const int col = 2 * lane + 64 * c < HEAD_DIM ? 2 * lane + 64 * c : 0;
        v_pair[u][c] =
            to_float2(*reinterpret_cast<const element2*>(v + (key + u) * PITCH + col));
      }
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; ++i) {
      const int r = min(rows.begin + i, rows.end - 1);
      const float4 weight = *reinterpret_cast<const float4*>(score_row(r) + key);
      const float w[KEYS_PER_WEIGHT_LOAD] = {weight.x, weight.y, weight.z, weight.w};
#pragma unroll
      for (int u = 0; u < KEYS_PER_WEIGHT_LOAD; ++u)
#pragma unroll
        for (int c = 0; c < PAIRS_PER_LANE; ++c) {
          sum[i][c][0] += w[u] * v_pair[u][c].x;
          sum[i][c][1] += w[u] * v_pair[u][c].y;
        }
    }
  }
#pragma unroll
  for (int i = 0; i < ROWS_AT_ONCE; ++i) {
    const int r = rows.begin + i;
    if (r >= rows.end) break;
#pragma unroll
    for (int c = 0; c < PAIRS_PER_LANE; ++c) {
      const int col = 2 * lane + 64 * c;
      if (col < HEAD_DIM) {
        float2* o = reinterpret_cast<float2*>(o_row(r) + col);
        *o = make_float2(o->x + sum[i][c][0], o->y + sum[i][c][1]);
      }
    }
  }
  __syncwarp();
}

// All of an owner's work on one tile.
__device__ __forceinline__ void compute_tile(const SdpaParams& p, int first_row, int tile,
                                             int stage, Rows rows, int lane) {
#pragma unroll 1
  for (int begin = rows.begin; begin < rows.end; begin += ROWS_AT_ONCE) {
    const Rows group = {begin, min(begin + ROWS_AT_ONCE, rows.end)};
    score_rows(p, k_tile(stage), first_row, tile * BLOCK_N, group, lane);
#pragma unroll 1
    for (int r = group.begin; r < group.end; ++r) update_row(r, lane);
    accumulate_rows(v_tile(stage), group, lane);
  }
}

__device__ __forceinline__ void store_rows(const SdpaParams& p, int batch, int head, int first_row,
                                           Rows rows, int lane) {
  element* o = head_of(static_cast<element*>(p.o), p.o_stride, batch, head);
#pragma unroll 1
  for (int r = rows.begin; r < rows.end && first_row + r < p.seq_q; ++r) {
    const int row = first_row + r;
    const RowState state = *row_state(r);
    const float inverse_l = inverse_sum(state.l);
    for (int col = lane; col < p.dim_v; col += LANES)
      o[row * p.o_stride[2] + col] = from_float<element>(o_row(r)[col] * inverse_l);
    if (p.lse != nullptr && lane == 0)
      LSE_OF(p, batch, head, row) = log_sum_exp(state.m, state.l);
  }
}

extern "C" __global__ void __maxnreg__(MAX_REGISTERS)
    sdpa_v2b(const __grid_constant__ SdpaParams p) {
  const int lane = threadIdx.x % LANES;
  const int warp = threadIdx.x / LANES;
  const int first_row = blockIdx.x * BLOCK_M;
  const int head = blockIdx.y;
  const int batch = blockIdx.z;
  const int kv_head = kv_head_of(p, head);
  const element* q = head_of(static_cast<const element*>(p.q), p.q_stride, batch, head);
  const element* k = head_of(static_cast<const element*>(p.k), p.k_stride, batch, kv_head);
  const element* v = head_of(static_cast<const element*>(p.v), p.v_stride, batch, kv_head);
  const bool aligned =
      rows_are_16_byte_aligned(k, p.k_stride[2]) && rows_are_16_byte_aligned(v, p.v_stride[2]);

  const bool computes = warp != PRODUCER_WARP;
  const Rows rows = computes ? rows_owned_by(warp) : Rows{0, 0};
  const int last_row = min(first_row + BLOCK_M, p.seq_q) - 1;
  const KeyRange tiles = visible_tiles(p, first_row, last_row, BLOCK_N);

  if (computes)
    prepare_rows(p, q, first_row, rows, lane);
  else if (tiles.begin < tiles.end)
    prefetch_tile(p, k, v, tiles.begin, 0, aligned, lane);

  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    const int stage = (tile - tiles.begin) % STAGES;
    if (!computes) {
      if (tile + 1 < tiles.end) {
        prefetch_tile(p, k, v, tile + 1, (stage + 1) % STAGES, aligned, lane);
        cp_async_wait<1>();  // all but the newest group: this tile has arrived
      } else {
        cp_async_wait<0>();
      }
    }
    __syncthreads();  // A: the tile is visible to its readers
    if (computes) compute_tile(p, first_row, tile, stage, rows, lane);
    __syncthreads();  // B: the stage may be overwritten
  }

  if (computes) store_rows(p, batch, head, first_row, rows, lane);
}
