//! Problems that are common enough for their kernels to be compiled before anyone asks.

use evosdpa_core::{DType, Problem};

use crate::Error;

/// Types that models have.
const DTYPES: [DType; 2] = [DType::BF16, DType::F16];

/// Head dimensions that most models have.
const HEAD_DIMS: [u32; 2] = [64, 128];

/// Query heads, and key heads where they are fewer.
const HEADS: [&str; 5] = ["8", "16", "32", "32/8", "64/8"];

/// Sequences in a batch.
const BATCHES: [u32; 5] = [1, 2, 4, 16, 64];

/// Whole tiles and ragged ones, short and long.
const LENGTHS: [u32; 13] = [64, 100, 128, 200, 300, 512, 1000, 1024, 2048, 4000, 4096, 8192, 16_384];

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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use evosdpa_core::{DType, Problem};
    use evosdpa_kernels::{Arch, Registry, Target};

    use super::*;
    use crate::choose::{Planner, Question, assumed_tensors};

    /// What a problem's kernel is compiled from.
    fn code(planner: &Planner, problem: &Problem) -> String {
        let (tensors, target) = (assumed_tensors(problem), Target::nominal(Arch::Sm90a));
        let question = Question { problem, tensors: &tensors, target: &target, device: None };
        let variant = planner.choose_quickly(&question).unwrap().variant;
        format!("{} {:?}", variant.id.kernel, variant.defines)
    }

    fn codes(planner: &Planner, shapes: &[String]) -> Vec<String> {
        let problem = |shape: &String| Problem::new(shape.parse().unwrap(), DType::BF16).unwrap();
        shapes.iter().map(|shape| code(planner, &problem(shape))).collect()
    }

    #[test]
    fn named_shapes_and_nearly_all_others_of_common_kinds_have_their_code() {
        let planner = Planner::with_tables(Registry::embedded().unwrap()).unwrap();
        let common = common_problems().unwrap();
        let known: BTreeSet<String> = common.iter().map(|problem| code(&planner, problem)).collect();
        let named =
            ["mission", "small", "long", "long128"].map(|name| [name.to_owned(), format!("{name}:causal")]);
        for (shape, code) in named.iter().flatten().zip(codes(&planner, named.as_flattened())) {
            assert!(known.contains(&code), "{shape}: {code}");
        }
        // Sizes that the list has not: heads of models, batches and lengths between.
        let mut others = Vec::new();
        for (i, heads) in ["12", "20", "24/8", "28/4", "40/8", "48/8", "64", "32/4"].iter().enumerate() {
            for (j, length) in [37, 150, 333, 700, 1500, 2500, 3000, 5000, 7777, 12_000].iter().enumerate() {
                let (batch, dim) = ([1, 3, 7, 24][(i + j) % 4], [64, 128][(i + j / 2) % 2]);
                let sizes = format!("b{batch}h{heads}s{length}d{dim}");
                others.extend(["", ":causal", ":causal-br:varlen"].map(|kind| format!("{sizes}{kind}")));
                others.push(format!("b{batch}h{heads}s1/{length}d{dim}:used:paged=16"));
            }
        }
        let missing: Vec<&String> = others
            .iter()
            .zip(codes(&planner, &others))
            .filter(|(_, code)| !known.contains(code))
            .map(|(shape, _)| shape)
            .collect();
        let share = 1.0 - missing.len() as f64 / others.len() as f64;
        assert!(share >= 0.95, "{share}: {missing:?}");
    }
}
