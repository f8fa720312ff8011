// flash_decode: how a KV tile is divided among warps, and what lies where in shared memory.
//
//   | (K, V, scales) × STAGES × WARPS_N teams | statistics × WARPS_N | flag | received | cursors × warps | pages × warps | Q of wide heads |
//
// A team's O meets those of the others in the stage that the team read last, which nobody fills meanwhile (merge.cuh).
#pragma once
#include "dtype.cuh"
#include "params.h"

namespace {

// Codes of K and V: none (they are elements of Q's type), e4m3, u8 around 128, i8.
constexpr bool CODES = KV_CODES > 0;
constexpr bool E4M3 = KV_CODES == 1;
constexpr int KV_BYTES = CODES ? 1 : 2;

constexpr int TEAM = 32 * WARPS_M;  // threads that share a ring
constexpr int THREADS = TEAM * WARPS_N;
constexpr int ROWS = 16 * WARPS_M;  // of a Q tile
constexpr int BLOCK_N = WARP_KEYS * WARPS_N;
constexpr int K_STEPS = HEAD_DIM / 16;
static_assert(WARP_KEYS % 16 == 0 && WARP_KEYS <= 32, "a lane looks up one key's page");
static_assert(HEAD_DIM % (CODES ? 32 : 16) == 0 && VALUE_DIM % 32 == 0, "head dimensions are padded");

// WARP_KEYS rows of CHUNKS 16-byte chunks, cut into panels at most 128 bytes wide whose chunks are XOR-swizzled so that eight
// consecutive rows of one chunk column fall into different banks.
template <int CHUNKS_>
struct RingTile {
  static constexpr int CHUNKS = CHUNKS_;
  static constexpr int PANEL_CHUNKS = CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : 2;
  static constexpr int ROWS_PER_LINE = 8 / PANEL_CHUNKS;
  static constexpr int BYTES = WARP_KEYS * CHUNKS * 16;
  static __device__ __forceinline__ u32 offset(int row, int chunk) {
    const int inside = (chunk % PANEL_CHUNKS) ^ ((row / ROWS_PER_LINE) % PANEL_CHUNKS);
    return (chunk / PANEL_CHUNKS * WARP_KEYS + row) * (PANEL_CHUNKS * 16) + inside * 16;
  }
  // From an address in one of the first `rows` rows, a power of two, to the same chunk a multiple of `rows` below it.
  static __device__ __forceinline__ u32 below(u32 address, int rows) {
    return (address ^ ((rows / ROWS_PER_LINE % PANEL_CHUNKS) << 4)) + rows * (PANEL_CHUNKS * 16);
  }
  // From a lane's address in the first pair of chunks and the first 16 rows to another pair and other rows.
  static __device__ __forceinline__ u32 advance(u32 address, int pair, int block16) {
    return (address ^ ((2 * pair % PANEL_CHUNKS) << 4)) + (2 * pair / PANEL_CHUNKS) * (WARP_KEYS * PANEL_CHUNKS * 16) +
           block16 * (16 * PANEL_CHUNKS * 16);
  }
};
using KTile = RingTile<HEAD_DIM * KV_BYTES / 16>;
using VTile = RingTile<VALUE_DIM * KV_BYTES / 16>;

constexpr int SCALES_OFFSET = KTile::BYTES + VTile::BYTES;  // of K, then of V, where tokens have their own
constexpr int MERGE_LEAST_BYTES = ROWS * (CLUSTERED ? VALUE_DIM : 16) * 4;  // clusters merge all columns at once
constexpr int TILE_BYTES = SCALES_OFFSET + (TOKEN_SCALES ? 8 * WARP_KEYS : 0);
constexpr int STAGE_BYTES = TILE_BYTES > MERGE_LEAST_BYTES ? TILE_BYTES : MERGE_LEAST_BYTES;
constexpr int RING_BYTES = STAGES * STAGE_BYTES;
constexpr int STATISTICS_OFFSET = WARPS_N * RING_BYTES;
constexpr int FLAG_OFFSET = STATISTICS_OFFSET + WARPS_N * ROWS * 8;
// What the CTAs of a cluster send one of them: their parts of its rows, then a maximum and a sum for each, counted on a barrier.
constexpr int RECEIVED_BARRIER_OFFSET = FLAG_OFFSET + 8;
constexpr int RECEIVED_OFFSET = FLAG_OFFSET + 16;
constexpr int RECEIVED_STATISTICS_OFFSET = RECEIVED_OFFSET + ROWS * VALUE_DIM * 4;
constexpr int RECEIVED_BYTES = CLUSTERED ? ROWS * (VALUE_DIM * 4 + 8) : 0;
// Cursors of every warp, which wait here while tiles go by: registers are for O.
constexpr int CURSOR_BYTES = 96, CURSORS = PAGED_CACHE ? 3 : 2;
// A page of every key of a warp's ring.
constexpr int PAGES_BYTES = PAGED_CACHE ? STAGES * WARP_KEYS * 4 : 0;
// Q of wide heads finds no registers beside O: a fragment lies as its lanes hold it.
constexpr bool Q_IN_SMEM = HEAD_DIM > 128;
constexpr int CURSORS_OFFSET = RECEIVED_OFFSET + RECEIVED_BYTES;
constexpr int PAGES_OFFSET = CURSORS_OFFSET + THREADS / 32 * CURSORS * CURSOR_BYTES;
constexpr int Q_OFFSET = PAGES_OFFSET + THREADS / 32 * PAGES_BYTES;
constexpr int LAYOUT_BYTES = Q_OFFSET + (Q_IN_SMEM ? WARPS_M * K_STEPS * 512 : 0);
static_assert(LAYOUT_BYTES == DYNAMIC_SMEM_BYTES, "the manifest's dynamic_smem is the size of this layout");

}  // namespace
