//! Which instruction sets there are, and which this machine has.

use crate::error::Error;
use evosdpa_core::{DType, Granularity, Problem};
use std::fmt;
use std::sync::OnceLock;

/// An instruction set the kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Isa {
    /// Plain Rust, any machine.
    Portable,
    /// NEON, on 64-bit ARM.
    Neon,
    /// The same with BF16, which multiplies pairs of bfloat16: for queries, keys and values of bfloat16.
    NeonBf16,
    /// The same by `bfmmla`, which multiplies 2×4 by 4×2 of them.
    NeonMmla,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
    /// The same with AVX512-BF16, which multiplies pairs of bfloat16: for queries of bfloat16, and keys and values that are bfloat16 too or, with VBMI,
    /// 8-bit codes without a scale for each row.
    Avx512Bf16,
    /// The same with AMX-BF16, which multiplies tiles of 16 rows of 16 pairs; on Linux.
    Amx,
    /// A model of AMX's tiles on any machine, slow: how tests run that path where there is none.
    AmxModel,
}

impl Isa {
    /// Every instruction set, slowest first.
    pub const ALL: [Isa; 8] = [
        Isa::Portable,
        Isa::Neon,
        Isa::NeonBf16,
        Isa::NeonMmla,
        Isa::Avx2,
        Isa::Avx512,
        Isa::Avx512Bf16,
        Isa::Amx,
    ];

    /// The instruction sets this machine can run, slowest first. Never empty.
    pub fn available() -> Vec<Isa> {
        Isa::ALL.into_iter().filter(|isa| isa.is_available()).collect()
    }

    /// The fastest instruction set this machine can run, as far as that is known.
    pub fn best() -> Isa {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| {
            let pays = |isa: &Isa| isa.is_available() && isa.pays();
            Isa::ALL.into_iter().rev().find(pays).unwrap_or(Isa::Portable)
        })
    }

    /// Whether it is taken by itself where it is available.
    fn pays(self) -> bool {
        match self {
            Isa::Avx512Bf16 => multiplies_pairs_fast(),
            Isa::NeonBf16 | Isa::NeonMmla => self.pays_on_arm(arm_implementer()),
            _ => true,
        }
    }

    /// Whether processors of this implementer multiply faster so than by what is slower in [`Isa::ALL`], as published for them. Arm's large cores
    /// multiply twice as many bfloat16 with each step from f32 to pairs to quads, Qualcomm's own fewer as quads than as pairs, and Apple's fewer
    /// than f32 either way. Of others nothing is known: what the instructions were made for is assumed.
    fn pays_on_arm(self, implementer: u32) -> bool {
        const QUALCOMM: u32 = 0x51;
        const APPLE: u32 = 0x61;
        match implementer {
            APPLE => false,
            QUALCOMM => self != Isa::NeonMmla,
            _ => true,
        }
    }

    /// Whether this machine can run it.
    pub fn is_available(self) -> bool {
        self.lacks().is_none()
    }

    /// What this machine lacks to run it, in words; `None` where it can.
    pub fn lacks(self) -> Option<&'static str> {
        match self {
            Isa::Portable | Isa::AmxModel => None,
            // Every 64-bit ARM processor that Rust's targets allow has it.
            Isa::Neon => (!cfg!(target_arch = "aarch64")).then_some("a 64-bit ARM processor"),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonBf16 | Isa::NeonMmla => {
                (!std::arch::is_aarch64_feature_detected!("bf16")).then_some("BF16")
            }
            #[cfg(not(target_arch = "aarch64"))]
            Isa::NeonBf16 | Isa::NeonMmla => Some("a 64-bit ARM processor"),
            #[cfg(target_arch = "x86_64")]
            _ => self.lacks_on_x86(),
            #[cfg(not(target_arch = "x86_64"))]
            _ => Some("an x86-64 processor"),
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn lacks_on_x86(self) -> Option<&'static str> {
        let avx2 = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        let avx512 = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        let pairs = is_x86_feature_detected!("avx512bf16");
        if !avx2 {
            Some("AVX2 with FMA and F16C")
        } else if self > Isa::Avx2 && !avx512 {
            Some("AVX-512 F, BW, DQ and VL")
        } else if self > Isa::Avx512 && !pairs {
            Some("AVX512-BF16")
        } else if self > Isa::Avx512Bf16 {
            #[cfg(target_os = "linux")]
            return crate::amx::lacks();
            #[cfg(not(target_os = "linux"))]
            return Some("Linux, which gives tiles to a process that asks");
        } else {
            None
        }
    }

    /// The instruction set for f32, and for all that this one does not multiply as pairs of bfloat16.
    pub fn of_f32(self) -> Isa {
        match self {
            Isa::Avx512Bf16 | Isa::Amx => Isa::Avx512,
            Isa::NeonBf16 | Isa::NeonMmla => Isa::Neon,
            Isa::AmxModel => Isa::Portable,
            other => other,
        }
    }

    /// The instruction set that a problem takes where this one is chosen: itself, or [`Isa::of_f32`] for what it does not multiply as pairs. bfloat16 holds
    /// 8-bit codes exactly, but not what a scale for each row makes of them; their lookup needs VBMI.
    pub fn for_problem(self, problem: &Problem) -> Isa {
        let codes = match self {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 | Isa::Amx => is_x86_feature_detected!("avx512vbmi"),
            #[cfg(target_arch = "x86_64")]
            Isa::AmxModel => Isa::Avx512Bf16.is_available() && is_x86_feature_detected!("avx512vbmi"),
            _ => false,
        };
        let held = match problem.kv_dtype() {
            DType::BF16 => true,
            DType::E4M3 | DType::I8 | DType::U8 => codes && problem.scale_granularity() != Granularity::Token,
            _ => false,
        };
        if problem.dtype() == DType::BF16 && held { self } else { self.of_f32() }
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
            Isa::NeonBf16 => "neonbf16",
            Isa::NeonMmla => "neonmmla",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Avx512Bf16 => "avx512bf16",
            Isa::Amx => "amx",
            Isa::AmxModel => "amx-model",
        }
    }
}

/// Whether this processor is known to multiply twice as many bfloat16 as f32 at a time: AMD's Zen 4 and Zen 5 were measured. Intel's Emerald Rapids has the
/// instruction and multiplies half as many. Elsewhere the pairs are taken when asked for, since they round more and may gain nothing.
fn multiplies_pairs_fast() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let vendor = std::arch::x86_64::__cpuid(0);
        [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).concat() == b"AuthenticAMD"
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Who designed this ARM processor, as its identification register says; 0 where a process cannot ask.
fn arm_implementer() -> u32 {
    if cfg!(target_vendor = "apple") {
        return 0x61;
    }
    let register = std::fs::read_to_string("/sys/devices/system/cpu/cpu0/regs/identification/midr_el1");
    register.ok().and_then(|text| implementer_of(&text)).unwrap_or(0)
}

/// The implementer in a register written as `0x00000000410fd4f0`.
fn implementer_of(register: &str) -> Option<u32> {
    let digits = register.trim().strip_prefix("0x")?;
    u64::from_str_radix(digits, 16).ok().map(|bits| (bits >> 24 & 0xff) as u32)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arm_processors_take_what_is_fast_on_them() {
        let best = |register: &str| {
            let implementer = implementer_of(register).unwrap_or(0);
            [Isa::NeonMmla, Isa::NeonBf16].into_iter().find(|isa| isa.pays_on_arm(implementer))
        };
        // Neoverse V2, Oryon, Avalanche, and a register that says nothing.
        assert_eq!(best("0x00000000410fd4f0\n"), Some(Isa::NeonMmla));
        assert_eq!(best("0x00000000511f0011\n"), Some(Isa::NeonBf16));
        assert_eq!(best("0x00000000611f0320"), None);
        assert_eq!(best("unknown"), Some(Isa::NeonMmla));
    }
}
