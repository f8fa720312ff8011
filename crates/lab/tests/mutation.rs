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
        // What is called redundant says why.
        for deletion in &row.score.deletions {
            if let Fate::Redundant { reason } = &deletion.fate {
                assert!(reason.len() > 20, "{deletion}");
            }
        }
    }
}
