// TMA (sm_90): 4-D tiles (head dimension, sequence, head, batch), 128-byte swizzle.
// Coordinates past a dimension's end read as zero and are not written, so tails need no code here.
#pragma once
#include "mbarrier.cuh"

// Opaque, laid out by the driver (cuTensorMapEncodeTiled).
struct alignas(64) TensorMap {
  u64 opaque[16];
};

// 64 elements of 16 bits: the width of one 128-byte-swizzled panel.
constexpr int PANEL = 64;

constexpr u64 L2_EVICT_FIRST = 0x12F0000000000000ull;
constexpr u64 L2_EVICT_LAST = 0x14F0000000000000ull;

__device__ __forceinline__ void tma_prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void tma_load(u32 smem, const TensorMap* map, u32 barrier, int d, int s, int h, int b) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5,%6}], [%2];" ::"r"(smem),
      "l"(map), "r"(barrier), "r"(d), "r"(s), "r"(h), "r"(b)
      : "memory");
}

__device__ __forceinline__ void tma_load(u32 smem, const TensorMap* map, u32 barrier, int d, int s, int h, int b,
                                         u64 l2_hint) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3,%4,%5,%6}], [%2], %7;" ::"r"(smem),
      "l"(map), "r"(barrier), "r"(d), "r"(s), "r"(h), "r"(b), "l"(l2_hint)
      : "memory");
}

__device__ __forceinline__ void tma_store(const TensorMap* map, u32 smem, int d, int s, int h, int b) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2,%3,%4,%5}], [%1];" ::"l"(map), "r"(smem),
               "r"(d), "r"(s), "r"(h), "r"(b)
               : "memory");
}

__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until what the committed stores write is there.
__device__ __forceinline__ void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Waits until the committed stores have read their shared memory.
__device__ __forceinline__ void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Byte offset of 16-byte chunk `chunk` (0..7) of `row` inside a swizzled panel (1024-byte aligned).
__device__ __forceinline__ u32 panel_offset(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

// One lane of a warp all of whose lanes come here. Unlike a comparison with the lane's number, ptxas knows that it is one, and issues its
// TMA work without a loop over lanes.
__device__ __forceinline__ bool elect_lane() {
  u32 elected;
  asm volatile(
      "{\n.reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(elected));
  return elected != 0;
}
