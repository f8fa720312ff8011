//! Kernels of a few instructions, each with its mistakes: what is clean has no finding, every mistake has one under every schedule.

// Not every test program uses all of it.
#![allow(dead_code)]

use ptxsan::{Arg, Device, Kind, Launch, Module, Options, Outcome, Schedule};

/// What every kernel here starts with. Threads: %r0; data in shared memory at %r1, barriers at %r2 and %r3; global `in` and `out`
/// at %rd1 and %rd2. Both barriers take one arrival.
pub(crate) const START: &str = "
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, smem;
    add.u32 %r2, %r1, 8192;
    add.u32 %r3, %r2, 8;
    ld.param.u64 %rd1, [in];
    ld.param.u64 %rd2, [out];
    setp.eq.u32 %p0, %r0, 0;
    @!%p0 bra READY;
    mbarrier.init.shared::cta.b64 [%r2], 1;
    mbarrier.init.shared::cta.b64 [%r3], 1;
    fence.mbarrier_init.release.cluster;
READY:
    bar.sync 0;
";

/// Waits for a parity of the barrier in a register.
pub(crate) fn wait(barrier: &str, parity: u32, label: &str) -> String {
    format!(
        "{label}: mbarrier.try_wait.parity.shared::cta.b64 %p9, [{barrier}], {parity};\n @!%p9 bra {label};\n"
    )
}

pub(crate) struct Setup {
    pub(crate) threads: u32,
    pub(crate) cluster: u32,
    pub(crate) options: Options,
    pub(crate) bounds: &'static str,
}

pub(crate) const fn one_block(threads: u32) -> (u32, u32) {
    (threads, 1)
}

pub(crate) fn setup((threads, cluster): (u32, u32)) -> Setup {
    Setup {
        threads,
        cluster,
        options: Options { instruction_budget: 1_000_000, ..Options::default() },
        bounds: "",
    }
}

pub(crate) fn run(body: &str, setup: &Setup, schedule: Schedule) -> Outcome {
    let text = format!(
        ".version 8.6\n.target sm_90a\n.address_size 64\n.extern .shared .align 1024 .b8 smem[];\n\
         .visible .entry k(.param .u64 in, .param .u64 out)\n{}\n{{\n\
         .reg .pred %p<16>;\n.reg .b32 %r<64>;\n.reg .b64 %rd<32>;\n.reg .f32 %f<64>;\n{START}{body}\n ret;\n}}",
        setup.bounds
    );
    let module = Module::parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    let mut device = Device::new();
    let id = device.load(&module).unwrap();
    let input = device.upload("in", &[1; 4096]).unwrap();
    let output = device.upload("out", &[0; 4096]).unwrap();
    let args = vec![Arg::Buffer(input), Arg::Buffer(output)];
    let mut launch = Launch::new("k", [setup.cluster, 1, 1], [setup.threads, 1, 1], 16 * 1024, args);
    launch.cluster = [setup.cluster, 1, 1];
    launch.options = Options { schedule, seed: 5, ..setup.options.clone() };
    device.launch(id, &launch).unwrap()
}

/// The clean body has no finding. With each change there is one under every schedule, and under one of them at least it is of the
/// kind and its text has all the words: whether a wait that is missing shows as a race or as a value never written depends on who is
/// first.
pub(crate) fn twins(clean: &str, setup: &Setup, mistakes: &[(&str, &str, Kind, &[&str])]) {
    for schedule in Schedule::ALL {
        let outcome = run(clean, setup, schedule);
        assert!(outcome.is_clean(), "{} {outcome}", schedule.name());
    }
    for (from, to, kind, words) in mistakes {
        assert_eq!(clean.matches(from).count(), 1, "`{from}`");
        let wrong = clean.replace(from, to);
        let is_meant = |text: &str| words.iter().all(|word| text.contains(word));
        let mut said = Vec::new();
        for schedule in Schedule::ALL {
            let outcome = run(&wrong, setup, schedule);
            assert!(!outcome.is_clean(), "`{from}` → `{to}` is not noticed under {}", schedule.name());
            said.extend(outcome.findings);
        }
        let found = said.iter().any(|f| f.kind == *kind && is_meant(&f.to_string()));
        let said: Vec<String> = said.iter().map(ToString::to_string).collect();
        assert!(found, "`{from}` → `{to}`: no {kind:?} with {words:?}, but {}", said.join("\n"));
    }
}
