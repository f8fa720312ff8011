// The score hook: the one place where scores change between QKᵀ and the softmax.
//
// A hook is a type with these members, of which a kernel names one as `ScoreHook`:
//   ACTIVE                       whether it changes scores at all; otherwise nothing of it is compiled
//   ScoreHook(p, batch, head)    made for one head
//   hook(score, row, key)        the score that the softmax sees instead of the raw product (softcap, bias, ALiBi); masks come after it
//   scale(p), scale_log2(p)      what turns such a score into natural and log2 units
//   begin(p, head, state)        the state of rows that have seen no key yet (a sink counts as one)
#pragma once
#include "params.h"
#include "softmax.cuh"

// Scores as they are. The scale costs nothing: the softmax multiplies it into the exponent.
struct PlainScores {
  static constexpr bool ACTIVE = false;

  __device__ __forceinline__ PlainScores(const SdpaParams&, int, int) {}
  __device__ __forceinline__ float operator()(float score, int, int) const { return score; }
  static __device__ __forceinline__ float scale(const SdpaParams& p) { return p.scale; }
  static __device__ __forceinline__ float scale_log2(const SdpaParams& p) { return p.scale_log2; }
  static __device__ __forceinline__ void begin(const SdpaParams&, int, RowPair& state) { row_pair_reset(state); }
};

// The hook on a thread's accumulators of two rows (layout: mma.cuh), of which the first is the score of key `column`.
template <int N, typename Hook>
__device__ __forceinline__ void apply_hook(const Hook& hook, float (&s)[N / 2], const int (&rows)[2], int column) {
  if constexpr (Hook::ACTIVE) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) s[i] = hook(s[i], rows[i / 2 % 2], column + i / 4 * 8 + i % 2);
  }
}
