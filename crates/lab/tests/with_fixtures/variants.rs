//! Which variants are built.

use std::path::Path;

use evosdpa_kernels::{Arch, Kernel, Registry, Target};
use evosdpa_lab::{
    gate::Verdict,
    variants::{Job, Request, Selection},
};

fn kernel(edit: impl Fn(&str) -> String) -> Kernel {
    let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/../kernels/tests/fixtures/tiny");
    let folder = tempfile::tempdir().unwrap();
    let manifest = std::fs::read_to_string(Path::new(fixture).join("scale_rows.toml")).unwrap();
    std::fs::write(folder.path().join("scale_rows.toml"), edit(&manifest)).unwrap();
    std::fs::copy(Path::new(fixture).join("scale_rows.cu"), folder.path().join("scale_rows.cu")).unwrap();
    let mut registry = Registry::default();
    registry.add_folder(folder.path()).unwrap();
    registry.kernel("scale_rows").unwrap().clone()
}

fn request() -> Request {
    Request {
        targets: Vec::new(),
        dtypes: Vec::new(),
        shape: "mission".parse().unwrap(),
        adapt: true,
        set: Vec::new(),
        all_variants: None,
    }
}

fn select(kernel: &Kernel, request: &Request) -> Selection {
    let mut selection = Selection::default();
    selection.add(kernel, request).unwrap();
    selection
}

#[test]
fn by_default_every_architecture_and_type_of_the_manifest() {
    let selection = select(&kernel(str::to_owned), &request());
    let labels: Vec<String> = selection.jobs.iter().map(Job::label).collect();
    assert_eq!(labels.len(), 3, "{labels:?}");
    assert_eq!(labels[2], "scale_rows[ROWS=32 THREADS=128] sm_90a f16");
    assert!(selection.refused.is_empty() && selection.spaces.is_empty());
}

#[test]
fn a_kernel_that_cannot_take_the_default_problem_gets_the_nearest() {
    let picky = kernel(|text| {
        text.replace("{ min = 1, max = 128 }", "{ one_of = [96, 128] }\nseq_q = { one_of = [77] }")
            .replace("[\"full\", \"causal\"]", "[\"causal\"]")
    });
    let selection = select(&picky, &request());
    assert_eq!(selection.jobs[0].problem.to_string(), "b1h8s77/512d96 f16 causal");

    let strict = Request { adapt: false, ..request() };
    let selection = select(&picky, &strict);
    assert!(selection.jobs.is_empty());
    let Verdict::Unavailable(why) = &selection.refused[0].gate.verdict else { panic!("{selection:?}") };
    assert!(why.contains("head_dim is 64, it takes 96 or 128"), "{why}");
}

#[test]
fn a_manifest_that_fits_no_problem_fails() {
    let impossible = kernel(|text| text.replace("THREADS <= ROWS * 8", "THREADS > 8 * seq_q"));
    let selection = select(&impossible, &request());
    let Verdict::Fail(why) = &selection.refused[0].gate.verdict else { panic!("{selection:?}") };
    assert!(why.contains("THREADS > 8 * seq_q") && why.contains("scale_rows.toml"), "{why}");
}

#[test]
fn all_variants_are_counted_and_capped() {
    let all =
        Request { targets: vec![Target::nominal(Arch::Sm80)], all_variants: Some(usize::MAX), ..request() };
    let kernel = kernel(str::to_owned);
    // ROWS 16, 32, 64 with THREADS 64, 128, 256 and at most 8 threads a row: 2 + 3 + 3.
    let selection = select(&kernel, &all);
    assert_eq!((selection.jobs.len(), selection.spaces[0].total), (8, 8));
    let selection = select(&kernel, &Request { all_variants: Some(5), ..all.clone() });
    assert_eq!((selection.spaces[0].chosen, selection.spaces[0].total), (5, 8));
    let set = vec![("ROWS".to_owned(), 16)];
    let selection = select(&kernel, &Request { set, ..all });
    assert_eq!(selection.jobs.len(), 2);
}

#[test]
fn wrong_tunables_are_wrong_use() {
    let kernel = kernel(str::to_owned);
    for (name, value, expected) in
        [("ROW", 16, "did you mean `ROWS`"), ("ROWS", 17, "[16, 32, 64]"), ("THREADS", 512, "[64, 128, 256]")]
    {
        let request = Request { set: vec![(name.to_owned(), value)], ..request() };
        let message = Selection::default().add(&kernel, &request).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    }
    let broken = vec![("ROWS".to_owned(), 16), ("THREADS".to_owned(), 256)];
    let message =
        Selection::default().add(&kernel, &Request { set: broken, ..request() }).unwrap_err().to_string();
    assert!(message.contains("every thread has something to do"), "{message}");
}
