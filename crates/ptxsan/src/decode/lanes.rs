//! Registers of a warp, 32 lanes wide, and the loops that lane-wise instructions are made of.
//!
//! Every lane-wise instruction becomes one closure over these loops. The loop computes all 32 lanes and
//! blends by the active mask, which lets the compiler vectorise it; the lane functions never panic and have
//! no effect, so computing an inactive lane is harmless.

use crate::parse::ast::Type;

/// Registers of one warp. Registers of 8 and 16 bits live in the 32-bit bank, zero-extended.
#[derive(Debug, Clone, Default)]
pub(crate) struct Regs {
    pub(crate) b32: Vec<[u32; 32]>,
    pub(crate) b64: Vec<[u64; 32]>,
    /// One bit per lane.
    pub(crate) pred: Vec<u32>,
    /// The condition code's carry flag, one bit per lane.
    pub(crate) carry: u32,
}

/// Register numbers of an instruction, each within the bank its type names.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Args {
    pub(crate) d: u32,
    pub(crate) a: u32,
    pub(crate) b: u32,
    pub(crate) c: u32,
}

/// A lane-wise instruction: registers, their numbers, the active mask.
pub(crate) type Alu = Box<dyn Fn(&mut Regs, &Args, u32) + Send + Sync>;

/// The types of the operands of a lane-wise instruction and what it does.
pub(crate) struct Plan {
    pub(crate) d: Type,
    pub(crate) sources: Vec<Type>,
    pub(crate) alu: Alu,
}

#[inline(always)]
pub(crate) fn blend<T: Copy>(to: &mut [T; 32], value: &[T; 32], mask: u32) {
    if mask == u32::MAX {
        *to = *value;
    } else {
        for lane in 0..32 {
            if mask >> lane & 1 == 1 {
                to[lane] = value[lane];
            }
        }
    }
}

#[inline(always)]
pub(crate) fn blend_bits(to: &mut u32, value: u32, mask: u32) {
    *to = (*to & !mask) | (value & mask);
}

/// The closure of a lane loop: compiled for every processor, and again for those that do eight lanes at a time.
macro_rules! compiled_twice {
    ($f:ident, $lanes:ident, $($signature:tt)+) => {{
        #[cfg(target_arch = "x86_64")]
        {
            #[target_feature(enable = "avx2,fma")]
            fn wide(f: &impl $($signature)+, r: &mut Regs, args: &Args, mask: u32) {
                $lanes(f, r, args, mask);
            }
            if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
                // SAFETY: both features the function is compiled for were just found on this processor.
                return Box::new(move |r: &mut Regs, args: &Args, mask: u32| unsafe { wide(&$f, r, args, mask) });
            }
        }
        Box::new(move |r: &mut Regs, args: &Args, mask: u32| $lanes(&$f, r, args, mask))
    }};
}

/// Builds a lane loop: result bank, then each source's bank, type and name.
macro_rules! lane_loop {
    ($name:ident, $out_bank:ident: $out:ty, $($src:ident . $bank:ident: $ty:ty),+) => {
        #[doc = concat!("A loop over ", stringify!($($bank),+), " into ", stringify!($out_bank), ".")]
        pub(crate) fn $name(f: impl Fn($($ty),+) -> $out + Send + Sync + 'static) -> Alu {
            #[inline(always)]
            fn lanes(f: &impl Fn($($ty),+) -> $out, r: &mut Regs, args: &Args, mask: u32) {
                $(let $src = &r.$bank[args.$src as usize];)+
                let mut out = [<$out>::default(); 32];
                for lane in 0..32 {
                    out[lane] = f($($src[lane]),+);
                }
                blend(&mut r.$out_bank[args.d as usize], &out, mask);
            }
            compiled_twice!(f, lanes, Fn($($ty),+) -> $out)
        }
    };
}

lane_loop!(b32_1, b32: u32, a.b32: u32);
lane_loop!(b32_2, b32: u32, a.b32: u32, b.b32: u32);
lane_loop!(b32_3, b32: u32, a.b32: u32, b.b32: u32, c.b32: u32);
lane_loop!(b64_1, b64: u64, a.b64: u64);
lane_loop!(b64_2, b64: u64, a.b64: u64, b.b64: u64);
lane_loop!(b64_3, b64: u64, a.b64: u64, b.b64: u64, c.b64: u64);
lane_loop!(b64_shift, b64: u64, a.b64: u64, b.b32: u32);
lane_loop!(b64_field, b64: u64, a.b64: u64, b.b32: u32, c.b32: u32);
lane_loop!(b32_wide2, b64: u64, a.b32: u32, b.b32: u32);
lane_loop!(b32_wide3, b64: u64, a.b32: u32, b.b32: u32, c.b64: u64);
lane_loop!(b32_from_b64, b32: u32, a.b64: u64);
lane_loop!(b64_from_b32, b64: u64, a.b32: u32);
lane_loop!(b64_pick32, b64: u64, a.b64: u64, b.b64: u64, c.b32: u32);

/// Builds a comparison loop into a predicate.
macro_rules! compare_loop {
    ($name:ident, $($src:ident . $bank:ident: $ty:ty),+) => {
        #[doc = concat!("A loop over ", stringify!($($bank),+), " into a predicate.")]
        pub(crate) fn $name(f: impl Fn($($ty),+) -> bool + Send + Sync + 'static) -> Alu {
            #[inline(always)]
            fn lanes(f: &impl Fn($($ty),+) -> bool, r: &mut Regs, args: &Args, mask: u32) {
                $(let $src = &r.$bank[args.$src as usize];)+
                let mut bits = 0u32;
                for lane in 0..32 {
                    bits |= u32::from(f($($src[lane]),+)) << lane;
                }
                blend_bits(&mut r.pred[args.d as usize], bits, mask);
            }
            compiled_twice!(f, lanes, Fn($($ty),+) -> bool)
        }
    };
}

compare_loop!(test32_1, a.b32: u32);
compare_loop!(test32_2, a.b32: u32, b.b32: u32);
compare_loop!(test64_1, a.b64: u64);
compare_loop!(test64_2, a.b64: u64, b.b64: u64);

/// Predicates are masks, so logic on them needs no loop.
pub(crate) fn pred_2(f: impl Fn(u32, u32) -> u32 + Send + Sync + 'static) -> Alu {
    Box::new(move |r, args, mask| {
        let value = f(r.pred[args.a as usize], r.pred[args.b as usize]);
        blend_bits(&mut r.pred[args.d as usize], value, mask);
    })
}

/// See [`pred_2`].
pub(crate) fn pred_1(f: impl Fn(u32) -> u32 + Send + Sync + 'static) -> Alu {
    Box::new(move |r, args, mask| {
        let value = f(r.pred[args.a as usize]);
        blend_bits(&mut r.pred[args.d as usize], value, mask);
    })
}

/// `selp`: `c` is a predicate.
pub(crate) fn select32() -> Alu {
    Box::new(|r, args, mask| {
        let (a, b, p) = (r.b32[args.a as usize], r.b32[args.b as usize], r.pred[args.c as usize]);
        let mut out = b;
        blend(&mut out, &a, p);
        blend(&mut r.b32[args.d as usize], &out, mask);
    })
}

/// See [`select32`].
pub(crate) fn select64() -> Alu {
    Box::new(|r, args, mask| {
        let (a, b, p) = (r.b64[args.a as usize], r.b64[args.b as usize], r.pred[args.c as usize]);
        let mut out = b;
        blend(&mut out, &a, p);
        blend(&mut r.b64[args.d as usize], &out, mask);
    })
}

/// An instruction that reads and sets the carry flag of each lane.
pub(crate) fn carry32(
    f: impl Fn(u32, u32, u32, bool) -> (u32, bool) + Send + Sync + 'static,
    sets: bool,
) -> Alu {
    Box::new(move |r, args, mask| {
        let (a, b, c) = (r.b32[args.a as usize], r.b32[args.b as usize], r.b32[args.c as usize]);
        let (mut out, mut carry) = ([0u32; 32], 0u32);
        for lane in 0..32 {
            let (value, flag) = f(a[lane], b[lane], c[lane], r.carry >> lane & 1 == 1);
            out[lane] = value;
            carry |= u32::from(flag) << lane;
        }
        blend(&mut r.b32[args.d as usize], &out, mask);
        if sets {
            blend_bits(&mut r.carry, carry, mask);
        }
    })
}

/// See [`carry32`].
pub(crate) fn carry64(
    f: impl Fn(u64, u64, u64, bool) -> (u64, bool) + Send + Sync + 'static,
    sets: bool,
) -> Alu {
    Box::new(move |r, args, mask| {
        let (a, b, c) = (r.b64[args.a as usize], r.b64[args.b as usize], r.b64[args.c as usize]);
        let (mut out, mut carry) = ([0u64; 32], 0u32);
        for lane in 0..32 {
            let (value, flag) = f(a[lane], b[lane], c[lane], r.carry >> lane & 1 == 1);
            out[lane] = value;
            carry |= u32::from(flag) << lane;
        }
        blend(&mut r.b64[args.d as usize], &out, mask);
        if sets {
            blend_bits(&mut r.carry, carry, mask);
        }
    })
}

/// Plans for instructions whose operands all have one type.
pub(crate) fn same(kind: Type, sources: usize, alu: Alu) -> Plan {
    Plan { d: kind, sources: vec![kind; sources], alu }
}
