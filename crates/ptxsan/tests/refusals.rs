//! What cannot be run is refused by name, and alone; grids that synchronise run.

use ptxsan::{Arg, Device, Error, Kind, Launch, Module, Outcome, Schedule};

const PTX: &str = include_str!("fixtures/refusals.ptx");

#[test]
fn one_kernel_that_cannot_be_run_does_not_refuse_its_module() {
    let module = Module::parse(PTX).unwrap();
    let entries: Vec<&str> = module.entries().collect();
    assert_eq!(entries, ["grid_sync", "grid_without_sync", "plain"]);
    let refused: Vec<(&str, String)> = module.refused().map(|(name, why)| (name, why.to_string())).collect();
    assert_eq!(refused.len(), 2, "{refused:?}");
    let why = |entry: &str| &refused.iter().find(|(name, _)| *name == entry).unwrap().1;
    assert!(why("textured").contains("`tex.1d.v4.f32.s32` is not supported: textures and surfaces"));
    assert!(why("through_pointer").contains("function pointers"), "{}", why("through_pointer"));
    // The line of the source, which is what its writer has; nobody has seen the PTX that a compiler made of it.
    for entry in ["textured", "through_pointer"] {
        assert!(
            why(entry).starts_with("refusals.cu:") && why(entry).contains("(PTX line "),
            "{}",
            why(entry)
        );
    }

    let mut device = Device::new();
    let id = device.load(&module).unwrap();
    let out = device.allocate("out", 128).unwrap();
    let mut launch = |entry: &str| {
        device.launch(id, &Launch::new(entry, [1, 1, 1], [32, 1, 1], 0, vec![Arg::Buffer(out)]))
    };
    assert!(launch("plain").unwrap().is_clean());
    assert!(matches!(launch("through_pointer"), Err(Error::Unsupported { .. })));
    assert!(matches!(launch("nothing"), Err(Error::NoSuchEntry { .. })));
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
