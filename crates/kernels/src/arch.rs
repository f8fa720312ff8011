//! GPU architectures that kernels are compiled for.

use std::{fmt, str::FromStr};

use crate::{Error, names::nearest};

/// A GPU architecture, as the compiler names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Arch {
    /// A100.
    Sm80,
    /// RTX 30, A10, A40.
    Sm86,
    /// L4, L40, RTX 40.
    Sm89,
    /// H100, H200, with the features that exist only there (wgmma, setmaxnreg).
    Sm90a,
}

impl Arch {
    /// Every architecture, oldest first.
    pub const ALL: [Self; 4] = [Self::Sm80, Self::Sm86, Self::Sm89, Self::Sm90a];

    /// The compiler's name of the real architecture: `sm_90a`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sm80 => "sm_80",
            Self::Sm86 => "sm_86",
            Self::Sm89 => "sm_89",
            Self::Sm90a => "sm_90a",
        }
    }

    /// The compiler's name of the virtual architecture, which gives PTX: `compute_90a`.
    pub fn virtual_name(self) -> &'static str {
        match self {
            Self::Sm80 => "compute_80",
            Self::Sm86 => "compute_86",
            Self::Sm89 => "compute_89",
            Self::Sm90a => "compute_90a",
        }
    }

    /// The architecture to compile for on a device of this compute capability, if there is one.
    pub fn of_device(major: u32, minor: u32) -> Option<Self> {
        match (major, minor) {
            (8, 0) => Some(Self::Sm80),
            (8, 6 | 7) => Some(Self::Sm86),
            (8, 9) => Some(Self::Sm89),
            (9, 0) => Some(Self::Sm90a),
            _ => None,
        }
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Arch {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Self::ALL.into_iter().find(|arch| arch.name() == text).ok_or_else(|| Error::UnknownArch {
            name: text.to_owned(),
            nearest: nearest(text, Self::ALL.map(Self::name)),
        })
    }
}

impl serde::Serialize for Arch {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> serde::Deserialize<'de> for Arch {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// What a launch may ask about the device it will run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// What to compile for.
    pub arch: Arch,
    /// SMs; persistent kernels size their grid by it.
    pub sm_count: u32,
    /// The most shared memory one block may have, static and dynamic together.
    pub smem_limit_bytes: u32,
}

impl Target {
    /// A well-known device of this architecture (A100, A10, L4, H200), for work without a GPU.
    ///
    /// Shared memory per block is the opt-in maximum of the CUDA programming guide's table of compute
    /// capabilities.
    pub fn nominal(arch: Arch) -> Self {
        let (sm_count, smem_limit_kib) = match arch {
            Arch::Sm80 => (108, 163),
            Arch::Sm86 => (72, 99),
            Arch::Sm89 => (58, 99),
            Arch::Sm90a => (132, 227),
        };
        Self { arch, sm_count, smem_limit_bytes: smem_limit_kib * 1024 }
    }
}
