// hopper_small: how a Q tile and its keys are split, and what lies where in shared memory.
//
// The keys of one Q tile are split over the WG_N warpgroups of a CTA and the CLUSTER CTAs of a cluster (PARTS in all). Every
// warpgroup owns a ring of STAGES KV tiles.
//
//   rows:    64·WG_M, made of PACK_HEADS query heads (of one key head) × 64·WG_M / PACK_HEADS positions
//   columns: of VALUE_DIM, warpgroup n collects [n·WG_COLUMNS, …), of which the CTA of rank r finishes [r·SLICE, …)
//   smem:    | Q | (K tile, V tile) × STAGES, later messages, × WG_N | columns, statistics of the cluster | mbarriers |
#pragma once
#include "mask.cuh"
#include "tma.cuh"

namespace {

constexpr int THREADS = 128 * WG_M * WG_N;
constexpr int ROWS = 64 * WG_M;
constexpr int POSITIONS = ROWS / PACK_HEADS;  // query positions of one Q tile
constexpr int PARTS = CLUSTER * WG_N;
constexpr int WG_COLUMNS = VALUE_DIM / WG_N;  // columns collected by one warpgroup of a CTA
constexpr int SLICE = WG_COLUMNS / CLUSTER;   // columns finished by one warpgroup
constexpr int QK_PANELS = (HEAD_DIM + PANEL - 1) / PANEL;
constexpr int V_PANELS = (VALUE_DIM + PANEL - 1) / PANEL;
constexpr int Q_PANEL_BYTES = ROWS * 128;
constexpr int KV_PANEL_BYTES = BLOCK_N * 128;
constexpr int K_BYTES = QK_PANELS * KV_PANEL_BYTES;
constexpr int V_BYTES = V_PANELS * KV_PANEL_BYTES;

constexpr int KV_OFFSET = QK_PANELS * Q_PANEL_BYTES;
// What one warpgroup sends to another: per thread one float4 for every eight columns, then its (m, l) for two rows.
constexpr int WG_MESSAGE_BYTES = 128 * (WG_COLUMNS / 8 + 1) * 16;
constexpr int CTA_MESSAGE_BYTES = 128 * (SLICE / 8) * 16;
// Messages inside the CTA lie in the sender's ring, which it has finished reading: [sender's ring][wg_m][receiver].
constexpr int RING_BYTES = STAGES * (K_BYTES + V_BYTES);
static_assert(WG_M * (WG_N - 1) * WG_MESSAGE_BYTES <= RING_BYTES, "messages fit the ring");
constexpr int ARRIVALS_OFFSET = KV_OFFSET + WG_N * RING_BYTES;  // [warpgroup][sender's rank]
constexpr int STATISTICS_OFFSET = ARRIVALS_OFFSET + WG_M * WG_N * (CLUSTER - 1) * CTA_MESSAGE_BYTES;  // [rank][wg_n][row]
constexpr int STATISTICS_BYTES = CLUSTER > 1 ? PARTS * ROWS * 8 : 0;
constexpr int BARRIER_OFFSET = STATISTICS_OFFSET + STATISTICS_BYTES;
// barriers: Q, columns and statistics from the cluster, one spare, then (K, V) per key warpgroup and stage
constexpr int SMEM_END = BARRIER_OFFSET + 16 * (2 + WG_N * STAGES);
static_assert(SMEM_END == LAYOUT_BYTES, "the manifest's LAYOUT_BYTES is the size of this layout; dynamic_smem follows from it");
static_assert(SLICE % 8 == 0 && HEAD_DIM % 16 == 0 && BLOCK_N % 16 == 0 && BLOCK_N <= 256, "tile shapes");
static_assert(ROWS % PACK_HEADS == 0 && POSITIONS <= 256, "head packing");

// Straight code: where two sets of scores fit the registers beside P and O any number of tiles that fits the ring, otherwise one.
constexpr bool TWO_SETS = THREADS * CTAS_PER_SM <= 256 && 5 * BLOCK_N / 4 + VALUE_DIM / 2 <= 200;
constexpr int STRAIGHT_MAX = TWO_SETS ? STAGES : 1;
constexpr int KNOWN_TILES = OWN_TILES <= STRAIGHT_MAX ? OWN_TILES : 0;
constexpr int FEW_TILES = STRAIGHT_MAX > 1 ? 2 : 1;  // worked on by the same code, the missing ones as hidden ones
static_assert(LOOP || FEW_TILES == 2, "two tiles at once");

}  // namespace
