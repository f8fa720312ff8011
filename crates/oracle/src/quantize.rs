//! Quantising: f32 tensors into 8-bit codes with one scale for each (batch, head).
//!
//! A head's scale is `absmax / 448` in fp32, which puts its largest element at the end of either code's range; an all-zero
//! head has scale 1, and so has one so small that its scale would underflow: its codes are then all zero. A code's real
//! value is its value at scale one ([`evosdpa_core::U8Code`], [`evosdpa_core::E4M3Code`]) times the scale.

use evosdpa_core::{CODE_MAX, DType, Error, Layout, Tensor, TensorView};

use crate::elements;

/// The scales of Q, K and V, each `[batch, heads]`, contiguous.
#[derive(Clone, Debug, PartialEq)]
pub struct Scales {
    /// For Q: batch × query heads.
    pub q: Vec<f32>,
    /// For K: batch × key/value heads.
    pub k: Vec<f32>,
    /// For V: batch × key/value heads.
    pub v: Vec<f32>,
}

/// A tensor of 8-bit codes and the scale of each of its (batch, head).
#[derive(Clone, Debug)]
pub struct Quantized {
    /// The codes.
    pub codes: Tensor,
    /// `[batch, heads]`.
    pub scales: Vec<f32>,
}

/// Quantises a tensor into packed codes. Refuses a `dtype` that is not an 8-bit one, and elements that are NaN or
/// infinite, which no scale can hold.
pub fn quantize(tensor: &TensorView<'_>, dtype: DType, layout: Layout) -> Result<Quantized, Error> {
    if !dtype.is_eight_bit() {
        return Err(Error::NotEightBit { dtype });
    }
    let [batch, heads, seq, _] = tensor.shape();
    let mut row = Vec::new();
    for r in 0..batch * heads * seq {
        let (b, h, s) = (r / (heads * seq), r / seq % heads, r % seq);
        tensor.row_f64(b, h, s, &mut row);
        if let Some(d) = row.iter().position(|x| !x.is_finite()) {
            return Err(Error::NotFinite { at: [b, h, s, d], value: row[d] });
        }
    }
    Ok(quantize_into(tensor, Tensor::zeros(tensor.shape(), dtype, layout)))
}

/// Quantises finite elements into `codes`, a tensor of the same shape and of an 8-bit dtype.
pub(crate) fn quantize_into(tensor: &TensorView<'_>, mut codes: Tensor) -> Quantized {
    let [_, heads, seq, dim] = tensor.shape();
    let values = elements::values_f64(tensor);
    let scale_of = |head: &[f64]| {
        let absmax = head.iter().fold(0.0f64, |max, x| max.max(x.abs()));
        let scale = (absmax / CODE_MAX) as f32;
        if scale == 0.0 { 1.0 } else { scale }
    };
    let scales: Vec<f32> = values.chunks((seq * dim).max(1)).map(scale_of).collect();
    elements::fill(&mut codes, |[b, h, s, d]| {
        let head = b * heads + h;
        values[(head * seq + s) * dim + d] / f64::from(scales[head])
    });
    Quantized { codes, scales }
}

/// The f32 values that codes stand for, packed.
pub(crate) fn dequantize(codes: &Tensor, scales: &[f32], layout: Layout) -> Tensor {
    let view = codes.view();
    let [_, heads, seq, dim] = view.shape();
    let values = elements::values_f64(&view);
    elements::from_fn(view.shape(), DType::F32, layout, |[b, h, s, d]| {
        let head = b * heads + h;
        values[(head * seq + s) * dim + d] * f64::from(scales[head])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

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
            let quantized = quantize(&tensor.view(), dtype, Layout::Bhsd).unwrap();
            assert_eq!(quantized.scales.len(), 4);
            assert_eq!(quantized.scales[3], 1.0);
            for (head, scale) in quantized.scales[..3].iter().enumerate() {
                let absmax = values(&tensor)[head * 45..][..45].iter().fold(0f32, |m, x| m.max(x.abs()));
                assert_eq!(*scale, absmax / 448.0);
                let codes = &quantized.codes.bytes()[head * 45..][..45];
                let ends: [u8; 2] = if dtype == DType::U8 { [1, 255] } else { [0x7E, 0xFE] };
                assert!(codes.iter().any(|code| ends.contains(code)), "{dtype} head {head}");
            }
            let zero = if dtype == DType::U8 { 128 } else { 0 };
            assert!(quantized.codes.bytes()[3 * 45..].iter().all(|&code| code == zero));
        }
    }

    #[test]
    fn codes_are_what_the_formula_says_and_come_back_within_half_a_step() {
        let tensor = sample();
        let quantized = quantize(&tensor.view(), DType::U8, Layout::Bhsd).unwrap();
        let back = values(&dequantize(&quantized.codes, &quantized.scales, Layout::Bhsd));
        for (i, x) in values(&tensor).into_iter().enumerate() {
            let s = quantized.scales[i / 45];
            let formula = (f64::from(x) / (448.0 * f64::from(s)) * 127.0 + 128.0).round();
            assert_eq!(f64::from(quantized.codes.bytes()[i]), formula);
            assert!((back[i] - x).abs() <= 448.0 * s / 127.0 * 0.500_001);
        }
        let quantized = quantize(&tensor.view(), DType::E4M3, Layout::Bhsd).unwrap();
        let back = values(&dequantize(&quantized.codes, &quantized.scales, Layout::Bhsd));
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
            let packed = quantize(&tensor.view(), dtype, Layout::Bhsd).unwrap();
            let gapped = Tensor::poisoned_gaps([2, 2, 9, 5], dtype, Layout::Bshd, 3);
            let gapped = quantize_into(&tensor.view(), gapped);
            assert_eq!(gapped.scales, packed.scales);
            let back = |q: &Quantized| values(&dequantize(&q.codes, &q.scales, Layout::Bhsd));
            assert_eq!(back(&gapped), back(&packed));
            // Whether or not 0xFF is a number in this dtype, the gaps are never read as one.
            assert_eq!(gapped.codes.bytes().chunks(8).filter(|row| row[5..] == [0xFF; 3]).count(), 36);
        }
    }

    #[test]
    fn what_cannot_be_quantised_is_refused_or_zero() {
        let tensor =
            |x: f64| elements::from_fn([1, 1, 1, 2], DType::F32, Layout::Bhsd, |[.., d]| x * d as f64);
        for x in [f64::NAN, f64::INFINITY] {
            let error = quantize(&tensor(x).view(), DType::U8, Layout::Bhsd).unwrap_err();
            assert!(matches!(error, Error::NotFinite { .. }), "{error}");
        }
        let error = quantize(&tensor(1.0).view(), DType::F16, Layout::Bhsd).unwrap_err();
        assert_eq!(error, Error::NotEightBit { dtype: DType::F16 });
        let tiny = quantize(&tensor(1e-45).view(), DType::U8, Layout::Bhsd).unwrap();
        assert_eq!((tiny.scales[0], tiny.codes.bytes()), (1.0, &[128u8, 128][..]));
        let huge = quantize(&tensor(f64::from(f32::MAX)).view(), DType::U8, Layout::Bhsd).unwrap();
        assert!(huge.scales[0].is_finite() && huge.codes.bytes() == [128, 255]);
    }
}
