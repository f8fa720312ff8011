// The Q tiles of packed sequences: as many as only the device knows.
#pragma once
#include "sequence.cuh"

// Where a Q tile lies: its number in its head, the head, the sequence.
struct TilePlace {
  int m_block, head, batch;
};

// The Q tile of this number among those of all sequences, each of ROWS queries: sequence by sequence, head by head, the last of a head
// first. False: there are only `tiles` of them. All lanes of a warp search together, 32 sequences at a time.
template <int ROWS>
__device__ __forceinline__ bool find_tile(const SdpaParams& p, int heads, int number, TilePlace& place, int& tiles) {
  const int lane = threadIdx.x % 32;
  tiles = 0;
  for (int first = 0; first < p.batch; first += 32) {
    const int blocks = first + lane < p.batch ? (tokens_q(p, first + lane).count + ROWS - 1) / ROWS : 0;
    int up_to_here = blocks;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const int before = __shfl_up_sync(~0u, up_to_here, lanes);
      if (lane >= lanes) up_to_here += before;
    }
    const u32 behind = __ballot_sync(~0u, number < tiles + up_to_here * heads);
    if (behind) {
      const int found = __ffs(behind) - 1;
      const int here = __shfl_sync(~0u, blocks, found);
      const int inside = number - tiles - (__shfl_sync(~0u, up_to_here, found) - here) * heads;
      place = {here - 1 - inside % here, inside / here, first + found};
      return true;
    }
    tiles += __shfl_sync(~0u, up_to_here, 31) * heads;
  }
  return false;
}
