//! The compiler's own resource report: what `ptxas -v` prints, of CUDA 11, 12 and 13, from nvcc or NVRTC.
//!
//! Traps it knows: an entry can have several property blocks, because callees that were not inlined have their own,
//! printed after the entry's; barriers, stack and constant banks are absent when there are none; NVRTC puts
//! `ptxas  .` where nvcc indents; `smem` is static shared memory only; `Compile time` is noise.

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// A whole report.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// The entry points, in order.
    pub entries: Vec<Entry>,
    /// What the compiler warns of.
    pub advisories: Vec<Advisory>,
}

/// One entry point for one architecture.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// The (mangled) name.
    pub name: String,
    /// The architecture, where the log says it.
    pub arch: Option<String>,
    /// What it uses itself.
    pub resources: Resources,
    /// Functions it calls that were not inlined.
    pub callees: Vec<Callee>,
}

/// What one function uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resources {
    /// Registers per thread.
    pub registers: u32,
    /// Named barriers; CUDA 11 does not say.
    pub barriers: Option<u32>,
    /// Static shared memory.
    pub smem_static_bytes: u32,
    /// The function's own stack frame.
    pub stack_bytes: u32,
    /// Stack with all callees.
    pub cumulative_stack_bytes: u32,
    /// Spill stores.
    pub spill_store_bytes: u32,
    /// Spill loads.
    pub spill_load_bytes: u32,
    /// Local memory, as old compilers report it.
    pub lmem_bytes: u32,
    /// Constant memory, all banks together.
    pub cmem_bytes: u32,
}

/// A function that was not inlined.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Callee {
    /// The (mangled) name.
    pub name: String,
    /// Its stack frame.
    pub stack_bytes: u32,
    /// Spill stores.
    pub spill_store_bytes: u32,
    /// Spill loads.
    pub spill_load_bytes: u32,
}

/// What kind of trouble an advisory means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdvisoryKind {
    /// wgmma instructions run one after the other.
    WgmmaSerialized,
    /// setmaxnreg has no effect.
    SetmaxnregIgnored,
    /// Local memory is used.
    LocalMemory,
    /// Registers are spilled.
    Spill,
    /// A WMMA fragment is loaded from or stored to a thread's local memory: the front end warns, and the code traps.
    WmmaOnLocalMemory,
    /// Anything else.
    Other,
}

/// A warning of the compiler.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Advisory {
    /// What kind of trouble it means, told by the text: the codes differ between versions.
    pub kind: AdvisoryKind,
    /// The code, such as `C7510`.
    pub code: Option<String>,
    /// The text.
    pub text: String,
}

impl Advisory {
    /// Whether the compiler has given up on the source's meaning, so that the kernel cannot be right.
    pub fn fails(&self) -> bool {
        self.kind == AdvisoryKind::WmmaOnLocalMemory
    }

    /// `ptxas C7510: …`, or what the front end said of which line.
    pub fn describe(&self) -> String {
        match (&self.code, self.kind) {
            (Some(code), _) => format!("ptxas {code}: {}", self.text),
            (None, AdvisoryKind::WmmaOnLocalMemory) => format!("{}; its result is undefined", self.text),
            (None, _) => format!("ptxas: {}", self.text),
        }
    }
}

impl Entry {
    /// The stack of the entry and its callees, whichever is largest.
    pub fn worst_stack_bytes(&self) -> u32 {
        let callees = self.callees.iter().map(|callee| callee.stack_bytes);
        callees.chain([self.resources.stack_bytes, self.resources.cumulative_stack_bytes]).max().unwrap_or(0)
    }

    /// Spill stores and loads of the entry or of a callee, whichever is larger.
    pub fn worst_spill_bytes(&self) -> u32 {
        let own = self.resources.spill_store_bytes.saturating_add(self.resources.spill_load_bytes);
        let callees = self
            .callees
            .iter()
            .map(|callee| callee.spill_store_bytes.saturating_add(callee.spill_load_bytes));
        callees.chain([own]).max().unwrap_or(0)
    }
}

impl Report {
    /// Reads a log. A log without any entry point is an error: nothing could be gated on it.
    pub fn parse(log: &str) -> Result<Self> {
        let mut reader = Reader::default();
        for line in log.lines() {
            reader.line(line).map_err(|problem| Error::Report { label: "ptxas log".to_owned(), problem })?;
        }
        if reader.report.entries.is_empty() {
            let problem =
                "no `Compiling entry function` and no `Used N registers` in it; compile with `-Xptxas -v`";
            return Err(Error::Report { label: "ptxas log".to_owned(), problem: problem.to_owned() });
        }
        Ok(reader.report)
    }

    /// The entry of this name; with several architectures in one log, the first.
    pub fn entry(&self, name: &str) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.name == name)
    }
}

#[derive(Default)]
struct Reader {
    report: Report,
    /// Whose properties come next.
    function: Option<String>,
}

enum Line<'a> {
    Info(&'a str),
    Warning(&'a str),
    /// Goes on from the line before.
    Continued(&'a str),
}

impl Reader {
    fn line(&mut self, line: &str) -> Result<(), String> {
        match classify(line) {
            Some(Line::Info(text)) => self.info(text),
            Some(Line::Warning(text)) => {
                self.advise(text);
                Ok(())
            }
            Some(Line::Continued(text)) => self.properties(text),
            None => {
                // Of what the front end says, the one warning that means a kernel cannot work.
                if advisory_kind(line) == AdvisoryKind::WmmaOnLocalMemory {
                    self.advise(&without_folders(line));
                }
                Ok(())
            }
        }
    }

    fn info(&mut self, text: &str) -> Result<(), String> {
        if let Some(rest) = text.strip_prefix("Compiling entry function ") {
            let mut quoted = rest.split('\'').skip(1).step_by(2);
            let name = quoted.next().ok_or_else(|| format!("no name in `{text}`"))?.to_owned();
            let arch = quoted.next().map(str::to_owned);
            self.function = Some(name.clone());
            self.report.entries.push(Entry { name, arch, ..Entry::default() });
        } else if let Some(name) = text.strip_prefix("Function properties for ") {
            self.function = Some(name.trim().trim_matches('\'').to_owned());
        } else if let Some(rest) = text.strip_prefix("Used ") {
            self.used(rest, text)?;
        } else if text.starts_with('(') {
            self.advise(text);
        } else if text.contains("bytes stack frame") {
            self.properties(text)?;
        } else if !is_noise(text) && advisory_kind(text) != AdvisoryKind::Other {
            self.advise(text);
        }
        Ok(())
    }

    /// `64 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads`.
    fn properties(&mut self, text: &str) -> Result<(), String> {
        if !text.contains("bytes stack frame") {
            return Ok(());
        }
        let (mut stack, mut stores, mut loads) = (0, 0, 0);
        for field in text.split(',') {
            match split_field(field, text)? {
                (bytes, "bytes stack frame") => stack = bytes,
                (bytes, "bytes spill stores") => stores = bytes,
                (bytes, "bytes spill loads") => loads = bytes,
                _ => {}
            }
        }
        let function = self.function.clone().unwrap_or_default();
        match self.report.entries.last_mut() {
            Some(entry) if entry.name == function => {
                entry.resources.stack_bytes = stack;
                entry.resources.spill_store_bytes = stores;
                entry.resources.spill_load_bytes = loads;
            }
            Some(entry) => entry.callees.push(Callee {
                name: function,
                stack_bytes: stack,
                spill_store_bytes: stores,
                spill_load_bytes: loads,
            }),
            // A log that was cut before its first `Compiling` line: what has properties is taken for an entry.
            None => {
                let resources = Resources {
                    stack_bytes: stack,
                    spill_store_bytes: stores,
                    spill_load_bytes: loads,
                    ..Resources::default()
                };
                self.report.entries.push(Entry { name: function, resources, ..Entry::default() });
            }
        }
        Ok(())
    }

    /// `38 registers, used 1 barriers, 64 bytes cumulative stack size, 72 bytes smem, 376 bytes cmem[0]`.
    fn used(&mut self, fields: &str, line: &str) -> Result<(), String> {
        if self.report.entries.is_empty() {
            let name = self.function.clone().unwrap_or_default();
            self.report.entries.push(Entry { name, ..Entry::default() });
        }
        // Just made sure that there is one.
        let Some(entry) = self.report.entries.last_mut() else { return Ok(()) };
        let resources = &mut entry.resources;
        for field in fields.split(',') {
            let field = field.trim();
            let (number, what) = split_field(field.strip_prefix("used ").unwrap_or(field), line)?;
            match what {
                "registers" => resources.registers = number,
                "barriers" => resources.barriers = Some(number),
                "bytes cumulative stack size" => resources.cumulative_stack_bytes = number,
                "bytes smem" => resources.smem_static_bytes = number,
                "bytes lmem" => resources.lmem_bytes = number,
                what if what.starts_with("bytes cmem[") => {
                    resources.cmem_bytes = resources.cmem_bytes.saturating_add(number);
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn advise(&mut self, text: &str) {
        let (code, text) = match text.strip_prefix('(').and_then(|rest| rest.split_once(')')) {
            Some((code, rest)) => (Some(code.to_owned()), rest.trim()),
            None => (None, text),
        };
        let advisory = Advisory { kind: advisory_kind(text), code, text: text.to_owned() };
        if !self.report.advisories.contains(&advisory) {
            self.report.advisories.push(advisory);
        }
    }
}

fn classify(line: &str) -> Option<Line<'_>> {
    let Some(rest) = line.trim_start().strip_prefix("ptxas") else {
        // nvcc indents what belongs to the line before.
        return line.starts_with(char::is_whitespace).then(|| Line::Continued(line.trim()));
    };
    let rest = rest.trim_start();
    if let Some(text) = rest.strip_prefix('.') {
        return Some(Line::Continued(text.trim()));
    }
    let after_colon =
        |text: &'static str| Some(rest.strip_prefix(text)?.trim_start().strip_prefix(':')?.trim());
    if let Some(text) = after_colon("info") {
        return Some(Line::Info(text));
    }
    let text = after_colon("warning").or_else(|| after_colon("error")).or_else(|| after_colon("fatal"))?;
    Some(Line::Warning(text))
}

/// `8 bytes cmem[2]` → (8, `bytes cmem[2]`); `72+0 bytes smem`, as CUDA 5 and before wrote it, counts both.
fn split_field<'a>(field: &'a str, line: &str) -> Result<(u32, &'a str), String> {
    let (number, what) = field.trim().split_once(' ').ok_or_else(|| format!("`{field}` in `{line}`"))?;
    let parts = number.split('+').map(|part| part.parse::<u32>());
    let total = parts.sum::<Result<u32, _>>().map_err(|_| format!("`{number}` is no number in `{line}`"))?;
    Ok((total, what.trim()))
}

/// `warning: /a/b/mma.hpp(474): Warning: cannot …` → `mma.hpp(474): cannot …`.
fn without_folders(line: &str) -> String {
    let (place, what) = line.rsplit_once("arning: ").unwrap_or(("", line));
    let place = place.rsplit(['/', ' ']).find(|part| part.contains('(')).unwrap_or_default();
    format!("{place} {}", what.trim()).trim().to_owned()
}

fn is_noise(text: &str) -> bool {
    text.starts_with("Compile time") || text.contains("bytes gmem")
}

/// Told by the text, because the same text has had different codes.
fn advisory_kind(text: &str) -> AdvisoryKind {
    let text = text.to_lowercase();
    if text.contains("wgmma") && text.contains("serialized") {
        AdvisoryKind::WgmmaSerialized
    } else if text.contains("setmaxnreg") && text.contains("ignored") {
        AdvisoryKind::SetmaxnregIgnored
    } else if text.contains("local memory used") {
        AdvisoryKind::LocalMemory
    } else if text.contains("registers are spilled") {
        AdvisoryKind::Spill
    } else if text.contains("wmma load or store on local memory") {
        AdvisoryKind::WmmaOnLocalMemory
    } else {
        AdvisoryKind::Other
    }
}
