//! PyTorch's attention, and that of libraries which build on it, in the user's own `python3`: a small program that travels inside
//! this binary.

use std::{cell::RefCell, time::Duration};

use evosdpa_core::{Alignment, Feature, Mask, Problem, Tensor};
use evosdpa_oracle::inputs::Inputs;
use serde_json::{Value, json};

use super::python::Python;
use crate::{
    Error,
    device::{DeviceId, Timing},
    measure::interleave::Contestant,
};

const PROGRAM: &str = include_str!("torch_baseline.py");

const NAME: &str = "torch";

/// One of PyTorch's backends or a library, called from Python or replayed from a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mode {
    /// Its name in tables and records.
    pub name: &'static str,
    backend: &'static str,
    graph: bool,
}

/// What is asked of the modes for packed and paged problems, and of no other.
const SERVING: [&str; 3] = ["looped", "nested", "flex"];

/// What has a form for either kind of problem.
const BOTH: &str = "flash-attn-3";

/// What they can say; what else a problem asks for they are not asked.
const SERVED: [Feature; 7] = [
    Feature::PackedQueries,
    Feature::PackedKeys,
    Feature::UsedLengths,
    Feature::UsedQueries,
    Feature::LeftPadding,
    Feature::CacheIndices,
    Feature::PagedCache,
];

impl Mode {
    /// Whether it is for problems of this kind: dense, or with lengths and pages.
    pub fn suits(&self, problem: &Problem) -> bool {
        self.backend == BOTH || SERVING.contains(&self.backend) != problem.features().is_empty()
    }

    /// Its name without PyTorch's, where it has one of its own.
    pub fn short_name(&self) -> &'static str {
        self.name.strip_prefix("torch ").unwrap_or(self.name)
    }
}

/// PyTorch on a CPU has one backend; another library is called with the same tensors.
const CPU_MODES: [Mode; 3] = [
    Mode { name: "torch", backend: "default", graph: false },
    Mode { name: "torch looped", backend: "looped", graph: false },
    Mode { name: "onnxruntime", backend: "onnxruntime", graph: false },
];

/// On a GPU: each backend and library by graph replay (the device alone), and what a program that calls PyTorch sees.
const GPU_MODES: [Mode; 12] = [
    Mode { name: "torch flash", backend: "flash", graph: true },
    Mode { name: "torch cudnn", backend: "cudnn", graph: true },
    Mode { name: "torch efficient", backend: "efficient", graph: true },
    Mode { name: "torch math", backend: "math", graph: true },
    Mode { name: "torch eager", backend: "default", graph: false },
    Mode { name: "torch looped", backend: "looped", graph: true },
    Mode { name: "torch nested", backend: "nested", graph: true },
    Mode { name: "torch flex", backend: "flex", graph: true },
    Mode { name: "flash-attn-3", backend: "flash-attn-3", graph: true },
    Mode { name: "flash-attn-2", backend: "flash-attn-2", graph: true },
    Mode { name: "flashinfer", backend: "flashinfer", graph: true },
    Mode { name: "xformers", backend: "xformers", graph: true },
];

/// Whether a row's name is one of the baselines.
pub fn is_baseline(name: &str) -> bool {
    CPU_MODES.iter().chain(&GPU_MODES).any(|mode| mode.name == name)
}

/// What to compare with on a device of the lab.
pub fn modes(device: DeviceId) -> &'static [Mode] {
    if device == DeviceId::Cpu { &CPU_MODES } else { &GPU_MODES }
}

/// Those of them that are asked for, by their short names, in the order of [`modes`].
pub fn modes_called(device: DeviceId, names: &[String]) -> Result<Vec<Mode>, Error> {
    let all = modes(device);
    let known: Vec<&str> = all.iter().map(Mode::short_name).collect();
    if let Some(unknown) = names.iter().find(|name| !known.contains(&name.as_str())) {
        return Err(Error::Problem(evosdpa_core::Error::UnknownName {
            kind: "baseline",
            name: unknown.clone(),
            nearest: evosdpa_core::error::nearest(unknown, known.iter().copied()),
            allowed: known.join(", "),
        }));
    }
    Ok(all.iter().filter(|mode| names.iter().any(|name| name == mode.short_name())).copied().collect())
}

/// A running child with torch imported.
pub struct Torch {
    python: Python,
    version: String,
}

impl Torch {
    /// Starts `python` and waits until torch is there with this many threads. No answer may take longer than `limit`.
    pub fn start(python: &str, threads: usize, limit: Duration) -> Result<Self, Error> {
        let python = Python::start(python, PROGRAM, limit).map_err(baseline)?;
        let mut torch = Self { python, version: String::new() };
        let hello = torch.ask(&json!({"op": "hello", "threads": threads}))?;
        let granted = hello["threads"].as_u64();
        if granted != Some(threads as u64) {
            return Err(baseline(format!("torch took {granted:?} threads instead of {threads}")));
        }
        torch.version = hello["version"].as_str().unwrap_or("unknown").to_owned();
        Ok(torch)
    }

    /// Torch's version.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Hands over a problem and its inputs.
    pub fn load(&mut self, device: DeviceId, problem: &Problem, inputs: &[Inputs]) -> Result<(), Error> {
        let dtype = problem.dtype();
        if dtype.is_eight_bit() {
            return Err(baseline(format!("its attention has no {dtype}; use f32, f16 or bf16")));
        }
        let others = problem.features().without(SERVED.into_iter().collect());
        if !others.is_empty() {
            return Err(baseline(format!("it is not asked for {others}")));
        }
        let mut sets = Vec::new();
        for (i, Inputs { q, k, v, .. }) in inputs.iter().enumerate() {
            let tensors = [("q", q), ("k", k), ("v", v)]
                .into_iter()
                .map(|(name, tensor)| self.python.hand_over(&format!("{name}{i}"), tensor, &[tensor.bytes()]))
                .collect::<Result<Vec<_>, _>>()
                .map_err(baseline)?;
            sets.push(tensors);
        }
        let sides: Option<Vec<Value>> =
            (!problem.features().is_empty()).then(|| inputs.iter().map(|set| side(problem, set)).collect());
        let band = problem.band();
        let mask = match problem.mask() {
            Mask::Full => "full",
            // PyTorch's is_causal is the top-left one.
            Mask::Causal(Alignment::TopLeft) => "causal",
            _ => "band",
        };
        let request = json!({
            "op": "load", "device": device, "sets": sets, "scale": problem.scale(), "mask": mask, "lo": band.lo, "hi": band.hi,
            "sides": sides,
        });
        self.ask(&request).map(drop)
    }

    /// Whether a mode can be had in this Python, or why not.
    pub fn find(&mut self, mode: Mode) -> Result<(), Error> {
        self.ask(&json!({"op": "find", "backend": mode.backend})).map(drop)
    }

    /// What a mode computes from the first set of inputs.
    pub fn output(&mut self, mode: Mode, problem: &Problem) -> Result<Tensor, Error> {
        let path = self.python.folder.join("o");
        self.ask(&json!({"op": "save", "path": path, "backend": mode.backend}))?;
        self.python.read_output(&path, problem).map_err(baseline)
    }

    fn ask(&mut self, request: &Value) -> Result<Value, Error> {
        self.python.ask(request).map_err(baseline)
    }
}

/// Lengths and pages of one set of inputs, and the mask as each sequence counts it.
fn side(problem: &Problem, inputs: &Inputs) -> Value {
    let (side, band) = (inputs.side(), problem.mask().band(0, 0));
    let bottom_right = matches!(
        problem.mask(),
        Mask::Causal(Alignment::BottomRight) | Mask::Window { alignment: Alignment::BottomRight, .. }
    );
    let columns = problem.pages_per_sequence();
    let page_table: Option<Vec<&[i32]>> = side.page_table.map(|table| {
        (0..table.rows(columns)).map(|row| &table.entries[row * table.row_stride..][..columns]).collect()
    });
    json!({
        "batch": problem.sizes().batch, "seq_kv": problem.sizes().seq_kv, "lo": band.lo, "hi": band.hi,
        "bottom_right": bottom_right, "cu_seqlens_q": side.cu_seqlens_q, "cu_seqlens_kv": side.cu_seqlens_kv,
        "seqused_q": side.seqused_q, "seqused_kv": side.seqused_kv, "leftpad_kv": side.leftpad_kv,
        "cache_batch_idx": side.cache_batch_idx, "page_table": page_table,
    })
}

/// One mode of a shared child, to be timed.
pub struct Timed<'a> {
    torch: &'a RefCell<Torch>,
    mode: Mode,
    between: bool,
}

impl<'a> Timed<'a> {
    /// To be timed in this way, of which there are two: [`Timing::Between`] and [`Timing::Graph`].
    pub fn new(torch: &'a RefCell<Torch>, mode: Mode, timing: Timing) -> Self {
        Self { torch, mode, between: timing == Timing::Between }
    }

    /// Whether it is timed by graphs, as between foreign kernels it must be.
    pub fn has_graphs(&self) -> bool {
        self.mode.graph
    }

    /// Chooses how calls are timed from now on.
    pub fn set_timing(&mut self, timing: Timing) {
        self.between = timing == Timing::Between;
    }
}

impl Contestant for Timed<'_> {
    fn time_us(&mut self, set: usize) -> Result<f64, Error> {
        let Mode { backend, graph, .. } = self.mode;
        let request =
            json!({"op": "time", "set": set, "backend": backend, "graph": graph, "between": self.between});
        let answer = self.torch.borrow_mut().ask(&request)?;
        answer["time_us"].as_f64().ok_or_else(|| baseline(format!("an answer without a time: {answer}")))
    }
}

fn baseline(why: String) -> Error {
    Error::Baseline { baseline: NAME, why }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backends_are_chosen_by_their_short_names() {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let chosen = modes_called(DeviceId::Cuda(0), &names(&["cudnn", "flash"])).unwrap();
        assert_eq!(chosen.iter().map(|mode| mode.name).collect::<Vec<_>>(), ["torch flash", "torch cudnn"]);
        assert_eq!(modes_called(DeviceId::Cpu, &names(&["torch", "looped"])).unwrap(), CPU_MODES[..2]);
        let error = modes_called(DeviceId::Cuda(0), &names(&["flash", "cudn"])).unwrap_err().to_string();
        assert!(error.contains("did you mean `cudnn`"), "{error}");
        assert!(
            error.contains(
                "allowed: flash, cudnn, efficient, math, eager, looped, nested, flex, flash-attn-3"
            ),
            "{error}"
        );
    }
}
