//! The correctness gate: is a kernel's output right, complete, its own, and the same every time?
//!
//! For each case the kernel writes into a buffer full of NaN with canaries between the rows. The gate then asks, in this
//! order: do wrong answers fail (the negative controls, on the very data of this case)? is the output right? are the
//! canaries and the inputs untouched? is a second run bit-identical?

use evosdpa_core::{Problem, Tensor, TensorView};
use evosdpa_oracle::{Case, Control, inputs::Inputs};

use crate::{
    Error, ErrorKind,
    device::{Device, Loaded, Output},
    gate::{GateResult, Verdict},
    measure::audit,
};

/// What a kernel showed on one case.
#[derive(Clone, Debug)]
pub struct CaseResult {
    /// The gate's word.
    pub verdict: Verdict,
    /// The evidence: errors and what was compared.
    pub detail: String,
    /// Largest absolute error for V of size one, when there was an output to measure.
    pub max_error: Option<f64>,
    /// Whether the machine failed, not the kernel: another try may go well.
    pub machine_fault: bool,
}

impl CaseResult {
    /// The same as a gate's result, under this name.
    pub fn gate(self, name: &str) -> GateResult {
        GateResult { gate: name.to_owned(), verdict: self.verdict, detail: self.detail }
    }

    pub(super) fn unavailable(why: String) -> Self {
        Self::without_output(Verdict::Unavailable(why.clone()), why)
    }

    pub(super) fn without_output(verdict: Verdict, detail: String) -> Self {
        Self { verdict, detail, max_error: None, machine_fault: false }
    }

    /// What an error comes to: the kernel's failure, or the reason why nothing could be said. A caller's error stays one.
    pub(super) fn of_error(error: Error) -> Result<Self, Error> {
        let why = error.to_string();
        match error.kind() {
            ErrorKind::Kernel => Ok(Self::without_output(Verdict::Fail(why.clone()), why)),
            ErrorKind::Refused => Ok(Self::unavailable(why)),
            ErrorKind::Machine => Ok(Self { machine_fault: true, ..Self::unavailable(why) }),
            ErrorKind::Caller => Err(error),
        }
    }
}

/// A run whose output is not the first one's, bit for bit.
struct Other {
    number: usize,
    output: Output,
}

/// Puts a kernel through one case. With `forced`, that control stands in for the kernel's output, to see the gate fail.
pub fn check(
    device: &dyn Device,
    kernel: &str,
    case: &Case,
    forced: Option<Control>,
) -> Result<CaseResult, Error> {
    check_runs(device, kernel, case, forced, 2)
}

/// As [`check`], with so many runs, all of which must agree: on the simulator each is under another schedule.
pub fn check_runs(
    device: &dyn Device,
    kernel: &str,
    case: &Case,
    forced: Option<Control>,
    runs: usize,
) -> Result<CaseResult, Error> {
    let inputs = std::slice::from_ref(&case.inputs);
    let outputs = run(device, kernel, &case.problem, inputs, |loaded| {
        let first = loaded.run(0)?;
        let mut other = None;
        // Compared as they come: a thousand outputs need not be kept.
        for number in 2..=runs {
            let again = loaded.run(0)?;
            let same =
                first.o.bytes() == again.o.bytes() && same_bits(first.lse.as_deref(), again.lse.as_deref());
            if !same {
                other = Some(Other { number, output: again });
                break;
            }
        }
        Ok((first, other, loaded.changed_input()?))
    })?;
    let (mut output, other, changed) = match outputs {
        Ok(outputs) => outputs,
        Err(ended) => return Ok(ended),
    };
    if let Some(control) = forced {
        let Some(o) = case.control_output(control) else {
            return Ok(CaseResult::unavailable(format!("{} has no control {control}", case.problem)));
        };
        output.o = o;
    }
    Ok(judge(case, &output, other.as_ref(), changed, forced.is_some()))
}

/// Only launches a kernel, as often as asked: for tools that watch it, and for devices that do. Nobody looks at the answer.
pub fn launch(
    device: &dyn Device,
    kernel: &str,
    problem: &Problem,
    inputs: &[Inputs],
    times: usize,
) -> Result<CaseResult, Error> {
    let launched =
        run(device, kernel, problem, inputs, |loaded| (0..times).try_for_each(|_| loaded.run(0).map(drop)))?;
    let passed = |()| {
        let detail = format!("launched {times}×; nobody looked at the answer");
        CaseResult::without_output(Verdict::Pass, detail)
    };
    Ok(launched.map_or_else(|ended| ended, passed))
}

/// Loads a kernel and works with it. What the kernel itself did wrong is its failure; what it does not take, and what the
/// machine did wrong, is the reason why nothing can be said. An error is the caller's and stops the check.
fn run<T>(
    device: &dyn Device,
    kernel: &str,
    problem: &Problem,
    inputs: &[Inputs],
    work: impl FnOnce(&mut dyn Loaded) -> Result<T, Error>,
) -> Result<Result<T, CaseResult>, Error> {
    if let Some(why) = device.refuses(kernel, problem) {
        return Ok(Err(CaseResult::unavailable(why)));
    }
    let worked = device.load(kernel, problem, inputs).and_then(|mut loaded| work(loaded.as_mut()));
    match worked {
        Ok(value) => Ok(Ok(value)),
        Err(error) => CaseResult::of_error(error).map(Err),
    }
}

fn judge(
    case: &Case,
    output: &Output,
    other: Option<&Other>,
    changed: Option<String>,
    forced: bool,
) -> CaseResult {
    let judgement = case.judge(&output.o.view(), output.lse.as_deref());
    let result = |verdict: Verdict, detail: String| CaseResult {
        verdict,
        detail,
        max_error: Some(judgement.errors.max / case.truth.value_scale),
        machine_fault: false,
    };
    let fail = |why: String| result(Verdict::Fail(why.clone()), why);

    let accepted = case.broken_controls();
    if !accepted.is_empty() {
        let names: Vec<_> = accepted.iter().map(|control| control.name()).collect();
        return fail(format!("the gate is broken: it accepts {}", names.join(", ")));
    }
    if !judgement.passed() {
        let named = audit::describe(output).filter(|_| !forced);
        return fail(
            named
                .map_or_else(|| judgement.summary(), |finding| format!("{finding}; {}", judgement.summary())),
        );
    }
    // A forced control is a packed tensor of its own, with neither canaries nor a second run.
    if !forced {
        if let Some(at) = first_broken_canary(&output.o) {
            return fail(format!("wrote outside the output: byte {at} of the buffer's gaps changed"));
        }
        if let Some(at) = case.first_uncleared_row(&output.o.view(), output.lse.as_deref()) {
            return fail(format!(
                "row {at:?} (block, head, row) belongs to no sequence, but is not zeros with an LSE of -inf"
            ));
        }
        if let Some(Other { number, output }) = other {
            let named =
                audit::describe(output).map_or(String::new(), |finding| format!(", the later: {finding}"));
            return fail(format!("two runs on the same input differ: the first and run {number}{named}"));
        }
    }
    if let Some(name) = changed {
        return fail(format!("changed its input {name}"));
    }
    result(Verdict::Pass, judgement.summary())
}

/// The first byte in the gaps between rows that is no longer the poison it was.
pub(crate) fn first_broken_canary(tensor: &Tensor) -> Option<usize> {
    let view: TensorView<'_> = tensor.view();
    let ([.., dim], [_, head, row, _], size) = (view.shape(), view.strides(), view.dtype().bytes());
    // Rows of one pitch lie one after the other, whatever the order of heads and queries; the gap is behind each.
    let (pitch, used) = (head.min(row) * size, dim * size);
    let broken = |(at, row): (usize, &[u8])| {
        let gap = row[used..].iter().position(|byte| *byte != 0xFF);
        gap.map(|inside| at * pitch + used + inside)
    };
    tensor.bytes().chunks(pitch.max(1)).enumerate().find_map(broken)
}

fn same_bits(a: Option<&[f32]>, b: Option<&[f32]>) -> bool {
    let bits = |lse: Option<&[f32]>| lse.map(|lse| lse.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
    bits(a) == bits(b)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use evosdpa_core::{DType, Layout};
    use evosdpa_oracle::inputs::Family;

    use super::*;
    use crate::device::{Body, Cpu, DeviceId, KernelInfo, LoadedCpu, fresh_output};

    fn case() -> Case {
        let problem = Problem::new("tiny:causal".parse().unwrap(), DType::F32).unwrap().with_lse(true);
        Case::new(problem, Family::Normal, 1, Some(8))
    }

    static CPU: Cpu = Cpu { threads: None, isa: None };

    /// A device whose kernel is right except for what `spoil` does to it, and which refuses the other one.
    struct Spoiled(fn(&mut Output, usize));

    struct LoadedSpoiled<'a> {
        right: Box<dyn Loaded + 'a>,
        spoil: fn(&mut Output, usize),
        calls: Cell<usize>,
    }

    impl Device for Spoiled {
        fn id(&self) -> DeviceId {
            DeviceId::Cpu
        }

        fn kernels(&self) -> Vec<KernelInfo> {
            Cpu::default().kernels()
        }

        fn refuses(&self, kernel: &str, _: &Problem) -> Option<String> {
            (kernel == REFUSED).then(|| format!("{REFUSED} is not for this problem"))
        }

        fn load<'a>(
            &self,
            kernel: &str,
            p: &Problem,
            inputs: &'a [Inputs],
        ) -> Result<Box<dyn Loaded + 'a>, Error> {
            let right = CPU.load(kernel, p, inputs)?;
            Ok(Box::new(LoadedSpoiled { right, spoil: self.0, calls: Cell::new(0) }))
        }
    }

    impl Loaded for LoadedSpoiled<'_> {
        fn run(&mut self, set: usize) -> Result<Output, Error> {
            let mut output = self.right.run(set)?;
            (self.spoil)(&mut output, self.calls.get());
            self.calls.set(self.calls.get() + 1);
            Ok(output)
        }
    }

    fn word(spoil: fn(&mut Output, usize)) -> String {
        check(&Spoiled(spoil), "cpu_flash", &case(), None).unwrap().verdict.to_string()
    }

    fn floats(output: &mut Output) -> &mut [f32] {
        bytemuck::cast_slice_mut(output.o.bytes_mut())
    }

    #[test]
    fn a_right_kernel_passes_and_a_spoiled_one_does_not() {
        assert_eq!(word(|_, _| {}), "PASS");
        assert!(word(|o, _| floats(o)[3] = 0.5).contains("bound"));
        assert!(word(|o, _| floats(o)[3] = f32::NAN).contains("finite"));
        assert!(word(|o, _| floats(o)[64] = 0.0).contains("outside the output"));
        assert!(word(|o, call| floats(o)[3] *= 1.0 + 1e-6 * call as f32).contains("two runs"));
        assert!(word(|o, _| o.lse.as_mut().unwrap()[0] += 0.01).contains("lse"));
    }

    #[test]
    fn a_canary_is_named_by_its_byte_in_every_layout() {
        let rows = 2 * 3 * 5;
        for layout in Layout::ALL {
            let problem = Problem::new("b2h3s5d8".parse().unwrap(), DType::F16).unwrap().with_layout(layout);
            let mut output = fresh_output(&problem);
            evosdpa_oracle::elements::fill(&mut output.o, |_| 1.0);
            assert_eq!(first_broken_canary(&output.o), None);
            // 8 elements of a row, then 16 of gap: the last byte of the last gap, then the first of an inner one.
            for (row, inside) in [(rows - 1, 47), (7, 16)] {
                let at = row * 48 + inside;
                output.o.bytes_mut()[at] = 0;
                assert_eq!(first_broken_canary(&output.o), Some(at), "{layout}");
            }
        }
    }

    /// A device on which every run ends with an error.
    struct Faulty(fn() -> Error);

    impl Device for Faulty {
        fn id(&self) -> DeviceId {
            DeviceId::Cpu
        }

        fn kernels(&self) -> Vec<KernelInfo> {
            CPU.kernels()
        }

        fn refuses(&self, _: &str, _: &Problem) -> Option<String> {
            None
        }

        fn load<'a>(&self, _: &str, _: &Problem, _: &'a [Inputs]) -> Result<Box<dyn Loaded + 'a>, Error> {
            Err(self.0())
        }
    }

    fn driver(code: u32) -> Error {
        let (operation, name) = ("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY".to_owned());
        Error::Cuda(evosdpa_cuda::Error::Driver { operation, name, code, context: String::new() })
    }

    #[test]
    fn a_fault_of_the_machine_is_not_the_kernels_failure() {
        let result = |error: fn() -> Error| check(&Faulty(error), "cpu_flash", &case(), None);
        let machine: [fn() -> Error; 5] = [
            || driver(2),
            || driver(214),
            || evosdpa_cuda::Error::DeviceLost.into(),
            || ptxsan::Error::Memory("64 GiB asked for, 16 GiB at most".to_owned()).into(),
            || {
                Error::Problem(evosdpa_core::Error::Memory {
                    problem: "mission f32".to_owned(),
                    needed_bytes: 9,
                    available_bytes: 8,
                })
            },
        ];
        for error in machine {
            let result = result(error).unwrap();
            assert_eq!(result.verdict, Verdict::Unavailable(error().to_string()));
            assert!(result.machine_fault, "{result:?}");
        }
        let kernel: [fn() -> Error; 2] = [
            || driver(700),
            || Error::Findings { kernel: "k".to_owned(), findings: vec!["a race".to_owned()] },
        ];
        for error in kernel {
            let result = result(error).unwrap();
            assert_eq!(result.verdict, Verdict::Fail(error().to_string()));
            assert!(!result.machine_fault, "{result:?}");
        }
        // What does not suit is said, and another try would say the same.
        let refused = result(|| {
            let (instruction, reason) = ("tcgen05.mma".to_owned(), "unknown".to_owned());
            ptxsan::Error::Unsupported { line: 7, source_line: None, instruction, reason }.into()
        });
        assert!(refused.is_ok_and(|result| result.verdict.is_unavailable() && !result.machine_fault));
        assert!(result(|| evosdpa_cuda::Error::NoDevice.into()).is_err(), "set-up stops the check");
    }

    /// A device whose kernel answers rightly and then changes its first key.
    struct Meddling;

    impl Device for Meddling {
        fn id(&self) -> DeviceId {
            DeviceId::Cpu
        }

        fn kernels(&self) -> Vec<KernelInfo> {
            CPU.kernels()
        }

        fn refuses(&self, _: &str, _: &Problem) -> Option<String> {
            None
        }

        fn load<'a>(
            &self,
            _: &str,
            p: &Problem,
            inputs: &'a [Inputs],
        ) -> Result<Box<dyn Loaded + 'a>, Error> {
            let (mut right, problem) = (CPU.load("cpu_naive", p, inputs)?.run(0)?, *p);
            let body: Body = Box::new(move |inputs, output| {
                std::mem::swap(output, &mut right);
                right = output.clone();
                inputs.k.bytes_mut()[0] = inputs.k.bytes()[0].wrapping_add(1);
                Ok(())
            });
            Ok(Box::new(LoadedCpu::new(&problem, inputs, body)))
        }
    }

    #[test]
    fn a_kernel_that_changes_its_inputs_fails() {
        let case = case();
        let before = case.inputs.k.bytes()[0];
        let verdict = check(&Meddling, "cpu_naive", &case, None).unwrap().verdict;
        assert_eq!(verdict, Verdict::Fail("changed its input K".to_owned()));
        assert_eq!(case.inputs.k.bytes()[0], before, "the case's own inputs are nobody's to change");
    }

    #[test]
    fn launching_is_not_checking() {
        let case = case();
        let wrong = Spoiled(|o, _| floats(o)[3] = 0.5);
        let result =
            launch(&wrong, "cpu_flash", &case.problem, std::slice::from_ref(&case.inputs), 2).unwrap();
        assert!(result.verdict.is_pass() && result.detail.contains("nobody looked"), "{result:?}");
        let inputs = std::slice::from_ref(&case.inputs);
        let refused = launch(&wrong, REFUSED, &case.problem, inputs, 1).unwrap();
        assert!(matches!(refused.verdict, Verdict::Unavailable(_)), "{refused:?}");
    }

    const REFUSED: &str = "cpu_naive";

    #[test]
    fn what_a_kernel_refuses_is_unavailable() {
        let result = check(&Spoiled(|_, _| {}), REFUSED, &case(), None).unwrap();
        assert!(matches!(result.verdict, Verdict::Unavailable(_)), "{}", result.verdict);
        assert!(result.detail.contains(REFUSED), "{}", result.detail);
    }

    #[test]
    fn every_forced_control_fails() {
        for control in Control::of(&case().problem) {
            let result = check(&Cpu::default(), "cpu_flash", &case(), Some(control)).unwrap();
            assert!(result.verdict.is_fail(), "{control}");
        }
    }
}
