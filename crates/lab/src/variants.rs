//! From "these kernels, these architectures" to the variants to build.

use evosdpa::choose;
use evosdpa_core::{DType, Problem, Shape};
use evosdpa_kernels::{Arch, Kernel, MaskKind, ProblemFacts, Range, Target, ValueDim, Variant};

use crate::{Error, gate::GateResult};

/// Past this many the variants of a kernel are no longer counted.
pub const COUNT_LIMIT: usize = 4096;

/// The gate that refuses a problem or a manifest.
pub const GATE: &str = "manifest";

/// What to build of each kernel.
#[derive(Clone, Debug)]
pub struct Request {
    /// What to compile for; every architecture of the kernel's manifest when empty.
    pub targets: Vec<Target>,
    /// Input types; every one of the kernel's manifest when empty.
    pub dtypes: Vec<DType>,
    /// The problem.
    pub shape: Shape,
    /// Whether a kernel that cannot take the problem gets the nearest one it can take.
    pub adapt: bool,
    /// Tunables with a value of the user's; the others keep their defaults.
    pub set: Vec<(String, i64)>,
    /// Build every combination of tunables, up to this many for each kernel, architecture and input type.
    pub all_variants: Option<usize>,
}

/// One variant to build.
#[derive(Clone, Debug)]
pub struct Job {
    /// What it reads.
    pub dtype: DType,
    /// The problem it is built for.
    pub problem: ProblemFacts,
    /// What it is built for.
    pub target: Target,
    /// The variant.
    pub variant: Variant,
}

impl Job {
    /// `sdpa_v2b[STAGES=2] sm_90a f16`.
    pub fn label(&self) -> String {
        format!("{} {} {}", self.variant.label(), self.target.arch, self.dtype)
    }
}

/// A kernel that cannot be built as asked.
#[derive(Clone, Debug)]
pub struct Refused {
    /// The kernel.
    pub kernel: String,
    /// What it was to be built for.
    pub arch: Arch,
    /// What it was to read.
    pub dtype: DType,
    /// Why not. A manifest that fits no problem at all is a failure; a problem it does not support is not.
    pub gate: GateResult,
}

/// How many variants there are of one kernel for one architecture and input type.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Space {
    /// The kernel.
    pub kernel: String,
    /// The architecture.
    pub arch: Arch,
    /// The input type.
    pub dtype: String,
    /// How many of them are to be built.
    pub chosen: usize,
    /// How many there are, counted up to [`COUNT_LIMIT`].
    pub total: usize,
}

/// What a request means.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// What to build.
    pub jobs: Vec<Job>,
    /// What cannot be built.
    pub refused: Vec<Refused>,
    /// How many variants there are; empty unless all were asked for.
    pub spaces: Vec<Space>,
}

impl Selection {
    /// Adds a kernel's part of a request. An error is wrong use: a tunable that does not exist, or a value it cannot
    /// have.
    pub fn add(&mut self, kernel: &Kernel, request: &Request) -> Result<(), Error> {
        // Names and values are checked before anything else, so that a typing error is not hidden by a refusal.
        kernel.space().assign(request.set.iter().map(|(name, value)| (name.as_str(), *value)))?;
        let own_targets: Vec<Target>;
        let targets = if request.targets.is_empty() {
            own_targets = kernel.manifest.archs.iter().map(|arch| Target::nominal(*arch)).collect();
            &own_targets
        } else {
            &request.targets
        };
        let dtypes = if request.dtypes.is_empty() { &kernel.manifest.dtypes } else { &request.dtypes };
        for target in targets {
            for dtype in dtypes {
                self.add_one(kernel, request, *target, *dtype)?;
            }
        }
        Ok(())
    }

    fn add_one(
        &mut self,
        kernel: &Kernel,
        request: &Request,
        target: Target,
        dtype: DType,
    ) -> Result<(), Error> {
        // Only the sizes and the mask are taken from it, so that any type the shape accepts will do.
        let asked = Problem::new(request.shape, DType::F16)?;
        let mut problem = ProblemFacts::try_from(&asked)?;
        problem.dtype = dtype;
        problem.lse = kernel.manifest.lse;
        if request.adapt && kernel.supports(&problem, &target).is_err() {
            problem = nearest_supported(kernel, problem);
        }
        if let Err(refusal) = kernel.supports(&problem, &target) {
            let listed = kernel.compiles_for(target.arch) && kernel.manifest.dtypes.contains(&dtype);
            let gate = if request.adapt && listed {
                GateResult::fail(GATE, format!("{}: {refusal}", kernel.manifest_file))
            } else {
                GateResult::unavailable(GATE, refusal.to_string())
            };
            self.refused.push(Refused { kernel: kernel.name().to_owned(), arch: target.arch, dtype, gate });
            return Ok(());
        }
        let job = |variant: Variant| Job { dtype, problem, target, variant };
        let Some(cap) = request.all_variants else {
            let set = request.set.iter().map(|(name, value)| (name.as_str(), *value)).collect();
            self.jobs.push(job(choose::variant(kernel, &problem, &target, &set)?));
            return Ok(());
        };
        let before = self.jobs.len();
        let mut total = 0;
        for variant in kernel.variants(&problem, &target) {
            let variant = variant?;
            if request.set.iter().any(|(name, value)| variant.id.tunables.value(name) != Some(*value)) {
                continue;
            }
            if total < cap {
                self.jobs.push(job(variant));
            }
            total += 1;
            if total == COUNT_LIMIT {
                break;
            }
        }
        self.spaces.push(Space {
            kernel: kernel.name().to_owned(),
            arch: target.arch,
            dtype: dtype.name().to_owned(),
            chosen: self.jobs.len() - before,
            total,
        });
        Ok(())
    }
}

/// The problem with every size and the mask moved to the nearest that the manifest allows.
fn nearest_supported(kernel: &Kernel, asked: ProblemFacts) -> ProblemFacts {
    let manifest = &kernel.manifest;
    let head_dim = nearest(&manifest.head_dim, asked.head_dim);
    let mut problem = ProblemFacts {
        head_dim,
        value_dim: match manifest.value_dim {
            ValueDim::Same => head_dim,
            ValueDim::Any => nearest(&manifest.head_dim, asked.value_dim),
        },
        seq_q: nearest(&manifest.seq_q, asked.seq_q),
        seq_kv: nearest(&manifest.seq_kv, asked.seq_kv),
        heads_kv: if manifest.gqa { asked.heads_kv } else { asked.heads_q },
        ..asked
    };
    if !manifest.masks.contains(&problem.mask()) {
        (problem.band_lo, problem.band_hi) = match manifest.masks.first() {
            Some(MaskKind::Causal) => (None, Some(0)),
            Some(MaskKind::Window) => (Some(-1), Some(0)),
            Some(MaskKind::Full) | None => (None, None),
        };
    }
    problem
}

fn nearest(range: &Range, wanted: u32) -> u32 {
    match range {
        Range::Between { min, max } => wanted.min(max.unwrap_or(u32::MAX)).max(*min),
        Range::OneOf(sizes) => {
            sizes.iter().copied().min_by_key(|size| size.abs_diff(wanted)).unwrap_or(wanted)
        }
    }
}
