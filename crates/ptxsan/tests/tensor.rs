//! Asynchronous copies and matrix instructions, as real compilers emit them.

use half::f16;
use ptxsan::{Arg, Device, Kind, Launch, Module, Schedule};

const PTX: &str = include_str!("fixtures/tensor.ptx");

fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|c| f32::from_le_bytes(c.try_into().unwrap())).collect()
}

fn halves(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| f16::from_f32(*v).to_bits().to_le_bytes()).collect()
}

#[test]
fn the_pipeline_copies_under_every_schedule() {
    let module = Module::parse(PTX).unwrap();
    for schedule in Schedule::ALL {
        let mut device = Device::new();
        let id = device.load(&module).unwrap();
        let tiles = 5;
        let x: Vec<f32> = (0..tiles * 512).map(|i| i as f32).collect();
        let bytes: Vec<u8> = x.iter().flat_map(|v| v.to_le_bytes()).collect();
        let input = device.upload("in", &bytes).unwrap();
        let out = device.allocate("out", bytes.len()).unwrap();
        let args = vec![Arg::Buffer(input), Arg::Buffer(out), Arg::I32(tiles)];
        let launch = Launch::new("pipeline", [1, 1, 1], [128, 1, 1], 0, args).with_schedule(schedule, 3);
        let outcome = device.launch(id, &launch).unwrap();
        assert!(outcome.is_clean(), "{schedule:?}\n{outcome}");
        // Lane t handed on the value of lane t^1.
        let got = f32s(&device.read(out).unwrap());
        for (i, g) in got.iter().enumerate() {
            let from = ((i / 4) ^ 1) * 4 + i % 4;
            assert_eq!(*g, 2.0 * x[from], "{schedule:?} element {i}");
        }
    }
}

#[test]
fn zero_fill_copies_only_what_it_is_told() {
    let module = Module::parse(PTX).unwrap();
    for bytes in [0, 4, 12, 16] {
        let mut device = Device::new();
        let id = device.load(&module).unwrap();
        let input = device.upload("in", &[7; 512]).unwrap();
        let out = device.allocate("out", 512).unwrap();
        let args = vec![Arg::Buffer(input), Arg::Buffer(out), Arg::I32(bytes)];
        let outcome = device.launch(id, &Launch::new("zfill", [1, 1, 1], [32, 1, 1], 0, args)).unwrap();
        assert!(outcome.is_clean(), "{outcome}");
        let got = device.read(out).unwrap();
        assert!(got.iter().enumerate().all(|(i, b)| *b == if (i as i32 % 16) < bytes { 7 } else { 0 }));
    }
}

#[test]
fn mma_through_ldmatrix_and_wmma_multiply() {
    let module = Module::parse(PTX).unwrap();
    let a: Vec<f32> = (0..256).map(|i| (i % 7) as f32 - 3.0).collect();
    let b: Vec<f32> = (0..256).map(|i| (i % 5) as f32 * 0.5).collect();
    let mut device = Device::new();
    let id = device.load(&module).unwrap();
    let da = device.upload("a", &halves(&a)).unwrap();
    let db = device.upload("b", &halves(&b[..128])).unwrap();
    let dd = device.allocate("d", 16 * 8 * 4).unwrap();
    let args = vec![Arg::Buffer(da), Arg::Buffer(db), Arg::Buffer(dd)];
    let outcome = device.launch(id, &Launch::new("mma_tile", [1, 1, 1], [32, 1, 1], 0, args)).unwrap();
    assert!(outcome.is_clean(), "{outcome}");
    assert_eq!(outcome.counters.tensor_ops, 2 * 16 * 8 * 16);
    let got = f32s(&device.read(dd).unwrap());
    for row in 0..16 {
        for col in 0..8 {
            let want: f32 = (0..16).map(|k| a[row * 16 + k] * b[k * 8 + col]).sum();
            assert_eq!(got[row * 8 + col], want, "({row},{col})");
        }
    }

    let db = device.upload("b", &halves(&b)).unwrap();
    let dd = device.allocate("d", 256 * 4).unwrap();
    let args = vec![Arg::Buffer(da), Arg::Buffer(db), Arg::Buffer(dd)];
    let outcome = device.launch(id, &Launch::new("wmma_tile", [1, 1, 1], [32, 1, 1], 0, args)).unwrap();
    assert!(outcome.is_clean(), "{outcome}");
    let got = f32s(&device.read(dd).unwrap());
    for row in 0..16 {
        for col in 0..16 {
            // B is column-major.
            let want: f32 = (0..16).map(|k| a[row * 16 + k] * b[col * 16 + k]).sum();
            assert_eq!(got[row * 16 + col], want, "({row},{col})");
        }
    }
}

#[test]
fn half_precision_and_functions() {
    let module = Module::parse(PTX).unwrap();
    let mut device = Device::new();
    let id = device.load(&module).unwrap();
    let x: Vec<f32> = (0..64).map(|i| i as f32 / 16.0 - 2.0).collect();
    let p: Vec<u8> = x.iter().flat_map(|v| half::bf16::from_f32(*v).to_bits().to_le_bytes()).collect();
    let dx = device.upload("x", &halves(&x)).unwrap();
    let dp = device.upload("p", &p).unwrap();
    let [dy, dq, dr] = ["y", "q", "r"].map(|n| device.allocate(n, 128).unwrap());
    let args = [dx, dy, dp, dq, dr].map(Arg::Buffer).to_vec();
    let outcome = device.launch(id, &Launch::new("half_math", [1, 1, 1], [32, 1, 1], 0, args)).unwrap();
    assert!(outcome.is_clean(), "{outcome}");
    let y = device.read(dy).unwrap();
    let r = f32s(&device.read(dr).unwrap());
    for t in 0..32 {
        let h = |i: usize| {
            let v = f16::from_f32(x[2 * t + i]).to_f64();
            let sum = f16::from_f64(v + 0.5).to_f64();
            f16::from_f64(v * v + sum).to_f64()
        };
        for i in 0..2 {
            let at = 4 * t + 2 * i;
            let got = f16::from_le_bytes([y[at], y[at + 1]]).to_f64();
            assert_eq!(got, h(i).max(f16::from_f32(x[2 * t + i]).to_f64()), "thread {t}");
        }
        let (f, g) = (h(0), h(1));
        let want = f.exp2()
            + (g.abs() + 1.0).ln()
            + 1.0 / (f * f + 1.0).sqrt()
            + g / 3.0
            + f / 7.0
            + g.sin()
            + f64::from(half::bf16::from_f32(x[2 * t]).to_f32())
            + f.tanh()
            + f.abs().sqrt()
            + g.exp();
        assert!((f64::from(r[t]) - want).abs() < 1e-5 * want.abs().max(1.0), "thread {t}: {} {want}", r[t]);
    }
}

/// Deletes each synchronisation of a kernel in turn; returns those whose absence goes unnoticed.
fn unnoticed(entry: &str, run: impl Fn(&Module) -> bool) -> Vec<String> {
    let module = Module::parse(PTX).unwrap();
    assert!(run(&module), "{entry} is clean as it stands");
    let points = module.sync_points(entry).unwrap();
    assert!(!points.is_empty());
    points
        .iter()
        .filter(|p| run(&module.without(p.id).unwrap()))
        .map(|p| format!("{} at {:?}", p.opcode, p.source))
        .collect()
}

#[test]
fn every_deleted_wait_and_barrier_of_the_pipeline_is_noticed() {
    let left = unnoticed("pipeline", |module| {
        Schedule::ALL.into_iter().all(|schedule| {
            let mut device = Device::new();
            let id = device.load(module).unwrap();
            let input = device.upload("in", &[1; 11 * 2048]).unwrap();
            let out = device.allocate("out", 11 * 2048).unwrap();
            let args = vec![Arg::Buffer(input), Arg::Buffer(out), Arg::I32(11)];
            let launch = Launch::new("pipeline", [1, 1, 1], [128, 1, 1], 0, args).with_schedule(schedule, 1);
            device.launch(id, &launch).unwrap().is_clean()
        })
    });
    assert_eq!(left, Vec::<String>::new());
}

#[test]
fn a_copy_read_before_its_wait_is_named() {
    let module = Module::parse(PTX).unwrap();
    let wait = module.sync_points("zfill").unwrap().into_iter().find(|p| p.opcode.contains("wait")).unwrap();
    let broken = module.without(wait.id).unwrap();
    let mut device = Device::new();
    let id = device.load(&broken).unwrap();
    let input = device.upload("in", &[7; 512]).unwrap();
    let out = device.allocate("out", 512).unwrap();
    let args = vec![Arg::Buffer(input), Arg::Buffer(out), Arg::I32(16)];
    let outcome = device.launch(id, &Launch::new("zfill", [1, 1, 1], [32, 1, 1], 0, args)).unwrap();
    let finding = outcome.of_kind(Kind::AsyncRace).next().expect("a race with the copy");
    // Nothing commits it: a wait for groups alone would wait for nothing.
    let advice = "its group is open: cp.async.commit_group and cp.async.wait_group, or cp.async.wait_all, must come first";
    assert!(finding.advice.as_deref().unwrap().ends_with(advice), "{finding}");
    assert!(finding.site.source.as_deref().unwrap().starts_with("tensor.cu:36"), "{finding}");
    assert!(finding.other.as_ref().unwrap().opcode.starts_with("cp.async"), "{finding}");
}
