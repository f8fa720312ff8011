//! The resource gate on logs of the compiler.

use std::path::Path;

use evosdpa_kernels::Registry;
use evosdpa_lab::{
    Error,
    gate::{
        Verdict,
        resources::{ResourceRow, from_log},
    },
};

const LOGS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../cuda/tests/logs");

fn fixture() -> Registry {
    let mut registry = Registry::default();
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../kernels/tests/fixtures/tiny");
    registry.add_folder(Path::new(folder)).unwrap();
    registry
}

fn read(log: &str) -> Result<Vec<ResourceRow>, Error> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ptxas.txt");
    std::fs::write(&path, log).unwrap();
    from_log(&path, &fixture())
}

#[test]
fn logs_of_three_cuda_versions() {
    let rows = |name: &str| from_log(&Path::new(LOGS).join(name), &Registry::default()).unwrap();
    let eleven = rows("nvcc11_sm80.txt");
    let gemm = eleven[1].usage.as_ref().unwrap();
    assert_eq!((gemm.registers, gemm.stack_bytes, gemm.barriers), (255, 1128, None));
    assert_eq!((gemm.spill_store_bytes, gemm.spill_load_bytes), (984, 1012));
    let twelve = rows("nvcc12_hopper.txt");
    assert_eq!(twelve[0].notes.len(), 4);
    assert!(twelve[0].notes[0].starts_with("ptxas C7510: "), "{:?}", twelve[0].notes);
    let thirteen = rows("nvcc13_callee_sm90a.txt");
    // The callee that spills counts against its entry point, and the advisory belongs to the one it names.
    assert_eq!(thirteen[1].usage.as_ref().unwrap().spill_store_bytes, 4612);
    assert_eq!((thirteen[0].notes.len(), thirteen[1].notes.len()), (0, 1));
    assert!(matches!(thirteen[0].verdict(), Verdict::Unavailable(_)));
}

#[test]
fn a_known_entry_point_is_held_to_its_manifest() {
    let log = |registers: u32| {
        format!(
            "ptxas info    : Compiling entry function 'scale_rows' for 'sm_89'\n\
             ptxas info    : Function properties for scale_rows\n    \
             0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
             ptxas info    : Used {registers} registers, used 1 barriers\n"
        )
    };
    assert!(read(&log(40)).unwrap()[0].verdict().is_pass());
    let rows = read(&log(41)).unwrap();
    let Verdict::Fail(why) = rows[0].verdict() else { panic!("{rows:?}") };
    assert_eq!(why, "41 registers, the limit is 40");
    let elsewhere = read(&log(40).replace("sm_89", "sm_75")).unwrap();
    assert!(matches!(elsewhere[0].verdict(), Verdict::Unavailable(_)));
}

#[test]
fn a_fragment_in_local_memory_fails_whatever_the_numbers_are() {
    let log = "warning: /cuda/include/crt/mma.hpp(474): Warning: cannot perform wmma load or store on local memory\n\
               ptxas info    : Compiling entry function 'k' for 'sm_89'\n\
               ptxas info    : Used 4 registers, used 0 barriers\n";
    let rows = read(log).unwrap();
    let Verdict::Fail(why) = rows[0].verdict() else { panic!("{rows:?}") };
    assert_eq!(
        why,
        "mma.hpp(474): cannot perform wmma load or store on local memory; its result is undefined"
    );
    assert!(rows[0].notes.is_empty());
}

#[test]
fn what_is_no_log_says_what_was_expected() {
    for (log, expected) in [
        ("", "it is empty"),
        ("\n  \n", "it is empty"),
        ("make: *** [all] Error 2\n", "no `Compiling entry function`"),
        ("ptxas info    : Compiling entry function 'k' for 'sm_80'\n", "cut short"),
        ("ptxas info    : Used many registers\n", "`many` is no number"),
    ] {
        let message = read(log).unwrap_err().to_string();
        assert!(message.contains(expected) && message.contains("nvcc -Xptxas -v"), "{log:?}: {message}");
    }
    let message = from_log(Path::new("/nowhere/log"), &Registry::default()).unwrap_err().to_string();
    assert!(message.contains("/nowhere/log: cannot be read"), "{message}");
}
