//! Drivers and devices that do not suit, and kernels that never end, without a GPU: a library of the driver's name that
//! answers as it is told to. The C compiler that links Rust programs makes it.

use std::{
    collections::HashMap,
    env,
    path::Path,
    process::Command,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use evosdpa_cuda::{Builder, Counters, Device, Error, ErrorKind, Event, Graph, PreparedLaunch, loader};
use evosdpa_kernels::{Arch, LaunchGeometry, SdpaParams};

mod common;

/// What the fake answers; every function not named here says success.
const ANSWERS: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static int told(const char* name, int otherwise) {
  const char* text = getenv(name);
  return text ? atoi(text) : otherwise;
}
int cuDriverGetVersion(int* version) { *version = told("FAKE_VERSION", 13000); return 0; }
int cuInit(unsigned flags) { return told("FAKE_INIT", 0); }
int cuDeviceGetCount(int* count) { *count = 1; return 0; }
int cuGetErrorName(int code, const char** name) { *name = "CUDA_ERROR_FAKE"; return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char* name, int bytes, int device) { strncpy(name, "Fake GPU", bytes); return 0; }
int cuDeviceTotalMem_v2(size_t* bytes, int device) { *bytes = 1 << 30; return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == 75 ? told("FAKE_MAJOR", 9) : attribute == 76 ? told("FAKE_MINOR", 0) : 65536;
  return 0;
}
int cuFuncGetAttribute(int* value, int attribute, void* function) { *value = 1024; return 0; }
int cuEventQuery(void* event) { return told("FAKE_EVENT", 0); }
static int capturing = 0, zeroed = 0;
int cuMemAlloc_v2(unsigned long long* address, size_t bytes) {
  *address = 0x10000000;
  return told("FAKE_ALLOC", 0);
}
int cuMemsetD8Async(unsigned long long address, char byte, size_t bytes, void* stream) {
  /* The memory of work counters: zeroed on a stream that is not the default one. */
  zeroed = address == 0x10000000 && byte == 0 && stream;
  return 0;
}
int cuMemcpyDtoH_v2(void* host, unsigned long long address, size_t bytes) {
  memset(host, 0, bytes);
  memset(host, 1, 4 * told("FAKE_LEFT", 0));
  return 0;
}
int cuStreamCreate(void** stream, unsigned flags) { *stream = &capturing; return 0; }
int cuStreamBeginCapture_v2(void* stream, int mode) { capturing = 1; return 0; }
int cuStreamEndCapture(void* stream, void** graph) { capturing = 0; return 0; }
int cuStreamIsCapturing(void* stream, int* status) { *status = capturing; return 0; }
int cuLaunchKernelEx(const void* config, void* function, void** arguments, void** extra) {
  unsigned long long counter = ((unsigned long long*)arguments[0])[28];
  printf("launch: counter %llx, zeroed %d\n", counter, zeroed);
  fflush(stdout);
  return 0;
}
"#;

/// The functions that the guard looks for, as the source lists them.
fn used_functions() -> Vec<&'static str> {
    let source = include_str!("../src/driver.rs");
    let list = source.split("USED_FUNCTIONS: &[&str] = &[").nth(1).unwrap().split(']').next().unwrap();
    list.split('"').skip(1).step_by(2).collect()
}

/// The folder of the fake, made once; without the function `missing` if one is named.
fn fake(folder: &Path, missing: Option<&str>) {
    let mut source = ANSWERS.to_owned();
    for name in used_functions() {
        if Some(name) != missing && !ANSWERS.contains(&format!("int {name}(")) {
            source += &format!("int {name}(void) {{ return 0; }}\n");
        }
    }
    let file = folder.join("driver.c");
    std::fs::write(&file, source).unwrap();
    for name in ["libcuda.so", "libcuda.so.1"] {
        let made = Command::new("cc")
            .args(["-shared", "-fPIC", "-w", "-o"])
            .arg(folder.join(name))
            .arg(&file)
            .status();
        assert!(made.unwrap().success());
    }
}

/// What the step `inner` prints in a process that has the fake for its driver. The loader's answer is kept for a
/// process's life, so that each question needs one of its own.
fn with_fake(inner: &str, told: &[(&str, &str)], missing: Option<&str>) -> String {
    static WHOLE: OnceLock<tempfile::TempDir> = OnceLock::new();
    let own;
    let folder = if missing.is_none() {
        WHOLE.get_or_init(|| {
            let folder = tempfile::tempdir().unwrap();
            fake(folder.path(), None);
            folder
        })
    } else {
        own = tempfile::tempdir().unwrap();
        fake(own.path(), missing);
        &own
    };
    let output = Command::new(env::current_exe().unwrap())
        .args(["--exact", "inner", "--nocapture", "--test-threads", "1"])
        .env("LD_LIBRARY_PATH", folder.path())
        .env("FAKE_STEP", inner)
        .envs(told.iter().copied().collect::<HashMap<_, _>>())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{inner}: {} {text}{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    text
}

/// What the tests below run in a process of their own; on its own it has nothing to do.
#[test]
fn inner() {
    match env::var("FAKE_STEP").as_deref() {
        Ok("driver") => println!("{}", loader::driver().unwrap_err()),
        Ok("works") => assert_eq!(Device::open(0).unwrap().info().name, "Fake GPU"),
        Ok("ordinal") => println!("{}", Device::open(7).err().unwrap()),
        Ok("target") => println!("{}", Device::open(0).unwrap().target().unwrap_err()),
        Ok("hang") => hang(),
        Ok("faults") => faults(),
        Ok("shared memory") => shared_memory(),
        Ok("counters") => counters(),
        _ => {}
    }
}

fn hang() {
    let device = Device::open(0).unwrap();
    let stream = device.stream().unwrap();
    let event = Event::new(&stream).unwrap();
    event.record(&stream).unwrap();
    let start = Instant::now();
    let error = event.wait(Duration::from_millis(60), "endless[MISTAKE=1]: grid 1x1x1").unwrap_err();
    assert!(matches!(error, Error::Hang { .. }) && error.kind() == ErrorKind::Kernel, "{error:?}");
    assert!((50..5000).contains(&start.elapsed().as_millis()), "{:?}", start.elapsed());
    println!("{error}");
    // Whatever is asked of the device now is answered at once, without the driver.
    let lost = device.alloc(16).err().unwrap();
    assert!(matches!(lost, Error::DeviceLost), "{lost:?}");
    assert!(matches!(device.synchronize(), Err(Error::DeviceLost)));
    println!("{lost}");
}

/// Whose fault it is that memory cannot be had, that what ran ended badly, and what comes after.
fn faults() {
    let device = Device::open(0).unwrap();
    let stream = device.stream().unwrap();
    let shown = |step: &str, result: Result<(), Error>| match result {
        Ok(()) => println!("{step}: fine"),
        Err(error) => println!("{step}: {:?}, {error}", error.kind()),
    };
    shown("alloc", device.alloc(16).map(drop));
    let event = Event::new(&stream).unwrap();
    event.record(&stream).unwrap();
    shown("wait", event.wait(Duration::from_millis(60), "sdpa: grid 1x1x1"));
    shown("next", Event::new(&stream).map(drop));
}

fn shared_memory() {
    let device = Device::open(0).unwrap();
    let cubin = std::fs::read(env::var_os("FAKE_CUBIN").unwrap()).unwrap();
    let function = device.load(&cubin, "greedy").unwrap().function("scale_rows").unwrap();
    let geometry = |bytes| LaunchGeometry {
        grid: [1; 3],
        block: [32, 1, 1],
        cluster: [1; 3],
        dynamic_smem_bytes: bytes,
        programmatic: false,
        counter: false,
    };
    // The fake says 1,024 bytes are static and one block may have 65,536.
    assert!(PreparedLaunch::new(&function, geometry(64512)).is_ok());
    println!("{}", PreparedLaunch::new(&function, geometry(64513)).err().unwrap());
}

fn counters() {
    let device = Device::open(0).unwrap();
    let stream = device.stream().unwrap();
    let cubin = std::fs::read(env::var_os("FAKE_CUBIN").unwrap()).unwrap();
    let function = device.load(&cubin, "counting").unwrap().function("scale_rows").unwrap();
    let geometry = |counter| LaunchGeometry {
        grid: [1; 3],
        block: [32, 1, 1],
        cluster: [1; 3],
        dynamic_smem_bytes: 0,
        programmatic: false,
        counter,
    };
    // Whatever the caller has put there, a launch has its own or none.
    let params = SdpaParams { counter: 0xbad, ..SdpaParams::default() };
    // SAFETY: the fake launches nothing.
    let launch = |prepared: &PreparedLaunch| unsafe { prepared.launch(&stream, &params, &[]) };
    let without = PreparedLaunch::new(&function, geometry(false)).unwrap();
    assert!(without.counters().is_none());
    launch(&without).unwrap();
    let shared = Arc::new(Counters::new(&device));
    let one = PreparedLaunch::sharing(&function, geometry(true), &shared).unwrap();
    let other = PreparedLaunch::sharing(&function, geometry(true), &shared).unwrap();
    assert_contains(&one.describe(), &["work counter"]);
    launch(&one).unwrap();
    launch(&other).unwrap();
    Graph::capture(&stream, || launch(&one).and_then(|()| launch(&other))).unwrap();
    launch(&one).unwrap();
    launch(&PreparedLaunch::new(&function, geometry(true)).unwrap()).unwrap();
    match one.counters().unwrap().check(&one.describe()) {
        Ok(()) => println!("all are 0"),
        Err(error) => println!("{error}, kind {:?}", error.kind()),
    }
}

fn assert_contains(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
}

#[test]
fn a_driver_that_is_too_old_is_named_with_both_versions() {
    with_fake("works", &[], None);
    let text = with_fake("driver", &[("FAKE_VERSION", "12040")], None);
    assert_contains(&text, &["supports CUDA 12.4", "CUDA 12.8 is needed", "update the NVIDIA driver"]);
    let text = with_fake("driver", &[], Some("cuTensorMapEncodeTiled"));
    assert_contains(&text, &["it has no cuTensorMapEncodeTiled", "update the NVIDIA driver"]);
}

#[test]
fn a_driver_that_does_not_start_or_sees_nothing_says_so() {
    assert_contains(
        &with_fake("driver", &[("FAKE_INIT", "100")], None),
        &["sees no device", "CUDA_VISIBLE_DEVICES"],
    );
    assert_contains(
        &with_fake("driver", &[("FAKE_INIT", "803")], None),
        &["does not start", "code 803", "reboot after a driver update"],
    );
}

#[test]
fn a_device_that_is_not_there_or_not_supported_is_named() {
    assert_contains(&with_fake("ordinal", &[], None), &["no device cuda:7", "there are 1"]);
    let text = with_fake("target", &[("FAKE_MAJOR", "7"), ("FAKE_MINOR", "5")], None);
    assert_contains(&text, &["Fake GPU has compute capability 7.5", "8.0, 8.6, 8.9 and 9.0"]);
}

#[test]
fn a_kernel_that_hangs_is_given_up_and_the_process_goes_on() {
    // 600: not ready, for ever.
    let text = with_fake("hang", &[("FAKE_EVENT", "600")], None);
    assert_contains(
        &text,
        &["endless[MISTAKE=1]: grid 1x1x1 did not finish within 60 ms", "this process goes on"],
    );
    assert_contains(&text, &["the device was given up after a kernel hung"]);
}

#[test]
fn faults_of_the_machine_are_told_from_those_of_a_kernel() {
    let faults = |told: &[(&str, &str)]| with_fake("faults", told, None);
    assert_contains(&faults(&[]), &["alloc: fine", "wait: fine", "next: fine"]);
    // Out of memory.
    assert_contains(&faults(&[("FAKE_ALLOC", "2")]), &["alloc: Machine, cuMemAlloc", "wait: fine"]);
    // An illegal address is the kernel's; what comes after it on the same device is not the next one's.
    let text = faults(&[("FAKE_EVENT", "700")]);
    assert_contains(&text, &["wait: Kernel, cuEventQuery failed", "next: Machine, the device was given up"]);
    // An ECC error, a device that fell off the bus, another process's fault.
    for code in ["214", "46", "805"] {
        assert_contains(&faults(&[("FAKE_EVENT", code)]), &["wait: Machine, cuEventQuery failed"]);
    }
    // What nobody has heard of is put down to the kernel: a gate that cannot say must not pass.
    assert_contains(&faults(&[("FAKE_EVENT", "999")]), &["wait: Kernel"]);
}

/// The fixture's code, to be loaded by the fake. Compiled here: the compiler has no business in a process with a fake
/// driver.
fn cubin(folder: &Path) -> String {
    let cubin =
        Builder::default().build(&common::variant(Arch::Sm90a)).unwrap_or_else(|error| panic!("{error}"));
    let path = folder.join("cubin");
    std::fs::write(&path, &cubin.code).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn launches_get_work_counters_where_they_ask_for_one() {
    let folder = tempfile::tempdir().unwrap();
    let cubin = cubin(folder.path());
    let text = with_fake("counters", &[("FAKE_CUBIN", &cubin)], None);
    // The first comes after what the test harness says, on one line.
    let launches: Vec<&str> = text.lines().filter_map(|line| Some(line.split_once("launch: ")?.1)).collect();
    let expected = [
        "counter 0, zeroed 0",
        // As they come: a cache line further each.
        "counter 10000000, zeroed 1",
        "counter 10000080, zeroed 1",
        // Captured: from the other half.
        "counter 10020000, zeroed 1",
        "counter 10020080, zeroed 1",
        "counter 10000100, zeroed 1",
        // Counters of its own: the first of them.
        "counter 10000000, zeroed 1",
    ];
    assert_eq!(launches, expected);
    assert_contains(&text, &["all are 0"]);
    let text = with_fake("counters", &[("FAKE_CUBIN", &cubin), ("FAKE_LEFT", "3")], None);
    assert_contains(&text, &["counting: grid 1x1x1", "left 3 of its work counters", "kind Kernel"]);
}

#[test]
fn shared_memory_past_the_limit_is_refused_before_a_launch() {
    let folder = tempfile::tempdir().unwrap();
    let cubin = cubin(folder.path());
    let text = with_fake("shared memory", &[("FAKE_CUBIN", &cubin)], None);
    assert_contains(
        &text,
        &["65537 bytes", "1024 static", "64513 dynamic", "the device allows 65536", "not launched"],
    );
}
