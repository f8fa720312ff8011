//! Which instruction sets there are, and which this machine has.

use crate::error::Error;
use std::fmt;
use std::sync::OnceLock;

/// An instruction set the kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Isa {
    /// Plain Rust, any machine.
    Portable,
    /// NEON, on 64-bit ARM.
    Neon,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
    /// The same with AVX512-BF16, which multiplies pairs of bfloat16: for queries of bfloat16, and keys and values that are bfloat16 too or, with VBMI,
    /// e4m3 without a scale for each row.
    Avx512Bf16,
}

impl Isa {
    /// Every instruction set, slowest first.
    pub const ALL: [Isa; 5] = [Isa::Portable, Isa::Neon, Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16];

    /// The instruction sets this machine can run, slowest first. Never empty.
    pub fn available() -> Vec<Isa> {
        Isa::ALL.into_iter().filter(|isa| isa.is_available()).collect()
    }

    /// The fastest instruction set this machine can run.
    pub fn best() -> Isa {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| {
            let fast = |isa: &Isa| isa.is_available() && (*isa != Isa::Avx512Bf16 || multiplies_pairs_fast());
            Isa::ALL.into_iter().rev().find(fast).unwrap_or(Isa::Portable)
        })
    }

    /// Whether this machine can run it.
    pub fn is_available(self) -> bool {
        match self {
            Isa::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                Isa::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => Isa::Avx512.is_available() && is_x86_feature_detected!("avx512bf16"),
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 | Isa::Avx512 | Isa::Avx512Bf16 => false,
            // Every 64-bit ARM processor that Rust's targets allow has it.
            Isa::Neon => cfg!(target_arch = "aarch64"),
        }
    }

    /// The forced instruction set if this machine has it, or the best one when none is forced.
    pub(crate) fn resolve(forced: Option<Isa>) -> Result<Isa, Error> {
        match forced {
            None => Ok(Isa::best()),
            Some(isa) if isa.is_available() => Ok(isa),
            Some(isa) => Err(Error::IsaUnavailable { wanted: isa, available: Isa::available() }),
        }
    }

    /// Its name as the command line spells it.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Neon => "neon",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Avx512Bf16 => "avx512bf16",
        }
    }
}

/// Whether this processor is known to multiply twice as many bfloat16 as f32 at a time: AMD's Zen 4 and Zen 5 were measured. Elsewhere the pairs are taken when
/// asked for, since they round more and may gain nothing.
fn multiplies_pairs_fast() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let vendor = std::arch::x86_64::__cpuid(0);
        [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).concat() == b"AuthenticAMD"
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Isa {
    type Err = Error;

    fn from_str(text: &str) -> Result<Isa, Error> {
        Isa::ALL
            .into_iter()
            .find(|isa| isa.name() == text)
            .ok_or_else(|| Error::UnknownIsa { given: text.to_owned() })
    }
}
