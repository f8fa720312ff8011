//! What can be wrong with a call from Python.

/// Why attention was not computed. Nothing has been written then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The library refused.
    #[error(transparent)]
    Library(#[from] evosdpa::Error),
    /// A stride that runs backwards.
    #[error(
        "{tensor} has strides {strides:?}: a negative stride cannot be expressed; copy the tensor first \
         (numpy.ascontiguousarray)"
    )]
    NegativeStride {
        /// Which tensor.
        tensor: &'static str,
        /// Its strides, in elements.
        strides: [i64; 4],
    },
    /// No memory behind a tensor.
    #[error("{tensor} has no memory that this process can reach: its address is 0")]
    NoMemory {
        /// Which tensor.
        tensor: &'static str,
    },
    /// A size below zero.
    #[error("{tensor} has shape {shape:?}; no size may be negative")]
    NegativeSize {
        /// Which tensor.
        tensor: &'static str,
        /// Its shape.
        shape: [i64; 4],
    },
    /// A code that stands for no element type.
    #[error("there is no element type with code {code}")]
    DTypeCode {
        /// The code.
        code: u8,
    },
    /// A window that is neither a number of keys nor -1.
    #[error("window_size is ({left}, {right}), but each side must be a number of keys, or -1 for no bound")]
    Window {
        /// Keys before.
        left: i64,
        /// Keys after.
        right: i64,
    },
    /// Packed tensors without the length of the longest sequence.
    #[error("packed sequences need {name}, the length of the longest one")]
    LongestMissing {
        /// What is missing.
        name: &'static str,
    },
    /// A count below zero.
    #[error("{what} is {value}, but must not be negative")]
    NegativeCount {
        /// What is counted.
        what: &'static str,
        /// The count.
        value: i64,
    },
    /// A page table with too many or too few rows.
    #[error("the page table has {rows} rows, but there are {batch} sequences")]
    TableRows {
        /// Its rows.
        rows: usize,
        /// Sequences.
        batch: usize,
    },
    /// A list that lies nowhere, or between two values.
    #[error("{name}: {len} values at address {address:#x} cannot be read")]
    ListMemory {
        /// Which list.
        name: &'static str,
        /// Where it should be.
        address: usize,
        /// How many values.
        len: usize,
    },
    /// One cache for keys and values, which get new tokens that differ.
    #[error(
        "k_cache and v_cache are the same memory, to which new keys and other new values are both written; give each its own"
    )]
    OneCache,
    /// New tokens that lie in the cache they go to.
    #[error("{new} lies in the memory of {cache}, which it is written to; copy it first")]
    NewInCache {
        /// The new tokens.
        new: &'static str,
        /// The cache.
        cache: &'static str,
    },
    /// A defect of this library.
    #[error("a defect in evosdpa: {problem}; please report it")]
    Panic {
        /// What the panic said.
        problem: String,
    },
}
