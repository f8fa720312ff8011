//! The fixture kernel with another source.

use evosdpa_kernels::{Arch, Variant};

use crate::common::variant;

/// The fixture's variant with another source.
pub(crate) fn with_source(arch: Arch, source: &str) -> Variant {
    Variant { source: source.into(), ..variant(arch) }
}
