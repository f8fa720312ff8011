use super::*;
use crate::gate::{GateResult, Verdict};

const MEMCHECK: &str = include_str!("../../../tests/logs/memcheck_write.txt");
const MEMCHECK_OLD: &str = include_str!("../../../tests/logs/memcheck_2020.txt");
const RACECHECK: &str = include_str!("../../../tests/logs/racecheck_warning.txt");
const INITCHECK: &str = include_str!("../../../tests/logs/initcheck_read.txt");
const SYNCCHECK: &str = include_str!("../../../tests/logs/synccheck_divergent.txt");
const CLEAN: &str = include_str!("../../../tests/logs/racecheck_clean.txt");
const NO_CUDA: &str = include_str!("../../../tests/logs/no_cuda_2025.txt");

fn verdict(log: &str, ran: &Ran) -> GateResult {
    Log::read(log).verdict(Tool::Memcheck, ran)
}

#[test]
fn an_invalid_write_is_named_with_kernel_line_and_thread() {
    let log = Log::read(MEMCHECK);
    assert_eq!(log.incidents.len(), 2, "{log:?}");
    let write = &log.incidents[0];
    assert_eq!(write.what, "Invalid __global__ write of size 2 bytes");
    assert_eq!(write.kernel.as_deref(), Some("my_sdpa"));
    assert_eq!(write.location.as_deref(), Some("my_sdpa.cu:71"));
    assert_eq!(write.thread.as_deref(), Some("thread (31,0,0) in block (4,0,0)"));
    assert_eq!(write.times, 2);
    assert!(!write.detail.iter().any(|line| line.contains("Host Frame")), "{write:?}");
    let result = verdict(MEMCHECK, &Ran::Yes);
    assert!(result.verdict.is_fail());
    assert!(result.detail.contains("ERROR SUMMARY: 3 errors"), "{}", result.detail);
    assert!(result.detail.contains("in my_sdpa at my_sdpa.cu:71 by thread (31,0,0)"), "{}", result.detail);
}

#[test]
fn older_versions_put_the_kernel_after_the_address() {
    let log = Log::read(MEMCHECK_OLD);
    assert_eq!(log.incidents[0].kernel.as_deref(), Some("kernel(int*)"));
    assert_eq!(log.incidents[0].location, None);
    assert_eq!(log.incidents[1].kernel.as_deref(), Some("ns::kernel(int*)"));
    assert_eq!(log.incidents[1].location.as_deref(), Some("old.cu:12"));
}

#[test]
fn a_single_hazard_fails_even_as_a_warning() {
    let log = Log::read(RACECHECK);
    assert_eq!(log.summaries[0].0, 1);
    let race = &log.incidents[0];
    assert_eq!(race.what, "Warning: Race reported between Read access");
    assert_eq!(race.kernel.as_deref(), Some("sdpa(SdpaParams)"));
    assert_eq!(race.location.as_deref(), Some("sdpa.cu:88"));
    assert_eq!(race.detail, ["and Write access at sdpa(SdpaParams)+0x200 in sdpa.cu:80 [4096 hazards]"]);
    assert!(log.verdict(Tool::Racecheck, &Ran::Yes).verdict.is_fail());
}

#[test]
fn uninitialised_reads_and_divergent_barriers_are_found() {
    let log = Log::read(INITCHECK);
    assert_eq!(log.incidents[0].what, "Uninitialized __global__ memory read of size 16 bytes");
    assert_eq!(log.incidents[0].thread.as_deref(), Some("thread (0,0,0) in block (0,0,0)"));
    let log = Log::read(SYNCCHECK);
    assert_eq!((log.incidents.len(), log.incidents[0].times), (1, 3));
    assert!(log.incidents[0].what.starts_with("Barrier error detected"));
    assert!(log.verdict(Tool::Synccheck, &Ran::Yes).verdict.is_fail());
}

#[test]
fn a_pass_needs_one_clean_summary_and_a_kernel_that_ran() {
    assert!(verdict(CLEAN, &Ran::Yes).verdict.is_pass());
    let wrong = verdict(CLEAN, &Ran::Wrong("max error 3".to_owned()));
    assert!(wrong.verdict.is_pass() && wrong.detail.contains("its answer is wrong: max error 3"));

    let unavailable = |log: &str, ran: &Ran, expected: &str| {
        let result = verdict(log, ran);
        let Verdict::Unavailable(why) = &result.verdict else { panic!("{result:?}") };
        assert!(why.contains(expected), "{why}");
    };
    unavailable(CLEAN, &Ran::No("it masks full, not causal".to_owned()), "did not run: it masks full");
    unavailable(NO_CUDA, &Ran::No("no CUDA driver".to_owned()), "no CUDA driver");
    unavailable(NO_CUDA, &Ran::Yes, "terminated before first instrumented API call");
    unavailable("", &Ran::Yes, "the log is empty");

    let twice = format!("{CLEAN}{CLEAN}");
    assert!(verdict(&twice, &Ran::Yes).verdict.is_fail(), "two summaries: one process too many was checked");
    // A log that was cut before its summary keeps what it found.
    let cut = MEMCHECK.split("ERROR SUMMARY").next().unwrap().trim_end_matches("========= ");
    assert!(verdict(cut, &Ran::Yes).verdict.is_fail());
    let odd = CLEAN.replace("0 hazards", "some hazards");
    assert!(verdict(&odd, &Ran::Yes).verdict.is_fail(), "a summary that cannot be read is not clean");
}

#[test]
fn tools_have_names() {
    for tool in Tool::ALL {
        assert_eq!(tool.name().parse::<Tool>().unwrap(), tool);
    }
    assert!("racechek".parse::<Tool>().unwrap_err().to_string().contains("did you mean `racecheck`"));
}
