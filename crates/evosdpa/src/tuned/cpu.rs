//! Rows for processors: tile sizes and threads of the streaming kernel.

#[cfg(feature = "cpu")]
use std::sync::OnceLock;

#[cfg(feature = "cpu")]
use evosdpa_core::{Feature, Problem};
#[cfg(feature = "cpu")]
use evosdpa_cpu::{CpuOptions, FlashTiles, Isa};
#[cfg(feature = "cpu")]
use evosdpa_kernels::ProblemFacts;

#[cfg(feature = "cpu")]
use super::{Scope, TunedArch, TunedRow, TunedTable, class_distance, user_table};
#[cfg(feature = "cpu")]
use crate::Error;

/// The tunables of a CPU kernel; `None` leaves the choice to it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuTunables {
    /// `BLOCK_Q`: query rows of a tile.
    pub block_q: Option<usize>,
    /// `BLOCK_KV`: keys of a tile.
    pub block_kv: Option<usize>,
    /// `THREADS`.
    pub threads: Option<usize>,
}

impl CpuTunables {
    /// Reads what a variant of `kernel` sets, where 0 sets nothing. A kernel, tunable or value that there is not is named.
    pub fn read<'a>(
        kernel: &str,
        tunables: impl IntoIterator<Item = (&'a str, i64)>,
    ) -> Result<Self, String> {
        let known: &[&str] = match kernel {
            "cpu_flash" => &["BLOCK_Q", "BLOCK_KV", "THREADS"],
            "cpu_naive" => &["THREADS"],
            _ => {
                return Err(format!(
                    "unknown kernel `{kernel}` of a processor (known are cpu_flash, cpu_naive)"
                ));
            }
        };
        let mut read = Self::default();
        for (name, value) in tunables {
            if !known.contains(&name) {
                return Err(format!("{kernel} has no tunable `{name}` (it has {})", known.join(", ")));
            }
            let most = 4096;
            let value = usize::try_from(value)
                .ok()
                .filter(|value| *value <= most && (name != "BLOCK_KV" || value.is_multiple_of(16)));
            let Some(value) = value else {
                let of_keys = if name == "BLOCK_KV" { " and a multiple of 16" } else { "" };
                return Err(format!("{kernel}: {name} must be 0 to {most}{of_keys}"));
            };
            let place = match name {
                "BLOCK_Q" => &mut read.block_q,
                "BLOCK_KV" => &mut read.block_kv,
                _ => &mut read.threads,
            };
            *place = Some(value).filter(|value| *value > 0);
        }
        if read.block_q.is_some() != read.block_kv.is_some() {
            return Err(format!("{kernel}: BLOCK_Q and BLOCK_KV are set together"));
        }
        Ok(read)
    }

    /// The tile sizes, where they are set.
    #[cfg(feature = "cpu")]
    pub fn tiles(&self) -> Option<FlashTiles> {
        Some(FlashTiles { block_q: self.block_q?, block_kv: self.block_kv? })
    }
}

/// The name of this machine's processor, as the system has it.
pub fn processor_name() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let value =
        text.lines().find_map(|line| line.strip_prefix("model name")?.trim_start().strip_prefix(':'))?;
    Some(value.trim().to_owned())
}

/// What the user's table says of a problem on this processor.
#[cfg(feature = "cpu")]
#[derive(Clone, Debug, PartialEq)]
pub struct CpuRow {
    /// What it sets.
    pub tunables: CpuTunables,
    /// Which row it is.
    pub from: String,
    /// The evidence, in words.
    pub why: Option<String>,
    /// What was measured.
    pub p50_us: Option<f64>,
}

/// The user's table as far as it is about this processor, read once. A table that cannot be read is an error each time.
#[cfg(feature = "cpu")]
fn of_this_processor() -> Result<&'static TunedTable, Error> {
    static TABLE: OnceLock<TunedTable> = OnceLock::new();
    if let Some(table) = TABLE.get() {
        return Ok(table);
    }
    let mut table = user_table()?.unwrap_or_default();
    table.devices.retain(|device| matches!(device.arch, TunedArch::Cpu(_)));
    if !table.devices.is_empty() {
        let name = processor_name();
        table.devices.retain(|device| device.name.is_none() || device.name == name);
    }
    Ok(TABLE.get_or_init(|| table))
}

/// The row for a problem, if the user's table has one. Results that may not depend on the batch have none: tiles for a class of
/// sizes would make them.
#[cfg(feature = "cpu")]
pub fn cpu_row(problem: &Problem, isa: Isa) -> Result<Option<CpuRow>, Error> {
    let table = of_this_processor()?;
    if table.devices.is_empty() {
        return Ok(None);
    }
    find(table, problem, isa)
}

#[cfg(feature = "cpu")]
fn find(table: &TunedTable, problem: &Problem, isa: Isa) -> Result<Option<CpuRow>, Error> {
    if problem.features().contains(Feature::BatchInvariant) {
        return Ok(None);
    }
    let Ok(facts) = ProblemFacts::try_from(problem) else { return Ok(None) };
    let distance = |row: &TunedRow| match &row.scope {
        Scope::Class(shape) if row.dtypes.is_empty() || row.dtypes.contains(&problem.dtype()) => {
            let alike = Problem::new(*shape, problem.dtype()).ok()?;
            (alike.features() == problem.features()).then(|| class_distance(shape, &facts))?
        }
        _ => None,
    };
    let here = table.devices.iter().filter(|device| device.arch == TunedArch::Cpu(isa.name()));
    let rows =
        here.flat_map(|device| device.rows.iter().zip(1..).map(move |(row, number)| (device, number, row)));
    let fitting = rows.filter_map(|(device, number, row)| Some((distance(row)?, device, number, row)));
    let Some((_, device, number, row)) = fitting.min_by(|(a, ..), (b, ..)| a.total_cmp(b)) else {
        return Ok(None);
    };
    let from = format!("row {number} of {} in {}", device.label(), table.file);
    let set = row.tunables.iter().map(|(name, value)| (name.as_str(), *value));
    let tunables = CpuTunables::read(&row.kernel, set)
        .map_err(|why| Error::Table { file: table.file.clone(), problem: format!("{from}: {why}") })?;
    Ok(Some(CpuRow { tunables, from, why: row.why.clone(), p50_us: row.p50_us }))
}

/// Fills in what the user's table says and the caller left open.
#[cfg(feature = "cpu")]
pub(crate) fn settle(problem: &Problem, options: &mut CpuOptions) -> Result<(), Error> {
    if let Some(row) = cpu_row(problem, options.isa.unwrap_or_else(Isa::best))? {
        options.tiles = row.tunables.tiles();
        options.threads = options.threads.or(row.tunables.threads);
    }
    Ok(())
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use evosdpa_core::DType;

    use super::*;

    const TABLE: &str = r#"
        schema = 1
        [[device]]
        arch = "avx2"
        row = [
            { shape = "mission", dtypes = ["f32"], kernel = "cpu_flash", tunables = { BLOCK_Q = 48, BLOCK_KV = 32, THREADS = 1 } },
            { shape = "b1h8s600d64", kernel = "cpu_flash", tunables = { BLOCK_Q = 96, BLOCK_KV = 64 } },
        ]
        [[device]]
        arch = "sm_90a"
        row = [{ shape = "mission", kernel = "hopper_small" }]
    "#;

    fn found(shape: &str, dtype: DType, isa: Isa) -> Option<CpuRow> {
        let table = TunedTable::parse(TABLE, "t.toml").unwrap();
        find(&table, &Problem::new(shape.parse().unwrap(), dtype).unwrap(), isa).unwrap()
    }

    #[test]
    fn the_nearest_row_of_the_instruction_set_is_taken() {
        let row = found("mission", DType::F32, Isa::Avx2).unwrap();
        assert_eq!(row.tunables.tiles(), Some(FlashTiles { block_q: 48, block_kv: 32 }));
        assert_eq!((row.tunables.threads, row.from.as_str()), (Some(1), "row 1 of avx2 in t.toml"));
        let near = found("b1h8s580d64", DType::F32, Isa::Avx2).unwrap();
        assert_eq!(near.tunables.block_q, Some(96));
        assert_eq!(found("mission", DType::BF16, Isa::Avx2).unwrap().tunables.block_q, Some(96));
        for (shape, isa) in [
            ("mission", Isa::Avx512),
            ("mission:causal", Isa::Avx2),
            ("mission:invariant", Isa::Avx2),
            ("mission:softcap=30", Isa::Avx2),
        ] {
            assert_eq!(found(shape, DType::F32, isa), None, "{shape} {isa}");
        }
    }

    #[test]
    fn rows_name_what_there_is() {
        for (from, to, expected) in [
            (
                "BLOCK_Q = 48",
                "BLOCK_QQ = 48",
                "cpu_flash has no tunable `BLOCK_QQ` (it has BLOCK_Q, BLOCK_KV, THREADS)",
            ),
            ("BLOCK_KV = 32", "BLOCK_KV = 33", "BLOCK_KV must be 0 to 4096 and a multiple of 16"),
            ("BLOCK_Q = 48", "BLOCK_Q = 0", "BLOCK_Q and BLOCK_KV are set together"),
            ("THREADS = 1", "THREADS = -1", "THREADS must be 0 to 4096"),
            ("\"cpu_flash\"", "\"hopper_small\"", "unknown kernel `hopper_small` of a processor"),
        ] {
            assert!(TABLE.contains(from), "{from}");
            let message = TunedTable::parse(&TABLE.replacen(from, to, 1), "t.toml").unwrap_err().to_string();
            assert!(message.contains(expected) && message.contains("row 1 of avx2"), "{message}");
        }
        let by_expression = TABLE.replacen("shape = \"mission\"", "when = \"1\"", 1);
        let message = TunedTable::parse(&by_expression, "t.toml").unwrap_err().to_string();
        assert!(message.contains("need `shape`"), "{message}");
    }
}
