//! Ordinary kernels compute what CUDA says they compute, with nothing to report.

use ptxsan::{Arg, Device, Kind, Launch, Module, Schedule};

const PTX: &str = include_str!("fixtures/basics.ptx");

fn bytes_of<T: Copy, const N: usize>(values: &[T], to: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|v| to(*v)).collect()
}

fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|c| f32::from_le_bytes(c.try_into().unwrap())).collect()
}

fn i32s(bytes: &[u8]) -> Vec<i32> {
    bytes.chunks_exact(4).map(|c| i32::from_le_bytes(c.try_into().unwrap())).collect()
}

#[test]
fn vector_add_with_a_ragged_tail() {
    let module = Module::parse(PTX).unwrap();
    let mut device = Device::new();
    let id = device.load(&module).unwrap();
    let n = 1000;
    let x: Vec<f32> = (0..n).map(|i| i as f32 * 0.5).collect();
    let y: Vec<f32> = (0..n).map(|i| 1000.0 - i as f32).collect();
    let a = device.upload("a", &bytes_of(&x, f32::to_le_bytes)).unwrap();
    let b = device.upload("b", &bytes_of(&y, f32::to_le_bytes)).unwrap();
    let c = device.allocate("c", 4 * n).unwrap();
    let args = vec![Arg::Buffer(a), Arg::Buffer(b), Arg::Buffer(c), Arg::I32(n as i32)];
    let outcome = device.launch(id, &Launch::new("vector_add", [8, 1, 1], [128, 1, 1], 0, args)).unwrap();
    assert!(outcome.is_clean(), "{outcome}");
    let got = f32s(&device.read(c).unwrap());
    assert!(got.iter().zip(x.iter().zip(&y)).all(|(g, (x, y))| *g == x + y));
    // Each lane adds once; three 4-byte streams in 32-byte sectors.
    assert_eq!(outcome.counters.flops, n as u64);
    assert_eq!(outcome.counters.global_bytes, 12 * n as u64);
    assert_eq!(outcome.counters.global_sectors, 3 * (4 * n as u64).div_ceil(32));
}

#[test]
fn block_sum_under_every_schedule() {
    let module = Module::parse(PTX).unwrap();
    for schedule in Schedule::ALL {
        let mut device = Device::new();
        let id = device.load(&module).unwrap();
        let x: Vec<f32> = (0..3000).map(|i| (i % 17) as f32).collect();
        let input = device.upload("in", &bytes_of(&x, f32::to_le_bytes)).unwrap();
        let out = device.allocate("out", 16).unwrap();
        let args = vec![Arg::Buffer(input), Arg::Buffer(out), Arg::I32(3000)];
        let launch = Launch::new("block_sum", [4, 1, 1], [256, 1, 1], 0, args).with_schedule(schedule, 7);
        let outcome = device.launch(id, &launch).unwrap();
        assert!(outcome.is_clean(), "{schedule:?}\n{outcome}");
        let total: f32 = f32s(&device.read(out).unwrap()).iter().sum();
        assert_eq!(total, x.iter().sum::<f32>());
        // 4 blocks of 8 warps: one barrier before the loop and one in each of its 8 rounds.
        assert_eq!(outcome.counters.barrier_waits, 4 * 8 * 9);
    }
}

#[test]
fn shuffles_and_atomics() {
    let module = Module::parse(PTX).unwrap();
    let mut device = Device::new();
    let id = device.load(&module).unwrap();
    let x: Vec<f32> = (0..32).map(|i| i as f32).collect();
    let input = device.upload("in", &bytes_of(&x, f32::to_le_bytes)).unwrap();
    let out = device.upload("out", &0f32.to_le_bytes()).unwrap();
    let args = vec![Arg::Buffer(input), Arg::Buffer(out)];
    let outcome = device.launch(id, &Launch::new("warp_sum", [3, 1, 1], [32, 1, 1], 0, args)).unwrap();
    assert!(outcome.is_clean(), "{outcome}");
    assert_eq!(f32s(&device.read(out).unwrap()), [3.0 * 496.0]);
}

#[test]
fn calls_and_divergent_loops() {
    let module = Module::parse(PTX).unwrap();
    let mut device = Device::new();
    let id = device.load(&module).unwrap();
    let out = device.allocate("out", 400).unwrap();
    let launch =
        Launch::new("collatz_steps", [2, 1, 1], [64, 1, 1], 0, vec![Arg::Buffer(out), Arg::I32(100)]);
    let outcome = device.launch(id, &launch).unwrap();
    assert!(outcome.is_clean(), "{outcome}");
    let steps = |mut x: u64| {
        let mut n = 0;
        while x != 1 {
            x = if x % 2 == 1 { 3 * x + 1 } else { x / 2 };
            n += 1;
        }
        n
    };
    let want: Vec<i32> = (1..=100).map(steps).collect();
    assert_eq!(i32s(&device.read(out).unwrap()), want);
}

#[test]
fn integer_instructions_constants_and_module_variables() {
    let module = Module::parse(PTX).unwrap();
    let mut device = Device::new();
    let id = device.load(&module).unwrap();
    let kinds: Vec<i32> = (0..64).map(|i| i % 8).collect();
    let kind = device.upload("kind", &bytes_of(&kinds, i32::to_le_bytes)).unwrap();
    let out = device.allocate("out", 8 * 64).unwrap();
    let launch = Launch::new(
        "kinds",
        [1, 1, 1],
        [64, 1, 1],
        0,
        vec![Arg::Buffer(kind), Arg::Buffer(out), Arg::I32(64)],
    );
    let outcome = device.launch(id, &launch).unwrap();
    assert!(outcome.is_clean(), "{outcome}");
    let weights = [1, 2, 3, 5, 7, 11, 13, 17];
    let got: Vec<i64> = device
        .read(out)
        .unwrap()
        .chunks_exact(8)
        .map(|c| i64::from_le_bytes(c.try_into().unwrap()))
        .collect();
    for i in 0..64i32 {
        let x = i * weights[(i & 7) as usize];
        let want = match i % 8 {
            0 => i64::from(x * 3),
            1 => i64::from(x) * 1_000_000_007,
            2 => i64::from(x / 7),
            3 => i64::from(x % 5),
            4 => {
                let first = if x == 0 { 0 } else { x.trailing_zeros() + 1 };
                i64::from(x.count_ones() + x.leading_zeros() + first)
            }
            5 => i64::from(x.reverse_bits() as u32),
            6 => 1,
            _ => -1,
        };
        assert_eq!(got[i as usize], want, "thread {i}");
    }
    let counter = device.variable(id, "counter").unwrap();
    assert_eq!(i32s(&device.read(counter).unwrap()), [48]);
}

#[test]
fn printf_and_assert() {
    let module = Module::parse(PTX).unwrap();
    let mut device = Device::new();
    let id = device.load(&module).unwrap();
    let outcome =
        device.launch(id, &Launch::new("speak", [1, 1, 1], [32, 1, 1], 0, vec![Arg::I32(5)])).unwrap();
    assert!(outcome.is_clean(), "{outcome}");
    assert_eq!(outcome.output, "lane 3 says hello 2.50 1099511627776\n");
    let outcome =
        device.launch(id, &Launch::new("speak", [1, 1, 1], [32, 1, 1], 0, vec![Arg::I32(100)])).unwrap();
    let finding = outcome.of_kind(Kind::Assertion).next().expect("an assertion");
    assert!(finding.detail.contains("n < 100") && finding.detail.contains("basics.cu:63"), "{finding}");
}

#[test]
fn local_arrays_and_dynamic_shared_memory() {
    let module = Module::parse(PTX).unwrap();
    let mut device = Device::new();
    let id = device.load(&module).unwrap();
    let index: Vec<i32> = (0..32).map(|i| i % 16).collect();
    let idx = device.upload("idx", &bytes_of(&index, i32::to_le_bytes)).unwrap();
    let out = device.allocate("out", 128).unwrap();
    let args = vec![Arg::Buffer(idx), Arg::Buffer(out)];
    let outcome =
        device.launch(id, &Launch::new("local_array", [1, 1, 1], [32, 1, 1], 0, args.clone())).unwrap();
    assert!(outcome.is_clean(), "{outcome}");
    for (t, got) in f32s(&device.read(out).unwrap()).into_iter().enumerate() {
        let (at, hole) = ((index[t] as usize + t) & 15, index[t] as usize);
        assert_eq!(got, if at == hole { 100.0 } else { at as f32 * 0.5 });
    }
    let outcome =
        device.launch(id, &Launch::new("dynamic_shared", [1, 1, 1], [32, 1, 1], 128, args.clone())).unwrap();
    assert!(outcome.is_clean(), "{outcome}");
    assert_eq!(i32s(&device.read(out).unwrap())[0], index[31]);
    // One word too few.
    let outcome =
        device.launch(id, &Launch::new("dynamic_shared", [1, 1, 1], [32, 1, 1], 124, args)).unwrap();
    let finding = outcome.of_kind(Kind::OutOfBounds).next().expect("an access past shared memory");
    assert_eq!(finding.site.source.as_deref(), Some("basics.cu:76"));
    assert_eq!(finding.site.thread, [31, 0, 0]);
}
