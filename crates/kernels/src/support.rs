//! Whether a kernel supports a problem, and why not.

use std::fmt;

use evosdpa_core::{DType, Feature, Features};

use crate::{Arch, Kernel, Manifest, MaskKind, ProblemFacts, Range, ValueDim};

/// A kernel that cannot take a problem, and every reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The kernel.
    pub kernel: String,
    /// Why not; never empty.
    pub reasons: Vec<Reason>,
}

/// One reason why a kernel cannot take a problem.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// It does not compile for the architecture.
    Arch(Arch, Vec<Arch>),
    /// It does not read the input type.
    Dtype(DType, Vec<DType>),
    /// It does not support a size.
    Size {
        /// Which size.
        field: &'static str,
        /// Its value.
        value: u32,
        /// What is supported.
        allowed: Range,
    },
    /// V must have the head dimension of Q and K.
    ValueDim {
        /// Head dimension of Q and K.
        head_dim: u32,
        /// Head dimension of V.
        value_dim: u32,
    },
    /// It does not support the mask.
    Mask(MaskKind, Vec<MaskKind>),
    /// Query heads may not share key/value heads.
    Gqa {
        /// Query heads.
        heads_q: u32,
        /// Key/value heads.
        heads_kv: u32,
    },
    /// It cannot write the log-sum-exp.
    Lse,
    /// It does not know what the problem asks for.
    Features(Features),
    /// No tunable values keep its constraints.
    Constraint {
        /// A constraint that failed.
        expr: String,
        /// Why the kernel needs it.
        why: String,
    },
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Arch(arch, has) => write!(f, "it is built for {}, not {arch}", list(has)),
            Self::Dtype(dtype, has) => write!(f, "it reads {}, not {dtype}", list(has)),
            Self::Size { field, value, allowed } => write!(f, "{field} is {value}, it takes {allowed}"),
            Self::ValueDim { head_dim, value_dim } => {
                write!(f, "value_dim {value_dim} differs from head_dim {head_dim}, it takes only equal ones")
            }
            Self::Mask(mask, has) => write!(f, "it masks {}, not {mask}", list(has)),
            Self::Gqa { heads_q, heads_kv } => {
                write!(
                    f,
                    "{heads_q} query heads share {heads_kv} key/value heads, it takes only equal numbers"
                )
            }
            Self::Lse => write!(f, "it cannot write the log-sum-exp"),
            Self::Features(features) => write!(f, "it does not take {features}"),
            Self::Constraint { expr, why } => write!(f, "no tunable values satisfy `{expr}` ({why})"),
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reasons: Vec<String> = self.reasons.iter().map(Reason::to_string).collect();
        write!(f, "`{}`: {}", self.kernel, reasons.join("; "))
    }
}

fn list<T: fmt::Display>(items: &[T]) -> String {
    items.iter().map(T::to_string).collect::<Vec<_>>().join(", ")
}

/// The kind by which a source keeps the weights of some rows, or of all, to twice the bits.
const PRECISE_KIND: &str = "PRECISE_KEYS";

/// The tunable by which a source splits keys by their sequence's length alone.
const SPLIT_TUNABLE: &str = "SPLIT_KEYS";

/// What a source knows about beyond sizes and a mask: what its defines ask for, high precision where it has the kind or reads f32 alone,
/// and batch-invariant results where it has the tunable.
pub(crate) fn features(manifest: &Manifest) -> Features {
    let asked = |feature: &Feature| match feature {
        Feature::HighPrecision => {
            let reads_f32_alone = manifest.dtypes.iter().all(|dtype| *dtype == DType::F32);
            reads_f32_alone || manifest.kinds.iter().any(|kind| kind.name == PRECISE_KIND)
        }
        Feature::BatchInvariant => manifest.tunables.iter().any(|tunable| tunable.name == SPLIT_TUNABLE),
        _ => {
            let name = ProblemFacts::feature_name(*feature);
            manifest.defines.values().any(|expr| expr.names().contains(&name))
        }
    };
    Feature::ALL.into_iter().filter(asked).collect()
}

/// Every reason why the kernel does not support the problem.
pub(crate) fn reasons(kernel: &Kernel, facts: &ProblemFacts, arch: Arch) -> Vec<Reason> {
    let manifest = &kernel.manifest;
    let mut reasons = Vec::new();
    if !compiles_for(manifest, arch) {
        reasons.push(Reason::Arch(arch, manifest.archs.clone()));
    }
    if !manifest.dtypes.contains(&facts.dtype) {
        reasons.push(Reason::Dtype(facts.dtype, manifest.dtypes.clone()));
    }
    for (field, value, allowed) in [
        ("head_dim", facts.head_dim, &manifest.head_dim),
        ("seq_q", facts.seq_q, &manifest.seq_q),
        ("seq_kv", facts.seq_kv, &manifest.seq_kv),
    ] {
        if !allowed.contains(value) {
            reasons.push(Reason::Size { field, value, allowed: allowed.clone() });
        }
    }
    match manifest.value_dim {
        ValueDim::Same if facts.value_dim != facts.head_dim => {
            reasons.push(Reason::ValueDim { head_dim: facts.head_dim, value_dim: facts.value_dim });
        }
        // One size that is too large for both is one reason.
        ValueDim::Any
            if facts.value_dim != facts.head_dim && !manifest.head_dim.contains(facts.value_dim) =>
        {
            let allowed = manifest.head_dim.clone();
            reasons.push(Reason::Size { field: "value_dim", value: facts.value_dim, allowed });
        }
        _ => {}
    }
    if !manifest.masks.contains(&facts.mask()) {
        reasons.push(Reason::Mask(facts.mask(), manifest.masks.clone()));
    }
    if !manifest.gqa && facts.heads_q != facts.heads_kv {
        reasons.push(Reason::Gqa { heads_q: facts.heads_q, heads_kv: facts.heads_kv });
    }
    if !manifest.lse && facts.lse {
        reasons.push(Reason::Lse);
    }
    let refused = facts.features.without(kernel.features);
    if !refused.is_empty() {
        reasons.push(Reason::Features(refused));
    }
    reasons
}

/// sm_86 runs whatever is written for sm_80: the same features, less shared memory.
pub(crate) fn compiles_for(manifest: &Manifest, arch: Arch) -> bool {
    manifest.archs.contains(&arch) || (arch == Arch::Sm86 && manifest.archs.contains(&Arch::Sm80))
}
