//! Winners of a tune, and how they enter a table.
//!
//! What is read, from JSON:
//!
//! ```json
//! {
//!   "schema": "evosdpa.elite/1",
//!   "device": {"name": "NVIDIA H200", "arch": "sm_90a"},
//!   "elites": [
//!     {
//!       "kernel": "hopper_small",
//!       "tunables": {"WG_N": 1, "CLUSTER": 2},
//!       "dtype": "bf16",
//!       "evaluation": 17,
//!       "shapes": {"mission:causal": {"speedup": 1.12, "p50_us": 5.4}}
//!     }
//!   ],
//!   "confirmation": {"number": 17, "confirmed": true, "shapes": {"mission:causal bf16": {"speedup": 1.10, "p50_us": 5.5}}}
//! }
//! ```
//!
//! `dtype` may stand at the top instead, with or after the shape (`"mission:causal bf16"`), or nowhere: the row is then for every
//! type. `name`, `speedup` and `p50_us` may be missing. Other keys are ignored, so that a tune may record more.
//!
//! Only the elite that was measured again and confirmed becomes rows, with the numbers of that second measurement: the best of
//! many noisy numbers is too good on average. Whoever takes the others all the same gets, of several elites with one shape,
//! the fastest. One that is slower than what it was compared with becomes no row in any case.

use std::collections::BTreeMap;

use evosdpa_core::{DType, Problem, Shape};
use evosdpa_kernels::{Arch, ProblemFacts, Registry, Target};
use serde::{Deserialize, Deserializer, Serialize};

use super::{CpuTunables, Scope, TunedArch, TunedDevice, TunedRow, TunedTable};
use crate::{Error, choose};

/// The winners of a tune, read and checked.
#[derive(Clone, Debug)]
pub struct Elites {
    /// The device's architecture, or a processor's instruction set.
    pub arch: TunedArch,
    /// The device's name.
    pub device: Option<String>,
    /// One row for each shape and type.
    pub rows: Vec<TunedRow>,
    /// What does not become a row, and why.
    pub left_out: Vec<LeftOut>,
}

/// A winner that does not become a row.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LeftOut {
    /// The shape.
    pub shape: Shape,
    /// The kernel.
    pub kernel: String,
    /// Why not.
    pub why: String,
}

fn leave_out(row: &TunedRow, why: String) -> LeftOut {
    LeftOut { shape: row.shape(), kernel: row.kernel.clone(), why }
}

/// What becomes of winners that were not confirmed by a second measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unconfirmed {
    /// They become no rows.
    LeaveOut,
    /// They are taken as they are.
    Take,
}

/// What a merge did with one row.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Merged {
    /// The shape.
    pub shape: Shape,
    /// Its input types; all when empty.
    pub dtypes: Vec<String>,
    /// The kernel that is now chosen.
    pub kernel: String,
    /// Its tunables.
    pub tunables: BTreeMap<String, i64>,
    /// The kernel of the row that was there before.
    pub replaced: Option<String>,
}

#[derive(Deserialize)]
struct EliteFile {
    schema: serde_json::Value,
    device: DeviceEntry,
    dtype: Option<String>,
    elites: Vec<EliteEntry>,
    #[serde(default)]
    confirmation: Option<Confirmation>,
}

/// The winner, measured again.
#[derive(Deserialize)]
struct Confirmation {
    number: u64,
    confirmed: bool,
    #[serde(default)]
    shapes: BTreeMap<String, Score>,
}

impl Confirmation {
    /// What the second measurement says of a shape.
    fn score(&self, problem: &str, dtype: Option<&str>) -> Option<Score> {
        let with_type = || self.shapes.get(&format!("{problem} {}", dtype?));
        self.shapes.get(problem).or_else(with_type).cloned()
    }
}

#[derive(Deserialize)]
struct DeviceEntry {
    name: Option<String>,
    arch: Option<String>,
}

#[derive(Deserialize)]
struct EliteEntry {
    kernel: String,
    #[serde(default)]
    tunables: BTreeMap<String, i64>,
    dtype: Option<String>,
    evaluation: Option<u64>,
    shapes: BTreeMap<String, Score>,
}

#[derive(Clone, Default, Deserialize)]
#[serde(default)]
struct Score {
    #[serde(deserialize_with = "number")]
    speedup: Option<f64>,
    #[serde(deserialize_with = "number")]
    p50_us: Option<f64>,
    dtype: Option<String>,
}

/// A number that may be null.
fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
    Option::deserialize(deserializer)
}

impl Elites {
    /// Reads the winners and holds them against the kernels there are: a kernel, tunable, value, type or shape that does
    /// not exist is an error that names it. `file` is what errors call it. What was not confirmed is left out, unless it is
    /// `wanted`.
    pub fn parse(text: &str, file: &str, registry: &Registry, wanted: Unconfirmed) -> Result<Self, Error> {
        let wrong = |problem: String| Error::Elites { file: file.to_owned(), problem };
        let read: EliteFile = serde_json::from_str(text)
            .map_err(|error| wrong(format!("{error}; expected the elite.json that `evosdpa tune` leaves")))?;
        let schema_is_known = match &read.schema {
            serde_json::Value::String(text) => text.ends_with("/1"),
            serde_json::Value::Number(number) => number.as_u64() == Some(1),
            _ => false,
        };
        if !schema_is_known {
            return Err(wrong(format!(
                "schema {} is not known; it must be \"evosdpa.elite/1\"",
                read.schema
            )));
        }
        let arch = read.device.arch.as_deref().ok_or_else(|| {
            wrong("the device has no `arch`: sm_90a, say, or the instruction set of a processor".to_owned())
        })?;
        let arch: TunedArch =
            arch.parse().map_err(|error: evosdpa_kernels::Error| wrong(error.to_string()))?;
        let mut elites = Self { arch, device: read.device.name, rows: Vec::new(), left_out: Vec::new() };
        for entry in &read.elites {
            let again = read.confirmation.as_ref().filter(|again| entry.evaluation == Some(again.number));
            let unconfirmed = match again {
                Some(again) if again.confirmed => None,
                Some(_) => Some("measured again, it was not shown to be faster"),
                None => Some("it was not measured again"),
            };
            for (problem, score) in &entry.shapes {
                let dtype = score.dtype.as_deref().or(entry.dtype.as_deref()).or(read.dtype.as_deref());
                let score = again.and_then(|again| again.score(problem, dtype)).unwrap_or(score.clone());
                let row = row(entry, problem, dtype, &score, arch, registry)
                    .map_err(|problem| wrong(format!("elite `{}`: {problem}", entry.kernel)))?;
                match unconfirmed.filter(|_| wanted == Unconfirmed::LeaveOut) {
                    Some(why) => elites.left_out.push(leave_out(&row, format!("not confirmed: {why}"))),
                    None => elites.add(row),
                }
            }
        }
        if elites.rows.is_empty() && elites.left_out.is_empty() {
            return Err(wrong("it has no elites".to_owned()));
        }
        Ok(elites)
    }

    /// Adds a row, unless one for the same problems is faster.
    fn add(&mut self, row: TunedRow) {
        if let Some(speedup) = row.speedup.filter(|speedup| *speedup < 1.0) {
            self.left_out
                .push(leave_out(&row, format!("slower than what it was compared with ({speedup}×)")));
            return;
        }
        match self.rows.iter_mut().find(|known| known.covers_the_same(&row)) {
            None => self.rows.push(row),
            Some(known) => {
                let slower = if row.is_faster_than(known) { std::mem::replace(known, row) } else { row };
                self.left_out.push(leave_out(&slower, format!("`{}` is faster there", known.kernel)));
            }
        }
    }

    /// Puts the rows into a table, in place of those for the same problems on the same device.
    pub fn merge_into(&self, table: &mut TunedTable) -> Vec<Merged> {
        let same = |device: &TunedDevice| device.arch == self.arch && device.name == self.device;
        let index = table.devices.iter().position(same).unwrap_or_else(|| {
            table.devices.push(TunedDevice { arch: self.arch, name: self.device.clone(), rows: Vec::new() });
            table.devices.len() - 1
        });
        let known = &mut table.devices[index].rows;
        let merge = |row: &TunedRow| {
            let before = known.iter().position(|known| known.covers_the_same(row));
            let replaced = before.map(|at| known[at].kernel.clone());
            match before {
                Some(at) => known[at] = row.clone(),
                None => known.push(row.clone()),
            }
            Merged {
                shape: row.shape(),
                dtypes: row.dtypes.iter().map(ToString::to_string).collect(),
                kernel: row.kernel.clone(),
                tunables: row.tunables.clone(),
                replaced,
            }
        };
        self.rows.iter().map(merge).collect()
    }
}

impl TunedRow {
    /// The shape of a winner's row.
    fn shape(&self) -> Shape {
        match &self.scope {
            Scope::Class(shape) => *shape,
            // Winners always have a shape: `row` below makes them.
            Scope::When(_) => unreachable!("a winner's row has a shape"),
        }
    }

    fn covers_the_same(&self, other: &Self) -> bool {
        matches!((&self.scope, &other.scope), (Scope::Class(a), Scope::Class(b)) if a == b)
            && self.dtypes == other.dtypes
    }

    fn is_faster_than(&self, other: &Self) -> bool {
        match ((self.p50_us, other.p50_us), (self.speedup, other.speedup)) {
            ((Some(own), Some(others)), _) => own < others,
            (_, (Some(own), Some(others))) => own > others,
            _ => false,
        }
    }
}

fn row(
    entry: &EliteEntry,
    problem: &str,
    dtype: Option<&str>,
    score: &Score,
    arch: TunedArch,
    registry: &Registry,
) -> Result<TunedRow, String> {
    let (shape, own_dtype) = match problem.split_once(char::is_whitespace) {
        Some((shape, dtype)) => (shape, Some(dtype.trim())),
        None => (problem, None),
    };
    let shape: Shape = shape.parse().map_err(|error: evosdpa_core::Error| error.to_string())?;
    let dtype: Option<DType> = own_dtype
        .or(dtype)
        .map(|name| name.parse().map_err(|error: evosdpa_core::Error| error.to_string()))
        .transpose()?;
    match arch {
        TunedArch::Gpu(arch) => check_on_gpu(entry, shape, dtype, arch, registry)?,
        TunedArch::Cpu(_) => {
            CpuTunables::read(
                &entry.kernel,
                entry.tunables.iter().map(|(name, value)| (name.as_str(), *value)),
            )?;
        }
    }
    Ok(TunedRow {
        scope: Scope::Class(shape),
        dtypes: dtype.into_iter().collect(),
        kernel: entry.kernel.clone(),
        tunables: entry.tunables.clone(),
        why: Some("winner of a tune".to_owned()),
        p50_us: score.p50_us,
        speedup: score.speedup,
    })
}

/// Refuses a kernel, tunable or value that there is not, or that does not take the shape.
fn check_on_gpu(
    entry: &EliteEntry,
    shape: Shape,
    dtype: Option<DType>,
    arch: Arch,
    registry: &Registry,
) -> Result<(), String> {
    let kernel = registry.kernel(&entry.kernel).map_err(|error| error.to_string())?;
    let asked = Problem::new(shape, DType::F16).map_err(|error| error.to_string())?;
    let mut facts = ProblemFacts::try_from(&asked).map_err(|error| error.to_string())?;
    // Without a type the row must at least work for the kernel's first.
    facts.dtype = dtype.or(kernel.manifest.dtypes.first().copied()).unwrap_or(facts.dtype);
    let tunables = entry.tunables.iter().map(|(name, value)| (name.as_str(), *value)).collect();
    let variant = choose::variant(kernel, &facts, &Target::nominal(arch), &tunables);
    variant.map(drop).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"{
        "schema": "evosdpa.elite/1",
        "device": {"name": "NVIDIA H200", "arch": "sm_90a", "sms": 132},
        "dtype": "bf16",
        "insights": ["ignored"],
        "elites": [
            {"kernel": "hopper_small", "tunables": {"WG_N": 1, "CLUSTER": 2},
             "shapes": {"mission": {"speedup": 1.1, "p50_us": 5.5}, "mission:causal f16": {"speedup": 1.2}}},
            {"kernel": "hopper_small", "tunables": {"WG_N": 2, "CLUSTER": 1},
             "evaluation": 9,
             "shapes": {"mission": {"speedup": 1.3, "p50_us": 4.9}, "small": {"speedup": 0.9, "p50_us": 7.0}}}
        ],
        "confirmation": {"number": 9, "confirmed": true, "fitness": 1.2,
            "shapes": {"mission bf16": {"speedup": 1.25, "p50_us": 5.1}}}
    }"#;

    fn parse(text: &str, wanted: Unconfirmed) -> Result<Elites, Error> {
        Elites::parse(text, "elite.json", &registry(), wanted)
    }

    #[test]
    fn only_what_was_confirmed_becomes_a_row_unless_forced() {
        let elites = parse(GOOD, Unconfirmed::LeaveOut).unwrap();
        let rows: Vec<(String, Option<f64>)> =
            elites.rows.iter().map(|row| (row.shape().to_string(), row.speedup)).collect();
        // With the number of the second measurement.
        assert_eq!(rows, [("mission".to_owned(), Some(1.25))]);
        let whys: Vec<&str> = elites.left_out.iter().map(|left| left.why.as_str()).collect();
        assert!(whys.iter().filter(|why| why.contains("it was not measured again")).count() == 2, "{whys:?}");
        assert!(whys.iter().any(|why| why.contains("slower than")), "{whys:?}");
        let failed = GOOD.replace("\"confirmed\": true", "\"confirmed\": false");
        let elites = parse(&failed, Unconfirmed::LeaveOut).unwrap();
        assert!(elites.rows.is_empty(), "{elites:?}");
        assert!(elites.left_out.iter().any(|left| left.why.contains("not shown to be faster")), "{elites:?}");
        assert!(!parse(&failed, Unconfirmed::Take).unwrap().rows.is_empty());
    }

    fn registry() -> Registry {
        Registry::embedded().unwrap()
    }

    #[test]
    fn the_fastest_of_each_shape_becomes_its_row() {
        let elites = parse(GOOD, Unconfirmed::Take).unwrap();
        let rows: Vec<(String, i64)> =
            elites.rows.iter().map(|row| (row.shape().to_string(), row.tunables["WG_N"])).collect();
        assert_eq!(rows, [("mission".to_owned(), 2), ("mission:causal".to_owned(), 1)]);
        assert_eq!(elites.rows[0].dtypes, [DType::BF16]);
        assert_eq!(elites.rows[1].dtypes, [DType::F16]);
        let whys: Vec<&str> = elites.left_out.iter().map(|left| left.why.as_str()).collect();
        assert!(whys[0].contains("is faster there") && whys[1].contains("slower than"), "{whys:?}");
    }

    #[test]
    fn rows_for_the_same_problem_are_replaced_and_others_kept() {
        let elites = parse(GOOD, Unconfirmed::Take).unwrap();
        let mut table = TunedTable::parse(
            "schema = 1\n[[device]]\narch = \"sm_90a\"\nname = \"NVIDIA H200\"\n\
             [[device.row]]\nshape = \"b1h8s512d64\"\ndtypes = [\"bf16\"]\nkernel = \"ampere_fwd\"\n\
             [[device.row]]\nshape = \"mission\"\nkernel = \"sdpa_v1\"\n",
            "t.toml",
        )
        .unwrap();
        let merged = elites.merge_into(&mut table);
        assert_eq!(merged[0].replaced.as_deref(), Some("ampere_fwd"));
        assert_eq!(merged[1].replaced, None);
        let kernels: Vec<&str> = table.devices[0].rows.iter().map(|row| row.kernel.as_str()).collect();
        assert_eq!(kernels, ["hopper_small", "sdpa_v1", "hopper_small"]);
        // Once more changes nothing.
        let text = table.to_toml().unwrap();
        elites.merge_into(&mut table);
        assert_eq!(table.to_toml().unwrap(), text);
        // Another device gets a list of its own.
        let other = Elites { device: None, ..elites };
        other.merge_into(&mut table);
        assert_eq!(table.devices.len(), 2);
    }

    #[test]
    fn what_does_not_exist_is_named() {
        for (from, to, expected) in [
            ("\"hopper_small\"", "\"hoper_small\"", "did you mean `hopper_small`"),
            ("\"CLUSTER\"", "\"CLUSTR\"", "did you mean `CLUSTER`"),
            ("\"CLUSTER\": 2", "\"CLUSTER\": 3", "CLUSTER = 3 is not one of its values"),
            ("\"mission\":", "\"misson\":", "did you mean `mission`"),
            ("\"dtype\": \"bf16\"", "\"dtype\": \"bf61\"", "unknown dtype `bf61`"),
            ("elite/1", "elite/2", "schema \"evosdpa.elite/2\" is not known"),
            ("sm_90a", "sm_91", "architecture `sm_91`"),
            ("\"arch\": \"sm_90a\"", "\"isa\": \"avx2\"", "the device has no `arch`"),
            ("\"elites\": [", "\"elites\": {", "line"),
            ("sm_90a", "sm_80", "it is built for sm_90a"),
        ] {
            assert!(GOOD.contains(from), "{from}");
            let message = parse(&GOOD.replacen(from, to, 1), Unconfirmed::LeaveOut).unwrap_err().to_string();
            assert!(message.contains(expected) && message.contains("elite.json"), "{to}: {message}");
        }
    }
}
