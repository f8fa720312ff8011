//! What a kernel's TOML file says.

mod read;

use std::{collections::BTreeMap, fmt};

use evosdpa_core::{DType, Shape};
use serde::Deserialize;

use crate::{Arch, Expr};

/// The largest head dimension of a kernel whose manifest names no other.
pub const HEAD_DIM_MAX: u32 = 256;

/// A kernel's manifest, read and checked.
#[derive(Clone, Debug)]
pub struct Manifest {
    /// The kernel's name.
    pub name: String,
    /// One line for a listing.
    pub summary: String,
    /// The kernel it was developed from.
    pub parent: Option<String>,
    /// What changed against the parent, and why.
    pub changed: Option<String>,
    /// The source file, relative to the manifest.
    pub source: String,
    /// The entry point.
    pub entry: String,
    /// The architectures it compiles for; the first is the minimum.
    pub archs: Vec<Arch>,
    /// Which rule its results are held to.
    pub tolerance: Tolerance,
    /// Whether runs on the same input are bit-identical.
    pub deterministic: bool,
    /// Extra options for the compiler.
    pub options: Vec<String>,
    /// Tensor maps it takes by value after the parameters, in order.
    pub tensor_maps: Vec<TensorMapSpec>,
    /// Input types it reads.
    pub dtypes: Vec<DType>,
    /// Head dimensions it supports.
    pub head_dim: Range,
    /// Whether V may have another head dimension than Q and K.
    pub value_dim: ValueDim,
    /// Query lengths it supports.
    pub seq_q: Range,
    /// Key/value lengths it supports.
    pub seq_kv: Range,
    /// Masks it supports.
    pub masks: Vec<MaskKind>,
    /// Whether several query heads may share one key/value head.
    pub gqa: bool,
    /// Whether it can write the log-sum-exp.
    pub lse: bool,
    /// Its launch geometry.
    pub launch: Launch,
    /// Whose rules choose its tunables and kinds for a problem; without one they keep their defaults.
    pub family: Option<String>,
    /// Compile-time values that the source reads and that follow from head dimensions, types and tunables.
    pub defines: BTreeMap<String, Expr>,
    /// Names for parts of other expressions; no compiler sees them.
    pub lets: BTreeMap<String, Expr>,
    /// Compile-time values that a problem's lengths may have a say in: a few values each, so that few codes come of them.
    pub kinds: Vec<Kind>,
    /// What can be tuned: macro first, each layer by name.
    pub tunables: Vec<Tunable>,
    /// What combinations of tunables must satisfy.
    pub constraints: Vec<Constraint>,
    /// Resource limits per architecture.
    pub limits: BTreeMap<Arch, LimitRules>,
    /// For a known-bad relative: what is wrong, and who must notice.
    pub mutant: Option<Mutant>,
}

/// Which rule a kernel's results are held to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tolerance {
    /// The fp16/bf16 rules.
    Half,
    /// The rules for 8-bit inputs.
    EightBit,
}

/// Kinds of masks a kernel can support.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MaskKind {
    /// Every query sees every key.
    Full,
    /// Causal, aligned at either corner.
    Causal,
    /// Any other band.
    Window,
}

impl fmt::Display for MaskKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Full => "full",
            Self::Causal => "causal",
            Self::Window => "window",
        })
    }
}

/// Whether V may have another head dimension than Q and K.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ValueDim {
    /// It must be the same.
    Same,
    /// It may be any that `head_dim` allows.
    Any,
}

/// A set of supported sizes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Range {
    /// From `min` to `max`, both included; no `max` is unbounded.
    Between {
        /// The least.
        min: u32,
        /// The most.
        max: Option<u32>,
    },
    /// Exactly these.
    OneOf(Vec<u32>),
}

impl Range {
    /// Every size.
    pub const ANY: Self = Self::Between { min: 1, max: None };

    /// Whether a size is among them.
    pub fn contains(&self, size: u32) -> bool {
        match self {
            Self::Between { min, max } => size >= *min && max.is_none_or(|max| size <= max),
            Self::OneOf(sizes) => sizes.contains(&size),
        }
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Between { min, max: Some(max) } => write!(f, "{min} to {max}"),
            Self::Between { min, max: None } => write!(f, "at least {min}"),
            Self::OneOf(sizes) => {
                let sizes: Vec<String> = sizes.iter().map(u32::to_string).collect();
                write!(f, "{}", sizes.join(" or "))
            }
        }
    }
}

/// A kernel's launch geometry, as expressions.
#[derive(Clone, Debug)]
pub struct Launch {
    /// Threads per block: x, y, z.
    pub block: [Expr; 3],
    /// Blocks: x, y, z.
    pub grid: [Expr; 3],
    /// Blocks per cluster: x, y, z.
    pub cluster: Option<[Expr; 3]>,
    /// Dynamic shared memory in bytes.
    pub dynamic_smem: Expr,
    /// Not 0: the kernel may start while the one before it on the stream still runs. See
    /// [`LaunchGeometry::programmatic`](crate::LaunchGeometry::programmatic) for what that asks of the kernel.
    pub programmatic: Option<Expr>,
    /// Not 0: the kernel hands its work out by a counter. See [`LaunchGeometry::counter`](crate::LaunchGeometry::counter)
    /// for what that asks of the kernel.
    pub counter: Option<Expr>,
    /// Bytes of memory that its blocks share. See
    /// [`LaunchGeometry::workspace_bytes`](crate::LaunchGeometry::workspace_bytes) for what that asks of the kernel.
    pub workspace: Option<Expr>,
}

/// A tensor map (TMA descriptor) that a kernel takes by value.
///
/// The tensor is seen as four-dimensional, innermost first: head dimension, sequence, head, batch.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorMapSpec {
    /// Which tensor: `q`, `k`, `v` or `o`.
    pub tensor: TensorName,
    /// The sizes of one box, innermost first: head dimension, sequence, heads, batch.
    #[serde(rename = "box")]
    pub box_sizes: [Expr; 4],
    /// How the box is swizzled in shared memory.
    #[serde(default)]
    pub swizzle: Swizzle,
}

/// One of the four tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TensorName {
    /// Queries.
    Q,
    /// Keys.
    K,
    /// Values.
    V,
    /// Output.
    O,
}

impl TensorName {
    /// All four, inputs first.
    pub const ALL: [Self; 4] = [Self::Q, Self::K, Self::V, Self::O];
}

/// How TMA swizzles a box in shared memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "u32")]
pub enum Swizzle {
    /// Not at all.
    #[default]
    None,
    /// Within 32 bytes.
    Bytes32,
    /// Within 64 bytes.
    Bytes64,
    /// Within 128 bytes: what wgmma reads without bank conflicts.
    Bytes128,
}

impl Swizzle {
    /// The span in bytes; 0 for none.
    pub fn span_bytes(self) -> u32 {
        match self {
            Self::None => 0,
            Self::Bytes32 => 32,
            Self::Bytes64 => 64,
            Self::Bytes128 => 128,
        }
    }
}

impl TryFrom<u32> for Swizzle {
    type Error = String;

    fn try_from(span_bytes: u32) -> Result<Self, String> {
        [Self::None, Self::Bytes32, Self::Bytes64, Self::Bytes128]
            .into_iter()
            .find(|swizzle| swizzle.span_bytes() == span_bytes)
            .ok_or_else(|| {
                format!("there is no swizzle of {span_bytes} bytes; 0, 32, 64 and 128 are possible")
            })
    }
}

/// The two layers of tuning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Layer {
    /// Structure: tiles, warp specialisation, persistence.
    Macro,
    /// Detail: stages, unrolling, producer warps.
    Micro,
}

/// Something that can be tuned.
#[derive(Clone, Debug)]
pub struct Tunable {
    /// Its name, which is also the compile-time define.
    pub name: String,
    /// Its layer.
    pub layer: Layer,
    /// The values to choose from.
    pub values: Vec<i64>,
    /// The value when nothing is chosen.
    pub default: i64,
    /// Why it is worth tuning.
    pub why: Option<String>,
}

/// A compile-time value that the lengths of a problem may have a say in.
///
/// It is no tunable: which values are allowed for a problem is said by constraints, and its default is allowed for all.
#[derive(Clone, Debug)]
pub struct Kind {
    /// Its name, which is also the compile-time define.
    pub name: String,
    /// The values there are.
    pub values: Vec<i64>,
    /// The value that every problem allows.
    pub default: i64,
    /// What the values mean.
    pub why: String,
}

/// What combinations of tunables must satisfy.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Constraint {
    /// Must not be 0.
    pub expr: Expr,
    /// Why the kernel needs it.
    pub why: String,
}

/// Resource limits on one architecture, as a manifest says them.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LimitRules {
    /// Registers per thread: a number, or an expression where they follow from the tunables.
    pub registers: Option<Expr>,
    /// Shared memory per block, static and dynamic together.
    pub smem_bytes: Option<u32>,
    /// Stack per thread.
    pub stack_bytes: Option<u32>,
    /// Spill stores plus spill loads.
    pub spill_bytes: Option<u32>,
}

impl LimitRules {
    /// With this limit on registers.
    pub fn with_registers(&self, registers: Option<u32>) -> Limits {
        let Self { smem_bytes, stack_bytes, spill_bytes, .. } = *self;
        Limits { registers, smem_bytes, stack_bytes, spill_bytes }
    }

    /// What holds for every variant: without a limit on registers where that follows from the tunables.
    pub fn of_any_variant(&self) -> Limits {
        self.with_registers(self.registers.as_ref().and_then(|expr| expr.text().parse().ok()))
    }
}

/// Resource limits of one variant; `None` is not limited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, serde::Serialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Registers per thread.
    pub registers: Option<u32>,
    /// Shared memory per block, static and dynamic together.
    pub smem_bytes: Option<u32>,
    /// Stack per thread.
    pub stack_bytes: Option<u32>,
    /// Spill stores plus spill loads.
    pub spill_bytes: Option<u32>,
}

/// What is wrong with a known-bad kernel, and who must notice.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mutant {
    /// The kernel whose relative it is.
    pub of: String,
    /// What is wrong.
    pub breaks: String,
    /// The first gate that must catch it; the gates before it let it pass.
    pub caught_by: Gate,
    /// A small problem that shows it. At others a mutant may well be right.
    #[serde(deserialize_with = "read_shape")]
    pub shape: Shape,
}

fn read_shape<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Shape, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
}

/// The gates of the lab, cheapest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Gate {
    /// The compiler.
    Compile,
    /// The resource gate.
    Resources,
    /// The simulator and its hazard detection.
    Sim,
    /// The correctness gate.
    Correctness,
    /// compute-sanitizer on a GPU.
    Sanitize,
}
