//! What changes scores, on the short way: a dense mask or bias, a softcap, a chunk, ALiBi's slopes, sinks.

use pyo3::{
    prelude::*,
    types::{PyFloat, PyInt},
};

use crate::{
    List, Operand, Side,
    exchange::{Kind, Looked},
    library::{Library, Seen},
};

/// The mask or bias, softcap, chunk, slopes and sinks as Python gives them: tensors or nothing, and 0 for no cap and no chunk.
pub(crate) type Given<'py> = (
    Option<Bound<'py, PyAny>>,
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
    Option<Bound<'py, PyAny>>,
    Option<Bound<'py, PyAny>>,
);

/// The same with its numbers read.
pub(crate) struct Scores<'py> {
    dense: Option<Bound<'py, PyAny>>,
    softcap: Option<f64>,
    chunk: Option<i64>,
    alibi_slopes: Option<Bound<'py, PyAny>>,
    sinks: Option<Bound<'py, PyAny>>,
}

/// What scores there are to change.
#[derive(Clone, Copy)]
pub(crate) struct ScoresOf {
    /// Batch, query heads, queries, keys.
    pub(crate) shape: [i64; 4],
    /// The queries' type.
    pub(crate) kind: Kind,
    pub(crate) gpu: Option<usize>,
}

impl<'py> Scores<'py> {
    /// `None` where a number is out of the ordinary.
    pub(crate) fn read((dense, softcap, chunk, alibi_slopes, sinks): Given<'py>) -> Option<Self> {
        let softcap = match softcap.cast_exact::<PyFloat>() {
            Ok(cap) => cap.value(),
            Err(_) => softcap.cast_exact::<PyInt>().ok()?.extract().ok()?,
        };
        let chunk: i64 = chunk.cast_exact::<PyInt>().ok()?.extract().ok()?;
        (softcap >= 0.0 && softcap.is_finite() && chunk >= 0).then_some(Self {
            dense,
            softcap: (softcap > 0.0).then_some(softcap),
            chunk: (chunk > 0).then_some(chunk),
            alibi_slopes,
            sinks,
        })
    }

    /// Adds itself to what a call has beside its tensors, and its own tensors to those that are looked at; `None` where something about it is
    /// out of the ordinary.
    pub(crate) fn add_to<'a>(
        &'a self,
        library: &impl Library,
        of: ScoresOf,
        seen: &mut Seen<'a, 'py>,
        side: &mut Side,
    ) -> Option<()> {
        let mut look = |tensor: &'a Option<Bound<'py, PyAny>>| {
            let Some(tensor) = tensor else { return Some(None) };
            let found = library.look(tensor)?;
            seen.push(tensor, found);
            (found.gpu == of.gpu && found.address != 0).then_some(Some(found))
        };
        if let Some(found) = look(&self.dense)? {
            let dense = spread(&found, of.shape)?;
            match found.kind {
                Kind::Bool => side.mask = Some(dense),
                Kind::Float32 => side.bias = Some((found.kind.float()?, dense)),
                kind => side.bias = Some((kind.float().filter(|_| kind == of.kind)?, dense)),
            }
        }
        let heads = of.shape[1];
        let mut each_head = |tensor| match look(tensor)? {
            None => Some(None),
            Some(found) => {
                let fits = found.kind == Kind::Float32
                    && found.dimensions == 1
                    && found.shape[0] == heads
                    && (found.strides[0] == 1 || heads == 1);
                fits.then_some(Some(List { address: found.address, len: usize::try_from(heads).ok()? }))
            }
        };
        side.alibi_slopes = each_head(&self.alibi_slopes)?;
        side.sinks = each_head(&self.sinks)?;
        (side.softcap, side.chunk) = (self.softcap, self.chunk);
        Some(())
    }
}

/// A mask or bias of two or four dimensions beside scores of this shape, what repeats itself said once. With three dimensions torch's
/// own output is contiguous, which is for the long way.
fn spread(found: &Looked, scores: [i64; 4]) -> Option<Operand> {
    let from = match found.dimensions {
        2 => 2,
        4 => 0,
        _ => return None,
    };
    let (mut shape, mut strides) = ([1; 4], [0; 4]);
    shape[from..].copy_from_slice(&found.shape[..found.dimensions]);
    strides[from..].copy_from_slice(&found.strides[..found.dimensions]);
    for dim in 0..3 {
        if shape[dim] != 1 && shape[dim] != scores[dim] {
            return None;
        }
        if shape[dim] == 1 || strides[dim] == 0 {
            (shape[dim], strides[dim]) = (1, 0);
        }
    }
    let bytes = match found.kind {
        Kind::Bool => 1,
        Kind::Float32 => 4,
        _ => 2,
    };
    let usable = shape[3] == scores[3]
        && (strides[3] == 1 || shape[3] == 1)
        && found.address.is_multiple_of(bytes)
        && strides.iter().all(|stride| *stride >= 0);
    strides[3] = 1;
    usable.then_some(Operand { address: found.address, shape, strides })
}
