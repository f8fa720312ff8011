//! A library whose tensors are read and made on the short way.

use std::sync::Arc;

use pyo3::{prelude::*, types::PyTuple};

use crate::{Operand, exchange::Looked};

/// A tensor to make, as the arguments that the library takes.
pub(crate) struct Form(pub(crate) Py<PyTuple>);

/// Reads and makes tensors. What it says `None` or `false` to is for the long way.
pub(crate) trait Library {
    /// Whether an object is of the library's own class, and nothing derived from it.
    fn has_made(&self, object: &Bound<'_, PyAny>) -> bool;

    /// What is known of a tensor of the library's own class, and nothing derived from it.
    fn look(&self, object: &Bound<'_, PyAny>) -> Option<Looked>;

    /// Whether tensors are memory to be read as it is, and nobody watches or changes what is done with them.
    fn is_plain(&self, seen: &Seen<'_, '_>) -> PyResult<bool>;

    /// How many threads compute on a CPU; 0 for all.
    fn threads(&self, py: Python<'_>) -> PyResult<usize>;

    /// How an output of this shape lies in memory, `[batch, heads, sequence, head dimension]`, beside queries in that order; `by_token` where
    /// its layout has tokens before heads.
    fn strides(
        &self,
        queries: &Bound<'_, PyAny>,
        q: &Operand,
        shape: [i64; 4],
        by_token: bool,
        gpu: Option<usize>,
    ) -> PyResult<Option<[i64; 4]>>;

    /// Of a tensor of the type with this code, as [`crate::exchange::Kind`] numbers those of outputs and 32-bit integers.
    fn form(&self, py: Python<'_>, sizes: &[i64], strides: &[i64], dtype: u8) -> PyResult<Form>;

    /// Of a contiguous tensor of at most four dimensions.
    fn contiguous(&self, py: Python<'_>, sizes: &[i64], dtype: u8) -> PyResult<Arc<Form>> {
        Ok(Arc::new(self.form(py, sizes, &contiguous(sizes)[..sizes.len()], dtype)?))
    }

    /// New memory of the library's, beside another tensor.
    fn make<'py>(
        &self,
        form: &Form,
        beside: &Bound<'py, PyAny>,
        gpu: Option<usize>,
    ) -> PyResult<Option<(Bound<'py, PyAny>, Looked)>>;
}

/// The tensors of a call that [`Library::is_plain`] asks about, with what is known of them.
pub(crate) struct Seen<'a, 'py> {
    tensors: [&'a Bound<'py, PyAny>; TENSORS_MAX],
    looked: [Looked; TENSORS_MAX],
    len: usize,
}

impl<'a, 'py> Seen<'a, 'py> {
    /// One tensor.
    pub(crate) fn new(tensor: &'a Bound<'py, PyAny>, looked: Looked) -> Self {
        Self { tensors: [tensor; TENSORS_MAX], looked: [looked; TENSORS_MAX], len: 1 }
    }

    /// One more, of which a call has at most [`TENSORS_MAX`]; one that is there already says nothing new.
    pub(crate) fn push(&mut self, tensor: &'a Bound<'py, PyAny>, looked: Looked) {
        if self.tensors().iter().any(|known| known.is(tensor)) {
            return;
        }
        (self.tensors[self.len], self.looked[self.len]) = (tensor, looked);
        self.len += 1;
    }

    /// The tensors.
    pub(crate) fn tensors(&self) -> &[&'a Bound<'py, PyAny>] {
        &self.tensors[..self.len]
    }

    /// What is known of each.
    pub(crate) fn looked(&self) -> &[Looked] {
        &self.looked[..self.len]
    }
}

/// The most tensors of a call: queries, keys and values, new keys and values, and what changes scores.
const TENSORS_MAX: usize = 8;

/// Strides of a tensor without gaps, of at most four dimensions.
pub(crate) fn contiguous(sizes: &[i64]) -> [i64; 4] {
    let mut strides = [1; 4];
    for at in (1..sizes.len()).rev() {
        strides[at - 1] = strides[at] * sizes[at];
    }
    strides
}

/// Strides of an output without gaps, `[batch, heads, sequence, head dimension]`.
pub(crate) fn packed([_, heads, rows, dim]: [i64; 4], by_token: bool) -> [i64; 4] {
    if by_token {
        [rows * heads * dim, dim, heads * dim, 1]
    } else {
        [heads * rows * dim, rows * dim, dim, 1]
    }
}
