//! docs/hazards.md is what the tool prints today: each hazard of `fixtures/hopper_hazards.cu` is found under every schedule, with the places that the page
//! names, and its right twin under none. `PTXSAN_WRITE=1 cargo test -p ptxsan --test hazard_table` writes the page anew.

use std::fmt::Write;

use ptxsan::finding::merge;
use ptxsan::{Arg, Device, Finding, Launch, Module, Schedule, Site};

const PTX: &str = include_str!("fixtures/hopper_hazards.ptx");
const PAGE: &str = "docs/hazards.md";

/// A hazard: what it is, its kernel, and how that is launched.
struct Hazard {
    pattern: &'static str,
    entry: &'static str,
    threads: u32,
    cluster: u32,
    programmatic: bool,
}

const fn hazard(pattern: &'static str, entry: &'static str, threads: u32) -> Hazard {
    Hazard { pattern, entry, threads, cluster: 1, programmatic: false }
}

const fn in_cluster(pattern: &'static str, entry: &'static str) -> Hazard {
    Hazard { cluster: 2, ..hazard(pattern, entry, 32) }
}

const SECTIONS: &[(&str, &[Hazard])] = &[
    (
        "Generic and async proxy",
        &[
            hazard(
                "threads write, a bulk store reads, no `fence.proxy.async` between",
                "write_then_bulk_store",
                32,
            ),
            hazard("threads write, `wgmma` reads, no `fence.proxy.async` between", "write_then_wgmma", 128),
            hazard("bulk data read before its phase is over", "read_before_phase", 32),
            hazard("only a later copy waited for: copies do not land in order", "wait_for_other_copy", 32),
            hazard("a slot refilled while threads still read it", "refill_while_read", 64),
            hazard("a slot refilled while `wgmma` still reads it", "refill_under_wgmma", 128),
        ],
    ),
    (
        "Registers of `wgmma`",
        &[
            hazard("accumulator read before `wait_group`", "accumulator_read_early", 128),
            hazard("accumulator written, no `wgmma.fence` before the product", "accumulator_not_fenced", 128),
            hazard("A fragment overwritten before `wait_group`", "fragment_overwritten", 128),
            hazard("a warp of the warpgroup is missing", "warps_apart", 128),
        ],
    ),
    (
        "mbarriers",
        &[
            hazard("more bytes expected than are copied", "too_many_bytes_expected", 32),
            hazard("too few arrivals", "too_few_arrivals", 32),
            hazard("too many arrivals: a phase ends while others still read", "too_many_arrivals", 96),
            hazard("wrong parity", "wrong_parity", 32),
            hazard("a wait that nothing can end", "never_ends", 32),
            hazard("initialised again while in use", "initialised_again", 32),
            hazard("used by another thread before the initialisation is published", "init_not_published", 64),
            in_cluster("used by another block, no `fence.mbarrier_init`", "init_not_fenced"),
        ],
    ),
    (
        "Bulk stores",
        &[
            hazard("source overwritten before `wait_group.read`", "source_overwritten", 32),
            hazard("result read before `wait_group`", "result_read_early", 32),
        ],
    ),
    (
        "Clusters",
        &[
            in_cluster("a peer's memory before it has started", "peer_not_started"),
            in_cluster("a peer's memory after it may have exited", "peer_may_have_exited"),
            in_cluster("a message passed by an arrival without `.cluster`", "message_without_scope"),
            in_cluster("a message passed by a relaxed cluster barrier", "relaxed_cluster_barrier"),
        ],
    ),
    (
        "Registers of warpgroups, programmatic launches",
        &[
            hazard("`setmaxnreg` beyond the pool, nobody gives registers back", "pool_exceeded", 384),
            Hazard {
                programmatic: true,
                ..hazard("global memory before `griddepcontrol.wait`", "before_the_wait", 32)
            },
        ],
    ),
];

/// The findings of all schedules together; each of them must have some, if the kernel is wrong.
fn findings(module: &Module, hazard: &Hazard, is_right: bool) -> Vec<Finding> {
    let entry = format!("_Z{}{}ILb{}EEvPKiPi", hazard.entry.len(), hazard.entry, u8::from(is_right));
    let mut all = Vec::new();
    for schedule in Schedule::ALL {
        let mut device = Device::new();
        let id = device.load(module).unwrap();
        let (input, output) =
            (device.upload("in", &[0; 4096]).unwrap(), device.upload("out", &[0; 4096]).unwrap());
        let args = vec![Arg::Buffer(input), Arg::Buffer(output)];
        let mut launch = Launch::new(&entry, [hazard.cluster, 1, 1], [hazard.threads, 1, 1], 0, args)
            .with_schedule(schedule, 3);
        launch.cluster = [hazard.cluster, 1, 1];
        launch.options.programmatic = hazard.programmatic;
        launch.options.instruction_budget = 1_000_000;
        let outcome = device.launch(id, &launch).unwrap();
        assert_eq!(outcome.is_clean(), is_right, "{entry} under {}: {outcome}", schedule.name());
        merge(&mut all, outcome.findings);
    }
    all
}

/// The line of the kernel itself, not of what is inlined into it.
fn line(site: &Site) -> String {
    let place = site.source.as_deref().unwrap_or_default();
    format!("`{}`", place.split_whitespace().next().unwrap_or_default())
}

fn page() -> String {
    let module = Module::parse(PTX).unwrap();
    let mut page = String::from(
        "# Hopper's asynchronous hazards\n\n\
         What `ptxsan run tests/fixtures/hopper_hazards.cu --schedule all` says of each: the first finding, where it is and what the other side is. Every one is\n\
         found under every schedule, and its right twin has no finding under any; `tests/hazard_table.rs` holds this page to that.\n\
         Shorter patterns, each with several mistakes, are in `tests/asynchronous.rs` and `tests/clusters.rs`.\n",
    );
    for (title, hazards) in SECTIONS {
        let _ =
            write!(page, "\n## {title}\n\n| pattern | verdict | here | other side |\n|---|---|---|---|\n");
        for hazard in *hazards {
            let all = findings(&module, hazard, false);
            findings(&module, hazard, true);
            let first = &all[0];
            let other = first.other.as_ref().map_or_else(|| "–".to_owned(), line);
            let detail = first.detail.replace('|', "\\|");
            let _ = writeln!(
                page,
                "| {} | **{}**: {detail} | {} | {other} |",
                hazard.pattern,
                first.kind.title(),
                line(&first.site)
            );
        }
    }
    page
}

#[test]
fn the_page_is_what_is_found() {
    let page = page();
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(PAGE);
    if std::env::var_os("PTXSAN_WRITE").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, &page).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap();
    for (now, then) in page.lines().zip(written.lines()) {
        assert_eq!(now, then, "{PAGE} is old: PTXSAN_WRITE=1 writes it anew");
    }
    assert_eq!(page.lines().count(), written.lines().count());
}
