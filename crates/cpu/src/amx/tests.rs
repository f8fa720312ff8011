use super::*;
use evosdpa_oracle::rng::Rng;

/// A 2×2 product's operands, of pairs and sums of any bits or of small whole numbers.
struct Operands {
    left: Vec<f32>,
    right: Vec<f32>,
    sums: Vec<f32>,
}

const DEPTH: usize = 3;
const LEFT_STRIDE: usize = DEPTH * SIDE + 16;
const RIGHT_STRIDE: usize = 2 * SIDE + 16;

impl Operands {
    fn new(mut bits: impl FnMut() -> u32, mut sum: impl FnMut() -> f32) -> Operands {
        let mut some = |count: usize| (0..count).map(|_| f32::from_bits(bits())).collect::<Vec<f32>>();
        Operands {
            left: some(2 * SIDE * LEFT_STRIDE),
            right: some(DEPTH * SIDE * RIGHT_STRIDE),
            sums: (0..2 * SIDE * RIGHT_STRIDE).map(|_| sum()).collect(),
        }
    }

    /// The sums after the product by a unit.
    fn product<U: TileUnit, const ROWS: usize, const COLUMNS: usize, const FRESH: bool>(&self) -> Vec<u32> {
        let mut sums = self.sums.clone();
        let product = Product {
            sums: sums.as_mut_ptr(),
            sum_stride: bytes(RIGHT_STRIDE),
            left: self.left.as_ptr(),
            left_stride: bytes(LEFT_STRIDE),
            left_step: bytes(SIDE),
            right: self.right.as_ptr(),
            right_stride: bytes(RIGHT_STRIDE),
            right_step: bytes(SIDE * RIGHT_STRIDE),
            depth: DEPTH,
        };
        // SAFETY: only units of this machine are asked; operands have all of their tiles.
        unsafe {
            U::enter();
            U::multiply::<ROWS, COLUMNS, FRESH>(&product);
            U::leave();
        }
        sums.iter().map(|x| x.to_bits()).collect()
    }
}

/// Sums of small whole numbers are exact in any order.
fn whole_numbers_are_multiplied<U: TileUnit>() {
    let mut rng = Rng::new(3);
    let mut small = || f32::from(rng.below(9) as u8) - 4.0;
    let pairs: Vec<u32> =
        (0..4096).map(|_| small().to_bits() & 0xffff_0000 | small().to_bits() >> 16).collect();
    let mut at = 0;
    let next = || {
        at += 1;
        pairs[at * 7 % pairs.len()]
    };
    let operands = Operands::new(next, || 5.0);
    let pair = |x: f32| [x.to_bits() << 16, x.to_bits() & 0xffff_0000].map(f32::from_bits);
    for (rows, columns, got, begin) in [
        (2, 2, operands.product::<U, 2, 2, true>(), 0.0),
        (2, 2, operands.product::<U, 2, 2, false>(), 5.0),
        (2, 1, operands.product::<U, 2, 1, true>(), 0.0),
        (1, 2, operands.product::<U, 1, 2, false>(), 5.0),
        (1, 1, operands.product::<U, 1, 1, false>(), 5.0),
    ] {
        for row in 0..2 * SIDE {
            for column in 0..RIGHT_STRIDE {
                let mut want = 5.0;
                if row < rows * SIDE && column < columns * SIDE {
                    want = begin;
                    for k in 0..DEPTH * SIDE {
                        let a = pair(operands.left[row * LEFT_STRIDE + k]);
                        let b = pair(operands.right[k * RIGHT_STRIDE + column]);
                        want += a[0] * b[0] + a[1] * b[1];
                    }
                }
                let got = f32::from_bits(got[row * RIGHT_STRIDE + column]);
                assert_eq!(got, want, "{rows}×{columns}: row {row}, column {column}");
            }
        }
    }
}

#[test]
fn the_model_multiplies_tiles_where_they_lie() {
    whole_numbers_are_multiplied::<Model>();
}

/// One product, step by step: what an instruction that added in another order, or kept subnormal numbers, would not give.
#[test]
fn the_model_rounds_and_flushes_as_documented() {
    let pair = |even: f32, odd: f32| {
        bf16::from_f32(even).to_bits() as u32 | (bf16::from_f32(odd).to_bits() as u32) << 16
    };
    let product = |a: &[u32], b: &[u32], c: f32| {
        let (mut left, mut right, mut sums) = ([[0; SIDE]; SIDE], [[0; SIDE]; SIDE], [[0; SIDE]; SIDE]);
        left[0][..a.len()].copy_from_slice(a);
        b.iter().enumerate().for_each(|(k, b)| right[k][0] = *b);
        sums[0][0] = c.to_bits();
        model::tdpbf16ps(&mut sums, &left, &right);
        f32::from_bits(sums[0][0])
    };
    let one = pair(1.0, 1.0);
    // Even and odd products have sums of their own: 1 is not lost between 2^24 and -2^24, but is beside the former alone.
    let large = 2f32.powi(24);
    assert_eq!(product(&[pair(large, 1.0), pair(-large, 0.0)], &[one, one], 0.0), 1.0);
    assert_eq!(product(&[pair(large, 0.0), pair(1.0, 0.0), pair(-large, 0.0)], &[one; 3], 0.0), 0.0);
    // The sum so far comes last.
    assert_eq!(product(&[pair(1.0, 0.0), pair(1.0, 0.0)], &[one; 2], large), large + 2.0);
    let tiny = 2f32.powi(-70);
    assert_eq!(product(&[pair(tiny, 0.0)], &[pair(tiny, 0.0)], 0.0), 0.0);
    assert_eq!(product(&[pair(2f32.powi(-130), 0.0)], &[pair(large, 0.0)], 0.0), 0.0);
    assert_eq!(product(&[], &[], 2f32.powi(-130)), 0.0);
    assert!(product(&[pair(f32::INFINITY, 0.0)], &[pair(0.0, 0.0)], 1.0).is_nan());
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
#[test]
fn the_model_is_the_processor_bit_for_bit() {
    if let Some(lacks) = crate::Isa::Amx.lacks() {
        eprintln!("UNAVAILABLE: AMX's tiles; this machine lacks {lacks}");
        return;
    }
    whole_numbers_are_multiplied::<Hardware>();
    for round in 0..400 {
        let mut rng = Rng::new(round);
        // Half of the rounds at sizes where sums cancel, half anywhere at all.
        let near = |bits: u32| if round % 2 == 0 { (bits & 0x83ff_83ff) | 0x3c00_3c00 } else { bits };
        let mut other = Rng::new(round + 1000);
        let operands = Operands::new(
            || near(rng.below(1 << 32) as u32),
            || f32::from_bits(near(other.below(1 << 32) as u32)),
        );
        let (want, got) =
            (operands.product::<Model, 2, 2, false>(), operands.product::<Hardware, 2, 2, false>());
        for (at, (want, got)) in want.iter().zip(&got).enumerate() {
            let both_nan = f32::from_bits(*want).is_nan() && f32::from_bits(*got).is_nan();
            assert!(want == got || both_nan, "round {round}, element {at}: {got:x}, not {want:x}");
        }
    }
}
