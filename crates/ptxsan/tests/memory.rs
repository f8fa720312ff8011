//! Memory safety: each mistake is a finding with the place and the allocation it missed.

use ptxsan::{Arg, Buffer, Device, Error, Kind, Launch, Module, Outcome, Schedule};

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
fn what_nobody_wrote_is_reported_where_it_matters() {
    let load = "ld.global.u32 %r2, [%rd1];";
    // Reading and moving is no mistake: the bytes that arrive are as if nobody had written them.
    for moved in [
        "",
        "mov.b32 %r3, %r2;\nst.shared.u32 [tile], %r3;\nld.shared.u32 %r4, [tile];",
        "st.local.u32 [mine], %r2;\nld.local.u32 %r3, [mine];",
        "st.global.u32 [%rd1+4], %r2;",
        "add.s32 %r3, %r2, 1;\nst.shared.u32 [tile], %r3;",
        "shfl.sync.idx.b32 %r3, %r2, 1, 31, 15;",
    ] {
        let body = format!("setp.ne.u32 %p1, %r1, 0;\n@%p1 bra END;\n{load}\n{moved}\nEND:");
        // Lanes must take part in the shuffle.
        let body = if moved.contains("shfl") { format!("{load}\n{moved}") } else { body };
        assert_eq!(kinds(&launch(&kernel(&body), |_, _| {})), [], "{moved}");
    }
    // Where it decides, addresses, or is computed with and leaves, it is reported, with where it comes from.
    let output = "mul.wide.u32 %rd4, %r1, 4;\nadd.s64 %rd5, %rd1, %rd4;";
    let load = "ld.global.u32 %r2, [%rd1+48];";
    for (used, line) in [
        ("setp.eq.u32 %p1, %r2, 7;\n@%p1 bra END;\nmov.u32 %r3, 1;\nEND:", "a branch"),
        ("cvt.u64.u32 %rd2, %r2;\nadd.s64 %rd3, %rd1, %rd2;\nld.global.u32 %r3, [%rd3];", "an address"),
        ("add.s32 %r3, %r2, 1;\nst.global.u32 [%rd5], %r3;", "a value stored to global memory"),
        (
            "st.local.u32 [mine], %r2;\nld.local.u32 %r3, [mine];\nadd.s32 %r3, %r3, 1;\nst.global.u32 [%rd5], %r3;",
            "a value stored",
        ),
        (
            "shfl.sync.idx.b32 %r3, %r2, 1, 31, 15;\nadd.s32 %r3, %r3, 1;\nst.global.u32 [%rd5], %r3;",
            "a value stored",
        ),
        ("setp.eq.u32 %p1, %r2, 7;\n@%p1 mov.u32 %r3, 1;", "whether an instruction is executed"),
    ] {
        let body = format!("{output}\n{load}\n{used}");
        let outcome = launch(&kernel(&body), |_, _| {});
        assert_eq!(kinds(&outcome), [Kind::UninitialisedMemory], "{used}");
        let finding = &outcome.findings[0];
        assert!(finding.detail.contains(line), "{used}: {finding}");
        assert!(finding.detail.contains("(buffer+48)") || finding.detail.contains("local 0x"), "{finding}");
        assert!(finding.other.as_ref().unwrap().opcode.starts_with("ld."), "{finding}");
        let zeros = |device: &mut Device, buffer: Buffer| device.write(buffer, 0, &[0; 64]).unwrap();
        assert!(launch(&kernel(&body), zeros).is_clean(), "{used}");
    }
}

#[test]
fn validity_is_kept_for_each_byte() {
    // Two bytes are written, two are not.
    let half = "mov.b16 %rs1, 5;\nst.local.u16 [mine], %rs1;\nld.local.u32 %r2, [mine];";
    let use_it = "setp.eq.u32 %p1, %r3, 7;\n@%p1 bra END;\nEND:";
    let run = |body: &str| kinds(&launch(&kernel(&format!("{half}\n{body}\n{use_it}")), filled));
    let reported = [Kind::UninitialisedMemory];
    assert_eq!(run("mov.u32 %r3, %r2;"), reported);
    assert_eq!(run("and.b32 %r3, %r2, 65535;"), []);
    assert_eq!(run("and.b32 %r3, %r2, 65536;"), reported);
    assert_eq!(run("or.b32 %r3, %r2, 0xffff0000;"), []);
    assert_eq!(run("shl.b32 %r3, %r2, 16;"), []);
    assert_eq!(run("shl.b32 %r3, %r2, 15;"), reported);
    assert_eq!(run("shr.u32 %r3, %r2, 16;"), reported);
    assert_eq!(run("prmt.b32 %r3, %r2, %r1, 0x1010;"), []);
    assert_eq!(run("prmt.b32 %r3, %r2, %r1, 0x2010;"), reported);
    assert_eq!(run("cvt.u32.u16 %r3, %rs1;"), []);
    assert_eq!(run("mov.b32 {%rs2, %rs3}, %r2;\ncvt.u32.u16 %r3, %rs2;"), []);
    assert_eq!(run("mov.b32 {%rs2, %rs3}, %r2;\ncvt.u32.u16 %r3, %rs3;"), reported);
    assert_eq!(run("mov.b64 %rd3, {%r2, %r1};\nshr.u64 %rd3, %rd3, 32;\ncvt.u32.u64 %r3, %rd3;"), []);
    assert_eq!(run("setp.lt.u32 %p2, %r1, 9;\nselp.b32 %r3, %r1, %r2, %p2;"), []);
    assert_eq!(run("setp.lt.u32 %p2, %r1, 9;\nselp.b32 %r3, %r2, %r1, %p2;"), reported);
    assert_eq!(run("add.s32 %r3, %r2, 1;"), reported);
    // Written again, it is valid.
    assert_eq!(run("mov.u32 %r2, 1;\nmov.u32 %r3, %r2;"), []);
}

#[test]
fn registers_never_written() {
    let use_it = "setp.eq.u32 %p2, %r3, 7;\n@%p2 bra END;\nEND:";
    let run = |body: &str| launch(&kernel(&format!("{body}\n{use_it}")), filled);
    assert_eq!(kinds(&run("add.s32 %r3, %r2, 1;")), [Kind::UninitialisedRegister]);
    // Half of a pair that nobody looks at, as compilers write it, is no mistake; looking at it is.
    let pair = "mov.u32 %r1, 1;\nmov.b64 %rd3, {%r1, %r2};\ncvt.u32.u64 %r3, %rd3;";
    assert_eq!(kinds(&run(pair)), []);
    assert_eq!(kinds(&run(&format!("{pair}\nadd.s32 %r3, %r3, %r2;"))), [Kind::UninitialisedRegister]);
    // Written on one path only: a finding for the lanes that took the other.
    let half = "setp.lt.u32 %p1, %r1, 2;\n@%p1 mov.u32 %r2, 7;\nadd.s32 %r3, %r2, 1;";
    let outcome = run(half);
    assert_eq!(kinds(&outcome), [Kind::UninitialisedRegister]);
    assert_eq!(outcome.findings[0].site.thread, [2, 0, 0]);
    let both = "setp.lt.u32 %p1, %r1, 2;\n@%p1 mov.u32 %r2, 7;\n@!%p1 mov.u32 %r2, 8;\nadd.s32 %r3, %r2, 1;";
    assert_eq!(kinds(&run(both)), []);
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

/// Neighbours' copies to neighbouring places are four copies all the same.
#[test]
fn copies_land_for_the_lanes_that_wait() {
    let body = "shl.b32 %r2, %r1, 4;\nmov.u32 %r3, tile;\nadd.u32 %r3, %r3, %r2;\nmov.u32 %r4, 7;\n\
                st.shared.u32 [%r3], %r4;\ncvt.u64.u32 %rd2, %r2;\nadd.s64 %rd3, %rd1, %rd2;\n\
                cp.async.cg.shared.global [%r3], [%rd3], 16;\nsetp.lt.u32 %p1, %r1, 2;\n@%p1 cp.async.wait_all;\n\
                ld.shared.u32 %r5, [%r3];\nst.global.u32 [%rd3+64], %r5;";
    let run = |body: &str| {
        let mut device = Device::new();
        let id = device.load(&kernel(body)).unwrap();
        let buffer = device.upload("buffer", &[[3; 64], [0; 64]].concat()).unwrap();
        let launch = Launch::new("k", [1, 1, 1], [4, 1, 1], 0, vec![Arg::Buffer(buffer)]);
        let outcome = device.launch(id, &launch.with_schedule(Schedule::CopiesLate, 0)).unwrap();
        let words: Vec<u8> = device.read(buffer).unwrap()[64..].iter().step_by(16).copied().collect();
        (outcome, words)
    };
    let (outcome, words) = run(body);
    assert_eq!((kinds(&outcome), words), (vec![Kind::AsyncRace], vec![3, 3, 7, 7]));
    assert_eq!(outcome.findings[0].count, 2, "{outcome}");
    let (outcome, words) = run(&body.replace("@%p1 ", ""));
    assert_eq!(words, [3; 4]);
    assert!(outcome.is_clean(), "{outcome}");
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

#[test]
fn shared_memory_that_the_system_keeps_is_there_for_who_asks() {
    let body = |at: u32| {
        format!(
            "mov.u32 %r2, %reserved_smem_offset_1;\nst.shared.u32 [tile], %r1;\nst.shared.u32 [tile+60], %r2;\n\
             mad.lo.s32 %r3, %r1, 4, %r2;\nst.shared.u32 [%r3+{at}], %r1;\nld.shared.u32 %r4, [%r3+{at}];"
        )
    };
    // It starts as zeros, which are as if somebody had written them.
    let zeros = "mov.u32 %r2, %reserved_smem_offset_1;\nld.shared.u32 %r3, [%r2];\nsetp.ne.u32 %p1, %r3, 0;\n@%p1 trap;";
    assert_eq!(kinds(&launch(&kernel(zeros), |_, _| {})), []);
    let outcome = launch(&kernel(&body(284)), |_, _| {});
    assert!(
        outcome.findings.iter().all(|f| f.variable.as_ref().is_none_or(|v| v.name == "tile")),
        "{outcome}"
    );
    let outcome = launch(&kernel(&body(4096)), |_, _| {});
    assert!(kinds(&outcome).contains(&Kind::OutOfBounds), "{outcome}");
    // Others are refused by name, with their line.
    let text = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k()\n{\n.reg .b32 %r<2>;\nmov.u32 %r1, %pm0;\nret;\n}";
    let Err(error) = Module::parse(text) else { panic!("%pm0 is not simulated") };
    assert!(
        matches!(&error, Error::Unsupported { line: 7, reason, .. } if reason.contains("`%pm0`")),
        "{error}"
    );
}
