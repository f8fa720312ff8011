//! What a launch asks for.

use crate::memory::Buffer;
use crate::tensor::Accumulate;
use serde::{Deserialize, Serialize};

/// A kernel argument.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Arg {
    /// The address of a buffer.
    Buffer(Buffer),
    /// A 32-bit integer.
    I32(i32),
    /// A 32-bit unsigned integer.
    U32(u32),
    /// A 64-bit integer.
    I64(i64),
    /// A 64-bit unsigned integer or a raw address.
    U64(u64),
    /// Single precision.
    F32(f32),
    /// Double precision.
    F64(f64),
    /// A structure, as its bytes.
    Bytes(Vec<u8>),
}

impl Arg {
    pub(crate) fn bytes(&self) -> Vec<u8> {
        match self {
            Arg::Buffer(b) => b.address.to_le_bytes().to_vec(),
            Arg::I32(v) => v.to_le_bytes().to_vec(),
            Arg::U32(v) => v.to_le_bytes().to_vec(),
            Arg::I64(v) => v.to_le_bytes().to_vec(),
            Arg::U64(v) => v.to_le_bytes().to_vec(),
            Arg::F32(v) => v.to_le_bytes().to_vec(),
            Arg::F64(v) => v.to_le_bytes().to_vec(),
            Arg::Bytes(v) => v.clone(),
        }
    }
}

/// In which order warps run and when asynchronous copies land.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Schedule {
    /// Warps in turn; copies land when their warp's turn is over.
    RoundRobin,
    /// Warps, run lengths and landing times drawn from the seed.
    Random,
    /// Warps that issue asynchronous copies run only when no other can; copies land as late as allowed.
    ProducerLate,
    /// Warps that issue asynchronous copies run first; copies land as early as allowed.
    ConsumerLate,
    /// Warps in turn; copies land the moment they are issued.
    CopiesEarly,
    /// Warps in turn; copies land when they are waited for, or when their warp is done.
    CopiesLate,
}

impl Schedule {
    /// Every schedule.
    pub const ALL: [Schedule; 6] = [
        Schedule::RoundRobin,
        Schedule::Random,
        Schedule::ProducerLate,
        Schedule::ConsumerLate,
        Schedule::CopiesEarly,
        Schedule::CopiesLate,
    ];

    /// Its name on a command line.
    pub fn name(self) -> &'static str {
        match self {
            Schedule::RoundRobin => "round-robin",
            Schedule::Random => "random",
            Schedule::ProducerLate => "producer-late",
            Schedule::ConsumerLate => "consumer-late",
            Schedule::CopiesEarly => "copies-early",
            Schedule::CopiesLate => "copies-late",
        }
    }

    /// The schedules that a name means: one of them, or `all`.
    pub fn named(name: &str) -> Option<Vec<Schedule>> {
        match name {
            "all" => Some(Schedule::ALL.to_vec()),
            _ => Schedule::ALL.into_iter().find(|s| s.name() == name).map(|s| vec![s]),
        }
    }
}

/// What to launch and how to run it.
#[derive(Debug, Clone)]
pub struct Launch {
    /// The entry's name.
    pub entry: String,
    /// Blocks in x, y, z.
    pub grid: [u32; 3],
    /// Threads of a block in x, y, z.
    pub block: [u32; 3],
    /// Blocks of a cluster in x, y, z; `[1, 1, 1]` unless the entry asks for more.
    pub cluster: [u32; 3],
    /// Dynamic shared memory.
    pub shared_bytes: u32,
    /// All blocks run at the same time, and may synchronise as a grid.
    pub cooperative: bool,
    /// The arguments, in order.
    pub args: Vec<Arg>,
    /// See [`Options`].
    pub options: Options,
}

/// How to run a launch.
#[derive(Debug, Clone)]
pub struct Options {
    /// The order in which warps run.
    pub schedule: Schedule,
    /// Makes [`Schedule::Random`] repeatable; the same seed gives the same run.
    pub seed: u64,
    /// Warp instructions the whole launch may execute before it is stopped.
    pub instruction_budget: u64,
    /// Whether happens-before is tracked.
    pub check_races: bool,
    /// Whether to record what each synchronisation did: see [`Outcome::sync_work`](crate::Outcome::sync_work). Slow.
    pub explain: bool,
    /// Whether shuffles, votes and the like order memory between their lanes. CUDA says they do not.
    pub collectives_order_memory: bool,
    /// The largest shared memory a block may have, static and dynamic together.
    pub max_shared_bytes: u32,
    /// Blocks that run at the same time when blocks talk to each other.
    pub resident_blocks: u32,
    /// How tensor-core sums are rounded, which PTX leaves open.
    pub accumulate: Accumulate,
    /// Run blocks on several host threads when they do not talk to each other.
    pub parallel: bool,
    /// The launch may start while the one before it still runs: global memory before `griddepcontrol.wait` is a finding.
    pub programmatic: bool,
    /// Shared memory that threads have read must be fenced before a bulk copy overwrites it, and an mbarrier they initialised before a
    /// copy reports to it. The PTX ISA asks for both; much code that works does without.
    pub strict_proxies: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            schedule: Schedule::RoundRobin,
            seed: 0,
            instruction_budget: 1 << 28,
            check_races: true,
            explain: false,
            collectives_order_memory: false,
            max_shared_bytes: 232_448,
            resident_blocks: 264,
            accumulate: Accumulate::default(),
            parallel: true,
            programmatic: false,
            strict_proxies: false,
        }
    }
}

impl Launch {
    /// A launch with default options.
    pub fn new(entry: &str, grid: [u32; 3], block: [u32; 3], shared_bytes: u32, args: Vec<Arg>) -> Self {
        Launch {
            entry: entry.to_owned(),
            grid,
            block,
            cluster: [1; 3],
            shared_bytes,
            cooperative: false,
            args,
            options: Options::default(),
        }
    }

    /// The same launch under another schedule.
    pub fn with_schedule(mut self, schedule: Schedule, seed: u64) -> Self {
        self.options.schedule = schedule;
        self.options.seed = seed;
        self
    }
}

/// The part of a launch that blocks look at.
#[derive(Debug, Clone)]
pub(crate) struct Shape {
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) cluster: [u32; 3],
    /// Whether the launch asked for clusters.
    pub(crate) is_cluster: bool,
    pub(crate) shared_bytes: u32,
    /// Where the grid of a cooperative launch synchronises; 0 for others.
    pub(crate) workspace: u64,
    /// Linear number of the first block of this world; with clusters, counted cluster by cluster.
    pub(crate) first_block: u64,
}

impl Shape {
    pub(crate) fn threads(&self) -> u32 {
        self.block.iter().product()
    }

    pub(crate) fn cluster_size(&self) -> u32 {
        self.cluster.iter().product()
    }

    /// The number in the grid of a block of this world.
    pub(crate) fn linear_block(&self, block: u32) -> u64 {
        self.in_grid(self.first_block + u64::from(block))
    }

    /// The number in the grid of a block counted cluster by cluster.
    pub(crate) fn in_grid(&self, counted: u64) -> u64 {
        let size = u64::from(self.cluster_size());
        if size == 1 {
            return counted;
        }
        let clusters = std::array::from_fn(|axis| self.grid[axis] / self.cluster[axis]);
        let cluster = Self::coordinates(clusters, counted / size);
        let inside = Self::coordinates(self.cluster, counted % size);
        let at = |axis: usize| cluster[axis] * u64::from(self.cluster[axis]) + inside[axis];
        let (gx, gy) = (u64::from(self.grid[0]), u64::from(self.grid[1]));
        at(0) + gx * (at(1) + gy * at(2))
    }

    pub(crate) fn blocks(&self) -> u64 {
        self.grid.iter().map(|n| u64::from(*n)).product()
    }

    /// `(x,y,z)` of a block or thread number.
    pub(crate) fn coordinates(extent: [u32; 3], linear: u64) -> [u64; 3] {
        let (x, y) = (u64::from(extent[0].max(1)), u64::from(extent[1].max(1)));
        [linear % x, linear / x % y, linear / (x * y)]
    }
}
