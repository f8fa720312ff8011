//! A capture: what the profiler saw of each launch, whichever of its two CSV forms it comes in.
//!
//! - **wide** (`--page raw`): a row per launch, a column per metric, units in the row below the header;
//! - **long** (`--page details`, or `--metrics` without a page): a row per launch and metric, and rows of rules between.

use std::collections::BTreeMap;

use super::{
    csv::{self, Table},
    number::{self, Locale},
};
use crate::Error;

/// The two forms of CSV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// A row per launch.
    Wide,
    /// A row per launch and metric.
    Long,
}

/// What was read from one file.
#[derive(Clone, Debug, PartialEq)]
pub struct Capture {
    /// Which form it had.
    pub form: Form,
    /// The launches in the order of their numbers.
    pub launches: Vec<Launch>,
}

/// One profiled launch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Launch {
    /// The profiler's number of the launch.
    pub id: u64,
    /// The kernel's name, without its arguments.
    pub kernel: String,
    /// Threads of a block, as printed: `(256, 1, 1)`.
    pub block: String,
    /// Blocks, as printed.
    pub grid: String,
    /// Compute capability of the device, as printed: `9.0`.
    pub capability: Option<String>,
    /// Metrics by the name they have in the file (in the long form possibly a label, then as `section/label`), in base
    /// units. What was `n/a` is not there.
    pub metrics: BTreeMap<String, f64>,
    /// Metrics that are in the file without a value.
    pub without_value: Vec<String>,
    /// What the profiler's own rules say: name and text.
    pub rules: Vec<(String, String)>,
}

impl Capture {
    /// Reads a file's text; `source` names it in errors.
    pub fn parse(text: &str, source: &str) -> Result<Self, Error> {
        let table = csv::read(text, source)?;
        let bad = |why: String| Error::Capture { source_name: source.to_owned(), why };
        let capture = if table.column("Metric Name").is_some() {
            long(&table).map_err(bad)?
        } else {
            wide(&table).map_err(bad)?
        };
        if capture.launches.is_empty() {
            return Err(bad("it has a header and no launch below it".to_owned()));
        }
        Ok(capture)
    }
}

/// Columns of the wide form that are no metrics.
const ABOUT: [&str; 14] = [
    "ID",
    "Process ID",
    "Process Name",
    "Host Name",
    "Kernel Name",
    "Kernel Time",
    "Context",
    "Stream",
    "Block Size",
    "Grid Size",
    "Device",
    "CC",
    "Invocations",
    "Section Name",
];

fn wide(table: &Table) -> Result<Capture, String> {
    // The row of units has no launch number.
    let (units, rows): (Vec<_>, Vec<_>) =
        table.rows.iter().partition(|row| table.cell(row, "ID").trim().is_empty());
    let units: Option<&Vec<String>> = units.first().copied();
    let metric_columns: Vec<usize> =
        (0..table.header.len()).filter(|&column| !ABOUT.contains(&table.header[column].as_str())).collect();
    let cells = rows.iter().flat_map(|row| metric_columns.iter().map(|&column| row[column].as_str()));
    let locale = locale(cells)?;
    let mut launches = Vec::new();
    for row in rows {
        let mut launch = about(table, row)?;
        for &column in &metric_columns {
            let unit = units.map_or("", |units| units[column].as_str());
            launch.put(table.header[column].clone(), &row[column], unit, locale);
        }
        launches.push(launch);
    }
    Ok(Capture { form: Form::Wide, launches })
}

fn long(table: &Table) -> Result<Capture, String> {
    let values = table.rows.iter().map(|row| table.cell(row, "Metric Value"));
    let locale = locale(values)?;
    let mut launches: Vec<Launch> = Vec::new();
    for row in &table.rows {
        let about = about(table, row)?;
        let at = launches.iter().position(|launch| launch.id == about.id).unwrap_or_else(|| {
            launches.push(about);
            launches.len() - 1
        });
        let launch = &mut launches[at];
        let (name, section) = (table.cell(row, "Metric Name"), table.cell(row, "Section Name"));
        if name.is_empty() {
            let text = table.cell(row, "Rule Description");
            if !text.is_empty() {
                launch.rules.push((table.cell(row, "Rule Name").to_owned(), text.to_owned()));
            }
            continue;
        }
        // Labels such as "Memory Throughput" are used by several sections; identifiers are unique.
        let key = if name.contains("__") { name.to_owned() } else { format!("{section}/{name}") };
        launch.put(key, table.cell(row, "Metric Value"), table.cell(row, "Metric Unit"), locale);
    }
    Ok(Capture { form: Form::Long, launches })
}

fn about(table: &Table, row: &[String]) -> Result<Launch, String> {
    let id = table.cell(row, "ID").trim();
    let id = id.parse().map_err(|_| format!("`{id}` is not the number of a launch"))?;
    let name = table.cell(row, "Kernel Name");
    let kernel = name.split('(').next().unwrap_or(name).trim().to_owned();
    let capability = Some(table.cell(row, "CC").trim()).filter(|text| !text.is_empty()).map(str::to_owned);
    let of = |column: &str| table.cell(row, column).trim().to_owned();
    Ok(Launch { id, kernel, block: of("Block Size"), grid: of("Grid Size"), capability, ..Launch::default() })
}

impl Launch {
    fn put(&mut self, name: String, value: &str, unit: &str, locale: Locale) {
        match number::parse(value, locale) {
            Some(value) => {
                self.metrics.insert(name, value * number::unit_factor(unit));
            }
            // Text such as a scheduling policy is no number and no metric that is missing either.
            None if matches!(value.trim().to_ascii_lowercase().as_str(), "" | "n/a" | "no data" | "nan") => {
                self.without_value.push(name);
            }
            None => {}
        }
    }
}

/// The locale that the numbers agree on; English when none gives it away.
fn locale<'a>(cells: impl Iterator<Item = &'a str>) -> Result<Locale, String> {
    let mut found: Option<(Locale, &str)> = None;
    for cell in cells.filter(|cell| number::looks_numeric(cell)) {
        let Some(locale) = number::witness(cell) else { continue };
        match found {
            None => found = Some((locale, cell)),
            Some((known, _)) if known == locale => {}
            Some((_, other)) => {
                return Err(format!(
                    "`{other}` and `{cell}` are numbers of different locales; capture again with LC_ALL=C"
                ));
            }
        }
    }
    Ok(found.map_or(Locale::English, |(locale, _)| locale))
}

#[cfg(test)]
mod tests {
    use super::*;

    const WIDE: &str = "==PROF== Disconnected\n\
        \"ID\",\"Kernel Name\",\"Block Size\",\"Grid Size\",\"Device\",\"CC\",\"gpu__time_duration.sum\",\"dram__bytes_read.sum\",\"policy\",\"absent\"\n\
        \"\",\"\",\"\",\"\",\"\",\"\",\"us\",\"Mbyte\",\"\",\"%\"\n\
        \"0\",\"sdpa_v2b(SdpaParams)\",\"(256, 1, 1)\",\"(8, 8, 1)\",\"0\",\"9.0\",\"1,204.50\",\"1.5\",\"PolicySpread\",\"n/a\"\n";

    #[test]
    fn the_wide_form_is_read_with_its_units() {
        let capture = Capture::parse(WIDE, "test").unwrap();
        assert_eq!(capture.form, Form::Wide);
        let [launch] = capture.launches.as_slice() else { panic!("{capture:?}") };
        assert_eq!((launch.kernel.as_str(), launch.grid.as_str()), ("sdpa_v2b", "(8, 8, 1)"));
        assert_eq!(launch.capability.as_deref(), Some("9.0"));
        assert!((launch.metrics["gpu__time_duration.sum"] - 1204.5e-6).abs() < 1e-12);
        assert_eq!(launch.metrics["dram__bytes_read.sum"], 1.5e6);
        assert_eq!(launch.without_value, ["absent"]);
    }

    #[test]
    fn a_european_capture_says_the_same() {
        let european = WIDE.replace("1,204.50", "1.204,50").replace("\"1.5\"", "\"1,5\"");
        let read = Capture::parse(&european, "test").unwrap();
        assert_eq!(read, Capture::parse(WIDE, "test").unwrap());
        let mixed = WIDE.replace("\"1.5\"", "\"1,5\"");
        let message = Capture::parse(&mixed, "test").unwrap_err().to_string();
        assert!(message.contains("LC_ALL=C") && message.contains("1,204.50"), "{message}");
    }

    #[test]
    fn the_long_form_is_read_with_its_rules() {
        let text = "\"ID\",\"Kernel Name\",\"Section Name\",\"Metric Name\",\"Metric Unit\",\"Metric Value\",\"Rule Name\",\"Rule Description\"\n\
            \"3\",\"k\",\"Speed\",\"Memory Throughput\",\"%\",\"12.5\",\"\",\"\"\n\
            \"3\",\"k\",\"Memory\",\"Memory Throughput\",\"Gbyte/s\",\"1,500.25\",\"\",\"\"\n\
            \"3\",\"k\",\"Command line\",\"sm__throughput.x\",\"%\",\"7\",\"\",\"\"\n\
            \"3\",\"k\",\"Speed\",\"\",\"\",\"\",\"SOLBottleneck\",\"Too small\"\n\
            \"4\",\"k\",\"Speed\",\"Duration\",\"us\",\"5\",\"\",\"\"\n";
        let capture = Capture::parse(text, "test").unwrap();
        assert_eq!((capture.form, capture.launches.len()), (Form::Long, 2));
        let first = &capture.launches[0];
        assert_eq!(first.metrics["Speed/Memory Throughput"], 12.5);
        assert_eq!(first.metrics["Memory/Memory Throughput"], 1500.25e9);
        assert_eq!(first.metrics["sm__throughput.x"], 7.0);
        assert_eq!(first.rules, [("SOLBottleneck".to_owned(), "Too small".to_owned())]);
        assert!((capture.launches[1].metrics["Speed/Duration"] - 5e-6).abs() < 1e-15);
    }

    #[test]
    fn a_cut_or_empty_capture_is_refused() {
        let cut = &WIDE[..WIDE.len() - 12];
        assert!(Capture::parse(cut, "x.csv").unwrap_err().to_string().contains("cut short"));
        let header_only = WIDE.lines().take(3).collect::<Vec<_>>().join("\n");
        assert!(Capture::parse(&header_only, "x.csv").unwrap_err().to_string().contains("no launch"));
    }
}
