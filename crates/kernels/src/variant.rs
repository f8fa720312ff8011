//! A kernel with its tunables set, for a problem and a target: everything a compiler and a launcher need.

use std::{collections::BTreeMap, sync::Arc};

use crate::{
    Arch, Assignment, Constraint, Error, Expr, ExprError, Header, Kernel, Limits, Manifest, ProblemFacts,
    Reason, Refusal, Result, SdpaParams, SpaceSize, Swizzle, Target, TensorName, TunableSpace, VariantId,
    expr::Environment, reads::DYNAMIC_SMEM_BYTES, support, tunables::SEARCH_LIMIT,
};
use evosdpa_core::DType;

/// How a variant is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchGeometry {
    /// Blocks: x, y, z.
    pub grid: [u32; 3],
    /// Threads per block: x, y, z.
    pub block: [u32; 3],
    /// Blocks per cluster: x, y, z; all 1 without clusters.
    pub cluster: [u32; 3],
    /// Dynamic shared memory.
    pub dynamic_smem_bytes: u32,
    /// Whether the kernel may start while the one before it on the stream still runs (programmatic dependent launch).
    ///
    /// Such a kernel must execute `griddepcontrol.wait` in every block, before it reads what an earlier kernel may have
    /// written and before it writes what an earlier kernel may still read: nothing else orders it after the kernels
    /// before it. What it does before the wait may touch its own parameters, shared memory and barriers only.
    pub programmatic: bool,
    /// Whether the kernel hands its work out by a counter in device memory
    /// ([`SdpaParams::counter`](crate::SdpaParams::counter)).
    ///
    /// The counter is 0 when the launch begins, and the kernel must leave it at 0. Sometimes there is none: the kernel must
    /// do without it then.
    pub counter: bool,
    /// Bytes of device memory that the blocks share ([`SdpaParams::workspace`](crate::SdpaParams::workspace)); 0 without.
    ///
    /// Its first [`WORKSPACE_COUNTER_BYTES`] are 0 when the launch begins, and the kernel must leave them at 0; what the rest
    /// holds is undefined. Sometimes there is none: the kernel must do without it then.
    pub workspace_bytes: u64,
}

/// The part of a workspace that every launch leaves at 0.
pub const WORKSPACE_COUNTER_BYTES: u64 = 1 << 18;

impl LaunchGeometry {
    /// Threads in one block.
    pub fn threads_per_block(&self) -> u32 {
        self.block.iter().product()
    }

    /// Blocks in the grid.
    pub fn blocks(&self) -> u64 {
        self.grid.iter().map(|size| u64::from(*size)).product()
    }
}

/// A tensor map that the launch must encode and pass, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorMapUse {
    /// Which tensor.
    pub tensor: TensorName,
    /// The sizes of one box, innermost first: head dimension, sequence, heads, batch.
    pub box_sizes: [u32; 4],
    /// How the box is swizzled in shared memory.
    pub swizzle: Swizzle,
}

/// A kernel with its tunables set, for a problem and a target.
#[derive(Clone, Debug)]
pub struct Variant {
    /// The kernel, with a value for every tunable.
    pub id: VariantId,
    /// What to compile for.
    pub arch: Arch,
    /// The source file's name, as it appears in line information.
    pub source_file: String,
    /// The source.
    pub source: Arc<str>,
    /// The headers it includes.
    pub headers: Arc<[Header]>,
    /// The entry point.
    pub entry: String,
    /// The compile-time values that the source reads, by name: with kernel and architecture, what its code depends on.
    pub defines: BTreeMap<String, i64>,
    /// Extra options for the compiler.
    pub options: Vec<String>,
    /// How to launch it.
    pub launch: LaunchGeometry,
    /// Tensor maps it takes after the parameters.
    pub tensor_maps: Vec<TensorMapUse>,
    /// Bytes of its parameters, tensor maps included: what a launch hands over, whatever the source declares.
    pub parameter_bytes: u32,
    /// The resources it may use.
    pub limits: Limits,
}

impl Variant {
    /// `sdpa_v2b[BLOCK_M=64 STAGES=2]`.
    pub fn label(&self) -> String {
        self.id.to_string()
    }
}

// What CUDA can launch, on every architecture here (CUDA programming guide, technical specifications).
const BLOCK_MAX: [i64; 3] = [1024, 1024, 64];
const THREADS_MAX: i64 = 1024;
const GRID_MAX: [i64; 3] = [i32::MAX as i64, 65_535, 65_535];
const CLUSTER_MAX: i64 = 16;
/// No instruction names more registers of a thread.
const REGISTERS_MAX: i64 = 255;
const TENSOR_BOX_MAX: i64 = 256;
/// A `CUtensorMap`, whose alignment of 64 the parameters before it keep.
const TENSOR_MAP_BYTES: usize = 128;
/// A launch that asks for more than this asks for a mistake.
const WORKSPACE_MAX: i64 = 1 << 30;

impl Kernel {
    /// The space of its tunables.
    pub fn space(&self) -> TunableSpace<'_> {
        TunableSpace::new(&self.manifest)
    }

    /// Whether it supports a problem; if not, every reason.
    ///
    /// A kernel supports a problem if some tunable values, with kinds that suit them, keep its constraints.
    pub fn supports(&self, facts: &ProblemFacts, target: &Target) -> Result<()> {
        self.takes(facts, target)?;
        match self.unsatisfied(facts, target)? {
            None => Ok(()),
            Some(Constraint { expr, why }) => {
                let reason = Reason::Constraint { expr: expr.to_string(), why: why.clone() };
                Err(self.refusal(facts, vec![reason]))
            }
        }
    }

    /// Whether a problem is of the kind that it supports, whatever its tunables.
    fn takes(&self, facts: &ProblemFacts, target: &Target) -> Result<()> {
        let reasons = support::reasons(self, facts, target.arch);
        if reasons.is_empty() { Ok(()) } else { Err(self.refusal(facts, reasons)) }
    }

    fn refusal(&self, facts: &ProblemFacts, reasons: Vec<Reason>) -> Error {
        let refusal = Refusal { kernel: self.name().to_owned(), reasons };
        Error::Unsupported { problem: facts.to_string(), refusal }
    }

    /// The variant with these tunables and kinds; the others keep their defaults, whatever the problem. What suits a problem
    /// is chosen elsewhere.
    pub fn variant<'a>(
        &self,
        facts: &ProblemFacts,
        target: &Target,
        chosen: impl IntoIterator<Item = (&'a str, i64)>,
    ) -> Result<Variant> {
        let mut kinds = Assignment::default();
        let mut tunables = Assignment::default();
        for (name, value) in chosen {
            match self.manifest.kinds.iter().find(|kind| kind.name == name) {
                Some(kind) => kinds.set(self.name(), name, value, &kind.values)?,
                None => self.space().set(&mut tunables, name, value)?,
            }
        }
        self.takes(facts, target)?;
        self.resolve(facts, target, self.space().complete(tunables), &kinds)
    }

    /// Every variant that keeps the constraints, lazily; kinds keep their defaults where they can. The problem must be supported: see
    /// [`Kernel::supports`].
    pub fn variants<'a>(
        &'a self,
        facts: &'a ProblemFacts,
        target: &'a Target,
    ) -> impl Iterator<Item = Result<Variant>> + 'a {
        let kinds = self.kind_values();
        self.space().unconstrained().filter_map(move |assignment| {
            let resolved = kinds.iter().map(|kinds| self.resolve(facts, target, assignment.clone(), kinds));
            resolved.into_iter().find(|resolved| !matches!(resolved, Err(Error::Constraint { .. })))
        })
    }

    /// Every combination of its kinds' values, the defaults first.
    fn kind_values(&self) -> Vec<Assignment> {
        let mut all = vec![Assignment::default()];
        for kind in &self.manifest.kinds {
            let others = kind.values.iter().filter(|value| **value != kind.default);
            let values = [&kind.default].into_iter().chain(others);
            all = values
                .flat_map(|value| all.iter().map(move |known| known.clone().with(&kind.name, *value)))
                .collect();
        }
        all
    }

    /// How many variants keep the constraints, counted up to `cap` of the unconstrained combinations.
    pub fn count_variants(&self, facts: &ProblemFacts, target: &Target, cap: usize) -> Result<SpaceSize> {
        let mut count = 0;
        let kinds = self.kind_values();
        for assignment in self.space().unconstrained().take(cap) {
            count += usize::from(self.broken(facts, target, &assignment, &kinds)?.is_none());
        }
        let whole = self.space().size() <= cap as u128;
        Ok(if whole { SpaceSize::Exactly(count) } else { SpaceSize::AtLeast(count) })
    }

    /// A constraint that no tunable values keep, if there is one.
    fn unsatisfied(&self, facts: &ProblemFacts, target: &Target) -> Result<Option<&Constraint>> {
        let mut last = None;
        let kinds = self.kind_values();
        for assignment in self.space().unconstrained().take(SEARCH_LIMIT) {
            match self.broken(facts, target, &assignment, &kinds)? {
                None => return Ok(None),
                Some(broken) => last = Some(broken),
            }
        }
        Ok(last)
    }

    /// A constraint that these tunable values break with all of these kinds.
    fn broken(
        &self,
        facts: &ProblemFacts,
        target: &Target,
        assignment: &Assignment,
        kinds: &[Assignment],
    ) -> Result<Option<&Constraint>> {
        let mut last = None;
        for kinds in kinds {
            match (Resolution { kernel: self, facts, target, assignment, kinds }).broken_constraint()? {
                None => return Ok(None),
                Some(broken) => last = Some(broken),
            }
        }
        Ok(last)
    }

    fn resolve(
        &self,
        facts: &ProblemFacts,
        target: &Target,
        tunables: Assignment,
        kinds: &Assignment,
    ) -> Result<Variant> {
        let resolution = Resolution { kernel: self, facts, target, assignment: &tunables, kinds };
        if let Some(constraint) = resolution.broken_constraint()? {
            return Err(Error::Constraint {
                kernel: self.name().to_owned(),
                assignment: tunables.to_string(),
                expr: constraint.expr.to_string(),
                why: constraint.why.clone(),
            });
        }
        let launch = resolution.launch()?;
        let defines = resolution.defines()?;
        let tensor_maps = resolution.tensor_maps()?;
        let parameter_bytes = (size_of::<SdpaParams>() + tensor_maps.len() * TENSOR_MAP_BYTES) as u32;
        let limits = resolution.limits()?;
        let Manifest { entry, options, .. } = &self.manifest;
        Ok(Variant {
            id: VariantId { kernel: self.name().to_owned(), tunables },
            arch: target.arch,
            source_file: self.source_file.clone(),
            source: self.source.clone(),
            headers: self.headers.clone(),
            entry: entry.clone(),
            defines,
            options: options.clone(),
            launch,
            tensor_maps,
            parameter_bytes,
            limits,
        })
    }
}

/// One evaluation of a manifest: the environment of its expressions.
struct Resolution<'k, 'a> {
    kernel: &'k Kernel,
    facts: &'a ProblemFacts,
    target: &'a Target,
    assignment: &'a Assignment,
    kinds: &'a Assignment,
}

impl Environment for Resolution<'_, '_> {
    fn value(&self, name: &str) -> Result<Option<i64>, ExprError> {
        let known = self.assignment.value(name).or_else(|| self.facts.value(name, self.target));
        if let Some(value) = known.or_else(|| self.kind(name)) {
            return Ok(Some(value));
        }
        // Reading the manifest has made sure that no expression depends on itself.
        self.kernel.manifest.derived(name).map(|expr| expr.evaluate(self)).transpose()
    }

    fn dtype(&self) -> Option<DType> {
        Some(self.facts.dtype)
    }
}

impl<'k> Resolution<'k, '_> {
    fn kind(&self, name: &str) -> Option<i64> {
        let kind = self.kernel.manifest.kinds.iter().find(|kind| kind.name == name)?;
        Some(self.kinds.value(name).unwrap_or(kind.default))
    }

    fn broken_constraint(&self) -> Result<Option<&'k Constraint>> {
        for constraint in &self.kernel.manifest.constraints {
            if self.evaluate("constraint", &constraint.expr)? == 0 {
                return Ok(Some(constraint));
            }
        }
        Ok(None)
    }

    fn evaluate(&self, key: &str, expr: &Expr) -> Result<i64> {
        expr.evaluate(self).map_err(|source| Error::Expression {
            file: self.kernel.manifest_file.clone(),
            key: key.to_owned(),
            source,
        })
    }

    fn size(&self, key: &str, expr: &Expr, min: i64, max: i64) -> Result<u32> {
        self.within(key, self.evaluate(key, expr)?, min, max)
    }

    fn within(&self, key: &str, value: i64, min: i64, max: i64) -> Result<u32> {
        let in_range = (min..=max).contains(&value).then(|| u32::try_from(value).ok()).flatten();
        in_range.ok_or_else(|| Error::LaunchSize {
            kernel: self.kernel.name().to_owned(),
            key: key.to_owned(),
            problem: self.facts.to_string(),
            value,
            min,
            max,
        })
    }

    fn sizes(&self, key: &str, exprs: &[Expr; 3], max: [i64; 3]) -> Result<[u32; 3]> {
        let mut sizes = [1; 3];
        for (i, axis) in ["x", "y", "z"].iter().enumerate() {
            sizes[i] = self.size(&format!("launch.{key}.{axis}"), &exprs[i], 1, max[i])?;
        }
        Ok(sizes)
    }

    fn limits(&self) -> Result<Limits> {
        let Some(rules) = self.kernel.manifest.limits.get(&self.target.arch) else {
            return Ok(Limits::default());
        };
        let key = format!("limits.{}.registers", self.target.arch);
        let registers =
            rules.registers.as_ref().map(|expr| self.size(&key, expr, 1, REGISTERS_MAX)).transpose()?;
        Ok(rules.with_registers(registers))
    }

    fn launch(&self) -> Result<LaunchGeometry> {
        let launch = &self.kernel.manifest.launch;
        let block = self.sizes("block", &launch.block, BLOCK_MAX)?;
        self.within(
            "threads per block",
            block.iter().map(|size| i64::from(*size)).product(),
            1,
            THREADS_MAX,
        )?;
        let cluster = match &launch.cluster {
            Some(cluster) => self.sizes("cluster", cluster, [CLUSTER_MAX; 3])?,
            None => [1; 3],
        };
        self.within(
            "blocks per cluster",
            cluster.iter().map(|size| i64::from(*size)).product(),
            1,
            CLUSTER_MAX,
        )?;
        let is_set = |key: &str, expr: &Option<Expr>| match expr {
            Some(expr) => Ok(self.evaluate(&format!("launch.{key}"), expr)? != 0),
            None => Ok(false),
        };
        let workspace_bytes = match &launch.workspace {
            Some(expr) => {
                let key = "launch.workspace";
                let value = self.evaluate(key, expr)?;
                u64::from(self.within(key, value, 0, WORKSPACE_MAX)?)
            }
            None => 0,
        };
        Ok(LaunchGeometry {
            workspace_bytes,
            programmatic: is_set("programmatic", &launch.programmatic)?,
            counter: is_set("counter", &launch.counter)?,
            block,
            cluster,
            grid: self.sizes("grid", &launch.grid, GRID_MAX)?,
            // Not held against the device here: that is the launch's and the resource gate's refusal to make.
            dynamic_smem_bytes: self.size(
                "launch.dynamic_smem",
                &launch.dynamic_smem,
                0,
                i64::from(i32::MAX),
            )?,
        })
    }

    fn defines(&self) -> Result<BTreeMap<String, i64>> {
        let mut defines = BTreeMap::new();
        for name in &self.kernel.reads {
            let value = match self.kernel.manifest.defines.get(name) {
                _ if name == DYNAMIC_SMEM_BYTES => {
                    Some(self.evaluate("launch.dynamic_smem", &self.kernel.manifest.launch.dynamic_smem)?)
                }
                Some(expr) => Some(self.evaluate(name, expr)?),
                None => self.assignment.value(name).or_else(|| self.kind(name)),
            };
            // Every name that is read is a define, a tunable or a kind.
            defines.extend(value.map(|value| (name.clone(), value)));
        }
        Ok(defines)
    }

    fn tensor_maps(&self) -> Result<Vec<TensorMapUse>> {
        let maps = self.kernel.manifest.tensor_maps.iter().map(|map| {
            let mut box_sizes = [1; 4];
            for (size, expr) in box_sizes.iter_mut().zip(&map.box_sizes) {
                *size = self.size("tensor_maps.box", expr, 1, TENSOR_BOX_MAX)?;
            }
            Ok(TensorMapUse { tensor: map.tensor, box_sizes, swizzle: map.swizzle })
        });
        maps.collect()
    }
}
