//! The machine's own processor.

use evosdpa::{Attention, CpuKernel, Isa, Options, tuned::CpuTunables};
use evosdpa_core::{DType, Problem};
use evosdpa_kernels::VariantId;
use evosdpa_oracle::inputs::Inputs;

use super::{
    AUTO, Device, DeviceId, KernelInfo, Loaded, Output, TimedDevice, TimedKernel, Timing, Turned,
    fresh_output,
};
use crate::{
    Error,
    machine::{Environment, Peaks},
    measure::{floor::Ceilings, roof::Roof},
};
use evosdpa_oracle::rng::Rng;

/// Inputs below this size fit a last-level cache, so two sets of them take turns.
const ROTATE_BELOW_BYTES: u64 = 32 << 20;

/// Tensors below this size are moved before each block of a duel: which lines of the first two caches they share is worth
/// several per cent there, and is chance.
const RELOCATE_BELOW_BYTES: u64 = 1 << 20;

/// Writing this much drives everything else out of the caches of most machines.
const FLUSH_BYTES: usize = 128 << 20;

/// The machine's own processor.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cpu {
    /// Threads to use; all when `None`.
    pub threads: Option<usize>,
    /// Instruction set; the best when `None`.
    pub isa: Option<Isa>,
}

impl Cpu {
    const KERNELS: [CpuKernel; 2] = [CpuKernel::Naive, CpuKernel::Flash];

    /// A kernel by its name, with what the name sets: `cpu_flash[BLOCK_KV=128 BLOCK_Q=192 THREADS=1]`.
    fn options(&self, name: &str) -> Result<Options, Error> {
        if name == AUTO {
            return Ok(Options { threads: self.threads, isa: self.isa, ..Options::default() });
        }
        let VariantId { kernel: plain, tunables } = name.parse()?;
        let Some(kernel) = Self::KERNELS.into_iter().find(|known| known.name() == plain) else {
            return Err(crate::unknown_kernel(self, &plain));
        };
        let tunables = CpuTunables::read(&plain, tunables.iter())
            .map_err(|why| Error::Tunables { text: name.to_owned(), why })?;
        let most = self.threads.unwrap_or(usize::MAX);
        let threads = tunables.threads.map(|threads| threads.min(most)).or(self.threads);
        let (kernel, tiles) = (Some(kernel), tunables.tiles());
        Ok(Options { kernel, threads, isa: self.isa, tiles, ..Options::default() })
    }
}

fn describe(kernel: CpuKernel) -> KernelInfo {
    let (summary, parent, changed) = match kernel {
        CpuKernel::Naive => (
            "writes the scores of a row out, then reads them back: where the line starts",
            None,
            "nothing: it is where the line starts",
        ),
        CpuKernel::Flash => (
            "streaming softmax over packed tiles, AVX-512, AVX2 or portable",
            Some(CpuKernel::Naive),
            "scores live in registers and the first-level cache only; masked tiles are skipped; heads that share keys \
             are packed together",
        ),
    };
    KernelInfo {
        name: kernel.name().to_owned(),
        summary: summary.to_owned(),
        parent: parent.map(|parent| parent.name().to_owned()),
        changed: changed.to_owned(),
    }
}

impl Device for Cpu {
    fn id(&self) -> DeviceId {
        DeviceId::Cpu
    }

    fn kernels(&self) -> Vec<KernelInfo> {
        Self::KERNELS.map(describe).to_vec()
    }

    fn check_name(&self, kernel: &str) -> Result<(), Error> {
        self.options(kernel).map(drop)
    }

    fn refuses(&self, kernel: &str, problem: &Problem) -> Option<String> {
        // A kernel or tunable that there is not is wrong use, which loading it reports.
        let options = self.options(kernel).ok()?;
        Attention::plan_with(*problem, evosdpa::Device::Cpu, &options).err().map(|error| error.to_string())
    }

    fn load<'a>(
        &'a self,
        kernel: &str,
        problem: &Problem,
        inputs: &'a [Inputs],
    ) -> Result<Box<dyn Loaded + 'a>, Error> {
        Ok(self.load_timed(kernel, problem, inputs)?)
    }

    fn timed(&self) -> Option<&dyn TimedDevice> {
        Some(self)
    }
}

impl TimedDevice for Cpu {
    fn input_sets(&self, problem: &Problem) -> usize {
        if problem.bytes() < ROTATE_BELOW_BYTES { 2 } else { 1 }
    }

    fn ceilings(&self, _: &Problem) -> Result<Option<Ceilings>, Error> {
        let threads = self.threads.unwrap_or_else(|| Environment::look(None).threads);
        Ok(Some(Ceilings::of_cpu(evosdpa_cpu::fma_ceiling_gflops(threads))))
    }

    fn roof(&self, problem: &Problem) -> Option<Roof> {
        let threads = self.threads.unwrap_or_else(|| Environment::look(None).threads);
        let from_memory = problem.bytes() >= ROTATE_BELOW_BYTES;
        let measure = if from_memory { Peaks::with_memory_now } else { Peaks::measured };
        let peaks = measure(self.isa, threads);
        let gflops = peaks.bf16_gflops.filter(|_| problem.dtype() == DType::BF16).unwrap_or(peaks.fma_gflops);
        Some(Roof { gflops, gbps: from_memory.then_some(peaks.memory_gbps) })
    }

    fn load_timed<'a>(
        &'a self,
        kernel: &str,
        problem: &Problem,
        inputs: &'a [Inputs],
    ) -> Result<Box<dyn TimedKernel + 'a>, Error> {
        let attention = Attention::plan_with(*problem, evosdpa::Device::Cpu, &self.options(kernel)?)?;
        let chosen = (kernel == AUTO).then(|| attention.variant());
        let body: Body = Box::new(move |inputs, output| {
            let tensors = [inputs.q.view(), inputs.k.view(), inputs.v.view()];
            let lse = output.lse.as_deref_mut();
            Ok(attention.run_with(tensors, &inputs.side(), output.o.view_mut(), lse)?)
        });
        Ok(Box::new(LoadedCpu { variant: chosen, ..LoadedCpu::new(problem, inputs, body) }))
    }
}

/// What a call does. It gets the memory itself, as a function in any language would: nothing but audits keeps it from
/// changing its inputs.
pub type Body = Box<dyn FnMut(&mut Inputs, &mut Output) -> Result<(), Error>>;

/// A function on inputs and outputs of its own.
pub struct LoadedCpu {
    problem: Problem,
    variant: Option<String>,
    /// What was put there, to see whether it is still so.
    given: Vec<(Inputs, Turned)>,
    inputs: Vec<Inputs>,
    outputs: Vec<Output>,
    body: Body,
    timing: Timing,
    flush: Vec<u8>,
    rng: Rng,
    /// Memory that only keeps the tensors from lying where they lay before.
    between: Vec<Vec<u8>>,
}

impl LoadedCpu {
    /// Copies the inputs, so that their memory can be given others.
    pub fn new(problem: &Problem, inputs: &[Inputs], body: Body) -> Self {
        Self {
            problem: *problem,
            variant: None,
            given: inputs.iter().map(|inputs| (inputs.clone(), Turned::NOT)).collect(),
            inputs: inputs.iter().map(Inputs::copied).collect(),
            outputs: inputs.iter().map(|_| fresh_output(problem)).collect(),
            body,
            timing: Timing::Graph,
            flush: Vec::new(),
            rng: Rng::new(Rng::entropy()),
            between: Vec::new(),
        }
    }

    fn set_of(&self, set: usize) -> usize {
        if self.timing == Timing::Warm { 0 } else { set }
    }
}

impl Loaded for LoadedCpu {
    fn variant(&self) -> Option<String> {
        self.variant.clone()
    }

    fn run(&mut self, set: usize) -> Result<Output, Error> {
        let mut output = fresh_output(&self.problem);
        (self.body)(&mut self.inputs[set], &mut output)?;
        Ok(output)
    }

    fn changed_input(&mut self) -> Result<Option<String>, Error> {
        for ((given, turned), now) in self.given.iter().zip(&self.inputs) {
            let pairs = [("Q", &given.q, &now.q), ("K", &given.k, &now.k), ("V", &given.v, &now.v)];
            for (i, (name, given, now)) in pairs.into_iter().enumerate() {
                let [first, last] = turned.pieces(i, given.bytes());
                let (now_first, now_last) = now.bytes().split_at(first.len());
                if now_first != first || now_last != last {
                    return Ok(Some(name.to_owned()));
                }
            }
        }
        Ok(None)
    }
}

impl TimedKernel for LoadedCpu {
    fn time_us(&mut self, set: usize) -> Result<f64, Error> {
        let set = self.set_of(set);
        if self.timing == Timing::Cold {
            let next = self.flush.first().map_or(1, |byte| byte.wrapping_add(1));
            self.flush.resize(FLUSH_BYTES, 0);
            self.flush.fill(next);
            std::hint::black_box(&mut self.flush);
        }
        let start = std::time::Instant::now();
        (self.body)(&mut self.inputs[set], &mut self.outputs[set])?;
        Ok(start.elapsed().as_secs_f64() * 1e6)
    }

    fn set_timing(&mut self, timing: Timing) -> Result<(), Error> {
        if timing == Timing::Between {
            return Err(Error::BetweenOnCpu);
        }
        self.timing = timing;
        Ok(())
    }

    fn relocate(&mut self) -> Result<(), Error> {
        if self.problem.bytes() >= RELOCATE_BELOW_BYTES {
            return Ok(());
        }
        self.between.clear();
        for set in 0..self.inputs.len() {
            let Inputs { q, k, v, .. } = &mut self.inputs[set];
            for tensor in [q, k, v] {
                self.between.push(vec![1; 64 * (1 + self.rng.below(255))]);
                *tensor = tensor.copied();
            }
            self.between.push(vec![1; 64 * (1 + self.rng.below(255))]);
            let Output { o, lse } = &self.outputs[set];
            self.outputs[set] = Output { o: o.copied(), lse: lse.clone() };
        }
        for set in 0..self.inputs.len() {
            (self.body)(&mut self.inputs[set], &mut self.outputs[set])?;
        }
        Ok(())
    }

    fn refill(&mut self, set: usize, inputs: &Inputs, turned: Turned) -> Result<(), Error> {
        let own = &mut self.inputs[set];
        let pairs = [(&mut own.q, &inputs.q), (&mut own.k, &inputs.k), (&mut own.v, &inputs.v)];
        for (i, (own, new)) in pairs.into_iter().enumerate() {
            let [first, last] = turned.pieces(i, new.bytes());
            let (own_first, own_last) = own.bytes_mut().split_at_mut(first.len());
            own_first.copy_from_slice(first);
            own_last.copy_from_slice(last);
        }
        own.scales.clone_from(&inputs.scales);
        own.side.clone_from(&inputs.side);
        self.given[set] = (inputs.clone(), turned);
        Ok(())
    }

    fn poison(&mut self) -> Result<(), Error> {
        for output in &mut self.outputs {
            output.o.bytes_mut().fill(0xFF);
            if let Some(lse) = &mut output.lse {
                lse.fill(f32::NAN);
            }
        }
        Ok(())
    }

    fn timed_outputs(&mut self, set: usize) -> Result<Vec<(usize, Output)>, Error> {
        let set = self.set_of(set);
        Ok(vec![(set, self.outputs[set].clone())])
    }
}
