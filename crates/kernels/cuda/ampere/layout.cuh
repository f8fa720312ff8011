// ampere_fwd, ampere_f32: how a tile is divided among warps, and what lies where in shared memory. `Scalar` is what tensors are made of.
//
//   | Q (later O) | K × STAGES | V × STAGES |, later the statistics and partial rows of the merge
//
// O of more than 256 columns finds no registers in one CTA: VALUE_PARTS CTAs have VALUE_DIM of them each, and each computes all scores.
#pragma once
#include "dtype.cuh"

namespace {

constexpr int THREADS = 32 * WARPS_M * WARPS_N;
constexpr int CHUNK = 16 / sizeof(Scalar);         // elements of 16 bytes
constexpr int M_TILES = BLOCK_M / (16 * WARPS_M);  // 16-row tiles of one warp
constexpr int WARP_KEYS = BLOCK_N / WARPS_N;       // keys of a tile that one warp sees
constexpr int N_TILES = WARP_KEYS / 8;
constexpr int K_STEPS = HEAD_DIM / (2 * CHUNK);    // an MMA takes two chunks of a row
constexpr int O_TILES = VALUE_DIM / 8;
// Whether the accumulators of O and of the scores leave none for addresses that are worth keeping over the loop.
constexpr bool REGISTERS_ARE_FULL = M_TILES * 4 * (O_TILES + N_TILES) > 160;
static_assert(BLOCK_M % (16 * WARPS_M) == 0 && WARP_KEYS % 16 == 0, "tiles must divide evenly");
static_assert(HEAD_DIM % 16 == 0 && VALUE_DIM % 16 == 0, "head dimensions are padded to 16");

// A tile of ROWS × DIM elements, cut into panels at most 128 bytes wide whose 16-byte chunks are
// XOR-swizzled so that eight consecutive rows of one chunk column fall into different banks.
template <int ROWS, int DIM>
struct SmemTile {
  static constexpr int CHUNKS = DIM / CHUNK;
  static constexpr int PANEL_CHUNKS = CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : 2;
  static constexpr int ROWS_PER_LINE = 8 / PANEL_CHUNKS;
  static constexpr int BYTES = ROWS * DIM * sizeof(Scalar);
  static __device__ __forceinline__ u32 offset(int row, int chunk) {
    const int panel = chunk / PANEL_CHUNKS;
    const int inside = (chunk % PANEL_CHUNKS) ^ ((row / ROWS_PER_LINE) % PANEL_CHUNKS);
    return (panel * ROWS + row) * (PANEL_CHUNKS * 16) + inside * 16;
  }
  // From a lane's address in step 0 and rows 0 to 15 to the same lane's address in another step and block of
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

// Where Q and a tile of K lie in shared memory, and a warp's first row of each.
struct TilesAt {
  u32 q, k;
  int row, key;
};

constexpr int Q_BYTES = QTile::BYTES > OTile::BYTES ? QTile::BYTES : OTile::BYTES;
constexpr int K_OFFSET = Q_BYTES;
constexpr int V_OFFSET = K_OFFSET + STAGES * KTile::BYTES;
constexpr int LOOP_BYTES = V_OFFSET + STAGES * VTile::BYTES;
// Later, where WARPS_N warps share the rows: [WARPS_N][BLOCK_M] maxima, then sums, then partial rows of O.
constexpr int MERGE_PITCH = VALUE_DIM + 4;  // floats
constexpr int MERGE_BYTES = WARPS_N > 1 ? 4 * WARPS_N * BLOCK_M * (2 + MERGE_PITCH) : 0;
constexpr int LAYOUT_BYTES = LOOP_BYTES > MERGE_BYTES ? LOOP_BYTES : MERGE_BYTES;
static_assert(LAYOUT_BYTES == DYNAMIC_SMEM_BYTES, "the manifest's dynamic_smem is the size of this layout");

}  // namespace
