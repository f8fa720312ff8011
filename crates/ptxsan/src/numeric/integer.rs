//! Integer arithmetic beyond what the host has an operator for.

/// `mul.hi.u32`
#[inline]
pub const fn mul_hi_u32(a: u32, b: u32) -> u32 {
    ((a as u64 * b as u64) >> 32) as u32
}

/// `mul.hi.s32`
#[inline]
pub const fn mul_hi_s32(a: u32, b: u32) -> u32 {
    ((a as i32 as i64 * b as i32 as i64) >> 32) as u32
}

/// `mul.hi.u64`
#[inline]
pub const fn mul_hi_u64(a: u64, b: u64) -> u64 {
    ((a as u128 * b as u128) >> 64) as u64
}

/// `mul.hi.s64`
#[inline]
pub const fn mul_hi_s64(a: u64, b: u64) -> u64 {
    ((a as i64 as i128 * b as i64 as i128) >> 64) as u64
}

/// `mul.wide.u32`
#[inline]
pub const fn mul_wide_u32(a: u32, b: u32) -> u64 {
    a as u64 * b as u64
}

/// `mul.wide.s32`
#[inline]
pub const fn mul_wide_s32(a: u32, b: u32) -> u64 {
    (a as i32 as i64 * b as i32 as i64) as u64
}

/// `mul.wide.u16`
#[inline]
pub const fn mul_wide_u16(a: u16, b: u16) -> u32 {
    a as u32 * b as u32
}

/// `mul.wide.s16`
#[inline]
pub const fn mul_wide_s16(a: u16, b: u16) -> u32 {
    (a as i16 as i32 * b as i16 as i32) as u32
}

/// `mul24.lo`/`.hi` and the product of `mad24`: bits 31..0 or 47..16 of a 24-bit product.
#[inline]
pub const fn mul24(a: u32, b: u32, signed: bool, hi: bool) -> u32 {
    let product = if signed {
        ((a << 8) as i32 >> 8) as i64 * ((b << 8) as i32 >> 8) as i64
    } else {
        (a & 0xff_ffff) as i64 * (b & 0xff_ffff) as i64
    };
    (if hi { product >> 16 } else { product }) as u32
}

/// `mad.hi.sat.s32`
#[inline]
pub const fn mad_hi_sat_s32(a: u32, b: u32, c: u32) -> u32 {
    (mul_hi_s32(a, b) as i32).saturating_add(c as i32) as u32
}

/// `sad` of unsigned values of any width up to 64.
#[inline]
pub const fn sad_u64(a: u64, b: u64, c: u64) -> u64 {
    c.wrapping_add(a.abs_diff(b))
}

/// `sad` of signed values of any width up to 64, sign-extended.
#[inline]
pub const fn sad_s64(a: i64, b: i64, c: i64) -> i64 {
    c.wrapping_add(a.abs_diff(b) as i64)
}

/// `add.cc`, `addc` and `addc.cc` on 32 bits: sum and carry out.
#[inline]
pub const fn add_carry_u32(a: u32, b: u32, carry: bool) -> (u32, bool) {
    let sum = a as u64 + b as u64 + carry as u64;
    (sum as u32, sum >> 32 != 0)
}

/// `add.cc`, `addc` and `addc.cc` on 64 bits: sum and carry out.
#[inline]
pub const fn add_carry_u64(a: u64, b: u64, carry: bool) -> (u64, bool) {
    let sum = a as u128 + b as u128 + carry as u128;
    (sum as u64, sum >> 64 != 0)
}

/// `sub.cc`, `subc` and `subc.cc` on 32 bits: difference and borrow out.
#[inline]
pub const fn sub_borrow_u32(a: u32, b: u32, borrow: bool) -> (u32, bool) {
    let taken = b as u64 + borrow as u64;
    (a.wrapping_sub(taken as u32), (a as u64) < taken)
}

/// `sub.cc`, `subc` and `subc.cc` on 64 bits: difference and borrow out.
#[inline]
pub const fn sub_borrow_u64(a: u64, b: u64, borrow: bool) -> (u64, bool) {
    let taken = b as u128 + borrow as u128;
    (a.wrapping_sub(taken as u64), (a as u128) < taken)
}

/// Integer division as the hardware does it: by zero gives all ones, and the
/// one signed overflow wraps.
#[inline]
pub const fn div_u64(a: u64, b: u64) -> u64 {
    match a.checked_div(b) {
        Some(quotient) => quotient,
        None => u64::MAX,
    }
}

/// See [`div_u64`]; PTX leaves division by zero unspecified.
#[inline]
pub const fn div_s64(a: i64, b: i64) -> i64 {
    if b == 0 { -1 } else { a.wrapping_div(b) }
}

/// `rem`; by zero it leaves the dividend.
#[inline]
pub const fn rem_u64(a: u64, b: u64) -> u64 {
    match a.checked_rem(b) {
        Some(rest) => rest,
        None => a,
    }
}

/// `rem`, with the sign of the dividend; by zero it leaves the dividend.
#[inline]
pub const fn rem_s64(a: i64, b: i64) -> i64 {
    if b == 0 { a } else { a.wrapping_rem(b) }
}

/// Byte `index` of `word`, extended.
const fn byte(word: u32, index: u32, signed: bool) -> i32 {
    let byte = (word >> (8 * index)) as u8;
    if signed { byte as i8 as i32 } else { byte as i32 }
}

/// `dp4a`
#[inline]
pub const fn dp4a(a: u32, b: u32, c: u32, a_signed: bool, b_signed: bool) -> u32 {
    let mut sum = c;
    let mut i = 0;
    while i < 4 {
        sum = sum.wrapping_add((byte(a, i, a_signed) * byte(b, i, b_signed)) as u32);
        i += 1;
    }
    sum
}

/// `dp2a.lo` and `dp2a.hi`
#[inline]
pub const fn dp2a(a: u32, b: u32, c: u32, a_signed: bool, b_signed: bool, hi: bool) -> u32 {
    let mut sum = c;
    let mut i = 0;
    while i < 2 {
        let half = (a >> (16 * i)) as u16;
        let half = if a_signed { half as i16 as i32 } else { half as i32 };
        sum = sum.wrapping_add((half * byte(b, i + 2 * hi as u32, b_signed)) as u32);
        i += 1;
    }
    sum
}
