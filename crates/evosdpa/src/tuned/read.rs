//! TOML to [`TunedTable`] and back, with errors that name the file and the place.

use std::collections::BTreeMap;

use evosdpa_core::{DType, Shape};
use evosdpa_kernels::{Expr, ProblemFacts, Registry};
use serde::{Deserialize, Serialize};

use super::{CpuTunables, Scope, TunedArch, TunedDevice, TunedRow, TunedTable};
use crate::Error;

/// The only schema there is.
const SCHEMA: u32 = 1;

/// The file as it is written; [`TunedTable`] is what it means.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    schema: u32,
    #[serde(default)]
    device: Vec<DeviceEntry>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct DeviceEntry {
    arch: TunedArch,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(default)]
    row: Vec<RowEntry>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RowEntry {
    #[serde(skip_serializing_if = "Option::is_none")]
    shape: Option<Shape>,
    #[serde(skip_serializing_if = "Option::is_none")]
    when: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    dtypes: Vec<String>,
    kernel: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    p50_us: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    speedup: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    tunables: BTreeMap<String, i64>,
}

impl TunedTable {
    /// Reads a table. `file` is what errors and explanations call it.
    pub fn parse(text: &str, file: &str) -> Result<Self, Error> {
        let wrong = |problem: String| Error::Table { file: file.to_owned(), problem };
        let read: File = toml::from_str(text).map_err(|error| wrong(error.to_string().trim().to_owned()))?;
        if read.schema != SCHEMA {
            return Err(wrong(format!("schema {} is not known; it must be {SCHEMA}", read.schema)));
        }
        let mut devices = Vec::new();
        for device in read.device {
            let mut tuned = TunedDevice { arch: device.arch, name: device.name, rows: Vec::new() };
            for (number, entry) in device.row.into_iter().enumerate() {
                let row = row(entry).and_then(|row| of_its_kind(row, tuned.arch)).map_err(|problem| {
                    wrong(format!("row {} of {}: {problem}", number + 1, tuned.label()))
                })?;
                tuned.rows.push(row);
            }
            devices.push(tuned);
        }
        Ok(Self { file: file.to_owned(), devices })
    }

    /// The table as a file.
    pub fn to_toml(&self) -> Result<String, Error> {
        let device = |tuned: &TunedDevice| DeviceEntry {
            arch: tuned.arch,
            name: tuned.name.clone(),
            row: tuned.rows.iter().map(entry).collect(),
        };
        let file = File { schema: SCHEMA, device: self.devices.iter().map(device).collect() };
        toml::to_string(&file)
            .map_err(|error| Error::Table { file: self.file.clone(), problem: error.to_string() })
    }

    /// Refuses rows for GPUs that name a kernel, tunable or value that does not exist.
    pub fn check(&self, registry: &Registry) -> Result<(), Error> {
        for device in self.devices.iter().filter(|device| matches!(device.arch, TunedArch::Gpu(_))) {
            for (number, row) in device.rows.iter().enumerate() {
                let known = registry.kernel(&row.kernel).and_then(|kernel| {
                    kernel.space().assign(row.tunables.iter().map(|(name, value)| (name.as_str(), *value)))
                });
                known.map_err(|error| Error::Table {
                    file: self.file.clone(),
                    problem: format!("row {} of {}: {error}", number + 1, device.label()),
                })?;
            }
        }
        Ok(())
    }
}

fn row(entry: RowEntry) -> Result<TunedRow, String> {
    let scope = match (entry.shape, entry.when) {
        (Some(shape), None) => Scope::Class(shape),
        (None, Some(text)) => {
            let expr = Expr::parse(&text).map_err(|error| format!("`when`: {error}"))?;
            let unknown =
                expr.names().into_iter().find(|name| !ProblemFacts::NAMES.contains(name) && *name != "dtype");
            if let Some(name) = unknown {
                let known = ProblemFacts::NAMES.join(", ");
                return Err(format!("`when` uses `{name}`, which is not known (known are {known}, dtype)"));
            }
            Scope::When(expr)
        }
        _ => return Err("it needs either `shape` or `when`".to_owned()),
    };
    let dtypes = entry.dtypes.iter().map(|name| name.parse::<DType>().map_err(|error| error.to_string()));
    Ok(TunedRow {
        scope,
        dtypes: dtypes.collect::<Result<_, _>>()?,
        kernel: entry.kernel,
        tunables: entry.tunables,
        why: entry.why,
        p50_us: entry.p50_us,
        speedup: entry.speedup,
    })
}

/// A processor's row is for a shape, and sets what CPU kernels have. What GPUs run may be a kernel that is not there yet.
fn of_its_kind(row: TunedRow, arch: TunedArch) -> Result<TunedRow, String> {
    if let TunedArch::Cpu(_) = arch {
        if matches!(row.scope, Scope::When(_)) {
            return Err("rows for a processor need `shape`".to_owned());
        }
        CpuTunables::read(&row.kernel, row.tunables.iter().map(|(name, value)| (name.as_str(), *value)))?;
    }
    Ok(row)
}

fn entry(row: &TunedRow) -> RowEntry {
    let (shape, when) = match &row.scope {
        Scope::Class(shape) => (Some(*shape), None),
        Scope::When(expr) => (None, Some(expr.to_string())),
    };
    RowEntry {
        shape,
        when,
        dtypes: row.dtypes.iter().map(ToString::to_string).collect(),
        kernel: row.kernel.clone(),
        tunables: row.tunables.clone(),
        why: row.why.clone(),
        p50_us: row.p50_us,
        speedup: row.speedup,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"
schema = 1

[[device]]
arch = "sm_90a"
name = "NVIDIA H200"

[[device.row]]
shape = "b2h32/8s1/8192d128:window=255/0"
dtypes = ["f16", "bf16"]
kernel = "hopper_small"
p50_us = 12.5
speedup = 1.25
why = "measured"
tunables = { WG_N = 1, CLUSTER = 8 }

[[device.row]]
when = "causal && dtype == bf16"
kernel = "hopper_fwd"
"#;

    #[test]
    fn a_table_is_written_as_it_was_read() {
        let table = TunedTable::parse(GOOD, "t.toml").unwrap();
        let text = table.to_toml().unwrap();
        let again = TunedTable::parse(&text, "t.toml").unwrap();
        assert_eq!(format!("{table:?}"), format!("{again:?}"), "{text}");
        table.check(&Registry::embedded().unwrap()).unwrap();
    }

    #[test]
    fn wrong_tables_are_refused_with_their_place() {
        for (from, to, expected) in [
            ("schema = 1", "schema = 2", "schema 2 is not known; it must be 1"),
            ("arch = \"sm_90a\"", "arch = \"sm_90\"", "line 5, column 8"),
            ("why =", "wy =", "unknown field `wy`"),
            (
                "shape =",
                "when = \"1\"\nshape =",
                "row 1 of NVIDIA H200 (sm_90a): it needs either `shape` or `when`",
            ),
            ("b2h32/8s1", "b2h32/7s1", "multiple"),
            ("\"f16\"", "\"fp16\"", "unknown dtype `fp16`"),
            ("causal &&", "casual &&", "row 2 of NVIDIA H200 (sm_90a): `when` uses `casual`"),
            ("causal &&", "causal &", "`when`: in `causal &"),
        ] {
            assert!(GOOD.contains(from), "{from}");
            let message = TunedTable::parse(&GOOD.replacen(from, to, 1), "t.toml").unwrap_err().to_string();
            assert!(message.contains(expected) && message.contains("t.toml"), "{message}");
        }
    }

    #[test]
    fn rows_must_name_what_there_is() {
        let registry = Registry::embedded().unwrap();
        for (from, to, expected) in [
            ("hopper_small", "hoper_small", "did you mean `hopper_small`"),
            ("WG_N", "WGN", "did you mean `WG_N`"),
            ("CLUSTER = 8", "CLUSTER = 3", "CLUSTER = 3 is not one of its values"),
        ] {
            let table = TunedTable::parse(&GOOD.replacen(from, to, 1), "t.toml").unwrap();
            let message = table.check(&registry).unwrap_err().to_string();
            assert!(message.contains(expected) && message.contains("row 1"), "{message}");
        }
    }

    #[test]
    fn the_table_that_is_built_in_names_what_there_is() {
        let table = TunedTable::embedded().unwrap();
        table.check(&Registry::embedded().unwrap()).unwrap();
        assert!(table.devices.iter().any(|device| !device.rows.is_empty()));
    }
}
