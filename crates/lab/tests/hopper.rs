//! The Hopper kernels on the CPU: TMA, mbarriers, wgmma and clusters simulated, every result held against the oracle, every
//! access watched, under every schedule.
//!
//! The defaults tell kinds of problems apart that are too large to simulate; such kinds run here by their tunables.

use evosdpa_core::DType;
use evosdpa_kernels::Registry;
use evosdpa_lab::{device::Sim, sweep::case_spec};
use evosdpa_oracle::inputs::Family;
use ptxsan::{Options, Schedule};

struct Trial {
    kernel: &'static str,
    shape: &'static str,
    dtype: DType,
    family: Family,
    /// At most so many CTAs: on fewer, each has several Q tiles.
    blocks: u32,
}

const fn trial(kernel: &'static str, shape: &'static str, dtype: DType) -> Trial {
    Trial { kernel, shape, dtype, family: Family::Normal, blocks: u32::MAX }
}

/// Runs a trial under every schedule; returns what went wrong.
fn run(sim: &Sim, trial: &Trial) -> Vec<String> {
    let mut spec = case_spec(trial.shape.parse().unwrap(), trial.dtype).unwrap();
    spec.family = trial.family;
    let case = spec.build();
    let simulation = sim.simulation(trial.kernel, &spec.problem).unwrap().on_blocks(trial.blocks);
    let mut wrong = Vec::new();
    let mut first: Option<Vec<u8>> = None;
    for schedule in Schedule::ALL {
        let options = Options { schedule, ..Options::default() };
        let (output, outcome) = simulation.run(&case.inputs, &options).unwrap();
        let label = format!("{} on {} under {}", simulation.label(), spec.label(), schedule.name());
        let judgement = case.judge(&output.o.view(), output.lse.as_deref());
        if let Some(finding) = outcome.failures().next() {
            wrong.push(format!("{label}: {} findings, {finding}", outcome.failures().count()));
        } else if !judgement.passed() {
            wrong.push(format!("{label}: {}", judgement.summary()));
        }
        let bytes = output.o.bytes().to_vec();
        if *first.get_or_insert_with(|| bytes.clone()) != bytes {
            wrong.push(format!("{label}: another result than under {}", Schedule::ALL[0].name()));
        }
    }
    wrong
}

fn run_all(trials: &[Trial]) {
    let sim = Sim::open(Registry::embedded().unwrap()).unwrap();
    let wrong: Vec<String> = trials.iter().flat_map(|trial| run(&sim, trial)).collect();
    assert!(
        wrong.is_empty(),
        "{} of {} runs:\n{}",
        wrong.len(),
        trials.len() * Schedule::ALL.len(),
        wrong.join("\n")
    );
}

#[test]
fn hopper_fwd_is_right_and_clean() {
    const F16: DType = DType::F16;
    const BF16: DType = DType::BF16;
    run_all(&[
        // whole and ragged tiles, TMA stores, queries in registers
        trial("hopper_fwd", "b1h1s128d64", F16),
        trial("hopper_fwd", "b1h1s65/33d40", BF16),
        // a work counter, masked tiles, precise rows, rows without keys
        trial("hopper_fwd", "b1h1s300d64:causal", BF16),
        trial("hopper_fwd", "b1h1s70/20d64:causal-br", F16),
        trial("hopper_fwd", "b1h2s150d128:window=60/0", BF16),
        // loops for tiles cut on the right, whole ones, and tiles cut on the left; the next barrier asked ahead, or not
        trial("hopper_fwd[BLOCK_N=64 PROBE_AHEAD=1]", "b1h1s400d64:window=250/0", F16),
        trial("hopper_fwd[BLOCK_N=64 PROBE_AHEAD=0]", "b1h1s400d64:window=250/20", BF16),
        // packed heads
        trial("hopper_fwd", "b2h8/1s10/200d64", F16),
        trial("hopper_fwd", "b1h4/2s30/70d64:causal-br", BF16),
        // wide heads: stores from registers, and through shared memory; rescaling when a maximum grows
        trial("hopper_fwd", "b1h1s130d256", BF16),
        trial("hopper_fwd", "b1h1s80d256:causal", F16),
        trial("hopper_fwd", "b1h1s70/100d192/128", F16),
        trial("hopper_fwd[SCALE_LATE=0 BLOCK_N=80]", "b1h1s64/200d256", F16),
        // the kinds with many Q tiles: one, three and four consumers
        trial("hopper_fwd[CONSUMERS=1 CTAS_PER_SM=3 BLOCK_N=64 Q_IN_REGS=0]", "b1h2s130d64:causal", BF16),
        trial(
            "hopper_fwd[CONSUMERS=3 CTAS_PER_SM=1 BLOCK_N=128 PINGPONG=1 Q_IN_REGS=0]",
            "b1h1s200d64:causal",
            BF16,
        ),
        trial("hopper_fwd[CONSUMERS=3 CTAS_PER_SM=1 BLOCK_N=128 Q_IN_REGS=0]", "b1h1s192/256d64", F16),
        trial("hopper_fwd[CONSUMERS=4 CTAS_PER_SM=1 BLOCK_N=64 STAGES=4 Q_IN_REGS=0]", "b1h1s256d64", F16),
        // several Q tiles for each CTA: every ring goes round, stores of one tile run under the next
        Trial { blocks: 1, ..trial("hopper_fwd", "b1h3s130d64", F16) },
        Trial { blocks: 2, ..trial("hopper_fwd", "b1h2s300d64:causal", BF16) },
        Trial { blocks: 1, ..trial("hopper_fwd", "b1h3s130/70d64:causal-br", F16) },
        Trial { blocks: 1, ..trial("hopper_fwd", "b1h2s130d256", F16) },
        // orders of the Q tiles
        trial("hopper_fwd[PAIRED=1 LONGEST_FIRST=0]", "b1h1s400d64:causal", F16),
        trial("hopper_fwd[PERSISTENT=0 PINGPONG=0]", "b1h2s130d64", F16),
    ]);
}

#[test]
fn hopper_small_is_right_and_clean() {
    const F16: DType = DType::F16;
    const BF16: DType = DType::BF16;
    run_all(&[
        // one KV tile, and rows that see none of its keys
        trial("hopper_small", "b1h2s128d64", F16),
        trial("hopper_small", "b1h1s70/50d72:causal-br", BF16),
        // keys split over a cluster of two, merged in distributed shared memory
        trial("hopper_small[CLUSTER=2 WG_N=1]", "b1h1s60/150d64", F16),
        trial("hopper_small", "b1h1s200d64:causal", BF16),
        trial("hopper_small", "b1h1s70/90d80:window=20/5", BF16),
        trial("hopper_small", "b1h1s70/20d64:causal-br", F16),
        // decoding: packed heads, clusters of eight
        trial("hopper_small", "b1h8/2s1/500d128", BF16),
        trial("hopper_small[CLUSTER=2 WG_N=1 PACK_HEADS=8 STAGES=4]", "b1h8/1s4/300d64", F16),
        // keys split over the warpgroups of a CTA, and over both
        trial("hopper_small[CLUSTER=1 WG_N=2]", "b1h1s64/256d64", F16),
        trial("hopper_small[CLUSTER=2 WG_N=2]", "b1h1s40/300d64:causal-br", BF16),
        trial("hopper_small[WG_M=2 WG_N=2 CLUSTER=1]", "b1h1s128/200d64", F16),
        // more tiles than stages, wide heads
        trial("hopper_small", "b1h1s1/1500d64", F16),
        trial("hopper_small", "b1h1s30/260d256", BF16),
        // hidden keys that are infinite: rows computed again
        Trial { family: Family::HiddenKeys, ..trial("hopper_small", "b1h1s40/70d64:causal", F16) },
    ]);
}

#[test]
fn hopper_wide_is_right_and_clean() {
    const F16: DType = DType::F16;
    const BF16: DType = DType::BF16;
    run_all(&[
        // fewer rows than a tile has, several tiles, and rows that see no key
        trial("hopper_wide", "b1h1s60/200d512", F16),
        trial("hopper_wide", "b1h2/1s130/150d320:causal-br", BF16),
        trial("hopper_wide", "b1h1s128/300d64:causal", BF16),
        trial("hopper_wide", "b1h1s140/200d80:window=20/5", F16),
        trial("hopper_wide", "b1h1s70/20d64:causal-br", F16),
        // other rings
        trial("hopper_wide[PANELS_AHEAD=4]", "b1h1s70/300d272", BF16),
        trial("hopper_wide[BLOCK_N=80 PANELS_AHEAD=2]", "b1h1s70/200d448/304", BF16),
        trial("hopper_wide[BLOCK_N=32 VALUE_KEYS=32 MESSAGES=2]", "b1h1s70/200d384", F16),
        trial("hopper_wide", "b1h1s65/256d512", BF16),
        // every row precise
        trial("hopper_wide", "b1h1s20/300d264:precise", BF16),
        // hidden keys that are infinite
        Trial { family: Family::HiddenKeys, ..trial("hopper_wide", "b1h1s40/70d64:causal", F16) },
    ]);
}
