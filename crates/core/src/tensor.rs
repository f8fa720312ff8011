//! Tensors of four dimensions, owned and borrowed, with strides in elements.

use std::sync::Arc;

use half::slice::HalfFloatSliceExt;

use crate::{DType, E4M3Code, Element, Error, I8Code, Layout, U8Code};

/// A cache line: the unit in which tensors are allocated, so that their data is aligned for any vector width.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// An owned tensor `[batch, heads, sequence, head dimension]`. A clone shares the elements until one of the two is written to.
#[derive(Clone)]
pub struct Tensor {
    lines: Arc<Vec<Line>>,
    len: usize,
    dtype: DType,
    shape: [usize; 4],
    strides: [usize; 4],
}

impl Tensor {
    /// A packed tensor of zeros.
    pub fn zeros(shape: [usize; 4], dtype: DType, layout: Layout) -> Self {
        let len = shape.iter().product();
        Self::with_strides(shape, dtype, layout.strides(shape), len)
    }

    /// A tensor in a larger buffer: rows are `row_gap` elements further apart than they need to be. Every byte of the
    /// buffer is set to [`Tensor::gap_byte`], so that a read outside the elements shows.
    pub fn poisoned_gaps(shape: [usize; 4], dtype: DType, layout: Layout, row_gap: usize) -> Self {
        let mut tensor = Self::with_gaps(shape, dtype, layout, row_gap);
        tensor.bytes_mut().fill(Self::gap_byte(dtype));
        tensor
    }

    /// What gaps are filled with: NaN in every dtype that has it, the value farthest from zero in u8 and i8.
    pub fn gap_byte(dtype: DType) -> u8 {
        if dtype == DType::I8 { i8::MIN as u8 } else { 0xFF }
    }

    /// As [`Tensor::poisoned_gaps`], but zero everywhere: for a buffer that is to be written whole.
    pub fn with_gaps(shape: [usize; 4], dtype: DType, layout: Layout, row_gap: usize) -> Self {
        let padded = [shape[0], shape[1], shape[2], shape[3] + row_gap];
        Self::with_strides(shape, dtype, layout.strides(padded), padded.iter().product())
    }

    /// The tensor to read from.
    pub fn view(&self) -> TensorView<'_> {
        TensorView { bytes: self.bytes(), dtype: self.dtype, shape: self.shape, strides: self.strides }
    }

    /// The tensor to write to.
    pub fn view_mut(&mut self) -> TensorViewMut<'_> {
        let (dtype, shape, strides) = (self.dtype, self.shape, self.strides);
        TensorViewMut { bytes: self.bytes_mut(), dtype, shape, strides }
    }

    /// The whole buffer, gaps included.
    pub fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(self.lines.as_slice())[..self.len * self.dtype.bytes()]
    }

    /// A copy in memory of its own from the start: for those who could write behind our back.
    pub fn copied(&self) -> Self {
        let mut copy = self.clone();
        Arc::make_mut(&mut copy.lines);
        copy
    }

    /// The whole buffer, gaps included.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let bytes = self.len * self.dtype.bytes();
        &mut bytemuck::cast_slice_mut(Arc::make_mut(&mut self.lines).as_mut_slice())[..bytes]
    }

    fn with_strides(shape: [usize; 4], dtype: DType, strides: [usize; 4], len: usize) -> Self {
        let lines = (len * dtype.bytes()).div_ceil(size_of::<Line>());
        // Zeros of the system's own: each page is touched first by the thread that fills it.
        Self { lines: Arc::new(bytemuck::zeroed_vec(lines)), len, dtype, shape, strides }
    }
}

impl std::fmt::Debug for Tensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tensor({} {:?} strides {:?})", self.dtype, self.shape, self.strides)
    }
}

/// A borrowed tensor to read from. Every element lies inside the borrowed bytes: checked when it is made.
#[derive(Clone, Copy)]
pub struct TensorView<'a> {
    bytes: &'a [u8],
    dtype: DType,
    shape: [usize; 4],
    strides: [usize; 4],
}

impl<'a> TensorView<'a> {
    /// Views a buffer. Strides are in elements; 0 repeats a dimension; the innermost must be 1.
    pub fn new(bytes: &'a [u8], dtype: DType, shape: [usize; 4], strides: [usize; 4]) -> Result<Self, Error> {
        check_view(bytes, dtype, shape, strides)?;
        Ok(Self { bytes, dtype, shape, strides })
    }

    /// Views a packed slice.
    pub fn from_slice<T: Element>(data: &'a [T], shape: [usize; 4], layout: Layout) -> Result<Self, Error> {
        Self::new(bytemuck::cast_slice(data), T::DTYPE, shape, layout.strides(shape))
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// `[batch, heads, sequence, head dimension]`.
    pub fn shape(&self) -> [usize; 4] {
        self.shape
    }

    /// Strides in elements.
    pub fn strides(&self) -> [usize; 4] {
        self.strides
    }

    /// The buffer behind the view, from the first element on, gaps included.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The buffer as elements; `None` when `T` is not the view's element type.
    pub fn elements<T: Element>(&self) -> Option<&'a [T]> {
        (T::DTYPE == self.dtype).then(|| bytemuck::cast_slice(self.bytes))
    }

    /// The first head of the first batch entry alone.
    pub fn first_head(&self) -> Self {
        let [.., seq, dim] = self.shape;
        Self { shape: [1, 1, seq, dim], ..*self }
    }

    /// One row (the head dimension) widened to f64. For 8-bit codes these are the values at scale one, within ±448: a
    /// view does not know its scales.
    pub fn row_f64(&self, b: usize, h: usize, s: usize, out: &mut Vec<f64>) {
        fn widen<T: Element>(row: &[u8], out: &mut Vec<f64>) {
            out.extend(bytemuck::cast_slice::<u8, T>(row).iter().map(|x| x.to_f64()));
        }
        let row = self.row_bytes(b, h, s);
        out.clear();
        match self.dtype {
            DType::F32 => widen::<f32>(row, out),
            DType::F16 => {
                out.resize(row.len() / 2, 0.0);
                bytemuck::cast_slice::<u8, half::f16>(row).convert_to_f64_slice(out);
            }
            DType::BF16 => widen::<half::bf16>(row, out),
            DType::U8 => widen::<U8Code>(row, out),
            DType::E4M3 => widen::<E4M3Code>(row, out),
            DType::I8 => widen::<I8Code>(row, out),
        }
    }

    /// One row widened to f32, into as many elements as it has: exact for every dtype but u8, whose values at scale one are
    /// rounded.
    pub fn read_row(&self, b: usize, h: usize, s: usize, out: &mut [f32]) {
        fn widen<T: Element>(row: &[u8], out: &mut [f32]) {
            let row: &[T] = bytemuck::cast_slice(row);
            out.iter_mut().zip(row).for_each(|(out, x)| *out = x.to_f32());
        }
        let row = self.row_bytes(b, h, s);
        match self.dtype {
            DType::F32 => widen::<f32>(row, out),
            DType::F16 => widen::<half::f16>(row, out),
            DType::BF16 => widen::<half::bf16>(row, out),
            DType::U8 => widen::<U8Code>(row, out),
            DType::E4M3 => widen::<E4M3Code>(row, out),
            DType::I8 => widen::<I8Code>(row, out),
        }
    }

    fn row_bytes(&self, b: usize, h: usize, s: usize) -> &'a [u8] {
        let start = b * self.strides[0] + h * self.strides[1] + s * self.strides[2];
        let bytes = self.dtype.bytes();
        &self.bytes[start * bytes..(start + self.shape[3]) * bytes]
    }
}

/// A borrowed tensor to write to: inside its bytes, and no two elements in the same place.
pub struct TensorViewMut<'a> {
    bytes: &'a mut [u8],
    dtype: DType,
    shape: [usize; 4],
    strides: [usize; 4],
}

impl<'a> TensorViewMut<'a> {
    /// Views a buffer to write to. Strides are in elements and must give each element its own place.
    pub fn new(
        bytes: &'a mut [u8],
        dtype: DType,
        shape: [usize; 4],
        strides: [usize; 4],
    ) -> Result<Self, Error> {
        check_view(bytes, dtype, shape, strides)?;
        if overlaps(shape, strides) {
            return Err(Error::OverlappingOutput { shape, strides });
        }
        Ok(Self { bytes, dtype, shape, strides })
    }

    /// Views a packed slice to write to.
    pub fn from_slice<T: Element>(
        data: &'a mut [T],
        shape: [usize; 4],
        layout: Layout,
    ) -> Result<Self, Error> {
        Self::new(bytemuck::cast_slice_mut(data), T::DTYPE, shape, layout.strides(shape))
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// `[batch, heads, sequence, head dimension]`.
    pub fn shape(&self) -> [usize; 4] {
        self.shape
    }

    /// Strides in elements.
    pub fn strides(&self) -> [usize; 4] {
        self.strides
    }

    /// The buffer behind the view.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.bytes
    }

    /// The buffer as elements; `None` when `T` is not the view's element type.
    pub fn elements_mut<T: Element>(&mut self) -> Option<&mut [T]> {
        (T::DTYPE == self.dtype).then(|| bytemuck::cast_slice_mut(self.bytes))
    }

    /// The same tensor, to read from.
    pub fn as_view(&self) -> TensorView<'_> {
        TensorView { bytes: self.bytes, dtype: self.dtype, shape: self.shape, strides: self.strides }
    }
}

fn check_view(bytes: &[u8], dtype: DType, shape: [usize; 4], strides: [usize; 4]) -> Result<(), Error> {
    let size = dtype.bytes();
    let len = bytes.len() / size;
    if !bytes.len().is_multiple_of(size) || !(bytes.as_ptr() as usize).is_multiple_of(size) {
        return Err(Error::Bytes { len: bytes.len(), dtype });
    }
    if strides[3] != 1 && shape[3] > 1 {
        return Err(Error::InnerStride { stride: strides[3] });
    }
    if shape.contains(&0) {
        return Ok(());
    }
    let last = (0..4).try_fold(0usize, |last, i| last.checked_add((shape[i] - 1).checked_mul(strides[i])?));
    match last {
        Some(last) if last < len => Ok(()),
        last => Err(Error::OutOfBuffer { shape, strides, last: last.unwrap_or(usize::MAX), len }),
    }
}

/// Whether two indices may share a place: dimensions sorted by stride must each step over the ones inside them. This
/// refuses some exotic interleavings that do not overlap; every layout made by slicing and transposing passes.
fn overlaps(shape: [usize; 4], strides: [usize; 4]) -> bool {
    let mut dims: Vec<(usize, usize)> =
        (0..4).filter(|&i| shape[i] > 1).map(|i| (strides[i], shape[i])).collect();
    dims.sort_unstable();
    let mut reach = 0usize;
    dims.into_iter().any(|(stride, size)| {
        let overlap = stride <= reach;
        reach = reach.saturating_add(stride.saturating_mul(size - 1));
        overlap
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_read_at_scale_one() {
        let bytes = [1u8, 128, 129, 0x7E];
        let row = |dtype| {
            let view = TensorView::new(&bytes, dtype, [1, 1, 1, 4], [4, 4, 4, 1]).unwrap();
            let mut row = Vec::new();
            view.row_f64(0, 0, 0, &mut row);
            row
        };
        assert_eq!(row(DType::U8), [-448.0, 0.0, 448.0 / 127.0, -2.0 / 127.0 * 448.0]);
        assert_eq!(row(DType::I8), [1.0, -128.0, -127.0, 126.0]);
        assert_eq!(row(DType::E4M3), [f64::powi(2.0, -9), 0.0, -f64::powi(2.0, -9), 448.0]);
    }

    #[test]
    fn a_clone_shares_its_elements_until_one_of_the_two_is_written_to() {
        let first = Tensor::zeros([1, 1, 2, 3], DType::F32, Layout::Bhsd);
        let (mut second, copy) = (first.clone(), first.copied());
        assert_eq!(first.bytes().as_ptr(), second.bytes().as_ptr());
        assert_ne!(first.bytes().as_ptr(), copy.bytes().as_ptr());
        second.bytes_mut()[0] = 7;
        assert_eq!([first.bytes()[0], second.bytes()[0], copy.bytes()[0]], [0, 7, 0]);
    }

    #[test]
    fn bad_views_are_refused_with_their_values() {
        let mut data = vec![0f32; 23];
        let view =
            |shape, strides| TensorView::new(bytemuck::cast_slice(&data), DType::F32, shape, strides).err();
        let out = view([1, 2, 3, 4], [24, 12, 4, 1]);
        assert_eq!(
            out,
            Some(Error::OutOfBuffer { shape: [1, 2, 3, 4], strides: [24, 12, 4, 1], last: 23, len: 23 })
        );
        assert_eq!(view([1, 1, 2, 2], [8, 8, 4, 2]), Some(Error::InnerStride { stride: 2 }));
        assert!(matches!(view([1, 2, 1, 1], [1, usize::MAX, 1, 1]), Some(Error::OutOfBuffer { .. })));
        // Repeating a head is fine to read and wrong to write.
        assert_eq!(view([1, 2, 3, 4], [0, 0, 4, 1]), None);
        let bytes = bytemuck::cast_slice_mut(&mut data);
        let written = TensorViewMut::new(bytes, DType::F32, [1, 2, 3, 4], [0, 0, 4, 1]).err();
        assert!(matches!(written, Some(Error::OverlappingOutput { .. })));
        let odd = TensorView::new(&[0u8; 7], DType::F16, [1, 1, 1, 3], [3, 3, 3, 1]).err();
        assert!(matches!(odd, Some(Error::Bytes { len: 7, .. })));
    }
}
