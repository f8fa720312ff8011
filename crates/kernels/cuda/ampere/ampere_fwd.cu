// ampere_fwd: fused attention for sm_80 and later, with mma.sync, ldmatrix and multi-stage cp.async.
//
// One CTA owns BLOCK_M query rows of one head and walks the visible keys in tiles of BLOCK_N, left to right.
// WARPS_M warps share the rows (16 or 32 each); WARPS_N warps share the keys of each tile, each keeping its own
// running (m, l, O), merged once at the end. K and V arrive through a ring of STAGES tiles each: loads are numbered
// K0 V0 K1 V1 ..., one commit group each, and the slot that step h-1 used is refilled at the start of step h.
//
// Compile-time: HEAD_DIM, VALUE_DIM (padded to 16), DTYPE_BF16, and the tunables below.
#include "copy.cuh"
#include "lse.cuh"
#include "mask.cuh"
#include "mma.cuh"
#include "score.cuh"
#include "store.cuh"

namespace {

constexpr int THREADS = 32 * WARPS_M * WARPS_N;
constexpr int M_TILES = BLOCK_M / (16 * WARPS_M);  // 16-row tiles of one warp
constexpr int WARP_KEYS = BLOCK_N / WARPS_N;       // keys of a tile that one warp sees
constexpr int N_TILES = WARP_KEYS / 8;
constexpr int K_STEPS = HEAD_DIM / 16;
constexpr int O_TILES = VALUE_DIM / 8;
// Whether the accumulators of O and of the scores leave none for addresses that are worth keeping over the loop.
constexpr bool REGISTERS_ARE_FULL = M_TILES * 4 * (O_TILES + N_TILES) > 160;
static_assert(BLOCK_M % (16 * WARPS_M) == 0 && WARP_KEYS % 16 == 0, "tiles must divide evenly");
static_assert(HEAD_DIM % 16 == 0 && VALUE_DIM % 16 == 0, "head dimensions are padded to 16");

// A tile of ROWS × DIM 16-bit elements, cut into panels at most 128 bytes wide whose 16-byte chunks are
// XOR-swizzled so that eight consecutive rows of one chunk column fall into different banks.
template <int ROWS, int DIM>
struct SmemTile {
  static constexpr int PANEL_CHUNKS = DIM % 64 == 0 ? 8 : DIM % 32 == 0 ? 4 : 2;
  static constexpr int ROWS_PER_LINE = 8 / PANEL_CHUNKS;
  static constexpr int CHUNKS = DIM / 8;
  static constexpr int BYTES = ROWS * DIM * 2;
  static __device__ __forceinline__ u32 offset(int row, int chunk) {
    const int panel = chunk / PANEL_CHUNKS;
    const int inside = (chunk % PANEL_CHUNKS) ^ ((row / ROWS_PER_LINE) % PANEL_CHUNKS);
    return (panel * ROWS + row) * (PANEL_CHUNKS * 16) + inside * 16;
  }
  // From a lane's address in k16 step 0 and row block 0 to the same lane's address in another step and block of
  // 16 rows. The swizzle only touches the address bits below a 128-byte line, so one XOR and a constant do it.
  static __device__ __forceinline__ u32 advance(u32 address, int step, int block16) {
    return (address ^ ((2 * step % PANEL_CHUNKS) << 4)) + (2 * step / PANEL_CHUNKS) * (ROWS * PANEL_CHUNKS * 16) +
           block16 * (16 * PANEL_CHUNKS * 16);
  }
};
using QTile = SmemTile<BLOCK_M, HEAD_DIM>;
using KTile = SmemTile<BLOCK_N, HEAD_DIM>;
using VTile = SmemTile<BLOCK_N, VALUE_DIM>;
using OTile = SmemTile<BLOCK_M, VALUE_DIM>;

constexpr int Q_BYTES = QTile::BYTES > OTile::BYTES ? QTile::BYTES : OTile::BYTES;
constexpr int K_OFFSET = Q_BYTES;
constexpr int V_OFFSET = K_OFFSET + STAGES * KTile::BYTES;
constexpr int LOOP_BYTES = V_OFFSET + STAGES * VTile::BYTES;
// Later, where WARPS_N warps share the rows: [WARPS_N][BLOCK_M] maxima, then sums, then partial rows of O.
constexpr int MERGE_PITCH = VALUE_DIM + 4;  // floats
constexpr int MERGE_BYTES = WARPS_N > 1 ? 4 * WARPS_N * BLOCK_M * (2 + MERGE_PITCH) : 0;
constexpr int LAYOUT_BYTES = LOOP_BYTES > MERGE_BYTES ? LOOP_BYTES : MERGE_BYTES;
static_assert(LAYOUT_BYTES == DYNAMIC_SMEM_BYTES, "the manifest's dynamic_smem is the size of this layout");

// One row of source data: where it starts, and whether 16-byte copies may be used.
struct Source {
  const element* base;
  long long stride;
  int dim;
  bool aligned;
};

// The same value, of which the compiler knows nothing: what is computed from it is computed where it is needed, instead
// of once before the loop and then kept in registers that are not there.
__device__ __forceinline__ u32 opaque(u32 value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Copies rows [row0, row0 + ROWS) to shared memory; whatever lies past `row_end` or past `dim` becomes zero.
template <typename Tile, int ROWS>
__device__ __forceinline__ void load_tile(u32 smem, const Source& src, int row0, int row_end) {
  constexpr int CHUNKS = Tile::CHUNKS;
  const element* tile = src.base + row0 * src.stride;
  const int rows = row_end - row0;
  // Opaque, so that the compiler recomputes the addresses here instead of keeping them in registers over the loop.
  const int thread = opaque(threadIdx.x);
  if (src.aligned && THREADS % CHUNKS == 0) {
    // Every thread keeps its chunk column and steps down the rows.
    constexpr int ROW_STEP = THREADS / CHUNKS > 0 ? THREADS / CHUNKS : 1;
    const int chunk = thread % CHUNKS;
    const int first_row = thread / CHUNKS;
    const int chunk_bytes = 2 * min(max(src.dim - chunk * 8, 0), 8);
    const element* from = tile + first_row * src.stride + (chunk_bytes > 0 ? chunk * 8 : 0);
#pragma unroll
    for (int i = 0; i < (ROWS + ROW_STEP - 1) / ROW_STEP; ++i) {
      const int row = first_row + i * ROW_STEP;
      if (ROWS % ROW_STEP != 0 && row >= ROWS) break;
      cp_async_16<true>(smem + Tile::offset(row, chunk), row < rows ? from : src.base, row < rows ? chunk_bytes : 0);
      from += ROW_STEP * src.stride;
    }
    return;
  }
  if (src.aligned) {
#pragma unroll 2
    for (int index = thread; index < ROWS * CHUNKS; index += THREADS) {
      const int row = index / CHUNKS;
      const int chunk = index % CHUNKS;
      const int valid = row < rows ? min(max(src.dim - chunk * 8, 0), 8) : 0;
      cp_async_16<true>(smem + Tile::offset(row, chunk), valid > 0 ? tile + row * src.stride + chunk * 8 : src.base, valid * 2);
    }
    return;
  }
  // Rows that are not 16-byte aligned: one pair at a time, few registers rather than fast.
#pragma unroll 1
  for (int index = thread; index < ROWS * CHUNKS * 4; index += THREADS) {
    const int row = index / (CHUNKS * 4);
    const int column = index % (CHUNKS * 4) * 2;
    const u16* from = reinterpret_cast<const u16*>(tile + row * src.stride) + column;
    u32 pair = 0;
    if (row < rows && column < src.dim) pair = from[0];
    if (row < rows && column + 1 < src.dim) pair |= u32(from[1]) << 16;
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(smem + Tile::offset(row, column / 8) + column % 8 * 2), "r"(pair)
                 : "memory");
  }
}

// O += A · V for 16 keys, from the block16-th on.
__device__ __forceinline__ void multiply_values(float (&o)[M_TILES][O_TILES][4], const u32 (&a)[M_TILES][4], u32 v_lane,
                                                int block16) {
#pragma unroll
  for (int c = 0; c < O_TILES / 2; ++c) {
    u32 b[4];
    ldmatrix_x4_trans(b, VTile::advance(v_lane, c, block16));
#pragma unroll
    for (int mt = 0; mt < M_TILES; ++mt) {
      mma_m16n8k16(o[mt][2 * c], a[mt], b[0], b[1]);
      mma_m16n8k16(o[mt][2 * c + 1], a[mt], b[2], b[3]);
    }
  }
}

// O += P · V for this warp's keys; PRECISE, with what the 16-bit rounding of P leaves over in a second product. Both are
// done for 16 keys before the next: their P is then no longer needed.
template <bool PRECISE>
__device__ __forceinline__ void accumulate_pv(float (&o)[M_TILES][O_TILES][4], const float (&p)[M_TILES][N_TILES][4],
                                              u32 v_lane) {
#pragma unroll
  for (int k = 0; k < WARP_KEYS / 16; ++k) {
    u32 a[M_TILES][4], rest[M_TILES][4];
#pragma unroll
    for (int mt = 0; mt < M_TILES; ++mt)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float* pair = &p[mt][2 * k + r / 2][(r % 2) * 2];
        a[mt][r] = pack_pair(pair[0], pair[1]);
        if (PRECISE) {
          const float2 kept = unpack_pair(a[mt][r]);
          rest[mt][r] = pack_pair(pair[0] - kept.x, pair[1] - kept.y);
        }
      }
    multiply_values(o, a, v_lane, k);
    if (PRECISE) multiply_values(o, rest, v_lane, k);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM) ampere_fwd(const __grid_constant__ SdpaParams p) {
  extern __shared__ __align__(128) unsigned char smem_raw[];
  const u32 smem = shared_address(smem_raw);
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int warp_m = warp % WARPS_M;
  const int warp_n = warp / WARPS_M;

  // Which rows: HEAD_GROUP heads at a time, few enough for their K and V to stay in the L2 cache; among them the last
  // (under a causal mask the longest) row blocks start first, so that short ones fill the gaps at the end.
  const int m_blocks = (p.seq_q + BLOCK_M - 1) / BLOCK_M;
  const int group_first = int(blockIdx.x) / (HEAD_GROUP * m_blocks) * HEAD_GROUP;
  const int group_heads = HEAD_GROUP == 1 ? 1 : min(HEAD_GROUP, p.heads_q * p.batch - group_first);
  const int in_group = int(blockIdx.x) - group_first * m_blocks;
  const int m_block = m_blocks - 1 - in_group / group_heads;
  const int head_index = group_first + in_group % group_heads;
  const int head = head_index % p.heads_q;
  const int batch = head_index / p.heads_q;
  const int head_kv = head / (p.heads_q / p.heads_kv);
  const int m0 = m_block * BLOCK_M;
  const int m_last = min(m0 + BLOCK_M, p.seq_q) - 1;

  const element* q_base = static_cast<const element*>(p.q) + batch * p.q_stride[0] + head * p.q_stride[1];
  const element* k_base = static_cast<const element*>(p.k) + batch * p.k_stride[0] + head_kv * p.k_stride[1];
  const element* v_base = static_cast<const element*>(p.v) + batch * p.v_stride[0] + head_kv * p.v_stride[1];
  element* o_base = static_cast<element*>(p.o) + batch * p.o_stride[0] + head * p.o_stride[1];
  const Source q_src{q_base, p.q_stride[2], p.dim_qk, rows_are_16_byte_aligned(q_base, p.q_stride[2])};
  const Source k_src{k_base, p.k_stride[2], p.dim_qk, rows_are_16_byte_aligned(k_base, p.k_stride[2])};
  const Source v_src{v_base, p.v_stride[2], p.dim_v, rows_are_16_byte_aligned(v_base, p.v_stride[2])};
  const bool o_aligned = rows_are_16_byte_aligned(o_base, p.o_stride[2]);

  // Which keys: tiles without a visible key are never touched.
  const int key_first = max(0, m0 + p.band_lo);
  const int key_last = min(p.seq_kv - 1, m_last + p.band_hi);
  const int tile_first = key_first / BLOCK_N;
  const int tiles = key_last >= key_first ? key_last / BLOCK_N - tile_first + 1 : 0;
  const bool precise = PRECISE_KEYS > 0 && any_row_sees_fewer(p, m0, m_last, PRECISE_KEYS);

  // Load number h: K of tile h/2 when even, V when odd. Always one commit group, empty past the end.
  auto issue_load = [&](int h) {
    const int tile = h / 2;
    if (tile < tiles) {
      const int slot = tile % STAGES;
      const int n0 = (tile_first + tile) * BLOCK_N;
      if (h % 2 == 0)
        load_tile<KTile, BLOCK_N>(smem + K_OFFSET + slot * KTile::BYTES, k_src, n0, p.seq_kv);
      else
        load_tile<VTile, BLOCK_N>(smem + V_OFFSET + slot * VTile::BYTES, v_src, n0, p.seq_kv);
    }
    cp_async_commit();
  };

  load_tile<QTile, BLOCK_M>(smem, q_src, m0, p.seq_q);
#pragma unroll
  for (int h = 0; h < 2 * STAGES - 1; ++h) issue_load(h);  // Q travels in the first group

  float o[M_TILES][O_TILES][4] = {};
  float row_max[M_TILES][2], row_sum[M_TILES][2];
#pragma unroll
  for (int mt = 0; mt < M_TILES; ++mt)
#pragma unroll
    for (int r = 0; r < 2; ++r) row_max[mt][r] = NEG_INF, row_sum[mt][r] = 0.f;

  const int warp_row = warp_m * 16 * M_TILES;
  const int warp_key = warp_n * WARP_KEYS;
  u32 q_frag[Q_IN_REGS ? K_STEPS : 1][M_TILES][4];
  // Where this lane's ldmatrix rows start; see SmemTile::advance.
  const u32 q_lane = smem + QTile::offset(warp_row + (lane & 15), lane >> 4);
  const u32 k_lane = smem + K_OFFSET + KTile::offset(warp_key + (lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
  const u32 v_lane = smem + V_OFFSET + VTile::offset(warp_key + (lane & 15), lane >> 4);
  auto load_q = [&](u32 lane_address, int step, u32 (&frag)[M_TILES][4]) {
#pragma unroll
    for (int mt = 0; mt < M_TILES; ++mt)
      ldmatrix_x4(frag[mt], QTile::advance(lane_address, step, mt));
  };

  // Inlined once for each choice below: what a loop never needs is not in its code.
  auto visit_keys = [&](int tile_begin, int tile_end, bool may_need_mask, bool precise_rows)
                        __attribute__((always_inline)) {
  for (int tile = tile_begin; tile < tile_end; ++tile) {
    const int n0 = (tile_first + tile) * BLOCK_N;
    const int slot = tile % STAGES;
    const u32 q_here = REGISTERS_ARE_FULL ? opaque(q_lane) : q_lane;
    const u32 k_here = REGISTERS_ARE_FULL ? opaque(k_lane + slot * KTile::BYTES) : k_lane + slot * KTile::BYTES;
    const u32 v_here = REGISTERS_ARE_FULL ? opaque(v_lane + slot * VTile::BYTES) : v_lane + slot * VTile::BYTES;

    cp_async_wait<2 * STAGES - 2>();
    __syncthreads();
    if (Q_IN_REGS && tile == 0) {
#pragma unroll
      for (int step = 0; step < K_STEPS; ++step) load_q(q_here, step, q_frag[Q_IN_REGS ? step : 0]);
    }
    issue_load(2 * tile + 2 * STAGES - 1);

    // S = Q · Kᵀ
    float s[M_TILES][N_TILES][4] = {};
#pragma unroll
    for (int step = 0; step < K_STEPS; ++step) {
      if (!Q_IN_REGS) load_q(q_here, step, q_frag[0]);
      u32(&a)[M_TILES][4] = q_frag[Q_IN_REGS ? step : 0];
#pragma unroll
      for (int n = 0; n < N_TILES / 2; ++n) {
        u32 b[4];
        ldmatrix_x4(b, KTile::advance(k_here, step, n));
#pragma unroll
        for (int mt = 0; mt < M_TILES; ++mt) {
          mma_m16n8k16(s[mt][2 * n], a[mt], b[0], b[1]);
          mma_m16n8k16(s[mt][2 * n + 1], a[mt], b[2], b[3]);
        }
      }
    }

    // V of this tile must be there for P · V; waiting now frees the K slot for the next load before the softmax.
    cp_async_wait<2 * STAGES - 2>();
    __syncthreads();
    issue_load(2 * tile + 2 * STAGES);

    // Mask, only where the band's edge or the end of the keys crosses this tile.
    if (may_need_mask && tile_needs_mask(p, m0, m_last, n0, BLOCK_N)) {
#pragma unroll
      for (int mt = 0; mt < M_TILES; ++mt)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int row = m0 + warp_row + mt * 16 + r * 8 + lane / 4;
          const int column0 = n0 + warp_key + 2 * (lane % 4);
          const int visible_first = row + p.band_lo - column0;
          const int visible_last = min(row + p.band_hi, p.seq_kv - 1) - column0;
#pragma unroll
          for (int n = 0; n < N_TILES; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e)
              if (n * 8 + e > visible_last) s[mt][n][r * 2 + e] = NEG_INF;
          if (p.band_lo > SDPA_BAND_UNBOUNDED_LO) {
#pragma unroll
            for (int n = 0; n < N_TILES; ++n)
#pragma unroll
              for (int e = 0; e < 2; ++e)
                if (n * 8 + e < visible_first) s[mt][n][r * 2 + e] = NEG_INF;
          }
        }
    }

    // Online softmax; the row sum stays per thread until the end.
    float factor[M_TILES][2];
#pragma unroll
    for (int mt = 0; mt < M_TILES; ++mt)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float top = row_max[mt][r];
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) top = fmaxf(top, fmaxf(s[mt][n][2 * r], s[mt][n][2 * r + 1]));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        const float safe = top == NEG_INF ? 0.f : top;  // a row without a visible key so far
        const float shrink = exp2_approx((row_max[mt][r] - safe) * p.scale_log2);
        const float offset = safe * p.scale_log2;
        row_max[mt][r] = top;
        float sum = row_sum[mt][r] * shrink;
#pragma unroll
        for (int n = 0; n < N_TILES; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = s[mt][n][2 * r + e];
            x = exp2_approx(fmaf(x, p.scale_log2, -offset));
            sum += x;
          }
        row_sum[mt][r] = sum;
        if (SKIP_RESCALE) {
          factor[mt][r] = shrink;
        } else {
#pragma unroll
          for (int c = 0; c < O_TILES; ++c) o[mt][c][2 * r] *= shrink, o[mt][c][2 * r + 1] *= shrink;
        }
      }
    if (SKIP_RESCALE) {
      bool unchanged = true;
#pragma unroll
      for (int mt = 0; mt < M_TILES; ++mt) unchanged = unchanged && factor[mt][0] == 1.f && factor[mt][1] == 1.f;
      if (!__all_sync(~0u, unchanged)) {
#pragma unroll
        for (int mt = 0; mt < M_TILES; ++mt)
#pragma unroll
          for (int c = 0; c < O_TILES; ++c)
#pragma unroll
            for (int e = 0; e < 4; ++e) o[mt][c][e] *= factor[mt][e / 2];
      }
    }

    if (precise_rows)
      accumulate_pv<(PRECISE_KEYS > 0)>(o, s, v_here);
    else
      accumulate_pv<false>(o, s, v_here);
  }
  };
  // Tiles before the band's right edge need no mask, unless the band has a left one.
  const int before_edge = (min(m0 + p.band_hi, p.seq_kv - 1) + 1) / BLOCK_N - tile_first;
  const int unmasked = p.band_lo > SDPA_BAND_UNBOUNDED_LO ? 0 : min(max(before_edge, 0), tiles);
  if (SPLIT_PRECISE_LOOP && PRECISE_KEYS > 0 && precise) {
    visit_keys(0, tiles, true, true);
  } else {
    const bool precise_rows = !SPLIT_PRECISE_LOOP && PRECISE_KEYS > 0 && precise;
    if (SPLIT_MASKED_LOOP) visit_keys(0, unmasked, false, precise_rows);
    visit_keys(SPLIT_MASKED_LOOP ? unmasked : 0, tiles, true, precise_rows);
  }
  cp_async_wait<0>();

#pragma unroll
  for (int mt = 0; mt < M_TILES; ++mt)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float& sum = row_sum[mt][r];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
    }
  float* lse = p.lse ? p.lse + batch * p.lse_stride[0] + head * p.lse_stride[1] + m0 : nullptr;
  auto store_lse = [&](int row, float top, float sum) {
    if (lse && m0 + row < p.seq_q)
      lse[row] = log_sum_exp(top, sum, p.scale);
  };

#if WARPS_N == 1
  // Each warp stages its own rows where its Q rows were, then writes them in 16-byte chunks.
  // Without a key tile nothing has waited yet for the other warps' copies of Q.
  if (HEAD_DIM != VALUE_DIM || tiles == 0) __syncthreads();
#pragma unroll
  for (int mt = 0; mt < M_TILES; ++mt)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = row_sum[mt][r];
      const float inverse = sum > 0.f ? 1.f / sum : 0.f;
      const int row = warp_row + mt * 16 + r * 8 + lane / 4;
      if (lane % 4 == 0) store_lse(row, row_max[mt][r], sum);
#pragma unroll
      for (int c = 0; c < O_TILES; ++c) {
        const u32 bits = pack_pair(o[mt][c][2 * r] * inverse, o[mt][c][2 * r + 1] * inverse);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(smem + OTile::offset(row, c) + 4 * (lane % 4)), "r"(bits)
                     : "memory");
      }
    }
  __syncwarp();
#pragma unroll
  for (int i = lane; i < 16 * M_TILES * OTile::CHUNKS; i += 32) {
    const int row = warp_row + i / OTile::CHUNKS;
    const int chunk = i % OTile::CHUNKS;
    if (m0 + row < p.seq_q) {
      const uint4 bits = *reinterpret_cast<const uint4*>(smem_raw + OTile::offset(row, chunk));
      store_chunk(o_base + (m0 + row) * p.o_stride[2], chunk * 8, p.dim_v, o_aligned, bits);
    }
  }
#else
  // The warps of one row block bring their partial O to the common maximum and add them up in shared memory.
  float* stats = reinterpret_cast<float*>(smem_raw);                  // [WARPS_N][BLOCK_M] maxima, then sums
  float* partial = stats + 2 * WARPS_N * BLOCK_M;                     // [WARPS_N][BLOCK_M][MERGE_PITCH]
  __syncthreads();
#pragma unroll
  for (int mt = 0; mt < M_TILES; ++mt)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = warp_row + mt * 16 + r * 8 + lane / 4;
      if (lane % 4 == 0) {
        stats[warp_n * BLOCK_M + row] = row_max[mt][r];
        stats[(WARPS_N + warp_n) * BLOCK_M + row] = row_sum[mt][r];
      }
#pragma unroll
      for (int c = 0; c < O_TILES; ++c)
        *reinterpret_cast<float2*>(&partial[(warp_n * BLOCK_M + row) * MERGE_PITCH + c * 8 + 2 * (lane % 4)]) =
            make_float2(o[mt][c][2 * r], o[mt][c][2 * r + 1]);
    }
  __syncthreads();
  for (int i = threadIdx.x; i < BLOCK_M * OTile::CHUNKS; i += THREADS) {
    const int row = i / OTile::CHUNKS;
    const int chunk = i % OTile::CHUNKS;
    if (m0 + row >= p.seq_q) continue;
    float top = NEG_INF;
#pragma unroll
    for (int w = 0; w < WARPS_N; ++w) top = fmaxf(top, stats[w * BLOCK_M + row]);
    const float safe = top == NEG_INF ? 0.f : top;
    float sum = 0.f, out[8] = {};
#pragma unroll
    for (int w = 0; w < WARPS_N; ++w) {
      const float weight = exp2_approx((stats[w * BLOCK_M + row] - safe) * p.scale_log2);
      sum += weight * stats[(WARPS_N + w) * BLOCK_M + row];
      const float* from = &partial[(w * BLOCK_M + row) * MERGE_PITCH + chunk * 8];
#pragma unroll
      for (int e = 0; e < 8; ++e) out[e] = fmaf(weight, from[e], out[e]);
    }
    const float inverse = sum > 0.f ? 1.f / sum : 0.f;
    if (chunk == 0) store_lse(row, top, sum);
    const uint4 bits = make_uint4(pack_pair(out[0] * inverse, out[1] * inverse), pack_pair(out[2] * inverse, out[3] * inverse),
                                  pack_pair(out[4] * inverse, out[5] * inverse), pack_pair(out[6] * inverse, out[7] * inverse));
    store_chunk(o_base + (m0 + row) * p.o_stride[2], chunk * 8, p.dim_v, o_aligned, bits);
  }
#endif
}
