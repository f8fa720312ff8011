// ampere_fwd, ampere_f32: how tiles come to shared memory by cp.async.
#pragma once
#include "cache.cuh"
#include "tiles.cuh"

namespace {

// Copies rows [row0, row0 + ROWS) to shared memory; whatever lies past `row_end` or past `dim` becomes zero.
template <typename Tile, int ROWS>
__device__ __forceinline__ void load_tile(u32 smem, const Source& src, int row0, int row_end) {
  constexpr int CHUNKS = Tile::CHUNKS;
  const Scalar* tile = src.base + row0 * src.stride;
  const int rows = row_end - row0;
  // Opaque, so that the compiler recomputes the addresses here instead of keeping them in registers over the loop.
  const int thread = opaque(threadIdx.x);
  if (src.aligned && THREADS % CHUNKS == 0) {
    // Every thread keeps its chunk column and steps down the rows.
    constexpr int ROW_STEP = THREADS / CHUNKS > 0 ? THREADS / CHUNKS : 1;
    const int chunk = thread % CHUNKS;
    const int first_row = thread / CHUNKS;
    const int chunk_bytes = int(sizeof(Scalar)) * min(max(src.dim - chunk * CHUNK, 0), CHUNK);
    const Scalar* from = tile + first_row * src.stride + (chunk_bytes > 0 ? chunk * CHUNK : 0);
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
      const int valid = row < rows ? min(max(src.dim - chunk * CHUNK, 0), CHUNK) : 0;
      cp_async_16<true>(smem + Tile::offset(row, chunk), valid > 0 ? tile + row * src.stride + chunk * CHUNK : src.base,
                        valid * int(sizeof(Scalar)));
    }
    return;
  }
  // Rows that are not 16-byte aligned: one word at a time, few registers rather than fast.
#pragma unroll 1
  for (int index = thread; index < ROWS * CHUNKS * 4; index += THREADS) {
    const int row = index / (CHUNKS * 4);
    const int column = index % (CHUNKS * 4) * (CHUNK / 4);
    const u32 word = row < rows && column < src.dim ? word_of_row(tile + row * src.stride, column, src.dim) : 0;
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(smem + Tile::offset(row, column / CHUNK) + column % CHUNK * int(sizeof(Scalar))), "r"(word)
                 : "memory");
  }
}

// The loads of one CTA. Load number h is K of tile h/2 when even, V when odd; always one commit group, empty past the end.
struct Loader {
  const SdpaParams& p;
  const u32 smem;
  const Work& work;
  const Source q;
  const CacheSource k, v;
  TileWalk<(BLOCK_MASK > 0)> walk;

  __device__ __forceinline__ Loader(const SdpaParams& params, u32 shared, const Work& w)
      : p(params),
        smem(shared),
        work(w),
        q(rows_of(p.q, p.q_stride, w.batch, w.head, first_query(w.bounds(p)), p.dim_qk)),
        k(cache_of<CacheSource>(p, p.k, p.k_stride, w, p.dim_qk)),
        v(cache_of<CacheSource>(p, static_cast<const Scalar*>(p.v) + w.value_first, p.v_stride, w,
                                VALUE_PARTS > 1 ? min(p.dim_v - w.value_first, VALUE_DIM) : p.dim_v)),
        walk(w) {}

  __device__ __forceinline__ void load_q() const { load_tile<QTile, BLOCK_M>(smem, q, work.m0, work.bounds(p).seq_q); }
  __device__ __forceinline__ void issue(int h) {
    const int tile = h / 2;
    if (tile < work.tiles) {
      const int slot = tile % STAGES;
      const int n0 = walk.tile(p, work, tile) * BLOCK_N;
      if (h % 2 == 0)
        load_tile<KTile, BLOCK_N>(smem + K_OFFSET + slot * KTile::BYTES, k, n0, work.bounds(p).seq_kv);
      else
        load_tile<VTile, BLOCK_N>(smem + V_OFFSET + slot * VTile::BYTES, v, n0, work.bounds(p).seq_kv);
    }
    cp_async_commit();
  }
};

}  // namespace
