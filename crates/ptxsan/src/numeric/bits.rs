//! Bit fields, shifts, permutes.

/// How a shift or width operand beyond the register is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Excess {
    /// `.clamp`
    Clamp,
    /// `.wrap`
    Wrap,
}

/// The ones of a field of `len` bits; all ones from 64 on.
const fn low_ones(len: u32) -> u64 {
    if len >= 64 { u64::MAX } else { (1 << len) - 1 }
}

/// `bfe.u32`/`.u64`, for a register of `width` bits.
#[inline]
pub const fn bfe_unsigned(a: u64, pos: u32, len: u32, width: u32) -> u64 {
    let (pos, len) = (pos & 0xff, len & 0xff);
    let a = a & low_ones(width);
    if pos >= 64 { 0 } else { (a >> pos) & low_ones(len) }
}

/// `bfe.s32`/`.s64`, for a register of `width` bits.
#[inline]
pub const fn bfe_signed(a: u64, pos: u32, len: u32, width: u32) -> u64 {
    let (pos, len) = (pos & 0xff, len & 0xff);
    if len == 0 {
        return 0;
    }
    let last = pos + len - 1;
    let sign_bit = if last < width - 1 { last } else { width - 1 };
    let negative = (a >> sign_bit) & 1 == 1;
    let available = width.saturating_sub(pos);
    let taken = if len < available { len } else { available };
    let field = bfe_unsigned(a, pos, taken, width);
    (if negative { field | !low_ones(taken) } else { field }) & low_ones(width)
}

/// `bfi.b32`/`.b64`, for registers of `width` bits: `len` bits of `a` into `b` at `pos`.
#[inline]
pub const fn bfi(a: u64, b: u64, pos: u32, len: u32, width: u32) -> u64 {
    let (pos, len) = (pos & 0xff, len & 0xff);
    if pos >= width {
        return b;
    }
    let mask = (low_ones(len) << pos) & low_ones(width);
    (b & !mask) | ((a << pos) & mask)
}

/// `bfind`: the position of the most significant bit that is no sign bit, or `0xffffffff`.
#[inline]
pub const fn bfind(a: u64, width: u32, signed: bool, shift_amount: bool) -> u32 {
    let negative = signed && (a >> (width - 1)) & 1 == 1;
    let a = (if negative { !a } else { a }) & low_ones(width);
    if a == 0 {
        return u32::MAX;
    }
    let position = 63 - a.leading_zeros();
    if shift_amount { width - 1 - position } else { position }
}

/// `fns`: the `offset`-th set bit of `mask` from `base` on, or `0xffffffff`.
pub const fn fns(mask: u32, base: u32, offset: i32) -> u32 {
    if base > 31 {
        return u32::MAX;
    }
    if offset == 0 {
        return if (mask >> base) & 1 == 1 { base } else { u32::MAX };
    }
    let step = if offset > 0 { 1 } else { -1 };
    let mut left = offset.unsigned_abs() - 1;
    let mut position = base as i32;
    while position >= 0 && position < 32 {
        if (mask >> position) & 1 == 1 {
            if left == 0 {
                return position as u32;
            }
            left -= 1;
        }
        position += step;
    }
    u32::MAX
}

/// `shl`: counts from the width on give zero.
#[inline]
pub const fn shl(a: u64, count: u32, width: u32) -> u64 {
    if count >= width { 0 } else { (a << count) & low_ones(width) }
}

/// `shr` of an unsigned or untyped value: counts from the width on give zero.
#[inline]
pub const fn shr_unsigned(a: u64, count: u32, width: u32) -> u64 {
    if count >= width { 0 } else { (a & low_ones(width)) >> count }
}

/// `shr` of a signed value: counts from the width on leave only the sign.
#[inline]
pub const fn shr_signed(a: u64, count: u32, width: u32) -> u64 {
    let unused = 64 - width;
    let value = (a << unused) as i64 >> unused;
    let count = if count >= width { width - 1 } else { count };
    (value >> count) as u64 & low_ones(width)
}

/// The count of a funnel shift.
const fn funnel_count(count: u32, excess: Excess) -> u32 {
    match excess {
        Excess::Clamp if count > 32 => 32,
        Excess::Clamp => count,
        Excess::Wrap => count & 31,
    }
}

/// `shf.l`: the upper word of `{b, a}` shifted left.
#[inline]
pub const fn shf_left(a: u32, b: u32, count: u32, excess: Excess) -> u32 {
    let pair = (b as u64) << 32 | a as u64;
    ((pair << funnel_count(count, excess)) >> 32) as u32
}

/// `shf.r`: the lower word of `{b, a}` shifted right.
#[inline]
pub const fn shf_right(a: u32, b: u32, count: u32, excess: Excess) -> u32 {
    let pair = (b as u64) << 32 | a as u64;
    (pair >> funnel_count(count, excess)) as u32
}

/// `lop3`: any function of three bits, as a table indexed by `a·4 + b·2 + c`.
#[inline]
pub const fn lop3(a: u32, b: u32, c: u32, table: u8) -> u32 {
    let mut result = 0;
    let mut row = 0;
    while row < 8 {
        if (table >> row) & 1 == 1 {
            let pick_a = if row & 4 != 0 { a } else { !a };
            let pick_b = if row & 2 != 0 { b } else { !b };
            let pick_c = if row & 1 != 0 { c } else { !c };
            result |= pick_a & pick_b & pick_c;
        }
        row += 1;
    }
    result
}

/// The mode of a `prmt`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Permute {
    /// Four selectors of four bits each, the top bit replicating the byte's sign.
    Generic,
    /// `.f4e`: four bytes forward.
    Forward4,
    /// `.b4e`: four bytes backward.
    Backward4,
    /// `.rc8`: one byte four times.
    Replicate8,
    /// `.ecl`: edge clamp left.
    EdgeClampLeft,
    /// `.ecr`: edge clamp right.
    EdgeClampRight,
    /// `.rc16`: one half twice.
    Replicate16,
}

/// `prmt`: four bytes chosen from `{b, a}`.
#[inline]
pub const fn prmt(a: u32, b: u32, control: u32, mode: Permute) -> u32 {
    let pair = (b as u64) << 32 | a as u64;
    let edge = control & 3;
    let mut result = 0;
    let mut i = 0;
    while i < 4 {
        let selector = match mode {
            Permute::Generic => (control >> (4 * i)) & 0xf,
            Permute::Forward4 => edge + i,
            Permute::Backward4 => (edge + 8 - i) & 7,
            Permute::Replicate8 => edge,
            Permute::EdgeClampLeft => {
                if i > edge {
                    i
                } else {
                    edge
                }
            }
            Permute::EdgeClampRight => {
                if i < edge {
                    i
                } else {
                    edge
                }
            }
            Permute::Replicate16 => (edge & 1) * 2 + (i & 1),
        };
        let byte = (pair >> (8 * (selector & 7))) as u8;
        let byte = if selector & 8 != 0 { ((byte as i8) >> 7) as u8 } else { byte };
        result |= (byte as u32) << (8 * i);
        i += 1;
    }
    result
}

/// `szext`: the low `count` bits of `a`, sign- or zero-extended.
#[inline]
pub const fn szext(a: u32, count: u32, signed: bool, excess: Excess) -> u32 {
    let count = match excess {
        Excess::Clamp if count >= 32 => return a,
        _ => count & 31,
    };
    if count == 0 {
        return 0;
    }
    let unused = 32 - count;
    if signed { ((a << unused) as i32 >> unused) as u32 } else { (a << unused) >> unused }
}

/// `bmsk`: `count` ones from bit `position` on.
#[inline]
pub const fn bmsk(position: u32, count: u32, excess: Excess) -> u32 {
    let (position, count) = match excess {
        Excess::Wrap => (position & 31, count & 31),
        Excess::Clamp if position >= 32 => return 0,
        Excess::Clamp if count >= 32 => (position, 32),
        Excess::Clamp => (position, count),
    };
    (low_ones(count) << position) as u32
}
