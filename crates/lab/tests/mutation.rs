//! The checker checked: synchronisations are taken out of two right kernels, one at a time, and must be missed.
//!
//! `evosdpa sanitize --mutation-score` does it for all kernels, in more forms and under every schedule.

use evosdpa_kernels::Registry;
use evosdpa_lab::{
    device::Sim,
    mutation::{self, Fate, Schedule},
};

/// The share of deletions that matter which must be noticed.
const FLOOR: f64 = 0.95;

/// Why a synchronisation may be missing without anything standing in for it.
const DID_NOTHING: [&str; 3] = [
    "every group that it closes is empty",
    "all copies that it waits for have been waited for already",
    "it orders no two conflicting accesses that were not ordered before",
];

#[test]
fn a_missing_synchronisation_is_noticed() {
    let sim = Sim::open(Registry::embedded().unwrap()).unwrap();
    for (kernel, least) in
        [("sdpa_v2b", 5), ("sdpa_fp8_stage_c[USE_KV_LUT=1 NUM_PRODUCER_WARPS=1 STAGES=3]", 8)]
    {
        let subject = mutation::subjects(&sim, &[kernel.to_owned()]).unwrap().remove(0);
        let schedules = [Schedule::RoundRobin, Schedule::ConsumerLate];
        let row = mutation::score(&sim, &subject, &schedules, &|_| ()).unwrap();
        assert!(row.score.unmutated_findings.is_empty(), "{}", row.score);
        assert!(row.noticed >= least && row.score.share() >= FLOOR, "{}", row.score);
        // What is called redundant did nothing, or names another synchronisation that does its work.
        for deletion in &row.score.deletions {
            let Fate::Redundant { reason } = &deletion.fate else { continue };
            let others = row.score.deletions.iter().filter(|other| other.point.id != deletion.point.id);
            let stands_in = others.into_iter().any(|other| reason.ends_with(&other.point.to_string()));
            assert!(stands_in || DID_NOTHING.contains(&reason.as_str()), "{deletion}");
        }
    }
}
