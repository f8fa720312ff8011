//! NumPy arrays, read through the struct behind `__array_struct__`: the dictionary of `__array_interface__` takes a microsecond to make.
//!
//! <https://numpy.org/doc/stable/reference/arrays.interface.html#c-struct-access>

use std::{
    ffi::{c_char, c_int, c_void},
    ptr, slice,
};

use pyo3::{exceptions::PyTypeError, ffi, prelude::*, types::PyTuple};

/// `PyArrayInterface` up to the address.
#[repr(C)]
struct ArrayInterface {
    /// Always 2.
    version: c_int,
    dimensions: c_int,
    kind: c_char,
    item_bytes: c_int,
    flags: c_int,
    shape: *const isize,
    /// In bytes.
    strides: *const isize,
    data: *const c_void,
}

/// An array's address, shape, and strides in elements, rounded down.
pub(crate) type Described<'py> = (usize, Bound<'py, PyTuple>, Bound<'py, PyTuple>);

pub(crate) fn described<'py>(array: &Bound<'py, PyAny>) -> PyResult<Described<'py>> {
    let py = array.py();
    let capsule = array.getattr("__array_struct__")?;
    // SAFETY: the object is alive; the call checks that it is a capsule, which has no name.
    let pointer = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), ptr::null()) };
    if pointer.is_null() {
        return Err(PyErr::take(py).unwrap_or_else(|| PyTypeError::new_err("not an array's interface")));
    }
    // SAFETY: by NumPy's interface the capsule holds this struct as long as it lives, which is to the end of this function.
    let found = unsafe { &*pointer.cast::<ArrayInterface>() };
    if found.version != 2 || found.item_bytes <= 0 {
        return Err(PyTypeError::new_err("an array's interface of another version"));
    }
    let count = found.dimensions as usize;
    let (shape, strides) = if count == 0 {
        (&[][..], &[][..])
    } else {
        // SAFETY: shape and strides have an element for each dimension.
        unsafe { (slice::from_raw_parts(found.shape, count), slice::from_raw_parts(found.strides, count)) }
    };
    let elements = strides.iter().map(|stride| stride.div_euclid(found.item_bytes as isize));
    Ok((found.data as usize, PyTuple::new(py, shape)?, PyTuple::new(py, elements)?))
}
