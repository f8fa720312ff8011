//! Every way in, on a machine without a GPU: a typed error, never a panic. With a GPU the same calls must work.

use std::process::Command;

use evosdpa_cuda::{Device, Error, loader, nvrtc, toolkit::Toolkit};

/// Whether this machine has a driver, told without this crate.
fn driver_is_there() -> bool {
    Command::new("nvidia-smi").output().is_ok_and(|output| output.status.success())
}

#[test]
fn without_a_driver_every_way_in_is_a_typed_error() {
    if driver_is_there() {
        assert!(loader::driver().unwrap().device_count > 0);
        assert!(Device::open(0).is_ok());
        assert!(matches!(Device::open(9999), Err(Error::NoSuchDevice { ordinal: 9999, .. })));
        return;
    }
    // Twice: the second answer must be the same and not come from a half-started driver.
    for _ in 0..2 {
        for error in [
            loader::driver().unwrap_err(),
            Device::count().unwrap_err(),
            Device::open(0).unwrap_err(),
            Device::open(9999).unwrap_err(),
        ] {
            let known = matches!(
                error,
                Error::NoDriver { .. }
                    | Error::DriverTooOld { .. }
                    | Error::DriverBroken { .. }
                    | Error::NoDevice
            );
            assert!(known, "{error:?}");
            let text = format!("{error} {error:?}");
            assert!(text.contains("driver"), "{text}");
        }
    }
    let error = Device::open(0).unwrap_err().to_string();
    assert!(error.contains("libcuda.so") && error.contains("nvidia-smi"), "{error}");
}

#[test]
fn versions_are_printed_as_people_write_them() {
    let error = Error::DriverTooOld { have: 12_040, need: 12_080, missing: Some("cuEventElapsedTime_v2") };
    let text = error.to_string();
    assert!(
        text.contains("supports CUDA 12.4, CUDA 12.8 is needed (it has no cuEventElapsedTime_v2)"),
        "{text}"
    );
}

#[test]
fn a_missing_compiler_says_where_it_was_looked_for_and_how_to_get_it() {
    // In a process of its own, because the search is made once.
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "inner_search", "--nocapture"])
        .env("EVOSDPA_CUDA_HOME", "/nowhere/at/all")
        .env("EVOSDPA_TEST_INNER", "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}");
    assert!(text.contains("/nowhere/at/all (EVOSDPA_CUDA_HOME): no such folder"), "{text}");
    assert!(text.contains("evosdpa doctor --fix"), "{text}");
}

/// What the test above runs in its own process; on its own it checks that the search agrees with itself.
#[test]
fn inner_search() {
    if std::env::var_os("EVOSDPA_TEST_INNER").is_some() {
        let error =
            evosdpa_cuda::Compiler::open().err().expect("there is no compiler in a folder that is not there");
        assert!(matches!(error, Error::Nvrtc(nvrtc::Error::Missing { .. })));
        println!("{error}");
        return;
    }
    let first = Toolkit::find().unwrap_or_else(|error| panic!("{error}"));
    assert!(std::ptr::eq(first, Toolkit::find().unwrap()));
    assert!(first.nvrtc.is_absolute() && first.builtins.is_absolute());
}
