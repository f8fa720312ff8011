//! The problems that simulator and GPU both run: small ones that reach every path of the kernels.

use evosdpa_core::DType::{self, BF16, F16};

use super::{Asked, Numbers};

const fn whole(kernel: &'static str, shape: &'static str, dtype: DType) -> Asked {
    Asked { kernel, shape, dtype, numbers: Numbers::Whole, seed: 1 }
}

const fn normal(kernel: &'static str, shape: &'static str, dtype: DType) -> Asked {
    Asked { kernel, shape, dtype, numbers: Numbers::Normal, seed: 1 }
}

const FWD: &str = "hopper_fwd";
const SMALL: &str = "hopper_small";
const DECODE: &str = "flash_decode";

/// Every question.
pub const QUESTIONS: &[Asked] = &[
    // whole and ragged tiles, TMA stores, queries in registers
    whole(FWD, "b1h2s128d64", F16),
    whole(FWD, "b1h2s128d64", BF16),
    whole(FWD, "b1h2s65/33d40", BF16),
    whole(FWD, "b2h2s200d128", F16),
    // masked tiles, a work counter, rows without keys
    whole(FWD, "b1h2s300d64:causal", BF16),
    whole(FWD, "b1h2s300d64:causal", F16),
    whole(FWD, "b1h2s70/20d64:causal-br", F16),
    whole(FWD, "b1h2s150d128:window=60/0", BF16),
    whole("hopper_fwd[BLOCK_N=64 PROBE_AHEAD=1]", "b1h1s400d64:window=250/0", F16),
    whole("hopper_fwd[BLOCK_N=64 PROBE_AHEAD=0]", "b1h1s400d64:window=250/20", BF16),
    whole(FWD, "b1h1s80/300d64:causal-br:chunk=100", F16),
    // precise rows
    whole(FWD, "b1h2s130d64:causal:precise", BF16),
    // packed heads
    whole(FWD, "b2h8/1s10/200d64", F16),
    whole(FWD, "b1h4/2s30/70d64:causal-br", BF16),
    // wide heads: stores from registers, and through shared memory
    whole(FWD, "b1h1s130d256", BF16),
    whole(FWD, "b1h1s80d256:causal", F16),
    whole(FWD, "b1h1s70/100d192/128", F16),
    whole("hopper_fwd[SCALE_LATE=0 BLOCK_N=80]", "b1h1s64/200d256", F16),
    // one, three and four consumers; orders of Q tiles
    whole("hopper_fwd[CONSUMERS=1 CTAS_PER_SM=3 BLOCK_N=64 Q_IN_REGS=0]", "b1h2s130d64:causal", BF16),
    whole(
        "hopper_fwd[CONSUMERS=3 CTAS_PER_SM=1 BLOCK_N=128 PINGPONG=1 Q_IN_REGS=0]",
        "b1h1s200d64:causal",
        BF16,
    ),
    whole("hopper_fwd[CONSUMERS=4 CTAS_PER_SM=1 BLOCK_N=64 STAGES=4 Q_IN_REGS=0]", "b1h1s256d64", F16),
    whole("hopper_fwd[PAIRED=1 LONGEST_FIRST=0]", "b1h1s400d64:causal", F16),
    whole("hopper_fwd[PERSISTENT=0 PINGPONG=0]", "b1h2s130d64", F16),
    // more Q tiles than SMs: every CTA takes several from the counter
    whole(FWD, "b2h150s70d64:causal", BF16),
    whole(FWD, "b2h150s70d64", F16),
    // lengths that are data, pages, paddings, cache blocks
    whole(FWD, "b4h2/1s150/140d64:varlen", F16),
    whole(FWD, "b4h2s40/300d64:causal-br:varlen", BF16),
    whole(FWD, "b3h2s20/300d64:causal:varlen=kv", F16),
    whole(FWD, "b3h8/2s1/300d64:used", BF16),
    whole(FWD, "b3h4/2s9/300d64:causal-br:used:paged=16", BF16),
    whole(FWD, "b2h1s9/70d64:paged=1", F16),
    whole(FWD, "b3h1s70/300d64:causal-br:varlen=q:used:paged=256", BF16),
    whole(FWD, "b3h2s140/40d64:causal-br:used-q", F16),
    whole(FWD, "b3h2s20/300d64:causal-br:used:leftpad:indexed", F16),
    whole(FWD, "b3h2/1s9/150d64:causal-br:used:used-q:leftpad:indexed:paged=16", BF16),
    whole(FWD, "b1h2s20/128d64:mask=h", BF16),
    // what is not exact: rounded weights, modified scores, maxima that grow
    normal(FWD, "b1h2s128d64", F16),
    normal(FWD, "b1h2s300d64:causal", BF16),
    normal(FWD, "b1h2s300d64:causal", F16),
    normal(FWD, "b2h8/1s10/200d64", F16),
    normal(FWD, "b1h1s130d256", BF16),
    normal(FWD, "b1h2s130d64:causal:precise", F16),
    normal(FWD, "b1h1s70/128d64:softcap=30", F16),
    normal(FWD, "b1h4/2s30/90d64:causal-br:alibi", BF16),
    normal(FWD, "b1h1s130/70d128:window=20/0:sinks", BF16),
    normal(FWD, "b2h2/1s20/40d64:bias=bh", F16),
    normal(FWD, "b3h2s20/70d64:causal-br:varlen:softcap=9:alibi:bias=bh:mask=b:chunk=16:sinks", F16),
    normal(FWD, "b3h4/2s9/300d64:causal-br:used:paged=16", BF16),
    // keys split over a cluster of two, merged in distributed shared memory
    whole(SMALL, "b1h2s128d64", F16),
    whole(SMALL, "b1h2s128d64", BF16),
    whole(SMALL, "b1h1s200d64:causal", BF16),
    whole(SMALL, "b1h1s200d64:causal", F16),
    whole(SMALL, "b1h1s70/90d80:window=20/5", BF16),
    whole(SMALL, "b1h1s70/20d64:causal-br", F16),
    // packed heads, clusters of eight
    whole(SMALL, "b1h8/2s1/500d128", BF16),
    whole(SMALL, "b1h8/2s1/500d128", F16),
    whole("hopper_small[CLUSTER=2 WG_N=1 PACK_HEADS=8 STAGES=4]", "b1h8/1s4/300d64", F16),
    // keys split over the warpgroups of a CTA, and over both
    whole("hopper_small[CLUSTER=1 WG_N=2]", "b1h1s64/256d64", F16),
    whole("hopper_small[CLUSTER=2 WG_N=2]", "b1h1s40/300d64:causal-br", BF16),
    whole("hopper_small[WG_M=2 WG_N=2 CLUSTER=1]", "b1h1s128/200d64", F16),
    // more tiles than stages, wide heads
    whole(SMALL, "b1h1s1/900d64", BF16),
    whole(SMALL, "b1h1s30/260d256", BF16),
    normal(SMALL, "b1h2s128d64", F16),
    normal(SMALL, "b1h1s200d64:causal", BF16),
    normal(SMALL, "b1h8/2s1/500d128", BF16),
    normal(SMALL, "b1h1s1/1500d64", F16),
    normal("hopper_small[CLUSTER=2 WG_N=2]", "b1h1s40/300d64:causal-br", F16),
    // decoding: shares of any size, caches of every kind
    whole(DECODE, "b2h4/2s1/200d64", BF16),
    whole(DECODE, "b3h2s3/150d40:causal-br", F16),
    whole(DECODE, "b1h16/1s4/90d64:causal-br", F16),
    whole(DECODE, "b3h4/2s2/170d64:causal-br:used:paged=16", BF16),
    whole(DECODE, "b3h2s2/133d64:used:paged=1", F16),
    whole(DECODE, "b5h2/1s4/100d64:varlen", F16),
    whole(DECODE, "b3h4/2s3/90d64:causal-br:used:used-q:leftpad:indexed", F16),
    whole("flash_decode[CLUSTER=1 SPLIT_KEYS=1024]", "b1h2/1s1/2200d32", BF16),
    normal(DECODE, "b2h4/2s1/200d64", BF16),
    normal(DECODE, "b3h4/2s2/170d64:causal-br:used:paged=16", F16),
    normal(DECODE, "b2h2s2/70d64:window=30/9:softcap=5:alibi:bias=b:mask:chunk=32:sinks", F16),
    // the portable kernel
    whole("ampere_fwd", "b1h2s130d64:causal", F16),
    whole("ampere_fwd", "b3h4/2s9/70d64:causal-br:used:paged=16", BF16),
    normal("ampere_fwd", "b1h2s130d64:causal", BF16),
];
