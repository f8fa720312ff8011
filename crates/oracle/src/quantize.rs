//! Quantising: f32 tensors into 8-bit codes with scales.
//!
//! A scale is `absmax / 448` in fp32 of the elements it is for, `absmax / 127` for i8, which puts the largest of them at the
//! end of the code's range; all-zero elements have scale 1, and so have those so small that their scale would underflow: their
//! codes are then all zero. A code's real value is its value at scale one ([`evosdpa_core::U8Code`], [`evosdpa_core::E4M3Code`],
//! [`evosdpa_core::I8Code`]) times the scale.

use evosdpa_core::{DType, Granularity, Layout, Lengths, Problem, Sequences, SideInputs, Tensor, TensorView};
use rayon::prelude::*;

use crate::elements;

/// The scales of Q, K and V, as many as the problem's granularity says; empty for a tensor without codes.
#[derive(Clone, Debug, PartialEq)]
pub struct Scales {
    /// For Q.
    pub q: Vec<f32>,
    /// For K.
    pub k: Vec<f32>,
    /// For V.
    pub v: Vec<f32>,
}

/// Which scale each row of a tensor has.
pub(crate) struct Groups {
    granularity: Granularity,
    batch: usize,
    /// Blocks (sequences, pages), heads and rows of the tensor.
    shape: [usize; 3],
    /// The sequence that each place belongs to; `None` when it is the block.
    owners: Option<Vec<Option<usize>>>,
    /// Whether a place belongs to several sequences, which then have one scale.
    shared: bool,
}

impl Groups {
    /// Of Q, or of K and V, of a problem whose lengths and pages fit it.
    pub(crate) fn new(problem: &Problem, side: &SideInputs<'_>, of_queries: bool) -> Self {
        let [blocks, heads, rows, _] = if of_queries { problem.q_shape() } else { problem.k_shape() };
        let (granularity, batch) = (problem.scale_granularity(), problem.sizes().batch);
        let mut groups =
            Self { granularity, batch, shape: [blocks, heads, rows], owners: None, shared: false };
        if problem.lengths() == Lengths::default() {
            return groups;
        }
        // Inputs are drawn to fit, and only places of sequences matter here.
        let sequences = Sequences::new(problem, side, problem.q_shape(), problem.k_shape());
        let (Ok(sequences), Granularity::Head) = (sequences, granularity) else { return groups };
        let mut owners = vec![None; blocks * rows];
        let mut shared = false;
        let mut own = |place: usize, b: usize| {
            shared |= owners[place].is_some_and(|owner| owner != b);
            owners[place].get_or_insert(b);
        };
        for b in 0..batch {
            if of_queries {
                sequences.queries(b).for_each(|row| own(sequences.query_batch(b) * rows + row, b));
            } else {
                (0..sequences.keys(b))
                    .map(|j| sequences.key(b, j))
                    .for_each(|at| own(at.batch * rows + at.row, b));
            }
        }
        (groups.owners, groups.shared) = (Some(owners), shared);
        groups
    }

    fn count(&self) -> usize {
        let [blocks, heads, rows] = self.shape;
        match self.granularity {
            Granularity::Tensor => 1,
            Granularity::Head => self.batch * heads,
            Granularity::Token => blocks * heads * rows,
        }
    }

    /// The scale of a row; `None` where it belongs to nobody.
    fn of(&self, block: usize, head: usize, row: usize) -> Option<usize> {
        let [_, heads, rows] = self.shape;
        match (self.granularity, &self.owners) {
            (Granularity::Tensor, _) => Some(0),
            (Granularity::Token, _) => Some((block * heads + head) * rows + row),
            (Granularity::Head, None) => Some(block * heads + head),
            (Granularity::Head, Some(owners)) => owners[block * rows + row].map(|b| b * heads + head),
        }
    }
}

/// A tensor of 8-bit codes and its scales.
#[derive(Clone, Debug)]
pub(crate) struct Quantized {
    pub(crate) codes: Tensor,
    pub(crate) scales: Vec<f32>,
}

/// Quantises elements into `codes`, a tensor of the same shape and of an 8-bit dtype. What is not finite is of nobody: it
/// becomes NaN, or the largest code of u8 and i8, which have no NaN.
pub(crate) fn quantize_into(tensor: &TensorView<'_>, mut codes: Tensor, groups: &Groups) -> Quantized {
    let [blocks, heads, rows, _] = tensor.shape();
    let index = |r: usize| (r / (heads * rows), r / rows % heads, r % rows);
    let largest_of = |row: &mut Vec<f64>, r: usize| {
        let (block, h, s) = index(r);
        tensor.row_f64(block, h, s, row);
        row.iter().filter(|x| x.is_finite()).fold(0.0f64, |max, x| max.max(x.abs()))
    };
    let of_rows: Vec<f64> =
        (0..blocks * heads * rows).into_par_iter().with_min_len(128).map_init(Vec::new, largest_of).collect();
    let mut largest = vec![0.0f64; groups.count()];
    for (r, of_row) in of_rows.into_iter().enumerate() {
        let (block, h, s) = index(r);
        let Some(group) = groups.of(block, h, s) else { continue };
        largest[group] = largest[group].max(of_row);
    }
    if groups.shared {
        for head in 0..heads {
            let of_all = (0..groups.batch).map(|b| largest[b * heads + head]).fold(0.0, f64::max);
            (0..groups.batch).for_each(|b| largest[b * heads + head] = of_all);
        }
    }
    let dtype = codes.view().dtype();
    // Floating-point tensors are not quantised.
    let code_max = dtype.code_max().unwrap_or(1.0);
    let scale_of = |absmax: f64| {
        let scale = (absmax / code_max) as f32;
        if scale == 0.0 { 1.0 } else { scale }
    };
    let scales: Vec<f32> = largest.into_iter().map(scale_of).collect();
    let poison = if dtype == DType::E4M3 { f64::NAN } else { f64::INFINITY };
    elements::fill_rows(&mut codes, |[block, h, s], row| {
        let Some(group) = groups.of(block, h, s) else { return row.fill(poison) };
        let mut values = Vec::with_capacity(row.len());
        tensor.row_f64(block, h, s, &mut values);
        let scaled = |value: f64| if value.is_finite() { value / f64::from(scales[group]) } else { poison };
        row.iter_mut().zip(values).for_each(|(code, value)| *code = scaled(value));
    });
    Quantized { codes, scales }
}

/// The f32 values that codes stand for, packed; NaN where they belong to nobody.
pub(crate) fn dequantize(codes: &Tensor, scales: &[f32], groups: &Groups) -> Tensor {
    let view = codes.view();
    let mut tensor = Tensor::zeros(view.shape(), DType::F32, Layout::Bhsd);
    elements::fill_rows(&mut tensor, |[block, h, s], row| {
        let Some(group) = groups.of(block, h, s) else { return row.fill(f64::NAN) };
        let mut codes = Vec::with_capacity(row.len());
        view.row_f64(block, h, s, &mut codes);
        row.iter_mut().zip(codes).for_each(|(value, code)| *value = code * f64::from(scales[group]));
    });
    tensor
}

#[cfg(test)]
mod tests {
    use super::*;

    fn groups(text: &str) -> Groups {
        let problem = Problem::new(text.parse().unwrap(), DType::U8).unwrap();
        Groups::new(&problem, &SideInputs::default(), true)
    }

    fn quantized(tensor: &Tensor, dtype: DType, groups: &Groups) -> Quantized {
        quantize_into(&tensor.view(), Tensor::zeros(tensor.view().shape(), dtype, Layout::Bhsd), groups)
    }

    fn values(tensor: &Tensor) -> Vec<f32> {
        bytemuck::cast_slice(tensor.bytes()).to_vec()
    }

    /// Two heads of different size, the second all zero in its second batch entry.
    fn sample() -> Tensor {
        elements::from_fn([2, 2, 9, 5], DType::F32, Layout::Bhsd, |[b, h, s, d]| {
            let wave = (s as f64 * 1.7 + d as f64 * 0.9 + b as f64).sin();
            if (b, h) == (1, 1) { 0.0 } else { wave * if h == 0 { 3.0 } else { 1e-3 } }
        })
    }

    #[test]
    fn each_head_fills_the_range_of_its_code() {
        let tensor = sample();
        for dtype in DType::EIGHT_BIT {
            let quantized = quantized(&tensor, dtype, &groups("b2h2s9d5"));
            assert_eq!(quantized.scales.len(), 4);
            assert_eq!(quantized.scales[3], 1.0);
            for (head, scale) in quantized.scales[..3].iter().enumerate() {
                let absmax = values(&tensor)[head * 45..][..45].iter().fold(0f32, |m, x| m.max(x.abs()));
                let (most, ends): (f32, [u8; 2]) = match dtype {
                    DType::U8 => (448.0, [1, 255]),
                    DType::I8 => (127.0, [127, -127i8 as u8]),
                    _ => (448.0, [0x7E, 0xFE]),
                };
                assert_eq!(*scale, absmax / most);
                let codes = &quantized.codes.bytes()[head * 45..][..45];
                assert!(codes.iter().any(|code| ends.contains(code)), "{dtype} head {head}");
            }
            let zero = if dtype == DType::U8 { 128 } else { 0 };
            assert!(quantized.codes.bytes()[3 * 45..].iter().all(|&code| code == zero));
        }
    }

    #[test]
    fn codes_are_what_the_formula_says_and_come_back_within_half_a_step() {
        let tensor = sample();
        let groups = groups("b2h2s9d5");
        let quantized_to = |dtype| {
            let quantized = quantized(&tensor, dtype, &groups);
            let back = values(&dequantize(&quantized.codes, &quantized.scales, &groups));
            (quantized, back)
        };
        let (quantized, back) = quantized_to(DType::U8);
        for (i, x) in values(&tensor).into_iter().enumerate() {
            let s = quantized.scales[i / 45];
            let formula = (f64::from(x) / (448.0 * f64::from(s)) * 127.0 + 128.0).round();
            assert_eq!(f64::from(quantized.codes.bytes()[i]), formula);
            assert!((back[i] - x).abs() <= 448.0 * s / 127.0 * 0.500_001);
        }
        let (quantized, back) = quantized_to(DType::I8);
        for (i, x) in values(&tensor).into_iter().enumerate() {
            let s = quantized.scales[i / 45];
            let formula = (f64::from(x) / f64::from(s)).round();
            assert_eq!(f64::from(quantized.codes.bytes()[i] as i8), formula);
            assert!((back[i] - x).abs() <= s * 0.500_001);
        }
        let (quantized, back) = quantized_to(DType::E4M3);
        for (i, x) in values(&tensor).into_iter().enumerate() {
            // Half a unit of three mantissa bits, or half the smallest subnormal.
            let allowed = (x.abs() / 16.0).max(quantized.scales[i / 45] / 1024.0);
            assert!((back[i] - x).abs() <= allowed * 1.000_001, "{x} {}", back[i]);
        }
    }

    #[test]
    fn numbers_do_not_depend_on_the_layout_or_the_gaps() {
        let tensor = sample();
        for dtype in DType::EIGHT_BIT {
            let groups = groups("b2h2s9d5");
            let packed = quantized(&tensor, dtype, &groups);
            let gapped = Tensor::poisoned_gaps([2, 2, 9, 5], dtype, Layout::Bshd, 3);
            let gapped = quantize_into(&tensor.view(), gapped, &groups);
            assert_eq!(gapped.scales, packed.scales);
            let back = |q: &Quantized| values(&dequantize(&q.codes, &q.scales, &groups));
            assert_eq!(back(&gapped), back(&packed));
            // Whether or not a gap's byte is a number in this dtype, the gaps are never read as one.
            let gap = [Tensor::gap_byte(dtype); 3];
            assert_eq!(gapped.codes.bytes().chunks(8).filter(|row| row[5..] == gap).count(), 36);
        }
    }

    #[test]
    fn each_granularity_has_its_own_number_of_scales() {
        let tensor = sample();
        for (text, count) in [("tensor", 1), ("head", 4), ("token", 36)] {
            let groups = groups(&format!("b2h2s9d5:scales={text}"));
            let quantized = quantized(&tensor, DType::U8, &groups);
            assert_eq!(quantized.scales.len(), count);
            let back = values(&dequantize(&quantized.codes, &quantized.scales, &groups));
            let worst = values(&tensor).iter().zip(&back).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
            assert!(worst <= 3.0 / 254.0 * 1.001, "{text}: {worst}");
        }
    }

    #[test]
    fn what_is_too_small_or_not_finite_has_a_code() {
        let groups = groups("b1h1s1d2");
        let codes = |x: f64, dtype| {
            let tensor =
                elements::from_fn(
                    [1, 1, 1, 2],
                    DType::F32,
                    Layout::Bhsd,
                    |[.., d]| if d == 1 { x } else { 0.0 },
                );
            let quantized = quantized(&tensor, dtype, &groups);
            (quantized.scales[0], quantized.codes.bytes().to_vec())
        };
        assert_eq!(codes(f64::NAN, DType::U8), (1.0, vec![128, 255]));
        assert_eq!(codes(f64::INFINITY, DType::E4M3).1, [0, 0x7F]);
        assert_eq!(codes(f64::NAN, DType::I8), (1.0, vec![0, 127]));
        assert_eq!(codes(1e-45, DType::U8), (1.0, vec![128, 128]));
        let (scale, huge) = codes(f64::from(f32::MAX), DType::U8);
        assert!(scale.is_finite() && huge == [128, 255]);
    }
}
