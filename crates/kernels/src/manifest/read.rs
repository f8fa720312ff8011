//! TOML to [`Manifest`], with errors that name the file, the key and what is allowed.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::*;
use crate::{
    Error, ExprError, ProblemFacts, Result,
    expr::Environment,
    names::{nearest, suggestion},
    tunables::{SEARCH_LIMIT, TunableSpace},
};
use evosdpa_core::DType;

/// The only schema there is.
const SCHEMA: u32 = 1;

/// The file as it is written; [`Manifest`] is what it means.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    schema: u32,
    name: String,
    summary: String,
    parent: Option<String>,
    changed: Option<String>,
    source: String,
    entry: String,
    archs: Vec<Arch>,
    tolerance: Tolerance,
    #[serde(default = "yes")]
    deterministic: bool,
    #[serde(default)]
    options: Vec<String>,
    #[serde(default)]
    tensor_maps: Vec<TensorMapSpec>,
    problem: ProblemTable,
    launch: LaunchTable,
    family: Option<String>,
    #[serde(default)]
    defines: BTreeMap<String, Expr>,
    #[serde(default, rename = "let")]
    lets: BTreeMap<String, Expr>,
    #[serde(default)]
    kind: BTreeMap<String, KindTable>,
    #[serde(default)]
    tunable: TunableTables,
    #[serde(default)]
    constraint: Vec<Constraint>,
    #[serde(default)]
    limits: LimitTables,
    mutant: Option<Mutant>,
}

fn yes() -> bool {
    true
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ProblemTable {
    dtypes: Vec<DType>,
    head_dim: RangeTable,
    value_dim: ValueDim,
    seq_q: Option<RangeTable>,
    seq_kv: Option<RangeTable>,
    masks: Vec<MaskKind>,
    gqa: bool,
    lse: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RangeTable {
    min: Option<u32>,
    max: Option<u32>,
    one_of: Option<Vec<u32>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LaunchTable {
    block: [Expr; 3],
    grid: [Expr; 3],
    cluster: Option<[Expr; 3]>,
    dynamic_smem: Expr,
    programmatic: Option<Expr>,
    counter: Option<Expr>,
    workspace: Option<Expr>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct TunableTables {
    #[serde(default, rename = "macro")]
    structure: BTreeMap<String, TunableTable>,
    #[serde(default, rename = "micro")]
    detail: BTreeMap<String, TunableTable>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TunableTable {
    values: Vec<i64>,
    default: i64,
    why: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct KindTable {
    values: Vec<i64>,
    default: i64,
    why: String,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct LimitTables {
    sm_80: Option<LimitRules>,
    sm_86: Option<LimitRules>,
    sm_89: Option<LimitRules>,
    sm_90a: Option<LimitRules>,
}

impl Manifest {
    /// Reads a manifest. `file` is what errors call it.
    pub fn parse(text: &str, file: &str) -> Result<Self> {
        let read: File = toml::from_str(text).map_err(|error| toml_error(&error, text, file))?;
        let checker = Checker { file };
        if read.schema != SCHEMA {
            return Err(checker.value("schema", format!("{} is not known; it must be {SCHEMA}", read.schema)));
        }
        let manifest = Self {
            head_dim: match checker.range("problem.head_dim", Some(read.problem.head_dim))? {
                Range::Between { min, max: None } => Range::Between { min, max: Some(HEAD_DIM_MAX) },
                range => range,
            },
            seq_q: checker.range("problem.seq_q", read.problem.seq_q)?,
            seq_kv: checker.range("problem.seq_kv", read.problem.seq_kv)?,
            name: read.name,
            summary: read.summary,
            parent: read.parent,
            changed: read.changed,
            source: read.source,
            entry: read.entry,
            archs: read.archs,
            tolerance: read.tolerance,
            deterministic: read.deterministic,
            options: read.options,
            tensor_maps: read.tensor_maps,
            dtypes: read.problem.dtypes,
            value_dim: read.problem.value_dim,
            masks: read.problem.masks,
            gqa: read.problem.gqa,
            lse: read.problem.lse,
            launch: Launch {
                block: read.launch.block,
                grid: read.launch.grid,
                cluster: read.launch.cluster,
                dynamic_smem: read.launch.dynamic_smem,
                programmatic: read.launch.programmatic,
                counter: read.launch.counter,
                workspace: read.launch.workspace,
            },
            family: read.family,
            defines: read.defines,
            lets: read.lets,
            kinds: kinds(read.kind),
            tunables: tunables(read.tunable),
            constraints: read.constraint,
            limits: limits(read.limits),
            mutant: read.mutant,
        };
        checker.check(&manifest)?;
        Ok(manifest)
    }
}

fn tunables(tables: TunableTables) -> Vec<Tunable> {
    let layer = |layer: Layer, tables: BTreeMap<String, TunableTable>| {
        tables.into_iter().map(move |(name, table)| Tunable {
            name,
            layer,
            values: table.values,
            default: table.default,
            why: table.why,
        })
    };
    layer(Layer::Macro, tables.structure).chain(layer(Layer::Micro, tables.detail)).collect()
}

fn kinds(tables: BTreeMap<String, KindTable>) -> Vec<Kind> {
    let kind = |(name, table): (String, KindTable)| Kind {
        name,
        values: table.values,
        default: table.default,
        why: table.why,
    };
    tables.into_iter().map(kind).collect()
}

fn limits(tables: LimitTables) -> BTreeMap<Arch, LimitRules> {
    let pairs = [
        (Arch::Sm80, tables.sm_80),
        (Arch::Sm86, tables.sm_86),
        (Arch::Sm89, tables.sm_89),
        (Arch::Sm90a, tables.sm_90a),
    ];
    pairs.into_iter().filter_map(|(arch, limits)| Some((arch, limits?))).collect()
}

/// Where and what, and for an unknown name the nearest allowed one.
fn toml_error(error: &toml::de::Error, text: &str, file: &str) -> Error {
    let at = error.span().map_or(0, |span| span.start).min(text.len());
    let before = text.get(..at).unwrap_or_default();
    let problem = error.message().trim().to_owned();
    // serde words it "unknown field `x`, expected one of `a`, `b`": the quoted names are the wrong and the right.
    let quoted: Vec<&str> = problem.split('`').skip(1).step_by(2).collect();
    let nearest = match quoted.split_first() {
        // Our own types word it themselves.
        Some((wrong, allowed)) if problem.starts_with("unknown ") && !problem.contains("did you mean") => {
            nearest(wrong, allowed.iter().copied())
        }
        _ => None,
    };
    Error::Manifest {
        file: file.to_owned(),
        line: before.matches('\n').count() + 1,
        column: before.len() - before.rfind('\n').map_or(0, |newline| newline + 1) + 1,
        problem: problem.replace("unknown field", "unknown key"),
        nearest,
    }
}

struct Checker<'a> {
    file: &'a str,
}

impl Checker<'_> {
    fn value(&self, key: &str, problem: String) -> Error {
        Error::ManifestValue { file: self.file.to_owned(), key: key.to_owned(), problem }
    }

    fn range(&self, key: &str, table: Option<RangeTable>) -> Result<Range> {
        match table {
            None => Ok(Range::ANY),
            Some(RangeTable { min: None, max: None, one_of: Some(sizes) }) if !sizes.is_empty() => {
                Ok(Range::OneOf(sizes))
            }
            Some(RangeTable { min: Some(min), max, one_of: None }) if max.is_none_or(|max| min <= max) => {
                Ok(Range::Between { min, max })
            }
            Some(_) => {
                let allowed =
                    "write { min = 1 }, { min = 1, max = 128 } with min <= max, or { one_of = [64] }";
                Err(self.value(key, allowed.to_owned()))
            }
        }
    }

    fn check(&self, manifest: &Manifest) -> Result<()> {
        self.names(manifest)?;
        self.lists(manifest)?;
        self.expressions(manifest)?;
        self.cycles(manifest)?;
        self.tunables(manifest)?;
        self.satisfiable(manifest)
    }

    fn names(&self, manifest: &Manifest) -> Result<()> {
        let identifiers = [("name", &manifest.name), ("entry", &manifest.entry)];
        let named = manifest.named();
        for (key, name) in identifiers.map(|(key, name)| (key, name.as_str())).into_iter().chain(named) {
            if !is_identifier(name) {
                let problem = format!("`{name}` must be letters, digits and `_`, not starting with a digit");
                return Err(self.value(key, problem));
            }
        }
        let mut seen: Vec<&str> = Vec::new();
        for (key, name) in manifest.named() {
            if ProblemFacts::NAMES.contains(&name) || name == "dtype" {
                return Err(self.value(key, format!("`{name}` is already the name of a problem's field")));
            }
            if seen.contains(&name) {
                return Err(
                    self.value(name, "is defined twice, as a tunable, kind, define or let".to_owned())
                );
            }
            seen.push(name);
        }
        if manifest.parent.is_some() && manifest.changed.is_none() {
            return Err(self.value("changed", "a kernel with a parent says what changed and why".to_owned()));
        }
        Ok(())
    }

    fn lists(&self, manifest: &Manifest) -> Result<()> {
        for (key, empty) in [
            ("archs", manifest.archs.is_empty()),
            ("problem.dtypes", manifest.dtypes.is_empty()),
            ("problem.masks", manifest.masks.is_empty()),
        ] {
            if empty {
                return Err(self.value(key, "must name at least one".to_owned()));
            }
        }
        if let Some(arch) = manifest.limits.keys().find(|arch| !manifest.archs.contains(arch)) {
            return Err(self.value(&format!("limits.{arch}"), format!("{arch} is not among `archs`")));
        }
        Ok(())
    }

    fn tunables(&self, manifest: &Manifest) -> Result<()> {
        for tunable in &manifest.tunables {
            let key = match tunable.layer {
                Layer::Macro => format!("tunable.macro.{}", tunable.name),
                Layer::Micro => format!("tunable.micro.{}", tunable.name),
            };
            self.values(&key, &tunable.values, tunable.default)?;
        }
        for kind in &manifest.kinds {
            self.values(&format!("kind.{}", kind.name), &kind.values, kind.default)?;
        }
        Ok(())
    }

    fn values(&self, key: &str, values: &[i64], default: i64) -> Result<()> {
        if values.is_empty() {
            return Err(self.value(key, "`values` must list at least one value".to_owned()));
        }
        if !values.contains(&default) {
            return Err(self.value(key, format!("default {default} is not one of {values:?}")));
        }
        match values.iter().enumerate().find(|(i, value)| values[..*i].contains(value)) {
            Some((_, value)) => Err(self.value(key, format!("value {value} is listed twice"))),
            None => Ok(()),
        }
    }

    /// Every name in every expression must be known, so that a slip shows when the manifest is read.
    fn expressions(&self, manifest: &Manifest) -> Result<()> {
        let named = manifest.named().map(|(_, name)| name);
        let known: Vec<&str> = ProblemFacts::NAMES.into_iter().chain(["dtype"]).chain(named).collect();
        for (key, expr) in manifest.expressions() {
            if let Some(name) = expr.names().into_iter().find(|name| !known.contains(name)) {
                let near = nearest(name, known.iter().copied());
                let problem =
                    format!("there is no `{name}` (known are {}){}", known.join(", "), suggestion(&near));
                return Err(self.expression(&key, expr.error_at_name(name, problem)));
            }
        }
        Ok(())
    }

    fn cycles(&self, manifest: &Manifest) -> Result<()> {
        for name in manifest.defines.keys().chain(manifest.lets.keys()) {
            let mut path = Vec::new();
            if let Some(cycle) = find_cycle(manifest, name, &mut path) {
                return Err(self.value(&format!("defines.{name}"), format!("depends on itself: {cycle}")));
            }
        }
        Ok(())
    }

    /// A constraint over tunables alone that no values satisfy would make the kernel impossible to build.
    fn satisfiable(&self, manifest: &Manifest) -> Result<()> {
        let space = TunableSpace::new(manifest);
        let own: Vec<&Constraint> = manifest
            .constraints
            .iter()
            .filter(|constraint| depends_on_tunables_alone(manifest, constraint))
            .collect();
        let mut failed = None;
        let mut searched = 0;
        for assignment in space.unconstrained().take(SEARCH_LIMIT) {
            searched += 1;
            let environment = TunablesOnly { manifest, assignment: &assignment };
            let mut holds = true;
            for constraint in &own {
                let value = constraint
                    .expr
                    .evaluate(&environment)
                    .map_err(|error| self.expression("constraint", error))?;
                if value == 0 {
                    failed = Some(*constraint);
                    holds = false;
                    break;
                }
            }
            if holds {
                return Ok(());
            }
        }
        match failed {
            Some(constraint) if searched < SEARCH_LIMIT => {
                let problem = format!("no tunable values satisfy `{}` ({})", constraint.expr, constraint.why);
                Err(self.value("constraint", problem))
            }
            _ => Ok(()),
        }
    }

    fn expression(&self, key: &str, source: ExprError) -> Error {
        Error::Expression { file: self.file.to_owned(), key: key.to_owned(), source }
    }
}

impl Manifest {
    /// Every name it defines, with the table it stands in.
    fn named(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let tunables = self.tunables.iter().map(|tunable| ("tunable", tunable.name.as_str()));
        let kinds = self.kinds.iter().map(|kind| ("kind", kind.name.as_str()));
        let defines = self.defines.keys().map(|name| ("defines", name.as_str()));
        tunables.chain(kinds).chain(defines).chain(self.lets.keys().map(|name| ("let", name.as_str())))
    }

    /// Names that a compiler may be told: all but those of [let].
    pub(crate) fn compile_time_names(&self) -> impl Iterator<Item = &str> {
        self.named().filter(|(table, _)| *table != "let").map(|(_, name)| name)
    }

    /// The expressions that something comes of: all but constraints, which only forbid.
    pub(crate) fn consequences(&self) -> impl Iterator<Item = &Expr> {
        self.expressions().into_iter().filter(|(key, _)| key != "constraint").map(|(_, expr)| expr)
    }

    /// A value that other values follow from: of a define, or only named.
    pub(crate) fn derived(&self, name: &str) -> Option<&Expr> {
        self.defines.get(name).or_else(|| self.lets.get(name))
    }

    /// Every expression with the key it stands under.
    fn expressions(&self) -> Vec<(String, &Expr)> {
        let mut all = Vec::new();
        let axes = ["x", "y", "z"];
        for (axis, expr) in axes.iter().zip(&self.launch.block) {
            all.push((format!("launch.block.{axis}"), expr));
        }
        for (axis, expr) in axes.iter().zip(&self.launch.grid) {
            all.push((format!("launch.grid.{axis}"), expr));
        }
        for (axis, expr) in axes.iter().zip(self.launch.cluster.iter().flatten()) {
            all.push((format!("launch.cluster.{axis}"), expr));
        }
        all.push(("launch.dynamic_smem".to_owned(), &self.launch.dynamic_smem));
        for (arch, limits) in &self.limits {
            all.extend(limits.registers.iter().map(|expr| (format!("limits.{arch}.registers"), expr)));
        }
        all.extend(self.launch.programmatic.iter().map(|expr| ("launch.programmatic".to_owned(), expr)));
        all.extend(self.launch.counter.iter().map(|expr| ("launch.counter".to_owned(), expr)));
        all.extend(self.launch.workspace.iter().map(|expr| ("launch.workspace".to_owned(), expr)));
        all.extend(self.defines.iter().map(|(name, expr)| (format!("defines.{name}"), expr)));
        all.extend(self.lets.iter().map(|(name, expr)| (format!("let.{name}"), expr)));
        all.extend(self.constraints.iter().map(|constraint| ("constraint".to_owned(), &constraint.expr)));
        for map in &self.tensor_maps {
            all.extend(map.box_sizes.iter().map(|size| ("tensor_maps.box".to_owned(), size)));
        }
        all
    }
}

struct TunablesOnly<'a> {
    manifest: &'a Manifest,
    assignment: &'a crate::Assignment,
}

impl Environment for TunablesOnly<'_> {
    fn value(&self, name: &str) -> Result<Option<i64>, ExprError> {
        if let Some(value) = self.assignment.value(name) {
            return Ok(Some(value));
        }
        self.manifest.derived(name).map(|expr| expr.evaluate(self)).transpose()
    }

    fn dtype(&self) -> Option<DType> {
        None
    }
}

fn depends_on_tunables_alone(manifest: &Manifest, constraint: &Constraint) -> bool {
    fn all_tunable(manifest: &Manifest, expr: &Expr) -> bool {
        expr.names().into_iter().all(|name| {
            manifest.tunables.iter().any(|tunable| tunable.name == name)
                || manifest.derived(name).is_some_and(|expr| all_tunable(manifest, expr))
        })
    }
    all_tunable(manifest, &constraint.expr)
}

fn find_cycle<'a>(manifest: &'a Manifest, name: &'a str, path: &mut Vec<&'a str>) -> Option<String> {
    if path.contains(&name) {
        path.push(name);
        return Some(path.join(" → "));
    }
    path.push(name);
    let define = manifest.derived(name)?;
    for used in define.names() {
        if manifest.derived(used).is_some()
            && let Some(cycle) = find_cycle(manifest, used, path)
        {
            return Some(cycle);
        }
    }
    path.pop();
    None
}

fn is_identifier(name: &str) -> bool {
    let mut characters = name.chars();
    characters.next().is_some_and(|first| first.is_ascii_alphabetic() || first == '_')
        && characters.all(|c| c.is_ascii_alphanumeric() || c == '_')
}
