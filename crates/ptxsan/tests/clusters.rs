//! Clusters: memory and barriers of other blocks, and how far an arrival reaches.

mod twins;

use ptxsan::{Kind, Schedule};
use twins::{run, setup, twins, wait};

#[test]
fn blocks_of_a_cluster_start_and_end_together() {
    let sync = "barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;\n";
    let body = format!(
        "mov.u32 %r15, %cluster_ctarank;\n xor.b32 %r16, %r15, 1;\n mapa.shared::cluster.u32 %r17, %r1, %r16;\n\
         st.shared.u32 [%r1+64], %r15;\n {sync} ld.shared::cluster.u32 %r18, [%r17+64];\n // end\n {sync}"
    );
    let cluster = setup((32, 2));
    let without_end = body.rsplit_once("// end").unwrap().0;
    for schedule in Schedule::ALL {
        let outcome = run(&body, &cluster, schedule);
        assert!(outcome.is_clean(), "{outcome}");
        let early = body.replacen(sync, "", 1);
        let outcome = run(&early, &cluster, schedule);
        assert!(
            outcome.of_kind(Kind::ClusterLifetime).any(|f| f.detail.contains("may not have started")),
            "{outcome}"
        );
        // Whoever comes first: nothing keeps a block alive while the other reads its memory.
        let outcome = run(without_end, &cluster, schedule);
        assert!(
            outcome.of_kind(Kind::ClusterLifetime).any(|f| f.detail.contains("exited")),
            "{} {outcome}",
            schedule.name()
        );
        // That everyone is there needs no order of memory.
        let (first, last) = body.rsplit_once("arrive.release").unwrap();
        let outcome = run(&format!("{first}arrive.relaxed{last}"), &cluster, schedule);
        assert!(outcome.is_clean(), "{outcome}");
        let relaxed = body.replacen("arrive.release", "arrive.relaxed", 1);
        let outcome = run(&relaxed, &cluster, schedule);
        assert!(outcome.of_kind(Kind::Race).count() > 0, "{outcome}");
    }
    // Rank 1 is done before rank 0 reads.
    let late = format!(
        "{without_end} setp.eq.u32 %p1, %r15, 1;\n @%p1 exit;\n {} ld.shared::cluster.u32 %r18, [%r17+64];\n",
        "add.u32 %r19, %r19, 1;\n".repeat(600)
    );
    let outcome =
        run(&late.replace("add.u32 %r19, %r19, 1", "add.u32 %r19, %r15, 1"), &cluster, Schedule::RoundRobin);
    assert!(outcome.of_kind(Kind::ClusterLifetime).any(|f| f.detail.contains("has exited")), "{outcome}");
}

#[test]
fn barriers_of_other_blocks_are_fenced() {
    // Thread 0 of each block arrives at the other's barrier, which waits for it.
    let sync = "barrier.cluster.arrive.relaxed.aligned;\n barrier.cluster.wait.acquire.aligned;\n";
    let body = format!(
        "add.u32 %r12, %r1, 8256;\n @%p0 mbarrier.init.shared::cta.b64 [%r12], 1;\n @%p0 fence.mbarrier_init.release.cluster;\n\
         bar.warp.sync -1;\n {sync} mov.u32 %r15, %cluster_ctarank;\n xor.b32 %r16, %r15, 1;\n mapa.shared::cluster.u32 %r17, %r12, %r16;\n\
         @%p0 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r17];\n {} {sync}",
        wait("%r12", 0, "WAIT")
    );
    twins(
        &body,
        &setup((32, 2)),
        &[(
            "@%p0 fence.mbarrier_init.release.cluster;\n",
            "",
            Kind::Mbarrier,
            &["may not be initialised yet", "fence.mbarrier_init"],
        )],
    );
    // The block's own threads are of the cluster, too.
    twins(&body.replace("bar.warp.sync -1;\n", ""), &setup((32, 2)), &[]);
}

#[test]
fn asynchronous_stores_report_to_the_receiver() {
    let sync = "barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;\n";
    let ask = wait("%r2", 0, "WAIT");
    let body = format!(
        "@%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 256;\n {sync} mov.u32 %r15, %cluster_ctarank;\n xor.b32 %r16, %r15, 1;\n\
         mad.lo.u32 %r10, %r0, 8, %r1;\n mapa.shared::cluster.u32 %r17, %r10, %r16;\n mapa.shared::cluster.u32 %r18, %r2, %r16;\n\
         st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%r17], {{%r0, %r15}}, [%r18];\n\
         {ask} ld.shared.v2.u32 {{%r19, %r20}}, [%r10];\n setp.ne.u32 %p4, %r20, %r16;\n @%p4 trap;\n {sync}"
    );
    twins(
        &body,
        &setup((32, 2)),
        &[
            (&ask, "", Kind::AsyncRace, &["bulk copy's write"]),
            ("[%r2], 256", "[%r2], 264", Kind::Deadlock, &["8 bytes missing"]),
        ],
    );
}

#[test]
fn multicast_reaches_every_block_of_the_mask() {
    let sync = "barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;\n";
    let body = format!(
        "@%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 128;\n {sync} mov.u32 %r15, %cluster_ctarank;\n setp.eq.u32 %p1, %r15, 0;\n\
         and.pred %p1, %p1, %p0;\n mov.u32 %r21, 3;\n cvt.u16.u32 %h1, %r21;\n\
         @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r1], [%rd1], 128, [%r2], %h1;\n\
         {} mad.lo.u32 %r10, %r0, 4, %r1;\n ld.shared.u32 %r11, [%r10];\n setp.ne.u32 %p4, %r11, 0x01010101;\n @%p4 trap;\n {sync}",
        wait("%r2", 0, "WAIT")
    );
    let body = format!(".reg .b16 %h<4>;\n{body}");
    twins(
        &body,
        &setup((32, 2)),
        &[
            ("mov.u32 %r21, 3", "mov.u32 %r21, 1", Kind::Deadlock, &["block 1", "128 bytes missing"]),
            (&wait("%r2", 0, "WAIT"), "", Kind::AsyncRace, &["bulk copy's write"]),
        ],
    );
}

/// Rank 0 stores a word into its own shared memory and arrives at the barrier of rank 1, which waits for it and reads the word.
fn message(arrive: &str, wait: &str) -> String {
    let sync = "barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;\n";
    format!(
        "mov.u32 %r15, %cluster_ctarank;\n xor.b32 %r16, %r15, 1;\n mapa.shared::cluster.u32 %r17, %r1, %r16;\n\
         mapa.shared::cluster.u32 %r18, %r2, %r16;\n {sync} setp.eq.u32 %p1, %r15, 0;\n @!%p0 bra END;\n @!%p1 bra READER;\n\
         st.shared.u32 [%r1+64], %r15;\n {arrive} bra END;\n\
         READER:\n WAIT: {wait}\n @!%p9 bra WAIT;\n // after\n ld.shared::cluster.u32 %r19, [%r17+64];\n END:\n {sync}"
    )
}

const RELEASE: &str = "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r18];\n";
const ACQUIRE: &str = "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p9, [%r2], 0;";

#[test]
fn an_arrival_shows_a_message_as_far_as_its_scope_reaches() {
    let words: &[&str] = &["read of 4 bytes", "reaches no further than its block", "release.cluster"];
    twins(
        &message(RELEASE, ACQUIRE),
        &setup((32, 2)),
        &[
            (
                "arrive.release.cluster.shared::cluster",
                "arrive.release.cta.shared::cluster",
                Kind::Race,
                words,
            ),
            // What there is without a word: the block.
            ("arrive.release.cluster.shared::cluster", "arrive.shared::cluster", Kind::Race, words),
            ("parity.acquire.cluster", "parity.acquire.cta", Kind::Race, words),
            ("parity.acquire.cluster", "parity", Kind::Race, words),
            (
                "arrive.release.cluster.shared",
                "arrive.relaxed.cluster.shared",
                Kind::Race,
                &["read of 4 bytes"],
            ),
            ("parity.acquire.cluster", "parity.relaxed.cluster", Kind::Race, &["read of 4 bytes"]),
        ],
    );
}

#[test]
fn a_fence_and_a_relaxed_arrival_are_a_release() {
    let relaxed = "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%r18];\n";
    let asking = "mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 %p9, [%r2], 0;";
    let body = message(&format!("fence.acq_rel.cluster;\n {relaxed}"), asking);
    let body = body.replace("// after", "fence.acq_rel.gpu;");
    twins(
        &body,
        &setup((32, 2)),
        &[
            ("fence.acq_rel.cluster;", "", Kind::Race, &["read of 4 bytes"]),
            ("fence.acq_rel.cluster;", "fence.acq_rel.cta;", Kind::Race, &["read of 4 bytes"]),
            ("fence.acq_rel.gpu;", "", Kind::Race, &["read of 4 bytes"]),
        ],
    );
}

/// Rank 0 reads a word of its own and says so to rank 1, which then overwrites it: that is how slots are freed, and no scope is needed. The
/// arrival is.
#[test]
fn an_arrival_without_scope_frees_what_was_read() {
    let asking = "mbarrier.try_wait.parity.shared::cta.b64 %p9, [%r2], 0;";
    let body = message("mbarrier.arrive.shared::cluster.b64 _, [%r18];\n", asking);
    let body = body
        .replace("st.shared.u32 [%r1+64], %r15;", "ld.shared.u32 %r20, [%r1+64];\n // freed")
        .replace("ld.shared::cluster.u32 %r19, [%r17+64];", "st.shared::cluster.u32 [%r17+64], %r15;");
    // Written before anybody asks for it.
    let body = body.replacen("mov.u32 %r15,", "@%p0 st.shared.u32 [%r1+64], %r0;\n mov.u32 %r15,", 1);
    twins(
        &body,
        &setup((32, 2)),
        &[
            (
                "// freed",
                "st.shared.u32 [%r1+64], %r0;",
                Kind::Race,
                &["write of 4 bytes", "unordered write"],
            ),
            (&format!("WAIT: {asking}\n @!%p9 bra WAIT;"), "", Kind::Race, &["unordered read"]),
        ],
    );
}

/// A block that waits for its reader's arrival may end without a cluster barrier; one that does not wait may be gone when it comes.
#[test]
fn an_arrival_keeps_its_barriers_block_alive() {
    let ask = wait("%r2", 0, "WAIT");
    let body = format!(
        "mov.u32 %r15, %cluster_ctarank;\n xor.b32 %r16, %r15, 1;\n mapa.shared::cluster.u32 %r17, %r1, %r16;\n\
         mapa.shared::cluster.u32 %r18, %r2, %r16;\n st.shared.u32 [%r1+64], %r15;\n bar.warp.sync -1;\n\
         barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;\n @!%p0 bra END;\n\
         ld.shared::cluster.u32 %r19, [%r17+64];\n mbarrier.arrive.shared::cluster.b64 _, [%r18];\n {ask} END:\n"
    );
    twins(&body, &setup((32, 2)), &[(&ask, "", Kind::ClusterLifetime, &["exited"])]);
}

/// A block sends a part of its shared memory to another, which waits for it. That it has been read only a barrier behind that wait tells.
#[test]
fn a_block_outlives_what_it_sends() {
    let sync = "barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;\n";
    let body = format!(
        "@%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 128;\n mad.lo.u32 %r10, %r0, 4, %r1;\n st.shared.u32 [%r10], %r0;\n\
         fence.proxy.async.shared::cta;\n {sync} mov.u32 %r15, %cluster_ctarank;\n xor.b32 %r16, %r15, 1;\n\
         add.u32 %r11, %r1, 4096;\n mapa.shared::cluster.u32 %r17, %r11, %r16;\n mapa.shared::cluster.u32 %r18, %r2, %r16;\n\
         mov.u32 %r19, 128;\n @!%p0 bra SENT;\n\
         cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r17], [%r1], %r19, [%r18];\n SENT:\n\
         {} ld.shared.u32 %r20, [%r10+4096];\n // end\n {sync}",
        wait("%r2", 0, "WAIT")
    );
    let cluster = setup((32, 2));
    let without_end = body.rsplit_once("// end").unwrap().0;
    let mut told = 0;
    for schedule in Schedule::ALL {
        let outcome = run(&body, &cluster, schedule);
        assert!(outcome.is_clean(), "{} {outcome}", schedule.name());
        let outcome = run(without_end, &cluster, schedule);
        told += outcome
            .of_kind(Kind::ClusterLifetime)
            .filter(|f| f.detail.contains("may still read its"))
            .count();
    }
    assert!(told > 0);
    // Where copies take as long as they may, one of the two blocks ends first.
    let outcome = run(without_end, &cluster, Schedule::CopiesLate);
    assert!(!outcome.is_clean(), "{outcome}");
}
