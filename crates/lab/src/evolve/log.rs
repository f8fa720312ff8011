//! The log of a tune: one line of JSON per evaluation, on the disk before the next begins.

use std::{
    collections::BTreeMap,
    fs::{File, OpenOptions},
    path::{Path, PathBuf},
};

use evosdpa_core::file;
use serde::{Deserialize, Serialize};

use super::{
    insight::Diagnosis,
    space::{Point, Space},
    span::Span,
    trial::Trial,
};
use crate::{
    Error, bench::FLOOR, device::DeviceId, error::IoContext, gate::GateResult, measure::compare::Outcome,
};

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
    /// The share of the roof over the problem's operations and bytes that the candidate's median reaches, from 0 to 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub roofline: Option<f64>,
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
    /// The evaluator that did it, where the tune had several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
}

impl Evaluation {
    /// Whether the machine, and no gate, turned it away.
    pub fn met_a_machine_fault(&self) -> bool {
        self.status == Standing::Rejected
            && self.gates.iter().all(|gate| !gate.verdict.is_fail())
            && self.gates.iter().any(|gate| gate.verdict.is_unavailable())
    }
}

impl Evaluation {
    /// Whether its point may be proposed once more: what the machine failed at, and, once, what was faster than the machine
    /// had shown to be possible.
    pub fn may_be_tried_again(&self, history: &[Evaluation]) -> bool {
        let too_fast =
            |e: &Evaluation| e.gates.iter().any(|gate| gate.gate == FLOOR && gate.verdict.is_fail());
        let tries =
            || history.iter().filter(|e| e.point == self.point && e.kernel == self.kernel && too_fast(e));
        self.met_a_machine_fault() || (too_fast(self) && tries().count() < 2)
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
        file::append(&self.file, &text).doing("write", &self.path, HINT)
    }
}

/// Whether a log is there and has its first line; one that was cut off before its end holds nothing.
pub fn has_begun(path: &Path) -> Result<bool, Error> {
    match file::read(path, file::RECORD_BYTES_MAX) {
        Ok(bytes) => Ok(bytes.contains(&b'\n')),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(source) => Err(Error::Io { doing: "read", path: path.to_owned(), hint: HINT, source }),
    }
}

/// Reads a log. Its last line may be cut off; any other damage is an error: nothing is repaired silently.
pub fn read(path: &Path) -> Result<Contents, Error> {
    let hint = "name the log.jsonl of a tune";
    let bytes = file::read(path, file::RECORD_BYTES_MAX).doing("read", path, hint)?;
    let damaged = |line: usize, why: String| {
        Error::Tune(format!(
            "{}: line {line} is damaged ({why}); put a whole copy in its place, or keep the lines before it (`head -n {}`), \
             and --resume goes on from there",
            path.display(),
            line - 1,
        ))
    };
    let (mut header, mut evaluations) = (None, Vec::<Evaluation>::new());
    let (mut confirmations, mut diagnoses) = (Vec::new(), Vec::new());
    let (mut whole_bytes, mut number) = (0, 0);
    let mut rest = bytes.as_slice();
    while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
        let line = &rest[..end];
        rest = &rest[end + 1..];
        number += 1;
        match serde_json::from_slice::<Line>(line) {
            Ok(Line::Header(found)) if number == 1 && found.schema == SCHEMA => header = Some(found),
            Ok(Line::Header(found)) if number == 1 => {
                return Err(damaged(number, format!("schema {}, not {SCHEMA}", found.schema)));
            }
            Ok(Line::Header(_)) => return Err(damaged(number, "a second beginning".to_owned())),
            Ok(_) if number == 1 => return Err(damaged(1, "it is not the beginning of a tune".to_owned())),
            Ok(Line::Evaluation(found)) => {
                let expected = evaluations.len() as u64;
                if found.number != expected {
                    let why = format!("evaluation {} where {expected} belongs", found.number);
                    return Err(damaged(number, format!("{why}: lines are missing, doubled or moved")));
                }
                evaluations.push(*found);
            }
            Ok(Line::Confirmation(found)) => {
                known(found.number, &evaluations).map_err(|why| damaged(number, why))?;
                confirmations.push(found);
            }
            Ok(Line::Diagnosis(found)) => {
                known(found.number, &evaluations).map_err(|why| damaged(number, why))?;
                diagnoses.push(found);
            }
            // A machine that lost power may have the length of the last line but not its bytes.
            Err(_) if rest.is_empty() && number > 1 && line.contains(&0) => break,
            Err(error) => return Err(damaged(number, error.to_string())),
        }
        whole_bytes += end as u64 + 1;
    }
    let header = header.ok_or_else(|| {
        Error::Tune(format!("{}: line 1 is damaged (it was cut off): it holds no tune", path.display()))
    })?;
    let cut_bytes = bytes.len() as u64 - whole_bytes;
    Ok(Contents { header, evaluations, confirmations, diagnoses, whole_bytes, cut_bytes })
}

/// Whether what a line is about came before it.
fn known(number: u64, evaluations: &[Evaluation]) -> Result<(), String> {
    let before = evaluations.len() as u64;
    if number < before {
        return Ok(());
    }
    Err(format!("it is about evaluation {number}, which is not before it: lines are missing or moved"))
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
            roofline: None,
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
            by: None,
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
            log.add(&evaluation(expected as u64, 2, 1.5)).unwrap();
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

    /// Each is an error with the line and a way out, and the file stays as it is.
    #[test]
    fn nothing_is_repaired_silently() {
        let folder = tempfile::tempdir().unwrap();
        let mut log = Log::create(folder.path(), &header()).unwrap();
        (0..4).for_each(|number| log.add(&evaluation(number, 1, 1.0)).unwrap());
        let path = folder.path().join(FILE);
        let whole = std::fs::read(&path).unwrap();
        let lines: Vec<&[u8]> = whole.split_inclusive(|byte| *byte == b'\n').collect();
        let [first, a, b, c, d] = lines[..] else { panic!("{} lines", lines.len()) };
        let not_text = [&b[..20], &[0xFF, 0xFE][..], &b[22..]].concat();
        let in_a_string = String::from_utf8(b.to_vec()).unwrap().replacen("fine", "f\u{1}ne", 1).into_bytes();
        let mut in_a_string = in_a_string;
        let at = in_a_string.iter().position(|byte| *byte == 1).unwrap();
        in_a_string[at] = 0xC3;
        for (damaged, line, why) in [
            ([first, a, a, b, c].concat(), 3, "evaluation 0 where 1 belongs"),
            ([first, b, a, c, d].concat(), 2, "evaluation 1 where 0 belongs"),
            ([first, a, c, d].concat(), 3, "evaluation 2 where 1 belongs"),
            ([first, a, first, b].concat(), 3, "a second beginning"),
            ([a, b].concat(), 1, "not the beginning"),
            ([first, a, &not_text, c].concat(), 3, ""),
            ([first, a, &in_a_string, c].concat(), 3, ""),
            // A whole last line is not one that was being written.
            ([first, a, b"{}\n".as_slice()].concat(), 3, ""),
        ] {
            std::fs::write(&path, &damaged).unwrap();
            let message = Log::open(folder.path()).unwrap_err().to_string();
            assert!(message.contains(&format!("line {line} is damaged")), "{why}: {message}");
            assert!(message.contains(why) && message.contains("--resume"), "{why}: {message}");
            assert_eq!(std::fs::read(&path).unwrap(), damaged);
        }
        // The length of a last line without its bytes is what a loss of power leaves.
        std::fs::write(&path, [first, a, &[0; 40], b"\n"].concat()).unwrap();
        assert_eq!(Log::open(folder.path()).unwrap().1.evaluations.len(), 1);
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
