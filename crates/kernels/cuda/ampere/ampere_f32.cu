// ampere_f32: attention of f32 tensors for sm_80 and later, the same composition as ampere_fwd around GEMMs of three tf32 MMAs each
// (gemm_f32.cuh), whose results are as good as those of f32 arithmetic.
#include "score.cuh"

using Scalar = float;
using ScoreHook = ScoreModifiers<SOFTCAP, ALIBI, BIAS, BOOLEAN_MASK, SINKS>;

// What the parts ask of a kernel and this one has no use for.
constexpr int VALUE_PARTS = 1, Q_IN_REGS = 0, PRECISE_KEYS = 0, SPLIT_PRECISE_LOOP = 0, SPLIT_MASKED_LOOP = 0, SKIP_RESCALE = 0;

#include "gemm_f32.cuh"

#include "store_f32.cuh"

#include "run.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) ampere_f32(const __grid_constant__ SdpaParams p) {
  extern __shared__ __align__(128) unsigned char smem[];
  run_tiles(p, smem);
}
