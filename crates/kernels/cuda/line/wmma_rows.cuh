// What a warp that owns 16 query rows does on tensor cores (WMMA 16x16x16), shared by
// sdpa_v2c and fa_s512_v3.
//
// The layout of a WMMA fragment is unspecified. So everything that is done per row goes
// through a strip of shared memory private to the warp, where element (row, column) has an
// address: scores come out of QKᵀ into it, weights go from it into the
// second. Two fragments of one type share their layout, whatever it is, which is enough to
// rescale an accumulator by a fragment of row factors without taking it out of registers.
//
// Several warps may own the same rows, each with a share of the keys and a running (m, l, O)
// of its own; merge_and_store brings them together at the end.
#pragma once

#include <mma.h>

#include "copy.cuh"
#include "lse.cuh"
#include "mask.cuh"
#include "softmax.cuh"

namespace wmma = nvcuda::wmma;

constexpr int LANES = 32;
constexpr int FRAG = 16;                     // WMMA tiles are 16 x 16 x 16
constexpr int LANES_PER_ROW = LANES / FRAG;  // two lanes share a row in the softmax
constexpr int FACTOR_PITCH = FRAG + 4;       // floats, of the tile of row factors

using Accumulator = wmma::fragment<wmma::accumulator, FRAG, FRAG, FRAG, float>;
using LeftRows = wmma::fragment<wmma::matrix_a, FRAG, FRAG, FRAG, element, wmma::row_major>;
using RightRows = wmma::fragment<wmma::matrix_b, FRAG, FRAG, FRAG, element, wmma::row_major>;
using RightColumns = wmma::fragment<wmma::matrix_b, FRAG, FRAG, FRAG, element, wmma::col_major>;

// load_matrix_sync of an operand in shared memory. The compiler finds out by itself that
// fp16 operands lie in shared memory and reads them with ldmatrix; for bf16 it does not, and
// emits generic 4-byte loads and register transpositions instead. Hence the instruction
// that load_matrix_sync stands for, with the state space written out.
#if DTYPE_BF16
#define LOAD_OPERAND(Fragment, operand, layout)                                                \
  __device__ __forceinline__ void load_operand(Fragment& f, const element* tile, int pitch) {  \
    static_assert(sizeof(f.x) == 16, "a bf16 operand is four registers");                      \
    unsigned* r = reinterpret_cast<unsigned*>(f.x);                                            \
    asm volatile("wmma.load." operand ".sync.aligned." layout                                  \
                 ".m16n16k16.shared.bf16 {%0, %1, %2, %3}, [%4], %5;"                          \
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])                              \
                 : "r"(shared_address(tile)), "r"(pitch)                                       \
                 : "memory");                                                                  \
  }
#else
#define LOAD_OPERAND(Fragment, operand, layout)                                               \
  __device__ __forceinline__ void load_operand(Fragment& f, const element* tile, int pitch) { \
    wmma::load_matrix_sync(f, tile, pitch);                                                   \
  }
#endif
LOAD_OPERAND(LeftRows, "a", "row")
LOAD_OPERAND(RightRows, "b", "row")
LOAD_OPERAND(RightColumns, "b", "col")
#undef LOAD_OPERAND

// A warp's strip: 16 rows x KEYS_ scores, and in the same place, once those are read, row
// factors or the weights in PARTS_ 16-bit parts.
template <int KEYS_, int PARTS_>
struct WarpStrip {
  static constexpr int KEYS = KEYS_;
  static constexpr int PARTS = PARTS_;
  static constexpr int KEYS_PER_LANE = KEYS / LANES_PER_ROW;
  static constexpr int SCORE_PITCH = KEYS + 4;
  static constexpr int WEIGHT_PITCH = KEYS + 8;
  static constexpr int SCORE_BYTES = FRAG * SCORE_PITCH * 4;
  static constexpr int WEIGHT_BYTES = PARTS * FRAG * WEIGHT_PITCH * 2;
  static constexpr int BYTES = SCORE_BYTES > WEIGHT_BYTES ? SCORE_BYTES : WEIGHT_BYTES;
  static_assert(KEYS % FRAG == 0 && KEYS_PER_LANE % ELEMENTS_PER_CHUNK == 0, "whole chunks");
  static_assert(SCORE_PITCH >= FACTOR_PITCH, "a tile of row factors fits");

  unsigned char* memory;

  __device__ __forceinline__ float* floats() const { return reinterpret_cast<float*>(memory); }
  __device__ __forceinline__ element* weights(int part) const {
    return reinterpret_cast<element*>(memory) + part * FRAG * WEIGHT_PITCH;
  }
};

// The running softmax of row lane/2: m is the same in both of its lanes, l counts what this
// lane has seen. m need not be the maximum, only near it. While the true maximum is at most this far above
// (in log2 units), nothing is rescaled: weights up to 2^8 are as exact in 16 bits as
// weights up to 1, and the sums are fp32.
constexpr float RESCALE_THRESHOLD = 8.0f;

// Reads the lane's scores from the strip, moves (m, l) to the new m and leaves the lane's
// weights in `x`. Returns the factor by which the row's accumulator has to be multiplied.
template <typename Strip>
__device__ __forceinline__ float next_weights(const SdpaParams& p, const Strip& strip, int lane,
                                              int first_row, int first_key, RowState& state,
                                              float (&x)[Strip::KEYS_PER_LANE]) {
  constexpr int COUNT = Strip::KEYS_PER_LANE;
  const int r = lane / LANES_PER_ROW;
  const int first = lane % LANES_PER_ROW * COUNT;
  const float4* scores =
      reinterpret_cast<const float4*>(strip.floats() + r * Strip::SCORE_PITCH + first);
#pragma unroll
  for (int i = 0; i < COUNT / 4; ++i) {
    const float4 four = scores[i];
    x[4 * i] = four.x * p.scale_log2;
    x[4 * i + 1] = four.y * p.scale_log2;
    x[4 * i + 2] = four.z * p.scale_log2;
    x[4 * i + 3] = four.w * p.scale_log2;
  }
  if (!all_visible(p, first_row, first_row + FRAG - 1, first_key, Strip::KEYS)) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
      if (!is_visible(p, first_row + r, first_key + first + i)) x[i] = NEG_INF;
  }
  float step_max = x[0];
#pragma unroll
  for (int i = 1; i < COUNT; ++i) step_max = fmaxf(step_max, x[i]);
  step_max = group_max<LANES_PER_ROW>(step_max);

  const float m_new = step_max > state.m + RESCALE_THRESHOLD ? step_max : state.m;
  const float alpha = rescale_factor(state.m, m_new);
  state.m = m_new;
  const float offset = subtrahend(m_new);
#pragma unroll
  for (int i = 0; i < COUNT; ++i) x[i] = exp2_approx(x[i] - offset);
  state.l *= alpha;
  return alpha;
}

// Writes the lane's weights in the precision the tensor cores read. One 16-bit part is exact
// enough for fp16 (11 bits); bf16 has only 8, which in rows with few visible keys costs more
// than 1e-3, so the remainder goes into a second part. Returns the sum of what P.V weighs: of
// the rounded weights if there is one part.
template <typename Strip>
__device__ __forceinline__ float store_weights(const Strip& strip, int lane,
                                               float (&x)[Strip::KEYS_PER_LANE]) {
  const int at = lane / LANES_PER_ROW * Strip::WEIGHT_PITCH +
                 lane % LANES_PER_ROW * Strip::KEYS_PER_LANE;
  float sum = 0.0f;
#pragma unroll
  for (int first = 0; first < Strip::KEYS_PER_LANE; first += ELEMENTS_PER_CHUNK)
#pragma unroll
    for (int part = 0; part < Strip::PARTS; ++part) {
      Chunk8 chunk;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float* two = x + first + 2 * i;
        chunk.pair[i] = from_float2(two[0], two[1]);
        const float2 rounded = to_float2(chunk.pair[i]);
        if (part == 0) sum += Strip::PARTS == 1 ? rounded.x + rounded.y : two[0] + two[1];
        two[0] -= rounded.x;  // what the next part carries
        two[1] -= rounded.y;
      }
      *reinterpret_cast<Chunk8*>(strip.weights(part) + at + first) = chunk;
    }
  return sum;
}

// The accumulator of 16 rows in registers, from the first key to the last.
template <int COLUMN_FRAGS>
struct RegisterOutput {
  Accumulator o[COLUMN_FRAGS];

  __device__ __forceinline__ RegisterOutput() {
#pragma unroll
    for (int c = 0; c < COLUMN_FRAGS; ++c) wmma::fill_fragment(o[c], 0.0f);
  }

  // Multiplies each row by its factor. The strip's scores must have been read by all lanes.
  template <typename Strip>
  __device__ __forceinline__ void rescale(const Strip& strip, int lane, float alpha) {
    float4* row = reinterpret_cast<float4*>(strip.floats() + lane / LANES_PER_ROW * FACTOR_PITCH);
    const float4 four = make_float4(alpha, alpha, alpha, alpha);
    row[lane % LANES_PER_ROW * 2] = four;
    row[lane % LANES_PER_ROW * 2 + 1] = four;
    __syncwarp();
    Accumulator factor;
    wmma::load_matrix_sync(factor, strip.floats(), FACTOR_PITCH, wmma::mem_row_major);
#pragma unroll
    for (int c = 0; c < COLUMN_FRAGS; ++c)
#pragma unroll
      for (int i = 0; i < factor.num_elements; ++i) o[c].x[i] *= factor.x[i];
    __syncwarp();
  }

  // O(the warp's rows) += weights x V(the strip's keys); `v` is the first of them.
  template <typename Strip>
  __device__ __forceinline__ void add(const Strip& strip, const element* v, int v_pitch) {
#pragma unroll
    for (int key = 0; key < Strip::KEYS; key += FRAG) {
      LeftRows weights[Strip::PARTS];
#pragma unroll
      for (int part = 0; part < Strip::PARTS; ++part)
        load_operand(weights[part], strip.weights(part) + key, Strip::WEIGHT_PITCH);
#pragma unroll
      for (int c = 0; c < COLUMN_FRAGS; ++c) {
        RightRows values;
        load_operand(values, v + key * v_pitch + c * FRAG, v_pitch);
#pragma unroll
        for (int part = 0; part < Strip::PARTS; ++part)
          wmma::mma_sync(o[c], weights[part], values, o[c]);
      }
    }
  }

  __device__ __forceinline__ void write(float* rows, int pitch) const {
#pragma unroll
    for (int c = 0; c < COLUMN_FRAGS; ++c)
      wmma::store_matrix_sync(rows + c * FRAG, o[c], pitch, wmma::mem_row_major);
  }
};

// Scores in the strip -> weights in the strip -> accumulator. All lanes are done with the
// strip on return.
template <typename Strip, typename Output>
__device__ __forceinline__ void attend_step(const SdpaParams& p, const Strip& strip, int lane,
                                            int first_row, int first_key, const element* v,
                                            int v_pitch, RowState& state, Output& output) {
  float x[Strip::KEYS_PER_LANE];
  __syncwarp();  // the scores are complete
  const float alpha = next_weights(p, strip, lane, first_row, first_key, state, x);
  __syncwarp();  // and read by all
  if (__any_sync(WHOLE_WARP, alpha != 1.0f)) output.rescale(strip, lane, alpha);
  state.l += store_weights(strip, lane, x);
  __syncwarp();
  output.add(strip, v, v_pitch);
  __syncwarp();
}

// (m, l) of a row, as one of its warps leaves it for the merge.
__device__ __forceinline__ void write_state(float2* state_of_rows, int lane, RowState state) {
  const float l = group_sum<LANES_PER_ROW>(state.l);
  if (lane % LANES_PER_ROW == 0) state_of_rows[lane / LANES_PER_ROW] = make_float2(state.m, l);
}

// Merges what the SHARES warps of each group of 16 rows have found and stores it. Warp w
// owns row group w / SHARES; partial rows of all warps lie `pitch` floats apart. All
// threads of the CTA take part, after a barrier.
template <int ROWS, int COLUMNS, int SHARES, int THREADS>
__device__ __forceinline__ void merge_and_store(const SdpaParams& p, int batch, int head,
                                                int first_row, const float* partial, int pitch,
                                                const float2* state) {
  constexpr int CHUNKS = COLUMNS / ELEMENTS_PER_CHUNK;
  element* o = head_of(static_cast<element*>(p.o), p.o_stride, batch, head);
  const bool aligned = rows_are_16_byte_aligned(o, p.o_stride[2]);
#pragma unroll 1
  for (int item = threadIdx.x; item < ROWS * CHUNKS; item += THREADS) {
    const int row = item / CHUNKS;
    const int col = item % CHUNKS * ELEMENTS_PER_CHUNK;
    if (first_row + row >= p.seq_q || col >= p.dim_v) continue;

    // The row's place in the part of the first warp that owns it.
    const int place = row / FRAG * SHARES * FRAG + row % FRAG;
    float m = NEG_INF;
#pragma unroll
    for (int g = 0; g < SHARES; ++g) m = fmaxf(m, state[place + g * FRAG].x);
    float l = 0.0f;
    float sum[ELEMENTS_PER_CHUNK] = {};
#pragma unroll
    for (int g = 0; g < SHARES; ++g) {
      const float2 part = state[place + g * FRAG];
      const float factor = rescale_factor(part.x, m);
      l += part.y * factor;
      const float4* four =
          reinterpret_cast<const float4*>(partial + (place + g * FRAG) * pitch + col);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float4 value = four[i];
        sum[4 * i] += value.x * factor;
        sum[4 * i + 1] += value.y * factor;
        sum[4 * i + 2] += value.z * factor;
        sum[4 * i + 3] += value.w * factor;
      }
    }

    const float inverse_l = inverse_sum(l);
    Chunk8 chunk;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      chunk.pair[i] = from_float2(sum[2 * i] * inverse_l, sum[2 * i + 1] * inverse_l);
    element* destination = o + (first_row + row) * p.o_stride[2] + col;
    if (aligned && col + ELEMENTS_PER_CHUNK <= p.dim_v) {
      *reinterpret_cast<Chunk8*>(destination) = chunk;
    } else {
#pragma unroll
      for (int i = 0; i < ELEMENTS_PER_CHUNK; ++i)
        if (col + i < p.dim_v)
          destination[i] = i % 2 == 0 ? chunk.pair[i / 2].x : chunk.pair[i / 2].y;
    }
    if (col == 0 && p.lse != nullptr)
      LSE_OF(p, batch, head, first_row + row) = log_sum_exp(m, l);
  }
}
