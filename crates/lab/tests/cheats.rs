//! Cheats do not pass: each of these kernels is right when it is checked, or looks fast when it is timed, and each is turned
//! away by name on the ordinary path of `bench`.

use std::collections::HashMap;

use evosdpa_core::{DType, Problem};
use evosdpa_lab::{
    Error,
    bench::{self, Request},
    device::{
        Body, Cpu, Device, DeviceId, KernelInfo, Loaded, LoadedCpu, Output, TimedDevice, TimedKernel, Timing,
    },
    measure::floor::Ceilings,
    record::Row,
};
use evosdpa_oracle::inputs::Inputs;

/// The right answer, computed by a kernel that does not cheat.
fn attend(problem: &Problem, inputs: &Inputs, output: &mut Output) -> Result<(), Error> {
    let attention = evosdpa::Attention::plan(*problem, evosdpa::Device::Cpu)?;
    let Inputs { q, k, v, .. } = inputs;
    Ok(attention.run(q.view(), k.view(), v.view(), output.o.view_mut(), output.lse.as_deref_mut())?)
}

/// Calls that the correctness gate makes, and then the warm-up of the request below.
const GATE_CALLS: usize = 2;
const WARMUP: usize = 3;

/// What each cheat does; `calls` counts from one, over the whole life of the process as a static variable would.
fn cheat(name: &str, problem: Problem) -> Body {
    let mut kept: HashMap<usize, Output> = HashMap::new();
    let mut calls = 0;
    let address = |inputs: &Inputs| inputs.q.bytes().as_ptr() as usize;
    let name = name.to_owned();
    Box::new(move |inputs, output| {
        calls += 1;
        match name.as_str() {
            "honest" => attend(&problem, inputs, output),
            "zeros" => {
                write(output, |_| 0.0);
                Ok(())
            }
            "copies_v" => {
                let v: Vec<f32> = bytemuck::cast_slice(inputs.v.bytes()).to_vec();
                write(output, |i| v[i]);
                Ok(())
            }
            "cached_by_pointer" => {
                if let Some(kept) = kept.get(&address(inputs)) {
                    output.clone_from(kept);
                    return Ok(());
                }
                attend(&problem, inputs, output)?;
                kept.insert(address(inputs), output.clone());
                Ok(())
            }
            "skips_after_warm_up" if calls > WARMUP + 4 => Ok(()),
            "right_at_first" if calls > GATE_CALLS + 1 => {
                attend(&problem, inputs, output)?;
                write_some(output);
                Ok(())
            }
            "changes_inputs" if calls > GATE_CALLS => {
                attend(&problem, inputs, output)?;
                // Zeros make the next call's exponentials cheap.
                inputs.k.bytes_mut()[..64].fill(0);
                Ok(())
            }
            "one_call_of_three" if calls > GATE_CALLS && calls % 3 != 0 => Ok(()),
            "writes_astray" if calls > GATE_CALLS => {
                attend(&problem, inputs, output)?;
                let row_bytes = problem.sizes().dim_v * 4;
                output.o.bytes_mut()[row_bytes + 4] = 7;
                Ok(())
            }
            "trusts_finished_outputs" => {
                let first = f32::from_le_bytes(output.o.bytes()[..4].try_into().unwrap_or_default());
                if first.is_finite() { Ok(()) } else { attend(&problem, inputs, output) }
            }
            _ => attend(&problem, inputs, output),
        }
    })
}

/// Writes the elements in order, leaving the gaps between rows alone.
fn write(output: &mut Output, value: impl Fn(usize) -> f32) {
    let [batch, heads, seq, dim] = output.o.view().shape();
    let [sb, sh, ss, _] = output.o.view().strides();
    let floats: &mut [f32] = bytemuck::cast_slice_mut(output.o.bytes_mut());
    for i in 0..batch * heads * seq * dim {
        let (row, d) = (i / dim, i % dim);
        let at = row / (heads * seq) * sb + row / seq % heads * sh + row % seq * ss + d;
        floats[at] = value(i);
    }
}

/// Spoils a few elements.
fn write_some(output: &mut Output) {
    bytemuck::cast_slice_mut::<u8, f32>(output.o.bytes_mut())[3] = 0.25;
}

/// A CPU whose kernels are the cheats, and which can do no more than it is said to.
struct Cheats {
    ceilings: Option<Ceilings>,
}

impl Device for Cheats {
    fn id(&self) -> DeviceId {
        DeviceId::Cpu
    }

    fn kernels(&self) -> Vec<KernelInfo> {
        Cpu::default().kernels()
    }

    fn refuses(&self, _: &str, _: &Problem) -> Option<String> {
        None
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

impl TimedDevice for Cheats {
    fn input_sets(&self, _: &Problem) -> usize {
        2
    }

    fn ceilings(&self, _: &Problem) -> Result<Option<Ceilings>, Error> {
        Ok(self.ceilings.clone())
    }

    fn load_timed<'a>(
        &'a self,
        kernel: &str,
        problem: &Problem,
        inputs: &'a [Inputs],
    ) -> Result<Box<dyn TimedKernel + 'a>, Error> {
        Ok(Box::new(LoadedCpu::new(problem, inputs, cheat(kernel, *problem))))
    }
}

fn bench(kernels: &[&str], ceilings: Option<Ceilings>) -> Vec<Row> {
    let problem = Problem::new("b1h2s48d32:causal".parse().unwrap(), DType::F32).unwrap().with_lse(true);
    let request = Request {
        kernels: kernels.iter().map(|name| (*name).to_owned()).collect(),
        baselines: Vec::new(),
        iters: 30,
        warmup: WARMUP,
        seed: 0,
        budget: None,
        peak_gflops: None,
        bf16_peak_gflops: None,
        timing: Timing::Graph,
        margin: 0.01,
        epoch: std::time::Instant::now(),
    };
    let outcome =
        bench::measure(&Cheats { ceilings }, &problem, &request, Err("not asked for"), |_| true).unwrap();
    outcome.rows.into_iter().filter(|row| !row.baseline).collect()
}

#[test]
fn every_cheat_is_turned_away_by_name() {
    let expected = [
        ("zeros", "correctness", "zeros: "),
        ("copies_v", "correctness", "bound"),
        // By its address or by its content: which of the two shows first is chance.
        ("cached_by_pointer", "audit", "stale-"),
        ("skips_after_warm_up", "audit", "work-skipped: "),
        ("right_at_first", "audit", "wrong-answer: "),
        ("changes_inputs", "audit", "input-changed: K"),
        ("one_call_of_three", "audit", "work-skipped: "),
        ("writes_astray", "audit", "stray-write: "),
        ("trusts_finished_outputs", "audit", "stale-output: "),
    ];
    let names: Vec<&str> = std::iter::once("honest").chain(expected.iter().map(|(name, ..)| *name)).collect();
    let rows = bench(&names, None);
    assert!(!rows[0].failed() && rows[0].p50_us.is_some(), "{:?}", rows[0].gates);
    for (row, (name, gate, reason)) in rows[1..].iter().zip(expected) {
        assert_eq!(row.kernel, name);
        let failed =
            row.gates.iter().find(|gate| gate.verdict.is_fail()).unwrap_or_else(|| panic!("{name} passed"));
        assert_eq!(failed.gate, gate, "{name}: {}", failed.detail);
        assert!(failed.detail.contains(reason), "{name}: {}", failed.detail);
        // Timings are reported only for kernels that pass every gate.
        assert!(row.p50_us.is_none() && row.samples_us.is_empty() && row.speedup.is_empty(), "{name}");
    }
}

#[test]
fn a_time_below_the_floor_is_no_time() {
    let slow_machine = Ceilings { gflops: Some(1e-3), gbps: None, source: "a machine of a test".to_owned() };
    let rows = bench(&["honest"], Some(slow_machine));
    let failed = rows[0].gates.iter().find(|gate| gate.verdict.is_fail()).unwrap();
    assert_eq!(failed.gate, "floor");
    assert!(
        failed.detail.contains("too-fast: ") && failed.detail.contains("a machine of a test"),
        "{}",
        failed.detail
    );
    assert!(rows[0].p50_us.is_none());
}

#[test]
fn an_honest_kernel_passes_in_every_way_of_timing() {
    let problem = Problem::new("tiny".parse().unwrap(), DType::F32).unwrap();
    for timing in Timing::ALL {
        let request = Request {
            kernels: vec!["cpu_naive".to_owned(), "cpu_flash[BLOCK_KV=32 BLOCK_Q=48 THREADS=1]".to_owned()],
            baselines: Vec::new(),
            iters: 10,
            warmup: 1,
            seed: 1,
            budget: None,
            peak_gflops: None,
            bf16_peak_gflops: None,
            timing,
            margin: 0.01,
            epoch: std::time::Instant::now(),
        };
        let measured = bench::measure(&Cpu::default(), &problem, &request, Err("not asked for"), |_| true);
        if timing == Timing::Between {
            let refused = measured.err().map(|error| error.to_string()).unwrap();
            assert!(refused.starts_with("timing `between` needs a GPU"), "{refused}");
            continue;
        }
        let rows = measured.unwrap().rows;
        assert_eq!(rows[1].timing, timing.name());
        assert!(!rows[1].failed() && rows[1].p50_us.is_some(), "{timing}: {:?}", rows[1].gates);
    }
}

/// The same cheats as CUDA kernels. Here they are compiled; on a machine with a GPU,
/// `evosdpa bench --kernel-path crates/lab/tests/cheats --shapes b1h2s64d64` turns them away.
#[test]
fn the_cuda_cheats_compile() {
    use evosdpa_cuda::Builder;
    use evosdpa_kernels::{Arch, Origin, ProblemFacts, Registry, Target};

    let mut registry = Registry::default();
    registry.add_folder(std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cheats"))).unwrap();
    let problem = Problem::new("b1h2s64d64".parse().unwrap(), DType::BF16).unwrap();
    let facts = ProblemFacts::try_from(&problem).unwrap();
    let mut names = Vec::new();
    for kernel in registry.kernels() {
        assert_ne!(kernel.origin, Origin::Embedded);
        let variant = kernel.variant(&facts, &Target::nominal(Arch::Sm90a), []).unwrap();
        Builder::default().build(&variant).unwrap_or_else(|error| panic!("{}: {error}", kernel.name()));
        names.push(kernel.name().to_owned());
    }
    assert_eq!(names.len(), 10, "{names:?}");
}
