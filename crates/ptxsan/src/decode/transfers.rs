//! Asynchronous transfers (bulk and tensor copies), and the mbarriers they complete on.

use super::{Address, Register, Scope};

/// `cp.async`.
#[derive(Debug, Clone)]
pub(crate) struct AsyncCopy {
    pub(crate) to: Address,
    pub(crate) from: Address,
    pub(crate) bytes: u32,
    /// Bytes actually read; the rest is zero.
    pub(crate) source_bytes: Option<Register>,
    /// `ignore-src`: a predicate that says "fill with zeros".
    pub(crate) ignore_source: Option<Register>,
}

/// What a wait on an mbarrier asks for.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Phase {
    /// The phase that a token was given for.
    Token(Register),
    /// The last completed phase, by its parity.
    Parity(Register),
}

/// An arrival at an mbarrier.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arrival {
    pub(crate) address: Address,
    /// Receives the token.
    pub(crate) d: Option<Register>,
    pub(crate) count: Option<Register>,
    /// Bytes announced with it.
    pub(crate) bytes: Option<Register>,
    /// `arrive_drop`: later phases expect so many fewer.
    pub(crate) drops: bool,
    pub(crate) no_complete: bool,
    pub(crate) releases: bool,
    pub(crate) scope: Scope,
}

/// `mbarrier.*`.
#[derive(Debug, Clone, Copy)]
pub(crate) enum MbarrierOp {
    Init {
        address: Address,
        count: Register,
    },
    Inval {
        address: Address,
    },
    Arrive(Arrival),
    ExpectTx {
        address: Address,
        bytes: Register,
    },
    CompleteTx {
        address: Address,
        bytes: Register,
    },
    Wait {
        d: Register,
        address: Address,
        phase: Phase,
        acquires: bool,
        scope: Scope,
        /// `test_wait`: the answer may be no at once.
        tests: bool,
    },
    PendingCount {
        d: Register,
        token: Register,
    },
    /// `cp.async.mbarrier.arrive`: when the thread's copies are done.
    AfterCopies {
        address: Address,
        is_counted: bool,
    },
}

/// A reduction by a bulk copy or `red.async`: old value, operand → new value, on elements of so many bytes.
#[derive(Clone)]
pub(crate) struct Combine {
    pub(crate) bytes: u32,
    pub(crate) apply: std::sync::Arc<dyn Fn(u64, u64) -> u64 + Send + Sync>,
}

/// What a bulk copy moves, in global memory.
#[derive(Debug, Clone)]
pub(crate) enum Extent {
    Linear { address: Address, bytes: Register },
    Tensor { map: Address, coordinates: Box<[Register]> },
}

/// `cp.async.bulk` and its tensor and reducing forms.
pub(crate) enum Bulk {
    Load {
        to: Address,
        from: Extent,
        barrier: Address,
        multicast: Option<Register>,
    },
    Store {
        to: Extent,
        from: Address,
        combine: Option<TensorCombine>,
    },
    /// Shared memory of this block to that of another.
    Send {
        to: Address,
        from: Address,
        bytes: Register,
        barrier: Address,
        combine: Option<Combine>,
    },
    Prefetch,
}

/// A reduction on global memory: the type of a tensor is known from its map only.
pub(crate) enum TensorCombine {
    Typed(Combine),
    ByMap(&'static str),
}

/// `st.async` and `red.async`.
pub(crate) struct AsyncStore {
    pub(crate) to: Address,
    pub(crate) barrier: Address,
    pub(crate) bytes: u32,
    pub(crate) registers: Box<[Register]>,
    pub(crate) combine: Option<Combine>,
}
