//! Generic addresses: one window each for shared, local and parameter memory; the rest is global.

use crate::parse::ast::Space;

/// Where the rank stands in a shared address that names a block of the cluster: 1 + rank above the offset. The own block's addresses
/// have nothing there. (The spelling is the machine's own business: PTX only has `mapa` and `getctarank` to make and read it.)
const RANK_SHIFT: u32 = 24;

/// The address of the same variable in the block of rank `rank`.
pub(crate) fn in_cluster(address: u32, rank: u32) -> u32 {
    (rank.min(254) + 1) << RANK_SHIFT | address & ((1 << RANK_SHIFT) - 1)
}

/// The rank that an address names; `None`: the own block.
#[inline]
pub(crate) fn rank(address: u32) -> Option<u32> {
    (address >> RANK_SHIFT).checked_sub(1)
}

/// An address within its block.
#[inline]
pub(crate) fn offset(address: u32) -> u32 {
    address & ((1 << RANK_SHIFT) - 1)
}

/// Each window spans 4 GiB, room for the shared memory of every block of a cluster.
const WINDOW_BITS: u32 = 32;
const SHARED: u64 = 0x7f00_0000_0000;
const LOCAL: u64 = 0x7e00_0000_0000;
const PARAM: u64 = 0x7d00_0000_0000;

/// What to add to an address of `space` to make it generic.
pub(crate) fn base(space: Space) -> u64 {
    match space {
        Space::Shared => SHARED,
        Space::Local => LOCAL,
        Space::Param => PARAM,
        Space::Global | Space::Const | Space::Generic => 0,
    }
}

/// The space of a generic address and the address inside it.
#[inline]
pub(crate) fn split(address: u64) -> (Space, u64) {
    let space = match address >> WINDOW_BITS {
        w if w == SHARED >> WINDOW_BITS => Space::Shared,
        w if w == LOCAL >> WINDOW_BITS => Space::Local,
        w if w == PARAM >> WINDOW_BITS => Space::Param,
        _ => return (Space::Global, address),
    };
    (space, address & ((1 << WINDOW_BITS) - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_round_trip() {
        for space in [Space::Shared, Space::Local, Space::Param, Space::Global] {
            assert_eq!(split(base(space) + 0x1234), (space, 0x1234));
        }
    }
}
