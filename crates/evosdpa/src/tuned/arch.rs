//! Scope of a part of a tuned table: architecture and device name.

use std::{fmt, str::FromStr};

use evosdpa_kernels::Arch;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

/// What a device computes with: the architecture of a GPU, or the instruction set of a processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TunedArch {
    /// `sm_90a`.
    Gpu(Arch),
    /// `avx512`. A name and no type: tables with rows for processors are read by builds without the feature `cpu`, too.
    Cpu(&'static str),
}

/// The instruction sets of CPU kernels.
const ISAS: [&str; 8] = ["portable", "neon", "neonbf16", "neonmmla", "avx2", "avx512", "avx512bf16", "amx"];

impl FromStr for TunedArch {
    type Err = evosdpa_kernels::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match ISAS.into_iter().find(|isa| *isa == text) {
            Some(isa) => Ok(Self::Cpu(isa)),
            None => text.parse().map(Self::Gpu),
        }
    }
}

impl<'de> Deserialize<'de> for TunedArch {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

impl Serialize for TunedArch {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl fmt::Display for TunedArch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gpu(arch) => arch.fmt(f),
            Self::Cpu(isa) => f.write_str(isa),
        }
    }
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use super::*;

    #[test]
    fn every_instruction_set_has_a_name_here() {
        assert_eq!(evosdpa_cpu::Isa::ALL.map(|isa| isa.name()), ISAS);
    }
}
