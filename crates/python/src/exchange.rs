//! Tensors read through DLPack's C exchange interface: one C call tells all that is asked of a tensor, where Python's
//! attributes cost a microsecond together.

use std::{
    ffi::{CStr, c_int, c_void},
    sync::OnceLock,
};

use pyo3::{exceptions::PyTypeError, ffi, prelude::*};

use crate::Operand;

const CAPSULE: &CStr = c"dlpack_exchange_api";

/// DLPack's codes for the devices and types that kernels take.
const ON_CPU: i32 = 1;
const ON_CUDA: i32 = 2;
const INT: u8 = 0;
const FLOAT: u8 = 2;
const BFLOAT: u8 = 4;
const BOOL: u8 = 6;
const E4M3FN: u8 = 10;

/// `DLTensor` of DLPack 1.
#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// `DLPackExchangeAPI` of DLPack 1.3. What is not used is only there for its size.
#[repr(C)]
struct ExchangeApi {
    major: u32,
    minor: u32,
    previous: *const ExchangeApi,
    allocate: *const c_void,
    import: *const c_void,
    export: *const c_void,
    describe: Option<unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int>,
    current_stream: Option<unsafe extern "C" fn(i32, i32, *mut *mut c_void) -> c_int>,
}

// SAFETY: the struct is constant for the life of the process, and DLPack allows its functions to be called from any thread
// that holds the interpreter.
unsafe impl Sync for ExchangeApi {}

/// The interface of the one library whose tensors are read so: it lives as long as the process, by DLPack's rules.
static API: OnceLock<&'static ExchangeApi> = OnceLock::new();

/// Takes a library's interface; says whether it is one that can be used.
pub(crate) fn take(capsule: &Bound<'_, PyAny>) -> PyResult<bool> {
    // SAFETY: the object is alive; the call checks that it is a capsule of this name.
    let pointer = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), CAPSULE.as_ptr()) };
    if pointer.is_null() {
        return Err(
            PyErr::take(capsule.py()).unwrap_or_else(|| PyTypeError::new_err("not an exchange interface"))
        );
    }
    // SAFETY: a capsule of this name holds this struct, for the life of the process.
    let api = unsafe { &*pointer.cast::<ExchangeApi>() };
    let usable = api.major == 1 && api.describe.is_some() && api.current_stream.is_some();
    Ok(usable && (API.set(api).is_ok() || API.get().is_some_and(|known| std::ptr::eq(*known, api))))
}

/// What kernels want to know of a tensor with four dimensions.
#[derive(Clone, Copy)]
pub(crate) struct Described {
    /// As in [`crate::Call`].
    pub(crate) dtype: u8,
    /// The number of the GPU; `None` on a CPU.
    pub(crate) gpu: Option<usize>,
    pub(crate) operand: Operand,
}

/// What a tensor's elements are; floating-point types by their codes in [`crate::Call`].
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Float32 = 0,
    Float16 = 1,
    Bfloat16 = 2,
    Int32 = 3,
    E4m3 = 4,
    Int8 = 5,
    Bool = 6,
}

impl Kind {
    /// The code of a floating-point type, as in [`crate::Call`].
    pub(crate) fn float(self) -> Option<u8> {
        matches!(self, Self::Float32 | Self::Float16 | Self::Bfloat16).then_some(self as u8)
    }

    /// The code of the type of an 8-bit cache, likewise.
    pub(crate) fn codes(self) -> Option<u8> {
        match self {
            Self::E4m3 => Some(3),
            Self::Int8 => Some(5),
            _ => None,
        }
    }
}

/// A tensor of up to four dimensions.
#[derive(Clone, Copy)]
pub(crate) struct Looked {
    pub(crate) kind: Kind,
    /// The number of the GPU; `None` on a CPU.
    pub(crate) gpu: Option<usize>,
    pub(crate) address: usize,
    /// Whether its library lets others write to it.
    pub(crate) writable: bool,
    pub(crate) dimensions: usize,
    /// Of the first dimensions; 0 behind them.
    pub(crate) shape: [i64; 4],
    /// In elements, likewise.
    pub(crate) strides: [i64; 4],
}

impl Looked {
    /// A tensor with four dimensions; `None` if no kernel takes such a tensor.
    pub(crate) fn described(&self) -> Option<Described> {
        let Self { kind, gpu, address, dimensions, shape, strides, .. } = *self;
        let dtype = kind.float().filter(|_| dimensions == 4)?;
        Some(Described { dtype, gpu, operand: Operand { address, shape, strides } })
    }
}

/// A tensor of the library whose interface was taken; `None` if nothing here reads such a tensor.
pub(crate) fn look(tensor: &Bound<'_, PyAny>) -> Option<Looked> {
    let describe = API.get()?.describe?;
    let mut found = std::mem::MaybeUninit::<DlTensor>::uninit();
    // SAFETY: the function takes an object of its library, which the caller has checked, and fills the struct when it
    // returns 0. What it points to is the tensor's own and is copied below, while the tensor is held.
    let found = unsafe {
        if describe(tensor.as_ptr().cast(), found.as_mut_ptr()) != 0 {
            drop(PyErr::take(tensor.py()));
            return None;
        }
        found.assume_init()
    };
    let kind = match (found.code, found.bits, found.lanes) {
        (FLOAT, 32, 1) => Kind::Float32,
        (FLOAT, 16, 1) => Kind::Float16,
        (BFLOAT, 16, 1) => Kind::Bfloat16,
        (INT, 32, 1) => Kind::Int32,
        (E4M3FN, 8, 1) => Kind::E4m3,
        (INT, 8, 1) => Kind::Int8,
        (BOOL, 8, 1) => Kind::Bool,
        _ => return None,
    };
    let gpu = match found.device_type {
        ON_CPU => None,
        ON_CUDA => Some(usize::try_from(found.device_id).ok()?),
        _ => return None,
    };
    if !(1..=4).contains(&found.ndim) || found.shape.is_null() || found.strides.is_null() {
        return None;
    }
    let dimensions = found.ndim as usize;
    let (mut shape, mut strides) = ([0; 4], [0; 4]);
    for at in 0..dimensions {
        // SAFETY: both hold as many values as the tensor has dimensions.
        (shape[at], strides[at]) = unsafe { (*found.shape.add(at), *found.strides.add(at)) };
    }
    let address = (found.data as usize).checked_add(usize::try_from(found.byte_offset).ok()?)?;
    Some(Looked { kind, gpu, address, writable: true, dimensions, shape, strides })
}

/// The stream on which the library queues work for a GPU.
pub(crate) fn current_stream(gpu: usize) -> Option<u64> {
    let current_stream = API.get()?.current_stream?;
    let mut stream = std::ptr::null_mut();
    // SAFETY: the function writes one pointer.
    let code = unsafe { current_stream(ON_CUDA, i32::try_from(gpu).ok()?, &mut stream) };
    (code == 0).then_some(stream as u64)
}
