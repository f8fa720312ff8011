//! Cheats do not pass: each of these kernels is right when it is checked, or looks fast when it is timed, and each is turned
//! away by name on the ordinary path of `bench`.

use std::{
    collections::{BTreeSet, HashMap},
    path::Path,
    thread::JoinHandle,
};

use evosdpa_core::{DType, Problem};
use evosdpa_cuda::Builder;
use evosdpa_kernels::{Arch, Origin, ProblemFacts, Registry, Target};
use evosdpa_lab::{
    Error,
    bench::{self, Request},
    device::{
        Body, Cpu, Device, DeviceId, KernelInfo, Loaded, LoadedCpu, Output, Sim, TimedDevice, TimedKernel,
        Timing,
    },
    gate::correctness,
    measure::floor::Ceilings,
    record::Row,
};
use evosdpa_oracle::{
    Case,
    inputs::{Family, Inputs, LengthFamily},
};

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
    let mut behind: Option<JoinHandle<Output>> = None;
    let mut owed: Option<Inputs> = None;
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
            "mean_of_v" => {
                let mut others = inputs.clone();
                // Queries of nothing find every key alike.
                others.q.bytes_mut().fill(0);
                attend(&problem, &others, output)
            }
            "low_precision" => {
                let mut coarse = inputs.clone();
                for tensor in [&mut coarse.q, &mut coarse.k, &mut coarse.v] {
                    // As bf16 would hold them.
                    tensor.bytes_mut().chunks_exact_mut(4).for_each(|float| float[..2].fill(0));
                }
                attend(&problem, &coarse, output)
            }
            "writes_nothing" => Ok(()),
            "knows_the_inputs" => {
                if let Some(first) = kept.get(&0) {
                    output.clone_from(first);
                    return Ok(());
                }
                attend(&problem, inputs, output)?;
                kept.insert(0, output.clone());
                Ok(())
            }
            "works_in_a_thread" if calls > GATE_CALLS => {
                // What the thread has found out by the next call is handed over then.
                if let Some(Ok(found)) = behind.take().map(JoinHandle::join) {
                    output.clone_from(&found);
                }
                let (problem, inputs) = (problem, inputs.clone());
                behind = Some(std::thread::spawn(move || {
                    let mut found = evosdpa_lab::device::fresh_output(&problem);
                    // A thread that fails hands over what is still poison.
                    let _ = attend(&problem, &inputs, &mut found);
                    found
                }));
                Ok(())
            }
            "defers_its_work" if calls > GATE_CALLS => {
                let before = owed.replace(inputs.clone());
                before.map_or(Ok(()), |before| attend(&problem, &before, output))
            }
            "batched" if calls > GATE_CALLS => {
                // The first address does it for all; here nobody has told it where the others are.
                let first = kept.keys().next().copied();
                if first.is_some_and(|first| first != address(inputs)) {
                    return Ok(());
                }
                kept.insert(address(inputs), output.clone());
                attend(&problem, inputs, output)
            }
            "cached_by_content" => {
                let words = [&inputs.q, &inputs.k, &inputs.v]
                    .map(|tensor| tensor.bytes().chunks_exact(8).step_by(16));
                let word = |bytes: &[u8]| usize::from_le_bytes(bytes.try_into().unwrap_or_default());
                let print =
                    words.into_iter().flatten().fold(0_usize, |sum, bytes| sum.rotate_left(5) ^ word(bytes));
                if let Some(kept) = kept.get(&print) {
                    output.o.bytes_mut().copy_from_slice(kept.o.bytes());
                    output.lse.clone_from(&kept.lse);
                    return Ok(());
                }
                attend(&problem, inputs, output)?;
                kept.insert(print, output.clone());
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
        lengths: LengthFamily::Equal,
        budget: None,
        timing: Timing::Graph,
        margin: 0.01,
        epoch: std::time::Instant::now(),
    };
    let outcome =
        bench::measure(&Cheats { ceilings }, &problem, &request, Err("not asked for"), |_| true).unwrap();
    outcome.rows.into_iter().filter(|row| !row.baseline).collect()
}

/// Cheats on a CPU: the gate, and what it says.
const ON_CPU: [(&str, &str, &str); 17] = [
    ("zeros", "correctness", "zeros: "),
    ("copies_v", "correctness", "bound"),
    ("mean_of_v", "correctness", "bound"),
    ("low_precision", "correctness", "bound"),
    ("writes_nothing", "correctness", "work-skipped: "),
    // By its address or by its content: which of the two shows first is chance.
    ("cached_by_pointer", "audit", "stale-"),
    ("cached_by_content", "audit", "cached-by-content: "),
    ("knows_the_inputs", "audit", "stale-"),
    ("skips_after_warm_up", "audit", "work-skipped: "),
    ("right_at_first", "audit", "wrong-answer: "),
    ("changes_inputs", "audit", "input-changed: K"),
    ("one_call_of_three", "audit", "work-skipped: "),
    ("batched", "audit", "work-skipped: "),
    ("works_in_a_thread", "audit", ""),
    ("defers_its_work", "audit", ""),
    ("writes_astray", "audit", "stray-write: "),
    ("trusts_finished_outputs", "audit", "stale-output: "),
];

#[test]
fn every_cheat_is_turned_away_by_name() {
    let expected = ON_CPU;
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
            lengths: LengthFamily::Equal,
            budget: None,
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

fn cuda_cheats() -> Registry {
    let mut registry = Registry::default();
    registry.add_folder(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cheats"))).unwrap();
    registry
}

/// Cheats that a GPU turns away: `cargo xtask gpu --only cheats`. Here they are compiled.
const ON_GPU: [&str; 14] = [
    "zeros",
    "copies_v",
    "mean_of_v",
    "low_precision",
    "writes_nothing",
    "cached_by_pointer",
    "cached_by_content",
    "skips_after_warm_up",
    "right_at_first",
    "changes_inputs",
    "one_call_of_three",
    "batched",
    "writes_astray",
    "trusts_finished_outputs",
];

#[test]
fn the_cuda_cheats_compile() {
    let registry = cuda_cheats();
    let problem = Problem::new("b1h2s64d64".parse().unwrap(), DType::BF16).unwrap();
    let facts = ProblemFacts::try_from(&problem).unwrap();
    let mut names = BTreeSet::new();
    for kernel in registry.kernels() {
        assert_ne!(kernel.origin, Origin::Embedded);
        let variant = kernel.variant(&facts, &Target::nominal(Arch::Sm90a), []).unwrap();
        Builder::default().build(&variant).unwrap_or_else(|error| panic!("{}: {error}", kernel.name()));
        names.insert(kernel.name().trim_start_matches("cheat_").to_owned());
    }
    let others = ["honest", "keeps_l2", "reads_past_shared"];
    assert_eq!(names, ON_GPU.iter().chain(&others).map(|name| (*name).to_owned()).collect());
    let plan = include_str!("../../../xtask/src/gpu/plan.rs");
    for name in ON_GPU {
        assert!(plan.contains(&format!("cheat_{name}")), "`cargo xtask gpu` does not run {name}");
    }
}

/// What needs no clock is turned away by the simulator, which agents' sources meet first.
const ON_SIM: [(&str, &str); 6] = [
    ("zeros", "zeros: "),
    ("copies_v", "bound"),
    ("mean_of_v", "bound"),
    ("low_precision", "bound"),
    ("writes_nothing", "work-skipped: "),
    ("reads_past_shared", "out-of-bounds"),
];

#[test]
fn the_simulator_turns_cheats_away() {
    let sim = Sim::open(cuda_cheats()).unwrap();
    let problem = Problem::new("b1h2s24d32:causal".parse().unwrap(), DType::BF16).unwrap();
    let case = Case::new(problem, Family::Normal, 3, None);
    let check = |name: &str| correctness::check(&sim, &format!("cheat_{name}"), &case, None).unwrap();
    assert!(check("honest").verdict.is_pass());
    for (name, reason) in ON_SIM {
        let result = check(name);
        assert!(result.verdict.is_fail() && result.detail.contains(reason), "{name}: {}", result.detail);
    }
}

/// A candidate is device code that the lab compiles and launches: what a host would do for it cannot be said in it.
const ON_NO_HOST: [(&str, &str, &str); 6] = [
    ("a side stream", "cudaStream_t s; cudaStreamCreate(&s);", "cudaStream"),
    ("a launch of its own", "cheat<<<1, 1>>>(p);", "kernel launch"),
    ("a background thread", "std::thread([]{}).detach();", "std"),
    ("a patched clock", "cudaEventElapsedTime(0, 0, 0);", "cudaEventElapsedTime"),
    ("a library call", "cublasHgemm(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);", "cublasHgemm"),
    ("the environment", "if (getenv(\"FAST\")) return;", "getenv"),
];

#[test]
fn what_a_host_would_do_does_not_compile() {
    let registry = cuda_cheats();
    let source = registry.kernel("cheat_honest").unwrap().source.to_string();
    let problem = Problem::new("b1h2s64d64".parse().unwrap(), DType::BF16).unwrap();
    let facts = ProblemFacts::try_from(&problem).unwrap();
    let begin = "  const unsigned launch = launch_number();\n";
    for (number, (name, code, word)) in ON_NO_HOST.into_iter().enumerate() {
        let mut registry = registry.clone();
        let changed = source.replacen(begin, &format!("{begin}  {code}\n"), 1);
        assert_ne!(changed, source);
        let own = format!("host_{number}");
        registry.register_source("cheat_honest", &own, &changed).unwrap();
        let variant =
            registry.kernel(&own).unwrap().variant(&facts, &Target::nominal(Arch::Sm90a), []).unwrap();
        let error = Builder::default().build(&variant).err().unwrap_or_else(|| panic!("{name} compiles"));
        assert!(error.to_string().contains(word), "{name}: {error}");
    }
    // Nor is a library's header there, or a file of the machine.
    for include in ["<cublas_v2.h>", "\"/etc/passwd\"", "<thread>"] {
        let mut registry = registry.clone();
        let changed = format!("#include {include}\n{source}");
        let refused = match registry.register_source("cheat_honest", "host", &changed) {
            Err(error) => error.to_string(),
            Ok(()) => {
                let kernel = registry.kernel("host").unwrap();
                let variant = kernel.variant(&facts, &Target::nominal(Arch::Sm90a), []).unwrap();
                Builder::default()
                    .build(&variant)
                    .err()
                    .unwrap_or_else(|| panic!("{include} compiles"))
                    .to_string()
            }
        };
        assert!(refused.contains(include.trim_matches(['<', '>', '"'])), "{include}: {refused}");
    }
}

/// The page's table of cheats: each row names fixtures of this program, and each fixture is in a row with what it is caught by.
#[test]
fn the_table_of_cheats_is_true() {
    let page = include_str!("../../../docs/measuring.md");
    let table = page.split("| cheat | as it was seen | fixture | where | caught by |\n").nth(1).unwrap();
    let rows: Vec<Vec<&str>> = table
        .lines()
        .skip(1)
        .take_while(|line| line.starts_with('|'))
        .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
        .collect();
    let ticked =
        |cell: &str| -> Vec<String> { cell.split('`').skip(1).step_by(2).map(str::to_owned).collect() };
    let mut seen = BTreeSet::new();
    for row in &rows {
        let [_, _, fixtures, places, caught] = row[..] else { panic!("{row:?}") };
        let (places, caught) = (ticked(places), ticked(caught));
        for fixture in ticked(fixtures) {
            let is_host = ON_NO_HOST.iter().any(|(name, ..)| *name == fixture);
            assert_eq!(is_host, places == ["compile"], "{fixture}: {places:?}");
            let on_cpu = ON_CPU.iter().find(|(name, ..)| *name == fixture);
            assert_eq!(on_cpu.is_some(), places.iter().any(|place| place == "cpu"), "{fixture} on a CPU");
            assert_eq!(
                ON_SIM.iter().any(|(name, _)| *name == fixture),
                places.iter().any(|place| place == "sim")
            );
            let on_gpu = ON_GPU.contains(&fixture.as_str()) || fixture == "keeps_l2";
            assert_eq!(on_gpu, places.iter().any(|place| place == "cuda"), "{fixture} on a GPU");
            if let Some((_, gate, reason)) = on_cpu {
                let name = reason.split(": ").next().unwrap_or_default();
                let said =
                    caught.iter().any(|word| word == gate || (!name.is_empty() && word.starts_with(name)));
                assert!(said, "{fixture} is caught by {gate} {reason}, the page says {caught:?}");
            }
            assert!(seen.insert(fixture.clone()), "{fixture} is there twice");
        }
    }
    let all = ON_CPU.iter().map(|(name, ..)| *name).chain(ON_GPU).chain(ON_SIM.iter().map(|(name, _)| *name));
    let all = all.chain(ON_NO_HOST.iter().map(|(name, ..)| *name)).chain(["keeps_l2"]);
    assert_eq!(seen, all.map(str::to_owned).collect());
}
