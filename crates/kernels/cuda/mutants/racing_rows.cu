// racing_rows - every warp computes the same rows, and all update one (m, l) per row.
//
// The running maximum, sum and output of a row are in shared memory, as in sdpa_v2b. There
// each row has one owner. Here each of the four warps walks over all rows and adds the same
// tile to them. In lock step, or strictly one after the other, O even comes out right (sum
// and output are inflated alike); anything between tears a row's (m, l) apart from its O.
//
// MISTAKE = 0 gives each warp rows of its own.
#include "owned_row.cuh"

constexpr int WARPS = 4;
constexpr int ROWS = 16;
constexpr int ROWS_PER_WARP = MISTAKE ? ROWS : ROWS / WARPS;
constexpr int THREADS = WARPS * LANES;

struct SharedRow {
  float m;
  float l;
  float o[HEAD_DIM];
};

__device__ __forceinline__ OwnedRow read_row(const SharedRow& shared, int lane) {
  OwnedRow row;
  row.m = shared.m;
  row.l = shared.l;
  for (int c = 0; c < COLUMNS_PER_LANE; ++c) row.o[c] = shared.o[lane + c * LANES];
  return row;
}

__device__ __forceinline__ void write_row(SharedRow& shared, const OwnedRow& row, int lane) {
  if (lane == 0) {
    shared.m = row.m;
    shared.l = row.l;
  }
  for (int c = 0; c < COLUMNS_PER_LANE; ++c) shared.o[lane + c * LANES] = row.o[c];
}

extern "C" __global__ void __launch_bounds__(THREADS)
    racing_rows(const __grid_constant__ SdpaParams p) {
  __shared__ __align__(16) element k_tile[TILE_ELEMENTS];
  __shared__ __align__(16) element v_tile[TILE_ELEMENTS];
  __shared__ SharedRow rows[ROWS];
  const Head head(p);
  const int lane = threadIdx.x % LANES;
  const int warp = threadIdx.x / LANES;
  const int first_row = blockIdx.x * ROWS;
  const int begin = MISTAKE ? 0 : warp * ROWS_PER_WARP;
  const int end = min(begin + ROWS_PER_WARP, p.seq_q - first_row);
  const KeyRange tiles = tiles_of_rows(p, first_row, ROWS);

  if (warp == 0)
    for (int r = 0; r < ROWS; ++r) write_row(rows[r], OwnedRow(), lane);
  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    copy_kv<THREADS>(p, head, tile, k_tile, v_tile, threadIdx.x);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    for (int r = begin; r < end; ++r) {
      OwnedRow row = read_row(rows[r], lane);
      row.attend(p, head, first_row + r, tile, k_tile, v_tile, lane);
      __syncwarp();  // all lanes have read the old (m, l)
      write_row(rows[r], row, lane);
    }
    __syncthreads();
  }
  __syncthreads();  // a CTA without visible keys has not passed a barrier yet
  for (int r = warp; r < ROWS && first_row + r < p.seq_q; r += WARPS)
    read_row(rows[r], lane).store(p, head, first_row + r, lane);
}
