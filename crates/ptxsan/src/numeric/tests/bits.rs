//! Bit operations against the semantics blocks of the documentation, bit by bit.

use super::Random;
use crate::numeric::bits::*;
use crate::numeric::integer::*;

fn bit(word: u64, i: u32) -> u64 {
    if i < 64 { (word >> i) & 1 } else { 0 }
}

#[test]
fn fields_match_the_loops_of_the_documentation() {
    let mut random = Random(9);
    for _ in 0..20_000 {
        let (a, b) = (random.next(), random.next());
        let (pos, len) = (random.below(90) as u32, random.below(90) as u32);
        let (pos, len) = if random.below(8) == 0 { (pos + 200, len + 300) } else { (pos, len) };
        for width in [32, 64] {
            let mask = if width == 32 { 0xffff_ffff } else { u64::MAX };
            let (p, l) = (pos & 0xff, len & 0xff);
            let sign = if l == 0 { 0 } else { bit(a, (p + l - 1).min(width - 1)) };
            let (mut unsigned, mut signed, mut inserted) = (0, 0, b & mask);
            for i in 0..width {
                let inside = i < l && p + i < width;
                unsigned |= (if inside { bit(a, p + i) } else { 0 }) << i;
                signed |= (if inside { bit(a, p + i) } else { sign }) << i;
                if inside {
                    inserted = (inserted & !(1 << (p + i))) | bit(a, i) << (p + i);
                }
            }
            assert_eq!(bfe_unsigned(a, pos, len, width), unsigned, "{a:x} {pos} {len} {width}");
            assert_eq!(bfe_signed(a, pos, len, width), signed, "{a:x} {pos} {len} {width}");
            assert_eq!(bfi(a, b & mask, pos, len, width), inserted, "{a:x} {b:x} {pos} {len} {width}");
        }
    }
}

#[test]
fn searches_find_the_right_bit() {
    assert_eq!(bfind(0, 32, false, false), u32::MAX);
    assert_eq!(bfind(0xffff_ffff, 32, true, false), u32::MAX);
    assert_eq!(bfind(0xffff_fff0, 32, true, false), 3);
    assert_eq!(bfind(0x10, 32, false, true), 27);
    assert_eq!(bfind(1 << 40, 64, true, false), 40);
    assert_eq!(bfind(u64::MAX << 40, 64, true, true), 24);
    // The four examples of the documentation.
    assert_eq!(fns(0xaaaa_aaaa, 3, 1), 3);
    assert_eq!(fns(0xaaaa_aaaa, 3, -1), 3);
    assert_eq!(fns(0xaaaa_aaaa, 2, 1), 3);
    assert_eq!(fns(0xaaaa_aaaa, 2, -1), 1);
    assert_eq!(fns(0xaaaa_aaaa, 2, 0), u32::MAX);
    assert_eq!(fns(0x8000_0001, 0, 2), 31);
    assert_eq!(fns(0xffff_ffff, 0, i32::MIN), u32::MAX);
    assert_eq!(fns(0xffff_ffff, 40, 1), u32::MAX);
}

#[test]
fn shifts_clamp_their_counts() {
    assert_eq!(shl(1, 31, 32), 0x8000_0000);
    assert_eq!(shl(1, 32, 32), 0);
    assert_eq!(shl(3, u32::MAX, 64), 0);
    assert_eq!(shl(0xffff, 4, 16), 0xfff0);
    assert_eq!(shr_unsigned(0x8000_0000, 31, 32), 1);
    assert_eq!(shr_unsigned(u64::MAX, 64, 64), 0);
    assert_eq!(shr_signed(0x8000_0000, 100, 32), 0xffff_ffff);
    assert_eq!(shr_signed(0x8000, 3, 16), 0xf000);
    assert_eq!(shr_signed(0x4000_0000, 40, 32), 0);
    for count in 0..70 {
        let (a, b) = (0x89ab_cdefu32, 0x0123_4567u32);
        let (clamped, wrapped) = (count.min(32), count & 31);
        for (n, excess) in [(clamped, Excess::Clamp), (wrapped, Excess::Wrap)] {
            let left = if n == 32 { a } else { (b << n) | a.checked_shr(32 - n).unwrap_or(0) };
            let right = if n == 32 { b } else { b.checked_shl(32 - n).unwrap_or(0) | (a >> n) };
            assert_eq!(shf_left(a, b, count, excess), left, "{count} {excess:?}");
            assert_eq!(shf_right(a, b, count, excess), right, "{count} {excess:?}");
        }
    }
}

#[test]
fn lop3_evaluates_any_table() {
    let (a, b, c) = (0xf0f0_1234, 0xcccc_abcd, 0xaaaa_5678);
    assert_eq!(lop3(a, b, c, 0x80), a & b & c);
    assert_eq!(lop3(a, b, c, 0xfe), a | b | c);
    assert_eq!(lop3(a, b, c, 0x40), a & b & !c);
    assert_eq!(lop3(a, b, c, 0x1a), (a & b | c) ^ a);
    assert_eq!(lop3(a, b, c, 0x96), a ^ b ^ c);
    for table in 0..=255u8 {
        assert_eq!(lop3(0xf0, 0xcc, 0xaa, table) as u8, table);
    }
}

#[test]
fn prmt_follows_its_table() {
    let (a, b) = (0x8382_8100, 0x8786_8504);
    assert_eq!(prmt(a, b, 0x3210, Permute::Generic), a);
    assert_eq!(prmt(a, b, 0x7654, Permute::Generic), b);
    assert_eq!(prmt(a, b, 0xc098, Permute::Generic), 0x0000_ff00);
    // The rows of the documented table, d.b3 first.
    let table: [(Permute, [[u32; 4]; 4]); 6] = [
        (Permute::Forward4, [[3, 2, 1, 0], [4, 3, 2, 1], [5, 4, 3, 2], [6, 5, 4, 3]]),
        (Permute::Backward4, [[5, 6, 7, 0], [6, 7, 0, 1], [7, 0, 1, 2], [0, 1, 2, 3]]),
        (Permute::Replicate8, [[0, 0, 0, 0], [1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3]]),
        (Permute::EdgeClampLeft, [[3, 2, 1, 0], [3, 2, 1, 1], [3, 2, 2, 2], [3, 3, 3, 3]]),
        (Permute::EdgeClampRight, [[0, 0, 0, 0], [1, 1, 1, 0], [2, 2, 1, 0], [3, 2, 1, 0]]),
        (Permute::Replicate16, [[1, 0, 1, 0], [3, 2, 3, 2], [1, 0, 1, 0], [3, 2, 3, 2]]),
    ];
    for (mode, rows) in table {
        for (control, row) in rows.iter().enumerate() {
            let want = row.iter().fold(0, |word, source| word << 8 | source);
            // Byte i of the pair is i, so the result spells out the sources.
            assert_eq!(
                prmt(0x0302_0100, 0x0706_0504, control as u32 | 0xf0, mode),
                want,
                "{mode:?} {control}"
            );
        }
    }
}

#[test]
fn extension_and_masks() {
    assert_eq!(szext(0xffff_ffff, 0, false, Excess::Wrap), 0);
    assert_eq!(szext(0x80, 8, true, Excess::Clamp), 0xffff_ff80);
    assert_eq!(szext(0x180, 8, false, Excess::Clamp), 0x80);
    assert_eq!(szext(0x8765_4321, 40, true, Excess::Clamp), 0x8765_4321);
    assert_eq!(szext(0x80, 40, true, Excess::Wrap), 0xffff_ff80);
    assert_eq!(szext(0x80, 32, true, Excess::Wrap), 0);
    assert_eq!(bmsk(1, 2, Excess::Wrap), 6);
    assert_eq!(bmsk(32, 4, Excess::Clamp), 0);
    assert_eq!(bmsk(4, 40, Excess::Clamp), 0xffff_fff0);
    assert_eq!(bmsk(28, 8, Excess::Wrap), 0xf000_0000);
    assert_eq!(bmsk(33, 33, Excess::Wrap), 2);
}

#[test]
fn wide_products_and_carries() {
    let mut random = Random(10);
    for _ in 0..10_000 {
        let (a, b, c) = (random.next(), random.next(), random.next());
        let (x, y) = (a as u32, b as u32);
        assert_eq!(mul_wide_u32(x, y), x as u64 * y as u64);
        assert_eq!(mul_hi_u32(x, y) as u64, (x as u64 * y as u64) >> 32);
        assert_eq!(mul_wide_s32(x, y) as i64, x as i32 as i64 * y as i32 as i64);
        assert_eq!(mul_hi_s32(x, y), (mul_wide_s32(x, y) >> 32) as u32);
        // A product of 64-bit values by halves.
        let (ah, al, bh, bl) = (a >> 32, a & 0xffff_ffff, b >> 32, b & 0xffff_ffff);
        let middle = ((al * bl) >> 32) + ((ah * bl) & 0xffff_ffff) + ((al * bh) & 0xffff_ffff);
        let high = ah * bh + ((ah * bl) >> 32) + ((al * bh) >> 32) + (middle >> 32);
        assert_eq!(mul_hi_u64(a, b), high);
        let fix = (if (a as i64) < 0 { b } else { 0 }).wrapping_add(if (b as i64) < 0 { a } else { 0 });
        assert_eq!(mul_hi_s64(a, b), high.wrapping_sub(fix));
        // Two words at a time give the same as one double word.
        for carry in [false, true] {
            let (low, c1) = add_carry_u32(a as u32, b as u32, carry);
            let (up, c2) = add_carry_u32((a >> 32) as u32, (b >> 32) as u32, c1);
            assert_eq!(((up as u64) << 32 | low as u64, c2), add_carry_u64(a, b, carry));
            let (low, c1) = sub_borrow_u32(a as u32, b as u32, carry);
            let (up, c2) = sub_borrow_u32((a >> 32) as u32, (b >> 32) as u32, c1);
            assert_eq!(((up as u64) << 32 | low as u64, c2), sub_borrow_u64(a, b, carry));
        }
        assert_eq!(sad_u64(a, b, c), c.wrapping_add(a.max(b) - a.min(b)));
        assert_eq!(sad_s64(a as i64, b as i64, 5), sad_s64(b as i64, a as i64, 5));
    }
    assert_eq!(add_carry_u32(u32::MAX, 0, true), (0, true));
    assert_eq!(sub_borrow_u32(0, u32::MAX, true), (0, true));
    assert_eq!(mul24(0xff80_0000, 2, true, false), 0xff00_0000);
    assert_eq!(mul24(0x00ff_ffff, 0x00ff_ffff, false, true), 0xffff_fe00);
    assert_eq!(mad_hi_sat_s32(0x8000_0000, 0x8000_0000, 0x7000_0000), 0x7fff_ffff);
    assert_eq!(mul_wide_s16(0x8000, 2), 0xffff_0000);
    assert_eq!(mul_wide_u16(0x8000, 2), 0x0001_0000);
}

#[test]
fn division_does_not_trap() {
    assert_eq!(div_u64(5, 0), u64::MAX);
    assert_eq!(div_s64(i64::MIN, -1), i64::MIN);
    assert_eq!(div_s64(-7, 2), -3);
    assert_eq!(rem_s64(-7, 2), -1);
    assert_eq!(rem_s64(i64::MIN, -1), 0);
    assert_eq!((rem_u64(7, 0), rem_s64(7, 0), div_s64(7, 0)), (7, 7, -1));
}

#[test]
fn dot_products_of_bytes() {
    assert_eq!(dp4a(0x0102_0304, 0x0101_0101, 5, false, false), 15);
    assert_eq!(dp4a(0xffff_ffff, 0x0202_0202, 0, true, false) as i32, -8);
    assert_eq!(dp4a(0xffff_ffff, 0xffff_ffff, 0, false, true) as i32, -1020);
    assert_eq!(dp2a(0x0002_ffff, 0x0403_0201, 0, true, false, false) as i32, 3);
    assert_eq!(dp2a(0x0002_ffff, 0x0403_0201, 0, true, false, true) as i32, 5);
    assert_eq!(dp2a(0xffff_ffff, 0x0000_ffff, 0, false, false, false), 2 * 0xffff * 0xff);
}
