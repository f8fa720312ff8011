// What a compute warp of sdpa_fp8_stage_c does with an fp16 tile in shared memory. Included
// by that kernel only, after its constants and shared-memory map.
//
// Two ways to get from scores to weights (RegisterSoftmax, StripSoftmax) and three ways to
// keep the output (MmaOutput, WmmaOutput, ScalarOutput). The toggles pick one of each;
// both softmaxes answer the same questions, all outputs take the same orders.
#pragma once

constexpr int KEY_FRAGS = KEYS_PER_WARP / FRAG;
constexpr int COLUMN_FRAGS = HEAD_DIM / FRAG;
// Steps of QKᵀ whose operands are loaded ahead; a wide head's accumulator
// leaves registers for one.
constexpr int DIMS_IN_FLIGHT = HEAD_DIM > 64 ? 1 : 2;

__device__ __forceinline__ float exp2_of(float x) {
  return USE_FAST_EXP ? exp2_approx(x) : exp2f(x);
}

// Which rows and keys a warp works on.
struct Share {
  int warp;
  int lane;
  int row_group;
  int key_group;

  __device__ __forceinline__ Share()
      : warp(threadIdx.x / LANES),
        lane(threadIdx.x % LANES),
        row_group(warp / KEY_GROUPS),
        key_group(warp % KEY_GROUPS) {}

  __device__ __forceinline__ const __half* q_rows() const {
    return q_tile() + row_group * FRAG * PITCH;
  }
  __device__ __forceinline__ const __half* k_rows(int buffer) const {
    return k_tile(buffer) + key_group * KEYS_PER_WARP * PITCH;
  }
  __device__ __forceinline__ const __half* v_rows(int buffer) const {
    return v_tile(buffer) + key_group * KEYS_PER_WARP * PITCH;
  }
};

// ------------------------------------------------------------------------- the softmaxes

// Scores in mma.sync accumulators: a lane holds parts of two rows, four lanes share a row.
struct RegisterSoftmax {
  Share at;
  float m[2] = {NEG_INF, NEG_INF};
  float l[2] = {0.0f, 0.0f};
  float alpha[2];
  u32 weights[KEY_FRAGS][4];  // packed pairs, in the layout of the a operand

  __device__ __forceinline__ void score(int buffer, float (&s)[2 * KEY_FRAGS][4]) const {
    const int lane = at.lane;
#pragma unroll
    for (int dim = 0; dim < HEAD_DIM; dim += FRAG) {
      u32 q[4];
      ldmatrix_x4(q, shared_address(at.q_rows() + lane % 16 * PITCH + dim + lane / 16 * 8));
#pragma unroll
      for (int f = 0; f < KEY_FRAGS; ++f) {
        const int key = f * FRAG + lane / 16 * 8 + lane % 8;
        u32 k[4];
        ldmatrix_x4(k, shared_address(at.k_rows(buffer) + key * PITCH + dim + lane / 8 % 2 * 8));
        mma_m16n8k16(s[2 * f], q, k[0], k[1]);
        mma_m16n8k16(s[2 * f + 1], q, k[2], k[3]);
      }
    }
  }

  __device__ __forceinline__ void step(const SdpaParams& p, float scale_log2, int first_row,
                                       int first_key, int buffer) {
    float s[2 * KEY_FRAGS][4] = {};
    score(buffer, s);

    const int row = first_row + at.lane / 4;
    const int key = first_key + at.lane % 4 * 2;
    const bool no_mask = all_visible(p, first_row, first_row + FRAG - 1, first_key, KEYS_PER_WARP);
    float m_new[2] = {m[0], m[1]};
#pragma unroll
    for (int b = 0; b < 2 * KEY_FRAGS; ++b)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool visible = no_mask || is_visible(p, row + e / 2 * 8, key + b * 8 + e % 2);
        s[b][e] = visible ? s[b][e] * scale_log2 : NEG_INF;
        m_new[e / 2] = fmaxf(m_new[e / 2], s[b][e]);
      }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      m_new[h] = group_max<4>(m_new[h]);
      alpha[h] = exp2_of(m[h] - subtrahend(m_new[h]));
      m[h] = m_new[h];
      l[h] *= alpha[h];
    }

    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int b = 0; b < 2 * KEY_FRAGS; ++b)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const __half2 pair = __floats2half2_rn(exp2_of(s[b][2 * h] - subtrahend(m[h])),
                                               exp2_of(s[b][2 * h + 1] - subtrahend(m[h])));
        weights[b / 2][b % 2 * 2 + h] = *reinterpret_cast<const u32*>(&pair);
        // The sum weighs what P.V weighs: the rounded values.
        const float2 rounded = __half22float2(pair);
        sum[h] += rounded.x + rounded.y;
      }
    l[0] += group_sum<4>(sum[0]);
    l[1] += group_sum<4>(sum[1]);
  }

  // Hands the weights to an output that wants them in the strip.
  __device__ __forceinline__ void write_weights() const {
#pragma unroll
    for (int f = 0; f < KEY_FRAGS; ++f)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = at.lane / 4 + i % 2 * 8;
        const int key = f * FRAG + i / 2 * 8 + at.lane % 4 * 2;
        *reinterpret_cast<u32*>(weights_of(at.warp) + row * WEIGHT_PITCH + key) = weights[f][i];
      }
    __syncwarp();
  }

  __device__ __forceinline__ float alpha_of_row(int r) const {
    return __shfl_sync(WHOLE_WARP, alpha[r / 8], r % 8 * 4);
  }

  __device__ __forceinline__ void write_state() const {
    if (at.lane % 4 == 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float* row = strip_of(at.warp) + (at.lane / 4 + h * 8) * STRIP_PITCH;
        row[M_COLUMN] = m[h];
        row[L_COLUMN] = l[h];
      }
    }
  }
};

// Scores through shared memory: two lanes share a row of the strip.
struct StripSoftmax {
  static constexpr int LANES_PER_ROW = 2;
  static constexpr int KEYS_PER_LANE = KEYS_PER_WARP / LANES_PER_ROW;
  Share at;
  float m = NEG_INF;
  float l = 0.0f;
  float alpha;
  float x[KEYS_PER_LANE];  // this lane's scores, then its weights

  __device__ __forceinline__ void score(int buffer) const {
#pragma unroll
    for (int f = 0; f < KEY_FRAGS; ++f) {
      wmma::fragment<wmma::accumulator, FRAG, FRAG, FRAG, float> sum;
      wmma::fill_fragment(sum, 0.0f);
#pragma unroll DIMS_IN_FLIGHT
      for (int dim = 0; dim < HEAD_DIM; dim += FRAG) {
        wmma::fragment<wmma::matrix_a, FRAG, FRAG, FRAG, __half, wmma::row_major> q;
        wmma::fragment<wmma::matrix_b, FRAG, FRAG, FRAG, __half, wmma::col_major> kt;
        wmma::load_matrix_sync(q, at.q_rows() + dim, PITCH);
        wmma::load_matrix_sync(kt, at.k_rows(buffer) + f * FRAG * PITCH + dim, PITCH);
        wmma::mma_sync(sum, q, kt, sum);
      }
      wmma::store_matrix_sync(strip_of(at.warp) + f * FRAG, sum, STRIP_PITCH, wmma::mem_row_major);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void step(const SdpaParams& p, float scale_log2, int first_row,
                                       int first_key, int buffer) {
    score(buffer);
    const int r = at.lane / LANES_PER_ROW;
    const int first = at.lane % LANES_PER_ROW * KEYS_PER_LANE;
    float m_new = m;
#pragma unroll
    for (int i = 0; i < KEYS_PER_LANE; ++i) {
      const bool visible = is_visible(p, first_row + r, first_key + first + i);
      const float s = strip_of(at.warp)[r * STRIP_PITCH + first + i];
      x[i] = visible ? s * scale_log2 : NEG_INF;
      m_new = fmaxf(m_new, x[i]);
    }
    m_new = group_max<LANES_PER_ROW>(m_new);
    alpha = exp2_of(m - subtrahend(m_new));
    m = m_new;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < KEYS_PER_LANE; ++i) {
      x[i] = __half2float(__float2half_rn(exp2_of(x[i] - subtrahend(m))));
      sum += x[i];
    }
    l = l * alpha + group_sum<LANES_PER_ROW>(sum);
    __syncwarp();  // all scores are read: the strip is free
  }

  __device__ __forceinline__ void write_weights() const {
    const int r = at.lane / LANES_PER_ROW;
    const int first = at.lane % LANES_PER_ROW * KEYS_PER_LANE;
#pragma unroll
    for (int i = 0; i < KEYS_PER_LANE; ++i)
      weights_of(at.warp)[r * WEIGHT_PITCH + first + i] = __float2half_rn(x[i]);
    __syncwarp();
  }

  __device__ __forceinline__ float alpha_of_row(int r) const {
    return __shfl_sync(WHOLE_WARP, alpha, r * LANES_PER_ROW);
  }

  // A 16x16 tile of row factors, for outputs whose layout only WMMA knows.
  __device__ __forceinline__ void write_factors() const {
    float* row = strip_of(at.warp) + at.lane / LANES_PER_ROW * STRIP_PITCH;
#pragma unroll
    for (int c = at.lane % LANES_PER_ROW; c < FRAG; c += LANES_PER_ROW) row[c] = alpha;
    __syncwarp();
  }

  __device__ __forceinline__ void write_state() const {
    float* row = strip_of(at.warp) + at.lane / LANES_PER_ROW * STRIP_PITCH;
    if (at.lane % LANES_PER_ROW == 0) {
      row[M_COLUMN] = m;
      row[L_COLUMN] = l;
    }
  }
};

// --------------------------------------------------------------------------- the outputs

// 16 rows of output in mma.sync accumulators; weights come from the softmax's registers.
struct MmaOutput {
  float o[2 * COLUMN_FRAGS][4] = {};

  __device__ __forceinline__ void add(const RegisterSoftmax& softmax, int buffer) {
    const Share& at = softmax.at;
#pragma unroll
    for (int c = 0; c < 2 * COLUMN_FRAGS; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) o[c][e] *= softmax.alpha[e / 2];
#pragma unroll
    for (int f = 0; f < KEY_FRAGS; ++f)
#pragma unroll
      for (int c = 0; c < COLUMN_FRAGS; ++c) {
        const int key = f * FRAG + at.lane % 16;
        u32 v[4];
        ldmatrix_x4_trans(v, shared_address(at.v_rows(buffer) + key * PITCH + c * FRAG + at.lane / 16 * 8));
        mma_m16n8k16(o[2 * c], softmax.weights[f], v[0], v[1]);
        mma_m16n8k16(o[2 * c + 1], softmax.weights[f], v[2], v[3]);
      }
  }

  __device__ __forceinline__ void write_tile(int c, const Share& at) const {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = at.lane / 4 + e / 2 * 8;
        const int col = half * 8 + at.lane % 4 * 2 + e % 2;
        strip_of(at.warp)[row * STRIP_PITCH + col] = o[2 * c + half][e];
      }
  }
};

// 16 rows of output in WMMA accumulators: rescaled by a fragment of factors, element by
// element, since two fragments of one type share their unspecified layout.
struct WmmaOutput {
  using Accumulator = wmma::fragment<wmma::accumulator, FRAG, FRAG, FRAG, float>;
  Accumulator o[COLUMN_FRAGS];

  __device__ __forceinline__ WmmaOutput() {
#pragma unroll
    for (int c = 0; c < COLUMN_FRAGS; ++c) wmma::fill_fragment(o[c], 0.0f);
  }

  __device__ __forceinline__ void add(const StripSoftmax& softmax, int buffer) {
    const Share& at = softmax.at;
    softmax.write_factors();
    Accumulator factor;
    wmma::load_matrix_sync(factor, strip_of(at.warp), STRIP_PITCH, wmma::mem_row_major);
#pragma unroll
    for (int c = 0; c < COLUMN_FRAGS; ++c)
#pragma unroll
      for (int i = 0; i < factor.num_elements; ++i) o[c].x[i] *= factor.x[i];
    __syncwarp();  // factors are read: the strip may hold weights
    softmax.write_weights();
#pragma unroll 1  // unrolled, 64 rows spill at 120 registers
    for (int f = 0; f < KEY_FRAGS; ++f) {
      wmma::fragment<wmma::matrix_a, FRAG, FRAG, FRAG, __half, wmma::row_major> w;
      wmma::load_matrix_sync(w, weights_of(at.warp) + f * FRAG, WEIGHT_PITCH);
#pragma unroll
      for (int c = 0; c < COLUMN_FRAGS; ++c) {
        wmma::fragment<wmma::matrix_b, FRAG, FRAG, FRAG, __half, wmma::row_major> v;
        wmma::load_matrix_sync(v, at.v_rows(buffer) + f * FRAG * PITCH + c * FRAG, PITCH);
        wmma::mma_sync(o[c], w, v, o[c]);
      }
    }
    __syncwarp();  // weights are read: the strip may hold the next scores
  }

  __device__ __forceinline__ void write_tile(int c, const Share& at) const {
    wmma::store_matrix_sync(strip_of(at.warp), o[c], STRIP_PITCH, wmma::mem_row_major);
  }
};

// 16 rows of output in plain registers: a lane owns the columns lane, lane + 32, ...
struct ScalarOutput {
  static constexpr int COLUMNS = HEAD_DIM / LANES;
  float o[FRAG][COLUMNS] = {};

  template <typename Softmax>
  __device__ __forceinline__ void add(const Softmax& softmax, int buffer) {
    const Share& at = softmax.at;
#pragma unroll
    for (int r = 0; r < FRAG; ++r) {
      const float alpha = softmax.alpha_of_row(r);
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) o[r][c] *= alpha;
    }
    softmax.write_weights();
#pragma unroll 1
    for (int key = 0; key < KEYS_PER_WARP; key += 2) {
      const __half* v = at.v_rows(buffer) + key * PITCH + at.lane;
      float even[COLUMNS];
      float odd[COLUMNS];
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        even[c] = __half2float(v[c * LANES]);
        odd[c] = __half2float(v[PITCH + c * LANES]);
      }
#pragma unroll
      for (int r = 0; r < FRAG; ++r) {
        const float2 w = __half22float2(
            *reinterpret_cast<const __half2*>(weights_of(at.warp) + r * WEIGHT_PITCH + key));
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) o[r][c] += w.x * even[c] + w.y * odd[c];
      }
    }
    __syncwarp();  // weights are read: the strip may hold the next scores
  }

  __device__ __forceinline__ void write_tile(int c, const Share& at) const {
    // Fragment column block c lies in the lower or the upper half of the lanes.
    if (at.lane / FRAG == c % 2) {
#pragma unroll
      for (int r = 0; r < FRAG; ++r)
        strip_of(at.warp)[r * STRIP_PITCH + at.lane % FRAG] = o[r][c / 2];
    }
  }
};

#if USE_FUSED_SOFTMAX
using Softmax = RegisterSoftmax;
#else
using Softmax = StripSoftmax;
#endif
#if !USE_WMMA_PV
using Output = ScalarOutput;
#elif USE_FUSED_SOFTMAX
using Output = MmaOutput;
#else
using Output = WmmaOutput;
#endif

// ------------------------------------------------------------------------ a work item

struct ComputeWarp {
  const SdpaParams& p;
  const Work& work;
  float score_scale_log2;
  float value_unit;
  Softmax softmax;
  Output output;

  __device__ __forceinline__ ComputeWarp(const SdpaParams& params, const Work& w)
      : p(params), work(w) {
    const float q_unit = unit_of(scale_of(p.q_scale, p.heads_q, w.batch, w.head));
    const float k_unit = unit_of(scale_of(p.k_scale, p.heads_kv, w.batch, w.kv_head));
    score_scale_log2 = p.scale_log2 * q_unit * k_unit;
    value_unit = unit_of(scale_of(p.v_scale, p.heads_kv, w.batch, w.kv_head));
  }

  __device__ __forceinline__ void tile(int tile, int buffer) {
    const Share& at = softmax.at;
    softmax.step(p, score_scale_log2, work.first_row + at.row_group * FRAG,
                 tile * BLOCK_N + at.key_group * KEYS_PER_WARP, buffer);
    output.add(softmax, buffer);
  }

  // The strips of a row group are read by all warps that share its rows.
  __device__ __forceinline__ void group_barrier() const {
    if (KEY_GROUPS == 1)
      __syncwarp();
    else
      compute_barrier();
  }

  // Merges the key groups' partial results, 16 columns at a time, and stores them.
  __device__ __forceinline__ void finish() {
    const Share& at = softmax.at;
    softmax.write_state();
#pragma unroll
    for (int c = 0; c < COLUMN_FRAGS; ++c) {
      output.write_tile(c, at);
      group_barrier();
      store_tile(c, at);
      group_barrier();
    }
  }

  __device__ __forceinline__ void store_tile(int c, const Share& at) const {
    constexpr int ROWS_PER_WARP = FRAG / KEY_GROUPS;
    constexpr int LANES_PER_ROW = LANES / ROWS_PER_WARP;
    constexpr int COLUMNS_PER_LANE = FRAG / LANES_PER_ROW;
    const int r = at.key_group * ROWS_PER_WARP + at.lane / LANES_PER_ROW;
    const int row = work.first_row + at.row_group * FRAG + r;
    if (row >= p.seq_q) return;

    const float* part[KEY_GROUPS];
    float m = NEG_INF;
#pragma unroll
    for (int g = 0; g < KEY_GROUPS; ++g) {
      part[g] = strip_of(at.row_group * KEY_GROUPS + g) + r * STRIP_PITCH;
      m = fmaxf(m, part[g][M_COLUMN]);
    }
    float factor[KEY_GROUPS];
    float l = 0.0f;
#pragma unroll
    for (int g = 0; g < KEY_GROUPS; ++g) {
      factor[g] = rescale_factor(part[g][M_COLUMN], m);
      l += factor[g] * part[g][L_COLUMN];
    }

    __half* o = head_of(static_cast<__half*>(p.o), p.o_stride, work.batch, work.head) +
                row * p.o_stride[2] + c * FRAG;
    const float normalise = inverse_sum(l) * value_unit;
    const int first = at.lane % LANES_PER_ROW * COLUMNS_PER_LANE;
#pragma unroll
    for (int i = first; i < first + COLUMNS_PER_LANE; ++i) {
      float sum = 0.0f;
#pragma unroll
      for (int g = 0; g < KEY_GROUPS; ++g) sum += factor[g] * part[g][i];
      if (c * FRAG + i < p.dim_v) o[i] = __float2half_rn(sum * normalise);
    }
    if (c == 0 && first == 0 && p.lse != nullptr)
      LSE_OF(p, work.batch, work.head, row) = log_sum_exp(m, l);
  }
};
