//! Memory safety: each mistake is a finding with the place and the allocation it missed.

use ptxsan::{Arg, Buffer, Device, Error, Kind, Launch, Module, Outcome};

/// A kernel of one block around a few instructions; `%rd1` holds the argument, `%r1` the thread.
fn kernel(body: &str) -> Module {
    let text = format!(
        ".version 8.0\n.target sm_80\n.address_size 64\n.const .align 4 .b8 table[16] = {{1, 2, 3}};\n\
         .visible .entry k(.param .u64 p)\n{{\n.reg .pred %p<4>;\n.reg .b16 %rs<4>;\n.reg .b32 %r<9>;\n\
         .reg .b64 %rd<9>;\n.shared .align 16 .b8 tile[64];\n.local .align 16 .b8 mine[32];\n\
         ld.param.u64 %rd1, [p];\nmov.u32 %r1, %tid.x;\n{body}\nret;\n}}\n"
    );
    Module::parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

fn launch(module: &Module, prepare: impl FnOnce(&mut Device, Buffer)) -> Outcome {
    let mut device = Device::new();
    let id = device.load(module).unwrap();
    let buffer = device.allocate("buffer", 64).unwrap();
    prepare(&mut device, buffer);
    device.launch(id, &Launch::new("k", [1, 1, 1], [4, 1, 1], 0, vec![Arg::Buffer(buffer)])).unwrap()
}

fn kinds(outcome: &Outcome) -> Vec<Kind> {
    outcome.findings.iter().map(|f| f.kind).collect()
}

fn filled(device: &mut Device, buffer: Buffer) {
    device.write(buffer, 0, &[1; 64]).unwrap();
}

#[test]
fn reading_what_nobody_wrote() {
    let module = kernel("ld.global.u32 %r2, [%rd1];");
    let outcome = launch(&module, |_, _| {});
    assert_eq!(kinds(&outcome), [Kind::UninitialisedMemory]);
    assert!(outcome.findings[0].detail.contains("(buffer+0)"), "{outcome}");
    assert!(launch(&module, filled).is_clean());
    assert_eq!(kinds(&launch(&kernel("ld.shared.u32 %r2, [tile+4];"), filled)), [Kind::UninitialisedMemory]);
    assert_eq!(kinds(&launch(&kernel("ld.local.u32 %r2, [mine+8];"), filled)), [Kind::UninitialisedMemory]);
    assert!(launch(&kernel("st.local.u32 [mine+8], %r1;\nld.local.u32 %r2, [mine+8];"), filled).is_clean());
}

#[test]
fn registers_never_written() {
    assert_eq!(kinds(&launch(&kernel("add.s32 %r3, %r2, 1;"), filled)), [Kind::UninitialisedRegister]);
    // Half of a pair that nobody looks at, as compilers write it, is no mistake; looking at it elsewhere is.
    let pair = "mov.u32 %r1, 1;\nmov.b64 %rd3, {%r1, %r2};\ncvt.u32.u64 %r3, %rd3;";
    assert!(launch(&kernel(pair), filled).is_clean());
    let used = format!("{pair}\nadd.s32 %r3, %r3, %r2;");
    assert_eq!(kinds(&launch(&kernel(&used), filled)), [Kind::UninitialisedRegister]);
    // Written on one path only: a finding for the lanes that took the other.
    let half = "setp.lt.u32 %p1, %r1, 2;\n@%p1 mov.u32 %r2, 7;\nadd.s32 %r3, %r2, 1;";
    let outcome = launch(&kernel(half), filled);
    assert_eq!(kinds(&outcome), [Kind::UninitialisedRegister]);
    assert_eq!(outcome.findings[0].site.thread, [2, 0, 0]);
    let both = "setp.lt.u32 %p1, %r1, 2;\n@%p1 mov.u32 %r2, 7;\n@!%p1 mov.u32 %r2, 8;\nadd.s32 %r3, %r2, 1;";
    assert!(launch(&kernel(both), filled).is_clean());
}

#[test]
fn misaligned_and_out_of_bounds() {
    assert_eq!(kinds(&launch(&kernel("ld.global.u32 %r2, [%rd1+2];"), filled)), [Kind::Misaligned]);
    assert_eq!(
        kinds(&launch(&kernel("ld.global.v4.u32 {%r2,%r3,%r4,%r5}, [%rd1+8];"), filled)),
        [Kind::Misaligned]
    );
    assert_eq!(kinds(&launch(&kernel("st.global.u32 [%rd1+64], %r1;"), filled)), [Kind::OutOfBounds]);
    assert_eq!(kinds(&launch(&kernel("st.global.u32 [%rd1+-4], %r1;"), filled)), [Kind::OutOfBounds]);
    assert_eq!(kinds(&launch(&kernel("st.shared.u32 [tile+64], %r1;"), filled)), [Kind::OutOfBounds]);
    assert_eq!(kinds(&launch(&kernel("st.local.u32 [mine+32], %r1;"), filled)), [Kind::OutOfBounds]);
    assert_eq!(kinds(&launch(&kernel("ld.global.u32 %r2, [0];"), filled)), [Kind::OutOfBounds]);
}

#[test]
fn freed_and_read_only_memory() {
    let module = kernel("ld.global.u32 %r2, [%rd1];");
    let outcome = launch(&module, |device, buffer| {
        filled(device, buffer);
        device.free(buffer).unwrap();
    });
    assert_eq!(kinds(&outcome), [Kind::UseAfterFree]);
    let store = kernel("setp.eq.u32 %p1, %r1, 0;\n@%p1 st.global.u32 [%rd1], %r1;");
    assert!(launch(&store, filled).is_clean());
    let outcome = launch(&store, |device, buffer| device.set_read_only(buffer, true).unwrap());
    assert_eq!(kinds(&outcome), [Kind::ReadOnlyWrite]);
    let constant = "mov.u64 %rd2, table;\ncvta.const.u64 %rd3, %rd2;\nst.u32 [%rd3], %r1;";
    assert_eq!(kinds(&launch(&kernel(constant), filled)), [Kind::ReadOnlyWrite]);
    assert!(launch(&kernel("ld.const.u32 %r2, [table];"), filled).is_clean());
}

#[test]
fn generic_addresses_find_their_space() {
    let body = "mov.u64 %rd2, tile;\ncvta.shared.u64 %rd3, %rd2;\nmul.wide.u32 %rd4, %r1, 4;\nadd.s64 %rd5, %rd3, %rd4;\n\
                st.u32 [%rd5], %r1;\nld.u32 %r2, [%rd5];\nadd.s64 %rd6, %rd1, %rd4;\nst.u32 [%rd6], %r2;";
    let module = kernel(body);
    let mut device = Device::new();
    let id = device.load(&module).unwrap();
    let buffer = device.allocate("buffer", 16).unwrap();
    let outcome =
        device.launch(id, &Launch::new("k", [1, 1, 1], [4, 1, 1], 0, vec![Arg::Buffer(buffer)])).unwrap();
    assert!(outcome.is_clean(), "{outcome}");
    assert_eq!(device.read(buffer).unwrap(), [0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0]);
}

#[test]
fn lanes_that_store_to_one_place() {
    // Different values in one instruction: a race. The same value: none.
    assert_eq!(kinds(&launch(&kernel("st.global.u32 [%rd1], %r1;"), filled)), [Kind::Race]);
    assert!(launch(&kernel("mov.u32 %r2, 5;\nst.global.u32 [%rd1], %r2;"), filled).is_clean());
}

#[test]
fn two_blocks_that_write_the_same_bytes() {
    let module = kernel("mul.wide.u32 %rd2, %r1, 4;\nadd.s64 %rd3, %rd1, %rd2;\nst.global.u32 [%rd3], %r1;");
    let run = |grid: u32| {
        let mut device = Device::new();
        let id = device.load(&module).unwrap();
        let buffer = device.allocate("buffer", 64).unwrap();
        device.launch(id, &Launch::new("k", [grid, 1, 1], [4, 1, 1], 0, vec![Arg::Buffer(buffer)])).unwrap()
    };
    assert!(run(1).is_clean());
    let outcome = run(3);
    assert_eq!(kinds(&outcome), [Kind::Race]);
    let finding = &outcome.findings[0];
    assert_eq!((finding.site.block, finding.other.as_ref().unwrap().block), ([1, 0, 0], [0, 0, 0]));
    assert_eq!(finding.count, 8);
}

#[test]
fn launches_that_make_no_sense_are_refused() {
    let module = kernel("");
    let mut device = Device::new();
    let id = device.load(&module).unwrap();
    let buffer = device.allocate("buffer", 4).unwrap();
    let good = vec![Arg::Buffer(buffer)];
    let mut refused = |grid: [u32; 3], block: [u32; 3], shared: u32, args: Vec<Arg>| {
        matches!(device.launch(id, &Launch::new("k", grid, block, shared, args)), Err(Error::Launch { .. }))
    };
    assert!(!refused([1, 1, 1], [1, 1, 1], 0, good.clone()));
    assert!(refused([1, 1, 1], [1025, 1, 1], 0, good.clone()));
    assert!(refused([1, 1, 1], [0, 1, 1], 0, good.clone()));
    assert!(refused([1, 1, 1], [1, 1, 65], 0, good.clone()));
    assert!(refused([0, 1, 1], [1, 1, 1], 0, good.clone()));
    assert!(refused([1, 65_536, 1], [1, 1, 1], 0, good.clone()));
    assert!(refused([1, 1, 1], [1, 1, 1], 232_448, good.clone()), "64 bytes over the limit");
    assert!(refused([1, 1, 1], [1, 1, 1], 0, vec![]));
    assert!(refused([1, 1, 1], [1, 1, 1], 0, vec![Arg::I32(1)]));
    let launch = Launch::new("nothing", [1, 1, 1], [1, 1, 1], 0, good);
    assert!(matches!(device.launch(id, &launch), Err(Error::NoSuchEntry { .. })));
}
