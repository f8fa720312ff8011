// Warpgroup MMA (sm_90a): D[64×N] (+)= A[64×16] · B[16×N], fp32 accumulators; their layout is in mma.cuh.
#pragma once
#include "tma.cuh"

// The lower half of a shared-memory operand's descriptor, 128-byte swizzle; steps inside the operand are added to it in
// units of 16 bytes. `panel_stride_bytes` separates 64-element panels of an operand that is contiguous along N (V); it is
// ignored for one contiguous along K (Q, K). The upper half is the same for all (WG_UPPER), which keeps 64-bit sums and
// half of the moves to uniform registers out of the loops.
__device__ __forceinline__ u32 wgmma_descriptor(u32 smem, u32 panel_stride_bytes = 16) {
  return ((smem & 0x3ffff) >> 4) | ((panel_stride_bytes >> 4) << 16);
}

// Stride of 1024 bytes between groups of eight rows, in units of 16; swizzle mode 1 (128 bytes) in the top two bits.
#define WG_UPPER "0x40000040"

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from moving reads or writes of registers that an MMA in flight uses across this point.
template <int COUNT>
__device__ __forceinline__ void pin_registers(float (&r)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(r[i])::"memory");
}
template <int COUNT>
__device__ __forceinline__ void pin_registers(u32 (&r)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+r"(r[i])::"memory");
}

// Wgmma<N>::ss: both operands in shared memory, contiguous along K.
// Wgmma<N>::rs: A in registers, B in shared memory, contiguous along N (transposed on the way) or, TRANSPOSED = 0, along K.
// `accumulate` = 0 overwrites d.
template <int N>
struct Wgmma;

#define WG_S0 "%0,%1,%2,%3,%4,%5,%6,%7"
#define WG_S1 "%8,%9,%10,%11,%12,%13,%14,%15"
#define WG_S2 "%16,%17,%18,%19,%20,%21,%22,%23"
#define WG_S3 "%24,%25,%26,%27,%28,%29,%30,%31"
#define WG_S4 "%32,%33,%34,%35,%36,%37,%38,%39"
#define WG_S5 "%40,%41,%42,%43,%44,%45,%46,%47"
#define WG_S6 "%48,%49,%50,%51,%52,%53,%54,%55"
#define WG_S7 "%56,%57,%58,%59,%60,%61,%62,%63"
#define WG_S8 "%64,%65,%66,%67,%68,%69,%70,%71"
#define WG_S9 "%72,%73,%74,%75,%76,%77,%78,%79"
#define WG_S10 "%80,%81,%82,%83,%84,%85,%86,%87"
#define WG_S11 "%88,%89,%90,%91,%92,%93,%94,%95"
#define WG_S12 "%96,%97,%98,%99,%100,%101,%102,%103"
#define WG_S13 "%104,%105,%106,%107,%108,%109,%110,%111"
#define WG_S14 "%112,%113,%114,%115,%116,%117,%118,%119"
#define WG_S15 "%120,%121,%122,%123,%124,%125,%126,%127"
#define WG_D8(i) "+f"(d[i]), "+f"(d[i+1]), "+f"(d[i+2]), "+f"(d[i+3]), "+f"(d[i+4]), "+f"(d[i+5]), "+f"(d[i+6]), "+f"(d[i+7])

// One instruction shape: N, its accumulators as text and as operands, and the numbers of the operands behind them.
#define WG_SHAPE(N, TEXT, OPERANDS, I0, I1, I2, I3, I4, I5, I6)                                                   \
  template <>                                                                                                     \
  struct Wgmma<N> {                                                                                               \
    static __device__ __forceinline__ void ss(float (&d)[N / 2], u32 a, u32 b, int accumulate) {                  \
      asm volatile("{\n.reg .pred p;\n.reg .b64 da, db;\nsetp.ne.b32 p, %" #I2 ", 0;\n"                          \
                   "mov.b64 da, {%" #I0 ", " WG_UPPER "};\nmov.b64 db, {%" #I1 ", " WG_UPPER "};\n"              \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." PTX_DTYPE "." PTX_DTYPE " {" TEXT          \
                   "}, da, db, p, 1, 1, 0, 0;\n}\n"                                                              \
                   : OPERANDS                                                                                     \
                   : "r"(a), "r"(b), "r"(accumulate));                                                            \
    }                                                                                                             \
    template <int TRANSPOSED = 1>                                                                                 \
    static __device__ __forceinline__ void rs(float (&d)[N / 2], u32 a0, u32 a1, u32 a2, u32 a3, u32 b,           \
                                              int accumulate) {                                                   \
      asm volatile("{\n.reg .pred p;\n.reg .b64 db;\nsetp.ne.b32 p, %" #I5 ", 0;\n"                              \
                   "mov.b64 db, {%" #I4 ", " WG_UPPER "};\n"                                                      \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." PTX_DTYPE "." PTX_DTYPE " {" TEXT          \
                   "}, {%" #I0 ",%" #I1 ",%" #I2 ",%" #I3 "}, db, p, 1, 1, %" #I6 ";\n}\n"                 \
                   : OPERANDS                                                                                     \
                   : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b), "r"(accumulate), "n"(TRANSPOSED));               \
    }                                                                                                             \
  };

#define WG_T1 WG_S0
#define WG_T2 WG_T1 "," WG_S1
#define WG_T3 WG_T2 "," WG_S2
#define WG_T4 WG_T3 "," WG_S3
#define WG_T5 WG_T4 "," WG_S4
#define WG_T6 WG_T5 "," WG_S5
#define WG_T7 WG_T6 "," WG_S6
#define WG_T8 WG_T7 "," WG_S7
#define WG_T9 WG_T8 "," WG_S8
#define WG_T10 WG_T9 "," WG_S9
#define WG_T11 WG_T10 "," WG_S10
#define WG_T12 WG_T11 "," WG_S11
#define WG_T13 WG_T12 "," WG_S12
#define WG_T14 WG_T13 "," WG_S13
#define WG_T15 WG_T14 "," WG_S14
#define WG_T16 WG_T15 "," WG_S15
#define WG_O1 WG_D8(0)
#define WG_O2 WG_O1, WG_D8(8)
#define WG_O3 WG_O2, WG_D8(16)
#define WG_O4 WG_O3, WG_D8(24)
#define WG_O5 WG_O4, WG_D8(32)
#define WG_O6 WG_O5, WG_D8(40)
#define WG_O7 WG_O6, WG_D8(48)
#define WG_O8 WG_O7, WG_D8(56)
#define WG_O9 WG_O8, WG_D8(64)
#define WG_O10 WG_O9, WG_D8(72)
#define WG_O11 WG_O10, WG_D8(80)
#define WG_O12 WG_O11, WG_D8(88)
#define WG_O13 WG_O12, WG_D8(96)
#define WG_O14 WG_O13, WG_D8(104)
#define WG_O15 WG_O14, WG_D8(112)
#define WG_O16 WG_O15, WG_D8(120)

WG_SHAPE(16, WG_T1, WG_O1, 8, 9, 10, 11, 12, 13, 14)
WG_SHAPE(32, WG_T2, WG_O2, 16, 17, 18, 19, 20, 21, 22)
WG_SHAPE(48, WG_T3, WG_O3, 24, 25, 26, 27, 28, 29, 30)
WG_SHAPE(64, WG_T4, WG_O4, 32, 33, 34, 35, 36, 37, 38)
WG_SHAPE(80, WG_T5, WG_O5, 40, 41, 42, 43, 44, 45, 46)
WG_SHAPE(96, WG_T6, WG_O6, 48, 49, 50, 51, 52, 53, 54)
WG_SHAPE(112, WG_T7, WG_O7, 56, 57, 58, 59, 60, 61, 62)
WG_SHAPE(128, WG_T8, WG_O8, 64, 65, 66, 67, 68, 69, 70)
WG_SHAPE(144, WG_T9, WG_O9, 72, 73, 74, 75, 76, 77, 78)
WG_SHAPE(160, WG_T10, WG_O10, 80, 81, 82, 83, 84, 85, 86)
WG_SHAPE(176, WG_T11, WG_O11, 88, 89, 90, 91, 92, 93, 94)
WG_SHAPE(192, WG_T12, WG_O12, 96, 97, 98, 99, 100, 101, 102)
WG_SHAPE(208, WG_T13, WG_O13, 104, 105, 106, 107, 108, 109, 110)
WG_SHAPE(224, WG_T14, WG_O14, 112, 113, 114, 115, 116, 117, 118)
WG_SHAPE(240, WG_T15, WG_O15, 120, 121, 122, 123, 124, 125, 126)
WG_SHAPE(256, WG_T16, WG_O16, 128, 129, 130, 131, 132, 133, 134)
