// flash_decode: few queries against long caches, at the speed of the memory (sm_80 and later: cp.async, ldmatrix, mma.sync).
//
// Query heads of one key head and query positions are packed into Q tiles of 16·WARPS_M rows (work.cuh). The KV tiles of all Q tiles of
// all sequences are laid end to end and cut into equal shares, one for each CTA (work.cuh): no length leaves an SM idle, and no host
// knows lengths. Q tiles of one length go whole to CTAs in turns, where there are enough of them. The WARPS_M warps of a team own a ring
// of STAGES KV tiles (layout.cuh), filled row by row, so that pages cost address arithmetic alone (loader.cuh). Teams share nothing while
// tiles go by (mainloop.cuh). At the end of a Q tile, or of a CTA's share of it, their parts meet in shared memory; parts of several CTAs
// meet in the workspace, where the last CTA to arrive adds them up in their order, or in the shared memory of a cluster (merge.cuh). Loads
// of the next Q tile are under way meanwhile.
// Of the few microseconds that short caches take, half are not the memory's: what needs no input is done before the inputs are awaited.
#include "score.cuh"

using ScoreHook = ScoreModifiers<SOFTCAP, ALIBI, BIAS, BOOLEAN_MASK, SINKS>;

#include "merge.cuh"
#include "unowned.cuh"

// Lengths and pages are read before it is known where keys and queries lie.
constexpr bool COUNTS_FIRST = OWN_LENGTHS || PAGED_CACHE;

// The inputs may be another kernel's outputs, lengths among them, and the workspace is its too.
__device__ __forceinline__ void await_inputs() {
#if __CUDA_ARCH__ >= 900
  grid_wait();
#endif
}

__device__ __forceinline__ u32 cta_number() { return blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z); }

// Lengths and pages come to L2 before the inputs are awaited: what the kernel before still writes of them, it writes there. Every thread
// of the grid asks for a line of the page table.
__device__ __forceinline__ void prefetch_lists(const SdpaParams& p) {
#if __CUDA_ARCH__ >= 900
  const auto prefetch = [](const int* list, long long first, long long count) {
    if (list && first < count) asm volatile("prefetch.global.L2 [%0];" ::"l"(list + first));
  };
  constexpr int LINE = 32;  // numbers
  const u32 thread = cta_number() * THREADS + threadIdx.x;
  if (PAGED_CACHE)
    prefetch(p.page_table, (long long)thread * LINE, (p.cache_rows - 1) * p.page_table_stride + (p.seq_kv + p.page_size - 1) / u32(p.page_size));
  if (USED_LENGTHS) prefetch(p.seqused_kv, threadIdx.x * LINE, p.batch);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM) flash_decode(const __grid_constant__ SdpaParams p) {
  extern __shared__ __align__(128) unsigned char smem[];
#if __CUDA_ARCH__ >= 900
  grid_launch_dependents();  // the next kernel's CTAs come as these go
#endif
  Division division(p);
  prefetch_lists(p);
  if (COUNTS_FIRST) await_inputs();
  division.count(p);
  Cursor now(p, division);
  if (CLUSTERED && now.valid()) Exchange(shared_address(smem)).open();
  Queries queries;
  if (!COUNTS_FIRST && now.valid()) queries.find(p, now);
  Loader loader(p, smem, division, now);
  if (!COUNTS_FIRST) {
    await_inputs();
    if (now.valid()) queries.fetch(p, now);
  }
  if (COUNTS_FIRST && now.valid()) queries.load(p, now);  // ahead of keys, behind which they would be long in coming
  loader.fill();
  if (PACKED_QUERIES || USED_QUERIES)  // while the loads travel
    clear_unowned_rows(p, cta_number() * (THREADS / 32) + threadIdx.x / 32, gridDim.x * gridDim.y * gridDim.z * (THREADS / 32));
  if constexpr (CLUSTERED) {
    // A cluster has one Q tile.
    if (!now.valid()) return;
    Part part(p, smem, now, queries);
    const int stage = part.run(loader, now);
    finish_segment(p, smem, division, now, part, stage);
    return;
  }
  const ParkedCursor parked(shared_address(smem), 1);
  while (now.valid()) {
    Part part(p, smem, now, queries);
    parked.put(now);
    const int stage = part.run(loader, now);
    Cursor done;
    parked.take(done);
    now = done;
    now.next(p, division);
    // The next queries are asked for under the merge, where registers are left for them beside O.
    if (!Q_IN_SMEM && now.valid()) queries.load(p, now);
    finish_segment(p, smem, division, done, part, stage);
    if (Q_IN_SMEM && now.valid()) queries.load(p, now);
  }
}
