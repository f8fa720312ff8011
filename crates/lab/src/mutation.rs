//! Mutation score of the lab's kernels: would the simulator notice if one of their synchronisations were missing?

use std::cell::Cell;

use evosdpa_core::{DType, Problem};
use evosdpa_kernels::VariantId;
use evosdpa_oracle::inputs::{Family, Inputs};
use ptxsan::{Module, Options, mutate};
pub use ptxsan::{Schedule, mutate::Fate};
use serde::Serialize;

use crate::{
    Error,
    device::{Sim, Simulation},
};

/// A variant whose synchronisations stand for those of others, and problems that reach all of them.
#[derive(Clone, Debug)]
pub struct Subject {
    /// The variant.
    pub kernel: String,
    /// Its inputs' type.
    pub dtype: DType,
    /// Problems, all compiled to the same code.
    pub shapes: &'static [&'static str],
}

/// Several tiles with a ragged end, every stage of a ring used twice; rows that are not 16-byte aligned, so that copies are
/// plain; rows and CTAs that see nothing.
const SHAPES: &[&str] =
    &["b1h1s40/200d64", "b1h1s33/150d60:causal-br", "b1h1s70/20d64:causal-br", "b1h1s40d64:window=3/0"];
/// A length that is compiled in: a narrow window keeps the number of tiles small.
const SHAPES_512: &[&str] = &["b1h1s512d64:window=200/0"];

/// Several Q tiles with masked and whole tiles, one of them with rows that see no key, for one CTA: every ring goes round.
const HOPPER: &[&str] = &[
    "b1h2s300d64:causal",
    "b1h3s130/70d64:causal-br",
    "b1h1s300d64:window=100/0",
    "b1h2s200/40d64:causal-br",
];
const HOPPER_SMALL: &[&str] = &["b1h1s100d64:causal"];
/// More tiles than stages: the loop and its refills.
const HOPPER_LOOP: &[&str] = &["b1h1s20/700d64", "b1h1s20/100d64", "b1h1s20/90d64:causal"];

/// Shares of several CTAs, merged by who comes last; sequences of one tile, of several, and with nothing to see.
const DECODE: &[&str] = &["b2h4/2s1/300d64", "b1h4/2s1/20d64", "b3h2/1s1/130d64"];
const DECODE_PAGES: &[&str] =
    &["b1h4/2s2/700d64:causal-br:used:paged=16", "b3h4/2s2/200d64:causal-br:used:paged=16"];

/// The kernels of the line, the portable one, decoding and Hopper's, each in the forms that synchronise differently.
const SUBJECTS: &[(&str, DType, &[&str])] = &[
    ("sdpa_v1", DType::F16, SHAPES),
    ("sdpa_v2b", DType::F16, SHAPES),
    ("sdpa_v2b[MAX_BLOCK_N=32]", DType::BF16, SHAPES),
    ("sdpa_v2c", DType::F16, SHAPES),
    ("sdpa_v2c[BLOCK_M=64 MAX_BLOCK_N=32]", DType::BF16, SHAPES),
    ("fa_s512_v3[CONFIG=3]", DType::F16, SHAPES_512),
    ("fa_s512_v3[CONFIG=5]", DType::F16, SHAPES_512),
    ("fa_s512_v3[CONFIG=8]", DType::F16, SHAPES_512),
    ("fa_s512_v3[CONFIG=9]", DType::F16, SHAPES_512),
    // The stages of the 8-bit kernel, first to last.
    (
        "sdpa_fp8_stage_c[USE_CP_ASYNC=0 USE_WMMA_PV=0 USE_FUSED_SOFTMAX=0 USE_WARP_SPECIALIZATION=0 USE_PERSISTENT_CTA=0 NUM_PRODUCER_WARPS=1]",
        DType::U8,
        SHAPES,
    ),
    (
        "sdpa_fp8_stage_c[USE_WMMA_PV=1 USE_FUSED_SOFTMAX=0 USE_WARP_SPECIALIZATION=0 USE_PERSISTENT_CTA=0 NUM_PRODUCER_WARPS=1]",
        DType::U8,
        SHAPES,
    ),
    (
        "sdpa_fp8_stage_c[STAGES=3 USE_WARP_SPECIALIZATION=0 USE_PERSISTENT_CTA=0 NUM_PRODUCER_WARPS=1]",
        DType::E4M3,
        SHAPES,
    ),
    ("sdpa_fp8_stage_c", DType::U8, SHAPES),
    ("sdpa_fp8_stage_c[USE_KV_LUT=1 NUM_PRODUCER_WARPS=1 STAGES=3]", DType::E4M3, SHAPES),
    (
        "ampere_fwd[BLOCK_M=32 BLOCK_N=32 WARPS_M=2 WARPS_N=1 STAGES=2 Q_IN_REGS=1 HEAD_GROUP=1 SPLIT_PRECISE_LOOP=1 SPLIT_MASKED_LOOP=0 SKIP_RESCALE=0 CTAS_PER_SM=1]",
        DType::F16,
        SHAPES,
    ),
    (
        "ampere_fwd[BLOCK_M=32 BLOCK_N=32 WARPS_M=2 WARPS_N=2 STAGES=3 Q_IN_REGS=0 HEAD_GROUP=1 SPLIT_PRECISE_LOOP=1 SPLIT_MASKED_LOOP=1 SKIP_RESCALE=1 CTAS_PER_SM=1]",
        DType::F16,
        SHAPES,
    ),
    (
        "ampere_fwd[BLOCK_M=32 BLOCK_N=64 WARPS_M=2 WARPS_N=2 STAGES=1 Q_IN_REGS=1 HEAD_GROUP=1 SPLIT_PRECISE_LOOP=0 SPLIT_MASKED_LOOP=0 SKIP_RESCALE=0 CTAS_PER_SM=1]",
        DType::F16,
        SHAPES,
    ),
    ("flash_decode", DType::BF16, DECODE),
    ("flash_decode", DType::F16, DECODE_PAGES),
    (
        "hopper_fwd[PERSISTENT=1 LONGEST_FIRST=0 SECTION_MIB=0 BLOCK_N=64 SETTLE_KEYS=0 CTAS_PER_SM=2]",
        DType::F16,
        HOPPER,
    ),
    ("hopper_small", DType::F16, HOPPER_SMALL),
    (
        "hopper_small[CLUSTER=1 WG_N=2 STAGES=1 BLOCK_N=64 NEXT_LATE=0 SPIN_WAIT=0 ONE_CTA_PER_SM=0]",
        DType::F16,
        HOPPER_LOOP,
    ),
];

/// What to score when these kernels were asked for: a name means its forms above, a name with tunables itself, none all.
pub fn subjects(sim: &Sim, asked: &[String]) -> Result<Vec<Subject>, Error> {
    let of = |&(kernel, dtype, shapes): &(&str, DType, &'static [&'static str])| Subject {
        kernel: kernel.to_owned(),
        dtype,
        shapes,
    };
    if asked.is_empty() {
        return Ok(SUBJECTS.iter().map(of).collect());
    }
    let base = VariantId::kernel_of;
    let mut subjects = Vec::new();
    for name in asked {
        crate::find_kernel(sim, name)?;
        let relatives: Vec<_> = SUBJECTS.iter().filter(|(kernel, ..)| base(kernel) == base(name)).collect();
        if *name == base(name) && !relatives.is_empty() {
            subjects.extend(relatives.into_iter().map(of));
            continue;
        }
        let (dtype, shapes) =
            relatives.first().map_or((DType::F16, SHAPES), |(_, dtype, shapes)| (*dtype, *shapes));
        subjects.push(Subject { kernel: name.clone(), dtype, shapes });
    }
    Ok(subjects)
}

/// A kernel with its score.
#[derive(Clone, Debug, Serialize)]
pub struct MutationRow {
    /// The variant.
    pub kernel: String,
    /// Its inputs' type.
    pub dtype: String,
    /// The problems it was run on.
    pub shapes: Vec<String>,
    /// Deletions that were noticed.
    pub noticed: usize,
    /// Deletions that matter: all but the redundant ones.
    pub matter: usize,
    /// Every deletion.
    #[serde(flatten)]
    pub score: mutate::Score,
}

/// Deletes each synchronisation of a kernel in turn and runs it on every problem under every schedule. `launching` is
/// told before each launch how many there were.
pub fn score(
    sim: &Sim,
    subject: &Subject,
    schedules: &[Schedule],
    launching: &dyn Fn(usize),
) -> Result<MutationRow, Error> {
    let launches = Cell::new(0);
    let mut runs: Vec<(Simulation, Inputs, &str)> = Vec::new();
    for shape in subject.shapes {
        let problem = Problem::new(shape.parse()?, subject.dtype)?.with_lse(true);
        let mut simulation = sim.simulation(&subject.kernel, &problem)?;
        // With few CTAs each has several pieces of work.
        match VariantId::kernel_of(&subject.kernel) {
            "hopper_fwd" => simulation = simulation.on_blocks(1),
            "flash_decode" => simulation = simulation.on_blocks(3),
            _ => {}
        }
        if let Some((first, _, _)) = runs.first()
            && first.variant().defines != simulation.variant().defines
        {
            let (kernel, shape) = (subject.kernel.clone(), (*shape).to_owned());
            return Err(Error::OtherCode { kernel, shape });
        }
        runs.push((simulation, Inputs::generate(&problem, Family::Normal, 1), shape));
        // Rows whose hidden keys are infinite have code of their own.
        if subject.kernel.starts_with("hopper_small") && shape.contains(":causal") {
            let simulation = sim.simulation(&subject.kernel, &problem)?;
            runs.push((simulation, Inputs::generate(&problem, Family::HiddenKeys, 1), shape));
        }
    }
    let Some((first, _, _)) = runs.first() else { return Err(Error::NoProblem) };
    let scenes: Vec<mutate::Scene<'_, Error>> = runs
        .iter()
        .map(|(simulation, inputs, shape)| mutate::Scene {
            name: (*shape).to_owned(),
            run: Box::new(|module: &Module, options: &Options| {
                launching(launches.replace(launches.get() + 1));
                let (output, outcome) = simulation.run_module(module, inputs, options)?;
                let mut bytes = output.o.bytes().to_vec();
                bytes.extend(output.lse.iter().flatten().flat_map(|value| value.to_le_bytes()));
                Ok((outcome, bytes))
            }),
        })
        .collect();
    let score = mutate::score(first.module(), &first.variant().entry, &scenes, schedules)?;
    let (noticed, matter) = score.counts();
    Ok(MutationRow {
        kernel: subject.kernel.clone(),
        dtype: subject.dtype.name().to_owned(),
        shapes: subject.shapes.iter().map(|shape| (*shape).to_owned()).collect(),
        noticed,
        matter,
        score,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use evosdpa_kernels::Registry;

    /// Without compiling any: a rule that chooses a tunable by the length would make other code.
    #[test]
    fn the_problems_of_a_subject_have_one_code() {
        let sim = Sim::open(Registry::embedded().unwrap()).unwrap();
        for subject in subjects(&sim, &[]).unwrap() {
            let defines = |shape: &&str| {
                let problem = Problem::new(shape.parse().unwrap(), subject.dtype).unwrap().with_lse(true);
                sim.variant(&subject.kernel, &problem).unwrap().defines
            };
            let first = defines(&subject.shapes[0]);
            for shape in subject.shapes {
                assert_eq!(defines(shape), first, "{} at {shape}", subject.kernel);
            }
        }
    }
}
