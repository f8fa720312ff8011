use super::*;
use crate::isa::Isa;
use crate::neon_bf16::tests::{bfdot, is_same, some_bits};
use evosdpa_oracle::rng::Rng;

#[target_feature(enable = "neon,bf16")]
unsafe fn block_of(a: &[u32; 4], b: &[u32; 4], block: &mut [f32; 4]) {
    // SAFETY: the features are enabled here; arrays hold a vector.
    unsafe {
        let (a, b) = (vld1q_f32(a.as_ptr().cast()), vld1q_f32(b.as_ptr().cast()));
        vst1q_f32(block.as_mut_ptr(), bfmmla(a, b, vld1q_f32(block.as_ptr())));
    }
}

/// Each of 2×2 sums is that of `bfdot` of the first pairs, and to it that of the second pairs.
#[test]
fn blocks_are_bit_for_bit_those_of_the_model() {
    if let Some(lacks) = Isa::NeonMmla.lacks() {
        eprintln!("UNAVAILABLE: products of bfloat16 quads; this machine lacks {lacks}");
        return;
    }
    let mut rng = Rng::new(11);
    for round in 0..10_000 {
        let mut next = || [(); 4].map(|()| some_bits(&mut rng, round));
        let (a, b, c) = (next(), next(), next().map(f32::from_bits));
        let mut block = c;
        // SAFETY: the instruction set is available.
        unsafe { block_of(&a, &b, &mut block) };
        for at in 0..4 {
            let (row, column) = (at / 2, at % 2);
            let first = bfdot(a[2 * row], b[2 * column], c[at]);
            let want = bfdot(a[2 * row + 1], b[2 * column + 1], first);
            let got = block[at];
            assert!(is_same(got, want), "{a:x?} · {b:x?} + {c:?}: {got:e}, not {want:e}, at {at}");
        }
    }
}

/// What is not finite is told from what is, whatever its neighbours are.
#[test]
fn quads_keep_what_is_finite() {
    let halves = [0x7f80u16, 0x3f80, 0xff80, 0x7f7f, 0x7fc0, 0x0001, 0xffff, 0x8000];
    let mut kept = [0u16; 8];
    // SAFETY: every 64-bit ARM processor has NEON; arrays hold a vector.
    unsafe {
        let rows = vreinterpretq_f32_u16(vld1q_u16(halves.as_ptr()));
        vst1q_u16(kept.as_mut_ptr(), vreinterpretq_u16_f32(finite(rows)));
    }
    assert_eq!(kept, [0, 0x3f80, 0, 0x7f7f, 0, 0x0001, 0, 0x8000]);
}

/// Rows of any number of columns, from any row on, in pieces as pages have them.
#[test]
fn keys_lie_beside_their_neighbours() {
    const STRIDE: usize = 16;
    for columns in [1usize, 3, 4, 7, 8, 13, 16] {
        let keys: Vec<u16> = (1..=6 * 16).collect();
        let mut packed = [f32::from_bits(0xffff_ffff); 6 * STRIDE];
        for (first, rows) in [(0, 1), (1, 2), (3, 3)] {
            let src = keys[first * 16..].as_ptr().cast();
            // SAFETY: the place of row `first`, within what is packed.
            let dst = unsafe { packed.as_mut_ptr().add(first * STRIDE) };
            // SAFETY: rows of 16 keys and their places.
            unsafe {
                quad_keys(first, &Rows { src, src_stride: 16, rows, columns, dst, dst_stride: STRIDE })
            };
        }
        let bits = |at: usize| packed[at].to_bits();
        for row in 0..6 {
            for column in 0..columns.next_multiple_of(8) {
                let at = row / 2 * 2 * STRIDE + column / 4 * 4 + row % 2 * 2 + column % 4 / 2;
                let got = bits(at) >> (16 * (column % 2)) & 0xffff;
                let want = if column < columns { u32::from(keys[row * 16 + column]) } else { 0 };
                assert_eq!(got, want, "row {row}, column {column} of {columns}");
            }
        }
    }
}
