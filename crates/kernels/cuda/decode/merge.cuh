// flash_decode: from the accumulators of a finished segment to O and the log-sum-exp, or to the workspace where other CTAs have parts
// of the same Q tile. Whoever writes the last part of it adds them up, always in the order of the keys.
//
// workspace: | one counter for each Q tile that is split, all 0 between launches | slots: ROWS × VALUE_DIM columns, ROWS maxima and sums |
#pragma once
#include "mainloop.cuh"
#include "store.cuh"

namespace {

constexpr int COUNTERS = 1 << 16;
constexpr int SLOT_FLOATS = ROWS * (VALUE_DIM + 2);

// Where the rows of a Q tile go.
struct Destination {
  const SdpaParams& p;
  const Cursor& at;
  int group;

  __device__ __forceinline__ Destination(const SdpaParams& params, const Cursor& cursor)
      : p(params), at(cursor), group(p.heads_q / p.heads_kv) {}

  __device__ __forceinline__ int packed(int row) const { return at.m_block * ROWS + row; }
  __device__ __forceinline__ bool inside(int row) const { return packed(row) / group < at.asked.bounds.seq_q; }

  // Four columns of a finished row, relative to its maximum; the thread of the first ones writes the log-sum-exp.
  __device__ __forceinline__ void store(int row, int column, float4 o, float max, float sum) const {
    const int head = at.head_kv * group + packed(row) % group;
    const int position = at.asked.bounds.q_first + packed(row) / group;
    const int batch = PACKED_QUERIES ? 0 : at.batch;
    const float inverse = ScoreHook::inverse(p, head, max, sum);
    element* to = head_of(static_cast<element*>(p.o), p.o_stride, batch, head) + position * p.o_stride[2] + column;
    const u32 words[2] = {pack_pair(o.x * inverse, o.y * inverse), pack_pair(o.z * inverse, o.w * inverse)};
    if (column + 4 <= p.dim_v && (reinterpret_cast<u64>(to) & 7) == 0) {
      *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (column + i < p.dim_v) reinterpret_cast<u16*>(to)[i] = u16(words[i / 2] >> (16 * (i % 2)));
    }
    if (p.lse && column == 0) LSE_OF(p, batch, head, position) = ScoreHook::lse(p, head, max, sum);
  }
};

// The parts of one Q tile: how many, and where.
struct Parts {
  int count, own;  // `own` is this segment's number
  int first;       // slot of the first; the others follow, every second one where a CTA may have two
  int counter;

  __device__ __forceinline__ Parts(const SdpaParams& p, const Division& division, const Cursor& at) {
    const int units = division.units_of_tile(at.asked);
    if (division.split) {
      const int m_blocks = (p.seq_q * (p.heads_q / p.heads_kv) + ROWS - 1) / ROWS;
      count = units;
      own = at.unit - at.unit_first;
      first = at.unit_first;
      counter = (at.batch * p.heads_kv + at.head_kv) * m_blocks + at.m_block;
    } else {
      // A CTA has at most one Q tile that it begins and does not end, and one that it does not begin.
      const int cta = division.cta_of(at.unit_first);
      count = division.cta_of(at.unit_first + units - 1) - cta + 1;
      own = int(blockIdx.x) - cta;
      first = 2 * cta + 1;
      counter = cta;
    }
  }
  __device__ __forceinline__ float* slot(const SdpaParams& p, const Division& division, int part) const {
    const int number = division.split ? first + part : part == 0 ? first : first - 1 + 2 * part;
    return reinterpret_cast<float*>(static_cast<unsigned*>(p.workspace) + COUNTERS) + (long long)number * SLOT_FLOATS;
  }
};

// Adds the parts of all CTAs up: one thread for four columns of a row.
__device__ __forceinline__ void merge_parts(const SdpaParams& p, const Division& division, const Destination& to, const Parts& parts) {
  const float scale_log2 = ScoreHook::scale_log2(p);
#pragma unroll 1
  for (int item = threadIdx.x; item < ROWS * (VALUE_DIM / 4); item += THREADS) {
    const int row = item / (VALUE_DIM / 4), column = item % (VALUE_DIM / 4) * 4;
    if (!to.inside(row)) continue;
    const auto statistics = [&](int part) {
      return __ldcg(reinterpret_cast<const float2*>(parts.slot(p, division, part) + ROWS * VALUE_DIM) + row);
    };
    float top = NEG_INF;
#pragma unroll 8
    for (int part = 0; part < parts.count; ++part) top = fmaxf(top, statistics(part).x);
    const float safe = subtrahend(top);
    float sum = 0.f;
    float4 o = {};
#pragma unroll 4
    for (int part = 0; part < parts.count; ++part) {
      const float2 own = statistics(part);
      const float4 columns = __ldcg(reinterpret_cast<const float4*>(parts.slot(p, division, part) + row * VALUE_DIM + column));
      const float weight = exp2_approx((own.x - safe) * scale_log2);
      sum = fmaf(own.y, weight, sum);
      o.x = fmaf(columns.x, weight, o.x), o.y = fmaf(columns.y, weight, o.y);
      o.z = fmaf(columns.z, weight, o.z), o.w = fmaf(columns.w, weight, o.w);
    }
    to.store(row, column, o, top, sum);
  }
}

// The columns [first, first + MERGE_COLUMNS) of a warp's rows to shared memory.
__device__ __forceinline__ void put_columns(float* rows, const float (&o)[VALUE_DIM / 2], int first) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int j = 0; j < MERGE_COLUMNS / 16; ++j) {
      const float* tiles = &o[first / 2 + 8 * j + 2 * r];
      float* to = rows + (g + 8 * r) * MERGE_PITCH + 16 * j;
      if (CODES) {
        *reinterpret_cast<float4*>(to + 4 * t) = make_float4(tiles[0], tiles[4], tiles[1], tiles[5]);
      } else {
        *reinterpret_cast<float2*>(to + 2 * t) = make_float2(tiles[0], tiles[1]);
        *reinterpret_cast<float2*>(to + 8 + 2 * t) = make_float2(tiles[4], tiles[5]);
      }
    }
}

// Brings the teams' parts of a segment together.
__device__ __forceinline__ void finish_segment(const SdpaParams& p, unsigned char* smem, const Division& division, const Cursor& at,
                                               const Part& part) {
  const float scale_log2 = ScoreHook::scale_log2(p);
  const int team = threadIdx.x / TEAM, warp_row = int(threadIdx.x) / 32 % WARPS_M * 16;
  float2* statistics = reinterpret_cast<float2*>(smem + STATISTICS_OFFSET);           // [team][row]
  float* columns = reinterpret_cast<float*>(smem + COLUMNS_OFFSET);                   // [team][row][MERGE_PITCH]
  const Destination to(p, at);
  const Parts parts(p, division, at);
  const bool whole = at.whole();
  float* slot = whole ? nullptr : parts.slot(p, division, parts.own);
  if (threadIdx.x % 4 == 0) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      statistics[team * ROWS + warp_row + 8 * r + threadIdx.x % 32 / 4] = make_float2(part.state.max[r], part.state.sum[r]);
  }
#pragma unroll
  for (int first = 0; first < VALUE_DIM; first += MERGE_COLUMNS) {
    put_columns(columns + (team * ROWS + warp_row) * MERGE_PITCH, part.o, first);
    __syncthreads();
#pragma unroll 1
    for (int item = threadIdx.x; item < ROWS * (MERGE_COLUMNS / 4); item += THREADS) {
      const int row = item / (MERGE_COLUMNS / 4), column = item % (MERGE_COLUMNS / 4) * 4;
      if (!to.inside(row)) continue;
      float top = NEG_INF;
#pragma unroll
      for (int other = 0; other < WARPS_N; ++other) top = fmaxf(top, statistics[other * ROWS + row].x);
      const float safe = subtrahend(top);
      float sum = 0.f;
      float4 o = {};
#pragma unroll
      for (int other = 0; other < WARPS_N; ++other) {
        const float2 own = statistics[other * ROWS + row];
        const float weight = exp2_approx((own.x - safe) * scale_log2);
        const float4 four = *reinterpret_cast<const float4*>(&columns[(other * ROWS + row) * MERGE_PITCH + column]);
        sum = fmaf(own.y, weight, sum);
        o.x = fmaf(four.x, weight, o.x), o.y = fmaf(four.y, weight, o.y);
        o.z = fmaf(four.z, weight, o.z), o.w = fmaf(four.w, weight, o.w);
      }
      if (whole) {
        to.store(row, first + column, o, top, sum);
      } else {
        __stcg(reinterpret_cast<float4*>(slot + row * VALUE_DIM + first + column), o);
        if (first + column == 0) __stcg(reinterpret_cast<float2*>(slot + ROWS * VALUE_DIM) + row, make_float2(top, sum));
      }
    }
    __syncthreads();
  }
  if (whole) return;

  // The last to arrive merges; it leaves the counter as it was.
  volatile int* last = reinterpret_cast<volatile int*>(smem + FLAG_OFFSET);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned* counter = static_cast<unsigned*>(p.workspace) + parts.counter;
    const bool is_last = atomicAdd(counter, 1u) == unsigned(parts.count) - 1;
    if (is_last) atomicExch(counter, 0u);
    __threadfence();  // what the others wrote before they counted
    *last = is_last;
  }
  __syncthreads();
  if (*last) merge_parts(p, division, to, parts);
}

}  // namespace
