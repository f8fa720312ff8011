//! Hostile text and hostile kernels: an error or a finding, never a panic, never for ever.

use proptest::prelude::*;
use ptxsan::{Arg, Device, Error, Kind, Launch, Module};
use std::time::{Duration, Instant};

const FIXTURES: [&str; 3] = [
    include_str!("fixtures/basics.ptx"),
    include_str!("fixtures/hazards.ptx"),
    include_str!("fixtures/tensor.ptx"),
];

#[test]
fn unsupported_instructions_are_named_with_their_line() {
    let text = ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry k()\n{\ntcgen05.fence::before_thread_sync;\nret;\n}";
    match Module::parse(text) {
        Err(Error::Unsupported { line, instruction, .. }) => {
            assert_eq!((line, instruction.as_str()), (6, "tcgen05.fence::before_thread_sync"));
        }
        other => panic!("{:?}", other.err()),
    }
}

#[test]
fn a_modifier_that_nobody_knows_is_refused() {
    let with = |modifier: &str| {
        Module::parse(&format!(
            ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 p)\n{{\n.reg .b64 %a;\n.reg .b32 %r;\n\
             ld.param.u64 %a, [p];\nld{modifier}.u32 %r, [%a];\nret;\n}}"
        ))
    };
    for known in [".global", ".global.nc.L1::no_allocate.L2::128B", ".relaxed.gpu.global", ".weak.global.ca"]
    {
        assert!(with(known).is_ok(), "{known}: {:?}", with(known).err());
    }
    let error = with(".global.nocache").err().unwrap().to_string();
    assert!(error.contains("9") && error.contains("`.nocache`"), "{error}");
}

#[test]
fn loops_without_end_spend_their_budget() {
    let text = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k()\n{\nL:\nbra L;\n}";
    let module = Module::parse(text).unwrap();
    let mut device = Device::new();
    let id = device.load(&module).unwrap();
    let mut launch = Launch::new("k", [1000, 1, 1], [64, 1, 1], 0, vec![]);
    launch.options.instruction_budget = 10_000;
    // The budget is the launch's, not a block's; how many blocks run at once changes nothing.
    for parallel in [false, true] {
        launch.options.parallel = parallel;
        let outcome = device.launch(id, &launch).unwrap();
        assert_eq!(outcome.findings[0].kind, Kind::Budget);
        assert!(outcome.findings[0].detail.contains("never ends"), "{outcome}");
        assert_eq!((outcome.findings.len(), outcome.warp_instructions), (1, 10_000), "{outcome}");
    }
}

#[test]
fn blocks_whose_size_wraps_around_are_refused() {
    let module =
        Module::parse(".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k()\n{\nret;\n}")
            .unwrap();
    let mut device = Device::new();
    let id = device.load(&module).unwrap();
    // The products do not fit into 64 bits.
    for block in
        [[1 << 31, 1 << 31, 4], [u32::MAX, u32::MAX, u32::MAX], [u32::MAX, u32::MAX, 64], [1025, 1, 1]]
    {
        let refused = device.launch(id, &Launch::new("k", [1, 1, 1], block, 0, vec![]));
        assert!(matches!(refused, Err(Error::Launch { .. })), "{block:?}");
    }
}

#[test]
fn recursion_and_huge_declarations_are_refused() {
    let head = ".version 8.0\n.target sm_80\n.address_size 64\n";
    let recursive = format!(
        "{head}.func f()\n{{\ncall.uni f, ();\nret;\n}}\n.visible .entry k()\n{{\ncall.uni f, ();\nret;\n}}"
    );
    assert!(matches!(Module::parse(&recursive), Err(Error::Unsupported { .. })));
    assert!(Module::parse(&format!("{head}.global .b8 x[999999999999];")).is_err());
    assert!(Module::parse(&format!("{head}.visible .entry k()\n{{{}", "{".repeat(100_000))).is_err());
    // A register range costs nothing until it is used.
    let wide = format!(
        "{head}.visible .entry k()\n{{\n.reg .b32 %r<4000000000>;\nmov.u32 %r3999999999, 1;\nret;\n}}"
    );
    assert!(Module::parse(&wide).is_ok());
    let local = format!("{head}.visible .entry k()\n{{\n.local .b8 x[268000000];\nret;\n}}");
    let module = Module::parse(&local).unwrap();
    let mut device = Device::new();
    let id = device.load(&module).unwrap();
    assert!(device.launch(id, &Launch::new("k", [1, 1, 1], [32, 1, 1], 0, vec![])).is_err());
}

/// As templates make them: what is looked up is looked up by name, not in all of them for each.
#[test]
fn a_module_may_have_thousands_of_entries() {
    let head = ".version 8.0\n.target sm_80\n.address_size 64\n";
    let entries: String = (0..20_000).map(|i| format!(".visible .entry k{i}() {{ ret; }}\n")).collect();
    let start = Instant::now();
    let module = Module::parse(&format!("{head}{entries}")).unwrap();
    assert_eq!(module.entries().count(), 20_000);
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
}

/// Parses; what parses is launched with a small budget.
fn survive(text: &str) {
    let Ok(module) = Module::parse(text) else { return };
    let entries: Vec<String> = module.entries().map(str::to_owned).collect();
    for entry in entries {
        let mut device = Device::new();
        let id = device.load(&module).unwrap();
        let buffer = device.upload("buffer", &[1; 4096]).unwrap();
        let args = module
            .parameters(&entry)
            .unwrap()
            .into_iter()
            .map(|bytes| match bytes {
                8 => Arg::Buffer(buffer),
                4 => Arg::I32(3),
                n => Arg::Bytes(vec![0; n]),
            })
            .collect();
        let mut launch = Launch::new(&entry, [2, 1, 1], [48, 1, 1], 64, args);
        launch.options.instruction_budget = 20_000;
        let _ = device.launch(id, &launch);
        let _ = module.sync_points(&entry).unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_text_is_read_or_refused(text in "\\PC{0,300}") {
        survive(&text);
    }

    #[test]
    fn cut_and_shuffled_kernels_do_no_harm(
        which in 0..FIXTURES.len(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), 0..4u8), 1..6),
    ) {
        let mut lines: Vec<String> = FIXTURES[which].lines().map(str::to_owned).collect();
        for (a, b, kind) in edits {
            let (a, b) = (a.index(lines.len()), b.index(lines.len()));
            match kind {
                0 => { lines.remove(a); }
                1 => lines.swap(a, b),
                2 => lines[a] = lines[b].clone(),
                // Another register, another number.
                _ => lines[a] = lines[a].replace('1', "2").replace("%rd", "%r"),
            }
        }
        survive(&lines.join("\n"));
    }
}
