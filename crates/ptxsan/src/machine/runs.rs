//! Runs: neighbouring lanes with consecutive addresses, as most accesses have, handled at once instead of lane by lane.

use crate::hazard::chunk::CHUNK_BYTES;
use crate::host::{Host, compiled_thrice};

/// Runs do not cross multiples of it: what is known of memory is kept in pieces of this many bytes.
const RUN_BYTES: u64 = CHUNK_BYTES as u64;

/// The lanes of `mask` whose place, of so many bytes, lies right behind that of the lane before, which is in `mask` too.
#[derive(Clone, Copy)]
pub(super) struct Following(u32);

impl Following {
    pub(super) fn new(addresses: &[u64; 32], mask: u32, bytes: u32) -> Self {
        Following(right_behind(addresses, u64::from(bytes)) & mask & mask << 1)
    }

    /// Those of which the same is true of other addresses.
    pub(super) fn and(self, other: Following) -> Self {
        Following(self.0 & other.0)
    }

    /// No two lanes go together.
    pub(super) const NONE: Following = Following(0);

    /// How many lanes of `lanes`, from the lowest on, go together. There must be one.
    #[inline(always)]
    pub(super) fn count(self, lanes: u32) -> u32 {
        let first = lanes.trailing_zeros() & 31;
        1 + ((self.0 & lanes) >> first >> 1).trailing_ones()
    }

    /// All of `lanes`, run by run: the first lane of each, and how many there are.
    #[inline(always)]
    pub(super) fn runs(self, lanes: u32) -> impl Iterator<Item = (usize, u32)> {
        let mut rest = lanes;
        std::iter::from_fn(move || {
            let first = rest.trailing_zeros();
            (rest != 0).then(|| {
                let count = self.count(rest);
                rest &= !of(first, count);
                (first as usize, count)
            })
        })
    }
}

/// So many lanes from the first on.
#[inline(always)]
pub(super) fn of(first: u32, count: u32) -> u32 {
    (((1u64 << count) - 1) << first) as u32
}

compiled_thrice! {
    /// The lanes, from the second on, whose address is that of the lane before and so many bytes, and no multiple of [`RUN_BYTES`].
    fn right_behind = behind(addresses: &[u64; 32], bytes: u64) -> u32
}

#[inline(always)]
fn behind(addresses: &[u64; 32], bytes: u64, _host: Host) -> u32 {
    let mut all = 0;
    for lane in 1..32 {
        let follows = addresses[lane].wrapping_sub(addresses[lane - 1]) == bytes;
        all |= u32::from(follows && !addresses[lane].is_multiple_of(RUN_BYTES)) << lane;
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(addresses: &[u64; 32], lanes: u32, bytes: u32) -> Vec<(usize, u32)> {
        Following::new(addresses, lanes, bytes).runs(lanes).collect()
    }

    #[test]
    fn runs_end_at_gaps_missing_lanes_and_borders() {
        let all: [u64; 32] = std::array::from_fn(|l| 16 * l as u64);
        assert_eq!(runs(&all, u32::MAX, 16), [(0, 16), (16, 16)]);
        assert_eq!(runs(&all.map(|a| a / 4), u32::MAX, 4), [(0, 32)]);
        assert_eq!(runs(&all, 0b0111_0110, 16), [(1, 2), (4, 3)]);
        assert_eq!(runs(&all, u32::MAX, 8).len(), 32);
        assert_eq!(runs(&[64; 32], 0b11, 16), [(0, 1), (1, 1)]);
        assert_eq!(runs(&all, 0, 16), []);
        let rows: [u64; 32] = std::array::from_fn(|l| 80 * (l as u64 / 4) + 16 * (l as u64 % 4));
        assert_eq!(runs(&rows, u32::MAX, 16)[..5], [(0, 4), (4, 4), (8, 4), (12, 1), (13, 3)]);
        assert_eq!(of(31, 1), 1 << 31);
        assert_eq!(of(0, 32), u32::MAX);
    }
}
