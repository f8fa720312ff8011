//! Drivers and devices that do not suit, and kernels that never end, without a GPU.

use std::{
    env,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use evosdpa_cuda::{
    Builder, Counters, Device, Error, ErrorKind, Event, Graph, PreparedLaunch, RawStream, loader,
};
use evosdpa_kernels::{Arch, LaunchGeometry, SdpaParams};

mod common;
mod fake;

use fake::{asked, assert_contains, with_fake};

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
        Ok("workspaces") => workspaces(),
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
        workspace_bytes: 0,
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
        workspace_bytes: 0,
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

fn workspaces() {
    let device = Device::open(0).unwrap();
    let (stream, default) = (device.stream().unwrap(), RawStream(0));
    let cubin = std::fs::read(env::var_os("FAKE_CUBIN").unwrap()).unwrap();
    let function = device.load(&cubin, "parts").unwrap().function("scale_rows").unwrap();
    let shared = Arc::new(Counters::new(&device));
    let prepared = |workspace_bytes| {
        let geometry = LaunchGeometry {
            grid: [1; 3],
            block: [32, 1, 1],
            cluster: [1; 3],
            dynamic_smem_bytes: 0,
            programmatic: false,
            counter: false,
            workspace_bytes,
        };
        PreparedLaunch::sharing(&function, geometry, &shared).unwrap()
    };
    let (small, large) = (prepared(1 << 18), prepared(1 << 20));
    let launch = |prepared: &PreparedLaunch, stream| {
        let entered = device.enter().unwrap();
        // SAFETY: the fake launches nothing.
        unsafe { prepared.launch_on(&entered, stream, &SdpaParams::default(), &[]) }
    };
    let raw = stream.number();
    launch(&small, raw).unwrap();
    launch(&small, raw).unwrap();
    launch(&small, default).unwrap();
    launch(&large, raw).unwrap();
    launch(&small, raw).unwrap();
    for _ in 0..2 {
        Graph::capture(&stream, || launch(&small, raw).and_then(|()| launch(&small, raw))).unwrap();
    }
    shared.reuse_captured();
    Graph::capture(&stream, || launch(&small, raw)).unwrap();
    launch(&prepared(0), raw).unwrap();
    println!("{}", small.describe());
    match shared.check("parts") {
        Ok(()) => println!("all are 0"),
        Err(error) => println!("{error}"),
    }
}

#[test]
fn a_driver_that_is_too_old_is_named_with_both_versions() {
    with_fake("works", &[], None);
    let text = with_fake("driver", &[("FAKE_VERSION", "12040")], None);
    assert_contains(&text, &["supports CUDA 12.4", "CUDA 12.8 is needed", "update the NVIDIA driver"]);
    let text = with_fake("driver", &[], Some("cuGraphUpload"));
    assert_contains(&text, &["it has no cuGraphUpload", "update the NVIDIA driver"]);
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
    let launches = asked(&text).into_iter().filter_map(|what| what.strip_prefix("launch "));
    let launches: Vec<&str> = launches.map(|launch| launch.split(" grid ").next().unwrap()).collect();
    let expected = [
        "counter 0 zeroed 0",
        // As they come: a cache line further each.
        "counter 10000000 zeroed 1",
        "counter 10000080 zeroed 1",
        // Captured: from the other half.
        "counter 10020000 zeroed 1",
        "counter 10020080 zeroed 1",
        "counter 10000100 zeroed 1",
        // Counters of its own: the first of them.
        "counter 10000000 zeroed 1",
    ];
    assert_eq!(launches, expected);
    assert_contains(&text, &["all are 0"]);
    let text = with_fake("counters", &[("FAKE_CUBIN", &cubin), ("FAKE_LEFT", "3")], None);
    assert_contains(&text, &["counting: grid 1x1x1", "left 3 of its work counters", "kind Kernel"]);
}

/// Launches that may run at the same time never have the same workspace.
#[test]
fn streams_and_captures_have_workspaces_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let cubin = cubin(folder.path());
    let apart = ("FAKE_APART", "16777216");
    let text = with_fake("workspaces", &[("FAKE_CUBIN", &cubin), apart], None);
    let given: Vec<&str> =
        asked(&text).into_iter().filter_map(|what| what.strip_prefix("workspace ")).collect();
    // 10… and 11… are made beforehand, for captures of the small and of the large.
    let (one, other, larger) = ("12000000", "13000000", "14000000");
    assert_eq!(given[..5], [one, one, other, larger, larger]);
    // Two captures, and a third when their graphs are gone.
    let (first, second, third) = (given[5], given[7], given[9]);
    assert_eq!([given[6], given[8]], [first, second]);
    assert!(first != second && [first, second].contains(&third), "{given:?}");
    assert!(!given[..5].contains(&first) && !given[..5].contains(&second), "{given:?}");
    assert_eq!(given[10..], ["0"]);
    assert_contains(&text, &["workspace of 262144 bytes", "all are 0"]);
    let text = with_fake("workspaces", &[("FAKE_CUBIN", &cubin), apart, ("FAKE_LEFT", "3")], None);
    assert_contains(&text, &["of its work counters at other values than 0"]);
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
