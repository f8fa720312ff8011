//! All elements of a tensor at once, in parallel: filled by a function of their index.

use evosdpa_core::{DType, E4M3Code, Element, I8Code, Layout, Tensor, U8Code};
use rayon::prelude::*;

/// Rows that one thread works on before another may help: less is not worth the handing over.
const ROWS_AT_ONCE: usize = 128;

/// A packed tensor whose element at `index` is `value(index)`, rounded to `dtype`.
pub fn from_fn(
    shape: [usize; 4],
    dtype: DType,
    layout: Layout,
    value: impl Fn([usize; 4]) -> f64 + Sync,
) -> Tensor {
    let mut tensor = Tensor::zeros(shape, dtype, layout);
    fill(&mut tensor, value);
    tensor
}

/// Sets each element to `value(index)`, rounded to the tensor's dtype; in 8-bit tensors, to the code whose value at
/// scale one is nearest.
pub fn fill(tensor: &mut Tensor, value: impl Fn([usize; 4]) -> f64 + Sync) {
    fill_rows(tensor, |[b, h, s], row| {
        row.iter_mut().enumerate().for_each(|(d, x)| *x = value([b, h, s, d]));
    });
}

/// The same by whole rows: `values` is called with the first three indices and writes what the row is to hold.
pub fn fill_rows(tensor: &mut Tensor, values: impl Fn([usize; 3], &mut [f64]) + Sync) {
    match tensor.view().dtype() {
        DType::F32 => fill_typed::<f32>(tensor, values),
        DType::F16 => fill_typed::<half::f16>(tensor, values),
        DType::BF16 => fill_typed::<half::bf16>(tensor, values),
        DType::U8 => fill_typed::<U8Code>(tensor, values),
        DType::E4M3 => fill_typed::<E4M3Code>(tensor, values),
        DType::I8 => fill_typed::<I8Code>(tensor, values),
    }
}

fn fill_typed<T: Element>(tensor: &mut Tensor, values: impl Fn([usize; 3], &mut [f64]) + Sync) {
    let ([_, heads, seq, dim], strides) = (tensor.view().shape(), tensor.view().strides());
    // Both layouts lay rows of one pitch one after the other, so rows split safely.
    let pitch = strides[1].min(strides[2]).max(1);
    let heads_outside = seq == 1 || (heads > 1 && strides[1] > strides[2]);
    let data: &mut [T] = bytemuck::cast_slice_mut(tensor.bytes_mut());
    let fill = |buffer: &mut Vec<f64>, (row, elements): (usize, &mut [T])| {
        let (b, inside) = (row * pitch / strides[0], row * pitch % strides[0]);
        let (h, s) = if heads_outside {
            (inside / strides[1], inside % strides[1] / strides[2])
        } else {
            (inside % strides[2] / strides[1], inside / strides[2])
        };
        buffer.resize(dim, 0.0);
        values([b, h, s], buffer);
        elements.iter_mut().zip(buffer).for_each(|(element, x)| *element = T::from_f64(*x));
    };
    if data.len() <= ROWS_AT_ONCE * pitch {
        let mut buffer = Vec::new();
        data.chunks_mut(pitch).enumerate().for_each(|row| fill(&mut buffer, row));
    } else {
        data.par_chunks_mut(pitch).enumerate().with_min_len(ROWS_AT_ONCE).for_each_init(Vec::new, fill);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_index_the_same_elements() {
        let value = |[b, h, s, d]: [usize; 4]| (b * 1000 + h * 100 + s * 10 + d) as f64;
        for layout in Layout::ALL {
            let tensor = from_fn([2, 3, 4, 5], DType::F32, layout, value);
            let mut row = Vec::new();
            tensor.view().row_f64(1, 2, 3, &mut row);
            assert_eq!(row, [1230.0, 1231.0, 1232.0, 1233.0, 1234.0]);
            // Rows are told apart by their strides, of which some coincide when a size is one.
            for shape @ [batch, heads, seq, dim] in [[2, 1, 4, 3], [2, 3, 1, 3], [1, 1, 1, 3], [3, 2, 200, 1]]
            {
                let mut tensor = Tensor::poisoned_gaps(shape, DType::F32, layout, 2);
                fill(&mut tensor, value);
                for (b, h, s) in
                    (0..batch).flat_map(|b| (0..heads).flat_map(move |h| (0..seq).map(move |s| (b, h, s))))
                {
                    tensor.view().row_f64(b, h, s, &mut row);
                    let expected: Vec<f64> = (0..dim).map(|d| value([b, h, s, d])).collect();
                    assert_eq!(row, expected, "{shape:?} {layout} {:?}", (b, h, s));
                }
            }
        }
    }

    #[test]
    fn gaps_hold_nan_in_every_dtype() {
        for dtype in DType::FLOATS {
            for layout in Layout::ALL {
                let mut tensor = Tensor::poisoned_gaps([2, 2, 3, 4], dtype, layout, 3);
                fill(&mut tensor, |_| 1.0);
                let words =
                    tensor.bytes().chunks(dtype.bytes()).filter(|c| c.iter().all(|&b| b == 0xFF)).count();
                assert_eq!(words, 2 * 2 * 3 * 3, "{dtype} {layout}");
                let mut row = Vec::new();
                tensor.view().row_f64(1, 1, 2, &mut row);
                assert_eq!(row, [1.0; 4]);
            }
        }
    }
}
