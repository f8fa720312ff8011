//! What this machine and this build are.

use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use crate::Error;
use evosdpa::Isa;
use evosdpa_core::Problem;

/// Everything about a run's surroundings that its numbers depend on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Environment {
    /// Version of the lab.
    pub version: String,
    /// Git revision the binary was built from.
    pub revision: String,
    /// Whether the sources differed from that revision: `true`, `false` or `unknown`.
    pub dirty: String,
    /// Compiler the binary was built with.
    pub compiler: String,
    /// Operating system and architecture.
    pub system: String,
    /// The processor's name.
    pub cpu: String,
    /// Instruction sets the kernels can use, best last.
    pub isas: Vec<String>,
    /// Cores that the process may use.
    pub cores: usize,
    /// Threads the kernels used.
    pub threads: usize,
    /// The accelerator that kernels ran on, with its driver.
    #[serde(default)]
    pub accelerator: Option<String>,
    /// Why there is none, where one was looked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub no_accelerator: Option<String>,
    /// Memory of the machine, in bytes.
    pub memory_bytes: Option<u64>,
    /// When the run began, UTC.
    pub started: String,
    /// Measured peak of fused multiply-adds, GFLOP/s, at this thread count.
    pub fma_peak_gflops: Option<f64>,
    /// The same for products of bfloat16, where kernels have instructions for them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bf16_peak_gflops: Option<f64>,
    /// The best that these threads could do, GFLOP/s, however busy the machine is: no call can be faster.
    #[serde(default)]
    pub fma_ceiling_gflops: Option<f64>,
    /// Measured read bandwidth of main memory, GB/s, at this thread count.
    pub memory_gbps: Option<f64>,
    /// PyTorch's version, when it was a baseline.
    pub torch: Option<String>,
}

impl Environment {
    /// Looks around, without measuring anything.
    pub fn look(threads: Option<usize>) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            revision: env!("EVOSDPA_REVISION").to_owned(),
            dirty: env!("EVOSDPA_DIRTY").to_owned(),
            compiler: env!("EVOSDPA_COMPILER").to_owned(),
            system: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            cpu: evosdpa::tuned::processor_name().unwrap_or_else(|| "unknown".to_owned()),
            isas: Isa::available().iter().map(|isa| isa.name().to_owned()).collect(),
            cores,
            threads: threads.unwrap_or(cores),
            accelerator: None,
            no_accelerator: None,
            memory_bytes: memory_kib("MemTotal").map(|kib| kib * 1024),
            started: humantime::format_rfc3339_seconds(std::time::SystemTime::now()).to_string(),
            fma_peak_gflops: None,
            bf16_peak_gflops: None,
            fma_ceiling_gflops: None,
            memory_gbps: None,
            torch: None,
        }
    }

    /// Measures the machine's ceilings, which takes about a second; the peak with the instruction set that kernels are held to,
    /// or with the best.
    pub fn measure_peaks(&mut self, isa: Option<Isa>) {
        let Peaks { fma_gflops, bf16_gflops, memory_gbps } = Peaks::measured(isa, self.threads);
        self.fma_peak_gflops = Some(fma_gflops);
        self.bf16_peak_gflops = bf16_gflops;
        self.fma_ceiling_gflops = Some(evosdpa_cpu::fma_ceiling_gflops(self.threads));
        self.memory_gbps = Some(memory_gbps);
    }
}

/// What this processor can do, as measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Peaks {
    /// Fused multiply-adds, GFLOP/s.
    pub fma_gflops: f64,
    /// The same for products of bfloat16, where the instruction set has instructions for them.
    pub bf16_gflops: Option<f64>,
    /// Reading main memory, GB/s.
    pub memory_gbps: f64,
}

/// What was measured in this process.
static KNOWN: Mutex<Vec<((Isa, usize), Peaks)>> = Mutex::new(Vec::new());

impl Peaks {
    /// Measures, which takes about a second, or says what was measured before in this process.
    pub fn measured(isa: Option<Isa>, threads: usize) -> Self {
        let isa = isa.unwrap_or_else(Isa::best);
        // A thread that panicked while it measured has left the list as it was.
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, peaks)) = known.iter().find(|(of, _)| *of == (isa, threads)) {
            return *peaks;
        }
        let peaks = Self {
            fma_gflops: evosdpa_cpu::fma_peak_gflops(isa.of_f32(), threads),
            bf16_gflops: (isa != isa.of_f32()).then(|| evosdpa_cpu::fma_peak_gflops(isa, threads)),
            memory_gbps: evosdpa_cpu::memory_bandwidth_gbps(threads),
        };
        known.push(((isa, threads), peaks));
        peaks
    }

    /// The same with the memory measured once more, the best of all times: a virtual machine's memory changes its speed within minutes.
    pub fn with_memory_now(isa: Option<Isa>, threads: usize) -> Self {
        let mut peaks = Self::measured(isa, threads);
        peaks.memory_gbps = peaks.memory_gbps.max(evosdpa_cpu::memory_bandwidth_gbps(threads));
        let of = (isa.unwrap_or_else(Isa::best), threads);
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, kept)) = known.iter_mut().find(|(known, _)| *known == of) {
            kept.memory_gbps = kept.memory_gbps.max(peaks.memory_gbps);
        }
        peaks
    }
}

/// Memory that can be had without swapping; `None` where the system does not say.
pub fn available_memory_bytes() -> Option<u64> {
    memory_kib("MemAvailable").map(|kib| kib * 1024)
}

/// Refuses a problem whose tensors, copies and oracle do not fit into memory, before anything is allocated.
pub fn refuse_what_does_not_fit(problem: &Problem, input_sets: usize) -> Result<(), Error> {
    let Some(available_bytes) = available_memory_bytes() else { return Ok(()) };
    let needed_bytes = needed_bytes(problem, input_sets);
    if needed_bytes > available_bytes {
        let problem = problem.to_string();
        return Err(Error::Problem(evosdpa_core::Error::Memory { problem, needed_bytes, available_bytes }));
    }
    Ok(())
}

/// Tensors for each input set, plus the oracle: K, V and three outputs in f64, and one more of each in f32. 8-bit problems
/// have their inputs twice more in f32, before and after quantisation, and one more output in f64.
fn needed_bytes(problem: &Problem, input_sets: usize) -> u64 {
    let elements = problem.bytes() / problem.dtype().bytes() as u64;
    let tensors = problem.bytes().saturating_mul(2 + input_sets as u64);
    let oracle_bytes_per_element = if problem.dtype().is_eight_bit() { 3 * 8 + 2 * 4 + 8 } else { 3 * 8 };
    tensors.saturating_add(elements.saturating_mul(oracle_bytes_per_element))
}

fn memory_kib(field: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let value = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    value.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_past_memory_is_refused_with_both_numbers() {
        let huge = Problem::new("b64h128s1000000d128".parse().unwrap(), evosdpa_core::DType::F32).unwrap();
        let message = refuse_what_does_not_fit(&huge, 1).unwrap_err().to_string();
        assert!(message.contains("b64h128s1000000d128") && message.contains("available"), "{message}");
        let tiny = Problem::new("tiny".parse().unwrap(), evosdpa_core::DType::F32).unwrap();
        assert!(refuse_what_does_not_fit(&tiny, 2).is_ok());
    }
}
