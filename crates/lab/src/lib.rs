//! The lab: takes a kernel from source to proof.
//!
//! Data flows one way: a kernel and a problem go through the [`gate`]s, then are [`measure`]d beside their [`peer`]s, and
//! everything seen goes into a [`record`], from which tables and comparisons are made.

pub mod bench;
pub mod device;
mod error;
pub mod gate;
pub mod machine;
pub mod measure;
pub mod peer;
pub mod record;
pub mod tool;
pub mod variants;

pub use error::Error;

use evosdpa_core::error::nearest;

/// The names of a device's kernels.
pub struct KernelNames(Vec<&'static str>);

/// The names of a device's kernels, to check a user's choice against.
pub fn kernel_names(device: &dyn device::Device) -> KernelNames {
    KernelNames(device.kernels().iter().map(|kernel| kernel.name).collect())
}

impl KernelNames {
    /// Checks a name.
    pub fn find(&self, name: &str) -> Result<&'static str, Error> {
        self.0.iter().find(|known| **known == name).copied().ok_or_else(|| self.unknown(name))
    }

    fn unknown(&self, name: &str) -> Error {
        Error::Problem(evosdpa_core::Error::UnknownName {
            kind: "kernel",
            name: name.to_owned(),
            nearest: nearest(name, self.0.iter().copied()),
            allowed: self.0.join(", "),
        })
    }
}
