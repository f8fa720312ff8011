// Named barriers of a CTA. A thread that only has to announce something arrives; one that needs the announcement synchronises.
// Both count. Barrier 0 is __syncthreads.
#pragma once
#include "dtype.cuh"

__device__ __forceinline__ void named_barrier_sync(u32 id, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(u32 id, u32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Synchronises whole warps, and says whether `mine` is true in all of their threads.
__device__ __forceinline__ bool named_barrier_all(u32 id, u32 threads, bool mine) {
  u32 all;
  asm volatile(
      "{ .reg .pred mine, all; setp.ne.u32 mine, %1, 0; bar.red.and.pred all, %2, %3, mine; selp.u32 %0, 1, 0, all; }"
      : "=r"(all)
      : "r"(u32(mine)), "r"(id), "r"(threads)
      : "memory");
  return __any_sync(~0u, all);  // so that ptxas knows it is the same in a warp
}
