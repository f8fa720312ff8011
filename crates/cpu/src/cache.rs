//! New keys and values into a cache, and rotary embedding.
//!
//! Both move each element once, so that memory is what they wait for: one thread, no vectors.

use evosdpa_core::{
    DType, Element, Error as Refusal, Placement, TensorView, TensorViewMut, check_cumulative, check_position,
};
use half::{bf16, f16};

use crate::error::Error;

/// Rotary embedding: the first `2 × columns` elements of a row are turned in pairs by the angles of its position.
#[derive(Clone, Copy)]
pub struct Rotary<'a> {
    /// Cosines, `[1, 1, positions, columns]`.
    pub cos: TensorView<'a>,
    /// Sines, likewise.
    pub sin: TensorView<'a>,
    /// Whether pairs are neighbours (0 and 1, 2 and 3, …) or half of what is turned apart.
    pub interleaved: bool,
}

/// At which positions the tokens of a tensor are.
#[derive(Clone, Copy, Debug)]
pub struct Positions<'a> {
    /// The position of each sequence's first token.
    pub first: &'a [i32],
    /// Where each sequence begins among packed tokens, as many values and one more; `None` when each is a block.
    pub cu_seqlens: Option<&'a [i32]>,
    /// Whether each token is one position further than the one before it, or all are at the first.
    pub advance: bool,
}

/// Writes new tokens to their places in a cache of the same type, turned where `rotary` is given with the position of each
/// sequence's first new token (the one it gets in the cache when that is `None`).
///
/// # Errors
/// When tensors do not fit the placement or each other; nothing is written then.
pub fn append(
    cache: &mut TensorViewMut<'_>,
    new: TensorView<'_>,
    placement: &Placement,
    rotary: Option<(Rotary<'_>, Option<&[i32]>)>,
) -> Result<(), Error> {
    check_append(cache.shape(), cache.dtype(), &new, placement, rotary)?;
    let (heads, dim, size) = (new.shape()[1], new.shape()[3], new.dtype().bytes());
    let mut turn = rotary.map(|(rotary, first)| (Turn::new(rotary), first));
    let mut row = vec![0.0; dim];
    for new_row in placement.rows() {
        let (from, to) = (new_row.from, new_row.to);
        if let Some((turn, first)) = &mut turn {
            // Checked to be 0 or more.
            let position =
                first.map_or(new_row.position, |first| first[new_row.sequence] as usize + new_row.number);
            turn.to(position);
        }
        for head in 0..heads {
            let target = offset(cache.strides(), to.batch, head, to.row);
            match &turn {
                None => {
                    let source = offset(new.strides(), from.batch, head, from.row) * size;
                    let bytes = &new.bytes()[source..][..dim * size];
                    cache.bytes_mut()[target * size..][..bytes.len()].copy_from_slice(bytes);
                }
                Some((turn, _)) => {
                    new.read_row(from.batch, head, from.row, &mut row);
                    turn.apply(&mut row);
                    write_row(cache, target, &row);
                }
            }
        }
    }
    Ok(())
}

/// What [`append`] refuses, without writing.
///
/// # Errors
/// As [`append`].
pub fn check_append(
    cache_shape: [usize; 4],
    cache_dtype: DType,
    new: &TensorView<'_>,
    placement: &Placement,
    rotary: Option<(Rotary<'_>, Option<&[i32]>)>,
) -> Result<(), Error> {
    placement.check(cache_shape, new.shape())?;
    if new.dtype() != cache_dtype {
        let (got, expected) = (new.dtype(), cache_dtype);
        return Err(Refusal::TensorDType { tensor: "new tokens", got, expected }.into());
    }
    let Some((rotary, first)) = rotary else { return Ok(()) };
    rotary.check(cache_dtype, cache_shape[3])?;
    Ok(placement.check_positions(first, rotary.cos.shape()[2])?)
}

/// Turns every token of `x` into `out`, a tensor of its shape and type. Tokens that belong to no sequence are not written.
///
/// # Errors
/// When tensors do not fit each other, or a position is past the last that has angles; nothing is written then.
pub fn rotate(
    x: TensorView<'_>,
    out: &mut TensorViewMut<'_>,
    rotary: Rotary<'_>,
    positions: Positions<'_>,
) -> Result<(), Error> {
    if out.shape() != x.shape() {
        let (got, expected) = (out.shape(), x.shape());
        return Err(Refusal::TensorShape { tensor: "rotated tokens", got, expected }.into());
    }
    if out.dtype() != x.dtype() {
        let (got, expected) = (out.dtype(), x.dtype());
        return Err(Refusal::TensorDType { tensor: "rotated tokens", got, expected }.into());
    }
    let (heads, dim) = (x.shape()[1], x.shape()[3]);
    rotary.check(x.dtype(), dim)?;
    let tokens = positions.tokens(x.shape(), rotary.cos.shape()[2])?;
    let (mut turn, mut row) = (Turn::new(rotary), vec![0.0; dim]);
    for token in tokens {
        // Checked to be 0 or more.
        turn.to(token.position as usize);
        for head in 0..heads {
            x.read_row(token.block, head, token.row, &mut row);
            turn.apply(&mut row);
            let target = offset(out.strides(), token.block, head, token.row);
            write_row(out, target, &row);
        }
    }
    Ok(())
}

struct Token {
    sequence: usize,
    block: usize,
    row: usize,
    position: i64,
}

impl Positions<'_> {
    /// Refuses tokens of a tensor of this shape past the last of so many positions.
    ///
    /// # Errors
    /// When lists do not fit the tensor, or a position is past the last.
    pub fn check(&self, shape: [usize; 4], positions: usize) -> Result<(), Error> {
        self.tokens(shape, positions).map(drop)
    }

    /// Every token, each at one of so many positions.
    fn tokens(&self, [blocks, _, rows, _]: [usize; 4], positions: usize) -> Result<Vec<Token>, Error> {
        let batch = self.first.len();
        let sequences: Vec<(usize, std::ops::Range<usize>)> = match self.cu_seqlens {
            Some(cu) if cu.len() != batch + 1 => {
                let (what, got) = ("cumulative lengths", cu.len());
                return Err(Refusal::SideLength { what, got, expected: batch + 1 }.into());
            }
            Some(cu) => {
                check_cumulative("cumulative lengths", cu, rows, rows)?;
                (0..batch).map(|b| (0, cu[b] as usize..cu[b + 1] as usize)).collect()
            }
            None if batch != blocks => {
                return Err(Refusal::RotaryFirst { got: batch, expected: blocks }.into());
            }
            None => (0..batch).map(|b| (b, 0..rows)).collect(),
        };
        let token = |sequence: usize, block, number: usize, row| {
            let step = if self.advance { number as i64 } else { 0 };
            Token { sequence, block, row, position: i64::from(self.first[sequence]) + step }
        };
        let tokens: Vec<Token> = sequences
            .into_iter()
            .enumerate()
            .flat_map(|(b, (block, rows))| rows.enumerate().map(move |(n, row)| token(b, block, n, row)))
            .collect();
        for token in &tokens {
            check_position(token.sequence, token.position, positions)?;
        }
        Ok(tokens)
    }
}

impl Rotary<'_> {
    fn check(&self, dtype: DType, dim: usize) -> Result<(), Error> {
        let [one, heads, positions, columns] = self.cos.shape();
        if self.sin.shape() != self.cos.shape() || one != 1 || heads != 1 {
            let (got, expected) = (self.sin.shape(), [1, 1, positions, columns]);
            return Err(Refusal::TensorShape { tensor: "rotary sines", got, expected }.into());
        }
        if columns == 0 || 2 * columns > dim {
            return Err(Refusal::RotaryDim { columns, dim }.into());
        }
        for given in [dtype, self.cos.dtype(), self.sin.dtype()] {
            if given.is_eight_bit() {
                return Err(Refusal::RotaryType { given }.into());
            }
        }
        Ok(())
    }
}

/// The angles of one position.
struct Turn<'a> {
    rotary: Rotary<'a>,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl<'a> Turn<'a> {
    fn new(rotary: Rotary<'a>) -> Self {
        let columns = rotary.cos.shape()[3];
        Self { rotary, cos: vec![0.0; columns], sin: vec![0.0; columns] }
    }

    fn to(&mut self, position: usize) {
        self.rotary.cos.read_row(0, 0, position, &mut self.cos);
        self.rotary.sin.read_row(0, 0, position, &mut self.sin);
    }

    fn apply(&self, row: &mut [f32]) {
        let columns = self.cos.len();
        for (i, (cos, sin)) in self.cos.iter().zip(&self.sin).enumerate() {
            let (a, b) = if self.rotary.interleaved { (2 * i, 2 * i + 1) } else { (i, i + columns) };
            (row[a], row[b]) = (row[a] * cos - row[b] * sin, row[b] * cos + row[a] * sin);
        }
    }
}

fn offset(strides: [usize; 4], block: usize, head: usize, row: usize) -> usize {
    block * strides[0] + head * strides[1] + row * strides[2]
}

/// Rounds a row to a floating-point type, the only ones that are turned.
fn write_row(target: &mut TensorViewMut<'_>, start: usize, row: &[f32]) {
    fn put<T: Element>(elements: Option<&mut [T]>, start: usize, row: &[f32]) {
        if let Some(elements) = elements {
            elements[start..][..row.len()].iter_mut().zip(row).for_each(|(out, &x)| *out = T::from_f32(x));
        }
    }
    match target.dtype() {
        DType::F16 => put::<f16>(target.elements_mut(), start, row),
        DType::BF16 => put::<bf16>(target.elements_mut(), start, row),
        // Codes were refused.
        _ => put::<f32>(target.elements_mut(), start, row),
    }
}
