// sdpa_v2c - the same ownership of rows as sdpa_v2b, with tensor cores (WMMA 16x16x16).
//
// A warp owns 16 query rows, the height of a WMMA tile, and one of KEY_GROUPS shares of every
// key tile. Small problems have few rows, so warps that split the keys are what fills the
// machine; their partial results meet once, at the end. The warp's scores go
// through a strip private to the warp: there is no score buffer for the whole tile.
// wmma_rows.cuh has what happens to them.
//
// K is needed transposed: cp.async can only move it, so it lands as it is and each thread
// transposes, swizzled, the very chunks it has fetched itself. For those it need not wait for
// anybody else, and with two buffers for the result one barrier per tile t is enough:
//
//   wait for own K(t), V(t) | transpose own K(t) | barrier | issue K(t+1), V(t+1) | compute t
//   barrier : tile t is complete; everybody is done with tile t-1, whose buffers come next
//
// Set by the manifest: DTYPE_BF16, HEAD_DIM (multiple of 32), BLOCK_M, BLOCK_N, KEY_GROUPS,
// KEYS_PER_WARP, WEIGHT_PARTS, NUM_WARPS, DYNAMIC_SMEM_BYTES.
#include "wmma_rows.cuh"

constexpr int WARPS = NUM_WARPS;
constexpr int THREADS = WARPS * LANES;
constexpr int STAGES = 2;
constexpr int MAX_REGISTERS = 72;
// 72 registers hold the accumulator up to dimension 64; beyond, it lives in shared memory.
constexpr bool OUTPUT_IN_REGISTERS = HEAD_DIM <= 64;

constexpr int PADDING = 8;  // elements; spreads rows over the banks, see sdpa_v2b
constexpr int PITCH = HEAD_DIM + PADDING;
constexpr int KT_PITCH = BLOCK_N + PADDING;
constexpr int O_PITCH = HEAD_DIM + 4;

using QTile = TileShape<BLOCK_M, HEAD_DIM, PITCH>;
using KvTile = TileShape<BLOCK_N, HEAD_DIM, PITCH>;
using Strip = WarpStrip<KEYS_PER_WARP, WEIGHT_PARTS>;

static_assert(WARPS * FRAG == BLOCK_M * KEY_GROUPS, "every row has its KEY_GROUPS owners");
static_assert(HEAD_DIM % FRAG == 0 && BLOCK_M % FRAG == 0, "whole WMMA tiles");
static_assert(KEYS_PER_WARP * KEY_GROUPS == BLOCK_N, "every key of a tile has one owner");

// The shared-memory map, in bytes. An accumulator in registers needs room only for the
// merge, when the tiles are no longer needed: it then starts at 0.
constexpr int Q_BYTES = BLOCK_M * PITCH * 2;
constexpr int KV_BYTES = BLOCK_N * PITCH * 2;
constexpr int KT_BYTES = HEAD_DIM * KT_PITCH * 2;
constexpr int O_BYTES = WARPS * FRAG * O_PITCH * 4;
constexpr int K_OFFSET = Q_BYTES;
constexpr int KT_OFFSET = K_OFFSET + KV_BYTES;
constexpr int V_OFFSET = KT_OFFSET + STAGES * KT_BYTES;
constexpr int STRIP_OFFSET = V_OFFSET + STAGES * KV_BYTES;
constexpr int LOOP_BYTES = STRIP_OFFSET + WARPS * Strip::BYTES;
constexpr int O_OFFSET = OUTPUT_IN_REGISTERS ? 0 : LOOP_BYTES;
constexpr int LOOP_AND_MERGE_BYTES =
    LOOP_BYTES > O_OFFSET + O_BYTES ? LOOP_BYTES : O_OFFSET + O_BYTES;
constexpr int STATE_OFFSET = LOOP_AND_MERGE_BYTES;
static_assert(STATE_OFFSET + WARPS * FRAG * 8 == DYNAMIC_SMEM_BYTES, "the manifest's dynamic_smem is the size of this layout");

extern __shared__ __align__(128) unsigned char shared_memory[];

__device__ __forceinline__ element* q_tile() { return reinterpret_cast<element*>(shared_memory); }
__device__ __forceinline__ element* k_landing() {
  return reinterpret_cast<element*>(shared_memory + K_OFFSET);
}
__device__ __forceinline__ element* k_transposed(int stage) {
  return reinterpret_cast<element*>(shared_memory + KT_OFFSET + stage * KT_BYTES);
}
__device__ __forceinline__ element* v_tile(int stage) {
  return reinterpret_cast<element*>(shared_memory + V_OFFSET + stage * KV_BYTES);
}
__device__ __forceinline__ float* o_rows(int warp) {
  return reinterpret_cast<float*>(shared_memory + O_OFFSET) + warp * FRAG * O_PITCH;
}
__device__ __forceinline__ float2* state_of_rows(int warp) {
  return reinterpret_cast<float2*>(shared_memory + STATE_OFFSET) + warp * FRAG;
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

// Visits the (pair of keys, chunk of dimensions) that this thread fetches and transposes.
// Neighbouring lanes take neighbouring chunks of a row.
template <typename Visit>
__device__ __forceinline__ void each_key_pair(Visit visit) {
  constexpr int ITEMS = BLOCK_N / 2 * KvTile::CHUNKS_PER_ROW;
#pragma unroll 1
  for (int item = threadIdx.x; item < ITEMS; item += THREADS)
    visit(item / KvTile::CHUNKS_PER_ROW * 2,
          item % KvTile::CHUNKS_PER_ROW * ELEMENTS_PER_CHUNK);
}

__device__ __forceinline__ void issue_tile(const SdpaParams& p, const element* k, const element* v,
                                           int tile, int stage, bool aligned) {
  const int first_key = tile * BLOCK_N;
  const int valid_keys = p.seq_kv - first_key;
  const element* k_rows = k + first_key * p.k_stride[2];
  const element* v_rows = v + first_key * p.v_stride[2];
  each_key_pair([&](int pair, int dim) {
#pragma unroll
    for (int key = pair; key < pair + 2; ++key) {
      const int valid = valid_elements(key, dim, valid_keys, p.dim_qk);
      const int at = key * PITCH + dim;
      // A chunk with nothing valid still needs a legal address to not read from.
      const int row = valid > 0 ? key : 0;
      const int col = valid > 0 ? dim : 0;
      copy_chunk(aligned, k_landing() + at, k_rows + row * p.k_stride[2] + col, valid);
      copy_chunk(aligned, v_tile(stage) + at, v_rows + row * p.v_stride[2] + col, valid);
    }
  });
  cp_async_commit();
}

__device__ __forceinline__ void transpose_own_keys(int stage) {
  each_key_pair([&](int pair, int dim) {
    const element* row = k_landing() + pair * PITCH + dim;
    const Chunk8 even = *reinterpret_cast<const Chunk8*>(row);
    const Chunk8 odd = *reinterpret_cast<const Chunk8*>(row + PITCH);
    element* column = k_transposed(stage) + dim * KT_PITCH + swizzled_column(dim, pair);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      element2* low = reinterpret_cast<element2*>(column + 2 * i * KT_PITCH);
      element2* high = reinterpret_cast<element2*>(column + (2 * i + 1) * KT_PITCH);
      *low = element2(even.pair[i].x, odd.pair[i].x);
      *high = element2(even.pair[i].y, odd.pair[i].y);
    }
  });
}

// strip = Q(the warp's rows) x K^T(one step's keys), unscaled.
__device__ __forceinline__ void score_tile(const Strip& strip, const element* q, const element* kt,
                                           int first_key) {
#pragma unroll
  for (int n = 0; n < KEYS_PER_WARP; n += FRAG) {
    Accumulator scores;
    wmma::fill_fragment(scores, 0.0f);
#pragma unroll 4
    for (int dim = 0; dim < HEAD_DIM; dim += FRAG) {
      LeftRows rows;
      RightRows keys;
      load_operand(rows, q + dim, PITCH);
      load_operand(keys, kt + dim * KT_PITCH + swizzled_column(dim, first_key + n), KT_PITCH);
      wmma::mma_sync(scores, rows, keys, scores);
    }
    wmma::store_matrix_sync(strip.floats() + n, scores, Strip::SCORE_PITCH, wmma::mem_row_major);
  }
}

// The accumulator of 16 rows in shared memory, taken out 16 columns at a time.
struct SharedOutput {
  float* rows;

  __device__ __forceinline__ SharedOutput() : rows(o_rows(threadIdx.x / LANES)) {
    for (int i = threadIdx.x % LANES; i < FRAG * O_PITCH; i += LANES) rows[i] = 0.0f;
  }

  __device__ __forceinline__ void rescale(const Strip&, int lane, float alpha) {
    float4* row = reinterpret_cast<float4*>(rows + lane / LANES_PER_ROW * O_PITCH);
#pragma unroll 4
    for (int c = lane % LANES_PER_ROW; c < HEAD_DIM / 4; c += LANES_PER_ROW) {
      const float4 old = row[c];
      row[c] = make_float4(old.x * alpha, old.y * alpha, old.z * alpha, old.w * alpha);
    }
  }

  __device__ __forceinline__ void add(const Strip& strip, const element* v, int v_pitch) {
#pragma unroll 2
    for (int col = 0; col < HEAD_DIM; col += FRAG) {
      Accumulator o;
      wmma::load_matrix_sync(o, rows + col, O_PITCH, wmma::mem_row_major);
#pragma unroll
      for (int key = 0; key < KEYS_PER_WARP; key += FRAG) {
        RightRows values;
        load_operand(values, v + key * v_pitch + col, v_pitch);
#pragma unroll
        for (int part = 0; part < WEIGHT_PARTS; ++part) {
          LeftRows weights;
          load_operand(weights, strip.weights(part) + key, Strip::WEIGHT_PITCH);
          wmma::mma_sync(o, weights, values, o);
        }
      }
      wmma::store_matrix_sync(rows + col, o, O_PITCH, wmma::mem_row_major);
    }
  }

  __device__ __forceinline__ void write(float*, int) const {}  // it is where it belongs
};

template <bool IN_REGISTERS>
struct OutputOf {
  using Type = RegisterOutput<HEAD_DIM / FRAG>;
};
template <>
struct OutputOf<false> {
  using Type = SharedOutput;
};

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
  if (tiles.begin < tiles.end) issue_tile(p, k, v, tiles.begin, 0, kv_aligned);

  const int row_group = warp / KEY_GROUPS;
  const int own_first_row = first_row + row_group * FRAG;
  const int own_first_key = warp % KEY_GROUPS * KEYS_PER_WARP;  // within a tile
  const element* own_q = q_tile() + row_group * FRAG * PITCH;
  const Strip strip = {shared_memory + STRIP_OFFSET + warp * Strip::BYTES};
  RowState state;
  OutputOf<OUTPUT_IN_REGISTERS>::Type output;

#pragma unroll 1
  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    const int stage = (tile - tiles.begin) % STAGES;
    cp_async_wait<0>();
    transpose_own_keys(stage);
    __syncthreads();
    if (tile + 1 < tiles.end) issue_tile(p, k, v, tile + 1, (stage + 1) % STAGES, kv_aligned);

    const int first_key = tile * BLOCK_N + own_first_key;
    if (none_visible(p, own_first_row, own_first_row + FRAG - 1, first_key, KEYS_PER_WARP))
      continue;
    score_tile(strip, own_q, k_transposed(stage), own_first_key);
    attend_step(p, strip, lane, own_first_row, first_key, v_tile(stage) + own_first_key * PITCH,
                PITCH, state, output);
  }

  cp_async_commit();   // a CTA without visible keys has its Q copy in no group yet,
  cp_async_wait<0>();  // and a wait is for groups alone
  __syncthreads();     // nobody needs the tiles any more: partial results may take their place
  output.write(o_rows(warp), O_PITCH);
  write_state(state_of_rows(warp), lane, state);
  __syncthreads();
  merge_and_store<BLOCK_M, HEAD_DIM, KEY_GROUPS, THREADS>(p, batch, head, first_row, o_rows(0),
                                                          O_PITCH, state_of_rows(0));
}
