//! The library path on a GPU, from device pointers to a checked answer, and what a call costs the host.
//!
//! Allocates with the driver as any other library would, runs problems of every kind against the oracle, counts what
//! calls cost and what they allocate, captures and replays a graph, calls from many threads, and prints one JSON document.
//! Exit status 0 when everything held, 1 when something did not, 2 without a GPU.
//!
//! `cargo run --release -p evosdpa --example device_pointers [cuda ordinal]`

use std::{
    alloc::{GlobalAlloc, System},
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use evosdpa::{
    Attention, DType, DeviceLse, DeviceScales, DeviceTensor, DeviceTensors, Error, Layout, Options, Problem,
    Tensor, TensorView,
    gpu::{self, Gpu},
};
use evosdpa_cuda::{DeviceBuffer, Event, Graph, PreparedLaunch, Stream, TensorMap, worker};
use evosdpa_oracle::{
    Case,
    inputs::{Family, Inputs},
};
use serde_json::{Value, json};

/// Timed calls.
const CALLS: usize = 10_000;
/// The queue of a stream holds about a thousand launches; past that a call waits for the device. Wait before, untimed.
const CALLS_AT_ONCE: usize = 100;
/// No kernel here takes this long.
const LIMIT: Duration = Duration::from_secs(20);

/// The system's allocator, with a count: a planned call must not allocate.
struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: everything is handed to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: std::alloc::Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise is handed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: std::alloc::Layout) {
        // SAFETY: the caller's promise is handed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn main() -> ExitCode {
    worker::run_if_requested();
    let ordinal = std::env::args().nth(1).and_then(|argument| argument.parse().ok()).unwrap_or(0);
    match run(ordinal) {
        Ok((document, passed)) => {
            println!("{document:#}");
            ExitCode::from(u8::from(!passed))
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

fn run(ordinal: usize) -> Result<(Value, bool), Error> {
    let gpu = &gpu::shared(ordinal)?;
    let info = gpu.device().info();
    let environment = json!({
        "gpu": info.name,
        "sms": info.sm_count,
        "driver_cuda": format!("{}.{}", info.driver_cuda_version / 1000, info.driver_cuda_version % 1000 / 10),
        "cpu": cpu_name(),
        "version": env!("CARGO_PKG_VERSION"),
    });
    let parts = parts_of_a_call(gpu)?;
    let launch_us = parts["driver_launch"]["p50_us"].as_f64().unwrap_or_default();
    let rows = vec![
        correctness(gpu)?,
        refusals(gpu),
        host_time(gpu, "mission", DType::BF16, launch_us)?,
        host_time(gpu, "b2h32/8s1/1024d128", DType::BF16, launch_us)?,
        host_time(gpu, "b1h16s1024d128:causal", DType::F16, launch_us)?,
        parts,
        growing_lengths(gpu)?,
        graphs(gpu)?,
        threads(gpu)?,
    ];
    let passed = rows.iter().all(|row| row["passed"] == json!(true));
    Ok((json!({"schema": "evosdpa.library-path/1", "environment": environment, "rows": rows}), passed))
}

fn cpu_name() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("model name"));
    line.map_or("unknown", |line| line.trim_start_matches([' ', '\t', ':'])).to_owned()
}

/// Tensors of a case in device memory, as some other library might hold them.
struct OnDevice {
    // Held for as long as the tensors point at them.
    _inputs: Vec<DeviceBuffer>,
    o: DeviceBuffer,
    lse: Option<DeviceBuffer>,
    tensors: DeviceTensors,
    /// Bytes before the first element of every tensor.
    offset: usize,
    host_o: Tensor,
}

impl OnDevice {
    /// `offset` bytes of every buffer come before its tensor; rows of O are `row_gap` elements apart.
    fn new(
        gpu: &Arc<Gpu>,
        problem: &Problem,
        inputs: &Inputs,
        offset: usize,
        row_gap: usize,
    ) -> Result<Self, Error> {
        let mut held = Vec::new();
        let mut upload = |bytes: &[u8], offset: usize| -> Result<u64, Error> {
            let mut padded = vec![0xff; offset];
            padded.extend_from_slice(bytes);
            let mut buffer = gpu.device().alloc(padded.len())?;
            buffer.copy_from(&padded)?;
            let address = buffer.address() + offset as u64;
            held.push(buffer);
            Ok(address)
        };
        let strided = |address: u64, view: TensorView<'_>| {
            let [batch, head, seq, _] = view.strides();
            DeviceTensor { address, strides: [batch as i64, head as i64, seq as i64] }
        };
        let q = strided(upload(inputs.q.bytes(), offset)?, inputs.q.view());
        let k = strided(upload(inputs.k.bytes(), offset)?, inputs.k.view());
        let v = strided(upload(inputs.v.bytes(), offset)?, inputs.v.view());
        let mut on_device = |scales: &[f32]| upload(bytemuck::cast_slice(scales), 0);
        let scales = match &inputs.scales {
            Some(scales) => Some(DeviceScales {
                q: on_device(&scales.q)?,
                k: on_device(&scales.k)?,
                v: on_device(&scales.v)?,
            }),
            None => None,
        };
        let host_o =
            Tensor::poisoned_gaps(problem.o_shape(), problem.output_dtype(), problem.layout(), row_gap);
        let o_buffer = gpu.device().alloc_poisoned(offset + host_o.bytes().len())?;
        let o = strided(o_buffer.address() + offset as u64, host_o.view());
        let lse = if problem.lse() { Some(gpu.device().alloc_poisoned(problem.rows() * 4)?) } else { None };
        let tensors = DeviceTensors {
            q,
            k,
            v,
            o,
            lse: lse.as_ref().map(|buffer| DeviceLse::packed(buffer.address(), problem)),
            scales,
            side: evosdpa::DeviceSide::default(),
        };
        Ok(Self { _inputs: held, o: o_buffer, lse, tensors, offset, host_o })
    }

    /// O and the log-sum-exp, as they are now.
    fn download(&mut self) -> Result<Option<Vec<f32>>, Error> {
        let mut bytes = vec![0_u8; self.o.bytes()];
        self.o.copy_to(&mut bytes)?;
        self.host_o.bytes_mut().copy_from_slice(&bytes[self.offset..]);
        let Some(buffer) = &self.lse else { return Ok(None) };
        let mut lse = vec![0_f32; buffer.bytes() / 4];
        buffer.copy_to(&mut lse)?;
        Ok(Some(lse))
    }

    /// Forgets the output, so that the next one cannot be this one.
    fn poison(&self, stream: &Stream) -> Result<(), Error> {
        self.o.fill(0xff, stream)?;
        if let Some(lse) = &self.lse {
            lse.fill(0xff, stream)?;
        }
        Ok(())
    }

    fn plan(&self, gpu: &Arc<Gpu>, problem: &Problem) -> Result<Attention, Error> {
        gpu.plan(problem, &self.tensors, &Options::default())
    }

    /// As a caller that keeps no plan does it.
    fn forward(&self, gpu: &Arc<Gpu>, problem: &Problem, stream: &Stream) -> Result<(), Error> {
        self.run(&self.plan(gpu, problem)?, stream)
    }

    fn run(&self, attention: &Attention, stream: &Stream) -> Result<(), Error> {
        // SAFETY: the tensors describe buffers that `self` holds; every caller waits for the stream before dropping it.
        unsafe { attention.run_on(stream.number(), &self.tensors) }
    }
}

fn wait(stream: &Stream, what: &str) -> Result<(), Error> {
    let event = Event::new(stream)?;
    event.record(stream)?;
    Ok(event.wait(LIMIT, what)?)
}

/// A problem with the strides and alignment it comes in.
struct Kind {
    what: &'static str,
    shape: &'static str,
    dtype: DType,
    layout: Layout,
    row_gap: usize,
    offset: usize,
    lse: bool,
    /// The kernel that must not be chosen, because it cannot read such tensors.
    never: Option<&'static str>,
}

const KIND: Kind = Kind {
    what: "full",
    shape: "mission",
    dtype: DType::BF16,
    layout: Layout::Bhsd,
    row_gap: 0,
    offset: 0,
    lse: false,
    never: None,
};

fn kinds() -> Vec<Kind> {
    vec![
        KIND,
        Kind { what: "causal, with LSE", shape: "mission:causal", dtype: DType::F16, lse: true, ..KIND },
        Kind { what: "fills the machine", shape: "long:causal", lse: true, ..KIND },
        Kind { what: "GQA, lengths differ", shape: "b2h8/2s300/517d128:causal-br", lse: true, ..KIND },
        Kind { what: "decoding", shape: "b2h32/8s1/1024d128", ..KIND },
        Kind { what: "window", shape: "b1h4s700d64:window=100/20", dtype: DType::F16, lse: true, ..KIND },
        Kind { what: "rows without a key", shape: "b1h4s200/100d64:causal-br", lse: true, ..KIND },
        Kind { what: "BSHD", shape: "b2h8s513d64", layout: Layout::Bshd, ..KIND },
        Kind { what: "gaps of 16 elements", shape: "b2h8s513d64:causal", row_gap: 16, ..KIND },
        Kind {
            what: "gaps of 3 elements",
            shape: "b2h8s513d64:causal",
            row_gap: 3,
            never: Some("hopper"),
            ..KIND
        },
        Kind { what: "addresses off by 2 bytes", shape: "mission", offset: 2, never: Some("hopper"), ..KIND },
        Kind {
            what: "addresses off by 8 bytes",
            shape: "long128:causal",
            offset: 8,
            lse: true,
            never: Some("hopper"),
            ..KIND
        },
        Kind {
            what: "odd head dimension",
            shape: "b1h4s100d37",
            dtype: DType::F16,
            never: Some("hopper"),
            ..KIND
        },
        Kind { what: "8-bit codes", shape: "b1h4s200d64:causal", dtype: DType::U8, ..KIND },
        Kind { what: "8-bit floats", shape: "b1h4/2s200d64", dtype: DType::E4M3, ..KIND },
    ]
}

fn correctness(gpu: &Arc<Gpu>) -> Result<Value, Error> {
    let stream = gpu.device().stream()?;
    let mut cases = Vec::new();
    let mut all_passed = true;
    for kind in kinds() {
        let problem =
            Problem::new(kind.shape.parse()?, kind.dtype)?.with_layout(kind.layout).with_lse(kind.lse);
        let case = Case::new(problem, Family::Normal, 7, Some(kind.row_gap));
        let mut on_device = OnDevice::new(gpu, &problem, &case.inputs, kind.offset, kind.row_gap)?;
        let start = Instant::now();
        let planned = on_device.plan(gpu, &problem)?;
        let first_ms = start.elapsed().as_secs_f64() * 1e3;
        on_device.forward(gpu, &problem, &stream)?;
        wait(&stream, kind.what)?;
        let lse = on_device.download()?;
        let judgement = case.judge(&on_device.host_o.view(), lse.as_deref());
        let kernel_fits = kind.never.is_none_or(|never| !planned.variant().starts_with(never));
        let passed = judgement.passed() && kernel_fits;
        all_passed &= passed;
        cases.push(json!({
            "what": kind.what,
            "problem": problem.to_string(),
            "kernel": planned.variant(),
            "from": gpu.explain(&problem, &on_device.tensors)?.origin.to_string(),
            "plan_ms": first_ms,
            "judgement": judgement.summary(),
            "passed": passed,
        }));
    }
    Ok(json!({"what": "correct against the oracle", "passed": all_passed, "cases": cases}))
}

/// Tensors and problems that must be refused, with the words of the refusal.
fn refusals(gpu: &Arc<Gpu>) -> Value {
    let Ok(problem) = "mission".parse().and_then(|shape| Problem::new(shape, DType::BF16)) else {
        return json!({"what": "refusals", "passed": false});
    };
    let tensors = DeviceTensors::packed(&problem, [1 << 20; 4], None);
    let with = |change: fn(&mut DeviceTensors)| {
        let mut changed = tensors;
        change(&mut changed);
        gpu.plan(&problem, &changed, &Options::default())
    };
    let other = |shape: &str, dtype: DType| -> Result<_, Error> {
        let problem = Problem::new(shape.parse()?, dtype)?;
        gpu.plan(&problem, &DeviceTensors::packed(&problem, [1 << 20; 4], None), &Options::default())
    };
    let refused = [
        with(|tensors| tensors.k.address = 0),
        with(|tensors| tensors.q.address += 1),
        with(|tensors| tensors.o.strides[2] = 0),
        with(|tensors| tensors.v.strides[1] = -64),
        other("mission", DType::F32),
        other("b1h8s512d512", DType::F16),
        other("mission", DType::U8),
    ];
    let words: Vec<String> = refused
        .into_iter()
        .map(|refused| {
            refused
                .map_or_else(|error| error.to_string(), |planned| format!("TAKEN by {}", planned.variant()))
        })
        .collect();
    json!({"what": "refusals", "passed": words.iter().all(|words| !words.starts_with("TAKEN")), "words": words})
}

/// Microseconds at these shares of sorted times.
fn quantiles(mut times_us: Vec<f64>) -> Value {
    times_us.sort_unstable_by(f64::total_cmp);
    let at = |share: f64| times_us[((times_us.len() - 1) as f64 * share) as usize];
    json!({"p50_us": at(0.5), "p90_us": at(0.9), "p99_us": at(0.99), "calls": times_us.len()})
}

/// What one call costs the host, with the plan in hand and with a look for it, and that it allocates nothing anywhere. Hosts and drivers
/// differ by more than what is ours: that part, beside the driver's own launch, is what is judged.
fn host_time(gpu: &Arc<Gpu>, shape: &str, dtype: DType, launch_us: f64) -> Result<Value, Error> {
    let problem = Problem::new(shape.parse()?, dtype)?;
    let inputs = Inputs::generate(&problem, Family::Normal, 1);
    let on_device = OnDevice::new(gpu, &problem, &inputs, 0, 0)?;
    let stream = gpu.device().stream()?;
    let planned = on_device.plan(gpu, &problem)?;
    for _ in 0..CALLS_AT_ONCE {
        on_device.forward(gpu, &problem, &stream)?;
    }
    wait(&stream, shape)?;
    let (mut times_us, mut looked_up_us) = (Vec::with_capacity(CALLS), Vec::with_capacity(CALLS));
    let mut allocations = 0;
    let free_before = gpu.device().free_memory_bytes()?;
    while times_us.len() < CALLS {
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        for _ in 0..CALLS_AT_ONCE {
            let start = Instant::now();
            on_device.run(&planned, &stream)?;
            times_us.push(start.elapsed().as_secs_f64() * 1e6);
            let start = Instant::now();
            on_device.forward(gpu, &problem, &stream)?;
            looked_up_us.push(start.elapsed().as_secs_f64() * 1e6);
        }
        allocations += ALLOCATIONS.load(Ordering::Relaxed) - before;
        wait(&stream, shape)?;
    }
    let free_after = gpu.device().free_memory_bytes()?;
    let (times, looked_up) = (quantiles(times_us), quantiles(looked_up_us));
    let own = |times: &Value| times["p50_us"].as_f64().unwrap_or(f64::INFINITY) - launch_us;
    let quick = own(&times) < 1.5 && own(&looked_up) < 2.5;
    let passed = quick && allocations == 0 && free_before == free_after;
    Ok(json!({
        "what": "host time of a planned call",
        "problem": problem.to_string(),
        "kernel": planned.variant(),
        "host": times,
        "host_with_look_up": looked_up,
        "own_us": own(&times),
        "own_with_look_up_us": own(&looked_up),
        "host_allocations": allocations,
        "device_bytes_allocated": free_before as i64 - free_after as i64,
        "passed": passed,
    }))
}

/// What of a call is the driver's launch and what the tensor maps.
fn parts_of_a_call(gpu: &Arc<Gpu>) -> Result<Value, Error> {
    let problem = Problem::new("mission".parse()?, DType::BF16)?;
    let inputs = Inputs::generate(&problem, Family::Normal, 1);
    let on_device = OnDevice::new(gpu, &problem, &inputs, 0, 0)?;
    let stream = gpu.device().stream()?;
    let variant = gpu.explain(&problem, &on_device.tensors)?.variant;
    let code = evosdpa_cuda::Builder::new()?.build(&variant)?.code;
    let function = gpu.device().load(&code, &variant.label())?.function(&variant.entry)?;
    let prepared = PreparedLaunch::new(&function, variant.launch)?;
    let params = on_device.tensors.params(&problem);
    let entered = gpu.device().enter()?;
    let encode = || -> Result<Vec<TensorMap>, Error> {
        let maps = variant.tensor_maps.iter().map(|wanted| {
            Ok(TensorMap::encode_in(&entered, &on_device.tensors.tensor_map(&problem, wanted)?)?)
        });
        maps.collect()
    };
    let maps = encode()?;
    let (mut launch_us, mut encode_us, mut move_us) = (Vec::new(), Vec::new(), Vec::new());
    while launch_us.len() < CALLS {
        for _ in 0..CALLS_AT_ONCE {
            let start = Instant::now();
            // SAFETY: parameters and maps describe `on_device`, which lives until the stream was waited for.
            unsafe { prepared.launch_on(&entered, stream.number(), &params, &maps) }?;
            launch_us.push(start.elapsed().as_secs_f64() * 1e6);
            let start = Instant::now();
            std::hint::black_box(encode()?);
            encode_us.push(start.elapsed().as_secs_f64() * 1e6);
            let start = Instant::now();
            for map in &maps {
                std::hint::black_box(map.moved_to(&entered, "Q", params.q)?);
            }
            move_us.push(start.elapsed().as_secs_f64() * 1e6);
        }
        wait(&stream, "launches alone")?;
    }
    Ok(json!({
        "what": "parts of a call",
        "driver_launch": quantiles(launch_us),
        "tensor_maps_made": quantiles(encode_us),
        "tensor_maps_moved": quantiles(move_us),
        "tensor_maps": maps.len(),
        "passed": true,
    }))
}

/// Decoding: every step has one key more, so every step is a new problem, but not new code.
fn growing_lengths(gpu: &Arc<Gpu>) -> Result<Value, Error> {
    let shape = |keys: usize| format!("b1h32/8s1/{keys}d128");
    let problem =
        |keys: usize| -> Result<Problem, Error> { Ok(Problem::new(shape(keys).parse()?, DType::BF16)?) };
    let longest = problem(1500)?;
    let on_device = OnDevice::new(gpu, &longest, &Inputs::generate(&longest, Family::Normal, 1), 0, 0)?;
    let stream = gpu.device().stream()?;
    // Both codes that these lengths need: whole tiles and not.
    for keys in [1024, 1025] {
        on_device.forward(gpu, &problem(keys)?, &stream)?;
    }
    let mut times_us = Vec::new();
    for keys in 1026..1426 {
        let problem = problem(keys)?;
        let start = Instant::now();
        on_device.forward(gpu, &problem, &stream)?;
        times_us.push(start.elapsed().as_secs_f64() * 1e6);
    }
    wait(&stream, "growing lengths")?;
    let times = quantiles(times_us);
    let passed = times["p50_us"].as_f64().is_some_and(|p50| p50 < 200.0);
    Ok(json!({"what": "first call of a new length, its code loaded", "host": times, "passed": passed}))
}

/// A captured call replays to the same bits, also when the capture was the first call of its problem.
fn graphs(gpu: &Arc<Gpu>) -> Result<Value, Error> {
    let stream = gpu.device().stream()?;
    let mut cases = Vec::new();
    let mut all_passed = true;
    for (shape, planned_before) in [("b1h8s384d64:causal", true), ("b3h7s333d80", false)] {
        let problem = Problem::new(shape.parse()?, DType::BF16)?.with_lse(true);
        let inputs = Inputs::generate(&problem, Family::Normal, 3);
        let mut on_device = OnDevice::new(gpu, &problem, &inputs, 0, 0)?;
        let run =
            |on_device: &mut OnDevice, work: &dyn Fn(&OnDevice) -> Result<(), Error>| -> Result<_, Error> {
                on_device.poison(&stream)?;
                work(on_device)?;
                wait(&stream, shape)?;
                let lse = on_device.download()?;
                Ok((on_device.host_o.bytes().to_vec(), lse))
            };
        let direct = |on_device: &OnDevice| on_device.forward(gpu, &problem, &stream);
        if planned_before {
            run(&mut on_device, &direct)?;
        }
        let captured = Graph::capture(&stream, || on_device.forward(gpu, &problem, &stream));
        let passed = match &captured {
            Ok(graph) => {
                let replay = |_: &OnDevice| -> Result<(), Error> { Ok(graph.launch(&stream)?) };
                let replayed = run(&mut on_device, &replay)?;
                replayed == run(&mut on_device, &replay)? && replayed == run(&mut on_device, &direct)?
            }
            Err(_) => false,
        };
        all_passed &= passed;
        cases.push(json!({
            "problem": problem.to_string(),
            "planned_before": planned_before,
            "error": captured.err().map(|error| error.to_string()),
            "replays_are_the_same_bits": passed,
        }));
    }
    Ok(json!({"what": "CUDA graphs", "passed": all_passed, "cases": cases}))
}

/// Many threads, each with a stream and tensors of its own, all on one problem that none has planned.
fn threads(gpu: &Arc<Gpu>) -> Result<Value, Error> {
    const THREADS: u64 = 8;
    const CALLS_EACH: usize = 200;
    let problem = Problem::new("b1h6s450d64:causal".parse()?, DType::F16)?;
    let worker = |seed: u64| -> Result<bool, Error> {
        let case = Case::new(problem, Family::Normal, seed, None);
        let mut on_device = OnDevice::new(gpu, &problem, &case.inputs, 0, 0)?;
        let stream = gpu.device().stream()?;
        for _ in 0..CALLS_EACH {
            on_device.forward(gpu, &problem, &stream)?;
        }
        wait(&stream, "threads")?;
        on_device.download()?;
        Ok(case.judge(&on_device.host_o.view(), None).passed())
    };
    let results: Vec<_> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..THREADS).map(|seed| scope.spawn(move || worker(seed))).collect();
        workers.into_iter().map(|worker| worker.join()).collect()
    });
    let mut right = 0;
    for result in results {
        right += u64::from(matches!(result, Ok(Ok(true))));
    }
    Ok(
        json!({"what": "calls from many threads", "threads": THREADS, "right": right, "passed": right == THREADS}),
    )
}
