// The matrix instructions of capture.cu: one warp (wgmma: four) and fixed inputs.
#pragma once

// The element types of the operands, by a letter:
// h f16, b bf16, t tf32, e e4m3, m e5m2, s s8, u u8, i s4, o u4, f f32, d f64, w s32.
inline int element_bits(char type) {
    switch (type) {
        case 'i': case 'o': return 4;
        case 'e': case 'm': case 's': case 'u': return 8;
        case 'h': case 'b': return 16;
        case 'd': return 64;
        default: return 32;
    }
}

// Rounds a small integer or a random value to the code of a type. Style 0: integers that every sum
// keeps exact. Style 1: values of like size. Style 2: values of sizes far apart.
inline u64 element(char type, int style, Random &random) {
    int small = (int)random.below(9) - 4;
    switch (type) {
        case 's': return style ? random.next() & 0xff : (u64)(uint8_t)small;
        case 'u': return style ? random.next() & 0xff : random.below(8);
        case 'i': case 'o': return random.next() & 0xf;
        case 'w': return style == 2 ? random.next() & 0xffffffff : (u64)(uint32_t)(small * 1000);
        default: break;
    }
    double x = small;
    if (style) {
        x = 1.0 + (double)(random.next() >> 12) / (1ull << 52);
        int spread = style == 1 ? 2 : (type == 'e' ? 6 : 9);
        for (int shift = (int)random.below(2 * spread + 1) - spread; shift; shift += shift > 0 ? -1 : 1)
            x = shift > 0 ? x * 2 : x / 2;
        if (random.next() & 1) x = -x;
    }
    if (type == 'd') return bits_of(x);
    if (type == 'f') return bits_of((float)x);
    // The other formats by truncation of the double: any code of about this size will do.
    u64 bits = bits_of(x);
    int exp_bits = type == 'h' || type == 'm' ? 5 : type == 'e' ? 4 : 8;
    int man_bits = type == 'h' || type == 't' ? 10 : type == 'b' ? 7 : type == 'e' ? 3 : 2;
    u64 sign = bits >> 63;
    if (x == 0) return 0;
    long long exp = (long long)(bits >> 52 & 0x7ff) - 1023 + (1 << (exp_bits - 1)) - 1;
    u64 code = sign << (exp_bits + man_bits) | (u64)exp << man_bits | (bits & 0xfffffffffffffull) >> (52 - man_bits);
    return type == 't' ? code << 13 : code;
}

// `count` elements packed into 32-bit words.
inline std::vector<uint32_t> packed(char type, int count, int style, Random &random) {
    int bits = element_bits(type);
    std::vector<uint32_t> words(count * bits / 32);
    for (int i = 0; i < count; i++) {
        u64 code = element(type, style, random);
        if (bits == 64) {
            words[2 * i] = (uint32_t)code;
            words[2 * i + 1] = (uint32_t)(code >> 32);
        } else {
            words[i * bits / 32] |= (uint32_t)code << (i * bits % 32);
        }
    }
    return words;
}

inline void print_words(FILE *file, const uint32_t *words, size_t count) {
    for (size_t i = 0; i < count; i++) fprintf(file, " %x", words[i]);
}

struct WarpOp {
    const char *name;
    void (*kernel)(const uint32_t *, uint32_t *);
    char a, b, c;       // element types
    int na, nb, nc, nd; // 32-bit words per lane
    int styles;
};

static std::vector<WarpOp> &warp_ops() {
    static std::vector<WarpOp> ops;
    return ops;
}

struct WarpRegistered {
    WarpRegistered(WarpOp op) { warp_ops().push_back(op); }
};

// Word `w` of operand registers starting at `base`, as this lane holds it.
#define IN(w) in[(w) * 32 + threadIdx.x]
#define IN64(w) ((u64)IN(w) | (u64)IN((w) + 1) << 32)
#define OUT(w) out[(w) * 32 + threadIdx.x]

#define MMA(NAME, SIGNATURE, A, B, C, STYLES) MMA_##SIGNATURE(JOIN(mma_, __COUNTER__), NAME, A, B, C, STYLES)
#define MMA_KERNEL(ID, NAME, A, B, C, NA, NB, NC, ND, STYLES, BODY)                         \
    __global__ void ID(const uint32_t *in, uint32_t *out) { BODY }                          \
    static WarpRegistered JOIN(ID, _)({NAME, ID, A, B, C, NA, NB, NC, ND, STYLES});

#define MMA_4_2_4(ID, NAME, A, B, C, S) MMA_KERNEL(ID, NAME, A, B, C, 4, 2, 4, 4, S,         \
    uint32_t d0; uint32_t d1; uint32_t d2; uint32_t d3;                                      \
    asm volatile(NAME " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"           \
        : "=r"(d0), "=r"(d1), "=r"(d2), "=r"(d3)                                             \
        : "r"(IN(0)), "r"(IN(1)), "r"(IN(2)), "r"(IN(3)), "r"(IN(4)), "r"(IN(5)),            \
          "r"(IN(6)), "r"(IN(7)), "r"(IN(8)), "r"(IN(9)));                                   \
    OUT(0) = d0; OUT(1) = d1; OUT(2) = d2; OUT(3) = d3;)
#define MMA_4_2_2(ID, NAME, A, B, C, S) MMA_KERNEL(ID, NAME, A, B, C, 4, 2, 2, 2, S,         \
    uint32_t d0; uint32_t d1;                                                                \
    asm volatile(NAME " {%0,%1}, {%2,%3,%4,%5}, {%6,%7}, {%8,%9};"                           \
        : "=r"(d0), "=r"(d1)                                                                 \
        : "r"(IN(0)), "r"(IN(1)), "r"(IN(2)), "r"(IN(3)), "r"(IN(4)), "r"(IN(5)),            \
          "r"(IN(6)), "r"(IN(7)));                                                           \
    OUT(0) = d0; OUT(1) = d1;)
#define MMA_2_1_4(ID, NAME, A, B, C, S) MMA_KERNEL(ID, NAME, A, B, C, 2, 1, 4, 4, S,         \
    uint32_t d0; uint32_t d1; uint32_t d2; uint32_t d3;                                      \
    asm volatile(NAME " {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%8,%9,%10};"                       \
        : "=r"(d0), "=r"(d1), "=r"(d2), "=r"(d3)                                             \
        : "r"(IN(0)), "r"(IN(1)), "r"(IN(2)), "r"(IN(3)), "r"(IN(4)), "r"(IN(5)), "r"(IN(6))); \
    OUT(0) = d0; OUT(1) = d1; OUT(2) = d2; OUT(3) = d3;)
#define MMA_2_1_2(ID, NAME, A, B, C, S) MMA_KERNEL(ID, NAME, A, B, C, 2, 1, 2, 2, S,         \
    uint32_t d0; uint32_t d1;                                                                \
    asm volatile(NAME " {%0,%1}, {%2,%3}, {%4}, {%5,%6};"                                    \
        : "=r"(d0), "=r"(d1)                                                                 \
        : "r"(IN(0)), "r"(IN(1)), "r"(IN(2)), "r"(IN(3)), "r"(IN(4)));                       \
    OUT(0) = d0; OUT(1) = d1;)
#define MMA_1_1_2(ID, NAME, A, B, C, S) MMA_KERNEL(ID, NAME, A, B, C, 1, 1, 2, 2, S,         \
    uint32_t d0; uint32_t d1;                                                                \
    asm volatile(NAME " {%0,%1}, {%2}, {%3}, {%4,%5};"                                       \
        : "=r"(d0), "=r"(d1) : "r"(IN(0)), "r"(IN(1)), "r"(IN(2)), "r"(IN(3)));              \
    OUT(0) = d0; OUT(1) = d1;)
#define MMA_QUAD4(ID, NAME, A, B, C, S) MMA_KERNEL(ID, NAME, A, B, C, 2, 2, 4, 4, S,         \
    uint32_t d0; uint32_t d1; uint32_t d2; uint32_t d3;                                      \
    asm volatile(NAME " {%0,%1,%2,%3}, {%4,%5}, {%6,%7}, {%8,%9,%10,%11};"                   \
        : "=r"(d0), "=r"(d1), "=r"(d2), "=r"(d3)                                             \
        : "r"(IN(0)), "r"(IN(1)), "r"(IN(2)), "r"(IN(3)), "r"(IN(4)), "r"(IN(5)),            \
          "r"(IN(6)), "r"(IN(7)));                                                           \
    OUT(0) = d0; OUT(1) = d1; OUT(2) = d2; OUT(3) = d3;)
#define MMA_QUAD8(ID, NAME, A, B, C, S) MMA_KERNEL(ID, NAME, A, B, C, 2, 2, 8, 8, S,         \
    uint32_t d[8];                                                                           \
    asm volatile(NAME " {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9}, {%10,%11},"                      \
                      " {%12,%13,%14,%15,%16,%17,%18,%19};"                                  \
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]), "=r"(d[4]), "=r"(d[5]), "=r"(d[6]), "=r"(d[7]) \
        : "r"(IN(0)), "r"(IN(1)), "r"(IN(2)), "r"(IN(3)), "r"(IN(4)), "r"(IN(5)), "r"(IN(6)), "r"(IN(7)), \
          "r"(IN(8)), "r"(IN(9)), "r"(IN(10)), "r"(IN(11)));                                 \
    for (int i = 0; i < 8; i++) OUT(i) = d[i];)

#define PUT64(w, x) OUT(w) = (uint32_t)(x); OUT((w) + 1) = (uint32_t)((x) >> 32);
#define MMA_D1_1_2(ID, NAME, A, B, C, S) MMA_KERNEL(ID, NAME, A, B, C, 2, 2, 4, 4, S,        \
    u64 d0; u64 d1;                                                                          \
    asm volatile(NAME " {%0,%1}, {%2}, {%3}, {%4,%5};"                                       \
        : "=l"(d0), "=l"(d1) : "l"(IN64(0)), "l"(IN64(2)), "l"(IN64(4)), "l"(IN64(6)));      \
    PUT64(0, d0) PUT64(2, d1))
#define MMA_D2_1_4(ID, NAME, A, B, C, S) MMA_KERNEL(ID, NAME, A, B, C, 4, 2, 8, 8, S,        \
    u64 d0; u64 d1; u64 d2; u64 d3;                                                          \
    asm volatile(NAME " {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%8,%9,%10};"                       \
        : "=l"(d0), "=l"(d1), "=l"(d2), "=l"(d3)                                             \
        : "l"(IN64(0)), "l"(IN64(2)), "l"(IN64(4)), "l"(IN64(6)), "l"(IN64(8)), "l"(IN64(10)), "l"(IN64(12))); \
    PUT64(0, d0) PUT64(2, d1) PUT64(4, d2) PUT64(6, d3))
#define MMA_D4_2_4(ID, NAME, A, B, C, S) MMA_KERNEL(ID, NAME, A, B, C, 8, 4, 8, 8, S,        \
    u64 d0; u64 d1; u64 d2; u64 d3;                                                          \
    asm volatile(NAME " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"           \
        : "=l"(d0), "=l"(d1), "=l"(d2), "=l"(d3)                                             \
        : "l"(IN64(0)), "l"(IN64(2)), "l"(IN64(4)), "l"(IN64(6)), "l"(IN64(8)), "l"(IN64(10)), \
          "l"(IN64(12)), "l"(IN64(14)), "l"(IN64(16)), "l"(IN64(18)));                       \
    PUT64(0, d0) PUT64(2, d1) PUT64(4, d2) PUT64(6, d3))
#define MMA_D8_4_4(ID, NAME, A, B, C, S) MMA_KERNEL(ID, NAME, A, B, C, 16, 8, 8, 8, S,       \
    u64 d0; u64 d1; u64 d2; u64 d3;                                                          \
    asm volatile(NAME " {%0,%1,%2,%3}, {%4,%5,%6,%7,%8,%9,%10,%11}, {%12,%13,%14,%15}, {%16,%17,%18,%19};" \
        : "=l"(d0), "=l"(d1), "=l"(d2), "=l"(d3)                                             \
        : "l"(IN64(0)), "l"(IN64(2)), "l"(IN64(4)), "l"(IN64(6)), "l"(IN64(8)), "l"(IN64(10)), \
          "l"(IN64(12)), "l"(IN64(14)), "l"(IN64(16)), "l"(IN64(18)), "l"(IN64(20)), "l"(IN64(22)), \
          "l"(IN64(24)), "l"(IN64(26)), "l"(IN64(28)), "l"(IN64(30)));                       \
    PUT64(0, d0) PUT64(2, d1) PUT64(4, d2) PUT64(6, d3))

#define M "mma.sync.aligned."
MMA(M "m16n8k16.row.col.f32.f16.f16.f32", 4_2_4, 'h', 'h', 'f', 3)
MMA(M "m16n8k16.row.col.f16.f16.f16.f16", 4_2_2, 'h', 'h', 'h', 3)
MMA(M "m16n8k8.row.col.f32.f16.f16.f32", 2_1_4, 'h', 'h', 'f', 3)
MMA(M "m16n8k8.row.col.f16.f16.f16.f16", 2_1_2, 'h', 'h', 'h', 3)
MMA(M "m16n8k16.row.col.f32.bf16.bf16.f32", 4_2_4, 'b', 'b', 'f', 3)
MMA(M "m16n8k8.row.col.f32.bf16.bf16.f32", 2_1_4, 'b', 'b', 'f', 3)
MMA(M "m16n8k8.row.col.f32.tf32.tf32.f32", 4_2_4, 't', 't', 'f', 3)
MMA(M "m16n8k4.row.col.f32.tf32.tf32.f32", 2_1_4, 't', 't', 'f', 3)
MMA(M "m16n8k32.row.col.f32.e4m3.e4m3.f32", 4_2_4, 'e', 'e', 'f', 3)
MMA(M "m16n8k32.row.col.f32.e5m2.e5m2.f32", 4_2_4, 'm', 'm', 'f', 2)
MMA(M "m16n8k32.row.col.f32.e4m3.e5m2.f32", 4_2_4, 'e', 'm', 'f', 2)
MMA(M "m16n8k32.row.col.f16.e4m3.e4m3.f16", 4_2_2, 'e', 'e', 'h', 2)
MMA(M "m16n8k16.row.col.f32.e4m3.e4m3.f32", 2_1_4, 'e', 'e', 'f', 2)
MMA(M "m16n8k16.row.col.f16.e5m2.e5m2.f16", 2_1_2, 'm', 'm', 'h', 2)
MMA(M "m16n8k32.row.col.s32.s8.s8.s32", 4_2_4, 's', 's', 'w', 3)
MMA(M "m16n8k32.row.col.satfinite.s32.s8.u8.s32", 4_2_4, 's', 'u', 'w', 3)
MMA(M "m16n8k16.row.col.s32.u8.s8.s32", 2_1_4, 'u', 's', 'w', 2)
MMA(M "m8n8k16.row.col.s32.s8.s8.s32", 1_1_2, 's', 's', 'w', 2)
MMA(M "m8n8k32.row.col.s32.s4.u4.s32", 1_1_2, 'i', 'o', 'w', 2)
MMA(M "m16n8k32.row.col.s32.u4.s4.s32", 2_1_4, 'o', 'i', 'w', 2)
MMA(M "m16n8k64.row.col.satfinite.s32.s4.s4.s32", 4_2_4, 'i', 'i', 'w', 3)
MMA(M "m8n8k4.row.col.f16.f16.f16.f16", QUAD4, 'h', 'h', 'h', 2)
MMA(M "m8n8k4.col.row.f16.f16.f16.f16", QUAD4, 'h', 'h', 'h', 1)
MMA(M "m8n8k4.row.col.f32.f16.f16.f32", QUAD8, 'h', 'h', 'f', 2)
MMA(M "m8n8k4.col.row.f32.f16.f16.f32", QUAD8, 'h', 'h', 'f', 1)
MMA(M "m8n8k4.row.row.f32.f16.f16.f32", QUAD8, 'h', 'h', 'f', 1)
MMA(M "m8n8k4.row.col.f64.f64.f64.f64", D1_1_2, 'd', 'd', 'd', 3)
MMA(M "m8n8k4.row.col.rz.f64.f64.f64.f64", D1_1_2, 'd', 'd', 'd', 2)
MMA(M "m16n8k4.row.col.f64.f64.f64.f64", D2_1_4, 'd', 'd', 'd', 2)
MMA(M "m16n8k8.row.col.f64.f64.f64.f64", D4_2_4, 'd', 'd', 'd', 2)
MMA(M "m16n8k16.row.col.f64.f64.f64.f64", D8_4_4, 'd', 'd', 'd', 2)
#undef M

static void capture_mma(FILE *file, uint32_t *in, uint32_t *out) {
    for (const WarpOp &op : warp_ops()) {
        for (int style = 0; style < op.styles; style++) {
            Random random{hash(op.name) + style};
            int counts[3] = {op.na, op.nb, op.nc};
            char types[3] = {op.a, op.b, op.c};
            size_t total = 0;
            for (int operand = 0; operand < 3; operand++) {
                int bits = element_bits(types[operand]);
                // Lane by lane, then turned to register by register.
                for (int lane = 0; lane < 32; lane++) {
                    auto words = packed(types[operand], counts[operand] * 32 / bits, style, random);
                    for (int w = 0; w < counts[operand]; w++) in[(total + w) * 32 + lane] = words[w];
                }
                total += counts[operand];
            }
            op.kernel<<<1, 32>>>(in, out);
            CHECK(cudaGetLastError());
            CHECK(cudaDeviceSynchronize());
            fprintf(file, "%s %x", op.name, style);
            print_words(file, in, total * 32);
            fprintf(file, " =");
            print_words(file, out, op.nd * 32);
            fprintf(file, "\n");
        }
    }
}

// ---------------------------------------------------------------- wmma: memory to memory

// How many registers a fragment has and their list as an asm operand.
#define REGS_2(x) "{" x "0," x "1}"
#define REGS_1(x) "{" x "0}"
#define REGS_4(x) "{" x "0," x "1," x "2," x "3}"
#define REGS_8(x) "{" x "0," x "1," x "2," x "3," x "4," x "5," x "6," x "7}"

struct WmmaOp {
    const char *name;
    void (*kernel)(const uint32_t *, const uint32_t *, const uint32_t *, uint32_t *);
    int m, n, k;
    char a, c;
};

static std::vector<WmmaOp> &wmma_ops() {
    static std::vector<WmmaOp> ops;
    return ops;
}

struct WmmaRegistered {
    WmmaRegistered(WmmaOp op) { wmma_ops().push_back(op); }
};

// TYPE, ACC: PTX names; NA, NB, NC: register counts; REG, CREG: register classes; MID: the middle of
// the wmma.mma opcode behind the shape; LA, LB: layouts of A and B. C is loaded row-major and D stored
// column-major.
#define WMMA_(ID, M_, N_, K_, LA, LB, TYPE, ACC, TC, CC, NA, NB, NC, CREG, MID)                     \
    __global__ void ID(const uint32_t *a, const uint32_t *b, const uint32_t *c, uint32_t *d) {      \
        asm volatile("{.reg .b32 a<8>; .reg .b32 b<8>; .reg ." CREG " c<8>; .reg ." CREG " d<8>;\n" \
            "wmma.load.a.sync.aligned." LA ".m" #M_ "n" #N_ "k" #K_ ".global." TYPE " " REGS_##NA("a") ", [%0];\n" \
            "wmma.load.b.sync.aligned." LB ".m" #M_ "n" #N_ "k" #K_ ".global." TYPE " " REGS_##NB("b") ", [%1];\n" \
            "wmma.load.c.sync.aligned.row.m" #M_ "n" #N_ "k" #K_ ".global." ACC " " REGS_##NC("c") ", [%2];\n" \
            "wmma.mma.sync.aligned." LA "." LB ".m" #M_ "n" #N_ "k" #K_ "." MID " " REGS_##NC("d") ", " \
            REGS_##NA("a") ", " REGS_##NB("b") ", " REGS_##NC("c") ";\n"                            \
            "wmma.store.d.sync.aligned.col.m" #M_ "n" #N_ "k" #K_ ".global." ACC " [%3], " REGS_##NC("d") ";}" \
            :: "l"(a), "l"(b), "l"(c), "l"(d) : "memory");                                          \
    }                                                                                               \
    static WmmaRegistered JOIN(ID, _)({"wmma.m" #M_ "n" #N_ "k" #K_ "." LA "." LB "." TYPE "." ACC, ID, M_, N_, K_, TC, CC});
#define WMMA(...) WMMA_(JOIN(wmma_, __COUNTER__), __VA_ARGS__)

#define WMMA_SHAPES(LA, LB)                                                                          \
    WMMA(16, 16, 16, LA, LB, "f16", "f32", 'h', 'f', 8, 8, 8, "f32", "f32.f32")                      \
    WMMA(32, 8, 16, LA, LB, "f16", "f32", 'h', 'f', 8, 8, 8, "f32", "f32.f32")                       \
    WMMA(8, 32, 16, LA, LB, "f16", "f32", 'h', 'f', 8, 8, 8, "f32", "f32.f32")                       \
    WMMA(16, 16, 16, LA, LB, "f16", "f16", 'h', 'h', 8, 8, 4, "b32", "f16.f16")                      \
    WMMA(16, 16, 16, LA, LB, "bf16", "f32", 'b', 'f', 4, 4, 8, "f32", "f32.bf16.bf16.f32")           \
    WMMA(32, 8, 16, LA, LB, "bf16", "f32", 'b', 'f', 8, 2, 8, "f32", "f32.bf16.bf16.f32")            \
    WMMA(8, 32, 16, LA, LB, "bf16", "f32", 'b', 'f', 2, 8, 8, "f32", "f32.bf16.bf16.f32")            \
    WMMA(16, 16, 16, LA, LB, "s8", "s32", 's', 'w', 2, 2, 8, "b32", "s32.s8.s8.s32")                 \
    WMMA(32, 8, 16, LA, LB, "u8", "s32", 'u', 'w', 4, 1, 8, "b32", "s32.u8.u8.s32")                  \
    WMMA(8, 32, 16, LA, LB, "s8", "s32", 's', 'w', 1, 4, 8, "b32", "s32.s8.s8.s32")                  \
    WMMA(16, 16, 8, LA, LB, "tf32", "f32", 't', 'f', 4, 4, 8, "f32", "f32.tf32.tf32.f32")
WMMA_SHAPES("row", "col")
WMMA_SHAPES("col", "row")

static void capture_wmma(FILE *file, uint32_t *in, uint32_t *out) {
    for (const WmmaOp &op : wmma_ops()) {
        Random random{hash(op.name)};
        auto a = packed(op.a, op.m * op.k, 0, random), b = packed(op.a, op.k * op.n, 0, random);
        auto c = packed(op.c, op.m * op.n, 0, random);
        uint32_t *pa = in, *pb = in + 2048, *pc = in + 4096;
        std::copy(a.begin(), a.end(), pa);
        std::copy(b.begin(), b.end(), pb);
        std::copy(c.begin(), c.end(), pc);
        op.kernel<<<1, 32>>>(pa, pb, pc, out);
        CHECK(cudaGetLastError());
        CHECK(cudaDeviceSynchronize());
        fprintf(file, "%s", op.name);
        print_words(file, pa, a.size());
        print_words(file, pb, b.size());
        print_words(file, pc, c.size());
        fprintf(file, " =");
        print_words(file, out, c.size());
        fprintf(file, "\n");
    }
}

// ---------------------------------------------------------------- ldmatrix, stmatrix, movmatrix

// Row r of the matrices lies at 16 r bytes; lane l holds the address of row l.
#define TRANSFER(NUM, COUNT, TRANS, TRANS_NAME, LIST)                                               \
    __global__ void JOIN(ldmatrix_, JOIN(NUM, TRANS))(const uint32_t *in, uint32_t *out) {          \
        __shared__ __align__(16) uint32_t memory[128];                                              \
        for (int i = threadIdx.x; i < 128; i += 32) memory[i] = in[i];                              \
        __syncwarp();                                                                               \
        uint32_t d[4] = {};                                                                         \
        uint32_t address = (uint32_t)__cvta_generic_to_shared(memory) + threadIdx.x * 16;           \
        asm volatile("{.reg .b32 r<4>;\nldmatrix.sync.aligned.m8n8." #NUM TRANS_NAME ".shared.b16 " LIST ", [%4];\n" \
            "mov.b32 %0, r0;\n"                                                                     \
            COUNT "}"                                                                               \
            : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(address) : "memory");            \
        for (int i = 0; i < 4; i++) OUT(i) = d[i];                                                  \
    }                                                                                               \
    __global__ void JOIN(stmatrix_, JOIN(NUM, TRANS))(const uint32_t *in, uint32_t *out) {          \
        __shared__ __align__(16) uint32_t memory[128];                                              \
        for (int i = threadIdx.x; i < 128; i += 32) memory[i] = 0;                                  \
        __syncwarp();                                                                               \
        uint32_t address = (uint32_t)__cvta_generic_to_shared(memory) + threadIdx.x * 16;           \
        asm volatile("{.reg .b32 r<4>;\nmov.b32 r0, %0;\nmov.b32 r1, %1;\nmov.b32 r2, %2;\nmov.b32 r3, %3;\n" \
            "stmatrix.sync.aligned.m8n8." #NUM TRANS_NAME ".shared.b16 [%4], " LIST ";}"            \
            :: "r"(IN(0)), "r"(IN(1)), "r"(IN(2)), "r"(IN(3)), "r"(address) : "memory");            \
        __syncwarp();                                                                               \
        for (int i = threadIdx.x; i < 128; i += 32) out[i] = memory[i];                             \
    }
#define KEEP_1 ""
#define KEEP_2 "mov.b32 %1, r1;\n"
#define KEEP_4 "mov.b32 %1, r1;\nmov.b32 %2, r2;\nmov.b32 %3, r3;\n"
TRANSFER(x1, KEEP_1, _plain, "", "{r0}")
TRANSFER(x2, KEEP_2, _plain, "", "{r0,r1}")
TRANSFER(x4, KEEP_4, _plain, "", "{r0,r1,r2,r3}")
TRANSFER(x1, KEEP_1, _trans, ".trans", "{r0}")
TRANSFER(x2, KEEP_2, _trans, ".trans", "{r0,r1}")
TRANSFER(x4, KEEP_4, _trans, ".trans", "{r0,r1,r2,r3}")

__global__ void movmatrix(const uint32_t *in, uint32_t *out) {
    uint32_t d;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(IN(0)));
    OUT(0) = d;
    for (int i = 1; i < 4; i++) OUT(i) = 0;
}

static void capture_transfers(FILE *file, uint32_t *in, uint32_t *out) {
    struct { const char *name; void (*kernel)(const uint32_t *, uint32_t *); } ops[] = {
        {"ldmatrix.x1", ldmatrix_x1_plain}, {"ldmatrix.x2", ldmatrix_x2_plain},
        {"ldmatrix.x4", ldmatrix_x4_plain}, {"ldmatrix.x1.trans", ldmatrix_x1_trans},
        {"ldmatrix.x2.trans", ldmatrix_x2_trans}, {"ldmatrix.x4.trans", ldmatrix_x4_trans},
        {"stmatrix.x1", stmatrix_x1_plain}, {"stmatrix.x2", stmatrix_x2_plain},
        {"stmatrix.x4", stmatrix_x4_plain}, {"stmatrix.x1.trans", stmatrix_x1_trans},
        {"stmatrix.x2.trans", stmatrix_x2_trans}, {"stmatrix.x4.trans", stmatrix_x4_trans},
        {"movmatrix", movmatrix},
    };
    for (auto &op : ops) {
        Random random{hash(op.name)};
        for (int i = 0; i < 128; i++) in[i] = (uint32_t)random.next();
        op.kernel<<<1, 32>>>(in, out);
        CHECK(cudaGetLastError());
        CHECK(cudaDeviceSynchronize());
        fprintf(file, "%s", op.name);
        print_words(file, in, 128);
        fprintf(file, " =");
        print_words(file, out, 128);
        fprintf(file, "\n");
    }
}

// ---------------------------------------------------------------- wgmma

// Shared memory is filled by a formula, so that a line need not list it: half `i` is the f16 of
// ((i * 2654435761 mod 2^32) >> 24) % 5 - 2.
constexpr int WGMMA_HALVES = 8192;
constexpr int WGMMA_B_START = 8192;

__device__ inline uint16_t wgmma_half(uint32_t i) {
    const uint16_t values[5] = {0xc000, 0xbc00, 0x0000, 0x3c00, 0x4000};
    return values[((i * 2654435761u) >> 24) % 5];
}

#define ACC8(b) "+f"(d[b]), "+f"(d[b + 1]), "+f"(d[b + 2]), "+f"(d[b + 3]), "+f"(d[b + 4]), "+f"(d[b + 5]), \
        "+f"(d[b + 6]), "+f"(d[b + 7])

template <int TransA, int TransB>
__global__ void wgmma_kernel(u64 a_desc, u64 b_desc, uint32_t *out) {
    __shared__ __align__(1024) uint16_t memory[WGMMA_HALVES];
    for (int i = threadIdx.x; i < WGMMA_HALVES; i += 128) memory[i] = wgmma_half(i);
    asm volatile("fence.proxy.async;" ::: "memory");
    __syncthreads();
    u64 base = ((u64)__cvta_generic_to_shared(memory) & 0x3ffff) >> 4;
    float d[32];
    for (int i = 0; i < 32; i++) d[i] = 0;
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, 1, 1, 1, %34, %35;"
                 : ACC8(0), ACC8(8), ACC8(16), ACC8(24)
                 : "l"(a_desc + base), "l"(b_desc + base), "n"(TransA), "n"(TransB));
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
    // Warp by warp, register by register, lane by lane.
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = 0; i < 32; i++) out[(warp * 32 + i) * 32 + lane] = __float_as_uint(d[i]);
}

static u64 wgmma_descriptor(u64 start, bool mn_major, int span_bytes) {
    // The matrix (64 by 16) densely packed in the canonical layouts of the PTX ISA.
    u64 swizzle = span_bytes == 128 ? 1 : span_bytes == 64 ? 2 : span_bytes == 32 ? 3 : 0;
    u64 leading, stride;
    if (!mn_major) {
        leading = span_bytes == 16 ? 128 : 16;
        stride = span_bytes == 16 ? 256 : 8 * span_bytes;
    } else if (span_bytes == 16) {
        stride = 128;
        leading = 1024;
    } else {
        stride = 8 * span_bytes;
        leading = 16 * span_bytes;
    }
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | swizzle << 62;
}

static void capture_wgmma(FILE *file, uint32_t *out) {
    using Kernel = void (*)(u64, u64, uint32_t *);
    const Kernel kernels[2][2] = {{wgmma_kernel<0, 0>, wgmma_kernel<0, 1>}, {wgmma_kernel<1, 0>, wgmma_kernel<1, 1>}};
    for (int span : {16, 32, 64, 128}) {
        for (int trans_a = 0; trans_a < 2; trans_a++) {
            for (int trans_b = 0; trans_b < 2; trans_b++) {
                if (trans_a != trans_b && span != 128) continue;
                u64 a = wgmma_descriptor(0, trans_a, span), b = wgmma_descriptor(WGMMA_B_START, trans_b, span);
                kernels[trans_a][trans_b]<<<1, 128>>>(a, b, out);
                CHECK(cudaGetLastError());
                CHECK(cudaDeviceSynchronize());
                fprintf(file, "wgmma.m64n64k16.f32.f16.f16 %llx %llx %x %x =", a, b, trans_a, trans_b);
                print_words(file, out, 4 * 32 * 32);
                fprintf(file, "\n");
            }
        }
    }
}

static void capture_matrices(FILE *file) {
    uint32_t *in, *out;
    CHECK(cudaMallocManaged(&in, 65536));
    CHECK(cudaMallocManaged(&out, 65536));
    capture_mma(file, in, out);
    capture_wmma(file, in, out);
    capture_transfers(file, in, out);
    capture_wgmma(file, out);
}
