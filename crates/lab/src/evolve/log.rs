//! The log of a tune: one line of JSON per evaluation, on the disk before the next begins.

use std::{
    collections::BTreeMap,
    fs::{File, OpenOptions},
    io::{Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::{
    insight::Diagnosis,
    space::{Point, Space},
    span::Span,
    trial::Trial,
};
use crate::{Error, device::DeviceId, error::IoContext, gate::GateResult, measure::compare::Outcome};

/// Schema of the log's first line.
pub const SCHEMA: &str = "evosdpa.tune/1";
/// The log's name in its folder.
pub const FILE: &str = "log.jsonl";

const HINT: &str =
    "free some space or choose another folder with --out; `--resume` then goes on where this ended";

/// What a tune is about. A tune is only continued with the same.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// [`SCHEMA`].
    pub schema: String,
    /// What is tuned.
    pub space: Space,
    /// The device's name on the command line.
    pub device: DeviceId,
    /// What the device is.
    pub device_name: String,
    /// What its kernels are compiled for.
    pub arch: String,
    /// The problems, as text.
    pub problems: Vec<String>,
    /// Which strategy proposes.
    pub strategy: String,
    /// Seed of everything that chance decides.
    pub seed: u64,
}

/// What became of a candidate, worst first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Standing {
    /// A gate turned it away.
    Rejected,
    /// Slower on two or more problems.
    Out,
    /// Neither shown to be better nor out.
    Kept,
    /// Shown to be faster on a problem, and not out.
    Accepted,
    /// Accepted, and at least 3 % faster over all problems.
    Promoted,
}

/// A candidate on one problem.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ShapeResult {
    /// How many times as fast as the default.
    pub speedup: f64,
    /// 95 % bootstrap interval of that.
    pub interval: [f64; 2],
    /// What is not excluded at the rule's level.
    pub sequence: [f64; 2],
    /// 95 % bootstrap interval in cycles, where the clock can be read.
    pub cycles: Option<[f64; 2]>,
    /// The verdict.
    pub verdict: Outcome,
    /// The candidate's median time.
    pub p50_us: f64,
    /// The default's median time in the same blocks.
    pub default_p50_us: f64,
    /// Blocks behind it.
    pub blocks: usize,
    /// Blocks set aside because of the clock.
    pub discarded: usize,
}

/// What a compiled candidate uses.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Resources {
    /// Registers per thread.
    pub registers: u32,
    /// Shared memory per block.
    pub smem_bytes: u32,
    /// Spill stores plus loads.
    pub spill_bytes: u32,
    /// Warps at once, of what is possible.
    pub occupancy: f64,
}

/// One evaluation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Counted from 0, which is the default.
    pub number: u64,
    /// The kernel, when it is not the one being tuned but a proposed source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel: Option<String>,
    /// The tunables.
    pub point: Point,
    /// How it came about: default, sample, mutation, crossover, neighbour, insight, grid, climb, proposer.
    pub operator: String,
    /// Evaluations it was made from.
    #[serde(default)]
    pub parents: Vec<u64>,
    /// The insight that led to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub insight: Option<String>,
    /// Whether that insight helped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub helped: Option<bool>,
    /// Insights that it put to the test, whether one of them led to it or not.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub trials: Vec<Trial>,
    /// What a proposer said for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rationale: Option<String>,
    /// The gates in the order they ran.
    pub gates: Vec<GateResult>,
    /// What it uses, where it was compiled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<Resources>,
    /// By problem.
    pub shapes: BTreeMap<String, ShapeResult>,
    /// Geometric mean of the speed-ups over all problems; absent where not all were measured.
    pub fitness: Option<f64>,
    /// What became of it.
    pub status: Standing,
    /// When it began, after the compiler, in microseconds since 1970 (UTC); older logs do not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub began_us: Option<u64>,
    /// How long it took from then on.
    pub seconds: f64,
    /// Its parts, and what was done ahead.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub spans: Vec<Span>,
}

impl Evaluation {
    /// Whether the machine, and no gate, turned it away.
    pub fn met_a_machine_fault(&self) -> bool {
        self.status == Standing::Rejected
            && self.gates.iter().all(|gate| !gate.verdict.is_fail())
            && self.gates.iter().any(|gate| gate.verdict.is_unavailable())
    }
}

/// The winner against the default once more, on inputs and in blocks that did not choose it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Confirmation {
    /// Which evaluation.
    pub number: u64,
    /// By problem.
    pub shapes: BTreeMap<String, ShapeResult>,
    /// Geometric mean.
    pub fitness: f64,
    /// Whether it is still shown to be faster.
    pub confirmed: bool,
}

#[derive(Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum Line {
    Header(Header),
    Evaluation(Box<Evaluation>),
    Confirmation(Confirmation),
    Diagnosis(Diagnosis),
}

/// A log, open to be continued.
#[derive(Debug)]
pub struct Log {
    path: PathBuf,
    file: File,
}

/// What a log holds.
#[derive(Clone, Debug)]
pub struct Contents {
    /// Its first line.
    pub header: Header,
    /// All evaluations.
    pub evaluations: Vec<Evaluation>,
    /// All confirmations.
    pub confirmations: Vec<Confirmation>,
    /// What was said of those that were the best at their time.
    pub diagnoses: Vec<Diagnosis>,
    /// Bytes of whole lines.
    whole_bytes: u64,
    /// Bytes after them: a line that was being written when the tune was killed.
    pub cut_bytes: u64,
}

impl Log {
    /// Begins a log in a folder that has none.
    pub fn create(folder: &Path, header: &Header) -> Result<Self, Error> {
        let path = folder.join(FILE);
        let file =
            OpenOptions::new().append(true).create_new(true).open(&path).doing("create", &path, HINT)?;
        let mut log = Self { path, file };
        log.append(&Line::Header(header.clone()))?;
        Ok(log)
    }

    /// Opens a log to go on; a line that was cut off is removed.
    pub fn open(folder: &Path) -> Result<(Self, Contents), Error> {
        let path = folder.join(FILE);
        let contents = read(&path)?;
        let file = OpenOptions::new().append(true).open(&path).doing("open", &path, HINT)?;
        file.set_len(contents.whole_bytes).and_then(|()| file.sync_all()).doing("repair", &path, HINT)?;
        Ok((Self { path, file }, contents))
    }

    /// Adds an evaluation; when this returns it is on the disk.
    pub fn add(&mut self, evaluation: &Evaluation) -> Result<(), Error> {
        self.append(&Line::Evaluation(Box::new(evaluation.clone())))
    }

    /// Adds a confirmation.
    pub fn confirm(&mut self, confirmation: &Confirmation) -> Result<(), Error> {
        self.append(&Line::Confirmation(confirmation.clone()))
    }

    /// Adds a diagnosis.
    pub fn diagnose(&mut self, diagnosis: &Diagnosis) -> Result<(), Error> {
        self.append(&Line::Diagnosis(diagnosis.clone()))
    }

    fn append(&mut self, line: &Line) -> Result<(), Error> {
        // Our records hold only strings, numbers and lists of them, which always serialise.
        let mut text = serde_json::to_vec(line).expect("records are plain data");
        text.push(b'\n');
        let before = self.file.seek(SeekFrom::End(0)).doing("write", &self.path, HINT)?;
        let written = self.file.write_all(&text).and_then(|()| self.file.sync_data());
        if written.is_err() {
            // On a full disk, half a line would be left; without it the log is whole.
            let _ = self.file.set_len(before);
        }
        written.doing("write", &self.path, HINT)
    }
}

/// Reads a log. Its last line may be cut off; any other damage is an error.
pub fn read(path: &Path) -> Result<Contents, Error> {
    let mut text = String::new();
    let hint = "name the log.jsonl of a tune";
    File::open(path)
        .and_then(|mut file| {
            let mut bytes = Vec::new();
            file.read_to_end(&mut bytes)?;
            // A cut in the middle of a character is a cut in the last line.
            text = String::from_utf8_lossy(&bytes).into_owned();
            Ok(())
        })
        .doing("read", path, hint)?;
    let damaged = |line: usize, why: String| {
        Error::Tune(format!(
            "{}: line {line} is damaged ({why}); only a cut last line can be repaired",
            path.display()
        ))
    };
    let (mut header, mut evaluations) = (None, Vec::new());
    let (mut confirmations, mut diagnoses) = (Vec::new(), Vec::new());
    let (mut whole_bytes, mut number) = (0_u64, 0);
    let mut rest = text.as_str();
    while let Some(end) = rest.find('\n') {
        let line = &rest[..end];
        rest = &rest[end + 1..];
        number += 1;
        match serde_json::from_str::<Line>(line) {
            Ok(Line::Header(found)) if number == 1 && found.schema == SCHEMA => header = Some(found),
            Ok(Line::Header(found)) => {
                return Err(damaged(number, format!("schema {}, not {SCHEMA}", found.schema)));
            }
            Ok(Line::Evaluation(found)) => evaluations.push(*found),
            Ok(Line::Confirmation(found)) => confirmations.push(found),
            Ok(Line::Diagnosis(found)) => diagnoses.push(found),
            // A machine that lost power may have the length of the last line but not its bytes.
            Err(_) if rest.is_empty() && number > 1 => break,
            Err(error) => return Err(damaged(number, error.to_string())),
        }
        whole_bytes += end as u64 + 1;
    }
    let header = header.ok_or_else(|| damaged(1, "it is not the beginning of a tune".to_owned()))?;
    let cut_bytes = text.len() as u64 - whole_bytes;
    Ok(Contents { header, evaluations, confirmations, diagnoses, whole_bytes, cut_bytes })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::evolve::space::{Layer, tests::space};

    pub(crate) fn header() -> Header {
        Header {
            schema: SCHEMA.into(),
            space: space(&[("A", Layer::Macro, 3), ("b", Layer::Micro, 4)]),
            device: DeviceId::Cpu,
            device_name: "a CPU".into(),
            arch: "avx2".into(),
            problems: vec!["tiny f32".into()],
            strategy: "evo".into(),
            seed: 1,
        }
    }

    pub(crate) fn evaluation(number: u64, a: i64, fitness: f64) -> Evaluation {
        let shape = ShapeResult {
            speedup: fitness,
            interval: [fitness * 0.99, fitness * 1.01],
            sequence: [fitness * 0.98, fitness * 1.02],
            cycles: None,
            verdict: if fitness > 1.0 { Outcome::Fast } else { Outcome::Same },
            p50_us: 10.0 / fitness,
            default_p50_us: 10.0,
            blocks: 12,
            discarded: 0,
        };
        Evaluation {
            number,
            kernel: None,
            point: [("A".to_owned(), a), ("b".to_owned(), number as i64 % 4)].into(),
            operator: "sample".into(),
            parents: vec![],
            insight: None,
            helped: None,
            trials: vec![],
            rationale: None,
            gates: vec![GateResult::pass("correctness", "fine")],
            resources: None,
            shapes: [("tiny f32".to_owned(), shape)].into(),
            fitness: Some(fitness),
            status: if fitness > 1.03 { Standing::Promoted } else { Standing::Kept },
            began_us: None,
            seconds: 0.1,
            spans: vec![],
        }
    }

    #[test]
    fn a_log_cut_anywhere_keeps_every_whole_line() {
        let folder = tempfile::tempdir().unwrap();
        let mut log = Log::create(folder.path(), &header()).unwrap();
        for number in 0..3 {
            log.add(&evaluation(number, 1, 1.0)).unwrap();
        }
        drop(log);
        let path = folder.path().join(FILE);
        let whole = std::fs::read(&path).unwrap();
        let ends: Vec<usize> =
            whole.iter().enumerate().filter(|(_, b)| **b == b'\n').map(|(i, _)| i + 1).collect();
        for cut in ends[0]..whole.len() {
            std::fs::write(&path, &whole[..cut]).unwrap();
            let (mut log, contents) = Log::open(folder.path()).unwrap();
            let expected = ends.iter().filter(|end| **end <= cut).count() - 1;
            assert_eq!(contents.evaluations.len(), expected, "cut at {cut}");
            // What is written next is whole again.
            log.add(&evaluation(9, 2, 1.5)).unwrap();
            assert_eq!(read(&path).unwrap().evaluations.len(), expected + 1, "cut at {cut}");
        }
        std::fs::write(&path, &whole[..ends[0] / 2]).unwrap();
        assert!(Log::open(folder.path()).is_err(), "a log without its header is no log");
        let mut torn = whole.clone();
        torn[ends[1] - 10] = b'#';
        torn[ends[1] - 2] = b'#';
        std::fs::write(&path, torn).unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("line 2 is damaged"));
    }

    #[test]
    fn a_full_disk_is_said_and_leaves_the_log_whole() {
        let mut log = Log {
            path: "/dev/full".into(),
            file: OpenOptions::new().append(true).open("/dev/full").unwrap(),
        };
        let message = log.add(&evaluation(0, 0, 1.0)).unwrap_err().to_string();
        assert!(message.contains("free some space") && message.contains("--resume"), "{message}");
    }
}
