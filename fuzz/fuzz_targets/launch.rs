//! Any grid, block, shared memory, arguments and options are launched or refused; what is launched ends.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::{
    arbitrary::{self, Arbitrary},
    fuzz_target,
};
use ptxsan::tensor::wgmma::Swizzle;
use ptxsan::{Arg, Device, Launch, Module, Schedule, TensorElement, TensorMap};

static MODULES: LazyLock<[Module; 5]> = LazyLock::new(|| {
    [
        include_str!("../../crates/ptxsan/tests/fixtures/basics.ptx"),
        include_str!("../../crates/ptxsan/tests/fixtures/hazards.ptx"),
        include_str!("../../crates/ptxsan/tests/fixtures/tensor.ptx"),
        include_str!("../../crates/ptxsan/tests/fixtures/speed_hopper.ptx"),
        include_str!("../../crates/ptxsan/tests/golden/hopper/capture.ptx"),
    ]
    .map(|text| Module::parse(text).expect("a fixture is right"))
});

#[derive(Arbitrary, Debug)]
enum Value {
    Buffer { bytes: u16, is_read_only: bool, is_freed: bool },
    I32(i32),
    U64(u64),
    F32(f32),
    Bytes(Vec<u8>),
    /// A tensor of this many bytes in two dimensions.
    Map { element: u8, sizes: [u8; 2], stride: u8, boxes: [u8; 2], steps: [u8; 2], swizzle: u8, is_nan_outside: bool },
}

#[derive(Arbitrary, Debug)]
struct Input {
    module: u8,
    entry: u8,
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    args: Vec<Value>,
    fits: bool,
    schedule: u8,
    seed: u64,
    budget: u16,
    max_shared_bytes: u32,
    resident_blocks: u32,
    explain: bool,
    cluster: [u8; 3],
    is_cooperative: bool,
    is_programmatic: bool,
    is_strict: bool,
}

fuzz_target!(|input: Input| {
    let module = &MODULES[usize::from(input.module) % MODULES.len()];
    let entries: Vec<&str> = module.entries().collect();
    let entry = entries[usize::from(input.entry) % entries.len()];
    let mut device = Device::new();
    let id = device.load(module).expect("a fixture loads");
    let mut args: Vec<Arg> = Vec::new();
    for value in &input.args {
        args.push(match value {
            Value::Buffer { bytes, is_read_only, is_freed } => {
                let buffer = device.upload("buffer", &vec![1; usize::from(*bytes)]).expect("64 KB fit");
                device.set_read_only(buffer, *is_read_only).expect("the buffer is there");
                if *is_freed {
                    device.free(buffer).expect("the buffer is there");
                }
                Arg::Buffer(buffer)
            }
            Value::I32(v) => Arg::I32(*v),
            Value::U64(v) => Arg::U64(*v),
            Value::F32(v) => Arg::F32(*v),
            Value::Bytes(v) => Arg::Bytes(v.clone()),
            Value::Map { element, sizes, stride, boxes, steps, swizzle, is_nan_outside } => {
                let buffer = device.upload("tensor", &[1; 16 * 1024]).expect("16 KB fit");
                let swizzles = [Swizzle::None, Swizzle::Bytes32, Swizzle::Bytes64, Swizzle::Bytes128];
                let map = TensorMap {
                    address: buffer.address(),
                    element: TensorElement::ALL[usize::from(*element) % TensorElement::ALL.len()],
                    sizes: sizes.map(u64::from).to_vec(),
                    strides_bytes: vec![16 * u64::from(*stride)],
                    box_sizes: boxes.map(u32::from).to_vec(),
                    element_strides: steps.map(|step| u32::from(step % 9)).to_vec(),
                    swizzle: swizzles[usize::from(*swizzle) % swizzles.len()],
                    is_nan_outside: *is_nan_outside,
                };
                map.encode().map_or(Arg::U64(0), |raw| Arg::Bytes(raw.to_vec()))
            }
        });
    }
    // Half of the inputs get arguments of the right number and size, so that something runs.
    if input.fits {
        let sizes = module.parameters(entry).expect("the entry is there");
        args.resize(sizes.len(), Arg::U64(0));
        for (arg, bytes) in args.iter_mut().zip(sizes) {
            let right = match (&*arg, bytes) {
                (Arg::Buffer(_) | Arg::U64(_), 8) | (Arg::I32(_) | Arg::F32(_), 4) => true,
                (Arg::Bytes(raw), bytes) => raw.len() == bytes,
                _ => false,
            };
            if !right {
                *arg = Arg::Bytes(vec![0x40; bytes]);
            }
        }
    }
    let small = |n: u32, most: u32| if input.fits { n % most + 1 } else { n };
    let grid = input.grid.map(|n| small(n, 4));
    let block = [small(input.block[0], 200), small(input.block[1], 3), small(input.block[2], 2)];
    let shared = if input.fits { input.shared_bytes % (64 * 1024) } else { input.shared_bytes };
    let mut launch = Launch::new(entry, grid, block, shared, args);
    let schedule = Schedule::ALL[usize::from(input.schedule) % Schedule::ALL.len()];
    launch = launch.with_schedule(schedule, input.seed);
    launch.options.instruction_budget = u64::from(input.budget);
    launch.options.max_shared_bytes = input.max_shared_bytes.min(1 << 20);
    launch.options.resident_blocks = input.resident_blocks;
    launch.options.explain = input.explain;
    launch.options.parallel = false;
    launch.cluster = input.cluster.map(|n| small(u32::from(n), 2));
    launch.cooperative = input.is_cooperative;
    launch.options.programmatic = input.is_programmatic;
    launch.options.strict_proxies = input.is_strict;
    let _ = device.launch(id, &launch);
});
