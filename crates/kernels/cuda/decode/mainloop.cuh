// flash_decode: a warp's part of a segment. 16 rows against the keys of its team: S = Q · Kᵀ, softmax, O += P · V.
//
// 8-bit codes become halves in registers, and everything is multiplied in halves then. Their bytes come by the same ldmatrix as 16-bit
// elements, two codes for one, which permutes the dimensions: in QKᵀ lane t of a quad has the dimensions 4t to 4t + 3 of each 16,
// Q as well as K; in PV an even and an odd accumulator tile share 16 columns, and lane t has the columns 4t to 4t + 3.
#pragma once
#include "codes.cuh"
#include "loader.cuh"
#include "mma.cuh"
#include "score.cuh"

namespace {

// The threads that share a ring have all arrived, and see each other's copies.
__device__ __forceinline__ void team_sync() {
  if (WARPS_M == 1)
    __syncwarp();
  else
    named_barrier_sync(1 + threadIdx.x / TEAM, TEAM);
}

__device__ __forceinline__ void multiply(float* c, const u32 (&a)[4], u32 b0, u32 b1) {
  float(&tile)[4] = *reinterpret_cast<float(*)[4]>(c);
  if (CODES)
    mma_m16n8k16_f16(tile, a, b0, b1);
  else
    mma_m16n8k16(tile, a, b0, b1);
}

__device__ __forceinline__ u32 pack_operand(float lo, float hi) { return CODES ? pack_halves(lo, hi) : pack_pair(lo, hi); }

// A thread's two rows of a Q tile, and their queries as the A operand of QKᵀ. What is here was asked for before it is needed.
struct Queries {
  int rows[2];   // query positions
  int heads[2];  // and query heads
  float k_scale = 1.f, v_scale = 1.f;  // of the key head's codes, where tokens have none of their own
  u32 fragments[K_STEPS][4];
  const u16* first[2];  // where the rows begin

  // Which rows they are, and where: no memory is read.
  __device__ __forceinline__ void find(const SdpaParams& p, const Cursor& at) {
    const int first_head = at.head_kv * group_of(p);
    const int warp_row = at.m_block * ROWS + int(threadIdx.x) / 32 % WARPS_M * 16;
    const element* head = head_of(static_cast<const element*>(p.q), p.q_stride, PACKED_QUERIES ? 0 : at.batch, first_head);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const PackedRow packed(p, warp_row + 8 * r + int(threadIdx.x) % 32 / 4);
      rows[r] = packed.query;
      heads[r] = first_head + packed.head;
      const element* row = head + packed.head * p.q_stride[1] + (at.asked.bounds.q_first + packed.query) * p.q_stride[2];
      first[r] = reinterpret_cast<const u16*>(row);
    }
  }

  __device__ __forceinline__ void fetch(const SdpaParams& p, const Cursor& at) {
    if (CODES && !TOKEN_SCALES) {
      const long long index = TENSOR_SCALES ? 0 : (long long)at.batch * p.heads_kv + at.head_kv;
      k_scale = p.k_scale[index];
      v_scale = p.v_scale[index];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const u16* row = first[r];
      if (rows[r] >= at.asked.bounds.seq_q) {
        each_pair(r, [](int) { return 0u; });
      } else if ((reinterpret_cast<u64>(row) & 3) == 0 && p.dim_qk == HEAD_DIM) {
        each_pair(r, [&](int column) { return *reinterpret_cast<const u32*>(row + column); });
      } else {
        each_pair(r, [&](int column) {
          u32 pair = 0;
          if (column < p.dim_qk) pair = row[column];
          if (column + 1 < p.dim_qk) pair |= u32(row[column + 1]) << 16;
          return pair;
        });
      }
    }
  }

  __device__ __forceinline__ void load(const SdpaParams& p, const Cursor& at) {
    find(p, at);
    fetch(p, at);
  }

 private:
  // The pairs of row `r`: what `pair_at` gives for the first of their columns.
  template <typename Pair>
  __device__ __forceinline__ void each_pair(int r, Pair pair_at) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int step = 0; step < K_STEPS; ++step)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        fragments[step][r + 2 * half] = pair_at(16 * step + (CODES ? 4 * t + 2 * half : 8 * half + 2 * t));
  }
};

struct Part {
  const SdpaParams& p;
  int rows[2];    // query positions of this thread's two rows
  int heads[2];   // and their query heads
  u32 q[Q_IN_SMEM ? 1 : K_STEPS][4];
  u32 q_smem;       // this lane's part of Q where it lies in shared memory
  float factor[2];  // what scores are multiplied with: powers of two taken out of Q, and the scale of K
  float v_factor;   // of O, once teams are added up: the scale of V
  float v_top;      // where tokens have their own scales, the largest so far: P · V is taken in terms of it
  RowPair state;
  float o[VALUE_DIM / 2] = {};

  __device__ __forceinline__ Part(const SdpaParams& params, unsigned char* smem, const Cursor& at, Queries& queries)
      : p(params), q_smem(shared_address(smem) + Q_OFFSET + threadIdx.x / 32 % WARPS_M * (K_STEPS * 512) + threadIdx.x % 32 * 16) {
#pragma unroll
    for (int r = 0; r < 2; ++r) rows[r] = queries.rows[r], heads[r] = queries.heads[r];
    row_pair_reset(state);
    v_top = 0.f;
    factor[0] = factor[1] = 1.f;
    v_factor = 1.f;
    if (CODES) prepare_scales(at, queries);
    keep_queries(queries.fragments);
  }

  // All tiles of a segment; gives the stage that the last one was in.
  __device__ __forceinline__ int run(Loader& loader, const Cursor& at) {
    const bool precise = PRECISE_KEYS > 0 && any_row_sees_fewer(at.asked.bounds, 0, at.asked.bounds.seq_q - 1, PRECISE_KEYS);
    // The slot that is filled next is the one behind those that are full.
    int slot = loader.slot + 1 == STAGES ? 0 : loader.slot + 1;
#pragma unroll 1
    for (int tile = at.tile; tile < at.tile_end; ++tile) {
      cp_async_wait<STAGES - 2>();
      team_sync();
      loader.issue();
      visit(loader.ring + slot * STAGE_BYTES, at, Walk::first_key_of(at, tile), precise);
      slot = slot + 1 == STAGES ? 0 : slot + 1;
    }
    reduce_row_sums(state);
    if (TOKEN_SCALES) {
#pragma unroll
      for (int i = 0; i < VALUE_DIM / 2; ++i) o[i] *= v_top;
    }
    return slot == 0 ? STAGES - 1 : slot - 1;
  }

 private:
  // All teams have the same: one writes it where it is shared.
  __device__ __forceinline__ void keep_queries(const u32 (&fragments)[K_STEPS][4]) {
#pragma unroll
    for (int step = 0; step < K_STEPS; ++step) {
      const u32(&from)[4] = fragments[step];
      if (!Q_IN_SMEM) {
#pragma unroll
        for (int i = 0; i < 4; ++i) q[Q_IN_SMEM ? 0 : step][i] = from[i];
      } else if (threadIdx.x < TEAM) {
        asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(q_smem + step * 512), "r"(from[0]), "r"(from[1]), "r"(from[2]),
                     "r"(from[3])
                     : "memory");
      }
    }
    if (Q_IN_SMEM) __syncthreads();
  }

  __device__ __forceinline__ void query(int step, u32 (&a)[4]) const {
    if (Q_IN_SMEM) {
      asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                   : "r"(q_smem + step * 512)
                   : "memory");
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = q[Q_IN_SMEM ? 0 : step][i];
    }
  }

  // bf16 queries become halves: exactly, once the power of two of a row's largest is taken out of it.
  __device__ __forceinline__ void prepare_scales(const Cursor& at, Queries& queries) {
    u32(&q)[K_STEPS][4] = queries.fragments;
    v_factor = CODE_FACTOR * queries.v_scale;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float power = 1.f;
      // Mostly a warp has no more than eight rows: the others are zeros already.
      if (DTYPE_BF16 && (r == 0 || __any_sync(~0u, rows[r] < at.asked.bounds.seq_q))) {
        float top = 0.f;
#pragma unroll
        for (int step = 0; step < K_STEPS; ++step)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float2 two = unpack_pair(q[step][r + 2 * half]);
            top = fmaxf(top, fmaxf(fabsf(two.x), fabsf(two.y)));
          }
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        const int exponent = min(max(int(__float_as_uint(top) >> 23), 1), 253);
        power = __uint_as_float(u32(exponent) << 23);
        const float inverse = __uint_as_float(u32(254 - exponent) << 23);
#pragma unroll
        for (int step = 0; step < K_STEPS; ++step)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            u32& pair = q[step][r + 2 * half];
            const float2 two = unpack_pair(pair);
            pair = pack_halves(two.x * inverse, two.y * inverse);
          }
      }
      factor[r] = power * CODE_FACTOR * queries.k_scale;
    }
  }

  // One KV tile: WARP_KEYS keys from `key` on.
  __device__ __forceinline__ void visit(u32 stage, const Cursor& at, int key, bool precise) {
    const Sequence& bounds = at.asked.bounds;
    const int lane = threadIdx.x % 32;
    float s[WARP_KEYS / 2] = {};
    multiply_keys(stage, s);
    if (CODES) {
#pragma unroll
      for (int i = 0; i < WARP_KEYS / 2; ++i) s[i] *= factor[i / 2 % 2];
      if (TOKEN_SCALES) {
#pragma unroll
        for (int i = 0; i < WARP_KEYS / 2; ++i) s[i] *= scale_at(stage, i / 4 * 8 + 2 * (lane % 4) + i % 2);
      }
    }
    const int column = key + 2 * (lane % 4);
    if constexpr (ScoreHook::ACTIVE) {
      const ScoreHook hooks[2] = {{p, bounds, at.batch, heads[0]}, {p, bounds, at.batch, heads[1]}};
      ScoreHook::change(hooks[0], hooks[1], s, rows, column);
    }
    if (tile_needs_mask(bounds, 0, bounds.seq_q - 1, key, WARP_KEYS)) mask_scores<WARP_KEYS>(bounds, s, rows, column);
    float shrink[2];
    softmax_scores<WARP_KEYS, true, -1, ScoreHook::NATURAL_UNITS>(s, state, ScoreHook::scale_log2(p), shrink);
    if (TOKEN_SCALES) weigh_values(stage, s, shrink);
    if (!__all_sync(~0u, shrink[0] == 1.f && shrink[1] == 1.f)) scale_rows(o, shrink);
    multiply_values(stage, s, precise);
  }

  // A token's scale of K; those of V follow WARP_KEYS further.
  static __device__ __forceinline__ float scale_at(u32 stage, int number) {
    float scale;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(scale) : "r"(stage + SCALES_OFFSET + 4 * number) : "memory");
    return scale;
  }

  // Values' scales go into P, in terms of the largest so far: P stays at most 1, and its halves keep their bits.
  __device__ __forceinline__ void weigh_values(u32 stage, float (&s)[WARP_KEYS / 2], float (&shrink)[2]) {
    const int lane = threadIdx.x % 32;
    float top = fmaxf(v_top, lane < WARP_KEYS ? fabsf(scale_at(stage, WARP_KEYS + lane)) : 0.f);
    top = group_max(top);
    const float inverse = top > 0.f ? 1.f / top : 0.f;
#pragma unroll
    for (int r = 0; r < 2; ++r) shrink[r] *= v_top == top ? 1.f : v_top * inverse;
    v_top = top;
#pragma unroll
    for (int i = 0; i < WARP_KEYS / 2; ++i) s[i] *= scale_at(stage, WARP_KEYS + i / 4 * 8 + 2 * (lane % 4) + i % 2) * inverse;
  }

  __device__ __forceinline__ void multiply_keys(u32 stage, float (&s)[WARP_KEYS / 2]) const {
    const int lane = opaque(threadIdx.x) % 32;
    const u32 k_lane = stage + KTile::offset((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
#pragma unroll
    for (int pair = 0; pair < KTile::CHUNKS / 2; ++pair) {
      constexpr int STEPS = CODES ? 2 : 1;  // of two chunks
      u32 a[STEPS][4];
#pragma unroll
      for (int step = 0; step < STEPS; ++step) query(STEPS * pair + step, a[step]);
#pragma unroll
      for (int n = 0; n < WARP_KEYS / 16; ++n) {
        u32 b[4];
        ldmatrix_x4(b, KTile::advance(k_lane, pair, n));
        if (!CODES) {
          multiply(s + 8 * n, a[0], b[0], b[1]);
          multiply(s + 8 * n + 4, a[0], b[2], b[3]);
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i)
            multiply(s + 8 * n + 4 * (i / 2), a[i % STEPS], halves_of_low_codes(b[i]), halves_of_high_codes(b[i]));
        }
      }
    }
  }

  __device__ __forceinline__ void multiply_values(u32 stage, const float (&s)[WARP_KEYS / 2], bool precise) {
    const int lane = opaque(threadIdx.x) % 32;
    const u32 v_lane = stage + KTile::BYTES + VTile::offset(lane & 15, lane >> 4);
#pragma unroll
    for (int block = 0; block < WARP_KEYS / 16; ++block) {
      const float* own = s + 8 * block;
      u32 a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = pack_operand(own[2 * i], own[2 * i + 1]);
      add_values(v_lane, block, a);
      if constexpr (PRECISE_KEYS > 0 && !CODES) {
        if (!precise) continue;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 kept = unpack_pair(a[i]);
          a[i] = pack_pair(own[2 * i] - kept.x, own[2 * i + 1] - kept.y);
        }
        add_values(v_lane, block, a);
      }
    }
  }

  // O += A · V for 16 keys.
  __device__ __forceinline__ void add_values(u32 v_lane, int block, const u32 (&a)[4]) {
#pragma unroll
    for (int pair = 0; pair < VTile::CHUNKS / 2; ++pair) {
      u32 b[4];
      ldmatrix_x4_trans(b, VTile::advance(v_lane, pair, block));
      if (!CODES) {
        multiply(o + 8 * pair, a, b[0], b[1]);
        multiply(o + 8 * pair + 4, a, b[2], b[3]);
      } else {
#pragma unroll
        for (int chunk = 0; chunk < 2; ++chunk) {
          // Of two columns, the codes of four keys each.
          const u32 even = __byte_perm(b[2 * chunk], b[2 * chunk + 1], 0x6420);
          const u32 odd = __byte_perm(b[2 * chunk], b[2 * chunk + 1], 0x7531);
          float* tiles = o + (16 * pair + 8 * chunk) % (VALUE_DIM / 2);
          multiply(tiles, a, halves_of_low_codes(even), halves_of_high_codes(even));
          multiply(tiles + 4, a, halves_of_low_codes(odd), halves_of_high_codes(odd));
        }
      }
    }
  }
};

}  // namespace
