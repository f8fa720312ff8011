//! flash_decode on the simulator: shares of any size, parts merged by whoever comes last, every kind of cache.

mod trials;

use evosdpa_core::DType;
use evosdpa_oracle::inputs::Family;
use trials::{BF16, F16, Trial, run_all, trial};

const DECODE: &str = "flash_decode";

const fn on(blocks: u32, shape: &'static str, dtype: DType) -> Trial {
    Trial { blocks, ..trial(DECODE, shape, dtype) }
}

/// Head dimensions, groups, masks; one CTA for everything, a few whose shares end anywhere, and as many as there are KV tiles.
#[test]
fn shares_of_any_size() {
    run_all(&[
        trial(DECODE, "b1h4/1s1/300d128", BF16),
        on(1, "b2h4/2s1/130d64", F16),
        on(3, "b2h4/2s1/200d64", BF16),
        on(5, "b3h2s3/150d40:causal-br", F16),
        on(7, "b1h3/1s16/200d72/48:window=100/0", BF16),
        on(2, "b1h16/1s4/90d64:causal-br", F16),
        trial(DECODE, "b1h8/1s3/70d256", BF16),
        on(2, "b2h3s1/1d7", F16),
        on(3, "b1h2s9/4d64:causal-br", BF16),
        Trial { family: Family::LargeLogits, ..on(3, "b1h8/2s1/260d64", F16) },
    ]);
}
