//! Counters kept per instruction while running.

/// Counts of one instruction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    /// Times a warp executed it.
    pub(crate) executed: u64,
    /// Lanes active in those executions.
    pub(crate) lanes: u64,
    /// 32-byte sectors of global memory touched.
    pub(crate) sectors: u64,
    /// Bytes asked for.
    pub(crate) global_bytes: u64,
    pub(crate) shared_bytes: u64,
    /// Passes over shared memory, and how many there would be without bank conflicts.
    pub(crate) wavefronts: u64,
    pub(crate) ideal_wavefronts: u64,
    /// Times lanes had to wait at a barrier.
    pub(crate) waits: u64,
    /// What a synchronisation did, when that is recorded: see `machine::sync_trace`. For an atomic: lanes that changed memory.
    pub(crate) work: u64,
}

impl Tally {
    pub(crate) fn add(&mut self, other: &Tally) {
        self.executed += other.executed;
        self.lanes += other.lanes;
        self.sectors += other.sectors;
        self.global_bytes += other.global_bytes;
        self.shared_bytes += other.shared_bytes;
        self.wavefronts += other.wavefronts;
        self.ideal_wavefronts += other.ideal_wavefronts;
        self.waits += other.waits;
        self.work += other.work;
    }
}

/// 32-byte sectors that the lanes of one access touch.
pub(crate) fn sectors(addresses: &[u64; 32], mask: u32, bytes: u32) -> u64 {
    if mask == u32::MAX
        && bytes.is_power_of_two()
        && bytes <= 32
        && let Some(count) = rising_sectors(addresses, bytes)
    {
        return count;
    }
    let mut seen = [0; 64];
    let mut count = 0usize;
    let mut highest = None;
    for lane in 0..32 {
        if mask >> lane & 1 == 0 {
            continue;
        }
        let (first, last) = (addresses[lane] / 32, (addresses[lane].wrapping_add(u64::from(bytes) - 1)) / 32);
        for sector in [first, last] {
            // Lanes mostly go upwards: a sector above all others is new, the highest one is not.
            if highest == Some(sector) || (highest > Some(sector) && seen[..count].contains(&sector)) {
                continue;
            }
            highest = highest.max(Some(sector));
            seen[count] = sector;
            count += 1;
        }
    }
    count as u64
}

crate::host::compiled_thrice! {
    /// The sectors of accesses that none of them cross, if no lane goes back: the usual case.
    fn rising_sectors = rising(addresses: &[u64; 32], bytes: u32) -> Option<u64>
}

#[inline(always)]
fn rising(addresses: &[u64; 32], bytes: u32, _host: crate::host::Host) -> Option<u64> {
    let (mut low_bits, mut falls, mut steps) = (addresses[0], 0, 0);
    for lane in 1..32 {
        let (before, here) = (addresses[lane - 1] / 32, addresses[lane] / 32);
        low_bits |= addresses[lane];
        falls |= u64::from(here < before);
        steps += u64::from(here != before);
    }
    (falls == 0 && low_bits.is_multiple_of(u64::from(bytes))).then_some(steps + 1)
}

/// Passes over the 32 banks of shared memory that one access takes, and the fewest its size allows.
///
/// Lanes go together in groups of 32, 16 or 8 for accesses of up to 4, 8 and 16 bytes; within a group every
/// bank delivers one 4-byte word per pass, to any number of lanes.
pub(crate) fn wavefronts(addresses: &[u64; 32], mask: u32, bytes: u32) -> (u64, u64) {
    // Rows of `ldmatrix` and copies of 16 bytes: the usual ones, of whole groups that ask for every bank once.
    if bytes == 16 && matches!(mask, 0xff | 0xffff | u32::MAX) {
        let groups = u64::from(mask.count_ones() / 8);
        if quads_asked(addresses)[..groups as usize].iter().all(|asked| *asked == 0xff) {
            return (groups, groups);
        }
    }
    if bytes == 16
        && mask == u32::MAX
        && let Some(total) = quads_passed(addresses)
    {
        return (total, 4);
    }
    let words = (bytes as usize).div_ceil(4);
    let lanes = 32 / words.next_power_of_two();
    let step = u64::from(bytes);
    if mask == u32::MAX && (0..32).all(|l| addresses[l] == addresses[0].wrapping_add(l as u64 * step)) {
        let groups = (32 / lanes) as u64;
        return (groups, groups);
    }
    let (mut total, mut ideal) = (0, 0);
    for first in (0..32).step_by(lanes) {
        let group = (mask >> first) & (((1u64 << lanes) - 1) as u32);
        if group == 0 {
            continue;
        }
        ideal += 1;
        total += passes(&addresses[first..first + lanes], group, words);
    }
    (total, ideal)
}

crate::host::compiled_thrice! {
    /// Which of the eight groups of four banks the lanes of each group ask for; none that spans two.
    fn quads_asked = quads(addresses: &[u64; 32]) -> [u32; 4]
}

#[inline(always)]
fn quads(addresses: &[u64; 32], _host: crate::host::Host) -> [u32; 4] {
    let mut asked = [0; 32];
    for (asked, address) in asked.iter_mut().zip(addresses) {
        let address = *address as u32;
        *asked = u32::from(address.is_multiple_of(16)) << (address / 16 % 8);
    }
    std::array::from_fn(|group| asked[8 * group..][..8].iter().fold(0, |all, one| all | one))
}

/// Whether no two lanes ask for the same banks: the usual case, in one look at each.
fn are_apart(addresses: &[u64], mask: u32, words: usize) -> bool {
    // Of two or four words: as many neighbouring banks as one, counted from a multiple of them.
    let shift = 2 + words.trailing_zeros();
    let places = (32 >> words.trailing_zeros()) - 1;
    let (mut asked, mut twice, mut low_bits) = (0u32, 0u32, 0u64);
    for (lane, address) in addresses.iter().enumerate() {
        let place = (mask >> lane & 1) << (address >> shift & places);
        twice |= asked & place;
        asked |= place;
        low_bits |= address;
    }
    twice == 0 && words.is_power_of_two() && (words == 1 || low_bits.is_multiple_of(1 << shift))
}

crate::host::compiled_thrice! {
    /// The passes of four groups of eight lanes whose words lie together, all that are there: see [`passes_of_quads`].
    fn quads_passed = all_passes_of_quads(addresses: &[u64; 32]) -> Option<u64>
}

#[inline(always)]
fn all_passes_of_quads(addresses: &[u64; 32], _host: crate::host::Host) -> Option<u64> {
    const GROUPS: usize = 4;
    if addresses.iter().fold(0, |all, address| all | address) % 16 != 0 {
        return None;
    }
    // The groups side by side, so that all go one step at a time.
    let quads: [[u64; GROUPS]; 8] =
        std::array::from_fn(|lane| std::array::from_fn(|group| addresses[8 * group + lane] / 16));
    let mut depths = [0u64; GROUPS];
    for lane in 0..8 {
        let mut is_new = [1u64; GROUPS];
        for other in 0..lane {
            for group in 0..GROUPS {
                is_new[group] &= u64::from(quads[lane][group] != quads[other][group]);
            }
        }
        for group in 0..GROUPS {
            depths[group] += is_new[group] << (quads[lane][group] % 8 * 8);
        }
    }
    Some(depths.iter().map(|depth| depth.to_le_bytes().into_iter().max().map_or(0, u64::from)).sum())
}

/// As [`passes`] for up to eight lanes whose words lie together: each asks for one of eight groups of four banks.
fn passes_of_quads(addresses: &[u64; 8], mask: u32) -> u64 {
    let quads = addresses.map(|address| address / 16);
    let mut depth = 0u64;
    for (lane, quad) in quads.iter().enumerate() {
        let is_same = |other: &usize| mask >> other & 1 == 1 && quads[*other] == *quad;
        let is_new = mask >> lane & 1 == 1 && !(0..lane).any(|other| is_same(&other));
        depth += u64::from(is_new) << (quad % 8 * 8);
    }
    depth.to_le_bytes().into_iter().max().map_or(0, u64::from)
}

fn passes(addresses: &[u64], mask: u32, words: usize) -> u64 {
    if are_apart(addresses, mask, words) {
        return 1;
    }
    if let (4, Ok(addresses)) = (words, <&[u64; 8]>::try_from(addresses))
        && addresses.iter().all(|address| address.is_multiple_of(16))
    {
        return passes_of_quads(addresses, mask);
    }
    const NONE: u8 = u8::MAX;
    // Per bank a chain of the distinct words asked for: lanes times words is at most 32.
    let (mut newest, mut depth) = ([NONE; 32], [0u8; 32]);
    let (mut asked, mut older) = ([0u64; 32], [NONE; 32]);
    let mut count = 0;
    for (lane, address) in addresses.iter().enumerate() {
        if mask >> lane & 1 == 0 {
            continue;
        }
        for word in (address / 4..).take(words) {
            let bank = (word % 32) as usize;
            let mut link = newest[bank];
            while link != NONE && asked[link as usize] != word {
                link = older[link as usize];
            }
            if link == NONE {
                (asked[count], older[count]) = (word, newest[bank]);
                newest[bank] = count as u8;
                depth[bank] += 1;
                count += 1;
            }
        }
    }
    u64::from(depth.into_iter().max().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strided(stride: u64) -> [u64; 32] {
        std::array::from_fn(|l| l as u64 * stride)
    }

    #[test]
    fn sectors_of_known_patterns() {
        assert_eq!(sectors(&strided(4), u32::MAX, 4), 4);
        assert_eq!(sectors(&strided(32), u32::MAX, 4), 32);
        assert_eq!(sectors(&strided(16), u32::MAX, 16), 16);
        assert_eq!(sectors(&[64; 32], u32::MAX, 4), 1);
        assert_eq!(sectors(&strided(4), 0, 4), 0);
    }

    /// Whole 16 bytes at a time, and word by word.
    #[test]
    fn quads_are_counted_as_their_words_are() {
        let mut random = crate::random::Random::new(7, 0);
        for _ in 0..200 {
            let addresses: [u64; 8] = std::array::from_fn(|_| 16 * random.below(20));
            let mask = random.below(256) as u32;
            let mut banks = [const { std::collections::BTreeSet::new() }; 32];
            for lane in (0..8).filter(|lane| mask >> lane & 1 == 1) {
                (0..4).map(|k| addresses[lane] / 4 + k).for_each(|word| {
                    banks[(word % 32) as usize].insert(word);
                });
            }
            let expected = banks.iter().map(|bank| bank.len()).max().unwrap_or(0) as u64;
            assert_eq!(passes_of_quads(&addresses, mask), expected, "{addresses:?} {mask:#x}");
        }
    }

    /// Accesses of whole warps have a way of their own.
    #[test]
    fn whole_warps_are_counted_as_their_lanes_are() {
        let mut random = crate::random::Random::new(8, 0);
        for case in 0..300 {
            let addresses: [u64; 32] = match case % 3 {
                0 => std::array::from_fn(|_| 16 * random.below(40)),
                1 => std::array::from_fn(|lane| 80 * (lane as u64 / 4) + 16 * (lane as u64 % 4) + 16 * case),
                _ => std::array::from_fn(|lane| 16 * (lane as u64 + random.below(3))),
            };
            let groups = addresses.as_chunks::<8>().0;
            let passes = groups.iter().map(|group| passes_of_quads(group, 0xff)).sum();
            assert_eq!(wavefronts(&addresses, u32::MAX, 16), (passes, 4), "{addresses:?}");
            for bytes in [4, 8, 16] {
                let touched: std::collections::BTreeSet<u64> = addresses.iter().map(|a| a / 32).collect();
                assert_eq!(sectors(&addresses, u32::MAX, bytes), touched.len() as u64, "{addresses:?}");
            }
        }
    }

    #[test]
    fn bank_conflicts_of_known_patterns() {
        assert_eq!(wavefronts(&strided(4), u32::MAX, 4), (1, 1));
        assert_eq!(wavefronts(&strided(8), u32::MAX, 4), (2, 1));
        assert_eq!(wavefronts(&strided(128), u32::MAX, 4), (32, 1));
        assert_eq!(wavefronts(&strided(132), u32::MAX, 4), (1, 1));
        assert_eq!(wavefronts(&[0; 32], u32::MAX, 4), (1, 1), "broadcast");
        assert_eq!(wavefronts(&strided(16), u32::MAX, 16), (4, 4));
        assert_eq!(wavefronts(&strided(128), u32::MAX, 16), (32, 4));
        assert_eq!(wavefronts(&strided(2), u32::MAX, 2), (1, 1));
    }
}
