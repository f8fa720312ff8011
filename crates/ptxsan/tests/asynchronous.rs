//! Hopper's asynchronous hazards: each mistake is reported under every schedule, and its clean twin under none.

mod twins;

use ptxsan::{Kind, Schedule};
use twins::{one_block, run, setup, twins, wait};

/// Thread 0 copies 128 bytes into shared memory on barrier %r2.
const LOAD: &str = "
    @!%p0 bra LOADED;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 128;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], 128, [%r2];
LOADED:
";

#[test]
fn bulk_data_read_before_its_phase() {
    let body = format!(
        "{LOAD} {} mad.lo.u32 %r10, %r0, 4, %r1;\n ld.shared.u32 %r11, [%r10];\n",
        wait("%r2", 0, "WAIT")
    );
    let ask = wait("%r2", 0, "WAIT");
    let wrong_parity = wait("%r2", 1, "WAIT");
    twins(
        &body,
        &setup(one_block(32)),
        &[
            (&ask, "", Kind::AsyncRace, &["bulk copy's write", "mbarrier must be waited for"]),
            // A fresh barrier counts as if the phase before had completed.
            (&ask, &wrong_parity, Kind::AsyncRace, &["bulk copy's write"]),
        ],
    );
}

#[test]
fn a_barrier_that_does_not_track_the_copy() {
    let load = LOAD.replace("bra LOADED", "bra LOADED2").replace("LOADED:", "LOADED2:");
    let second = load.replace("[%r1]", "[%r12]").replace("%r2", "%r3");
    let body = format!(
        "add.u32 %r12, %r1, 1024;\n {LOAD} {second} {} {} ld.shared.u32 %r10, [%r1];\n ld.shared.u32 %r11, [%r12];\n",
        wait("%r2", 0, "FIRST"),
        wait("%r3", 0, "SECOND")
    );
    twins(
        &body,
        &setup(one_block(32)),
        &[(&wait("%r3", 0, "SECOND"), "", Kind::AsyncRace, &["bulk copy's write"])],
    );
}

#[test]
fn a_slot_refilled_while_it_is_read() {
    // Warp 1 reads and says so on %r3; thread 0 fills the slot again.
    let body = format!(
        "{LOAD} setp.lt.u32 %p1, %r0, 32;\n @%p1 bra PRODUCER;\n {} ld.shared.u32 %r10, [%r1];\n bar.warp.sync -1;\n \
         and.b32 %r13, %r0, 31;\n setp.eq.u32 %p2, %r13, 0;\n @%p2 mbarrier.arrive.shared::cta.b64 _, [%r3];\n bra DONE;\n\
         PRODUCER:\n @!%p0 bra DONE;\n {} mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 128;\n\
         cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], 128, [%r2];\n {} DONE:\n",
        wait("%r2", 0, "FULL"),
        wait("%r3", 0, "EMPTY"),
        wait("%r2", 1, "AGAIN"),
    );
    let empty = wait("%r3", 0, "EMPTY");
    // Without it the second copy may also be expected in the first phase: that phase must be over.
    let first_only = wait("%r2", 0, "EMPTY");
    twins(
        &body,
        &setup(one_block(64)),
        &[
            (&empty, &first_only, Kind::AsyncRace, &["bulk copy's write", "after an unordered read"]),
            ("bar.warp.sync -1;\n", "", Kind::AsyncRace, &["bulk copy's write"]),
        ],
    );
    // By the letter a proxy fence belongs between the read and the refill; that is asked for in strict mode.
    let mut strict = setup(one_block(64));
    strict.options.strict_proxies = true;
    let fenced = body.replace("bar.warp.sync -1;", "fence.proxy.async.shared::cta;\n bar.warp.sync -1;");
    twins(
        &fenced,
        &strict,
        &[("fence.proxy.async.shared::cta;", "", Kind::ProxyRace, &["read", "fence.proxy.async"])],
    );
}

/// A store of zeros while a copy of ones has not landed: memory is zero still, and neither stores what the other does.
#[test]
fn a_store_does_not_agree_with_a_copy_that_has_not_landed() {
    let body = "mad.lo.u32 %r10, %r0, 4, %r1;\n cp.async.ca.shared.global [%r10], [%rd1], 4;\n mov.u32 %r11, 0;\n\
                cp.async.wait_all;\n st.shared.u32 [%r10], %r11;\n";
    let wait = "cp.async.wait_all;\n";
    twins(
        body,
        &setup(one_block(32)),
        &[(wait, "", Kind::AsyncRace, &["write of 4 bytes", "cp.async.wait_group"])],
    );
}

#[test]
fn copies_are_shown_the_initialisation_in_strict_mode() {
    let body = format!(
        "add.u32 %r4, %r2, 64;\n @%p0 mbarrier.init.shared::cta.b64 [%r4], 1;\n fence.proxy.async.shared::cta;\n bar.sync 0;\n\
         @!%p0 bra ISSUED;\n mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4], 128;\n\
         cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], 128, [%r4];\nISSUED:\n{}",
        wait("%r4", 0, "FULL")
    );
    let fence = "fence.proxy.async.shared::cta;\n";
    let mut strict = setup(one_block(32));
    strict.options.strict_proxies = true;
    twins(
        &body,
        &strict,
        &[(fence, "", Kind::Mbarrier, &["may not be initialised yet for a copy", "fence.mbarrier_init"])],
    );
    // The fence of those who initialised it does as well; hardware needs neither.
    twins(&body.replace(fence, "fence.mbarrier_init.release.cluster;\n"), &strict, &[]);
    twins(&body.replace(fence, ""), &setup(one_block(32)), &[]);
}

#[test]
fn generic_writes_before_bulk_stores() {
    let body = "mad.lo.u32 %r10, %r0, 4, %r1;\n st.shared.u32 [%r10], %r0;\n fence.proxy.async.shared::cta;\n bar.sync 0;\n\
        @!%p0 bra STORED;\n cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r1], 128;\n cp.async.bulk.commit_group;\n\
        cp.async.bulk.wait_group 0;\n ld.global.u32 %r14, [%rd2];\n STORED:\n bar.sync 0;\n st.shared.u32 [%r10], %r0;\n";
    twins(
        body,
        &setup(one_block(32)),
        &[
            (
                "fence.proxy.async.shared::cta;\n",
                "",
                Kind::ProxyRace,
                &["bulk store's read", "fence.proxy.async"],
            ),
            // Another space's fence does not help.
            (
                "fence.proxy.async.shared::cta",
                "fence.proxy.async.global",
                Kind::ProxyRace,
                &["bulk store's read"],
            ),
            // Only the source was waited for.
            ("wait_group 0", "wait_group.read 0", Kind::AsyncRace, &["bulk store's write", "wait_group"]),
            (
                "cp.async.bulk.wait_group 0;\n ld",
                "ld",
                Kind::AsyncRace,
                &["bulk store's read", "wait_group.read"],
            ),
            // One group may still be under way.
            ("wait_group 0", "wait_group 1", Kind::AsyncRace, &["bulk store's read"]),
            ("cp.async.bulk.commit_group;\n", "", Kind::AsyncRace, &["bulk store's read"]),
        ],
    );
}

#[test]
fn groups_belong_to_the_thread_that_made_them() {
    let body = "mad.lo.u32 %r10, %r0, 4, %r1;\n st.shared.u32 [%r10], %r0;\n fence.proxy.async.shared::cta;\n bar.sync 0;\n\
        @%p0 cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r1], 128;\n @%p0 cp.async.bulk.commit_group;\n\
        @%p0 cp.async.bulk.wait_group.read 0;\n bar.sync 0;\n st.shared.u32 [%r10], %r0;\n";
    twins(
        body,
        &setup(one_block(32)),
        &[
            (
                "@%p0 cp.async.bulk.wait_group.read 0;\n bar.sync 0;",
                "cp.async.bulk.wait_group.read 0;",
                Kind::AsyncRace,
                &["bulk store's read"],
            ),
            (
                "@%p0 cp.async.bulk.wait_group.read 0;",
                "",
                Kind::AsyncRace,
                // The store is named, of which a kernel may have several.
                &[
                    "a thread ends",
                    "wait_group.read",
                    "and PTX",
                    "cp.async.bulk.global.shared::cta.bulk_group",
                ],
            ),
        ],
    );
}

#[test]
fn global_memory_across_proxies() {
    let body = format!(
        "@%p0 st.global.u32 [%rd1], %r0;\n fence.proxy.async.global;\n {LOAD} {} ld.shared.u32 %r11, [%r1];\n",
        wait("%r2", 0, "WAIT")
    );
    twins(
        &body,
        &setup(one_block(32)),
        &[
            ("fence.proxy.async.global;", "", Kind::ProxyRace, &["at global", "fence.proxy.async"]),
            ("fence.proxy.async.global", "fence.proxy.async.shared::cta", Kind::ProxyRace, &["at global"]),
        ],
    );
}

#[test]
fn bytes_and_arrivals_are_counted() {
    let body = format!("{LOAD} {} ld.shared.u32 %r11, [%r1];\n", wait("%r2", 0, "WAIT"));
    twins(
        &body,
        &setup(one_block(32)),
        &[
            (
                "[%r2], 128;\n    cp",
                "[%r2], 144;\n    cp",
                Kind::Deadlock,
                &["16 bytes missing", "phase 0", "warp 0"],
            ),
            ("[%rd1], 128", "[%rd1], 112", Kind::Deadlock, &["mbarrier 0x2000", "16 bytes missing"]),
            (
                "    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 128;\n",
                "",
                Kind::Deadlock,
                &["1 of 1 arrivals pending"],
            ),
            (
                "[%rd1], 128, [%r2];",
                "[%rd1], 128, [%r2];\n cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1+1024], [%rd1], 128, [%r2];",
                Kind::Mbarrier,
                &["closed without them"],
            ),
            (
                "[%rd1], 128, [%r2];",
                "[%rd1], 128, [%r2];\n mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r2], 16;",
                Kind::Mbarrier,
                &["16 bytes of mbarrier 0x2000 were never expected"],
            ),
            ("[%rd1], 128", "[%rd1], 120", Kind::BulkCopy, &["multiples of 16"]),
        ],
    );
    let arrivals = "mbarrier.arrive.shared::cta.b64 _, [%r2], 1;\n";
    let body = format!("@!%p0 bra ARRIVED;\n {arrivals} ARRIVED:\n {}", wait("%r2", 0, "WAIT"));
    twins(
        &body,
        &setup(one_block(32)),
        &[
            ("[%r2], 1;", "[%r2], 2;", Kind::Mbarrier, &["2 arrivals", "1 of 1 are pending"]),
            (arrivals, "", Kind::Deadlock, &["1 of 1 arrivals pending, 0 bytes missing", "waiting: warp 0"]),
            (arrivals, "mbarrier.init.shared::cta.b64 [%r2], 1;\n", Kind::Mbarrier, &["initialised again"]),
            (arrivals, "st.shared.u32 [%r2], %r0;\n", Kind::Mbarrier, &["write of 4 bytes over mbarrier"]),
            ("[%r2], 1;", "[%r1], 1;", Kind::Mbarrier, &["no mbarrier is initialised"]),
        ],
    );
}

#[test]
fn initialisation_is_published() {
    // Its own barrier, initialised late by thread 0 and used by the other warp.
    let body = "add.u32 %r12, %r1, 8256;\n @%p0 mbarrier.init.shared::cta.b64 [%r12], 1;\n bar.sync 0;\n setp.eq.u32 %p1, %r0, 32;\n\
        @%p1 mbarrier.arrive.shared::cta.b64 _, [%r12];\n";
    let quiet = [Schedule::RoundRobin, Schedule::CopiesLate];
    let setup = setup(one_block(64));
    for schedule in quiet {
        assert!(run(body, &setup, schedule).is_clean());
        let outcome = run(&body.replace("bar.sync 0;", ""), &setup, schedule);
        let found =
            outcome.of_kind(Kind::Mbarrier).any(|f| f.to_string().contains("may not be initialised yet"));
        assert!(found, "{outcome}");
    }
}

#[test]
fn an_arrival_publishes_its_own_thread_only() {
    let body = format!(
        "setp.lt.u32 %p1, %r0, 32;\n mad.lo.u32 %r10, %r0, 4, %r1;\n @!%p1 bra READER;\n st.shared.u32 [%r10], %r0;\n bar.warp.sync -1;\n\
         @%p0 mbarrier.arrive.shared::cta.b64 _, [%r2];\n bra DONE;\n READER:\n {} ld.shared.u32 %r11, [%r1+28];\n DONE:\n",
        wait("%r2", 0, "WAIT")
    );
    twins(
        &body,
        &setup(one_block(64)),
        &[("bar.warp.sync -1;", "", Kind::Race, &["read of 4 bytes", "unordered write"])],
    );
}

/// A 64×8×16 product of zeros at %r1 (A) and %r1 + 2048 (B), into %f1 to %f4.
const PRODUCT: &str = "
    mad.lo.u32 %r10, %r0, 16, %r1;
    mov.u32 %r11, 0;
    st.shared.v4.u32 [%r10], {%r11, %r11, %r11, %r11};
    st.shared.v4.u32 [%r10+2048], {%r11, %r11, %r11, %r11};
    fence.proxy.async.shared::cta;
    bar.sync 0;
    shr.u32 %r12, %r1, 4;
    or.b32 %r12, %r12, 0x80000;
    add.u32 %r13, %r12, 128;
    mov.b64 %rd10, {%r12, 16};
    mov.b64 %rd11, {%r13, 16};
    setp.ne.u32 %p3, %r11, 0;
    mov.f32 %f1, 0f00000000;
    mov.f32 %f2, 0f00000000;
    mov.f32 %f3, 0f00000000;
    mov.f32 %f4, 0f3f800000;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1,%f2,%f3,%f4}, %rd10, %rd11, 1, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    add.f32 %f5, %f4, %f4;
";

/// Sixteen ones times ones. The last warp overwrites B behind its wait, and what is not 16 is stored outside.
#[test]
fn a_wait_is_for_the_products_of_all_four_warps() {
    let ones = PRODUCT.replace("mov.u32 %r11, 0;", "mov.u32 %r11, 0x3c003c00;");
    let body = format!(
        "{ones} setp.ge.u32 %p5, %r0, 96;\n mad.lo.u32 %r14, %r0, 8, %r1;\n mov.u32 %r15, 0;\n\
         @%p5 st.shared.v2.u32 [%r14+1280], {{%r15, %r15}};\n\
         setp.neu.f32 %p6, %f1, 0f41800000;\n @%p6 st.global.u32 [%rd2+1048576], %r0;\n"
    );
    twins(
        &body,
        &setup(one_block(128)),
        &[("0x3c003c00", "0x3c003c01", Kind::OutOfBounds, &["write of 4 bytes"])],
    );
}

#[test]
fn registers_of_products_in_flight() {
    let product =
        PRODUCT.replace("%rd11, 1, 1", "%rd11, %p4, 1").replace("setp.ne.u32 %p3", "setp.eq.u32 %p4");
    twins(
        &product,
        &setup(one_block(128)),
        &[
            (
                "    wgmma.wait_group.sync.aligned 0;\n",
                "",
                Kind::Wgmma,
                &["accumulator is read", "in flight"],
            ),
            ("wait_group.sync.aligned 0", "wait_group.sync.aligned 1", Kind::Wgmma, &["accumulator is read"]),
            ("    wgmma.commit_group.sync.aligned;\n", "", Kind::Wgmma, &["accumulator is read"]),
            ("    wgmma.fence.sync.aligned;\n", "", Kind::Wgmma, &["wgmma.fence"]),
            (
                "    wgmma.fence.sync.aligned;\n",
                "    wgmma.fence.sync.aligned;\n add.f32 %f2, %f1, %f1;\n",
                Kind::Wgmma,
                &["touched since the last wgmma.fence"],
            ),
            (
                "    add.f32 %f5, %f4, %f4;\n",
                "    mov.f32 %f9, %f4;\n    wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1,%f2,%f3,%f4}, %rd10, %rd11, %p4, 1, 1, 0, 0;\n",
                Kind::Wgmma,
                &["touched since"],
            ),
            (
                "    fence.proxy.async.shared::cta;\n",
                "",
                Kind::ProxyRace,
                &["wgmma's read", "fence.proxy.async"],
            ),
            ("    bar.sync 0;\n", "", Kind::AsyncRace, &["wgmma's read", "after an unordered write"]),
            // Operands overwritten while they are read.
            (
                "    wgmma.wait_group.sync.aligned 0;\n",
                "    st.shared.u32 [%r10], %r11;\n    wgmma.wait_group.sync.aligned 0;\n",
                Kind::AsyncRace,
                &["wgmma's read", "wait_group"],
            ),
            // A warp of the warpgroup stays away.
            (
                "    wgmma.fence.sync.aligned;\n",
                "    setp.ge.u32 %p5, %r0, 96;\n @%p5 exit;\n wgmma.fence.sync.aligned;\n",
                Kind::Wgmma,
                &["of its warpgroup"],
            ),
        ],
    );
}

#[test]
fn registers_of_the_left_operand() {
    let product =
        PRODUCT.replace("%rd10, %rd11, 1, 1, 1, 0, 0", "{%r20,%r21,%r22,%r23}, %rd11, %p4, 1, 1, 0").replace(
            "setp.ne.u32 %p3",
            "mov.u32 %r20, 0;\n mov.u32 %r21, 0;\n mov.u32 %r22, 0;\n mov.u32 %r23, 0;\n setp.eq.u32 %p4",
        );
    twins(
        &product,
        &setup(one_block(128)),
        &[
            (
                "    wgmma.wait_group.sync.aligned 0;\n",
                "    add.u32 %r20, %r20, 1;\n    wgmma.wait_group.sync.aligned 0;\n",
                Kind::Wgmma,
                &["register of A is overwritten"],
            ),
            (
                "    wgmma.fence.sync.aligned;\n",
                "    wgmma.fence.sync.aligned;\n add.u32 %r20, %r20, 1;\n",
                Kind::Wgmma,
                &["register of A was touched"],
            ),
        ],
    );
}

#[test]
fn the_register_pool_is_finite() {
    let mut bounded = setup(one_block(256));
    bounded.bounds = ".maxntid 256, 1, 1\n.minnctapersm 1";
    // 65536 / 256 registers, 255 at most: 255 each.
    let body = "setp.ge.u32 %p1, %r0, 128;\n @%p1 bra CLAIM;\n setmaxnreg.dec.sync.aligned.u32 240;\n bra DONE;\n CLAIM:\n \
        setmaxnreg.inc.sync.aligned.u32 256;\n DONE:\n";
    twins(
        body,
        &bounded,
        &[
            (
                "setmaxnreg.dec.sync.aligned.u32 240;\n",
                "",
                Kind::Deadlock,
                &["setmaxnreg", "pool has 0 registers"],
            ),
            ("u32 256", "u32 240", Kind::Registers, &["255 registers claims 240"]),
        ],
    );
}

#[test]
fn a_programmatic_launch_waits_for_the_one_before() {
    let mut early = setup(one_block(64));
    early.options.programmatic = true;
    let body = "@%p0 griddepcontrol.wait;\n bar.sync 0;\n mul.wide.u32 %rd3, %r0, 4;\n add.s64 %rd3, %rd3, %rd2;\n st.global.u32 [%rd3], %r0;\n";
    twins(
        body,
        &early,
        &[
            ("@%p0 griddepcontrol.wait;\n", "", Kind::LaunchOrder, &["(out+", "griddepcontrol.wait"]),
            // Who has not waited itself must hear of it.
            ("bar.sync 0;\n", "", Kind::LaunchOrder, &["griddepcontrol.wait"]),
        ],
    );
}

/// `test_wait` may say no, and what comes then is reached; asked again it waits for the phase, so that a loop around it ends.
#[test]
fn a_test_may_say_no() {
    let test = "mbarrier.test_wait.parity.shared::cta.b64 %p9, [%r2], 0;\n";
    let once = format!("{LOAD} {test} @!%p9 trap;\n {}", wait("%r2", 0, "WAIT"));
    let said_no = |schedule: &Schedule| !run(&once, &setup(one_block(32)), *schedule).is_clean();
    assert!(Schedule::ALL.iter().any(said_no));
    let looped = format!("{LOAD} AGAIN: {test} @!%p9 bra AGAIN;\n ld.shared.u32 %r11, [%r1];\n");
    for schedule in Schedule::ALL {
        let outcome = run(&looped, &setup(one_block(32)), schedule);
        assert!(outcome.is_clean(), "{outcome}");
    }
}
