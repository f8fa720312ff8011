//! The lab: takes a kernel from source to proof.
//!
//! Data flows one way: a kernel and a problem go through the [`gate`]s, then are [`measure`]d beside their [`baseline`]s, and
//! everything seen goes into a [`record`], from which tables, comparisons and [`report`]s are made. A [`profile`] says why.

pub mod agreement;
pub mod baseline;
pub mod bench;
pub mod covering;
pub mod device;
mod error;
pub mod evolve;
pub mod exchange;
pub mod gate;
pub mod machine;
pub mod measure;
pub mod mutation;
pub mod process;
pub mod profile;
pub mod record;
pub mod report;
pub mod self_test;
pub mod sweep;
pub mod tool;
pub mod variants;

pub use error::{Error, ErrorKind};

use evosdpa_core::error::nearest;

/// The name of one of a device's kernels, checked. A name may carry tunables: `sdpa_v2c[STAGES=3]`. `auto` is what the library
/// would run.
pub fn find_kernel(device: &dyn device::Device, name: &str) -> Result<String, Error> {
    let plain = evosdpa_kernels::VariantId::kernel_of(name);
    // The library itself runs wherever there is a clock, and not on the simulator.
    let chosen = name == device::AUTO && device.timed().is_some();
    let known = chosen || device.kernels().iter().any(|kernel| kernel.name == plain);
    if !known {
        return Err(unknown_kernel(device, plain));
    }
    device.check_name(name)?;
    Ok(name.to_owned())
}

pub(crate) fn unknown_kernel(device: &dyn device::Device, name: &str) -> Error {
    let is_cuda =
        || evosdpa_kernels::Registry::embedded().is_ok_and(|registry| registry.kernel(name).is_ok());
    if device.id() == device::DeviceId::Cpu && is_cuda() {
        return Error::NeedsGpu { kernel: name.to_owned() };
    }
    let names: Vec<String> = device.kernels().into_iter().map(|kernel| kernel.name).collect();
    Error::Problem(evosdpa_core::Error::UnknownName {
        kind: "kernel",
        name: name.to_owned(),
        nearest: nearest(name, names.iter().map(String::as_str)),
        allowed: names.join(", "),
    })
}
