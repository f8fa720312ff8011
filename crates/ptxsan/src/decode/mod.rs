//! A syntax tree to code a machine can run: names resolved, registers numbered, branches joined to where
//! their lanes meet again.

mod asynchronous;
mod build;
mod callees;
mod control;
mod convert;
mod dataflow;
mod float;
mod flow;
mod integer;
pub(crate) mod lanes;
mod mangled;
mod matrix;
mod memory;
mod modifier;
mod opcode;
mod operands;
mod provenance;
mod scope;
mod simple;
mod special;
mod transfers;
mod updates;

pub(crate) use build::kernel;
pub(crate) use callees::functions;
pub(crate) use dataflow::{Flow, FlowKind};
pub(crate) use memory::apply as memory_apply;
pub(crate) use special::Special;
pub(crate) use transfers::{
    Arrival, AsyncCopy, AsyncStore, Bulk, Combine, Extent, MbarrierOp, Phase, TensorCombine,
};

use crate::count::Class;
use crate::parse::ast::Space;
use crate::tensor::{Contraction, Fragment, Layout};
use lanes::{Alu, Args};

/// A branch whose lanes never meet again before they exit.
pub(crate) const NEVER: u32 = u32::MAX;
/// An instruction without a guard.
pub(crate) const ALWAYS: u32 = u32::MAX;

/// An entry ready to run, with the functions it calls.
pub(crate) struct Kernel {
    pub(crate) code: Vec<Inst>,
    pub(crate) info: Vec<Info>,
    /// How validity flows through each instruction.
    pub(crate) flows: Vec<Flow>,
    pub(crate) b32_count: usize,
    pub(crate) b64_count: usize,
    pub(crate) pred_count: usize,
    pub(crate) constants32: Vec<(u32, u32)>,
    pub(crate) constants64: Vec<(u32, u64)>,
    pub(crate) constants_pred: Vec<(u32, bool)>,
    pub(crate) specials: Vec<(Special, u32)>,
    pub(crate) params: Vec<Param>,
    pub(crate) param_bytes: u64,
    pub(crate) shared_bytes: u64,
    pub(crate) local_bytes: u64,
    /// Whether blocks may talk to each other through global memory, so that they must run together.
    pub(crate) communicates: bool,
    /// Whether there are strong loads that do not acquire: threads may wait for each other by them.
    pub(crate) polls: bool,
    /// Shared variables by ascending address; the dynamic part, which the launch sizes, last.
    pub(crate) shared_variables: Vec<SharedVariable>,
    /// The part of shared memory that the system keeps, and starts as zeros.
    pub(crate) reserved: std::ops::Range<usize>,
    /// What accesses to shared memory may touch: see [`Address::extent`].
    pub(crate) extents: Vec<provenance::Extent>,
    pub(crate) max_threads: Option<u32>,
    /// Uses mbarriers, bulk copies, `wgmma`, clusters or programmatic launches.
    pub(crate) has_agents: bool,
    /// The blocks of a cluster that the entry asks for.
    pub(crate) cluster: Option<[u32; 3]>,
    /// Registers that a thread starts with, where `setmaxnreg` has an effect.
    pub(crate) registers: Option<u32>,
}

/// A variable in shared memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SharedVariable {
    /// As the source has it.
    pub(crate) name: String,
    pub(crate) address: u64,
    /// `None`: as large as the launch makes it.
    pub(crate) bytes: Option<u64>,
}

/// One kernel parameter.
#[derive(Debug, Clone)]
pub(crate) struct Param {
    pub(crate) name: String,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

/// A decoded instruction.
pub(crate) struct Inst {
    /// Predicate register, or [`ALWAYS`].
    pub(crate) guard: u32,
    pub(crate) guard_negated: bool,
    pub(crate) args: Args,
    pub(crate) op: Op,
    /// Registers whose being written could not be proved: checked when run.
    pub(crate) reads: Box<[Register]>,
    /// Registers of `reads` somewhere: marked when run.
    pub(crate) writes: Box<[Register]>,
    /// Registers that `wgmma` uses somewhere and this instruction touches.
    pub(crate) watch: Option<Box<Watch>>,
}

/// Registers of 32 bits that may belong to a product in flight.
#[derive(Debug, Clone, Default)]
pub(crate) struct Watch {
    pub(crate) reads: Box<[u32]>,
    pub(crate) writes: Box<[u32]>,
    /// One register moved to another: what is in flight moves with it.
    pub(crate) is_move: bool,
}

/// What a report says about an instruction.
#[derive(Debug, Clone)]
pub(crate) struct Info {
    pub(crate) id: u32,
    pub(crate) line: u32,
    pub(crate) location: Option<u32>,
    pub(crate) opcode: Box<str>,
    pub(crate) class: Class,
    /// Floating-point operations of one active lane.
    pub(crate) lane_flops: u32,
    /// Tensor-core operations (multiply and add counted apart) of one warp.
    pub(crate) tensor_ops: u64,
    /// A helper step of the instruction before it: not counted on its own.
    pub(crate) is_step: bool,
}

/// Which register file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Bank {
    Pred,
    B32,
    B64,
}

/// A register with the width it was declared with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Register {
    pub(crate) bank: Bank,
    pub(crate) index: u32,
    pub(crate) bits: u32,
}

/// `[base+offset]`, the space known or told apart per lane.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Address {
    pub(crate) space: Space,
    pub(crate) base: Base,
    pub(crate) offset: i64,
    /// The shared variable that it names.
    pub(crate) variable: Option<u16>,
    /// 1 + index in [`Kernel::extents`] of the shared variables that it was made from; 0: not known.
    pub(crate) extent: u32,
}

/// What an address starts from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Base {
    Absolute,
    R32(u32),
    R64(u32),
}

/// How far an operation's ordering or atomicity reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Scope {
    Cta,
    /// Cluster, device or system: for one device, the same.
    Device,
}

/// `fence` and `membar`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fence {
    pub(crate) scope: Scope,
    /// `.sc`, which `membar` and `__threadfence()` are as well: all of them have one order.
    pub(crate) is_sc: bool,
}

/// The ordering of a memory operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Order {
    /// Strong operations (volatile, relaxed, atomic) do not race with each other within their scope.
    pub(crate) strong: Option<Scope>,
    pub(crate) acquires: bool,
    pub(crate) releases: bool,
}

impl Order {
    pub(crate) const WEAK: Order = Order { strong: None, acquires: false, releases: false };
}

/// A load or a store.
#[derive(Debug, Clone)]
pub(crate) struct Transfer {
    pub(crate) address: Address,
    /// Bytes of one element.
    pub(crate) bytes: u32,
    pub(crate) is_signed: bool,
    /// One register per element.
    pub(crate) registers: Box<[Register]>,
    pub(crate) order: Order,
    /// `.nc`: a load of memory that the launch must not write.
    pub(crate) non_coherent: bool,
    /// A store of a value that was made from one loaded from the same place.
    pub(crate) is_update: bool,
    /// A store of a number that is written in the code: a flag, no data.
    pub(crate) is_constant: bool,
    /// A load of what a compare-and-swap of the same place compares.
    pub(crate) is_compared: bool,
    /// A volatile store of data, or a volatile load of what is used as such: not of a flag, which is written in the code or only asked for.
    pub(crate) is_volatile_data: bool,
}

/// An atomic or a reduction.
pub(crate) struct Atomic {
    pub(crate) address: Address,
    pub(crate) bytes: u32,
    /// More than its bytes for the first element of a vector.
    pub(crate) align: u32,
    /// Absent for `red`.
    pub(crate) d: Option<Register>,
    /// Whether something reads it.
    pub(crate) is_read: bool,
    pub(crate) a: Register,
    /// The swap value of `cas`.
    pub(crate) b: Option<Register>,
    /// Old value, operand, second operand → new value.
    pub(crate) apply: Box<dyn Fn(u64, u64, u64) -> u64 + Send + Sync>,
    pub(crate) order: Order,
}

/// The left operand of `wgmma`.
#[derive(Debug, Clone)]
pub(crate) enum LeftOperand {
    Descriptor(Register),
    Registers(Box<[Register]>),
}

/// `wgmma.mma_async`.
pub(crate) struct Wgmma {
    pub(crate) product: crate::tensor::wgmma::Product,
    pub(crate) d: Box<[u32]>,
    pub(crate) a: LeftOperand,
    pub(crate) b: Register,
    /// Whether D is added to: the predicate, and whether it is negated.
    pub(crate) scale_d: (Register, bool),
}

/// `barrier.cluster`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ClusterBarrier {
    pub(crate) is_wait: bool,
    /// Arrive publishes, wait learns.
    pub(crate) orders: bool,
    pub(crate) aligned: bool,
}

/// A CTA-wide barrier instruction.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BarrierOp {
    pub(crate) kind: BarrierKind,
    pub(crate) id: Register,
    pub(crate) count: Option<Register>,
    /// Requires all lanes of the warp together.
    pub(crate) aligned: bool,
}

/// What a barrier instruction does beyond arriving.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BarrierKind {
    Sync,
    Arrive,
    Reduce { d: Register, source: Register, negated: bool, reduction: Reduction },
}

/// `bar.red`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reduction {
    Popc,
    And,
    Or,
}

/// `shfl.sync` modes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shuffle {
    Up,
    Down,
    Bfly,
    Idx,
}

/// An instruction that lanes of one warp execute together.
pub(crate) struct Collective {
    pub(crate) kind: CollectiveKind,
    /// Holds the mask of the lanes that must take part; absent for `.aligned` ones that take the whole warp.
    pub(crate) members: Option<Register>,
}

/// What a collective computes.
pub(crate) enum CollectiveKind {
    WarpSync,
    Shuffle {
        mode: Shuffle,
        d: Register,
        p: Option<Register>,
        a: Register,
        b: Register,
        c: Register,
    },
    VoteAll {
        d: Register,
        a: Register,
        negated: bool,
    },
    VoteAny {
        d: Register,
        a: Register,
        negated: bool,
    },
    VoteUni {
        d: Register,
        a: Register,
        negated: bool,
    },
    Ballot {
        d: Register,
        a: Register,
        negated: bool,
    },
    MatchAny {
        d: Register,
        a: Register,
    },
    MatchAll {
        d: Register,
        p: Option<Register>,
        a: Register,
    },
    Reduce {
        d: Register,
        a: Register,
        apply: fn(u32, u32) -> u32,
    },
    Elect {
        d: Register,
        p: Register,
    },
    LoadMatrix {
        registers: Box<[u32]>,
        address: Address,
        transposed: bool,
    },
    StoreMatrix {
        registers: Box<[u32]>,
        address: Address,
        transposed: bool,
    },
    MoveMatrix {
        d: u32,
        a: u32,
    },
    Multiply(Box<MatrixMultiply>),
    FragmentLoad(Box<FragmentAccess>),
    FragmentStore(Box<FragmentAccess>),
    WgmmaFence,
    WgmmaCommit,
    WgmmaWait(u32),
    Wgmma(Box<Wgmma>),
    /// `setmaxnreg`: whether it claims registers, and how many a thread has afterwards.
    Registers {
        claims: bool,
        count: u32,
    },
}

/// `mma.sync` and `wmma.mma`.
pub(crate) struct MatrixMultiply {
    pub(crate) contraction: Contraction,
    pub(crate) a: Box<[Register]>,
    pub(crate) b: Box<[Register]>,
    pub(crate) c: Box<[Register]>,
    pub(crate) d: Box<[Register]>,
    /// All of them are registers of 32 bits.
    pub(crate) has_words: bool,
}

/// `wmma.load` and `wmma.store`.
pub(crate) struct FragmentAccess {
    pub(crate) fragment: Fragment,
    pub(crate) layout: Layout,
    pub(crate) address: Address,
    /// Elements between rows (or columns).
    pub(crate) stride: Register,
    pub(crate) registers: Box<[Register]>,
}

/// A device function of the system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Builtin {
    Printf,
    AssertFail,
}

/// A copy of parameter bytes between frames of a call, in local memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ParamCopy {
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) bytes: u64,
}

/// What an instruction does.
pub(crate) enum Op {
    Alu(Alu),
    Branch {
        target: u32,
        meet: u32,
    },
    BranchIndex {
        index: u32,
        targets: Box<[u32]>,
        meet: u32,
    },
    Call {
        target: u32,
        inputs: Box<[ParamCopy]>,
        outputs: Box<[ParamCopy]>,
    },
    Return,
    Builtin {
        which: Builtin,
        inputs: Box<[u64]>,
        output: Option<u64>,
    },
    Exit,
    /// The end of the launch; `is_call`: because a pointer that was called is no function.
    Trap {
        is_call: bool,
    },
    Nop,
    Load(Transfer),
    Store(Transfer),
    Atomic(Box<Atomic>),
    AsyncCopy(Box<AsyncCopy>),
    AsyncCommit,
    /// Wait until at most this many of the newest groups are pending.
    AsyncWait(u32),
    AsyncWaitAll,
    Barrier(Box<BarrierOp>),
    Mbarrier(Box<MbarrierOp>),
    Bulk(Box<Bulk>),
    BulkCommit,
    /// Wait until at most so many of the newest groups are pending, or, `reads_only`, still have to read their source.
    BulkWait {
        pending: u32,
        reads_only: bool,
    },
    AsyncStore(Box<AsyncStore>),
    Cluster(ClusterBarrier),
    /// Orders what the thread knows before the async proxy: of shared, of global memory.
    ProxyFence {
        shared: bool,
        global: bool,
    },
    /// Makes the thread's initialised mbarriers visible to the cluster.
    InitFence,
    /// `griddepcontrol.wait`.
    LaunchWait,
    Fence(Fence),
    Collective(Box<Collective>),
    ActiveMask(u32),
    Clock(Register),
}
