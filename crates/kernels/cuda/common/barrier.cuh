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
