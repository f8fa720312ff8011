// What the mutants about WMMA fragments share: the scores of 16 rows and a tile of 32 keys, by
// one warp.
#pragma once

#include <mma.h>

#include "owned_row.cuh"

namespace wmma = nvcuda::wmma;

constexpr int FRAG = 16;
constexpr int ROWS = FRAG;  // one warp, one WMMA tile of rows
constexpr int SCORE_PITCH = TILE_KEYS + 4;

// scores[16][32] = Q x K^T for one KV tile
__device__ __forceinline__ void score_tile(const element* q_tile, const element* k_tile, float* scores) {
  for (int key = 0; key < TILE_KEYS; key += FRAG) {
    wmma::fragment<wmma::accumulator, FRAG, FRAG, FRAG, float> sum;
    wmma::fill_fragment(sum, 0.0f);
    for (int dim = 0; dim < HEAD_DIM; dim += FRAG) {
      wmma::fragment<wmma::matrix_a, FRAG, FRAG, FRAG, element, wmma::row_major> q;
      wmma::fragment<wmma::matrix_b, FRAG, FRAG, FRAG, element, wmma::col_major> k;
      wmma::load_matrix_sync(q, q_tile + dim, PITCH);
      wmma::load_matrix_sync(k, k_tile + key * PITCH + dim, PITCH);
      wmma::mma_sync(sum, q, k, sum);
    }
    wmma::store_matrix_sync(scores + key, sum, SCORE_PITCH, wmma::mem_row_major);
  }
}

// The warp's rows of Q, zero where there is nothing; filled by `step` threads, of which this
// is number `first`.
__device__ __forceinline__ void fill_q(const SdpaParams& p, const Head& head, int first_row,
                                       element* q_tile, int first, int step) {
  for (int i = first; i < ROWS * HEAD_DIM; i += step) {
    const int row = i / HEAD_DIM, col = i % HEAD_DIM;
    const bool exists = first_row + row < p.seq_q && col < p.dim_qk;
    q_tile[row * PITCH + col] =
        exists ? head.q[(first_row + row) * p.q_stride[2] + col] : from_float<element>(0.0f);
  }
}
