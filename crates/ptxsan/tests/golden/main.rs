//! Checks the instruction functions against what a real GPU returned.
//!
//! `h200.txt` beside this file is written by `capture.cu`, once, on the machine
//! with the GPU. Conversions and correctly rounded arithmetic must agree bit
//! for bit (any NaN for any NaN: PTX fixes few payloads), approximate functions
//! within their documented error, matrix products on small integers exactly and
//! on other values within a bound on what their unspecified summation may lose.

mod hopper;
mod matrix;
mod scalar;

use std::collections::BTreeMap;

/// One line of a capture.
struct Line<'a> {
    name: &'a str,
    inputs: Vec<u64>,
    outputs: Vec<u64>,
}

impl<'a> Line<'a> {
    fn parse(text: &'a str) -> Option<Self> {
        let (left, right) = text.split_once(" =")?;
        let mut words = left.split(' ');
        let name = words.next()?;
        let hex = |word: &str| u64::from_str_radix(word, 16).ok();
        let inputs = words.map(hex).collect::<Option<_>>()?;
        let outputs = right.split_whitespace().map(hex).collect::<Option<_>>()?;
        Some(Line { name, inputs, outputs })
    }

    fn check(&self) -> Result<(), String> {
        match self.name.split('.').next() {
            Some("mma") => matrix::check_mma(self.name, &self.inputs, &self.outputs),
            Some("wmma") => matrix::check_wmma(self.name, &self.inputs, &self.outputs),
            Some("wgmma") => matrix::check_wgmma(&self.inputs, &self.outputs),
            Some("ldmatrix" | "stmatrix" | "movmatrix") => {
                matrix::check_transfer(self.name, &self.inputs, &self.outputs)
            }
            _ => scalar::check(self.name, &self.inputs, self.outputs[0]),
        }
    }
}

/// Where the machine is known to differ from the PTX ISA, whose word is kept: `bfe.s64` is put together from 32-bit
/// instructions there, and the position's upper 24 bits are not dropped as the ISA says.
fn differs_from_the_isa(line: &Line<'_>) -> bool {
    line.name == "bfe.s64" && line.inputs.get(1).is_some_and(|position| *position > 0xff)
}

/// Every disagreement of a capture, by instruction, with the first of each.
fn disagreements(capture: &str) -> BTreeMap<String, (usize, String)> {
    let mut found = BTreeMap::new();
    for text in capture.lines().filter(|line| !line.starts_with('#')) {
        let short: String = text.chars().take(90).collect();
        let (name, outcome) = match Line::parse(text) {
            Some(line) if differs_from_the_isa(&line) => continue,
            Some(line) => (line.name.to_string(), line.check()),
            None => ("unreadable".to_string(), Err(short.clone())),
        };
        if let Err(why) = outcome {
            let entry = found.entry(name).or_insert((0, format!("{short}: {why}")));
            entry.0 += 1;
        }
    }
    found
}

#[test]
fn captured_instructions_agree() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/h200.txt");
    let capture =
        std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{path}: {error}; see capture.cu"));
    let lines = capture.lines().count();
    assert!(lines > 10_000, "{path} has only {lines} lines: captured incompletely?");
    let found = disagreements(&capture);
    let report: Vec<String> =
        found.iter().map(|(name, (count, first))| format!("{name}: {count}, first: {first}")).collect();
    assert!(found.is_empty(), "{} instructions disagree:\n{}", found.len(), report.join("\n"));
}

/// Lines worked out by hand, right and wrong: the check must tell them apart.
#[test]
fn the_check_itself_can_fail() {
    let right = "\
add.rz.f32 3f800000 33800000 = 3f800000
add.rp.f32 3f800000 33800000 = 3f800001
fma.rn.relu.f16x2 3c003c00 bc003c00 0 = 3c00
cvt.rn.satfinite.e4m3x2.f32 43e00000 c3e00001 = 7efe
cvt.rn.f16x2.e5m2x2 7cff = 7c007fff
cvt.rni.s32.f32 40200000 = 2
cvt.sat.s8.s32 1ff = 7f
ex2.approx.ftz.f32 3f800000 = 40000001
prmt.b32.b4e 3020100 7060504 1 = 6070001
min.NaN.f32 7fc00000 3f800000 = 7fffffff
shr.s32 80000000 64 = ffffffff
";
    assert_eq!(disagreements(right), BTreeMap::new());
    let wrong = "\
add.rz.f32 3f800000 33800000 = 3f800001
fma.rn.relu.f16x2 3c003c00 bc003c00 0 = bc003c00
cvt.rn.satfinite.e4m3x2.f32 43e00000 c3e00001 = fe7e
cvt.rn.f16x2.e5m2x2 7cff = 7c00fc00
ex2.approx.ftz.f32 3f800000 = 40000004
prmt.b32.b4e 3020100 7060504 1 = 6070002
frobnicate.u32 1 = 1
";
    assert_eq!(disagreements(wrong).len(), wrong.lines().count());
    assert_eq!(disagreements("add.rz.f32 zz = 1").len(), 1);
}
