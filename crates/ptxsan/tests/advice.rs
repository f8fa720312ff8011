//! What is told of a race is the pair of threads that is furthest apart, and advice that mends it when it is followed.

use ptxsan::{Arg, Device, Finding, Kind, Launch, Module, Outcome, Schedule};

const HEAD: &str = ".version 8.0\n.target sm_90a\n.address_size 64\n";

/// An entry on one buffer of zeros: `%r0` is the thread, `%r1` the thread within the grid, `%rd1` the buffer, `%r2` its own word of `words`.
fn run(body: &str, grid: u32, block: u32, cluster: u32, schedule: Schedule) -> Outcome {
    let text = format!(
        "{HEAD}.visible .entry k(.param .u64 p)\n{{\n.reg .pred %p<4>;\n.reg .b32 %r<16>;\n.reg .b64 %rd<8>;\n\
         .shared .align 16 .b8 words[1024];\nmov.u32 %r0, %tid.x;\nmov.u32 %r3, %ctaid.x;\nmov.u32 %r4, %ntid.x;\n\
         mad.lo.u32 %r1, %r3, %r4, %r0;\nld.param.u64 %rd1, [p];\nmov.u32 %r2, words;\nmad.lo.u32 %r2, %r0, 4, %r2;\n\
         mul.wide.u32 %rd2, %r1, 4;\nadd.u64 %rd2, %rd1, %rd2;\n{body}\nret;\n}}\n"
    );
    let module = Module::parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    let mut device = Device::new();
    let id = device.load(&module).unwrap();
    let buffer = device.upload("x", &[0; 4096]).unwrap();
    let mut launch = Launch::new("k", [grid, 1, 1], [block, 1, 1], 0, vec![Arg::Buffer(buffer)]);
    launch.cluster = [cluster, 1, 1];
    device.launch(id, &launch.with_schedule(schedule, 1)).unwrap()
}

fn only(outcome: &Outcome, kind: Kind) -> &Finding {
    let found: Vec<&Finding> = outcome.of_kind(kind).collect();
    let [finding] = found[..] else { panic!("{outcome}") };
    finding
}

fn advice(finding: &Finding) -> &str {
    finding.advice.as_deref().unwrap_or("")
}

/// Each thread reads its neighbour's word and writes its own: lanes, warps and blocks race by the same two instructions.
#[test]
fn the_widest_race_is_told() {
    let body = "ld.global.u32 %r5, [%rd2+4];\nadd.u32 %r5, %r5, 1;\nst.global.u32 [%rd2], %r5;";
    for schedule in Schedule::ALL {
        let told = |grid: u32, block: u32| {
            let outcome = run(body, grid, block, 1, schedule);
            let finding = only(&outcome, Kind::Race).clone();
            let other = finding.other.clone().unwrap();
            (finding.site.block == other.block, finding.site.thread[0] / 32 == other.thread[0] / 32, finding)
        };
        let (.., lanes) = told(1, 32);
        assert!(advice(&lanes).contains("__syncwarp()"), "{lanes}");
        let (_, same_warp, warps) = told(1, 64);
        assert!(!same_warp && advice(&warps).contains("__syncthreads()"), "{schedule:?} {warps}");
        let (same_block, _, blocks) = told(3, 64);
        assert!(!same_block && !advice(&blocks).contains("__sync"), "{schedule:?} {blocks}");
    }
}

/// Lanes of one warp are all that is seen to race with a store by one thread, but a __syncwarp() mends nothing where other warps read too.
#[test]
fn lanes_of_a_larger_block_are_told_of_its_barrier() {
    let body = "ld.shared.u32 %r5, [words];\nsetp.ne.u32 %p1, %r0, 0;\n@%p1 bra END;\nst.shared.u32 [words], %r0;\nEND:";
    for block in [32, 128] {
        let outcome = run(body, 1, block, 1, Schedule::RoundRobin);
        let told = advice(only(&outcome, Kind::Race));
        assert_eq!(told.contains("__syncthreads()"), block > 32, "{told}");
    }
}

#[test]
fn blocks_of_a_cluster_are_told_of_its_barrier() {
    let body = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\nst.shared.u32 [%r2], %r0;\n\
                xor.b32 %r6, %r3, 1;\nmapa.shared::cluster.u32 %r7, %r2, %r6;\nld.shared::cluster.u32 %r8, [%r7];\n\
                barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;";
    for schedule in Schedule::ALL {
        let outcome = run(body, 2, 32, 2, schedule);
        for finding in outcome.of_kind(Kind::Race) {
            assert!(advice(finding).contains("cluster.sync()"), "{schedule:?} {finding}");
        }
        assert!(outcome.of_kind(Kind::Race).count() > 0, "{outcome}");
    }
}

/// A copy that lands late comes after the read that should have waited for it: the wait is missing then, not a barrier before the copy.
#[test]
fn a_read_that_does_not_wait_is_told_to_wait() {
    let copy = "cp.async.ca.shared.global [%r2], [%rd2], 4;\n";
    let own = run(&format!("{copy}ld.shared.u32 %r5, [%r2];"), 1, 32, 1, Schedule::CopiesLate);
    let own = only(&own, Kind::AsyncRace);
    assert!(advice(own).contains("cp.async.wait_group"), "{own}");
    let others = "xor.b32 %r6, %r2, 4;\nld.shared.u32 %r5, [%r6];";
    for schedule in Schedule::ALL {
        let outcome = run(&format!("{copy}{others}"), 1, 64, 1, schedule);
        let finding = only(&outcome, Kind::AsyncRace);
        assert!(advice(finding).contains("cp.async.wait_group"), "{schedule:?} {finding}");
    }
}
