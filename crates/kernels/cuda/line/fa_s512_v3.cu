// fa_s512_v3 - specialised for 512 keys and queries of dimension 64, in numbered
// configurations.
//
// Knowing the problem at compile time removes every ragged edge, and lets the output
// accumulator stay in registers from the first tile to the last. One ring of STAGES tiles,
// filled by all threads STAGES-1 tiles ahead, needs one barrier per tile. Two paths share it:
//
//   scalar : a warp owns 4 rows; lanes take keys for the scores and columns for the
//            output, as in sdpa_v2b
//   WMMA   : a warp owns 16 rows and a share of each tile's keys, see wmma_rows.cuh; Q and K
//            are read from shared memory as they lie, K as the column-major B operand
//
// WMMA fragments are only ever loaded from and stored to shared memory.
//
// The manifest's CONFIG picks a row of its table and sets: DTYPE_BF16, BLOCK_M, BLOCK_N,
// NUM_WARPS, NUM_STAGES, USE_SWIZZLE, USE_HALF2, USE_WMMA, WEIGHT_PARTS.
#include "wmma_rows.cuh"

constexpr int SEQUENCE = 512;
constexpr int HEAD_DIM = 64;

// A configuration: everything that the numbered table varies.
template <int ROWS_, int KEYS_, int WARPS_, int STAGES_, bool SWIZZLE_, bool HALF2_>
struct Config {
  static constexpr int ROWS = ROWS_;
  static constexpr int KEYS = KEYS_;
  static constexpr int WARPS = WARPS_;
  static constexpr int STAGES = STAGES_;
  static constexpr bool SWIZZLE = SWIZZLE_;
  static constexpr bool HALF2 = HALF2_;
  static constexpr int THREADS = WARPS * LANES;
  // Against bank conflicts a row is either padded by 8 elements or has its 16-byte chunks
  // permuted; permuting costs no memory.
  static constexpr int PITCH = HEAD_DIM + (SWIZZLE ? 0 : 8);
  static_assert(SEQUENCE % ROWS == 0 && SEQUENCE % KEYS == 0, "no ragged tiles");
  static_assert(STAGES >= 2, "one tile is computed while another is fetched");
};

template <typename C, int TILE_ROWS>
struct Tile : TileShape<TILE_ROWS, HEAD_DIM, C::PITCH> {
  static __device__ __forceinline__ int offset(int row, int col) {
    const int chunk = col / ELEMENTS_PER_CHUNK;
    const int place = C::SWIZZLE ? chunk ^ (row % 8) : chunk;
    return row * C::PITCH + place * ELEMENTS_PER_CHUNK + col % ELEMENTS_PER_CHUNK;
  }
};

extern __shared__ __align__(128) unsigned char shared_memory[];

// The shared-memory map both paths begin with: Q, then the ring of K and V tiles.
template <typename C>
struct Ring {
  using QTile = Tile<C, C::ROWS>;
  using KvTile = Tile<C, C::KEYS>;
  static constexpr int Q_BYTES = C::ROWS * C::PITCH * 2;
  static constexpr int KV_BYTES = C::KEYS * C::PITCH * 2;
  static constexpr int BYTES = Q_BYTES + C::STAGES * 2 * KV_BYTES;

  static __device__ __forceinline__ element* q() {
    return reinterpret_cast<element*>(shared_memory);
  }
  static __device__ __forceinline__ element* k(int stage) {
    return reinterpret_cast<element*>(shared_memory + Q_BYTES + stage * 2 * KV_BYTES);
  }
  static __device__ __forceinline__ element* v(int stage) {
    return reinterpret_cast<element*>(shared_memory + Q_BYTES + (stage * 2 + 1) * KV_BYTES);
  }
};

// Where this CTA stands in the problem.
struct Place {
  const element* q;
  const element* k;
  const element* v;
  bool q_aligned;
  bool kv_aligned;
  int batch;
  int head;
  int first_row;
};

__device__ __forceinline__ Place place_of_cta(const SdpaParams& p, int rows) {
  Place at;
  at.first_row = blockIdx.x * rows;
  at.head = blockIdx.y;
  at.batch = blockIdx.z;
  const int kv_head = kv_head_of(p, at.head);
  at.q = head_of(static_cast<const element*>(p.q), p.q_stride, at.batch, at.head);
  at.k = head_of(static_cast<const element*>(p.k), p.k_stride, at.batch, kv_head);
  at.v = head_of(static_cast<const element*>(p.v), p.v_stride, at.batch, kv_head);
  at.q_aligned = rows_are_16_byte_aligned(at.q, p.q_stride[2]);
  at.kv_aligned = rows_are_16_byte_aligned(at.k, p.k_stride[2]) &&
                  rows_are_16_byte_aligned(at.v, p.v_stride[2]);
  return at;
}

template <typename C>
__device__ __forceinline__ void load_q(const SdpaParams& p, const Place& at) {
  copy_tile<typename Ring<C>::QTile, C::THREADS>(
      at.q_aligned, Ring<C>::q(), at.q + at.first_row * p.q_stride[2], p.q_stride[2], C::ROWS,
      HEAD_DIM, threadIdx.x);
  cp_async_commit();
}

// Commits a group even when there is no tile left, so that waiting for "all but the
// newest STAGES-2 groups" means the same in every turn of the loop.
template <typename C>
__device__ __forceinline__ void issue_tile(const SdpaParams& p, const Place& at, KeyRange tiles,
                                           int tile) {
  using R = Ring<C>;
  if (tile < tiles.end) {
    const int stage = (tile - tiles.begin) % C::STAGES;
    const int first_key = tile * C::KEYS;
    copy_tile<typename R::KvTile, C::THREADS>(at.kv_aligned, R::k(stage),
                                              at.k + first_key * p.k_stride[2], p.k_stride[2],
                                              C::KEYS, HEAD_DIM, threadIdx.x);
    copy_tile<typename R::KvTile, C::THREADS>(at.kv_aligned, R::v(stage),
                                              at.v + first_key * p.v_stride[2], p.v_stride[2],
                                              C::KEYS, HEAD_DIM, threadIdx.x);
  }
  cp_async_commit();
}

// ---------------------------------------------------------------------------- scalar path

template <typename C>
struct ScalarPath {
  static constexpr int ROWS_PER_WARP = 4;  // rows that share one read of K or V
  static constexpr int KEYS_PER_LANE = C::KEYS / LANES;
  // Weights of a warp's rows; keys stay together so that four are one read.
  static constexpr int STRIP_FLOATS = ROWS_PER_WARP * C::KEYS;
  static constexpr int SHARED_BYTES = Ring<C>::BYTES + C::WARPS * STRIP_FLOATS * 4;
  static_assert(C::ROWS == C::WARPS * ROWS_PER_WARP, "every row has one owner");
  static_assert(C::KEYS % LANES == 0, "lanes split the keys evenly");

  int warp = threadIdx.x / LANES;
  int lane = threadIdx.x % LANES;
  // Replicated in all lanes of the warp: (m, l) of each row. Private: two columns of O.
  float m[ROWS_PER_WARP];
  float l[ROWS_PER_WARP];
  float o[ROWS_PER_WARP][2];

  __device__ __forceinline__ ScalarPath() {
#pragma unroll
    for (int r = 0; r < ROWS_PER_WARP; ++r) {
      m[r] = NEG_INF;
      l[r] = 0.0f;
      o[r][0] = o[r][1] = 0.0f;
    }
  }

  __device__ __forceinline__ float* strip() const {
    return reinterpret_cast<float*>(shared_memory + Ring<C>::BYTES) + warp * STRIP_FLOATS;
  }
  // The lane's two columns: neighbours when V is read in pairs.
  __device__ __forceinline__ int column(int which) const {
    return C::HALF2 ? 2 * lane + which : lane + which * LANES;
  }

  template <typename T>
  static __device__ __forceinline__ void read_chunk(const element* tile, int row, int col,
                                                    float (&out)[ELEMENTS_PER_CHUNK]) {
    if (C::HALF2) {
      unpack(*reinterpret_cast<const Chunk8*>(tile + T::offset(row, col)), out);
    } else {
#pragma unroll
      for (int e = 0; e < ELEMENTS_PER_CHUNK; ++e) out[e] = to_float(tile[T::offset(row, col + e)]);
    }
  }

  __device__ __forceinline__ void score_rows(int stage,
                                             float (&dot)[ROWS_PER_WARP][KEYS_PER_LANE]) const {
    using R = Ring<C>;
#pragma unroll 1
    for (int col = 0; col < HEAD_DIM; col += ELEMENTS_PER_CHUNK) {
      float k_part[KEYS_PER_LANE][ELEMENTS_PER_CHUNK];
#pragma unroll
      for (int u = 0; u < KEYS_PER_LANE; ++u)
        read_chunk<typename R::KvTile>(R::k(stage), lane + u * LANES, col, k_part[u]);
#pragma unroll
      for (int i = 0; i < ROWS_PER_WARP; ++i) {
        float q_part[ELEMENTS_PER_CHUNK];
        read_chunk<typename R::QTile>(R::q(), warp * ROWS_PER_WARP + i, col, q_part);
#pragma unroll
        for (int u = 0; u < KEYS_PER_LANE; ++u)
#pragma unroll
          for (int e = 0; e < ELEMENTS_PER_CHUNK; ++e) dot[i][u] += q_part[e] * k_part[u][e];
      }
    }
  }

  // One row's softmax step; its weights go to the strip, its accumulator to the new maximum.
  __device__ __forceinline__ void update_row(const SdpaParams& p, int row, int first_key,
                                             const float (&dot)[KEYS_PER_LANE], float* weights,
                                             float& row_m, float& row_l, float (&row_o)[2]) const {
    float x[KEYS_PER_LANE];
    float tile_max = NEG_INF;
#pragma unroll
    for (int u = 0; u < KEYS_PER_LANE; ++u) {
      const bool visible = is_visible(p, row, first_key + lane + u * LANES);
      x[u] = visible ? dot[u] * p.scale_log2 : NEG_INF;
      tile_max = fmaxf(tile_max, x[u]);
    }
    const float m_new = fmaxf(row_m, group_max(tile_max));
    const float alpha = rescale_factor(row_m, m_new);
    row_m = m_new;
    float sum = 0.0f;
#pragma unroll
    for (int u = 0; u < KEYS_PER_LANE; ++u) {
      const float weight = exp2f(x[u] - subtrahend(m_new));
      weights[lane + u * LANES] = weight;
      sum += weight;
    }
    row_l = row_l * alpha + group_sum(sum);
    row_o[0] *= alpha;
    row_o[1] *= alpha;
  }

  __device__ __forceinline__ float2 read_v(const element* v, int key) const {
    using T = typename Ring<C>::KvTile;
    if (C::HALF2)
      return to_float2(*reinterpret_cast<const element2*>(v + T::offset(key, column(0))));
    return make_float2(to_float(v[T::offset(key, column(0))]),
                       to_float(v[T::offset(key, column(1))]));
  }

  __device__ __forceinline__ void accumulate_rows(int stage) {
    constexpr int KEYS_PER_READ = 4;
#pragma unroll 1
    for (int key = 0; key < C::KEYS; key += KEYS_PER_READ) {
      float2 v[KEYS_PER_READ];
#pragma unroll
      for (int u = 0; u < KEYS_PER_READ; ++u) v[u] = read_v(Ring<C>::v(stage), key + u);
#pragma unroll
      for (int i = 0; i < ROWS_PER_WARP; ++i) {
        const float4 w = *reinterpret_cast<const float4*>(strip() + i * C::KEYS + key);
        o[i][0] += w.x * v[0].x + w.y * v[1].x + w.z * v[2].x + w.w * v[3].x;
        o[i][1] += w.x * v[0].y + w.y * v[1].y + w.z * v[2].y + w.w * v[3].y;
      }
    }
  }

  __device__ __forceinline__ void compute_tile(const SdpaParams& p, const Place& at, int tile,
                                               int stage) {
    float dot[ROWS_PER_WARP][KEYS_PER_LANE] = {};
    score_rows(stage, dot);
    const int first_row = at.first_row + warp * ROWS_PER_WARP;
#pragma unroll
    for (int i = 0; i < ROWS_PER_WARP; ++i)
      update_row(p, first_row + i, tile * C::KEYS, dot[i], strip() + i * C::KEYS, m[i], l[i], o[i]);
    __syncwarp();  // weights written by all lanes, about to be read by all
    accumulate_rows(stage);
    __syncwarp();  // and read by all before the next tile's overwrite them
  }

  __device__ __forceinline__ void store(const SdpaParams& p, const Place& at) const {
    element* out = head_of(static_cast<element*>(p.o), p.o_stride, at.batch, at.head);
#pragma unroll
    for (int r = 0; r < ROWS_PER_WARP; ++r) {
      const int row = at.first_row + warp * ROWS_PER_WARP + r;
      const float inverse_l = inverse_sum(l[r]);
#pragma unroll
      for (int c = 0; c < 2; ++c)
        out[row * p.o_stride[2] + column(c)] = from_float<element>(o[r][c] * inverse_l);
      if (p.lse != nullptr && lane == 0) LSE_OF(p, at.batch, at.head, row) = log_sum_exp(m[r], l[r]);
    }
  }
};

// ------------------------------------------------------------------------------ WMMA path

template <typename C>
struct WmmaPath {
  // Warps beyond one per 16 rows share out the keys of a tile.
  static constexpr int KEY_GROUPS = C::WARPS * FRAG / C::ROWS;
  static constexpr int KEYS_PER_WARP = C::KEYS / KEY_GROUPS;
  using Strip = WarpStrip<KEYS_PER_WARP, WEIGHT_PARTS>;
  static constexpr int STRIP_OFFSET = Ring<C>::BYTES;
  static constexpr int LOOP_BYTES = STRIP_OFFSET + C::WARPS * Strip::BYTES;
  // Partial results are merged where the tiles were.
  static constexpr int O_PITCH = HEAD_DIM + 4;
  static constexpr int MERGE_BYTES = C::WARPS * FRAG * O_PITCH * 4;
  static constexpr int STATE_OFFSET = LOOP_BYTES > MERGE_BYTES ? LOOP_BYTES : MERGE_BYTES;
  static constexpr int SHARED_BYTES = STATE_OFFSET + C::WARPS * FRAG * 8;
  static_assert(C::ROWS * KEY_GROUPS == C::WARPS * FRAG, "a warp owns one WMMA tile of rows");
  static_assert(!C::SWIZZLE, "load_matrix_sync needs rows at a fixed pitch, chunks in order");

  int warp = threadIdx.x / LANES;
  int lane = threadIdx.x % LANES;
  int row_group = warp / KEY_GROUPS;
  int own_first_key = warp % KEY_GROUPS * KEYS_PER_WARP;  // within a tile
  RowState state;
  RegisterOutput<HEAD_DIM / FRAG> output;

  __device__ __forceinline__ Strip strip() const {
    return {shared_memory + STRIP_OFFSET + warp * Strip::BYTES};
  }

  // K is read as it lies, as the column-major B operand.
  __device__ __forceinline__ void score_tile(int stage) const {
    using R = Ring<C>;
    const element* q = R::q() + row_group * FRAG * C::PITCH;
    const element* k = R::k(stage) + own_first_key * C::PITCH;
#pragma unroll
    for (int key = 0; key < KEYS_PER_WARP; key += FRAG) {
      Accumulator sum;
      wmma::fill_fragment(sum, 0.0f);
#pragma unroll 2
      for (int dim = 0; dim < HEAD_DIM; dim += FRAG) {
        LeftRows rows;
        RightColumns keys;
        load_operand(rows, q + dim, C::PITCH);
        load_operand(keys, k + key * C::PITCH + dim, C::PITCH);
        wmma::mma_sync(sum, rows, keys, sum);
      }
      wmma::store_matrix_sync(strip().floats() + key, sum, Strip::SCORE_PITCH,
                              wmma::mem_row_major);
    }
  }

  __device__ __forceinline__ void compute_tile(const SdpaParams& p, const Place& at, int tile,
                                               int stage) {
    const int first_row = at.first_row + row_group * FRAG;
    const int first_key = tile * C::KEYS + own_first_key;
    if (none_visible(p, first_row, first_row + FRAG - 1, first_key, KEYS_PER_WARP)) return;
    score_tile(stage);
    attend_step(p, strip(), lane, first_row, first_key,
                Ring<C>::v(stage) + own_first_key * C::PITCH, C::PITCH, state, output);
  }

  __device__ __forceinline__ void store(const SdpaParams& p, const Place& at) const {
    float* partial = reinterpret_cast<float*>(shared_memory);
    float2* state_of_rows = reinterpret_cast<float2*>(shared_memory + STATE_OFFSET);
    __syncthreads();  // nobody needs the tiles any more
    output.write(partial + warp * FRAG * O_PITCH, O_PITCH);
    write_state(state_of_rows + warp * FRAG, lane, state);
    __syncthreads();
    merge_and_store<C::ROWS, HEAD_DIM, KEY_GROUPS, C::THREADS>(
        p, at.batch, at.head, at.first_row, partial, O_PITCH, state_of_rows);
  }
};

// --------------------------------------------------------------------------- both together

template <typename C, typename Path>
__device__ __forceinline__ void attend(const SdpaParams& p) {
  const Place at = place_of_cta(p, C::ROWS);
  const KeyRange tiles = visible_tiles(p, at.first_row, at.first_row + C::ROWS - 1, C::KEYS);
  load_q<C>(p, at);
#pragma unroll
  for (int s = 0; s < C::STAGES - 1; ++s) issue_tile<C>(p, at, tiles, tiles.begin + s);

  Path path;
  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    cp_async_wait<C::STAGES - 2>();  // this tile, and Q before it, have arrived
    __syncthreads();                 // for everybody; and everybody is done with the last tile
    issue_tile<C>(p, at, tiles, tile + C::STAGES - 1);
    path.compute_tile(p, at, tile, (tile - tiles.begin) % C::STAGES);
  }
  cp_async_wait<0>();  // nothing may be in flight when the CTA's shared memory is given back
  path.store(p, at);
}

using ActiveConfig =
    Config<BLOCK_M, BLOCK_N, NUM_WARPS, NUM_STAGES, USE_SWIZZLE != 0, USE_HALF2 != 0>;
#if USE_WMMA
using ActivePath = WmmaPath<ActiveConfig>;
#else
using ActivePath = ScalarPath<ActiveConfig>;
#endif
constexpr int MAX_REGISTERS = 96;
static_assert(ActivePath::SHARED_BYTES == DYNAMIC_SMEM_BYTES, "the manifest's dynamic_smem is the size of this layout");

extern "C" __global__ void __maxnreg__(MAX_REGISTERS)
    fa_s512_v3(const __grid_constant__ SdpaParams p) {
  attend<ActiveConfig, ActivePath>(p);
}
