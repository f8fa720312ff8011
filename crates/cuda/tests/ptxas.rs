//! The parser of `ptxas -v` on logs of CUDA 11, 12 and 13, from nvcc and from NVRTC.

use evosdpa_cuda::ptxas::{AdvisoryKind, Report, Resources};

#[test]
fn cuda_13_keeps_callees_apart_and_scores_the_worst() {
    let report = Report::parse(include_str!("logs/nvcc13_callee_sm90a.txt")).unwrap();
    let names: Vec<&str> = report.entries.iter().map(|entry| entry.name.as_str()).collect();
    assert_eq!(names, ["spill", "k1"]);

    let entry = report.entry("k1").unwrap();
    assert_eq!(entry.arch.as_deref(), Some("sm_90a"));
    let expected = Resources {
        registers: 37,
        barriers: Some(1),
        smem_static_bytes: 400,
        stack_bytes: 256,
        cumulative_stack_bytes: 256,
        ..Resources::default()
    };
    assert_eq!(entry.resources, expected);
    assert_eq!(entry.callees.len(), 1);
    assert_eq!(entry.callees[0].name, "_Z6calleefi");
    assert_eq!(entry.worst_spill_bytes(), 4612 + 4596);
    assert_eq!(entry.worst_stack_bytes(), 256);

    assert_eq!(report.entry("spill").unwrap().worst_spill_bytes(), 0);
    assert_eq!(report.advisories.len(), 1);
    assert_eq!(report.advisories[0].kind, AdvisoryKind::LocalMemory);
}

#[test]
fn cuda_11_says_nothing_of_barriers() {
    let report = Report::parse(include_str!("logs/nvcc11_sm80.txt")).unwrap();
    let axpy = report.entry("_Z4axpyPfPKff").unwrap();
    assert_eq!(axpy.resources, Resources { registers: 40, cmem_bytes: 392, ..Resources::default() });
    let gemm = report.entry("_Z4gemmPf").unwrap();
    assert_eq!(gemm.resources.registers, 255);
    assert_eq!(gemm.resources.barriers, None);
    assert_eq!(gemm.resources.smem_static_bytes, 49152);
    assert_eq!((gemm.worst_stack_bytes(), gemm.worst_spill_bytes()), (1128, 984 + 1012));
    assert!(report.advisories.is_empty(), "{:?}", report.advisories);
}

#[test]
fn advisories_are_told_by_their_text() {
    let report = Report::parse(include_str!("logs/nvcc12_hopper.txt")).unwrap();
    let kinds: Vec<(AdvisoryKind, Option<&str>)> =
        report.advisories.iter().map(|advisory| (advisory.kind, advisory.code.as_deref())).collect();
    assert_eq!(
        kinds,
        [
            (AdvisoryKind::WgmmaSerialized, Some("C7510")),
            (AdvisoryKind::SetmaxnregIgnored, Some("C7508")),
            (AdvisoryKind::WgmmaSerialized, Some("C7512")),
            (AdvisoryKind::Other, None),
        ]
    );
    assert!(report.advisories[3].text.contains("minnctapersm"));
    let entry = report.entry("hopper_fwd").unwrap();
    assert_eq!((entry.resources.registers, entry.resources.barriers), (168, Some(8)));
    assert_eq!(entry.resources.cmem_bytes, 0);
}

#[test]
fn the_front_ends_warning_about_wmma_is_an_advisory_that_fails() {
    let rest = "ptxas info    : Compiling entry function 'k' for 'sm_89'\nptxas info    : Used 4 registers\n";
    let said = "Warning: cannot perform wmma load or store on local memory";
    // As NVRTC and as nvcc write it.
    for prefix in ["warning: /a (b)/crt/mma.hpp(474): ", "/a (b)/crt/mma.hpp(474): "] {
        let report = Report::parse(&format!("{prefix}{said}\n{prefix}{said}\n{rest}")).unwrap();
        let [advisory] = &report.advisories[..] else { panic!("{:?}", report.advisories) };
        assert_eq!(advisory.kind, AdvisoryKind::WmmaOnLocalMemory);
        assert!(advisory.fails() && advisory.describe().starts_with("mma.hpp(474): cannot"), "{advisory:?}");
    }
    // Other warnings of the front end are about the source's style.
    let other = format!("k.cu(3): warning #177-D: variable \"x\" was declared but never referenced\n{rest}");
    assert!(Report::parse(&other).unwrap().advisories.is_empty());
    let spilled =
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized";
    assert!(!Report::parse(&format!("{rest}{spilled}\n")).unwrap().advisories[0].fails());
}

#[test]
fn nvrtc_marks_continued_lines_instead_of_indenting_them() {
    let log = "ptxas info    : 0 bytes gmem\n\
               ptxas info    : Compiling entry function 'k' for 'sm_90a'\n\
               ptxas info    : Function properties for k\n\
               ptxas         .     64 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads\n\
               ptxas info    : Used 58 registers, used 1 barriers, 1024 bytes smem\n\u{0}";
    let report = Report::parse(log).unwrap();
    let entry = report.entry("k").unwrap();
    assert_eq!((entry.worst_stack_bytes(), entry.worst_spill_bytes()), (64, 12));
    assert_eq!((entry.resources.registers, entry.resources.smem_static_bytes), (58, 1024));
}

#[test]
fn a_log_without_a_report_is_an_error() {
    for log in ["", "kernel.cu(3): error: expected a `;`\n", "ptxas info    : 0 bytes gmem\n"] {
        assert!(Report::parse(log).unwrap_err().to_string().contains("-Xptxas -v"), "{log}");
    }
    let broken =
        "ptxas info    : Compiling entry function 'k' for 'sm_80'\nptxas info    : Used many registers\n";
    assert!(Report::parse(broken).unwrap_err().to_string().contains("`many` is no number"));
    let overflow = "ptxas info    : Used 99999999999 registers\n";
    assert!(Report::parse(overflow).is_err());
}

#[test]
fn a_log_cut_at_its_start_still_counts() {
    let log = "ptxas info    : Function properties for k\n    8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
               ptxas info    : Used 32 registers, 72+16 bytes smem\n";
    let report = Report::parse(log).unwrap();
    let entry = report.entry("k").unwrap();
    assert_eq!(
        (entry.resources.registers, entry.resources.smem_static_bytes, entry.worst_stack_bytes()),
        (32, 88, 8)
    );
}
