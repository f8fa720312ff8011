// Captures what single PTX instructions return on a real GPU.
//
//   nvcc -std=c++17 -O2 -gencode=arch=compute_90a,code=sm_90a capture.cu -o capture
//   ./capture h200.txt
//
// Each line of the output is `name input… = output…`, all values in hexadecimal.
// The name is the opcode. Matrix instructions work on a warp; their registers
// are listed register by register, 32 lanes each, 64-bit registers as two words
// per lane (low words first). Inputs are fixed, so two runs on one GPU model
// give the same file.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "capture_inputs.h"

#define CHECK(call)                                                                    \
    do {                                                                               \
        cudaError_t status = (call);                                                   \
        if (status != cudaSuccess) {                                                   \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(status)); \
            exit(1);                                                                   \
        }                                                                              \
    } while (0)

// ---------------------------------------------------------------- scalar instructions

using ScalarKernel = void (*)(const u64 *, u64 *, int);

struct ScalarOp {
    const char *name;
    ScalarKernel kernel;
    const char *inputs;  // one generator letter per operand, see capture_inputs.h
    int cases;
};

static std::vector<ScalarOp> &scalar_ops() {
    static std::vector<ScalarOp> ops;
    return ops;
}

struct Registered {
    Registered(const char *name, ScalarKernel kernel, const char *inputs, int cases) {
        scalar_ops().push_back({name, kernel, inputs, cases});
    }
};

using T_r = uint32_t;
using T_h = uint16_t;
using T_l = uint64_t;

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define LANE int i = blockIdx.x * blockDim.x + threadIdx.x; if (i >= n) return;

// D, A, B, C are register classes: r 32 bits, h 16 bits, l 64 bits.
#define UNARY_(ID, NAME, D, A, GEN, N)                                          \
    __global__ void ID(const u64 *in, u64 *out, int n) {                        \
        LANE T_##A a = (T_##A)in[i]; T_##D d;                                   \
        asm volatile(NAME " %0, %1;" : "=" #D(d) : #A(a));                      \
        out[i] = (u64)d;                                                        \
    }                                                                           \
    static Registered JOIN(ID, _)(NAME, ID, GEN, N);
#define BINARY_(ID, NAME, D, A, B, GEN, N)                                      \
    __global__ void ID(const u64 *in, u64 *out, int n) {                        \
        LANE T_##A a = (T_##A)in[2 * i]; T_##B b = (T_##B)in[2 * i + 1]; T_##D d; \
        asm volatile(NAME " %0, %1, %2;" : "=" #D(d) : #A(a), #B(b));           \
        out[i] = (u64)d;                                                        \
    }                                                                           \
    static Registered JOIN(ID, _)(NAME, ID, GEN, N);
#define TERNARY_(ID, NAME, ASM, D, A, B, C, GEN, N)                             \
    __global__ void ID(const u64 *in, u64 *out, int n) {                        \
        LANE T_##A a = (T_##A)in[3 * i]; T_##B b = (T_##B)in[3 * i + 1];        \
        T_##C c = (T_##C)in[3 * i + 2]; T_##D d;                                \
        asm volatile(ASM : "=" #D(d) : #A(a), #B(b), #C(c));                    \
        out[i] = (u64)d;                                                        \
    }                                                                           \
    static Registered JOIN(ID, _)(NAME, ID, GEN, N);
#define QUATERNARY_(ID, NAME, GEN, N)                                           \
    __global__ void ID(const u64 *in, u64 *out, int n) {                        \
        LANE uint32_t a = in[4 * i], b = in[4 * i + 1], c = in[4 * i + 2], e = in[4 * i + 3], d; \
        asm volatile(NAME " %0, %1, %2, %3, %4;" : "=r"(d) : "r"(a), "r"(b), "r"(c), "r"(e)); \
        out[i] = (u64)d;                                                        \
    }                                                                           \
    static Registered JOIN(ID, _)(NAME, ID, GEN, N);

#define UNARY(NAME, D, A, GEN, N) UNARY_(JOIN(op_, __COUNTER__), NAME, D, A, GEN, N)
#define BINARY(NAME, D, A, B, GEN, N) BINARY_(JOIN(op_, __COUNTER__), NAME, D, A, B, GEN, N)
#define TERNARY(NAME, D, A, B, C, GEN, N) \
    TERNARY_(JOIN(op_, __COUNTER__), NAME, NAME " %0, %1, %2, %3;", D, A, B, C, GEN, N)
#define LOP3(LUT) \
    TERNARY_(JOIN(op_, __COUNTER__), "lop3.b32." LUT, "lop3.b32 %0, %1, %2, %3, 0x" LUT ";", r, r, r, r, "uuu", 20)
#define QUATERNARY(NAME, GEN, N) QUATERNARY_(JOIN(op_, __COUNTER__), NAME, GEN, N)

#define ROUNDED(X) X("rn") X("rz") X("rm") X("rp")

#define F32_ARITHMETIC(R)                               \
    BINARY("add." R ".f32", r, r, r, "ff", 150)         \
    BINARY("sub." R ".f32", r, r, r, "ff", 60)          \
    BINARY("mul." R ".f32", r, r, r, "ff", 150)         \
    TERNARY("fma." R ".f32", r, r, r, r, "fff", 200)    \
    BINARY("div." R ".f32", r, r, r, "ff", 100)         \
    UNARY("rcp." R ".f32", r, r, "f", 60)               \
    UNARY("sqrt." R ".f32", r, r, "f", 60)
ROUNDED(F32_ARITHMETIC)

#define F64_ARITHMETIC(R)                               \
    BINARY("add." R ".f64", l, l, l, "dd", 80)          \
    BINARY("mul." R ".f64", l, l, l, "dd", 80)          \
    TERNARY("fma." R ".f64", l, l, l, l, "ddd", 100)    \
    BINARY("div." R ".f64", l, l, l, "dd", 60)          \
    UNARY("sqrt." R ".f64", l, l, "d", 40)
ROUNDED(F64_ARITHMETIC)

BINARY("add.rn.ftz.f32", r, r, r, "ff", 100)
BINARY("mul.rn.ftz.f32", r, r, r, "ff", 100)
TERNARY("fma.rn.ftz.f32", r, r, r, r, "fff", 100)
BINARY("add.rn.sat.f32", r, r, r, "ff", 60)
BINARY("mul.rn.ftz.sat.f32", r, r, r, "ff", 60)
TERNARY("fma.rn.sat.f32", r, r, r, r, "fff", 60)

BINARY("min.f32", r, r, r, "ff", 100)
BINARY("max.f32", r, r, r, "ff", 100)
BINARY("min.NaN.f32", r, r, r, "ff", 60)
BINARY("max.NaN.f32", r, r, r, "ff", 60)
BINARY("min.xorsign.abs.f32", r, r, r, "ff", 60)
BINARY("max.NaN.xorsign.abs.f32", r, r, r, "ff", 60)
BINARY("max.ftz.f32", r, r, r, "ff", 60)
BINARY("min.f64", l, l, l, "dd", 40)
BINARY("max.f64", l, l, l, "dd", 40)

#define HALF_ARITHMETIC(T, G)                                       \
    BINARY("add.rn." T, r, r, r, G G, 120)                          \
    BINARY("sub.rn." T, r, r, r, G G, 60)                           \
    BINARY("mul.rn." T, r, r, r, G G, 120)                          \
    TERNARY("fma.rn." T, r, r, r, r, G G G, 200)                    \
    TERNARY("fma.rn.relu." T, r, r, r, r, G G G, 100)               \
    BINARY("min." T, r, r, r, G G, 60)                              \
    BINARY("max.NaN." T, r, r, r, G G, 60)                          \
    BINARY("min.xorsign.abs." T, r, r, r, G G, 60)
HALF_ARITHMETIC("f16x2", "h")
HALF_ARITHMETIC("bf16x2", "b")
BINARY("add.rn.sat.f16x2", r, r, r, "hh", 60)
TERNARY("fma.rn.sat.f16x2", r, r, r, r, "hhh", 60)
TERNARY("fma.rn.ftz.f16x2", r, r, r, r, "hhh", 100)
BINARY("mul.rn.ftz.f16x2", r, r, r, "hh", 60)
BINARY("max.ftz.f16x2", r, r, r, "hh", 40)

#define F32_TO_HALF(T)                                              \
    BINARY("cvt.rn." T ".f32", r, r, r, "nn", 300)                  \
    BINARY("cvt.rz." T ".f32", r, r, r, "nn", 150)                  \
    BINARY("cvt.rn.relu." T ".f32", r, r, r, "nn", 60)              \
    BINARY("cvt.rn.satfinite." T ".f32", r, r, r, "nn", 60)
F32_TO_HALF("f16x2")
F32_TO_HALF("bf16x2")

#define F32_TO_F16(R) UNARY("cvt." R ".f16.f32", h, r, "n", 80) UNARY("cvt." R ".f16.f64", h, l, "m", 60) \
    UNARY("cvt." R ".f32.f64", r, l, "m", 100)
ROUNDED(F32_TO_F16)
UNARY("cvt.rn.ftz.f32.f64", r, l, "m", 40)
UNARY("cvt.rna.tf32.f32", r, r, "f", 100)
UNARY("cvt.rn.tf32.f32", r, r, "f", 60)
UNARY("cvt.rz.tf32.f32", r, r, "f", 60)

#define FP8(T)                                                      \
    BINARY("cvt.rn.satfinite." T ".f32", h, r, r, "vv", 400)        \
    BINARY("cvt.rn.satfinite.relu." T ".f32", h, r, r, "vv", 60)    \
    UNARY("cvt.rn.satfinite." T ".f16x2", h, r, "h", 200)           \
    UNARY("cvt.rn.f16x2." T, r, h, "8", 256)                        \
    UNARY("cvt.rn.relu.f16x2." T, r, h, "8", 32)
FP8("e4m3x2")
FP8("e5m2x2")

#define F32_TO_INT(R)                                               \
    UNARY("cvt." R ".s32.f32", r, r, "i", 80)                       \
    UNARY("cvt." R ".u32.f32", r, r, "i", 40)                       \
    UNARY("cvt." R ".s64.f32", l, r, "i", 40)                       \
    UNARY("cvt." R ".u64.f64", l, l, "j", 40)                       \
    UNARY("cvt." R ".s32.f64", r, l, "j", 40)                       \
    UNARY("cvt." R ".f32.f32", r, r, "i", 40)
F32_TO_INT("rni")
F32_TO_INT("rzi")
F32_TO_INT("rmi")
F32_TO_INT("rpi")
UNARY("cvt.rzi.s16.f16", h, h, "k", 60)
UNARY("cvt.rni.u8.f32", r, r, "i", 40)
UNARY("cvt.rni.s8.f32", r, r, "i", 40)
UNARY("cvt.rpi.ftz.s32.f32", r, r, "i", 40)

#define INT_TO_FLOAT(R)                                             \
    UNARY("cvt." R ".f32.s32", r, r, "u", 40)                       \
    UNARY("cvt." R ".f32.u64", r, l, "l", 40)                       \
    UNARY("cvt." R ".f64.s64", l, l, "l", 40)                       \
    UNARY("cvt." R ".f16.u32", h, r, "u", 40)
ROUNDED(INT_TO_FLOAT)
UNARY("cvt.sat.f32.f32", r, r, "f", 40)
UNARY("cvt.sat.s8.s32", r, r, "u", 40)
UNARY("cvt.sat.u16.s32", r, r, "u", 40)
UNARY("cvt.s8.s32", r, r, "u", 20)

UNARY("ex2.approx.f32", r, r, "e", 300)
UNARY("ex2.approx.ftz.f32", r, r, "e", 300)
UNARY("lg2.approx.f32", r, r, "p", 200)
UNARY("lg2.approx.ftz.f32", r, r, "p", 100)
UNARY("rcp.approx.f32", r, r, "p", 200)
UNARY("rcp.approx.ftz.f32", r, r, "f", 200)
UNARY("rsqrt.approx.f32", r, r, "p", 200)
UNARY("rsqrt.approx.ftz.f32", r, r, "f", 100)
UNARY("sqrt.approx.f32", r, r, "p", 200)
UNARY("sqrt.approx.ftz.f32", r, r, "f", 100)
UNARY("sin.approx.f32", r, r, "t", 200)
UNARY("cos.approx.f32", r, r, "t", 200)
UNARY("tanh.approx.f32", r, r, "t", 200)
UNARY("ex2.approx.f16x2", r, r, "h", 200)
UNARY("ex2.approx.ftz.bf16x2", r, r, "b", 200)
UNARY("tanh.approx.f16x2", r, r, "h", 200)
UNARY("tanh.approx.bf16x2", r, r, "b", 200)
BINARY("div.approx.f32", r, r, r, "ff", 150)
BINARY("div.full.f32", r, r, r, "ff", 150)

TERNARY("bfe.u32", r, r, r, r, "uss", 60)
TERNARY("bfe.s32", r, r, r, r, "uss", 60)
TERNARY("bfe.s64", l, l, r, r, "lss", 60)
QUATERNARY("bfi.b32", "uuss", 60)
UNARY("bfind.u32", r, r, "u", 30)
UNARY("bfind.s32", r, r, "u", 30)
UNARY("bfind.shiftamt.s64", r, l, "l", 30)
TERNARY("fns.b32", r, r, r, r, "uwz", 60)
BINARY("szext.clamp.s32", r, r, r, "us", 40)
BINARY("szext.wrap.u32", r, r, r, "us", 40)
BINARY("bmsk.clamp.b32", r, r, r, "ss", 60)
BINARY("bmsk.wrap.b32", r, r, r, "ss", 60)
TERNARY("shf.l.clamp.b32", r, r, r, r, "uus", 40)
TERNARY("shf.r.clamp.b32", r, r, r, r, "uus", 40)
TERNARY("shf.l.wrap.b32", r, r, r, r, "uus", 40)
TERNARY("shf.r.wrap.b32", r, r, r, r, "uus", 40)
BINARY("shl.b32", r, r, r, "us", 40)
BINARY("shr.u32", r, r, r, "us", 40)
BINARY("shr.s32", r, r, r, "us", 40)
BINARY("shr.s64", l, l, r, "ls", 40)
TERNARY("prmt.b32", r, r, r, r, "uuu", 80)
TERNARY("prmt.b32.f4e", r, r, r, r, "uuu", 16)
TERNARY("prmt.b32.b4e", r, r, r, r, "uuu", 16)
TERNARY("prmt.b32.rc8", r, r, r, r, "uuu", 16)
TERNARY("prmt.b32.ecl", r, r, r, r, "uuu", 16)
TERNARY("prmt.b32.ecr", r, r, r, r, "uuu", 16)
TERNARY("prmt.b32.rc16", r, r, r, r, "uuu", 16)
LOP3("96")
LOP3("1a")
LOP3("e8")
BINARY("mul.hi.s32", r, r, r, "uu", 20)
BINARY("mul.hi.u64", l, l, l, "ll", 20)
BINARY("mul.hi.s64", l, l, l, "ll", 20)
BINARY("mul.wide.s32", l, r, r, "uu", 20)
TERNARY("mad.hi.sat.s32", r, r, r, r, "uuu", 40)
TERNARY("sad.s32", r, r, r, r, "uuu", 20)
TERNARY("dp4a.s32.u32", r, r, r, r, "uuu", 30)
TERNARY("dp4a.u32.u32", r, r, r, r, "uuu", 30)
TERNARY("dp2a.lo.s32.s32", r, r, r, r, "uuu", 30)
TERNARY("dp2a.hi.u32.s32", r, r, r, r, "uuu", 30)

static void capture_scalars(FILE *file) {
    u64 *in, *out;
    CHECK(cudaMallocManaged(&in, 4096 * 4 * sizeof(u64)));
    CHECK(cudaMallocManaged(&out, 4096 * sizeof(u64)));
    for (const ScalarOp &op : scalar_ops()) {
        int arity = strlen(op.inputs);
        Random random{hash(op.name)};
        for (int i = 0; i < op.cases; i++)
            for (int j = 0; j < arity; j++) in[i * arity + j] = generate(op.inputs[j], i, random);
        op.kernel<<<(op.cases + 127) / 128, 128>>>(in, out, op.cases);
        CHECK(cudaGetLastError());
        CHECK(cudaDeviceSynchronize());
        for (int i = 0; i < op.cases; i++) {
            fprintf(file, "%s", op.name);
            for (int j = 0; j < arity; j++) fprintf(file, " %llx", (unsigned long long)in[i * arity + j]);
            fprintf(file, " = %llx\n", (unsigned long long)out[i]);
        }
    }
}

#include "capture_matrix.h"

int main(int argc, char **argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: %s OUTPUT\n", argv[0]);
        return 2;
    }
    FILE *file = fopen(argv[1], "w");
    if (!file) {
        perror(argv[1]);
        return 1;
    }
    cudaDeviceProp properties;
    CHECK(cudaGetDeviceProperties(&properties, 0));
    fprintf(file, "# %s, sm_%d%d\n", properties.name, properties.major, properties.minor);
    capture_scalars(file);
    capture_matrices(file);
    fclose(file);
    return 0;
}
