//! `evosdpa.ptxsan`: a CUDA kernel run on the CPU, with all that is wrong with it.

use std::panic::{AssertUnwindSafe, catch_unwind};

use ptxsan::{
    Arg, Buffer, Device, Error, Launch, Module, ModuleId, Options, Outcome, Schedule, compile, finding,
};
use pyo3::{
    exceptions::{PyRuntimeError, PyTypeError},
    prelude::*,
    types::{PyBytes, PyDict},
};

use crate::exit::detached;

/// An argument as Python gives it.
enum Given {
    /// A buffer with its contents: it may be read only, or have to be written whole.
    Buffer {
        name: String,
        bytes: Vec<u8>,
        read_only: bool,
        output: bool,
    },
    /// A number whose type is the parameter's.
    Int(i128),
    Float(f64),
    /// A value as it lies in memory.
    Raw(Vec<u8>),
}

/// One call.
struct Request {
    text: String,
    file_name: String,
    compile: compile::CompileOptions,
    entry: Option<String>,
    launch: Launch,
    schedule: String,
    args: Vec<Given>,
    /// Variables to set, and to read afterwards.
    variables: Vec<(String, Vec<u8>)>,
}

/// What a call leaves: a document, then the bytes of buffers and variables, in order.
struct Answer {
    document: String,
    buffers: Vec<Vec<u8>>,
    variables: Vec<Vec<u8>>,
}

/// The bytes of buffers and of variables that a launch leaves.
type Left = (Vec<Vec<u8>>, Vec<Vec<u8>>);

/// Why nothing ran: what an exception is made of.
struct Refusal {
    kind: &'static str,
    message: String,
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        let kind = match error {
            Error::Compiler(_) => "compiler",
            Error::Rejected { .. } => "compile",
            Error::Parse { .. } | Error::Unsupported { .. } => "ptx",
            Error::Launch { .. } | Error::TensorMap(_) | Error::Memory(_) => "launch",
            _ => "name",
        };
        Refusal { kind, message: error.to_string() }
    }
}

fn refused(message: String) -> Refusal {
    Refusal { kind: "launch", message }
}

/// Runs a kernel: `(None, (document, buffers, variables))`, or `((kind, message), None)` when nothing ran.
#[pyfunction]
pub(crate) fn sanitize<'py>(
    py: Python<'py>,
    text: String,
    file_name: String,
    options: &Bound<'py, PyDict>,
) -> PyResult<Py<PyAny>> {
    let request = read(text, file_name, options)?;
    let done = detached(py, || catch_unwind(AssertUnwindSafe(|| request.run())));
    let done =
        done.map_err(|_| PyRuntimeError::new_err("a defect in ptxsan: it panicked; please report it"))?;
    let bytes = |all: Vec<Vec<u8>>| all.iter().map(|bytes| PyBytes::new(py, bytes)).collect::<Vec<_>>();
    let answer = match done {
        Ok(answer) => {
            let Answer { document, buffers, variables } = answer;
            (py.None(), (document, bytes(buffers), bytes(variables)).into_pyobject(py)?.into_any().unbind())
        }
        Err(Refusal { kind, message }) => ((kind, message).into_pyobject(py)?.into_any().unbind(), py.None()),
    };
    Ok(answer.into_pyobject(py)?.into_any().unbind())
}

fn read(text: String, file_name: String, named: &Bound<'_, PyDict>) -> PyResult<Request> {
    let mut request = Request {
        text,
        file_name,
        compile: compile::CompileOptions::default(),
        entry: None,
        launch: Launch::new("", [1; 3], [1; 3], 0, Vec::new()),
        schedule: Schedule::RoundRobin.name().to_owned(),
        args: Vec::new(),
        variables: Vec::new(),
    };
    let launch = &mut request.launch;
    for (name, value) in named.iter() {
        match name.extract::<String>()?.as_str() {
            "arch" => request.compile.arch = value.extract()?,
            "defines" => request.compile.defines = value.extract()?,
            "include" => request.compile.include = value.extract()?,
            "nvrtc" => request.compile.more = value.extract()?,
            "entry" => request.entry = value.extract()?,
            "grid" => launch.grid = value.extract()?,
            "block" => launch.block = value.extract()?,
            "cluster" => launch.cluster = value.extract()?,
            "shared" => launch.shared_bytes = value.extract()?,
            "cooperative" => launch.cooperative = value.extract()?,
            "seed" => launch.options.seed = value.extract()?,
            "budget" => launch.options.instruction_budget = value.extract()?,
            "check_races" => launch.options.check_races = value.extract()?,
            "schedule" => request.schedule = value.extract()?,
            "args" => request.args = value.try_iter()?.map(|arg| given(&arg?)).collect::<PyResult<_>>()?,
            "variables" => request.variables = value.extract()?,
            other => return Err(PyTypeError::new_err(format!("ptxsan.run takes no {other:?}"))),
        }
    }
    Ok(request)
}

/// `(kind, value)`; a buffer is `("buffer", (name, bytes, read only, output))`.
fn given(arg: &Bound<'_, PyAny>) -> PyResult<Given> {
    let (kind, value): (String, Bound<'_, PyAny>) = arg.extract()?;
    Ok(match kind.as_str() {
        "int" => Given::Int(value.extract()?),
        "float" => Given::Float(value.extract()?),
        "raw" => Given::Raw(value.extract()?),
        _ => {
            let (name, bytes, read_only, output) = value.extract()?;
            Given::Buffer { name, bytes, read_only, output }
        }
    })
}

impl Request {
    fn run(&self) -> Result<Answer, Refusal> {
        let options = self.compile.clone().with_instances(self.entry.as_deref());
        let module = compile::load(&self.file_name, &self.text, &options)?;
        let entry = match &self.entry {
            Some(name) => module.entry_named(name)?,
            None => module.only_entry()?,
        };
        let (mut findings, mut outcomes) = (Vec::new(), Vec::new());
        let (mut buffers, mut variables) = (Vec::new(), Vec::new());
        let schedules = Schedule::named(&self.schedule).ok_or_else(|| {
            let names: Vec<&str> = Schedule::ALL.into_iter().map(Schedule::name).collect();
            refused(format!("no schedule `{}`; there are {} and all", self.schedule, names.join(", ")))
        })?;
        for schedule in schedules {
            let (outcome, left) = self.once(&module, &entry, schedule)?;
            finding::merge(&mut findings, outcome.findings.iter().cloned());
            (buffers, variables) = left;
            outcomes.push(outcome);
        }
        let document = document(&entry, &findings, &outcomes);
        Ok(Answer { document, buffers, variables })
    }

    /// One launch on a device of its own, and the bytes that it leaves.
    fn once(&self, module: &Module, entry: &str, schedule: Schedule) -> Result<(Outcome, Left), Refusal> {
        let mut device = Device::new();
        let id = device.load(module)?;
        let mut set = Vec::new();
        for (name, bytes) in &self.variables {
            let buffer = variable(&device, module, id, name)?;
            if buffer.len() != bytes.len() {
                let (has, given) = (buffer.len(), bytes.len());
                return Err(refused(format!("variable {name:?} has {has} bytes, {given} were given")));
            }
            device.write(buffer, 0, bytes)?;
            set.push(buffer);
        }
        let (args, passed) = self.bind(&mut device, module, entry)?;
        let options = Options { schedule, ..self.launch.options.clone() };
        let launch = Launch { entry: entry.to_owned(), args, options, ..self.launch.clone() };
        let outcome = device.launch(id, &launch)?;
        let mut read =
            |all: Vec<Buffer>| all.into_iter().map(|b| device.read(b)).collect::<Result<Vec<_>, _>>();
        let left = (read(passed)?, read(set)?);
        Ok((outcome, left))
    }

    fn bind(
        &self,
        device: &mut Device,
        module: &Module,
        entry: &str,
    ) -> Result<(Vec<Arg>, Vec<Buffer>), Refusal> {
        let sizes = module.parameters(entry)?;
        if sizes.len() != self.args.len() {
            let (takes, given) = (sizes.len(), self.args.len());
            return Err(refused(format!("`{entry}` takes {takes} arguments, {given} were given")));
        }
        let (mut args, mut buffers) = (Vec::new(), Vec::new());
        for (index, (given, size)) in self.args.iter().zip(sizes).enumerate() {
            args.push(match given {
                Given::Raw(bytes) => Arg::Bytes(bytes.clone()),
                Given::Int(value) => Arg::Bytes(integer(*value, size, index)?),
                Given::Float(value) => match size {
                    4 => Arg::F32(*value as f32),
                    8 => Arg::F64(*value),
                    _ => return Err(refused(format!("argument {index} has {size} bytes: {value} is no value for it; give a NumPy scalar of that size"))),
                },
                Given::Buffer { name, bytes, read_only, output } => {
                    let buffer = if *output { device.allocate(name, bytes.len())? } else { device.upload(name, bytes)? };
                    device.expect_written(buffer, *output)?;
                    device.set_read_only(buffer, *read_only)?;
                    buffers.push(buffer);
                    Arg::Buffer(buffer)
                }
            });
        }
        Ok((args, buffers))
    }
}

fn variable(device: &Device, module: &Module, id: ModuleId, name: &str) -> Result<Buffer, Refusal> {
    let symbol = module.variable_named(name)?;
    device.variable(id, &symbol).ok_or_else(|| refused(format!("variable {name:?} has no memory")))
}

/// A whole number in so many bytes, signed or not.
fn integer(value: i128, size: usize, index: usize) -> Result<Vec<u8>, Refusal> {
    let bits = 8 * size.min(8) as u32;
    let fits = matches!(size, 1 | 2 | 4 | 8) && value >= -(1i128 << (bits - 1)) && value < 1i128 << bits;
    match fits {
        true => Ok(value.to_le_bytes()[..size].to_vec()),
        false => Err(refused(format!("argument {index} has {size} bytes: {value} does not fit"))),
    }
}

fn document(entry: &str, findings: &[ptxsan::Finding], outcomes: &[Outcome]) -> String {
    let last = outcomes.last();
    serde_json::json!({
        "entry": entry,
        "name": ptxsan::names::demangled(entry),
        "findings": findings,
        "dropped": outcomes.iter().map(|outcome| outcome.dropped).sum::<u64>(),
        "output": last.map_or("", |outcome| outcome.output.as_str()),
        "warp_instructions": last.map_or(0, |outcome| outcome.warp_instructions),
        "counters": last.map(|outcome| &outcome.counters),
    })
    .to_string()
}
