//! Which kernel answers a problem on a GPU, with which tunables, and why.
//!
//! The planner walks a list of candidates, best first, and takes the first that can. Nothing here needs a GPU.

mod rules;

use evosdpa_core::{DType, Problem};
use evosdpa_kernels::{Kernel, ProblemFacts, Registry, Target, Variant};

use crate::{DeviceTensors, Error};

/// Chooses kernels.
#[derive(Clone, Debug)]
pub struct Planner {
    registry: Registry,
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
    /// Where the choice came from.
    pub origin: Origin,
    /// The other candidates in the order in which they would have been tried, each with why it was not taken.
    pub others: Vec<Other>,
}

/// Where a choice came from.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Origin {
    /// A rule, because no row of a table covers the problem.
    Rule {
        /// The rule, in words.
        why: &'static str,
    },
}

/// A candidate that was not taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Other {
    /// The kernel.
    pub kernel: String,
    /// Why not.
    pub why: String,
}

impl Planner {
    /// With these kernels.
    pub fn new(registry: Registry) -> Self {
        Self { registry }
    }

    /// The kernels to choose from.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// The first candidate that can.
    ///
    /// A problem that no kernel supports is an error that says which kernel comes closest and why it does not.
    pub fn choose(&self, question: &Question<'_>) -> Result<Choice, Error> {
        question.tensors.check(question.problem)?;
        let facts = facts(question)?;
        // Says which comes closest when there is none.
        self.registry.supporting(&facts, question.target)?;
        let mut chosen: Option<(Variant, Origin)> = None;
        let mut others = Vec::new();
        for (name, why) in rules::candidates(&facts, question.target) {
            let Ok(kernel) = self.registry.kernel(name) else { continue };
            let other = |why: String| Other { kernel: name.to_owned(), why };
            match (reachable_variant(kernel, &facts, question), &chosen) {
                (Err(error), _) if is_refusal(&error) => others.push(other(error.to_string())),
                (Err(error), _) => return Err(error),
                (Ok(variant), None) => chosen = Some((variant, Origin::Rule { why })),
                (Ok(_), Some((best, _))) => others.push(other(format!("comes after {}", best.kernel))),
            }
        }
        match chosen {
            Some((variant, origin)) => Ok(Choice { variant, origin, others }),
            None => Err(Error::Unreachable {
                problem: facts.to_string(),
                reasons: others.iter().map(|other| other.why.as_str()).collect::<Vec<_>>().join("; "),
            }),
        }
    }
}

/// The problem as manifests see it.
fn facts(question: &Question<'_>) -> Result<ProblemFacts, Error> {
    let mut facts = ProblemFacts::try_from(question.problem)?;
    facts.lse = question.tensors.lse.is_some();
    Ok(facts)
}

/// The kernel's variant, if its tensor maps can describe the tensors.
fn reachable_variant(
    kernel: &Kernel,
    facts: &ProblemFacts,
    question: &Question<'_>,
) -> Result<Variant, Error> {
    let variant = kernel.default_variant(facts, question.target)?;
    for wanted in &variant.tensor_maps {
        question.tensors.tensor_map(question.problem, wanted)?.check()?;
    }
    Ok(variant)
}

/// Whether another candidate may still do, rather than something being broken.
fn is_refusal(error: &Error) -> bool {
    use evosdpa_kernels::Error as Kernels;
    match error {
        Error::Kernels(error) => matches!(
            error,
            Kernels::Unsupported { .. }
                | Kernels::Constraint { .. }
                | Kernels::NoAssignment { .. }
                | Kernels::LaunchSize { .. }
        ),
        Error::Cuda(error) => error.is_a_refusal(),
        _ => false,
    }
}

/// Packed tensors at addresses that suit every kernel: what a choice is made for when there are none yet.
pub fn assumed_tensors(problem: &Problem) -> DeviceTensors {
    let nominal = 1 << 20;
    let mut tensors = DeviceTensors::packed(problem, [nominal; 4], problem.lse().then_some(nominal));
    if DType::EIGHT_BIT.contains(&problem.dtype()) {
        tensors.scales = Some(crate::DeviceScales { q: nominal, k: nominal, v: nominal });
    }
    tensors
}

#[cfg(test)]
mod tests {
    use evosdpa_kernels::Arch;

    use super::*;

    fn choose(
        text: &str,
        dtype: DType,
        arch: Arch,
        change: impl Fn(&mut DeviceTensors),
    ) -> Result<Choice, Error> {
        let problem = Problem::new(text.parse().unwrap(), dtype).unwrap();
        let mut tensors = assumed_tensors(&problem);
        change(&mut tensors);
        let target = Target::nominal(arch);
        let question = Question { problem: &problem, tensors: &tensors, target: &target, device: None };
        Planner::new(Registry::embedded().unwrap()).choose(&question)
    }

    fn kernel(text: &str, dtype: DType, arch: Arch) -> String {
        choose(text, dtype, arch, |_| {}).unwrap().variant.kernel
    }

    #[test]
    fn every_architecture_has_its_kernels() {
        assert_eq!(kernel("mission", DType::BF16, Arch::Sm90a), "hopper_small");
        assert_eq!(kernel("long:causal", DType::F16, Arch::Sm90a), "hopper_fwd");
        assert_eq!(kernel("b4h32/8s1/4096d128", DType::BF16, Arch::Sm90a), "hopper_small");
        for arch in [Arch::Sm80, Arch::Sm86, Arch::Sm89] {
            assert_eq!(kernel("long:causal", DType::F16, arch), "ampere_fwd");
        }
        assert_eq!(kernel("mission", DType::U8, Arch::Sm90a), "sdpa_fp8_stage_c");
    }

    #[test]
    fn tensors_that_the_copy_engine_cannot_reach_go_to_a_kernel_that_can() {
        type Change = fn(&mut DeviceTensors);
        let changes: [(Change, &str); 3] = [
            (|t| t.q.address += 2, "no tensor map for Q: its address"),
            (|t| t.k.strides[2] += 1, "no tensor map for K: its sequence stride of 65"),
            (|t| t.v.strides[1] = 0, "no tensor map for V: its head stride of 0"),
        ];
        for (change, why) in changes {
            let choice = choose("long", DType::F16, Arch::Sm90a, change).unwrap();
            assert_eq!(choice.variant.kernel, "ampere_fwd");
            let hopper = choice.others.iter().find(|other| other.kernel == "hopper_fwd").unwrap();
            assert!(hopper.why.contains(why), "{hopper:?}");
        }
        // 36 elements of 2 bytes are no multiple of 16 bytes.
        assert_eq!(kernel("b1h8s512d36", DType::F16, Arch::Sm90a), "ampere_fwd");
    }

    #[test]
    fn a_problem_nobody_takes_names_who_comes_closest() {
        let message = choose("b1h8s512d512", DType::F16, Arch::Sm89, |_| {}).unwrap_err().to_string();
        assert!(message.contains("the closest is") && message.contains("head_dim is 512"), "{message}");
        let message = choose("mission", DType::F32, Arch::Sm90a, |_| {}).unwrap_err().to_string();
        assert!(message.contains("the closest is") && message.contains("not f32"), "{message}");
    }
}
