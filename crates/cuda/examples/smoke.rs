//! Takes the fixture kernel through everything on a real GPU and prints a table: compile, gate, load, launch, compare,
//! time by events and by graph, catch a stray write, refuse too much shared memory, survive a slow kernel.
//!
//! `cargo run --release -p evosdpa-cuda --example smoke [cuda ordinal]`

use std::{
    path::Path,
    process::ExitCode,
    time::{Duration, Instant},
};

use evosdpa_core::DType;
use evosdpa_cuda::{
    Builder, Device, Error, Event, Function, Graph, GuardedBuffer, L2Flush, Origin, PreparedLaunch, Result,
    Stream, TensorMap, TensorMapRequest, resources, time_each_us, time_graph_us, worker,
};
use evosdpa_kernels::{Kernel, LaunchGeometry, ProblemFacts, Registry, SdpaParams, Swizzle, Target, Variant};
use half::f16;

const LIMIT: Duration = Duration::from_secs(10);
const SCALE: f32 = 0.5;

fn main() -> ExitCode {
    worker::run_if_requested();
    let ordinal = std::env::args().nth(1).and_then(|argument| argument.parse().ok()).unwrap_or(0);
    let mut table = Table::default();
    match run(ordinal, &mut table) {
        Ok(()) if table.failed == 0 => ExitCode::SUCCESS,
        Ok(()) => ExitCode::from(1),
        Err(error) => {
            println!("stopped: {error}");
            ExitCode::from(2)
        }
    }
}

#[derive(Default)]
struct Table {
    failed: usize,
}

impl Table {
    fn row(&mut self, what: &str, passed: bool, seen: impl std::fmt::Display) {
        println!("{:4}  {what:<34} {seen}", if passed { "ok" } else { "FAIL" });
        self.failed += usize::from(!passed);
    }
}

fn run(ordinal: usize, table: &mut Table) -> Result<()> {
    let device = Device::open(ordinal)?;
    let info = device.info().clone();
    table.row("device", true, format!("{} sm_{}{} {} SMs", info.name, info.major, info.minor, info.sm_count));
    let target = device.target()?;
    let nominal = Target::nominal(target.arch);
    table.row(
        "shared memory per block",
        nominal.smem_limit_bytes == target.smem_limit_bytes,
        format!("{} bytes, the table says {}", target.smem_limit_bytes, nominal.smem_limit_bytes),
    );

    let kernel = fixture()?;
    let facts = facts();
    let variant = kernel.variant(&facts, &target, [])?;
    let function = compile(table, &device, &variant, &target)?;
    let stream = device.stream()?;
    let prepared = PreparedLaunch::new(&function, variant.launch)?;
    let mut tensors = Tensors::new(&device, &facts)?;

    // SAFETY: the parameters describe `tensors`, which live to the end of this function.
    let launch = |params: &SdpaParams| unsafe { prepared.launch(&stream, params, &[]) };
    let params = tensors.params(&facts);
    launch(&params)?;
    wait(&stream, &prepared.describe())?;
    tensors.o.check()?;
    let wrong = tensors.count_wrong()?;
    table.row("result", wrong == 0, format!("{wrong} wrong elements of {}", tensors.input.len()));

    stray_write(table, &stream, &prepared, &mut tensors, &params)?;
    timings(table, &device, &stream, &prepared, &params)?;
    too_much_shared_memory(table, &function, variant.launch, info.smem_per_block_bytes);
    tensor_map(table, &device, &tensors, &facts);
    slow_kernel(table, &device, &stream, &variant)?;
    Ok(())
}

fn fixture() -> Result<Kernel> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../kernels/tests/fixtures/tiny");
    let mut registry = Registry::default();
    registry.add_folder(Path::new(folder))?;
    Ok(registry.kernel("scale_rows")?.clone())
}

fn facts() -> ProblemFacts {
    ProblemFacts {
        batch: 2,
        heads_q: 8,
        heads_kv: 8,
        seq_q: 1000,
        seq_kv: 1000,
        head_dim: 64,
        value_dim: 64,
        dtype: DType::F16,
        kv_dtype: DType::F16,
        band_lo: None,
        band_hi: None,
        lse: false,
        page_size: 0,
        block_q: 0,
        block_kv: 0,
        features: evosdpa_core::Features::NONE,
    }
}

fn compile(table: &mut Table, device: &Device, variant: &Variant, target: &Target) -> Result<Function> {
    let artifact = Builder::new()?.build(variant)?;
    let from = match artifact.origin {
        Origin::Compiled => "compiled",
        Origin::Cache => "from the cache",
        Origin::Precompiled => "compiled elsewhere",
    };
    table.row("compile", true, format!("{from} in {:.1} ms", artifact.time.as_secs_f64() * 1e3));
    let function = device.load(&artifact.code, &artifact.label)?.function(&variant.entry)?;
    let attributes = function.attributes()?;
    let mut report = resources::gate(&artifact, variant, target)?;
    report.cross_check_driver(&attributes);
    table.row("resource gate", report.passed(), format!("{attributes:?} {:?}", report.findings));
    let geometry = &variant.launch;
    let driver = function.blocks_per_sm(geometry.threads_per_block(), geometry.dynamic_smem_bytes)?;
    let ours = report.occupancy.blocks_per_sm;
    table.row("occupancy", driver == ours, format!("{ours} blocks per SM, the driver says {driver}"));
    Ok(function)
}

struct Tensors {
    input: Vec<f16>,
    v: GuardedBuffer,
    o: GuardedBuffer,
}

impl Tensors {
    fn new(device: &Device, facts: &ProblemFacts) -> Result<Self> {
        let count = (facts.batch * facts.heads_q * facts.seq_q * facts.head_dim) as usize;
        let input: Vec<f16> = (0..count).map(|i| f16::from_f32((i % 1999) as f32 / 100.0 - 10.0)).collect();
        let mut v = GuardedBuffer::new(device, "V", count * 2)?;
        v.copy_from(&input)?;
        let o = GuardedBuffer::new(device, "O", count * 2)?;
        Ok(Self { input, v, o })
    }

    fn params(&self, facts: &ProblemFacts) -> SdpaParams {
        let row = i64::from(facts.head_dim);
        let head = row * i64::from(facts.seq_q);
        let strides = [head * i64::from(facts.heads_q), head, row];
        SdpaParams {
            v: self.v.address(),
            o: self.o.address(),
            v_stride: strides,
            o_stride: strides,
            batch: facts.batch as i32,
            heads_q: facts.heads_q as i32,
            heads_kv: facts.heads_kv as i32,
            seq_q: facts.seq_q as i32,
            seq_kv: facts.seq_kv as i32,
            dim_qk: facts.head_dim as i32,
            dim_v: facts.value_dim as i32,
            scale: SCALE,
            ..SdpaParams::default()
        }
    }

    fn count_wrong(&self) -> Result<usize> {
        let mut output = vec![f16::ZERO; self.input.len()];
        self.o.copy_to(&mut output)?;
        let expected = self.input.iter().map(|x| f16::from_f32(x.to_f32() * SCALE));
        Ok(expected.zip(&output).filter(|(expected, found)| expected != *found).count())
    }
}

fn wait(stream: &Stream, what: &str) -> Result<()> {
    let event = Event::new(stream)?;
    event.record(stream)?;
    event.wait(LIMIT, what)
}

/// Moves the output by one row, so that the last row is written behind it.
fn stray_write(
    table: &mut Table,
    stream: &Stream,
    prepared: &PreparedLaunch,
    tensors: &mut Tensors,
    params: &SdpaParams,
) -> Result<()> {
    tensors.o.poison()?;
    let shifted = SdpaParams { o: params.o + 128, ..*params };
    // SAFETY: one row past the output is still inside its allocation: the canary.
    unsafe { prepared.launch(stream, &shifted, &[]) }?;
    wait(stream, &prepared.describe())?;
    match tensors.o.check() {
        Err(error @ Error::StrayWrite { side: "after", distance_bytes: 0, count: 126..=128, .. }) => {
            table.row("stray write caught", true, error);
        }
        other => table.row("stray write caught", false, format!("{other:?}")),
    }
    tensors.o.poison()
}

fn timings(
    table: &mut Table,
    device: &Device,
    stream: &Stream,
    prepared: &PreparedLaunch,
    params: &SdpaParams,
) -> Result<()> {
    let what = prepared.describe();
    // SAFETY: the caller's parameters describe memory that outlives this function.
    let launch = || unsafe { prepared.launch(stream, params, &[]) };
    for _ in 0..100 {
        launch()?;
    }
    wait(stream, &what)?;
    let start = Instant::now();
    for _ in 0..1000 {
        launch()?;
    }
    let host_us = start.elapsed().as_secs_f64() * 1e6 / 1000.0;
    wait(stream, &what)?;
    table.row("host time of a launch", host_us < 5.0, format!("{host_us:.2} µs"));

    let warm = time_each_us(stream, 100, LIMIT, &what, |_| Ok(()), |_| launch())?;
    table.row("by events, warm cache", true, format!("{:.2} µs (median of 100)", median(warm)));
    let flush = L2Flush::new(device)?;
    let cold = time_each_us(stream, 100, LIMIT, &what, |_| flush.flush(stream), |_| launch())?;
    table.row("by events, cold cache", true, format!("{:.2} µs (median of 100)", median(cold)));

    let graph = Graph::capture(stream, || (0..50).try_for_each(|_| launch()))?;
    let replayed = time_graph_us(&graph, stream, 50, 40, LIMIT, &what)?;
    table.row("by graph replay", true, format!("{:.2} µs (median of 40 x 50)", median(replayed)));
    Ok(())
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
}

fn too_much_shared_memory(
    table: &mut Table,
    function: &Function,
    geometry: LaunchGeometry,
    limit_bytes: u32,
) {
    let greedy = LaunchGeometry { dynamic_smem_bytes: limit_bytes, ..geometry };
    match PreparedLaunch::new(function, greedy) {
        Err(error @ Error::SharedMemory { .. }) => table.row("too much shared memory refused", true, error),
        other => table.row("too much shared memory refused", false, format!("{other:?}")),
    }
    let full = LaunchGeometry { dynamic_smem_bytes: limit_bytes - 16, ..geometry };
    let accepted = PreparedLaunch::new(function, full);
    table.row("all there is accepted", accepted.is_ok(), format!("{:?}", accepted.err()));
}

fn tensor_map(table: &mut Table, device: &Device, tensors: &Tensors, facts: &ProblemFacts) {
    let row = u64::from(facts.head_dim);
    let head = row * u64::from(facts.seq_q);
    let request = TensorMapRequest {
        name: "V",
        address: tensors.v.address(),
        dtype: facts.dtype,
        sizes: [row, facts.seq_q.into(), facts.heads_q.into(), facts.batch.into()],
        strides: [row, head, head * u64::from(facts.heads_q)],
        box_sizes: [64, 128, 1, 1],
        swizzle: Swizzle::Bytes128,
    };
    let encoded = TensorMap::encode(device, &request);
    table.row("tensor map", encoded.is_ok(), format!("{:?}", encoded.err()));
}

/// A kernel that runs for a second must be given up after a tenth, and the device taken back when it has ended.
fn slow_kernel(table: &mut Table, device: &Device, stream: &Stream, variant: &Variant) -> Result<()> {
    let source = "extern \"C\" __global__ void slow(unsigned long long wanted_ns) {\n\
                    unsigned long long start, now;\n\
                    asm volatile(\"mov.u64 %0, %globaltimer;\" : \"=l\"(start));\n\
                    do { asm volatile(\"mov.u64 %0, %globaltimer;\" : \"=l\"(now)); } while (now - start < wanted_ns);\n\
                  }\n";
    let slow = Variant {
        source: source.into(),
        entry: "slow".to_owned(),
        id: evosdpa_kernels::VariantId::new("slow", []),
        ..variant.clone()
    };
    let artifact = Builder::default().build(&slow)?;
    let function = device.load(&artifact.code, "slow")?.function("slow")?;
    let geometry = LaunchGeometry {
        grid: [1; 3],
        block: [32, 1, 1],
        cluster: [1; 3],
        dynamic_smem_bytes: 0,
        programmatic: false,
        counter: false,
        workspace_bytes: 0,
    };
    let prepared = PreparedLaunch::new(&function, geometry)?;
    let mut wanted_ns: u64 = 1_000_000_000;
    // SAFETY: the kernel takes one 64-bit integer and touches no memory.
    unsafe { prepared.launch_arguments(stream, &mut [(&raw mut wanted_ns).cast()]) }?;
    let event = Event::new(stream)?;
    event.record(stream)?;
    let what = prepared.describe();
    match event.wait(Duration::from_millis(100), &what) {
        Err(error @ Error::Hang { .. }) => table.row("slow kernel given up", true, error),
        other => table.row("slow kernel given up", false, format!("{other:?}")),
    }
    let lost = device.alloc(16);
    table.row("lost device says so", matches!(lost, Err(Error::DeviceLost)), format!("{:?}", lost.err()));
    let start = Instant::now();
    while !event.recover(&what)? && start.elapsed() < LIMIT {
        std::thread::sleep(Duration::from_millis(20));
    }
    let back = device.alloc(16);
    table.row("device taken back", back.is_ok(), format!("{:?}", back.err()));
    Ok(())
}
