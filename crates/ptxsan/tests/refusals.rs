//! What cannot be run is refused by name, and alone; grids that synchronise run.

use ptxsan::{Arg, Device, Error, Kind, Launch, Module, Outcome, Schedule};

const PTX: &str = include_str!("fixtures/refusals.ptx");

#[test]
fn one_kernel_that_cannot_be_run_does_not_refuse_its_module() {
    let module = Module::parse(PTX).unwrap();
    let entries: Vec<&str> = module.entries().collect();
    assert_eq!(entries, ["grid_sync", "grid_without_sync", "plain", "through_pointer"]);
    let refused: Vec<(&str, String)> = module.refused().map(|(name, why)| (name, why.to_string())).collect();
    assert_eq!(refused.len(), 1, "{refused:?}");
    let why = |entry: &str| &refused.iter().find(|(name, _)| *name == entry).unwrap().1;
    assert!(why("textured").contains("`tex.1d.v4.f32.s32` is not supported: textures and surfaces"));
    // The line of the source, which is what its writer has; nobody has seen the PTX that a compiler made of it.
    let text = why("textured");
    assert!(text.starts_with("refusals.cu:") && text.contains("(PTX line "), "{text}");

    let mut device = Device::new();
    let id = device.load(&module).unwrap();
    let out = device.allocate("out", 128).unwrap();
    let launch = |device: &mut Device, entry: &str| {
        device.launch(id, &Launch::new(entry, [1, 1, 1], [32, 1, 1], 0, vec![Arg::Buffer(out)]))
    };
    assert!(launch(&mut device, "plain").unwrap().is_clean());
    assert!(matches!(launch(&mut device, "textured"), Err(Error::Unsupported { .. })));
    assert!(launch(&mut device, "through_pointer").unwrap().is_clean());
    let words = device.read(out).unwrap();
    let got: Vec<i32> = words.chunks_exact(4).map(|c| i32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect();
    assert!((0..32).all(|i| got[i] == if i % 2 == 0 { 2 * i } else { 3 * i } as i32), "{got:?}");
    assert!(matches!(launch(&mut device, "nothing"), Err(Error::NoSuchEntry { .. })));
}

fn run(
    entry: &str,
    blocks: u32,
    schedule: Schedule,
    cooperative: bool,
) -> Result<(Outcome, Vec<i32>), Error> {
    let module = Module::parse(PTX)?;
    let mut device = Device::new();
    let id = device.load(&module)?;
    let bytes = blocks as usize * 64 * 4;
    let (part, out) = (device.allocate("part", bytes)?, device.allocate("out", bytes)?);
    let args = vec![Arg::Buffer(part), Arg::Buffer(out)];
    let mut launch = Launch::new(entry, [blocks, 1, 1], [64, 1, 1], 0, args).with_schedule(schedule, 9);
    launch.cooperative = cooperative;
    launch.options.resident_blocks = 2;
    // Twice: the second launch finds the workspace as the first did.
    device.launch(id, &launch)?;
    let outcome = device.launch(id, &launch)?;
    let words = device.read(out)?;
    Ok((outcome, words.chunks_exact(4).map(|c| i32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect()))
}

#[test]
fn a_cooperative_grid_synchronises() {
    for schedule in Schedule::ALL {
        let (outcome, out) = run("grid_sync", 5, schedule, true).unwrap();
        assert!(outcome.is_clean(), "{schedule:?} {outcome}");
        assert!((0..320).all(|i| out[i] == ((i / 64 + 1) % 5 + 1) as i32), "{out:?}");
        let (outcome, _) = run("grid_without_sync", 5, schedule, true).unwrap();
        assert!(outcome.of_kind(Kind::Race).count() > 0, "{schedule:?} {outcome}");
    }
    let error = run("grid_sync", 5, Schedule::RoundRobin, false).unwrap_err().to_string();
    assert!(error.contains("--cooperative"), "{error}");
}

/// Of two entries of one name nobody could say which one a launch means, one of them refused or not.
#[test]
fn a_name_is_defined_once() {
    let entry = ".visible .entry k(.param .u64 x) { ret; }\n";
    let bad = ".visible .entry k(.param .u64 x) { mov.u32 %r1, }\n";
    for second in [entry, bad] {
        let text = format!(".version 8.0\n.target sm_80\n.address_size 64\n{entry}{second}");
        let error = Module::parse(&text).err().map_or_else(String::new, |error| error.to_string());
        assert!(error.contains("line 5") && error.contains("a second entry `k`"), "{error}");
    }
}

/// Of the functions whose address is taken, those that fit are asked in turn; a pointer to none of them is a finding.
#[test]
fn functions_are_called_through_pointers() {
    let text = |pointer: &str| {
        format!(
            ".version 8.0\n.target sm_80\n.address_size 64\n\
             .func (.param .b32 r) plus(.param .b32 x);\n.func (.param .b32 r) minus(.param .b32 x);\n\
             .func nothing();\n.global .align 8 .u64 table[4] = {{plus, minus, 0, nothing}};\n\
             .func nothing() {{ ret; }}\n\
             .func (.param .b32 r) plus(.param .b32 x)\n{{\n.reg .b32 %r<3>;\nld.param.b32 %r1, [x];\nadd.s32 %r2, %r1, 100;\n\
             st.param.b32 [r], %r2;\nret;\n}}\n\
             .func (.param .b32 r) minus(.param .b32 x)\n{{\n.reg .b32 %r<3>;\nld.param.b32 %r1, [x];\nsub.s32 %r2, %r1, 100;\n\
             st.param.b32 [r], %r2;\nret;\n}}\n\
             .visible .entry k(.param .u64 p)\n{{\n.reg .pred %p<3>;\n.reg .b32 %r<9>;\n.reg .b64 %rd<9>;\n\
             ld.param.u64 %rd1, [p];\nmov.u32 %r1, %tid.x;\nmul.wide.u32 %rd2, %r1, 4;\nadd.s64 %rd3, %rd1, %rd2;\n{pointer}\n\
             mov.u32 %r3, 7;\nsetp.ne.u32 %p1, %r1, 5;\n\
             {{\n.param .b32 param0;\nst.param.b32 [param0], %r1;\n.param .b32 retval0;\nst.param.b32 [retval0], %r3;\n\
             proto : .callprototype (.param .b32 _) _ (.param .b32 _);\n@%p1 call (retval0), %rd4, (param0), proto;\n\
             ld.param.b32 %r3, [retval0];\n}}\nst.global.u32 [%rd3], %r3;\nret;\n}}\n"
        )
    };
    let run = |pointer: &str| {
        let module = Module::parse(&text(pointer)).unwrap_or_else(|error| panic!("{error}"));
        let mut device = Device::new();
        let id = device.load(&module).unwrap();
        let out = device.allocate("out", 128).unwrap();
        let launch = Launch::new("k", [1, 1, 1], [32, 1, 1], 0, vec![Arg::Buffer(out)]);
        let outcome = device.launch(id, &launch).unwrap();
        let words = device.read(out).unwrap();
        (
            outcome,
            words.chunks_exact(4).map(|c| i32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect::<Vec<_>>(),
        )
    };
    let loaded = |index: &str| {
        format!(
            "{index}\nmul.wide.u32 %rd5, %r2, 8;\nmov.u64 %rd6, table;\nadd.s64 %rd6, %rd6, %rd5;\nld.global.u64 %rd4, [%rd6];"
        )
    };
    // Lanes call different functions, lane 5 none.
    let (outcome, got) = run(&loaded("and.b32 %r2, %r1, 1;"));
    assert!(outcome.is_clean(), "{outcome}");
    let want = |i: i32| {
        if i == 5 {
            7
        } else if i % 2 == 0 {
            i + 100
        } else {
            i - 100
        }
    };
    assert!((0..32).all(|i| got[i as usize] == want(i)), "{got:?}");
    let (outcome, got) = run("mov.u64 %rd4, minus;");
    assert!(outcome.is_clean() && got[0] == -100, "{outcome}");
    for wrong in ["mov.u32 %r2, 2;", "mov.u32 %r2, 3;"] {
        let (outcome, _) = run(&loaded(wrong));
        let finding = outcome.of_kind(Kind::Trap).next().expect("a call of nothing");
        assert!(finding.to_string().contains("a pointer that is no function"), "{finding}");
    }
}
