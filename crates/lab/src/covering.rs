//! Pairwise covering: a few combinations in which every two settings meet, instead of all combinations.
//!
//! Most mistakes need at most two settings to meet (Kuhn, Wallace and Gallo, "Software fault interactions and implications
//! for software testing", 2004), so a set of combinations in which every pair of values occurs finds nearly what all of
//! them find.

use std::collections::{BTreeMap, BTreeSet};

/// Indices of combinations such that every pair of values that occurs in any of them occurs in one that is chosen.
/// Each combination has one value per setting. Greedy, and the same for the same input.
pub fn pairwise<V: Ord>(combinations: &[Vec<V>]) -> Vec<usize> {
    // Each pair of values gets a number; each combination is the list of its pairs.
    let mut numbers: BTreeMap<(usize, &V, usize, &V), usize> = BTreeMap::new();
    let mut pairs: Vec<Vec<usize>> = Vec::with_capacity(combinations.len());
    for values in combinations {
        let mut own = Vec::new();
        for (i, a) in values.iter().enumerate() {
            for (j, b) in values.iter().enumerate().skip(i) {
                let next = numbers.len();
                own.push(*numbers.entry((i, a, j, b)).or_insert(next));
            }
        }
        pairs.push(own);
    }
    let mut missing = vec![true; numbers.len()];
    let mut left = numbers.len();
    let mut chosen = BTreeSet::new();
    // What a combination adds only shrinks: one whose last count is below the best need not be counted again.
    let mut adds: Vec<usize> = pairs.iter().map(Vec::len).collect();
    while left > 0 {
        let (mut best, mut most) = (0, 0);
        for (at, own) in pairs.iter().enumerate() {
            if adds[at] > most {
                adds[at] = own.iter().filter(|pair| missing[**pair]).count();
                if adds[at] > most {
                    (best, most) = (at, adds[at]);
                }
            }
        }
        chosen.insert(best);
        pairs[best].iter().for_each(|pair| missing[*pair] = false);
        left -= most;
    }
    chosen.into_iter().collect()
}

/// A choice of about `most` combinations: those of [`pairwise`], however many they are, and others at even distances.
pub fn covering<V: Ord>(combinations: &[Vec<V>], most: usize) -> Vec<usize> {
    let mut chosen: BTreeSet<usize> = pairwise(combinations).into_iter().collect();
    let others: Vec<usize> = (0..combinations.len()).filter(|at| !chosen.contains(at)).collect();
    let wanted = most.saturating_sub(chosen.len()).min(others.len());
    chosen.extend((0..wanted).map(|i| others[i * others.len() / wanted]));
    chosen.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_filled_up_and_still_shows_every_pair() {
        let all: Vec<Vec<u32>> = (0..256u32).map(|n| (0..8).map(|i| n >> i & 1).collect()).collect();
        let least = pairwise(&all);
        let chosen = covering(&all, 100);
        assert_eq!(chosen.len(), 100);
        assert!(chosen.is_sorted() && least.iter().all(|at| chosen.contains(at)));
        assert_eq!(covering(&all, 1), least);
        assert_eq!(covering(&all, 1000).len(), all.len());
    }

    #[test]
    fn every_pair_is_there_and_far_from_everything_is_chosen() {
        // Six settings of three values: 729 combinations, minus those that a constraint forbids.
        let all: Vec<Vec<u32>> = (0..729u32)
            .map(|n| (0..6).map(|i| n / 3u32.pow(i) % 3).collect())
            .filter(|v: &Vec<u32>| v[0] != 2 || v[1] == 0)
            .collect();
        let chosen = pairwise(&all);
        assert!(chosen.len() < 30, "{} chosen", chosen.len());
        let pairs = |rows: &mut dyn Iterator<Item = &Vec<u32>>| -> BTreeSet<(usize, u32, usize, u32)> {
            rows.flat_map(|v| {
                (0..6).flat_map(move |i| (i + 1..6).map(move |j| (i, v[i], j, v[j]))).collect::<Vec<_>>()
            })
            .collect()
        };
        assert_eq!(pairs(&mut chosen.iter().map(|at| &all[*at])), pairs(&mut all.iter()));
        assert_eq!(chosen, pairwise(&all));
        assert!(pairwise::<u32>(&[]).is_empty());
    }
}
