//! The guard before the CUDA driver: nothing else touches cudarc before it has found a driver.
//!
//! The bindings panic when the driver library is missing, when a function is missing from it, and even when one of
//! their errors is printed without it. So nothing may call them before [`driver`] has said yes: it opens the library,
//! looks for every function this crate uses, starts the driver and checks its version.

use std::sync::OnceLock;

use cudarc::driver::sys;

use crate::{
    Error, Result,
    driver::{SUCCESS, USED_FUNCTIONS, error_name},
};

/// The oldest CUDA version a driver must support: `cuEventElapsedTime_v2` came with 12.8.
pub const NEEDED_CUDA: i32 = 12_080;

/// What the guard has seen of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriverInfo {
    /// The CUDA version the driver supports, 1000·major + 10·minor.
    pub cuda_version: i32,
    /// Devices it sees.
    pub device_count: usize,
}

/// Why there is no driver, kept so that every caller gets the same answer without trying again.
#[derive(Clone, Debug)]
enum Refusal {
    NoDriver { tried: String },
    TooOld { have: i32, missing: Option<&'static str> },
    Broken { name: String, code: u32, hint: &'static str },
    NoDevice,
}

/// Starts the driver, once per process; afterwards the bindings may be used.
pub fn driver() -> Result<DriverInfo> {
    static STATE: OnceLock<Result<DriverInfo, Refusal>> = OnceLock::new();
    STATE.get_or_init(start).clone().map_err(|refusal| match refusal {
        Refusal::NoDriver { tried } => Error::NoDriver { tried },
        Refusal::TooOld { have, missing } => Error::DriverTooOld { have, need: NEEDED_CUDA, missing },
        Refusal::Broken { name, code, hint } => Error::DriverBroken { name, code, hint },
        Refusal::NoDevice => Error::NoDevice,
    })
}

fn start() -> Result<DriverInfo, Refusal> {
    // SAFETY: opening the driver library runs its initialisers, which are made for any process.
    if !unsafe { sys::is_culib_present() } {
        return Err(Refusal::NoDriver { tried: "libcuda.so, libcuda.so.1".to_owned() });
    }
    // SAFETY: the library was just found, so this does not panic.
    let library = unsafe { sys::culib() };
    let has = |function: &str| {
        // SAFETY: the symbol is only looked up, never called through this type.
        unsafe { library.get::<unsafe extern "C" fn()>(function.as_bytes()) }.is_ok()
    };
    for function in ["cuDriverGetVersion", "cuGetErrorName", "cuInit", "cuDeviceGetCount"] {
        if !has(function) {
            return Err(Refusal::TooOld { have: 0, missing: Some(function) });
        }
    }
    let mut have = 0;
    // SAFETY: the function is there and writes one integer; it works before cuInit.
    let _ = unsafe { sys::cuDriverGetVersion(&mut have) };
    if let Some(missing) = USED_FUNCTIONS.iter().copied().find(|function| !has(function)) {
        return Err(Refusal::TooOld { have, missing: Some(missing) });
    }
    if have < NEEDED_CUDA {
        return Err(Refusal::TooOld { have, missing: None });
    }
    // SAFETY: the function is there; 0 is the only flag there is.
    let code = unsafe { sys::cuInit(0) };
    if code == sys::CUresult::CUDA_ERROR_NO_DEVICE {
        return Err(Refusal::NoDevice);
    }
    if code != SUCCESS {
        let hint = match code {
            sys::CUresult::CUDA_ERROR_STUB_LIBRARY => "LD_LIBRARY_PATH leads to a toolkit's stub; remove it",
            sys::CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH => {
                "the kernel module and the library differ in version; reboot after a driver update"
            }
            _ => "check that `nvidia-smi` works for this user",
        };
        return Err(Refusal::Broken { name: error_name(code), code: code as u32, hint });
    }
    let mut count = 0;
    // SAFETY: the driver is initialised; the function writes one integer.
    let code = unsafe { sys::cuDeviceGetCount(&mut count) };
    match usize::try_from(count) {
        Ok(device_count) if code == SUCCESS && device_count > 0 => {
            Ok(DriverInfo { cuda_version: have, device_count })
        }
        _ => Err(Refusal::NoDevice),
    }
}
