// Captures what sm_90a instructions do: wgmma, tensor copies, mbarriers, clusters. Writes hopper.txt (facts) and hopper.bin
// (outputs, addressed by offset and length from hopper.txt).
//   nvcc -gencode=arch=compute_90a,code=sm_90a -o hopper hopper.cu && ./hopper OUT_DIR
#include <cuda.h>
#include <cuda_runtime.h>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

constexpr int IMAGE_BYTES = 48 * 1024;

extern __shared__ __align__(1024) unsigned char smem[];

// Copies an image into shared memory, 1024-byte aligned, and makes it visible to the tensor cores.
__device__ __forceinline__ unsigned load_image(const unsigned* image) {
  unsigned* words = reinterpret_cast<unsigned*>(smem);
  for (int i = threadIdx.x; i < IMAGE_BYTES / 4; i += blockDim.x) words[i] = image[i];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  return static_cast<unsigned>(__cvta_generic_to_shared(smem));
}
#include "hopper_wgmma.h"

// ---- tensor copies -------------------------------------------------------------------------------------------------
struct alignas(64) Map { unsigned long long opaque[16]; };
constexpr int TILE_BYTES = 8192;

#define C1 "{%3}"
#define C2 "{%3,%4}"
#define C3 "{%3,%4,%5}"
#define C4 "{%3,%4,%5,%6}"
#define C5 "{%3,%4,%5,%6,%7}"
#define TENSOR_KERNELS(RANK)                                                                                                     \
  extern "C" __global__ void tensor_load_##RANK(const __grid_constant__ Map map, unsigned* out, int bytes, int at, int c0, int c1, \
                                                int c2, int c3, int c4) {                                                        \
    __shared__ __align__(8) unsigned long long barrier;                                                                          \
    unsigned* words = reinterpret_cast<unsigned*>(smem);                                                                         \
    for (int i = threadIdx.x; i < TILE_BYTES / 4; i += blockDim.x) words[i] = 0xeeeeeeeeu;                                       \
    unsigned bar = static_cast<unsigned>(__cvta_generic_to_shared(&barrier));                                                    \
    unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(smem)) + at;                                                    \
    if (threadIdx.x == 0) {                                                                                                      \
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bar) : "memory");                                              \
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");                                                         \
    }                                                                                                                            \
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");                                                                 \
    __syncthreads();                                                                                                             \
    if (threadIdx.x == 0) {                                                                                                      \
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");                  \
      asm volatile("cp.async.bulk.tensor." #RANK "d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, " C##RANK     \
                   "], [%2];" ::"r"(to), "l"(&map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4) : "memory");           \
    }                                                                                                                            \
    unsigned done = 0;                                                                                                           \
    for (int tries = 0; !done && tries < 1000000; ++tries)                                                                       \
      asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(done) : "r"(bar) : "memory"); \
    __syncthreads();                                                                                                             \
    for (int i = threadIdx.x; i < TILE_BYTES / 4; i += blockDim.x) out[i] = words[i];                                            \
    if (threadIdx.x == 0) out[TILE_BYTES / 4] = done;                                                                            \
  }                                                                                                                              \
  extern "C" __global__ void tensor_store_##RANK(const __grid_constant__ Map map, const unsigned* in, int reduce, int at, int c0,  \
                                                 int c1, int c2, int c3, int c4) {                                               \
    unsigned* words = reinterpret_cast<unsigned*>(smem);                                                                         \
    for (int i = threadIdx.x; i < TILE_BYTES / 4; i += blockDim.x) words[i] = in[i];                                             \
    unsigned from = static_cast<unsigned>(__cvta_generic_to_shared(smem)) + at;                                                  \
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");                                                                 \
    __syncthreads();                                                                                                             \
    if (threadIdx.x == 0) {                                                                                                      \
      if (reduce == 0)                                                                                                           \
        asm volatile("cp.async.bulk.tensor." #RANK "d.global.shared::cta.bulk_group [%0, " C##RANK "], [%1];" ::"l"(&map),       \
                     "r"(from), "r"(0), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4) : "memory");                                 \
      else if (reduce == 1)                                                                                                      \
        asm volatile("cp.reduce.async.bulk.tensor." #RANK "d.global.shared::cta.add.tile.bulk_group [%0, " C##RANK "], [%1];" ::"l"(&map), \
                     "r"(from), "r"(0), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4) : "memory");                                 \
      else                                                                                                                       \
        asm volatile("cp.reduce.async.bulk.tensor." #RANK "d.global.shared::cta.max.tile.bulk_group [%0, " C##RANK "], [%1];" ::"l"(&map), \
                     "r"(from), "r"(0), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4) : "memory");                                 \
      asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;" ::: "memory");                                     \
    }                                                                                                                            \
  }
TENSOR_KERNELS(1)
TENSOR_KERNELS(2)
TENSOR_KERNELS(3)
TENSOR_KERNELS(4)
TENSOR_KERNELS(5)

// ---- mbarriers: one thread, every answer written down ------------------------------------------------------------------
extern "C" __global__ void mbarrier_answers(unsigned long long* out) {
  __shared__ __align__(8) unsigned long long barrier;
  unsigned bar = static_cast<unsigned>(__cvta_generic_to_shared(&barrier));
  int at = 0;
#define INIT(n) asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(n) : "memory")
#define INVAL() asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(bar) : "memory")
#define ARRIVE(token) asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];" : "=l"(token) : "r"(bar) : "memory")
#define ARRIVE_N(token, n) asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1], %2;" : "=l"(token) : "r"(bar), "r"(n) : "memory")
#define ARRIVE_NC(token) asm volatile("mbarrier.arrive.noComplete.shared::cta.b64 %0, [%1], 1;" : "=l"(token) : "r"(bar) : "memory")
#define ARRIVE_TX(token, n) asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 %0, [%1], %2;" : "=l"(token) : "r"(bar), "r"(n) : "memory")
#define DROP(token) asm volatile("mbarrier.arrive_drop.shared::cta.b64 %0, [%1];" : "=l"(token) : "r"(bar) : "memory")
#define EXPECT(n) asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(n) : "memory")
#define COMPLETE(n) asm volatile("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(n) : "memory")
#define PENDING(count, token) asm volatile("mbarrier.pending_count.b64 %0, %1;" : "=r"(count) : "l"(token))
#define TEST(done, token) asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(done) : "r"(bar), "l"(token) : "memory")
#define PARITY(done, q) asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(done) : "r"(bar), "r"(q) : "memory")
  unsigned long long token = 0;
  unsigned answer = 0;
  auto note = [&](unsigned long long value) { out[at++] = value; };
  auto parities = [&] {
    PARITY(answer, 0);
    note(answer);
    PARITY(answer, 1);
    note(answer);
  };
  INIT(2);
  parities();                                   // fresh: parity 1 at once
  ARRIVE_NC(token); PENDING(answer, token); note(answer);
  TEST(answer, token); note(answer);
  unsigned long long second = 0;
  ARRIVE(second);
  TEST(answer, token); note(answer);            // both tokens of the phase that has completed
  TEST(answer, second); note(answer);
  parities();
  ARRIVE_N(token, 2);                           // the second phase at once
  TEST(answer, token); note(answer);
  parities();
  INVAL();
  INIT(1);
  ARRIVE_TX(token, 32);
  TEST(answer, token); note(answer);
  COMPLETE(16); TEST(answer, token); note(answer);
  COMPLETE(16); TEST(answer, token); note(answer);
  parities();
  COMPLETE(16);                                 // before it is expected, the arrival pending
  ARRIVE_TX(token, 16);
  TEST(answer, token); note(answer);
  INVAL();
  INIT(1);
  COMPLETE(16);
  ARRIVE(token);                                // no arrival pending, sixteen bytes too many
  TEST(answer, token); note(answer);
  EXPECT(16);                                   // does raising the count to zero close the phase?
  TEST(answer, token); note(answer);
  INVAL();
  INIT(3);
  DROP(token);                                  // two are left, of this phase and of later ones
  ARRIVE(token); TEST(answer, token); note(answer);
  ARRIVE(second); TEST(answer, token); note(answer);
  ARRIVE(token); ARRIVE(token); TEST(answer, token); note(answer);
  parities();
  note(0xabcdef);
  out[63] = at;
}

// ---- clusters ------------------------------------------------------------------------------------------------------------
extern "C" __global__ void cluster_answers(unsigned* out) {
  __shared__ unsigned mine[4];
  unsigned rank, count, here = static_cast<unsigned>(__cvta_generic_to_shared(mine));
  asm volatile("mov.u32 %0, %%cluster_ctarank;\nmov.u32 %1, %%cluster_nctarank;" : "=r"(rank), "=r"(count));
  unsigned* row = out + (blockIdx.x + gridDim.x * blockIdx.y) * 64;
  mine[0] = 1000 + blockIdx.x + 100 * blockIdx.y, mine[1] = 0, mine[2] = 0;
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  int at = 0;
  auto note = [&](unsigned value) { row[at++] = value; };
  unsigned x, y, z;
  note(rank); note(count);
  asm volatile("mov.u32 %0, %%cluster_ctaid.x;\nmov.u32 %1, %%cluster_ctaid.y;\nmov.u32 %2, %%cluster_ctaid.z;" : "=r"(x), "=r"(y), "=r"(z));
  note(x); note(y); note(z);
  asm volatile("mov.u32 %0, %%cluster_nctaid.x;\nmov.u32 %1, %%cluster_nctaid.y;\nmov.u32 %2, %%cluster_nctaid.z;" : "=r"(x), "=r"(y), "=r"(z));
  note(x); note(y); note(z);
  asm volatile("mov.u32 %0, %%clusterid.x;\nmov.u32 %1, %%clusterid.y;\nmov.u32 %2, %%clusterid.z;" : "=r"(x), "=r"(y), "=r"(z));
  note(x); note(y); note(z);
  asm volatile("mov.u32 %0, %%nclusterid.x;\nmov.u32 %1, %%nclusterid.y;\nmov.u32 %2, %%nclusterid.z;" : "=r"(x), "=r"(y), "=r"(z));
  note(x); note(y); note(z);
  for (unsigned r = 0; r < count; ++r) {
    unsigned there, who, value, add = rank + 1;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(r));
    asm volatile("getctarank.shared::cluster.u32 %0, %1;" : "=r"(who) : "r"(there));
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(there) : "memory");
    asm volatile("red.shared::cluster.add.u32 [%0], %1;" ::"r"(there + 4), "r"(add) : "memory");
    note(who); note(value);
    row[40 + r] = there - here;   // how the machine spells a peer's address: for reading, not for comparing
  }
  unsigned own_rank;
  asm volatile("getctarank.shared::cluster.u32 %0, %1;" : "=r"(own_rank) : "r"(here));
  note(own_rank);
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  note(mine[1]);
  row[63] = at;
}

#ifndef __CUDACC_RTC__
// ---- host -----------------------------------------------------------------------------------------------------------
#define CHECK(x) do { auto e = (x); if (e != 0) { fprintf(stderr, "%s:%d: %s = %d\n", __FILE__, __LINE__, #x, int(e)); exit(1); } } while (0)

static FILE *facts, *blob;
static long blob_at = 0;
static void put(const std::string& name, const void* data, size_t bytes) {
  fprintf(facts, "%s = %ld %zu\n", name.c_str(), blob_at, bytes);
  fwrite(data, 1, bytes, blob);
  blob_at += bytes;
}

static uint32_t mix(uint32_t x) {  // the test has the same
  x ^= x >> 16; x *= 0x7feb352du; x ^= x >> 15; x *= 0x846ca68bu; x ^= x >> 16;
  return x;
}
struct Format { const char* name; int bits, exponent, mantissa, one; };  // one: the exponent field of 1.0
static const Format FORMATS[] = {{"f16", 16, 5, 10, 15}, {"bf16", 16, 8, 7, 127}, {"tf32", 32, 8, 23, 127},
                                 {"e4m3", 8, 4, 3, 7}, {"e5m2", 8, 5, 2, 15}, {"s8", 8, 0, 8, 0}, {"u8", 8, 0, 8, 0}};
static const Format& format(const char* name) {
  for (auto& f : FORMATS) if (!strcmp(f.name, name)) return f;
  abort();
}
// Style 0: integers from -3 to 3; 1: four binades around 1, random mantissas; 2: sixteen binades (all of them where there are fewer).
static uint32_t code(const Format& f, int style, uint32_t h) {
  if (f.exponent == 0) return h & 0xff;
  uint32_t sign = (h >> 31) << (f.bits - 1), mantissa = h & ((1u << f.mantissa) - 1), pick = (h >> 24) & 0x7f;
  if (style == 0) {
    uint32_t magnitude = pick % 4;
    if (magnitude == 0) return 0;
    return sign | uint32_t(f.one + (magnitude > 1)) << f.mantissa | (magnitude == 3 ? 1u << (f.mantissa - 1) : 0);
  }
  if (style == 1) return sign | uint32_t(f.one - 2 + pick % 4) << f.mantissa | mantissa;
  uint32_t low = f.one > 8 ? f.one - 8 : 0;
  uint32_t span = f.exponent == 4 ? 15 : 16;  // never the field of infinities and NaN
  return sign | (low + pick % span) << f.mantissa | mantissa;
}
static void fill(std::vector<uint8_t>& image, size_t from, size_t to, const Format& f, int style, uint32_t seed) {
  for (size_t at = from, i = 0; at < to; at += f.bits / 8, ++i) {
    uint32_t value = code(f, style, mix(mix(seed) + uint32_t(i)));
    memcpy(&image[at], &value, f.bits / 8);
  }
}

static void capture_wgmma() {
  uint8_t *image; unsigned *c, *d;
  CHECK(cudaMalloc(&image, IMAGE_BYTES)); CHECK(cudaMalloc(&c, 65536)); CHECK(cudaMalloc(&d, 65536));
  uint32_t seed = 1;
  for (auto& form : FORMS) {
    CHECK(cudaFuncSetAttribute(form.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, IMAGE_BYTES));
    int element = format(form.a).bits / 8;
    for (int style = 0; style < (form.d[0] == 's' ? 1 : 3); ++style)
      for (int swizzle = 0; swizzle < 4; ++swizzle) {
        if (form.n == 256 && swizzle != 1) continue;
        if (style > 0 && swizzle % 2 == 0) continue;
        if (form.rs && swizzle == 2) continue;
        ++seed;
        std::vector<uint8_t> host(IMAGE_BYTES);
        fill(host, 0, 16384, format(form.a), style, 3 * seed);
        fill(host, 16384, IMAGE_BYTES, format(form.b), style, 3 * seed + 1);
        std::vector<uint32_t> start(128 * form.words);
        for (size_t i = 0; i < start.size(); ++i) {
          uint32_t h = mix(mix(3 * seed + 2) + uint32_t(i));
          if (form.d[0] == 's') start[i] = h % 2001 - 1000;
          else if (form.d[1] == '3') { float v = style == 0 ? float(int(h % 17) - 8) : float(int(h % 20001) - 10000) / 4096.f; memcpy(&start[i], &v, 4); }
          else start[i] = code(format("f16"), 0, h) | code(format("f16"), 0, mix(h)) << 16;
        }
        // Offsets in bytes of groups: K-major, swizzled: 8 rows of the span; not swizzled: 128 bytes, pieces apart.
        auto descriptor = [&](uint64_t at, bool mn_major, int extent) {
          uint64_t span = swizzle == 0 ? 16 : swizzle == 1 ? 128 : swizzle == 2 ? 64 : 32;
          uint64_t leading, stride;
          if (!mn_major && swizzle == 0) leading = 128, stride = 256;             // two pieces side by side, then the next rows
          else if (!mn_major) leading = 16, stride = 8 * span;
          else if (swizzle == 0) stride = 128, leading = uint64_t(extent) * 16;   // pieces of 8 elements, then the next 8 of k
          else leading = 16 * span, stride = 8 * span;                            // runs apart, then the next 8 of k
          return at >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | uint64_t(swizzle) << 62;
        };
        uint64_t a_desc = descriptor(0, form.ta, 64), b_desc = descriptor(16384, form.tb, form.n);
        int scale = !(style == 1 && swizzle == 3);
        CHECK(cudaMemcpy(image, host.data(), IMAGE_BYTES, cudaMemcpyHostToDevice));
        CHECK(cudaMemcpy(c, start.data(), start.size() * 4, cudaMemcpyHostToDevice));
        CHECK(cudaMemset(d, 0, 65536));
        void* args[] = {&image, &c, &d, &a_desc, &b_desc, &scale};
        CHECK(cudaLaunchKernel(form.kernel, dim3(1), dim3(128), args, IMAGE_BYTES, 0));
        CHECK(cudaDeviceSynchronize());
        std::vector<uint32_t> got(start.size());
        CHECK(cudaMemcpy(got.data(), d, got.size() * 4, cudaMemcpyDeviceToHost));
        char name[256];
        snprintf(name, sizeof name, "%s style=%d seed=%u a=%llx b=%llx scale=%d", form.name, style, seed, (unsigned long long)a_desc, (unsigned long long)b_desc, scale);
        put(name, got.data(), got.size() * 4);
        (void)element;
      }
  }
}

typedef CUresult (*Encode)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                           const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

struct TensorCase { int rank, type, element; uint64_t dims[5]; uint64_t pitch; uint32_t box[5], strides[5]; int swizzle, fill, at; int coords[5]; int store; };

static void capture_tensors(int only) {  // each in a process of its own: what the machine refuses ends it
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult status;
  CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &status));
  Encode encode = reinterpret_cast<Encode>(entry);
  const void* loads[] = {(void*)tensor_load_1, (void*)tensor_load_2, (void*)tensor_load_3, (void*)tensor_load_4, (void*)tensor_load_5};
  const void* stores[] = {(void*)tensor_store_1, (void*)tensor_store_2, (void*)tensor_store_3, (void*)tensor_store_4, (void*)tensor_store_5};
  const int F16 = CU_TENSOR_MAP_DATA_TYPE_FLOAT16, F32 = CU_TENSOR_MAP_DATA_TYPE_FLOAT32, U8 = CU_TENSOR_MAP_DATA_TYPE_UINT8, S32 = CU_TENSOR_MAP_DATA_TYPE_INT32,
            BF16 = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  std::vector<TensorCase> cases;
  for (int swizzle = 0; swizzle < 4; ++swizzle) {
    uint32_t inner = swizzle == 0 ? 24 : swizzle == 1 ? 16 : swizzle == 2 ? 32 : 64;  // f16 elements
    int coords[][2] = {{0, 0}, {16, 3}, {-8, -2}, {80, 12}, {200, 200}, {-300, 0}, {3, 1}, {-int(inner), 0}, {0, -20}};
    for (auto& c : coords)
      cases.push_back({2, F16, 2, {88, 14}, 192, {inner, 8}, {1, 1}, swizzle, 0, 0, {c[0], c[1]}, 0});
    cases.push_back({2, F16, 2, {88, 14}, 192, {inner, 8}, {1, 1}, swizzle, 1, 0, {80, 12}, 0});          // NaN outside
    cases.push_back({2, F16, 2, {88, 14}, 192, {inner, 8}, {1, 1}, swizzle, 0, 128, {0, 0}, 0});          // not at the start of the pattern
    cases.push_back({2, F16, 2, {88, 14}, 192, {inner, 8}, {1, 1}, swizzle, 0, 384, {0, 0}, 0});
    cases.push_back({2, F16, 2, {88, 14}, 192, {8, 8}, {1, 1}, swizzle, 0, 0, {0, 0}, 0});                // narrower than the span
    cases.push_back({2, F16, 2, {88, 14}, 192, {inner, 8}, {1, 2}, swizzle, 0, 0, {0, 0}, 0});            // every second row
    cases.push_back({4, F16, 2, {40, 9, 3, 2}, 96, {inner <= 40 ? inner : 64, 4, 2, 2}, {1, 1, 1, 1}, swizzle, 0, 0, {0, 6, 2, 1}, 0});
    cases.push_back({3, F32, 4, {20, 6, 5}, 96, {swizzle == 0 ? 12u : inner / 2, 4, 3}, {1, 1, 1}, swizzle, 0, 0, {4, 4, -1}, 0});
    cases.push_back({5, U8, 1, {40, 5, 3, 3, 2}, 48, {swizzle == 0 ? 48u : inner * 2, 3, 2, 2, 2}, {1, 1, 1, 1, 1}, swizzle, 0, 0, {16, 3, 2, -1, 1}, 0});
    cases.push_back({2, F16, 2, {88, 14}, 192, {inner, 8}, {1, 1}, swizzle, 0, 0, {80, 12}, 1});          // stores
    cases.push_back({2, F16, 2, {88, 14}, 192, {inner, 8}, {1, 1}, swizzle, 0, 0, {-8, -2}, 1});
    cases.push_back({4, BF16, 2, {40, 9, 3, 2}, 96, {inner, 4, 2, 2}, {1, 1, 1, 1}, swizzle, 0, 0, {0, 6, 2, 1}, 1});
  }
  cases.push_back({1, F32, 4, {100}, 0, {64}, {1}, 0, 0, 0, {60}, 0});
  cases.push_back({1, F32, 4, {100}, 0, {64}, {1}, 0, 1, 0, {60}, 0});
  cases.push_back({1, BF16, 2, {100}, 0, {64}, {1}, 0, 1, 0, {60}, 0});
  cases.push_back({1, F32, 4, {100}, 0, {64}, {1}, 0, 0, 0, {60}, 2});
  cases.push_back({2, F16, 2, {88, 14}, 192, {64, 8}, {1, 1}, 3, 0, 0, {80, 12}, 2});
  cases.push_back({2, BF16, 2, {88, 14}, 192, {64, 8}, {1, 1}, 3, 0, 0, {40, 2}, 2});
  cases.push_back({2, F16, 2, {88, 14}, 192, {64, 8}, {1, 1}, 3, 0, 0, {40, 2}, 3});
  cases.push_back({2, S32, 4, {40, 14}, 192, {32, 8}, {1, 1}, 3, 0, 0, {16, 10}, 2});
  cases.push_back({2, S32, 4, {40, 14}, 192, {32, 8}, {1, 1}, 3, 0, 0, {16, 10}, 3});
  constexpr int TENSOR_BYTES = 16384;
  uint8_t* tensor; unsigned* tile;
  CHECK(cudaMalloc(&tensor, TENSOR_BYTES)); CHECK(cudaMalloc(&tile, TILE_BYTES + 4));
  int number = 0;
  if (only > int(cases.size())) exit(7);
  for (auto& t : cases) {
    ++number;
    if (number != only) continue;
    const Format& f = t.type == F16 ? format("f16") : t.type == BF16 ? format("bf16") : t.type == F32 ? format("tf32") : format("u8");
    std::vector<uint8_t> host(TENSOR_BYTES), in(TILE_BYTES);
    fill(host, 0, TENSOR_BYTES, f, 1, 100000 + 2 * number);
    fill(in, 0, TILE_BYTES, f, 1, 100001 + 2 * number);
    uint64_t pitches[4];
    uint64_t pitch = t.pitch;
    for (int i = 0; i < t.rank - 1; ++i) pitches[i] = pitch, pitch *= t.dims[i + 1];
    CUtensorMap map;
    memset(&map, 0, sizeof map);
    CUresult made = encode(&map, CUtensorMapDataType(t.type), t.rank, tensor, reinterpret_cast<cuuint64_t*>(t.dims), reinterpret_cast<cuuint64_t*>(pitches), t.box, t.strides,
                           CU_TENSOR_MAP_INTERLEAVE_NONE, CUtensorMapSwizzle(t.swizzle), CU_TENSOR_MAP_L2_PROMOTION_NONE, CUtensorMapFloatOOBfill(t.fill));
    std::string name = "tensor number=" + std::to_string(number) + " rank=" + std::to_string(t.rank) + " type=" + std::to_string(t.type) + " element=" + std::to_string(t.element);
    auto list = [&](const char* key, auto* values, int count) {
      name += std::string(" ") + key + "=";
      for (int i = 0; i < count; ++i) name += (i ? "," : "") + std::to_string(values[i]);
    };
    list("dims", t.dims, t.rank); list("pitches", pitches, t.rank - 1); list("box", t.box, t.rank); list("strides", t.strides, t.rank);
    name += " swizzle=" + std::to_string(t.swizzle) + " fill=" + std::to_string(t.fill) + " at=" + std::to_string(t.at) + " store=" + std::to_string(t.store);
    list("coords", t.coords, t.rank);
    if (made != CUDA_SUCCESS) { fprintf(facts, "# refused %d: %s\n", int(made), name.c_str()); continue; }
    char address[64];
    snprintf(address, sizeof address, "map address=%llx number=%d", (unsigned long long)tensor, number);
    put(address, &map, 128);
    CHECK(cudaMemcpy(tensor, host.data(), TENSOR_BYTES, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(tile, in.data(), TILE_BYTES, cudaMemcpyHostToDevice));
    int bytes = t.element;
    for (int i = 0; i < t.rank; ++i) bytes *= i == 0 ? t.box[i] : (t.box[i] + t.strides[i] - 1) / t.strides[i];
    int reduce = t.store - 1;
    void* load_args[] = {&map, &tile, &bytes, &t.at, &t.coords[0], &t.coords[1], &t.coords[2], &t.coords[3], &t.coords[4]};
    void* store_args[] = {&map, &tile, &reduce, &t.at, &t.coords[0], &t.coords[1], &t.coords[2], &t.coords[3], &t.coords[4]};
    const void* kernel = t.store ? stores[t.rank - 1] : loads[t.rank - 1];
    CHECK(cudaLaunchKernel(kernel, dim3(1), dim3(128), t.store ? store_args : load_args, TILE_BYTES, 0));
    cudaError_t ran = cudaDeviceSynchronize();
    if (ran != cudaSuccess) { fprintf(facts, "# failed %d: %s\n", int(ran), name.c_str()); fflush(facts); fflush(blob); exit(0); }
    if (t.store) {
      CHECK(cudaMemcpy(host.data(), tensor, TENSOR_BYTES, cudaMemcpyDeviceToHost));
      put(name, host.data(), 6144);
    } else {
      std::vector<uint8_t> got(TILE_BYTES + 4);
      CHECK(cudaMemcpy(got.data(), tile, TILE_BYTES + 4, cudaMemcpyDeviceToHost));
      uint32_t done;
      memcpy(&done, &got[TILE_BYTES], 4);
      name += " done=" + std::to_string(done) + " bytes=" + std::to_string(bytes);
      put(name, got.data(), 5120);
    }
  }
}

static void capture_rest() {
  unsigned long long* answers;
  CHECK(cudaMalloc(&answers, 512)); CHECK(cudaMemset(answers, 0xff, 512));
  mbarrier_answers<<<1, 1>>>(answers);
  CHECK(cudaDeviceSynchronize());
  unsigned long long host[64];
  CHECK(cudaMemcpy(host, answers, 512, cudaMemcpyDeviceToHost));
  put("mbarrier_answers", host, 512);
  unsigned* out;
  CHECK(cudaMalloc(&out, 16 * 256));
  for (int shape = 0; shape < 3; ++shape) {
    CHECK(cudaMemset(out, 0, 16 * 256));
    cudaLaunchConfig_t config = {};
    config.gridDim = shape == 0 ? dim3(8, 1, 1) : shape == 1 ? dim3(4, 4, 1) : dim3(8, 2, 1);
    config.blockDim = dim3(32);
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {shape == 0 ? 4u : 2u, shape == 0 ? 1u : 2u, 1u};
    if (shape == 2) attribute.val.clusterDim = {8u, 1u, 1u};
    config.attrs = &attribute;
    config.numAttrs = 1;
    CHECK(cudaLaunchKernelEx(&config, cluster_answers, out));
    CHECK(cudaDeviceSynchronize());
    std::vector<unsigned> got(1024);
    CHECK(cudaMemcpy(got.data(), out, 4096, cudaMemcpyDeviceToHost));
    put("cluster_answers shape=" + std::to_string(shape), got.data(), 4096);
  }
}

int main(int count, char** words) {
  std::string folder = count > 1 ? words[1] : ".";
  const int only = count > 2 ? atoi(words[2]) : 0;
  facts = fopen((folder + "/hopper.txt").c_str(), only ? "a" : "w");
  blob = fopen((folder + "/hopper.bin").c_str(), only ? "ab" : "wb");
  if (!facts || !blob) return 2;
  if (only) {
    fseek(blob, 0, SEEK_END);
    blob_at = ftell(blob);
    capture_tensors(only);
  } else {
    cudaDeviceProp properties;
    CHECK(cudaGetDeviceProperties(&properties, 0));
    fprintf(facts, "# %s, CUDA %d\n", properties.name, CUDART_VERSION);
    capture_rest();
    fflush(facts); fflush(blob);
    capture_wgmma();
  }
  fclose(facts);
  fclose(blob);
  if (only) return 0;
  for (int number = 1; number < 200; ++number) {
    std::string command = std::string(words[0]) + " " + folder + " " + std::to_string(number);
    const int status = system(command.c_str());
    if (status != 0) break;  // no more of them
  }
  return 0;
}
#endif
