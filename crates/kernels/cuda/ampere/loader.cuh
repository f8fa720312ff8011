// ampere_fwd: which Q tile is this CTA's, which KV tiles it needs, and how tiles come to shared memory by cp.async.
#pragma once
#include "copy.cuh"
#include "layout.cuh"
#include "mask.cuh"

namespace {

// Which rows: HEAD_GROUP heads at a time, few enough for their K and V to stay in L2; among them the last (under a causal mask the
// longest) Q tiles start first, so that short ones fill the gaps at the end. Which keys: tiles without a visible key are never touched.
struct Work {
  int head, batch, head_kv, m0, m_last;
  int tile_first, tiles;
  bool precise;

  __device__ __forceinline__ explicit Work(const SdpaParams& p) {
    const int m_blocks = (p.seq_q + BLOCK_M - 1) / BLOCK_M;
    const int group_first = int(blockIdx.x) / (HEAD_GROUP * m_blocks) * HEAD_GROUP;
    const int group_heads = HEAD_GROUP == 1 ? 1 : min(HEAD_GROUP, p.heads_q * p.batch - group_first);
    const int in_group = int(blockIdx.x) - group_first * m_blocks;
    const int m_block = m_blocks - 1 - in_group / group_heads;
    const int head_index = group_first + in_group % group_heads;
    head = head_index % p.heads_q;
    batch = head_index / p.heads_q;
    head_kv = head / (p.heads_q / p.heads_kv);
    m0 = m_block * BLOCK_M;
    m_last = min(m0 + BLOCK_M, p.seq_q) - 1;
    const int key_first = max(0, m0 + p.band_lo);
    const int key_last = min(p.seq_kv - 1, m_last + p.band_hi);
    tile_first = key_first / BLOCK_N;
    tiles = key_last >= key_first ? key_last / BLOCK_N - tile_first + 1 : 0;
    precise = PRECISE_KEYS > 0 && any_row_sees_fewer(p, m0, m_last, PRECISE_KEYS);
  }
};

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

// The loads of one CTA. Load number h is K of tile h/2 when even, V when odd; always one commit group, empty past the end.
struct Loader {
  const SdpaParams& p;
  const u32 smem;
  const Work& work;
  const Source q, k, v;

  static __device__ __forceinline__ Source source(const void* tensor, const long long (&stride)[3], int batch, int head, int dim) {
    const element* base = head_of(static_cast<const element*>(tensor), stride, batch, head);
    return {base, stride[2], dim, rows_are_16_byte_aligned(base, stride[2])};
  }
  __device__ __forceinline__ Loader(const SdpaParams& params, u32 shared, const Work& w)
      : p(params),
        smem(shared),
        work(w),
        q(source(p.q, p.q_stride, w.batch, w.head, p.dim_qk)),
        k(source(p.k, p.k_stride, w.batch, w.head_kv, p.dim_qk)),
        v(source(p.v, p.v_stride, w.batch, w.head_kv, p.dim_v)) {}

  __device__ __forceinline__ void load_q() const { load_tile<QTile, BLOCK_M>(smem, q, work.m0, p.seq_q); }
  __device__ __forceinline__ void issue(int h) const {
    const int tile = h / 2;
    if (tile < work.tiles) {
      const int slot = tile % STAGES;
      const int n0 = (work.tile_first + tile) * BLOCK_N;
      if (h % 2 == 0)
        load_tile<KTile, BLOCK_N>(smem + K_OFFSET + slot * KTile::BYTES, k, n0, p.seq_kv);
      else
        load_tile<VTile, BLOCK_N>(smem + V_OFFSET + slot * VTile::BYTES, v, n0, p.seq_kv);
    }
    cp_async_commit();
  }
};

}  // namespace
