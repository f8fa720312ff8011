// Fixed inputs for capture.cu: edges of each type, and seeded random values.
#pragma once
#include <cstdint>
#include <cstring>

using u64 = unsigned long long;

// SplitMix64 (Steele, Lea and Flood, 2014).
struct Random {
    u64 state;
    u64 next() {
        u64 z = (state += 0x9e3779b97f4a7c15ull);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        return z ^ (z >> 31);
    }
    u64 below(u64 bound) { return next() % bound; }
};

// FNV-1a, so that each instruction has inputs of its own.
inline u64 hash(const char *name) {
    u64 h = 0xcbf29ce484222325ull;
    for (; *name; name++) h = (h ^ (unsigned char)*name) * 0x100000001b3ull;
    return h;
}

// A code of a format, with exponents crowded together at the edges and in the middle.
inline u64 float_code(int exp_bits, int man_bits, Random &random, bool specials) {
    u64 fields = (1ull << exp_bits) - 1, field, fraction;
    switch (random.below(specials ? 6 : 4)) {
        case 0: field = random.below(3); break;
        case 1: field = fields - 1 - random.below(3); break;
        case 2: field = fields / 2 + random.below(8) - 4; break;
        case 3: field = random.below(fields); break;
        case 4: field = fields; break;
        default: field = 0; break;
    }
    switch (random.below(4)) {
        case 0: fraction = random.below(4) & ((1ull << man_bits) - 1); break;
        case 1: fraction = (1ull << man_bits) - 1 - random.below(3); break;
        case 2: fraction = 0; break;
        default: fraction = random.next() & ((1ull << man_bits) - 1); break;
    }
    return (random.next() & 1) << (exp_bits + man_bits) | field << man_bits | fraction;
}

inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

inline u64 bits_of(double x) {
    u64 bits;
    memcpy(&bits, &x, 8);
    return bits;
}

// A single whose fraction lies at, just below or just above a tie of a format with `kept` fraction
// bits and whose exponent lies within that format's range and a little outside.
inline uint32_t near_tie(int low_exp, int high_exp, int kept, Random &random) {
    int exp = low_exp + (int)random.below(high_exp - low_exp + 1);
    uint32_t fraction = (uint32_t)(random.next() & 0x7fffff);
    int cut = 23 - kept;
    if (exp < low_exp + kept + 3) cut += (int)random.below(kept + 2);
    if (cut > 23) cut = 23;
    uint32_t low = 1u << (cut - 1);
    switch (random.below(4)) {
        case 0: fraction = (fraction & ~((1u << cut) - 1)) | low; break;
        case 1: fraction = (fraction & ~((1u << cut) - 1)) | (low - 1); break;
        case 2: fraction = (fraction & ~((1u << cut) - 1)) | (low + (cut > 1)); break;
        default: break;
    }
    return (uint32_t)(random.next() & 1) << 31 | (uint32_t)(exp + 127) << 23 | (fraction & 0x7fffff);
}

inline u64 generate(char kind, int index, Random &random) {
    static const uint32_t f32_edges[] = {0,          0x80000000, 1,          0x807fffff, 0x00800000, 0x3f800000,
                                         0xbf800000, 0x7f7fffff, 0x7f800000, 0xff800000, 0x7fc00000, 0x7f800001};
    switch (kind) {
        case 'f': return random.below(6) ? float_code(8, 23, random, true) : f32_edges[random.below(12)];
        case 'd': return float_code(11, 52, random, true);
        case 'h': return float_code(5, 10, random, true) | float_code(5, 10, random, true) << 16;
        case 'b': return float_code(8, 7, random, true) | float_code(8, 7, random, true) << 16;
        case '8': return (u64)(index & 255) | (u64)(255 - (index & 255)) << 8;
        // Singles around the ties of f16 and bf16.
        case 'n':
            if (random.below(12) == 0) return f32_edges[random.below(12)];
            return random.below(2) ? near_tie(-26, 17, 10, random) : near_tie(-126, 127, 7, random);
        // Singles around the ties of e4m3 and e5m2.
        case 'v':
            if (random.below(16) == 0) return f32_edges[random.below(12)];
            return random.below(2) ? near_tie(-11, 10, 3, random) : near_tie(-18, 17, 2, random);
        // Doubles around the ties of f32 and f16.
        case 'm': {
            u64 fraction = random.next() >> 12;
            int cut = random.below(2) ? 29 : 42;
            if (random.below(2)) fraction = (fraction & ~((1ull << cut) - 1)) | 1ull << (cut - 1);
            int exp = cut == 29 ? (int)random.below(280) - 150 : (int)random.below(44) - 27;
            if (random.below(16) == 0) return float_code(11, 52, random, true);
            return (random.next() & 1) << 63 | (u64)(exp + 1023) << 52 | (fraction & 0xfffffffffffffull);
        }
        // Singles, doubles and halves that become integers: small, with halves, and out of range.
        case 'i': {
            if (random.below(5) == 0) return generate('f', index, random);
            if (random.below(3) == 0) return bits_of((float)((int)random.below(64) - 32) / 4.0f);
            int exp = (int)random.below(70) - 3;
            return (random.next() & 1) << 31 | (u64)(exp + 127) << 23 | (random.next() & 0x7fffff);
        }
        case 'j': {
            if (random.below(5) == 0) return generate('d', index, random);
            if (random.below(3) == 0) return bits_of((double)((int)random.below(64) - 32) / 4.0);
            int exp = (int)random.below(70) - 3;
            return (random.next() & 1) << 63 | (u64)(exp + 1023) << 52 | (random.next() >> 12);
        }
        case 'k': return float_code(5, 10, random, true);
        case 'e':
            if (random.below(10) == 0) return f32_edges[random.below(12)];
            return bits_of((float)((int)random.below(1 << 22) - (1 << 21)) / 13000.0f);
        case 'p':
            if (random.below(10) == 0) return f32_edges[random.below(12)];
            return random.below(3) ? random.below(0x7f800000) : bits_of(0.4f + (float)random.below(1 << 20) / 600000.0f);
        case 't':
            if (random.below(10) == 0) return f32_edges[random.below(12)];
            if (random.below(8) == 0) return float_code(8, 23, random, false) & 0xbfffffff;
            return bits_of((float)((int)random.below(1 << 22) - (1 << 21)) / (random.below(2) ? 340000.0f : 7000.0f));
        case 'l': return random.next() >> random.below(64);
        case 's': return random.below(10) ? random.below(70) : random.next() & 0xffffffff;
        case 'w': return random.below(32);
        case 'z': return (uint32_t)((int)random.below(20) - 10);
        default: return (random.next() >> random.below(40)) & 0xffffffff;
    }
}
