// sdpa_fp8_stage_c - 8-bit inputs, tensor cores, and a toggle for every idea on the way
// from a plain kernel to a warp-specialised, persistent one.
//
// Codes are decoded to fp16 on the way into shared memory. What is stored there is the bare
// code value (u8: code - 128; e4m3: the number itself), exact in fp16; the per-head scales
// are folded into the softmax scale and into the output, in fp32.
//
// Four compute warps share a tile of BLOCK_M rows x BLOCK_N keys. A warp owns 16 rows and,
// where there are fewer than four groups of rows, a share of every tile's keys, with a
// running (m, l, O) of its own. Partial results meet once, at the end of a work item.
//
//   without warp specialisation      with warp specialisation
//   all warps: codes -> fp16 tile    producers: codes -> fp16 tile b, arrive FULL[b]
//   barrier, compute, barrier        compute warps: wait FULL[b], compute, arrive EMPTY[b]
//
// Toggles (0 or 1 unless said otherwise), set by the manifest:
//   USE_CP_ASYNC             codes travel through a ring of STAGES (2, 3) cp.async stages
//   USE_WMMA_PV              P.V on tensor cores instead of scalar arithmetic
//   USE_FUSED_SOFTMAX        scores stay in mma.sync registers, whose layout is documented
//   USE_WARP_SPECIALIZATION  NUM_PRODUCER_WARPS (1, 2) extra warps fetch and decode
//   USE_PERSISTENT_CTA       a CTA takes work items until none is left
//   USE_FAST_EXP             ex2.approx.ftz instead of exp2f
//   USE_KV_LUT               K and V are decoded through a 256-entry table
// and: E4M3, HEAD_DIM (multiple of 32), BLOCK_M, BLOCK_N, DYNAMIC_SMEM_BYTES.
#include <cuda_fp8.h>
#include <mma.h>

#include "barrier.cuh"
#include "copy.cuh"
#include "lse.cuh"
#include "mask.cuh"
#include "mma.cuh"
#include "softmax.cuh"

namespace wmma = nvcuda::wmma;

typedef unsigned char code_t;

constexpr int LANES = 32;
constexpr int FRAG = 16;
constexpr int COMPUTE_WARPS = 4;
constexpr int MAX_REGISTERS = 120;  // the budget, enforced by ptxas
constexpr int COMPUTE_THREADS = COMPUTE_WARPS * LANES;
constexpr int PRODUCER_THREADS = USE_WARP_SPECIALIZATION ? NUM_PRODUCER_WARPS * LANES : 0;
// Who fetches and decodes K and V: the producers, or everybody.
constexpr int LOADER_THREADS = USE_WARP_SPECIALIZATION ? PRODUCER_THREADS : COMPUTE_THREADS;

constexpr int ROW_GROUPS = BLOCK_M / FRAG;
constexpr int KEY_GROUPS = COMPUTE_WARPS / ROW_GROUPS;
constexpr int KEYS_PER_WARP = BLOCK_N / KEY_GROUPS;
constexpr bool WEIGHTS_IN_REGISTERS = USE_FUSED_SOFTMAX && USE_WMMA_PV;
static_assert(ROW_GROUPS * KEY_GROUPS == COMPUTE_WARPS, "16-row groups must divide the warps");
static_assert(KEYS_PER_WARP % FRAG == 0 && HEAD_DIM % 32 == 0, "whole tensor-core tiles");

// ------------------------------------------------------------------- shared-memory map

constexpr int PITCH = HEAD_DIM + 8;  // halves; 8 of padding against bank conflicts
constexpr int CODES_PER_CHUNK = 16;
constexpr int CHUNKS_PER_ROW = HEAD_DIM / CODES_PER_CHUNK;
constexpr int CHUNKS_PER_TILE = BLOCK_N * CHUNKS_PER_ROW;
constexpr int KV_BUFFERS = USE_WARP_SPECIALIZATION ? 2 : 1;

// A warp's strip holds in turn scores, row factors, weights and output tiles. (m, l) of a
// finished row use two columns to the right of the 16x16 output tile.
constexpr int STRIP_KEYS = WEIGHTS_IN_REGISTERS ? FRAG : KEYS_PER_WARP;
constexpr int STRIP_PITCH = STRIP_KEYS + 4;   // floats
constexpr int WEIGHT_PITCH = STRIP_KEYS + 8;  // halves
constexpr int M_COLUMN = FRAG;
constexpr int L_COLUMN = FRAG + 1;

constexpr int Q_BYTES = BLOCK_M * PITCH * 2;
constexpr int CODE_STAGE_BYTES = 2 * BLOCK_N * HEAD_DIM;
constexpr int CODE_BYTES = USE_CP_ASYNC ? STAGES * CODE_STAGE_BYTES : 0;
constexpr int KV_BYTES = BLOCK_N * PITCH * 2;
constexpr int STRIP_BYTES = FRAG * STRIP_PITCH * 4;
constexpr int LUT_BYTES = USE_KV_LUT ? 256 * 2 : 0;
constexpr int CODE_OFFSET = Q_BYTES;
constexpr int KV_OFFSET = CODE_OFFSET + CODE_BYTES;
constexpr int STRIP_OFFSET = KV_OFFSET + KV_BUFFERS * 2 * KV_BYTES;
constexpr int LUT_OFFSET = STRIP_OFFSET + COMPUTE_WARPS * STRIP_BYTES;
static_assert(LUT_OFFSET + LUT_BYTES == DYNAMIC_SMEM_BYTES, "the manifest's dynamic_smem is the size of this layout");

extern __shared__ __align__(128) unsigned char shared_memory[];

__device__ __forceinline__ __half* q_tile() { return reinterpret_cast<__half*>(shared_memory); }
__device__ __forceinline__ code_t* code_chunk(int stage, int chunk) {
  return shared_memory + CODE_OFFSET + stage * CODE_STAGE_BYTES + chunk * CODES_PER_CHUNK;
}
__device__ __forceinline__ __half* k_tile(int buffer) {
  return reinterpret_cast<__half*>(shared_memory + KV_OFFSET + buffer * 2 * KV_BYTES);
}
__device__ __forceinline__ __half* v_tile(int buffer) {
  return reinterpret_cast<__half*>(shared_memory + KV_OFFSET + (buffer * 2 + 1) * KV_BYTES);
}
__device__ __forceinline__ float* strip_of(int warp) {
  return reinterpret_cast<float*>(shared_memory + STRIP_OFFSET + warp * STRIP_BYTES);
}
__device__ __forceinline__ __half* weights_of(int warp) {
  return reinterpret_cast<__half*>(strip_of(warp));
}
__device__ __forceinline__ __half* lut() {
  return reinterpret_cast<__half*>(shared_memory + LUT_OFFSET);
}

// ------------------------------------------------------------------------------ barriers

enum Barrier { COMPUTE_BARRIER = 1, FULL_BARRIER = 2, EMPTY_BARRIER = 4 };

__device__ __forceinline__ void compute_barrier() {
  named_barrier_sync(COMPUTE_BARRIER, COMPUTE_THREADS);
}
constexpr int HANDSHAKE_THREADS = COMPUTE_THREADS + PRODUCER_THREADS;

// -------------------------------------------------------------------------------- codes

#if E4M3
constexpr u32 FOUR_ZERO_CODES = 0;
// What one unit of a stored value is worth, given the head's scale.
__device__ __forceinline__ float unit_of(float scale) { return scale; }
__device__ __forceinline__ u32 decode_pair(u32 codes, int pair) {
  const __half2_raw two =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes >> (16 * pair)), __NV_E4M3);
  return static_cast<u32>(two.x) | static_cast<u32>(two.y) << 16;
}
#else
constexpr u32 FOUR_ZERO_CODES = 0x80808080u;
__device__ __forceinline__ float unit_of(float scale) { return scale * (448.0f / 127.0f); }
__device__ __forceinline__ u32 decode_pair(u32 codes, int pair) {
  // The byte under an exponent of 2^10 is the half 1024 + code; taking 1152 off is exact.
  const u32 biased = __byte_perm(codes, 0x64646464u, pair == 0 ? 0x4140 : 0x4342);
  const __half2 value = __hsub2(*reinterpret_cast<const __half2*>(&biased),
                                __half2half2(__ushort_as_half(0x6480)));
  return *reinterpret_cast<const u32*>(&value);
}
#endif

__device__ __forceinline__ u32 look_up_pair(u32 codes, int pair) {
  const u32 low = codes >> (16 * pair) & 0xff;
  const u32 high = codes >> (16 * pair + 8) & 0xff;
  return static_cast<u32>(__half_as_ushort(lut()[low])) |
         static_cast<u32>(__half_as_ushort(lut()[high])) << 16;
}

__device__ __forceinline__ void fill_lut() {
  for (int code = threadIdx.x; code < 256; code += blockDim.x)
    lut()[code] = __ushort_as_half(static_cast<unsigned short>(decode_pair(code, 0)));
}

struct alignas(16) Chunk16 {
  u32 word[4];
};

// Sixteen codes from global memory; those past `valid` read as the code of zero.
__device__ __forceinline__ Chunk16 fetch_chunk(const code_t* source, int valid, bool aligned) {
  if (aligned && valid == CODES_PER_CHUNK) return *reinterpret_cast<const Chunk16*>(source);
  Chunk16 chunk;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    chunk.word[w] = FOUR_ZERO_CODES;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      if (4 * w + b < valid) {
        const u32 cleared = chunk.word[w] & ~(0xffu << (8 * b));
        chunk.word[w] = cleared | static_cast<u32>(source[4 * w + b]) << (8 * b);
      }
    }
  }
  return chunk;
}

template <bool BY_TABLE>
__device__ __forceinline__ void store_decoded(__half* destination, const Chunk16& chunk) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    u32 pair[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      pair[i] = BY_TABLE ? look_up_pair(chunk.word[2 * half + i / 2], i % 2)
                         : decode_pair(chunk.word[2 * half + i / 2], i % 2);
    reinterpret_cast<uint4*>(destination)[half] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
    // Sixteen look-ups in flight at once are more than the registers hold.
    if (BY_TABLE) asm volatile("" ::: "memory");
  }
}

__device__ __forceinline__ int valid_codes(int row, int col, int valid_rows, int dim) {
  return row < valid_rows ? min(max(dim - col, 0), CODES_PER_CHUNK) : 0;
}

// ---------------------------------------------------------------------------- work items

// One tile of query rows of one head.
struct Work {
  int batch;
  int head;
  int kv_head;
  int first_row;
  KeyRange tiles;
};

__device__ __forceinline__ int row_tiles(const SdpaParams& p) {
  return (p.seq_q + BLOCK_M - 1) / BLOCK_M;
}
__device__ __forceinline__ int work_items(const SdpaParams& p) {
  return row_tiles(p) * p.heads_q * p.batch;
}
__device__ __forceinline__ Work work_item(const SdpaParams& p, int index) {
  Work w;
  const int head_index = index / row_tiles(p);
  w.first_row = index % row_tiles(p) * BLOCK_M;
  w.head = head_index % p.heads_q;
  w.batch = head_index / p.heads_q;
  w.kv_head = kv_head_of(p, w.head);
  const int last_row = min(w.first_row + BLOCK_M, p.seq_q) - 1;
  w.tiles = visible_tiles(p, w.first_row, last_row, BLOCK_N);
  return w;
}

// A persistent CTA walks the items with the grid as its stride; otherwise there are as
// many CTAs as items and the loop turns once.
template <typename Body>
__device__ __forceinline__ void for_each_work_item(const SdpaParams& p, Body body) {
#if USE_PERSISTENT_CTA
  for (int index = blockIdx.x; index < work_items(p); index += gridDim.x) body(work_item(p, index));
#else
  body(work_item(p, blockIdx.x));
#endif
}

__device__ __forceinline__ float scale_of(const float* scales, int heads, int batch, int head) {
  return scales != nullptr ? scales[batch * heads + head] : 1.0f;
}

// ------------------------------------------------------------------ loading K and V tiles

// How many chunks of K and of V a loader thread works on at once. Where the loaders also hold
// the accumulator of a wide head, there are no registers for a second one.
constexpr int CHUNKS_IN_FLIGHT = USE_WARP_SPECIALIZATION || HEAD_DIM <= 64 ? 2 : 1;

// The loader of one work item. A thread copies and later decodes the same chunks, so what
// it needs to know about cp.async is only that its own copies are complete.
struct Loader {
  const code_t* k;
  const code_t* v;
  long long k_step;
  long long v_step;
  int seq_kv;
  int dim;
  int thread;
  bool aligned;

  __device__ __forceinline__ Loader(const SdpaParams& p, const Work& w, int loader_thread)
      : k(head_of(static_cast<const code_t*>(p.k), p.k_stride, w.batch, w.kv_head)),
        v(head_of(static_cast<const code_t*>(p.v), p.v_stride, w.batch, w.kv_head)),
        k_step(p.k_stride[2]),
        v_step(p.v_stride[2]),
        seq_kv(p.seq_kv),
        dim(p.dim_qk),
        thread(loader_thread),
        aligned(rows_are_16_byte_aligned(k, k_step) && rows_are_16_byte_aligned(v, v_step)) {}

  __device__ __forceinline__ bool asynchronous() const { return USE_CP_ASYNC && aligned; }

  // Visits this thread's chunks of a tile, the same of K and of V: (number, row, column).
  // UNROLL of them at a time are in flight.
  template <int UNROLL, typename Visit>
  __device__ __forceinline__ void each_chunk(Visit visit) const {
    constexpr int TURNS = (CHUNKS_PER_TILE + LOADER_THREADS - 1) / LOADER_THREADS;
    int first = thread;
    // Where loaders also compute, addresses are worked out anew for each tile: hidden behind
    // an opaque value, since kept in registers through the computation they make it spill.
    if (!USE_WARP_SPECIALIZATION) asm volatile("" : "+r"(first));
#pragma unroll UNROLL
    for (int turn = 0; turn < TURNS; ++turn) {
      const int chunk = first + turn * LOADER_THREADS;
      if (CHUNKS_PER_TILE % LOADER_THREADS == 0 || chunk < CHUNKS_PER_TILE)
        visit(chunk, chunk / CHUNKS_PER_ROW, chunk % CHUNKS_PER_ROW * CODES_PER_CHUNK);
    }
  }

  // Starts fetching a tile's codes. An empty group is committed where there is nothing to
  // fetch, so that counting groups works in every turn of the loop.
  __device__ __forceinline__ void issue(int tile, int end, int stage) const {
#if USE_CP_ASYNC
    if (asynchronous() && tile < end) {
      const int first_key = tile * BLOCK_N;
      each_chunk<CHUNKS_IN_FLIGHT>([&](int chunk, int row, int col) {
        const int valid = valid_codes(row, col, seq_kv - first_key, dim);
        // Where nothing is valid nothing is read, but the address must be a legal one.
        const int key = valid > 0 ? first_key + row : 0;
        const int first = valid > 0 ? col : 0;
        cp_async_16(shared_address(code_chunk(stage, chunk)), k + key * k_step + first, valid);
        cp_async_16(shared_address(code_chunk(stage, CHUNKS_PER_TILE + chunk)), v + key * v_step + first,
                    valid);
      });
    }
    cp_async_commit();
#endif
  }

  // Waits for the tile STAGES - 1 groups before the newest.
  __device__ __forceinline__ void wait_for_oldest() const {
#if USE_CP_ASYNC
    cp_async_wait<STAGES - 1>();
#endif
  }

  // Decodes a tile into an fp16 buffer, from the ring or straight from global memory.
  __device__ __forceinline__ void decode(int tile, int stage, int buffer) const {
    if (asynchronous()) {
      each_chunk<CHUNKS_IN_FLIGHT>([&](int chunk, int row, int col) {
        const Chunk16 k_codes = *reinterpret_cast<const Chunk16*>(code_chunk(stage, chunk));
        const Chunk16 v_codes =
            *reinterpret_cast<const Chunk16*>(code_chunk(stage, CHUNKS_PER_TILE + chunk));
        store_decoded<USE_KV_LUT != 0>(k_tile(buffer) + row * PITCH + col, k_codes);
        store_decoded<USE_KV_LUT != 0>(v_tile(buffer) + row * PITCH + col, v_codes);
      });
    } else {
      const int first_key = tile * BLOCK_N;
      each_chunk<1>([&](int, int row, int col) {
        const int valid = valid_codes(row, col, seq_kv - first_key, dim);
        const long long key = first_key + row;
        const int place = row * PITCH + col;
#pragma unroll 1
        for (int is_v = 0; is_v < 2; ++is_v) {
          const code_t* source = (is_v ? v : k) + key * (is_v ? v_step : k_step) + col;
          store_decoded<USE_KV_LUT != 0>((is_v ? v_tile(buffer) : k_tile(buffer)) + place,
                                         fetch_chunk(source, valid, aligned));
        }
      });
    }
  }
};

__device__ __forceinline__ void load_q(const SdpaParams& p, const Work& w) {
  const code_t* q = head_of(static_cast<const code_t*>(p.q), p.q_stride, w.batch, w.head);
  const bool aligned = rows_are_16_byte_aligned(q, p.q_stride[2]);
  for (int chunk = threadIdx.x; chunk < BLOCK_M * CHUNKS_PER_ROW; chunk += COMPUTE_THREADS) {
    const int row = chunk / CHUNKS_PER_ROW;
    const int col = chunk % CHUNKS_PER_ROW * CODES_PER_CHUNK;
    const int valid = valid_codes(row, col, p.seq_q - w.first_row, p.dim_qk);
    const code_t* source = q + (w.first_row + row) * p.q_stride[2] + col;
    store_decoded<false>(q_tile() + row * PITCH + col, fetch_chunk(source, valid, aligned));
  }
}

#include "fp8_compute.cuh"

// ------------------------------------------------------------------------------ the roles

// Compute warps without producers: load, decode and compute in turns.
__device__ __forceinline__ void load_and_compute(const SdpaParams& p) {
  for_each_work_item(p, [&](const Work& w) {
    const Loader loader(p, w, threadIdx.x);
    compute_barrier();  // the last item's Q, tiles and strips are no longer read
    load_q(p, w);
    for (int s = 0; s < STAGES - 1; ++s) loader.issue(w.tiles.begin + s, w.tiles.end, s);
    ComputeWarp compute(p, w);
    for (int tile = w.tiles.begin; tile < w.tiles.end; ++tile) {
      const int turn = tile - w.tiles.begin;
      // The stage of the tile before this one is free: this thread has decoded its part.
      loader.issue(tile + STAGES - 1, w.tiles.end, (turn + STAGES - 1) % STAGES);
      loader.wait_for_oldest();
      compute_barrier();  // nobody reads the fp16 tile any more
      loader.decode(tile, turn % STAGES, 0);
      compute_barrier();  // the fp16 tile is complete
      compute.tile(tile, 0);
    }
    compute.finish();
  });
}

__device__ __forceinline__ void produce(const SdpaParams& p) {
  int use = 0;  // fp16 tiles produced so far, over all work items
  for_each_work_item(p, [&](const Work& w) {
    const Loader loader(p, w, threadIdx.x - COMPUTE_THREADS);
    for (int s = 0; s < STAGES - 1; ++s) loader.issue(w.tiles.begin + s, w.tiles.end, s);
    for (int tile = w.tiles.begin; tile < w.tiles.end; ++tile, ++use) {
      const int turn = tile - w.tiles.begin;
      const int buffer = use % KV_BUFFERS;
      loader.issue(tile + STAGES - 1, w.tiles.end, (turn + STAGES - 1) % STAGES);
      loader.wait_for_oldest();
      named_barrier_sync(EMPTY_BARRIER + buffer, HANDSHAKE_THREADS);
      loader.decode(tile, turn % STAGES, buffer);
      named_barrier_arrive(FULL_BARRIER + buffer, HANDSHAKE_THREADS);
    }
  });
  // Every arrival is matched: take the last word of the compute warps on both buffers.
  for (int i = 0; i < KV_BUFFERS; ++i) named_barrier_sync(EMPTY_BARRIER + i, HANDSHAKE_THREADS);
}

__device__ __forceinline__ void consume(const SdpaParams& p) {
  int use = 0;
  for (int i = 0; i < KV_BUFFERS; ++i) named_barrier_arrive(EMPTY_BARRIER + i, HANDSHAKE_THREADS);
  for_each_work_item(p, [&](const Work& w) {
    compute_barrier();  // the last item's Q and strips are no longer read
    load_q(p, w);
    ComputeWarp compute(p, w);
    for (int tile = w.tiles.begin; tile < w.tiles.end; ++tile, ++use) {
      const int buffer = use % KV_BUFFERS;
      named_barrier_sync(FULL_BARRIER + buffer, HANDSHAKE_THREADS);  // and Q is complete
      compute.tile(tile, buffer);
      named_barrier_arrive(EMPTY_BARRIER + buffer, HANDSHAKE_THREADS);
    }
    compute.finish();
  });
}

extern "C" __global__ void __maxnreg__(MAX_REGISTERS)
    sdpa_fp8_stage_c(const __grid_constant__ SdpaParams p) {
#if USE_KV_LUT
  fill_lut();
  __syncthreads();
#endif
#if USE_WARP_SPECIALIZATION
  if (threadIdx.x < COMPUTE_THREADS)
    consume(p);
  else
    produce(p);
#else
  load_and_compute(p);
#endif
}
