// narrow_cp_async - tiles are copied 8 bytes at a time with cp.async.cg.
//
// `.cg` (cache in L2 only) exists for 16 bytes alone; copies of 4 and 8 bytes must use
// `.ca`. The PTX is well formed, so the front end lets it through; ptxas refuses it.
//
// MISTAKE = 0 copies 16 bytes at a time.
#include "owned_row.cuh"

constexpr int WARPS = 4;
constexpr int THREADS = WARPS * LANES;
constexpr int COPY_BYTES = MISTAKE ? 8 : 16;
constexpr int COPY_ELEMENTS = COPY_BYTES / 2;

__device__ __forceinline__ void cp_async_piece(void* destination, const void* source, int valid_bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(destination)),
               "l"(source), "n"(COPY_BYTES), "r"(valid_bytes)
               : "memory");
}

__device__ __forceinline__ void copy_tile_in_pieces(element* tile, const element* source,
                                                    long long row_stride, int valid_rows, int dim) {
  constexpr int PIECES_PER_ROW = HEAD_DIM / COPY_ELEMENTS;
  for (int piece = threadIdx.x; piece < TILE_KEYS * PIECES_PER_ROW; piece += THREADS) {
    const int row = piece / PIECES_PER_ROW;
    const int col = piece % PIECES_PER_ROW * COPY_ELEMENTS;
    const int valid = row < valid_rows ? min(max(dim - col, 0), COPY_ELEMENTS) : 0;
    const element* from = valid > 0 ? source + row * row_stride + col : source;
    cp_async_piece(tile + row * PITCH + col, from, valid * 2);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    narrow_cp_async(const __grid_constant__ SdpaParams p) {
  __shared__ __align__(16) element k_tile[TILE_ELEMENTS];
  __shared__ __align__(16) element v_tile[TILE_ELEMENTS];
  const Head head(p);
  const int lane = threadIdx.x % LANES;
  const int own_row = blockIdx.x * WARPS + threadIdx.x / LANES;
  const KeyRange tiles = tiles_of_rows(p, blockIdx.x * WARPS, WARPS);

  OwnedRow row;
  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    const int first_key = tile * TILE_KEYS;
    const int valid_keys = min(TILE_KEYS, p.seq_kv - first_key);
    if (head.kv_aligned(p)) {
      copy_tile_in_pieces(k_tile, head.k + first_key * p.k_stride[2], p.k_stride[2], valid_keys, p.dim_qk);
      copy_tile_in_pieces(v_tile, head.v + first_key * p.v_stride[2], p.v_stride[2], valid_keys, p.dim_v);
    } else {
      copy_kv<THREADS>(p, head, tile, k_tile, v_tile, threadIdx.x);
    }
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    if (own_row < p.seq_q) row.attend(p, head, own_row, tile, k_tile, v_tile, lane);
    __syncthreads();
  }
  if (own_row < p.seq_q) row.store(p, head, own_row, lane);
}
