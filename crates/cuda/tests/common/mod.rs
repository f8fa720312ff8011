//! The fixture kernel and a problem for it.

use std::path::Path;

use evosdpa_core::DType;
use evosdpa_kernels::{Arch, Kernel, ProblemFacts, Registry, Target, Variant};

pub(crate) fn fixture() -> Kernel {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../kernels/tests/fixtures/tiny");
    let mut registry = Registry::default();
    registry.add_folder(Path::new(folder)).unwrap();
    registry.kernel("scale_rows").unwrap().clone()
}

pub(crate) fn facts() -> ProblemFacts {
    ProblemFacts {
        batch: 1,
        heads_q: 2,
        heads_kv: 2,
        seq_q: 100,
        seq_kv: 100,
        head_dim: 64,
        value_dim: 64,
        dtype: DType::F16,
        kv_dtype: DType::F16,
        band_lo: None,
        band_hi: None,
        lse: false,
        page_size: 0,
        block_q: 0,
        block_kv: 0,
        features: evosdpa_core::Features::NONE,
    }
}

pub(crate) fn variant(arch: Arch) -> Variant {
    fixture().variant(&facts(), &Target::nominal(arch), []).unwrap()
}
