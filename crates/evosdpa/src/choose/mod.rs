//! Which kernel answers a problem on a GPU, with which tunables, and why.
//!
//! The planner walks a list of candidates, best first, and takes the first that can: the rows of the tuned tables that
//! fit (see [`crate::tuned`]), then the rules for what no row covers. Nothing here needs a GPU.
//!
//! ```
//! use evosdpa::{DType, Problem, choose::{Planner, Question, assumed_tensors}};
//! use evosdpa_kernels::{Arch, Registry, Target};
//!
//! # fn main() -> Result<(), evosdpa::Error> {
//! let planner = Planner::new(Registry::embedded()?);
//! let problem = Problem::new("b2h32/8s4096d128:causal".parse()?, DType::BF16)?;
//! let (tensors, target) = (assumed_tensors(&problem), Target::nominal(Arch::Sm89));
//! let question = Question { problem: &problem, tensors: &tensors, target: &target, device: None };
//! let choice = planner.choose(&question)?;
//! assert_eq!(choice.variant.id.kernel, "ampere_fwd");
//! # Ok(())
//! # }
//! ```

mod ampere_f32;
mod ampere_fwd;
mod common;
mod cost;
mod flash_decode;
mod hopper_fwd;
mod hopper_small;
mod hopper_wide;
mod look;
mod rules;
mod settings;
mod variant;

pub use common::common_problems;
pub use settings::{Reason, Settings};
pub use variant::{settings, variant};

use evosdpa_core::Problem;
use evosdpa_kernels::{ProblemFacts, Registry, Target, Variant, VariantId};

use crate::{
    DeviceTensors, Error,
    gpu::DeviceSide,
    tuned::{Scope, TunedTable, user_table},
};

/// Chooses kernels.
#[derive(Clone, Debug)]
pub struct Planner {
    registry: Registry,
    /// The first comes first.
    tables: Vec<TunedTable>,
}

/// What the choice may depend on.
#[derive(Clone, Copy, Debug)]
pub struct Question<'a> {
    /// What is asked. Whether the log-sum-exp is wanted follows from the tensors.
    pub problem: &'a Problem,
    /// The tensors: their strides and alignment decide what can read them.
    pub tensors: &'a DeviceTensors,
    /// What to compile for.
    pub target: &'a Target,
    /// The GPU's name, where there is one.
    pub device: Option<&'a str>,
}

/// What was chosen.
#[derive(Clone, Debug)]
pub struct Choice {
    /// The kernel with its tunables, ready to be compiled.
    pub variant: Variant,
    /// Where the choice of the kernel came from.
    pub origin: Origin,
    /// Its tile, schedule and the like, each with the reason; nothing for a kernel whose defaults suit every problem.
    pub settings: Settings,
    /// The other candidates in the order in which they stood, each with why it was not taken.
    pub others: Vec<Other>,
}

/// Where a candidate came from.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Origin {
    /// A row of a tuned table.
    Row {
        /// The table.
        table: String,
        /// The device it was measured on.
        device: String,
        /// The row's number among the device's, counted from 1.
        number: usize,
        /// Which problems it is for.
        scope: String,
        /// The evidence, in words.
        why: Option<String>,
        /// What was measured.
        p50_us: Option<f64>,
    },
    /// A rule, for what no row covers.
    Rule {
        /// The rule, in words.
        why: &'static str,
    },
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Row { table, device, number, scope, .. } => {
                write!(f, "row {number} of {device} in {table}, for {scope}")
            }
            Self::Rule { why } => write!(f, "rule: {why}"),
        }
    }
}

/// A candidate that was not taken.
#[derive(Clone, Debug, PartialEq)]
pub struct Other {
    /// The kernel, and the tunables that its row sets.
    pub id: VariantId,
    /// Where it came from.
    pub origin: Origin,
    /// Why it was not taken.
    pub why: String,
}

/// A kernel to try.
struct Candidate {
    id: VariantId,
    origin: Origin,
}

impl Planner {
    /// With these kernels, the user's table and the one that is built in.
    pub fn with_tables(registry: Registry) -> Result<Self, Error> {
        let tables = user_table()?.into_iter().chain([TunedTable::embedded()?]).collect();
        Ok(Self { registry, tables })
    }

    /// With these kernels and rules alone.
    pub fn new(registry: Registry) -> Self {
        Self { registry, tables: Vec::new() }
    }

    /// With one more table, after those there are.
    pub fn and_table(mut self, table: TunedTable) -> Self {
        self.tables.push(table);
        self
    }

    /// The kernels to choose from.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// The kernels to choose from, to add to them.
    pub fn registry_mut(&mut self) -> &mut Registry {
        &mut self.registry
    }

    /// The tables, the first to be asked first.
    pub fn tables(&self) -> &[TunedTable] {
        &self.tables
    }

    /// The first candidate that can, and why the others were not taken.
    ///
    /// A problem that no kernel supports is an error that says which kernel comes closest and why it does not.
    pub fn choose(&self, question: &Question<'_>) -> Result<Choice, Error> {
        self.walk(question, true)
    }

    /// What [`Planner::choose`] chooses, without a look at what stands behind it: `others` has only what came before.
    pub fn choose_quickly(&self, question: &Question<'_>) -> Result<Choice, Error> {
        self.walk(question, false)
    }

    /// The variant of this name, if its tensor maps can describe the tensors.
    pub fn forced(&self, question: &Question<'_>, id: &VariantId) -> Result<Variant, Error> {
        question.tensors.check(question.problem)?;
        let mut facts = ProblemFacts::try_from(question.problem)?;
        facts.lse = question.tensors.lse.is_some();
        let kernel = self.registry.kernel(&id.kernel)?;
        reachable(variant(kernel, &facts, question.target, &id.tunables)?, question)
    }

    fn walk(&self, question: &Question<'_>, to_the_end: bool) -> Result<Choice, Error> {
        question.tensors.check(question.problem)?;
        let mut facts = ProblemFacts::try_from(question.problem)?;
        facts.lse = question.tensors.lse.is_some();
        let mut chosen: Option<(Variant, Candidate)> = None;
        let mut others = Vec::new();
        for candidate in self.candidates(&facts, question)? {
            let variant = self.reachable_variant(&candidate, &facts, question);
            let why = match (variant, &chosen) {
                (Ok(variant), None) => {
                    chosen = Some((variant, candidate));
                    if to_the_end {
                        continue;
                    }
                    break;
                }
                (Ok(variant), Some((best, _))) if variant.id == best.id => continue,
                (Ok(_), Some(_)) => "something better is there".to_owned(),
                (Err(error), _) if is_refusal(&error) => error.to_string(),
                (Err(error), _) => return Err(error),
            };
            let Candidate { id, origin } = candidate;
            others.push(Other { id, origin, why });
        }
        if let Some((variant, Candidate { id, origin })) = chosen {
            let kernel = self.registry.kernel(&id.kernel)?;
            let settings = settings(kernel, &facts, question.target, &id.tunables)?;
            return Ok(Choice { variant, origin, settings, others });
        }
        // Says which comes closest when none supports the problem; otherwise it is the tensors.
        self.registry.supporting(&facts, question.target)?;
        Err(Error::Unreachable {
            problem: facts.to_string(),
            reasons: others.iter().map(|other| other.why.as_str()).collect::<Vec<_>>().join("; "),
        })
    }

    /// Rows measured on this very device, then rows of others like it, then rules.
    fn candidates(&self, facts: &ProblemFacts, question: &Question<'_>) -> Result<Vec<Candidate>, Error> {
        let mut candidates = Vec::new();
        for named in [true, false] {
            for table in &self.tables {
                for (_, number, device, row) in table.rows(question.device, named, facts, question.target)? {
                    candidates.push(Candidate {
                        id: row.id(),
                        origin: Origin::Row {
                            table: table.file.clone(),
                            device: device.label(),
                            number,
                            scope: match &row.scope {
                                Scope::Class(shape) => format!("problems like {shape}"),
                                Scope::When(expr) => format!("`{expr}`"),
                            },
                            why: row.why.clone(),
                            p50_us: row.p50_us,
                        },
                    });
                }
            }
        }
        candidates.extend(
            rules::candidates(facts, question.target).into_iter().map(|(kernel, why)| Candidate {
                id: VariantId::new(kernel, []),
                origin: Origin::Rule { why },
            }),
        );
        Ok(candidates)
    }

    /// The candidate's variant, if its tensor maps can describe the tensors.
    fn reachable_variant(
        &self,
        candidate: &Candidate,
        facts: &ProblemFacts,
        question: &Question<'_>,
    ) -> Result<Variant, Error> {
        let kernel = self.registry.kernel(&candidate.id.kernel)?;
        reachable(variant(kernel, facts, question.target, &candidate.id.tunables)?, question)
    }
}

/// The variant, if its tensor maps can describe the tensors.
fn reachable(variant: Variant, question: &Question<'_>) -> Result<Variant, Error> {
    for wanted in &variant.tensor_maps {
        question.tensors.tensor_map(question.problem, wanted)?.check()?;
    }
    Ok(variant)
}

/// Whether another candidate may still do, rather than something being broken. A row of an older table may name what is no
/// longer there.
fn is_refusal(error: &Error) -> bool {
    use evosdpa_kernels::Error as Kernels;
    match error {
        Error::Kernels(error) => matches!(
            error,
            Kernels::Unsupported { .. }
                | Kernels::Constraint { .. }
                | Kernels::NoAssignment { .. }
                | Kernels::LaunchSize { .. }
                | Kernels::UnknownKernel { .. }
                | Kernels::UnknownTunable { .. }
                | Kernels::TunableValue { .. }
        ),
        Error::Cuda(error) => error.kind() == evosdpa_cuda::ErrorKind::Refused,
        _ => false,
    }
}

/// Packed tensors at addresses that suit every kernel: what a choice is made for when there are none yet.
pub fn assumed_tensors(problem: &Problem) -> DeviceTensors {
    let nominal = 1 << 20;
    let mut tensors = DeviceTensors::packed(problem, [nominal; 4], problem.lse().then_some(nominal));
    if problem.has_codes() {
        tensors.scales = Some(crate::DeviceScales { q: nominal, k: nominal, v: nominal });
    }
    tensors.side = DeviceSide::assumed(problem, nominal);
    tensors
}

#[cfg(test)]
mod tests;
