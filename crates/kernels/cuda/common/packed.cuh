// The Q tiles of packed sequences: as many as only the device knows.
#pragma once
#include "sequence.cuh"

// Where a Q tile lies: its number in its head, the head, the sequence.
struct TilePlace {
  int m_block, head, batch;
};

// The Q tiles of all sequences, each of ROWS queries, counted through sequence by sequence. The lanes of a warp look at 32 sequences at a
// time, one each, and keep what they have seen: whoever asks for growing numbers has every sequence read once.
template <int ROWS>
struct PackedTiles {
  int first = -32;          // sequence of lane 0
  int tiles = 0;            // of all sequences before these
  int blocks, up_to_here;   // Q tiles of one head: of this lane's sequence, and with those of the lanes before it
  int keys;                 // of this lane's sequence
  int tiles_here = 0;       // of the 32 sequences

  // The sequence of the Q tile of this number: what comes back is its lane, or -1 where there are only `tiles` Q tiles.
  __device__ __forceinline__ int find(const SdpaParams& p, int heads, int number) {
    while (number >= tiles + tiles_here) {
      tiles += tiles_here;
      tiles_here = 0;
      first += 32;
      if (first >= p.batch) return -1;
      read(p, heads);
    }
    return __ffs(__ballot_sync(~0u, number < tiles + up_to_here * heads)) - 1;
  }
  // The number of a Q tile within its sequence.
  __device__ __forceinline__ int inside(int heads, int number, int lane) const {
    return number - tiles - __shfl_sync(~0u, up_to_here - blocks, lane) * heads;
  }
  __device__ __forceinline__ int blocks_of(int lane) const { return __shfl_sync(~0u, blocks, lane); }
  __device__ __forceinline__ int keys_of(int lane) const { return __shfl_sync(~0u, keys, lane); }

 private:
  __device__ __forceinline__ void read(const SdpaParams& p, int heads) {
    const int lane = threadIdx.x % 32, sequence = first + lane;
    blocks = keys = 0;
    if (sequence < p.batch) {
      blocks = (tokens_q(p, sequence).count + ROWS - 1) / ROWS;
      keys = tokens_kv(p, sequence).count;
    }
    up_to_here = blocks;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const int before = __shfl_up_sync(~0u, up_to_here, lanes);
      if (lane >= lanes) up_to_here += before;
    }
    tiles_here = __shfl_sync(~0u, up_to_here, 31) * heads;
  }
};

// The place of a Q tile: head by head, the last of a head first. False: there are only `tiles` of them.
template <int ROWS>
__device__ __forceinline__ bool find_tile(const SdpaParams& p, int heads, int number, TilePlace& place, int& tiles) {
  PackedTiles<ROWS> list;
  const int lane = list.find(p, heads, number);
  tiles = list.tiles;
  if (lane < 0) return false;
  const int here = list.blocks_of(lane), inside = list.inside(heads, number, lane);
  place = {here - 1 - inside % here, inside / here, list.first + lane};
  return true;
}
