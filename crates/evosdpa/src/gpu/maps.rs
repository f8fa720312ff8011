//! Tensor maps of the last launches. Who calls again and again has few tensors: three maps take the driver half a microsecond to make
//! (a tenth to move) on an H200's host.

use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicU64, Ordering},
};

use evosdpa_cuda::TensorMap;

/// How many are kept; a new one takes the place of the one that its tensor falls on.
const SLOTS: usize = 1024;

/// Tensor maps by what they were made of, in memory that is made once: a launch does not allocate.
#[derive(Debug)]
pub(super) struct RecentMaps(Mutex<Box<[Slot]>>);

/// A map and what it was made of; `None` as long as nothing was put there.
type Slot = Option<(MapKey, TensorMap)>;

/// The number of a plan among all that were ever made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PlanNumber(u64);

impl PlanNumber {
    /// The next one.
    pub(super) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// All that a tensor map depends on. Types, strides, boxes and all sizes but two are its plan's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MapKey {
    pub(super) plan: PlanNumber,
    /// Which of the plan's maps.
    pub(super) map: u32,
    pub(super) address: u64,
    /// Sequence and batch of the tensor, as far as the call says how many tokens, pages or blocks there are.
    pub(super) counts: [u64; 2],
}

impl RecentMaps {
    /// Takes the maps that recent launches have had; says whether those were all.
    pub(super) fn find(&self, wanted: impl Iterator<Item = MapKey>, maps: &mut [TensorMap]) -> bool {
        let slots = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        wanted.zip(maps).all(|(key, place)| match &slots[key.slot()] {
            Some((known, map)) if *known == key => {
                *place = *map;
                true
            }
            _ => false,
        })
    }

    /// Keeps a map for launches to come.
    pub(super) fn keep(&self, key: MapKey, map: TensorMap) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)[key.slot()] = Some((key, map));
    }
}

impl Default for RecentMaps {
    fn default() -> Self {
        Self(Mutex::new(vec![None; SLOTS].into_boxed_slice()))
    }
}

impl MapKey {
    /// Addresses of one program are multiples of large powers of two; the rest keeps apart what is at one place.
    fn slot(&self) -> usize {
        let rest =
            self.plan.0.rotate_left(3) ^ u64::from(self.map) ^ self.counts[0] ^ self.counts[1].rotate_left(9);
        // An odd number whose bits look random: the fractional part of the golden ratio.
        let mixed = (self.address ^ rest.rotate_left(40)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed >> (64 - SLOTS.ilog2())) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(address: u64) -> MapKey {
        MapKey { plan: PlanNumber(7), map: 1, address, counts: [512, 1] }
    }

    fn is_known(maps: &RecentMaps, wanted: &[MapKey]) -> bool {
        let mut found = [TensorMap::EMPTY; 4];
        maps.find(wanted.iter().copied(), &mut found)
    }

    #[test]
    fn a_map_is_known_once_it_is_kept_and_not_when_anything_differs() {
        let maps = RecentMaps::default();
        let base = key(1 << 20);
        assert!(!is_known(&maps, &[base]));
        maps.keep(base, TensorMap::EMPTY);
        assert!(is_known(&maps, &[base]));
        type Change = fn(&mut MapKey);
        let changes: [Change; 5] = [
            |key| key.address += 1 << 20,
            |key| key.plan.0 += 1,
            |key| key.map = 2,
            |key| key.counts[0] += 1,
            |key| key.counts[1] += 1,
        ];
        for change in changes {
            let mut other = base;
            change(&mut other);
            assert!(!is_known(&maps, &[other]) && !is_known(&maps, &[base, other]), "{other:?}");
            maps.keep(other, TensorMap::EMPTY);
            assert!(is_known(&maps, &[other]), "{other:?}");
        }
    }

    #[test]
    fn plans_have_numbers_of_their_own() {
        assert_ne!(PlanNumber::new(), PlanNumber::new());
    }

    #[test]
    fn tensors_of_one_model_fall_on_slots_of_their_own() {
        // Keys and values of 64 layers, 2 MB each; maps of one launch at one address.
        let layers = (0..128).map(|at| key(0x7f00_0000_0000 + (at << 21)).slot());
        let slots: std::collections::HashSet<usize> = layers.collect();
        assert!(slots.len() > 96, "{}", slots.len());
        let of_one: std::collections::HashSet<usize> =
            (0..4).map(|map| MapKey { map, ..key(1 << 30) }.slot()).collect();
        assert_eq!(of_one.len(), 4);
    }
}
