//! Tuned tables: what was measured to be best, for a device and a class of problems.
//!
//! A table is a TOML file. One is built in ([`TunedTable::embedded`]); the user's own comes before it
//! ([`user_table_path`]) and is what `evosdpa apply` writes.
//!
//! ```
//! let table = evosdpa::tuned::TunedTable::parse(r#"
//!     schema = 1
//!
//!     [[device]]
//!     arch = "sm_90a"
//!     name = "NVIDIA H200"          # the driver's name; other devices of the architecture come second
//!
//!     [[device.row]]
//!     shape = "mission:causal"      # this problem and those of about its size
//!     dtypes = ["bf16"]             # all of them when absent
//!     kernel = "hopper_small"
//!     tunables = { WG_N = 1 }       # the others keep their defaults
//!     why = "elite of a tune"
//!
//!     [[device.row]]
//!     when = "seq_q <= 64"          # or an expression over the problem, as in manifests
//!     kernel = "hopper_small"
//! "#, "mine.toml")?;
//! assert_eq!(table.devices.len(), 1);
//! # Ok::<(), evosdpa::Error>(())
//! ```
//!
//! A processor's rows name an instruction set as `arch` and have a `shape` each; they set the tile sizes and threads of
//! `cpu_flash` ([`CpuTunables`]).
//!
//! Of the rows of a device, those with a `shape` come first, the nearest before the others; then those with `when`, in the
//! order of the file. A row whose kernel cannot take the problem, or is not there, is passed over, and
//! `evosdpa plan --explain` says so.

mod arch;
mod cpu;
mod elite;
mod read;
mod user;

use std::collections::BTreeMap;

use evosdpa_core::{DType, Shape};
use evosdpa_kernels::{Expr, ProblemFacts, Target, VariantId};

pub use arch::TunedArch;
#[cfg(feature = "cpu")]
pub(crate) use cpu::settle;
#[cfg(feature = "cpu")]
pub use cpu::{CpuRow, cpu_row};
pub use cpu::{CpuTunables, processor_name};
pub use elite::{Elites, LeftOut, Merged, Unconfirmed};
pub use user::{VARIABLE, read_table, update_table, user_table, user_table_path};

use crate::Error;

/// Problems count as of one class while none of their sizes differ by more than this factor.
const CLASS_FACTOR: f64 = 1.5;

/// What was measured to be best.
#[derive(Clone, Debug, Default)]
pub struct TunedTable {
    /// What errors and explanations call it.
    pub file: String,
    /// Devices and their rows.
    pub devices: Vec<TunedDevice>,
}

/// A device and what is best on it.
#[derive(Clone, Debug)]
pub struct TunedDevice {
    /// Its architecture, or a processor's instruction set.
    pub arch: TunedArch,
    /// The name the driver or the system gives it; `None` is every device of the architecture.
    pub name: Option<String>,
    /// What is best for which problems.
    pub rows: Vec<TunedRow>,
}

/// What is best for some problems.
#[derive(Clone, Debug)]
pub struct TunedRow {
    /// Which problems.
    pub scope: Scope,
    /// Input types; every one when empty.
    pub dtypes: Vec<DType>,
    /// The kernel.
    pub kernel: String,
    /// Tunables that are not at their defaults.
    pub tunables: BTreeMap<String, i64>,
    /// The evidence, in words.
    pub why: Option<String>,
    /// What was measured, if it was.
    pub p50_us: Option<f64>,
    /// How many times as fast as what it was measured against.
    pub speedup: Option<f64>,
}

/// Which problems a row is for.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Scope {
    /// A problem, and those of its class: the same mask, head dimensions and heads per key head, and sizes that differ by
    /// at most half.
    Class(Shape),
    /// Every problem for which an expression is not 0.
    When(Expr),
}

/// How well a row fits a problem; smaller is better.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub(crate) enum Fit {
    /// The row is for this very problem, or for one at this distance from it.
    Class(f64),
    /// The row's expression holds.
    When,
}

impl TunedTable {
    /// The table that is built in.
    pub fn embedded() -> Result<Self, Error> {
        Self::parse(include_str!("../../tuned/h200.toml"), "h200.toml (built in)")
    }

    /// The rows for a device that fit a problem, best first, each with its number in the device's list.
    ///
    /// `named` asks for the rows of devices of this very name; the others are those of the same architecture.
    pub(crate) fn rows<'a>(
        &'a self,
        device: Option<&str>,
        named: bool,
        facts: &ProblemFacts,
        target: &Target,
    ) -> Result<Vec<(Fit, usize, &'a TunedDevice, &'a TunedRow)>, Error> {
        let mut fitting = Vec::new();
        for tuned in self.devices.iter().filter(|tuned| tuned.arch == TunedArch::Gpu(target.arch)) {
            let same_name = tuned.name.as_deref().is_some_and(|name| Some(name) == device);
            if same_name != named {
                continue;
            }
            for (number, row) in tuned.rows.iter().enumerate() {
                if let Some(fit) = row.fit(facts, target).map_err(|source| Error::Table {
                    file: self.file.clone(),
                    problem: format!("row {} of {}: {source}", number + 1, tuned.label()),
                })? {
                    fitting.push((fit, number + 1, tuned, row));
                }
            }
        }
        // Rows of equal fit stay in the order of the file.
        fitting.sort_by(|(a, ..), (b, ..)| a.partial_cmp(b).unwrap_or(std::cmp::Ordering::Equal));
        Ok(fitting)
    }
}

impl TunedDevice {
    /// `NVIDIA H200 (sm_90a)`.
    pub fn label(&self) -> String {
        match &self.name {
            Some(name) => format!("{name} ({})", self.arch),
            None => self.arch.to_string(),
        }
    }
}

impl TunedRow {
    /// The kernel and the tunables it sets.
    pub fn id(&self) -> VariantId {
        VariantId::new(&self.kernel, self.tunables.iter().map(|(name, value)| (name.as_str(), *value)))
    }

    fn fit(&self, facts: &ProblemFacts, target: &Target) -> Result<Option<Fit>, evosdpa_kernels::ExprError> {
        if !self.dtypes.is_empty() && !self.dtypes.contains(&facts.dtype) {
            return Ok(None);
        }
        match &self.scope {
            Scope::Class(shape) => Ok(class_distance(shape, facts).map(Fit::Class)),
            Scope::When(expr) => Ok((expr.evaluate_for(facts, target)? != 0).then_some(Fit::When)),
        }
    }
}

/// How far a problem is from a shape, or `None` when it is of another class.
fn class_distance(shape: &Shape, facts: &ProblemFacts) -> Option<f64> {
    let sizes = shape.sizes();
    let asked = evosdpa_core::Problem::new(*shape, evosdpa_core::DType::F16).ok()?;
    let known = ProblemFacts::try_from(&asked).ok()?;
    let group = |facts: &ProblemFacts| facts.heads_q / facts.heads_kv;
    let same = known.mask() == facts.mask()
        && (known.head_dim, known.value_dim) == (facts.head_dim, facts.value_dim)
        && group(&known) == group(facts);
    if !same {
        return None;
    }
    let heads = (sizes.batch * sizes.heads_kv) as f64;
    let pairs = [
        (heads, f64::from(facts.batch) * f64::from(facts.heads_kv)),
        (f64::from(known.seq_q), f64::from(facts.seq_q)),
        (f64::from(known.seq_kv), f64::from(facts.seq_kv)),
    ];
    let mut distance = 0.0;
    for (a, b) in pairs {
        let apart = (a / b).ln().abs();
        // A hair more than the factor, so that 3:2 itself is inside.
        if apart > CLASS_FACTOR.ln() + 1e-9 {
            return None;
        }
        distance += apart;
    }
    // Bounds of a window, and the corner a causal mask starts from, make another problem of the same class.
    let same_band = (known.band_lo, known.band_hi) == (facts.band_lo, facts.band_hi);
    Some(if distance == 0.0 && !same_band { 1e-6 } else { distance })
}

#[cfg(test)]
mod tests {
    use evosdpa_kernels::Arch;

    use super::*;

    fn facts(text: &str) -> ProblemFacts {
        let problem = evosdpa_core::Problem::new(text.parse().unwrap(), evosdpa_core::DType::BF16).unwrap();
        ProblemFacts::try_from(&problem).unwrap()
    }

    fn table(text: &str) -> TunedTable {
        TunedTable::parse(text, "t.toml").unwrap()
    }

    #[test]
    fn a_class_is_about_the_same_size() {
        let shape: Shape = "b2h8s1000d64:causal".parse().unwrap();
        let distance = |text: &str| class_distance(&shape, &facts(text));
        assert_eq!(distance("b2h8s1000d64:causal"), Some(0.0));
        // The same number of heads in all, and three halves of the length.
        assert!(distance("b4h4s1500d64:causal").is_some_and(|distance| distance > 0.0));
        let bottom_right = distance("b2h8s1000/1100d64:causal-br");
        assert!(bottom_right.is_some_and(|distance| distance > 0.0), "{bottom_right:?}");
        for other in [
            "b2h8s1000d64",
            "b2h8s1000d72:causal",
            "b2h16/8s1000d64:causal",
            "b2h8s1501d64:causal",
            "b2h8s666d64:causal",
            "b4h8s1000d64:causal",
        ] {
            assert_eq!(distance(other), None, "{other}");
        }
    }

    const TABLE: &str = r#"
        schema = 1
        [[device]]
        arch = "sm_90a"
        name = "NVIDIA H200"
        row = [
            { when = "seq_q <= 600", kernel = "first" },
            { when = "1", dtypes = ["f16"], kernel = "halves" },
            { shape = "b1h8s400d64", kernel = "far" },
            { shape = "mission", kernel = "near" },
        ]
        [[device]]
        arch = "sm_90a"
        row = [{ when = "1", kernel = "any" }]
        [[device]]
        arch = "sm_80"
        row = [{ when = "1", kernel = "old" }]
    "#;

    fn kernels(device: Option<&str>, named: bool, problem: &str) -> Vec<String> {
        let target = Target::nominal(Arch::Sm90a);
        let table = table(TABLE);
        let rows = table.rows(device, named, &facts(problem), &target).unwrap();
        rows.into_iter().map(|(.., row)| row.kernel.clone()).collect()
    }

    #[test]
    fn shapes_come_before_expressions_and_the_nearest_first() {
        let device = Some("NVIDIA H200");
        assert_eq!(kernels(device, true, "mission"), ["near", "far", "first"]);
        assert_eq!(kernels(device, true, "b1h8s410d64"), ["far", "near", "first"]);
        assert_eq!(kernels(device, false, "mission"), ["any"]);
        assert_eq!(kernels(Some("NVIDIA H100"), true, "mission"), [""; 0]);
        assert_eq!(kernels(Some("NVIDIA H100"), false, "mission"), ["near", "far", "first", "any"]);
        assert_eq!(kernels(None, false, "long"), ["any"]);
    }
}
