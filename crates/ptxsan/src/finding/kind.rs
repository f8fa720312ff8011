//! What kinds of mistakes there are, and how bad each is.

use super::Severity;
use serde::Serialize;

/// What kind of mistake was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Kind {
    /// Two accesses to the same bytes, one a write, that nothing orders.
    Race,
    /// An access that is not ordered with an asynchronous copy.
    AsyncRace,
    /// Accesses through the generic and the async proxy that no proxy fence orders.
    ProxyRace,
    /// A value is loaded, changed and stored by volatile or relaxed accesses while another thread may store it too.
    LostUpdate,
    /// Lanes of a warp exchange values by volatile or relaxed accesses without `__syncwarp()`.
    WarpSynchronous,
    /// Warps of a block exchange data by volatile accesses of shared memory that nothing orders.
    VolatileRace,
    /// A flag is passed on by volatile or relaxed accesses, and what it announces is not ordered before it by a fence.
    UnfencedMessage,
    /// A non-coherent (read-only) load of bytes that the launch writes.
    NonCoherentLoad,
    /// A register of a `wgmma` in flight, or one that no `wgmma.fence` covers; warps of a warpgroup apart.
    Wgmma,
    /// An mbarrier that is not there, with a wrong count of arrivals or bytes, or used against its rules.
    Mbarrier,
    /// A bulk copy with a wrong address, size or tensor map.
    BulkCopy,
    /// Shared memory of a block of the cluster that may not have started, or has exited.
    ClusterLifetime,
    /// `setmaxnreg` against its rules.
    Registers,
    /// Global memory before `griddepcontrol.wait`: the launch before may still use it.
    LaunchOrder,
    /// An access outside every allocation, or outside the shared variable that its address was made from.
    OutOfBounds,
    /// An access to memory that was freed.
    UseAfterFree,
    /// An address that is not a multiple of the access size.
    Misaligned,
    /// A value from memory that nothing wrote is used.
    UninitialisedMemory,
    /// A value from a register that nothing wrote is used.
    UninitialisedRegister,
    /// Bytes of an output that the launch left unwritten.
    UnwrittenOutput,
    /// A write to read-only memory.
    ReadOnlyWrite,
    /// A matrix instruction on memory it cannot reach, such as a local array.
    WrongSpace,
    /// A barrier that not all lanes of a warp reached together.
    BarrierDivergence,
    /// A barrier used with different thread counts at once.
    BarrierCount,
    /// A barrier number or count outside the limits.
    BarrierMisuse,
    /// A `.sync` instruction whose mask misses an executing lane, or names a lane that does not come.
    SyncMask,
    /// A shuffle that reads a lane outside the ones taking part.
    ShuffleInactive,
    /// Nobody can go on.
    Deadlock,
    /// The instruction budget is spent.
    Budget,
    /// A device-side assertion failed.
    Assertion,
    /// A trap was executed.
    Trap,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Kind; 31] = [
        Kind::Race,
        Kind::AsyncRace,
        Kind::ProxyRace,
        Kind::LostUpdate,
        Kind::WarpSynchronous,
        Kind::VolatileRace,
        Kind::UnfencedMessage,
        Kind::NonCoherentLoad,
        Kind::Wgmma,
        Kind::Mbarrier,
        Kind::BulkCopy,
        Kind::ClusterLifetime,
        Kind::Registers,
        Kind::LaunchOrder,
        Kind::OutOfBounds,
        Kind::UseAfterFree,
        Kind::Misaligned,
        Kind::UninitialisedMemory,
        Kind::UninitialisedRegister,
        Kind::UnwrittenOutput,
        Kind::ReadOnlyWrite,
        Kind::WrongSpace,
        Kind::BarrierDivergence,
        Kind::BarrierCount,
        Kind::BarrierMisuse,
        Kind::SyncMask,
        Kind::ShuffleInactive,
        Kind::Deadlock,
        Kind::Budget,
        Kind::Assertion,
        Kind::Trap,
    ];

    /// Its name in JSON and in suppressions, and a short one for people.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            Kind::Race => ("race", "data race"),
            Kind::AsyncRace => ("async_race", "race with an asynchronous copy"),
            Kind::ProxyRace => ("proxy_race", "race between proxies"),
            Kind::LostUpdate => ("lost_update", "lost update"),
            Kind::WarpSynchronous => ("warp_synchronous", "warp-synchronous access without __syncwarp()"),
            Kind::VolatileRace => ("volatile_race", "volatile accesses that nothing orders"),
            Kind::UnfencedMessage => ("unfenced_message", "message passed without a fence"),
            Kind::NonCoherentLoad => ("non_coherent_load", "read-only load of memory that the launch writes"),
            Kind::Wgmma => ("wgmma", "wgmma hazard"),
            Kind::Mbarrier => ("mbarrier", "mbarrier misuse"),
            Kind::BulkCopy => ("bulk_copy", "bulk copy misuse"),
            Kind::ClusterLifetime => ("cluster_lifetime", "shared memory of a block that may not be there"),
            Kind::Registers => ("registers", "register reallocation"),
            Kind::LaunchOrder => ("launch_order", "race with the launch before"),
            Kind::OutOfBounds => ("out_of_bounds", "out-of-bounds access"),
            Kind::UseAfterFree => ("use_after_free", "use of freed memory"),
            Kind::Misaligned => ("misaligned", "misaligned access"),
            Kind::UninitialisedMemory => ("uninitialised_memory", "use of memory never written"),
            Kind::UninitialisedRegister => ("uninitialised_register", "use of a register never written"),
            Kind::UnwrittenOutput => ("unwritten_output", "output never written"),
            Kind::ReadOnlyWrite => ("read_only_write", "write to read-only memory"),
            Kind::WrongSpace => ("wrong_space", "matrix instruction on the wrong kind of memory"),
            Kind::BarrierDivergence => ("barrier_divergence", "barrier in divergent code"),
            Kind::BarrierCount => ("barrier_count", "barrier with mismatched counts"),
            Kind::BarrierMisuse => ("barrier_misuse", "barrier misuse"),
            Kind::SyncMask => ("sync_mask", "warp synchronisation mask"),
            Kind::ShuffleInactive => ("shuffle_inactive", "shuffle from an inactive lane"),
            Kind::Deadlock => ("deadlock", "deadlock"),
            Kind::Budget => ("budget", "instruction budget spent"),
            Kind::Assertion => ("assertion", "assertion failed"),
            Kind::Trap => ("trap", "trap"),
        }
    }

    /// Its name in JSON and in suppressions.
    pub fn name(self) -> &'static str {
        self.names().0
    }

    /// A short name for people.
    pub fn title(self) -> &'static str {
        self.names().1
    }

    /// The kind of that name.
    pub fn named(name: &str) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// How bad it is, unless a finding says otherwise.
    pub fn severity(self) -> Severity {
        match self {
            Kind::LostUpdate
            | Kind::WarpSynchronous
            | Kind::VolatileRace
            | Kind::UnfencedMessage
            | Kind::UnwrittenOutput => Severity::Warning,
            _ => Severity::Error,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_json() {
        for kind in Kind::ALL {
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.name());
            assert_eq!(Kind::named(kind.name()), Some(kind));
        }
    }
}
