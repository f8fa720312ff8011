//! Every variant of the kernels on small problems, under every schedule of the simulator.
//!
//! Variants that compile to the same instructions and are launched alike are one *code*, which is run once.

use std::{
    collections::HashSet,
    hash::{DefaultHasher, Hash, Hasher},
    sync::Mutex,
};

use evosdpa_core::{DType, Problem, Shape};
use evosdpa_kernels::VariantId;
use evosdpa_oracle::{Case, inputs::Family};
use serde::Serialize;

use crate::{
    Error, ErrorKind,
    covering::covering,
    device::{Device, SCHEDULES, Sim},
    gate::{
        GateResult, Verdict, correctness,
        suite::{CaseSpec, Group},
    },
};

/// Whole and ragged tiles, every mask, shared heads, another dimension, and one where whole query tiles see no key.
pub const SMALL: [&str; 5] = [
    "tiny",
    "tiny:causal",
    "b1h2/1s33/65d64:causal-br",
    "b1h1s70/40d40:window=9/3",
    "b1h1s70/20d64:causal-br",
];
/// The one length that `fa_s512_v3` is made for; a window keeps most of its tiles out.
pub const LONG: [&str; 1] = ["b1h1s512d64:window=70/0"];

/// The case of a small problem: NaN between the rows, which stay aligned.
pub fn case_spec(shape: Shape, dtype: DType) -> Result<CaseSpec, Error> {
    let problem = Problem::new(shape, dtype)?.with_lse(true);
    let row_gap = Some(if dtype.bytes() == 1 { 16 } else { 8 });
    Ok(CaseSpec { group: Group::Simulated, problem, family: Family::Normal, seed: 1, row_gap, lengths: None })
}

/// Variants of one kernel for one problem.
#[derive(Clone, Debug)]
pub struct Lot {
    /// The kernel.
    pub kernel: String,
    /// What is asked of them.
    pub spec: CaseSpec,
    /// Those to run, by name.
    pub variants: Vec<String>,
    /// How many there are.
    pub of: usize,
}

impl Lot {
    /// The variants of a kernel for a problem; why not, if it does not take it. Of more than `most` a choice is made that
    /// shows every pair of settings.
    pub fn new(sim: &Sim, kernel: &str, spec: CaseSpec, most: usize) -> Result<Result<Self, String>, Error> {
        if let Some(why) = sim.refuses(kernel, &spec.problem) {
            return Ok(Err(why));
        }
        let mut variants = sim.variants(kernel, &spec.problem, usize::MAX)?;
        let of = variants.len();
        if of > most {
            let settings = variants.iter().map(|name| settings(name)).collect::<Result<Vec<_>, Error>>()?;
            let chosen = covering(&settings, most);
            variants = chosen.into_iter().map(|at| variants[at].clone()).collect();
        }
        Ok(Ok(Self { kernel: kernel.to_owned(), spec, variants, of }))
    }
}

/// `STAGES=2`, … of `sdpa_v2b[STAGES=2 …]`.
pub fn settings(variant: &str) -> Result<Vec<String>, Error> {
    let id: VariantId = variant.parse()?;
    Ok(id.tunables.iter().map(|(name, value)| format!("{name}={value}")).collect())
}

/// What one variant showed.
#[derive(Clone, Debug, PartialEq)]
pub enum Shown {
    /// It is the code of a variant that was run before.
    SameCode,
    /// Right, the same and free of findings under every schedule; the largest error.
    Right(f64),
    /// What was wrong.
    Wrong(String),
}

/// A lot while it is run.
pub struct Trial<'a> {
    sim: &'a Sim,
    case: Case,
    seen: Mutex<HashSet<u64>>,
}

impl<'a> Trial<'a> {
    /// Draws the inputs and works out the answer.
    pub fn new(sim: &'a Sim, spec: &CaseSpec) -> Self {
        Self { sim, case: spec.build(), seen: Mutex::default() }
    }

    /// Runs a variant under every schedule, unless its code was run before.
    pub fn of(&self, variant: &str) -> Result<Shown, Error> {
        let code = match self.sim.compile(variant, &self.case.problem) {
            Ok((variant, artifact)) => {
                let mut hasher = DefaultHasher::new();
                (&variant.entry, artifact.ptx()).hash(&mut hasher);
                let launch = &variant.launch;
                (launch.grid, launch.block, launch.dynamic_smem_bytes).hash(&mut hasher);
                hasher.finish()
            }
            Err(error) if error.kind() == ErrorKind::Kernel => return Ok(Shown::Wrong(error.to_string())),
            Err(error) => return Err(error),
        };
        // Nothing panics under the lock.
        if !self.seen.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).insert(code) {
            return Ok(Shown::SameCode);
        }
        let result = correctness::check_runs(self.sim, variant, &self.case, None, SCHEDULES)?;
        Ok(match result.verdict {
            Verdict::Pass => Shown::Right(result.max_error.unwrap_or(0.0)),
            Verdict::Fail(why) | Verdict::Unavailable(why) => Shown::Wrong(why),
        })
    }
}

/// A variant that is wrong.
#[derive(Clone, Debug, Serialize)]
pub struct Failure {
    /// The variant.
    pub variant: String,
    /// What is wrong with it.
    pub why: String,
}

/// What a lot showed, as it is recorded.
#[derive(Clone, Debug, Serialize)]
pub struct SweepRow {
    /// The kernel.
    pub kernel: String,
    /// The problem.
    pub shape: Shape,
    /// Its inputs' type.
    pub dtype: String,
    /// How many variants there are.
    pub variants: usize,
    /// How many of them were compiled and looked at.
    pub looked_at: usize,
    /// How many different codes they are.
    pub codes: usize,
    /// How often something was launched: each code under each schedule.
    pub runs: usize,
    /// The largest error of all.
    pub max_error: f64,
    /// Every variant that is wrong.
    pub failures: Vec<Failure>,
    /// The word on all of them.
    pub gates: Vec<GateResult>,
}

/// The gate's name.
const GATE: &str = "every schedule";

impl SweepRow {
    /// Of a lot, with what each variant showed. One that Ctrl-C kept from being looked at is not there.
    pub fn new(lot: &Lot, shown: &[(String, Shown)]) -> Self {
        let (mut codes, mut max_error, mut failures) = (0, 0f64, Vec::new());
        for (variant, shown) in shown {
            match shown {
                Shown::SameCode => continue,
                Shown::Right(error) => max_error = max_error.max(*error),
                Shown::Wrong(why) => {
                    failures.push(Failure { variant: variant.clone(), why: why.clone() });
                }
            }
            codes += 1;
        }
        let gate = match failures.first() {
            None if shown.is_empty() => GateResult::unavailable(GATE, "nothing was run"),
            None => GateResult::pass(
                GATE,
                format!("{codes} codes right, the same and without findings under {SCHEDULES} schedules"),
            ),
            Some(first) => {
                let count = format!("{} of {codes} codes are wrong", failures.len());
                GateResult::fail(GATE, format!("{count}; the first: {}: {}", first.variant, first.why))
            }
        };
        Self {
            variants: lot.of,
            looked_at: shown.len(),
            codes,
            runs: codes * SCHEDULES,
            max_error,
            failures,
            ..Self::of(&lot.kernel, &lot.spec, gate)
        }
    }

    /// Of a kernel that does not take a problem.
    pub fn refused(kernel: &str, spec: &CaseSpec, why: String) -> Self {
        Self::of(kernel, spec, GateResult::unavailable(GATE, why))
    }

    fn of(kernel: &str, spec: &CaseSpec, gate: GateResult) -> Self {
        Self {
            kernel: kernel.to_owned(),
            shape: spec.problem.shape(),
            dtype: spec.problem.dtype().name().to_owned(),
            variants: 0,
            looked_at: 0,
            codes: 0,
            runs: 0,
            max_error: 0.0,
            failures: Vec::new(),
            gates: vec![gate],
        }
    }
}
