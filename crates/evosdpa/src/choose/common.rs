//! Problems that are common enough for their kernels to be compiled before anyone asks.

use evosdpa_core::{DType, Problem};

use crate::Error;

/// Types that models have.
const DTYPES: [DType; 2] = [DType::BF16, DType::F16];

/// Head dimensions that most models have.
const HEAD_DIMS: [u32; 2] = [64, 128];

/// Query heads, and key heads where they are fewer.
const HEADS: [&str; 3] = ["16", "32/8", "64/8"];

/// Sequences in a batch.
const BATCHES: [u32; 4] = [1, 4, 16, 64];

/// Whole tiles and ragged ones, short and long.
const LENGTHS: [u32; 9] = [100, 128, 512, 1000, 1024, 2048, 4096, 8192, 16_384];

/// Keys in a cache.
const CACHES: [u32; 5] = [128, 1024, 4096, 8192, 65_536];

/// What prompts and images ask for, a query for each key.
const PROMPTS: [&str; 2] = ["", ":causal"];

/// What a server asks for of prompts: packed ones, alone and in front of a cache.
const PACKED: [&str; 2] = [":causal-br:varlen", ":causal-br:varlen=q:used:paged=16"];

/// How a cache is read while decoding.
const DECODING: [&str; 4] = ["", ":used", ":used:paged=16", ":used:paged=256"];

/// Prompts, packed prompts and decoding as common models and servers have them, in bf16 and f16. Which kernels they take is for the
/// [`Planner`](super::Planner) to say.
pub fn common_problems() -> Result<Vec<Problem>, Error> {
    let mut shapes = Vec::new();
    for head_dim in HEAD_DIMS {
        for (heads, batch) in HEADS.iter().flat_map(|heads| BATCHES.map(|batch| (heads, batch))) {
            for length in LENGTHS {
                let sizes = format!("b{batch}h{heads}s{length}d{head_dim}");
                shapes.extend(PROMPTS.map(|kind| format!("{sizes}{kind}")));
                shapes.extend(PACKED.map(|kind| format!("{sizes}{kind}")));
            }
            for keys in CACHES {
                let sizes = format!("b{batch}h{heads}s1/{keys}d{head_dim}");
                shapes.extend(DECODING.map(|kind| format!("{sizes}{kind}")));
            }
        }
    }
    let mut problems = Vec::new();
    for shape in shapes {
        for dtype in DTYPES {
            problems.push(Problem::new(shape.parse()?, dtype)?);
        }
    }
    Ok(problems)
}
