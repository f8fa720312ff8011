//! `Attention` on a GPU, without one: what the driver is asked for by the first call, by later ones, in graphs and when
//! something is wrong. The driver is a fake that says what it was asked; the kernels are the shipped ones, compiled.
//!
//! Not part of the packaged crate: the fake is a file of another one.

use std::{
    alloc::{GlobalAlloc, System},
    env,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use evosdpa::{
    Attention, DType, Device, DeviceLse, DeviceTensor, DeviceTensors, Error, Layout, Options, Problem,
    choose::{Planner, Question, assumed_tensors},
    gpu::{CacheWrite, DeviceNewTokens, DeviceRotary, Gpu, RawStream},
};
use evosdpa_cuda::{Artifact, ArtifactKind, Builder, CompileRequest, Graph, Precompiled, Stream};
use evosdpa_kernels::{Arch, Registry, Target, Variant};

#[path = "../../cuda/tests/fake/mod.rs"]
mod fake;

use fake::{asked, assert_contains, with_fake};

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

const FEW_ROWS: &str = "mission";
const HANDED_OUT: &str = "b4h16s1024d128:causal";

/// The fake is a Hopper GPU of this size.
const SMS: u32 = 132;
const SMEM_BYTES: u32 = 232_448;

fn problem(shape: &str) -> Problem {
    Problem::new(shape.parse().unwrap(), DType::BF16).unwrap()
}

fn planner() -> Planner {
    Planner::new(Registry::embedded().unwrap())
}

/// What the fake's GPU will be asked to load.
fn chosen(shape: &str, change: fn(&mut DeviceTensors)) -> Variant {
    let target = Target { arch: Arch::Sm90a, sm_count: SMS, smem_limit_bytes: SMEM_BYTES };
    let problem = problem(shape);
    let mut tensors = assumed_tensors(&problem);
    change(&mut tensors);
    let question =
        Question { problem: &problem, tensors: &tensors, target: &target, device: Some("Fake GPU") };
    planner().choose(&question).unwrap().variant
}

/// Compiles it, here: the compiler has no business in a process with a fake driver.
fn compile(shapes: &[&str], change: fn(&mut DeviceTensors)) {
    let builder = Builder::new().unwrap();
    for shape in shapes {
        builder.build(&chosen(shape, change)).unwrap_or_else(|error| panic!("{error}"));
    }
}

/// What a step prints on the fake GPU; `more` is told to the fake besides.
fn on_fake(step: &str, more: &[(&str, &str)]) -> String {
    let (sms, smem) = (SMS.to_string(), SMEM_BYTES.to_string());
    let told =
        [("FAKE_SMS", sms.as_str()), ("FAKE_SMEM", &smem), ("FAKE_STATIC_SMEM", "0"), ("FAKE_MAPS", "3")];
    with_fake(step, &[&told, more].concat(), None)
}

/// What the tests below run in a process of their own; on its own it has nothing to do.
#[test]
fn inner() {
    let Ok(step) = env::var("FAKE_STEP") else { return };
    if step == "ordinal" {
        println!("{}", Attention::plan(problem(FEW_ROWS), Device::Cuda(7)).unwrap_err());
        return;
    }
    let gpu = Arc::new(Gpu::open(0, planner(), Builder::new().unwrap()).unwrap());
    let stream = gpu.device().stream().unwrap();
    let here = Here { gpu, stream };
    match step.as_str() {
        "forward" => here.forward(),
        "plans" => here.plans(),
        "graph" => here.graph(),
        "refused" => here.refused(),
        "not loaded" => here.not_loaded(),
        "one call" => match here.run(FEW_ROWS, AT) {
            Ok(_) => println!("it ran"),
            Err(error) => println!("{error}"),
        },
        "not launched" => println!("{}", here.run(FEW_ROWS, AT).unwrap_err()),
        "forced" => here.forced(),
        "threads" => here.threads(),
        "lengths" => here.lengths(),
        "cost" => here.cost(),
        "cache" => here.cache(),
        other => panic!("no step {other}"),
    }
}

/// Where the tensors are said to be.
const AT: u64 = 0x7000_0000;

struct Here {
    gpu: Arc<Gpu>,
    stream: Stream,
}

impl Here {
    fn plan(&self, problem: &Problem, tensors: &DeviceTensors) -> Result<Attention, Error> {
        self.gpu.plan(problem, tensors, &Options::default())
    }

    fn launch(&self, attention: &Attention, tensors: &DeviceTensors) -> Result<(), Error> {
        // SAFETY: the fake launches nothing.
        unsafe { attention.run_on(self.stream.number(), tensors) }
    }

    /// Plans and runs packed tensors that begin at an address.
    fn run(&self, shape: &str, at: u64) -> Result<Attention, Error> {
        let (problem, tensors) = packed(shape, at);
        let attention = self.plan(&problem, &tensors)?;
        self.launch(&attention, &tensors)?;
        Ok(attention)
    }

    fn forward(&self) {
        let (problem, mut tensors) = packed(FEW_ROWS, AT);
        tensors.lse = Some(DeviceLse::packed(AT + 0x50_0000, &problem));
        let attention = self.plan(&problem, &tensors).unwrap();
        assert_eq!(attention.device(), Device::Cuda(0));
        println!("runs {}", attention.variant());
        self.launch(&attention, &tensors).unwrap();
        tensors.k.address += 0x100;
        // SAFETY: the fake launches nothing.
        unsafe { attention.run_on(RawStream(0), &tensors) }.unwrap();
    }

    fn plans(&self) {
        self.run(FEW_ROWS, AT).unwrap();
        println!("asked: -- the same again, elsewhere");
        let attention = self.run(FEW_ROWS, AT + 0x1000).unwrap();
        let (_, tensors) = packed(FEW_ROWS, AT);
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        for _ in 0..100 {
            self.launch(&attention, &tensors).unwrap();
            let (problem, tensors) = packed(FEW_ROWS, AT + 0x1000);
            let found = self.plan(&problem, &tensors).unwrap();
            self.launch(&found, &tensors).unwrap();
        }
        println!("{} allocations", ALLOCATIONS.load(Ordering::Relaxed) - before);
        println!("asked: -- other strides");
        let (problem, mut strided) = packed(FEW_ROWS, AT);
        strided.q.strides[2] += 64;
        strided.q.strides[1] += 64 * 512;
        self.launch(&attention, &strided).unwrap();
        println!("asked: -- an address that TMA cannot read");
        let mut unaligned = tensors;
        unaligned.k.address += 2;
        self.launch(&attention, &unaligned).unwrap();
        println!("instead {}", self.plan(&problem, &unaligned).unwrap().variant());
    }

    fn graph(&self) {
        // The first call of the problem: what it loads is no part of the graph.
        let graph = Graph::capture(&self.stream, || self.run(HANDED_OUT, AT).map(drop)).unwrap();
        graph.launch(&self.stream).unwrap();
        graph.launch(&self.stream).unwrap();
        self.run(HANDED_OUT, AT).unwrap();
        // What is wrong inside a capture is said as it is.
        let wrong = Graph::capture(&self.stream, || self.run(FEW_ROWS, AT + 1).map(drop)).unwrap_err();
        assert!(matches!(wrong, Error::Misaligned { .. }), "{wrong:?}");
    }

    fn refused(&self) {
        let (problem, good) = packed(FEW_ROWS, AT);
        let attention = self.plan(&problem, &good).unwrap();
        let refused = |change: fn(&mut DeviceTensors)| {
            let mut tensors = good;
            change(&mut tensors);
            println!("{}", self.launch(&attention, &tensors).unwrap_err());
        };
        refused(|tensors| tensors.k.address = 0);
        refused(|tensors| tensors.o.strides[2] = 8);
        let float = Problem::new("b1h8s512d512".parse().unwrap(), DType::F32).unwrap();
        println!("{}", self.plan(&float, &DeviceTensors::packed(&float, [AT; 4], None)).unwrap_err());
        let options = |name: &str| Options { variant: Some(name.parse().unwrap()), ..Options::default() };
        for name in ["hopper_smal", "sdpa_v2c[STAGS=3]", "fa_s512_v3"] {
            let (problem, tensors) = packed("b1h8s500d64", AT);
            println!("{}", self.gpu.plan(&problem, &tensors, &options(name)).unwrap_err());
        }
        let q = [0_u8; 4];
        let view = || evosdpa::TensorView::new(&q, DType::F32, [1; 4], [1; 4]).unwrap();
        let mut o = [0_u8; 4];
        let o = evosdpa::TensorViewMut::new(&mut o, DType::F32, [1; 4], [1; 4]).unwrap();
        println!("{}", attention.run(view(), view(), view(), o, None).unwrap_err());
        let on_cpu = Attention::plan(problem, Device::Cpu).unwrap();
        println!("{}", self.launch(&on_cpu, &good).unwrap_err());
    }

    fn not_loaded(&self) {
        for _ in 0..2 {
            println!("{}", self.run(FEW_ROWS, AT).unwrap_err());
        }
    }

    fn forced(&self) {
        let (problem, tensors) = packed(HANDED_OUT, AT);
        let chosen = self.run(HANDED_OUT, AT).unwrap();
        println!("asked: -- forced");
        let variant = Some(chosen.variant().parse().unwrap());
        let forced = self.gpu.plan(&problem, &tensors, &Options { variant, ..Options::default() }).unwrap();
        assert_eq!(forced.variant(), chosen.variant());
        self.launch(&forced, &tensors).unwrap();
        println!("asked: -- forced, again");
        self.launch(&forced, &tensors).unwrap();
        println!("asked: -- given up");
        drop(forced);
        println!("asked: -- chosen");
        self.launch(&chosen, &tensors).unwrap();
    }

    fn threads(&self) {
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| self.run(FEW_ROWS, AT).map(drop).unwrap());
            }
        });
    }

    fn cost(&self) {
        let attention = self.run(FEW_ROWS, AT).unwrap();
        let (problem, tensors) = packed(FEW_ROWS, AT);
        let in_hand = median_us(|| self.launch(&attention, &tensors).unwrap());
        let looked_up = median_us(|| {
            let found = self.plan(&problem, &tensors).unwrap();
            self.launch(&found, &tensors).unwrap();
        });
        println!("\nin hand {in_hand:.3} µs\nlooked up {looked_up:.3} µs");
    }

    fn write(&self, change: fn(&mut CacheWrite)) -> Result<(), Error> {
        let mut write = one_token();
        change(&mut write);
        // SAFETY: the fake launches nothing.
        unsafe { self.gpu.write_cache(self.stream.number(), &write) }
    }

    fn cache(&self) {
        let graph = Graph::capture(&self.stream, || self.write(|_| {})).unwrap();
        graph.launch(&self.stream).unwrap();
        println!("asked: -- again");
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        for _ in 0..50 {
            self.write(|write| write.lengths += 64).unwrap();
        }
        println!("{} allocations", ALLOCATIONS.load(Ordering::Relaxed) - before);
        println!("asked: -- refused");
        let changes: [fn(&mut CacheWrite); 10] = [
            |write| write.lengths = 2,
            |write| write.batch = 0,
            |write| write.tokens.as_mut().unwrap().caches[1].address = 0,
            |write| write.tokens.as_mut().unwrap().caches[0].strides[0] = 5,
            |write| write.tokens.as_mut().unwrap().new[1].strides[1] = -1,
            |write| write.tokens.as_mut().unwrap().blocks = 3,
            |write| write.tokens.as_mut().unwrap().heads = 0,
            |write| write.tokens.as_mut().unwrap().tokens = 1 << 30,
            |write| write.rotary.as_mut().unwrap().columns = 65,
            |write| write.dtype = DType::E4M3,
        ];
        for change in changes {
            println!("{}", self.write(change).unwrap_err());
        }
    }

    fn lengths(&self) {
        let shape = |keys: usize| format!("b1h32/8s1/{keys}d128");
        self.run(&shape(1024), AT).unwrap();
        self.run(&shape(1025), AT).unwrap();
        println!("asked: -- new lengths");
        let mut keys = 1026..;
        let median = median_us(|| drop(self.run(&shape(keys.next().unwrap()), AT).unwrap()));
        println!("\nnew {median:.3} µs");
    }
}

/// The median of 200 calls.
fn median_us(mut call: impl FnMut()) -> f64 {
    let mut times_us: Vec<f64> = (0..200)
        .map(|_| {
            let start = Instant::now();
            call();
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    times_us.sort_unstable_by(f64::total_cmp);
    times_us[100]
}

/// What a step said something takes.
fn said_us(text: &str, what: &str) -> f64 {
    let line = text.lines().find_map(|line| line.strip_prefix(what)?.strip_suffix(" µs"));
    let us = line.unwrap_or_else(|| panic!("{text}")).trim().parse().unwrap();
    println!("{what}: {us} µs");
    us
}

/// A problem with packed tensors from an address on, a mebibyte apart.
fn packed(shape: &str, at: u64) -> (Problem, DeviceTensors) {
    let problem = problem(shape);
    (problem, DeviceTensors::packed(&problem, [0, 1, 2, 3].map(|i| at + (i << 20)), None))
}

/// One new token for each of four sequences, turned.
fn one_token() -> CacheWrite {
    let at = |number: u64, shape| DeviceTensor::packed(AT + (number << 20), shape, Layout::Bshd);
    let (new, room) = ([4, 8, 1, 128], [4, 8, 64, 128]);
    let tokens = DeviceNewTokens {
        new: [at(0, new), at(1, new)],
        caches: [at(2, room), at(3, room)],
        heads: 8,
        dims: [128, 128],
        tokens: 1,
        cu_seqlens: None,
        blocks: 4,
        room: 64,
        table: None,
        cache_batch_idx: None,
        filled: None,
    };
    let (cos, sin, columns) = ((AT, 64), (AT, 64), 64);
    let rotary = DeviceRotary { dtype: DType::F32, cos, sin, positions: 64, columns, interleaved: true };
    let write = CacheWrite::new(DType::BF16, 4, AT + (5 << 20));
    CacheWrite { tokens: Some(tokens), rotary: Some(rotary), ..write }
}

/// What was asked for after a line.
fn after<'a>(all: &[&'a str], line: &str) -> Vec<&'a str> {
    let from = all.iter().position(|what| *what == format!("-- {line}")).unwrap_or_else(|| panic!("{all:?}"));
    all[from + 1..].iter().take_while(|what| !what.starts_with("-- ")).copied().collect()
}

fn of_kind(all: &[&str], kind: &str) -> usize {
    all.iter().filter(|what| what.split(' ').next() == Some(kind)).count()
}

#[test]
fn a_call_launches_on_the_callers_stream_with_the_callers_tensors() {
    compile(&[FEW_ROWS], |tensors| tensors.lse = Some(DeviceLse { address: 4096, strides: [4096, 512] }));
    let text = on_fake("forward", &[]);
    assert_contains(&text, &["runs hopper_small["]);
    let asked = asked(&text);
    assert_eq!(of_kind(&asked, "load"), 1, "{asked:?}");
    let launches: Vec<&&str> = asked.iter().filter(|what| what.starts_with("launch")).collect();
    // Parameters and tensor maps are the tensors of each call.
    assert!(
        launches[0].ends_with(
            "stream 1 q 70000000 k 70100000 v 70200000 o 70300000 lse 70500000 maps 70000000 70100000 70200000"
        ),
        "{launches:?}"
    );
    assert!(
        launches[1].ends_with(
            "stream 0 q 70000000 k 70100100 v 70200000 o 70300000 lse 70500000 maps 70000000 70100100 70200000"
        ),
        "{launches:?}"
    );
}

#[test]
fn what_was_planned_is_not_planned_again() {
    compile(&[FEW_ROWS], |_| {});
    compile(&[FEW_ROWS], |tensors| tensors.k.address += 2);
    let text = on_fake("plans", &[("FAKE_MAPS", "0")]);
    let all = asked(&text);
    let first: Vec<&str> = all.iter().take_while(|what| !what.starts_with("--")).copied().collect();
    assert_eq!((of_kind(&first, "load"), of_kind(&first, "encode") > 0), (1, true), "{first:?}");
    let again = after(&all, "the same again, elsewhere");
    assert_eq!(of_kind(&again, "launch"), again.len(), "nothing but launches: {again:?}");
    assert_eq!(again.len(), 201);
    assert_contains(&text, &["\n0 allocations"]);
    // New maps of the same code.
    let strided = after(&all, "other strides");
    assert_eq!((of_kind(&strided, "load"), of_kind(&strided, "encode") > 0), (0, true), "{strided:?}");
    let unaligned = after(&all, "an address that TMA cannot read");
    assert_eq!((of_kind(&unaligned, "load"), of_kind(&unaligned, "launch")), (1, 1), "{unaligned:?}");
    assert_contains(&text, &["instead ampere_fwd["]);
}

#[test]
fn a_first_call_may_be_captured_and_its_counter_is_its_own() {
    compile(&[HANDED_OUT], |_| {});
    let text = on_fake("graph", &[("FAKE_MAPS", "0")]);
    let all = asked(&text);
    let kinds: Vec<&str> =
        all.iter().filter_map(|what| what.split(' ').next()).filter(|kind| *kind != "encode").collect();
    let expected = [
        "capture", "load", "launch", "captured", "replay", "replay", "launch", "capture", "captured",
        "unload",
    ];
    assert_eq!(kinds, expected, "{all:?}");
    let counters: Vec<&str> =
        all.iter().filter_map(|what| what.strip_prefix("launch counter ")?.split(' ').next()).collect();
    // From the half for captured launches, then from the other.
    assert_eq!(counters, ["10020000", "10000000"], "{all:?}");
}

/// Kernels that came along are loaded where there is no compiler. What a driver does not take of them is compiled here.
#[test]
fn precompiled_kernels_need_no_compiler() {
    let variant = chosen(FEW_ROWS, |_| {});
    let request = CompileRequest::new(&variant, ArtifactKind::Cubin);
    let made = Builder::new().unwrap().without_lines().build(&variant).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let named = folder.path().to_str().unwrap();
    let came = Precompiled::create(folder.path()).unwrap();

    let no_compiler = [("EVOSDPA_PRECOMPILED", named), ("EVOSDPA_CUDA_HOME", "/no/such/folder")];
    let text = on_fake("one call", &no_compiler);
    assert_contains(&text, &["/no/such/folder", "doctor --fix"]);
    came.store(&request, &made).unwrap();
    let text = on_fake("one call", &no_compiler);
    assert_contains(&text, &["it ran"]);
    assert_eq!(of_kind(&asked(&text), "load"), 1, "{text}");

    came.store(&request, &Artifact { code: b"not a cubin".to_vec(), ..made }).unwrap();
    assert_contains(&on_fake("one call", &no_compiler), &["/no/such/folder"]);
    compile(&[FEW_ROWS], |_| {});
    let text = on_fake("one call", &[("EVOSDPA_PRECOMPILED", named)]);
    assert_contains(&text, &["it ran"]);
}

#[test]
fn a_cache_is_written_by_one_launch() {
    let variant = evosdpa_kernels::cache::variant(Arch::Sm90a, DType::BF16);
    Builder::new().unwrap().build(&variant).unwrap();
    let text = on_fake("cache", &[("FAKE_MAPS", "0")]);
    let all = asked(&text);
    let first: Vec<&str> = all.iter().take_while(|what| !what.starts_with("--")).copied().collect();
    let kinds: Vec<&str> = first.iter().filter_map(|what| what.split(' ').next()).collect();
    assert_eq!(kinds, ["capture", "load", "launch", "captured", "replay"], "{all:?}");
    let again = after(&all, "again");
    assert_eq!((of_kind(&again, "launch"), again.len()), (50, 50), "{again:?}");
    assert_contains(&text, &["\n0 allocations"]);
    assert_eq!(of_kind(&after(&all, "refused"), "launch"), 0, "{text}");
    assert_contains(
        &text,
        &[
            "lengths: the address 0x2",
            "batch",
            "value cache has no memory",
            "key cache: the stride 5",
            "new values: the stride -1 is negative",
            "blocks of the cache",
            "heads is 0",
            "up to 2^31 - 1 in all",
            "rotary cosines have 65 columns, but a head dimension of 128 allows 1 to 64",
            "rotary embedding of e4m3",
        ],
    );
}

#[test]
fn what_is_wrong_is_refused_before_anything_is_queued() {
    compile(&[FEW_ROWS], |_| {});
    let text = on_fake("refused", &[]);
    assert_eq!(of_kind(&asked(&text), "launch"), 0, "{text}");
    assert_contains(
        &text,
        &[
            "K has no memory: its address is 0",
            "O: the stride 8 is smaller than the 64 elements",
            "f32",
            "did you mean `hopper_small`",
            "`sdpa_v2c` has no tunable `STAGS`",
            "fa_s512_v3",
            "the plan is for cuda:0, which takes tensors in its own memory: call `run_on`",
            "the plan is for the CPU, which cannot read device memory: call `run`",
        ],
    );
    assert_contains(&with_fake("ordinal", &[], None), &["no device cuda:7", "there are 1"]);
}

#[test]
fn a_driver_that_refuses_is_quoted_and_asked_again() {
    compile(&[FEW_ROWS], |_| {});
    let text = on_fake("not loaded", &[("FAKE_LOAD", "209")]);
    assert_eq!(of_kind(&asked(&text), "load"), 2, "{text}");
    assert_contains(&text, &["cuModuleLoadData", "CUDA_ERROR_FAKE", "hopper_small[", "on Fake GPU"]);
    let text = on_fake("not launched", &[("FAKE_LAUNCH", "701")]);
    assert_contains(&text, &["cuLaunchKernelEx", "CUDA_ERROR_FAKE", "hopper_small[", "grid "]);
}

#[test]
fn a_forced_variant_has_code_and_counters_of_its_own_until_it_goes() {
    compile(&[HANDED_OUT], |_| {});
    let text = on_fake("forced", &[("FAKE_MAPS", "0")]);
    let all = asked(&text);
    let counter = |line: &str| -> String {
        let asked = after(&all, line);
        let launch = asked.iter().find_map(|what| what.strip_prefix("launch counter "));
        launch.unwrap().split(' ').next().unwrap().to_owned()
    };
    assert_eq!(of_kind(&after(&all, "forced"), "load"), 1, "{all:?}");
    assert_eq!((counter("forced"), counter("forced, again")), ("10000000".into(), "10000080".into()));
    assert_eq!(of_kind(&after(&all, "forced, again"), "launch"), 1);
    assert_eq!(after(&all, "given up"), ["unload"], "{all:?}");
    assert_eq!(counter("chosen"), "10000080", "the second of the shared ones");
}

#[test]
fn threads_that_meet_at_a_new_problem_load_it_once() {
    compile(&[FEW_ROWS], |_| {});
    let text = on_fake("threads", &[]);
    let all = asked(&text);
    assert_eq!((of_kind(&all, "load"), of_kind(&all, "launch")), (1, 8), "{all:?}");
}

/// What the driver itself takes comes on top: `cargo run --release -p evosdpa --example device_pointers` on a GPU.
#[test]
fn a_new_length_loads_nothing_and_is_planned_at_once() {
    compile(&["b1h32/8s1/1024d128", "b1h32/8s1/1025d128"], |_| {});
    let text = on_fake("lengths", &[("FAKE_MAPS", "0")]);
    let new = after(&asked(&text), "new lengths");
    assert_eq!((of_kind(&new, "load"), of_kind(&new, "launch")), (0, 200), "{new:?}");
    let median = said_us(&text, "new");
    assert!(median < 200.0, "{median} µs");
}

/// The library's own share of a call, unoptimised: a driver's launch comes on top.
#[test]
fn a_planned_call_costs_the_host_a_few_microseconds() {
    compile(&[FEW_ROWS], |_| {});
    let text = on_fake("cost", &[("FAKE_QUIET", "1")]);
    for what in ["in hand", "looked up"] {
        let median = said_us(&text, what);
        assert!(median < 5.0, "{what}: {median} µs");
    }
}
