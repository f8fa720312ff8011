// flash_decode: from the accumulators of a finished segment to O and the log-sum-exp, or to the workspace where other CTAs have parts
// of the same Q tile. Whoever writes the last part of it adds them up, always in the order of the keys.
//
// workspace: | one counter for each Q tile that is split, all 0 between launches | slots |
// slot: | rows × VALUE_DIM columns | a maximum and a sum for each row |, of as many rows as a Q tile may have
#pragma once
#include "mainloop.cuh"
#include "store.cuh"

namespace {

constexpr int COUNTERS = 1 << 16;

// Where the rows of a Q tile go.
struct Destination {
  const SdpaParams& p;
  const Cursor& at;

  __device__ __forceinline__ Destination(const SdpaParams& params, const Cursor& cursor) : p(params), at(cursor) {}

  __device__ __forceinline__ int rows() const { return min(ROWS, at.asked.bounds.seq_q * group_of(p) - at.m_block * ROWS); }

  // Four columns of a finished row, relative to its maximum; the thread of the first ones writes the log-sum-exp.
  __device__ __forceinline__ void store(int row, int column, float4 o, float max, float sum) const {
    const PackedRow packed(p, at.m_block * ROWS + row);
    const int head = at.head_kv * group_of(p) + packed.head;
    const int position = at.asked.bounds.q_first + packed.query;
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
  int rows;  // of a slot

  __device__ __forceinline__ Parts() {}
  __device__ __forceinline__ Parts(const SdpaParams& p, const Division& division, const Cursor& at) {
    const int units = division.units_of_tile(at.asked);
    const int packed = p.seq_q * group_of(p);
    rows = min(ROWS, packed + packed % 2);  // columns lie at multiples of 16 bytes
    if (SPLIT_TILES > 0) {
      const int m_blocks = (packed + ROWS - 1) / ROWS;
      count = units;
      own = at.at;
      first = at.unit - at.at;
      counter = (at.batch * p.heads_kv + at.head_kv) * m_blocks + at.m_block;
    } else {
      // A CTA has at most one Q tile that it begins and does not end, and one that it does not begin.
      const int cta = division.first_cta(at.unit - at.at);
      count = division.last_cta(cta, at.unit - at.at + units - 1) - cta + 1;
      own = int(blockIdx.x) - cta;
      first = 2 * cta + 1;
      counter = cta;
    }
  }
  __device__ __forceinline__ float* slot(const SdpaParams& p, int part) const {
    const int number = SPLIT_TILES > 0 ? first + part : part == 0 ? first : first - 1 + 2 * part;
    return reinterpret_cast<float*>(static_cast<unsigned*>(p.workspace) + COUNTERS) + (long long)number * rows * (VALUE_DIM + 2);
  }
  __device__ __forceinline__ float2* statistics(float* slot, int row) const {
    return reinterpret_cast<float2*>(slot + rows * VALUE_DIM) + row;
  }
};

// Four columns of a row, added up part by part.
struct Sum {
  float max = NEG_INF, sum = 0.f;
  float4 o = {};

  // The next COUNT parts, of which `there` exist; load(i, its maximum and sum, its columns).
  template <int COUNT, typename Load>
  __device__ __forceinline__ void add(int there, float scale_log2, Load load) {
    float2 own[COUNT];
    float4 columns[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      own[i] = make_float2(NEG_INF, 0.f);
      columns[i] = {};
      if (i < there) load(i, own[i], columns[i]);
    }
    float top = max;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) top = fmaxf(top, own[i].x);
    const float safe = subtrahend(top);
    const float keep = exp2_approx((max - safe) * scale_log2);
    max = top;
    sum *= keep, o.x *= keep, o.y *= keep, o.z *= keep, o.w *= keep;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const float weight = exp2_approx((own[i].x - safe) * scale_log2);
      sum = fmaf(own[i].y, weight, sum);
      o.x = fmaf(columns[i].x, weight, o.x), o.y = fmaf(columns[i].y, weight, o.y);
      o.z = fmaf(columns[i].z, weight, o.z), o.w = fmaf(columns[i].w, weight, o.w);
    }
  }
};

// Adds the parts of all CTAs up: one thread for four columns of a row. Many parts are on their way at a time, the memory is far.
__device__ __forceinline__ void merge_parts(const SdpaParams& p, const Destination& to, const Parts& parts) {
  constexpr int AT_ONCE = VALUE_DIM > 128 ? 8 : 16;
  const float scale_log2 = ScoreHook::scale_log2(p);
#pragma unroll 1
  for (int item = threadIdx.x; item < to.rows() * (VALUE_DIM / 4); item += THREADS) {
    const int row = item / (VALUE_DIM / 4), column = item % (VALUE_DIM / 4) * 4;
    Sum sum;
#pragma unroll 1
    for (int first = 0; first < parts.count; first += AT_ONCE)
      sum.add<AT_ONCE>(parts.count - first, scale_log2, [&](int i, float2& own, float4& columns) {
        float* slot = parts.slot(p, first + i);
        own = __ldcg(parts.statistics(slot, row));
        columns = __ldcg(reinterpret_cast<const float4*>(slot + row * VALUE_DIM + column));
      });
    to.store(row, column, sum.o, sum.max, sum.sum);
  }
}

// O of a team in its last stage: so many columns at a time, four to a chunk, swizzled so that rows fall into different banks.
struct Meeting {
  static constexpr int FITTING = STAGE_BYTES / (ROWS * 4);
  static constexpr int COLUMNS = FITTING >= VALUE_DIM ? VALUE_DIM : FITTING >= 32 ? FITTING / 32 * 32 : 16;
  static __device__ __forceinline__ u32 offset(int row, int chunk) {
    return row * (COLUMNS * 4) + ((chunk ^ (row & (COLUMNS % 32 == 0 ? 7 : 3))) << 4);
  }

  // The columns from `first` on of a warp's rows, as far as there are rows.
  static __device__ __forceinline__ void put(unsigned char* stage, int warp_row, int rows, const float (&o)[VALUE_DIM / 2], int first) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (WARPS_M == 1 && g + 8 * r >= rows) continue;  // others are mostly full
#pragma unroll
      for (int j = 0; j < COLUMNS / 16; ++j) {
        if (first + 16 * j >= VALUE_DIM) break;
        const float* tiles = &o[first / 2 + 8 * j + 2 * r];
        const int row = warp_row + g + 8 * r;
        if (CODES) {
          *reinterpret_cast<float4*>(stage + offset(row, 4 * j + t)) = make_float4(tiles[0], tiles[4], tiles[1], tiles[5]);
        } else {
          *reinterpret_cast<float2*>(stage + offset(row, 4 * j + t / 2) + t % 2 * 8) = make_float2(tiles[0], tiles[1]);
          *reinterpret_cast<float2*>(stage + offset(row, 4 * j + 2 + t / 2) + t % 2 * 8) = make_float2(tiles[4], tiles[5]);
        }
      }
    }
  }
  static __device__ __forceinline__ float4 four(const unsigned char* stage, int row, int chunk) {
    return *reinterpret_cast<const float4*>(stage + offset(row, chunk));
  }
};

// How the CTAs of a cluster bring their parts of a Q tile together. Rows are theirs in turns. A CTA sends its part of a row to the one whose row it
// is, and is done with it: only who has rows waits, and only for what is sent.
struct Exchange {
  u32 smem;
  int rank, ctas_log2, ctas;

  __device__ __forceinline__ explicit Exchange(u32 shared)
      : smem(shared), rank(cluster_rank()), ctas_log2(cluster_ctas_log2()), ctas(1 << ctas_log2) {}

  // By all threads, before anybody may send.
  __device__ __forceinline__ void open() const {
    if (threadIdx.x == 0) {
      mbarrier_init(smem + RECEIVED_BARRIER_OFFSET, 1);
      mbarrier_init_fence();
    }
    __syncwarp();
    cluster_arrive_relaxed();
  }
  __device__ __forceinline__ void await_all_open() const { cluster_wait(); }

  __device__ __forceinline__ void send(int row, int chunk, const Sum& sum) const {
    const int owner = row & (ctas - 1), slot = row - owner + rank;
    const u32 barrier = cluster_address(smem + RECEIVED_BARRIER_OFFSET, owner);
    cluster_store_async(cluster_address(smem + RECEIVED_OFFSET + slot * (VALUE_DIM * 4) + chunk * 16, owner), sum.o, barrier);
    if (chunk == 0)
      cluster_store_async(cluster_address(smem + RECEIVED_STATISTICS_OFFSET + slot * 8, owner), make_float2(sum.max, sum.sum), barrier);
  }

  // Adds this CTA's rows up, in the order of the CTAs.
  __device__ __forceinline__ void merge(const SdpaParams& p, const Destination& to) const {
    static_assert(!CLUSTERED || Meeting::COLUMNS == VALUE_DIM, "all columns are there at once");
    constexpr int CHUNKS = VALUE_DIM / 4, AT_ONCE = 8;
    const int rows = (to.rows() - rank + ctas - 1) >> ctas_log2;  // ranks are below the number of CTAs, so that this is not negative
    if (int(threadIdx.x) >= rows * CHUNKS) return;
    if (threadIdx.x == 0) mbarrier_expect_bytes(smem + RECEIVED_BARRIER_OFFSET, rows * ctas * (VALUE_DIM * 4 + 8));
    mbarrier_wait_cluster<true>(smem + RECEIVED_BARRIER_OFFSET, 0);
    const float scale_log2 = ScoreHook::scale_log2(p);
#pragma unroll 1
    for (int item = threadIdx.x; item < rows * CHUNKS; item += THREADS) {
      const int first_slot = item / CHUNKS * ctas, chunk = item % CHUNKS;
      Sum sum;
#pragma unroll 1
      for (int first = 0; first < ctas; first += AT_ONCE)
        sum.add<AT_ONCE>(ctas - first, scale_log2, [&](int i, float2& own, float4& columns) {
          const int slot = first_slot + first + i;
          own = shared_load_pair(smem + RECEIVED_STATISTICS_OFFSET + slot * 8);
          columns = shared_load(smem + RECEIVED_OFFSET + slot * (VALUE_DIM * 4) + chunk * 16);
        });
      to.store(first_slot + rank, 4 * chunk, sum.o, sum.max, sum.sum);
    }
  }
};

// One more on the counter, and how many there were: what this CTA wrote comes before it, and what the others wrote before they counted is seen behind it.
__device__ __forceinline__ unsigned count_arrival(unsigned* counter) {
  unsigned before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// Brings the teams' parts of a segment together. `stage` is the one that every team read last.
__device__ __forceinline__ void finish_segment(const SdpaParams& p, unsigned char* smem, const Division& division, const Cursor& at,
                                               const Part& part, int stage) {
  const float scale_log2 = ScoreHook::scale_log2(p);
  const int team = threadIdx.x / TEAM, warp_row = int(threadIdx.x) / 32 % WARPS_M * 16;
  float2* statistics = reinterpret_cast<float2*>(smem + STATISTICS_OFFSET);  // [team][row]
  unsigned char* columns = smem + stage * STAGE_BYTES;                       // of the first team
  const Destination to(p, at);
  const int rows = to.rows();
  const bool whole = !CLUSTERED && at.whole();
  const Exchange exchange(shared_address(smem));
  if (CLUSTERED) exchange.await_all_open();
  Parts parts;
  float* slot = nullptr;
  if (!CLUSTERED && !whole) {
    parts = Parts(p, division, at);
    slot = parts.slot(p, parts.own);
  }
  if (threadIdx.x % 4 == 0) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      statistics[team * ROWS + warp_row + 8 * r + threadIdx.x % 32 / 4] = make_float2(part.state.max[r], part.state.sum[r]);
  }
  team_sync();  // every warp of the team has read its last tile
#pragma unroll
  for (int first = 0; first < VALUE_DIM; first += Meeting::COLUMNS) {
    if (first > 0) __syncthreads();
    Meeting::put(columns + team * RING_BYTES, warp_row, rows, part.o, first);
    __syncthreads();
    const int chunks = min(Meeting::COLUMNS, VALUE_DIM - first) / 4;
#pragma unroll 1
    for (int item = threadIdx.x; item < rows * chunks; item += THREADS) {
      const int row = item / chunks, chunk = item % chunks;
      Sum sum;
      sum.add<WARPS_N>(WARPS_N, scale_log2, [&](int other, float2& own, float4& four) {
        own = statistics[other * ROWS + row];
        four = Meeting::four(columns + other * RING_BYTES, row, chunk);
      });
      if (CODES) sum.o.x *= part.v_factor, sum.o.y *= part.v_factor, sum.o.z *= part.v_factor, sum.o.w *= part.v_factor;
      const int column = first + 4 * chunk;
      if (whole) {
        to.store(row, column, sum.o, sum.max, sum.sum);
      } else if (CLUSTERED) {
        exchange.send(row, chunk, sum);
      } else {
        __stcg(reinterpret_cast<float4*>(slot + row * VALUE_DIM + column), sum.o);
        if (column == 0) __stcg(parts.statistics(slot, row), make_float2(sum.max, sum.sum));
      }
    }
  }
  if constexpr (CLUSTERED) {
    exchange.merge(p, to);
    return;
  }
  __syncthreads();  // the stages may be filled again; and all of this CTA's part is written
  if (whole) return;

  // The last to arrive merges; it leaves the counter as it was.
  volatile int* last = reinterpret_cast<volatile int*>(smem + FLAG_OFFSET);
  if (threadIdx.x == 0) {
    unsigned* counter = static_cast<unsigned*>(p.workspace) + parts.counter;
    const bool is_last = count_arrival(counter) == unsigned(parts.count) - 1;
    if (is_last) atomicExch(counter, 0u);
    *last = is_last;
  }
  __syncthreads();
  if (*last) merge_parts(p, to, parts);
}

}  // namespace
