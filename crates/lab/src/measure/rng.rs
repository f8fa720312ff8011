//! Chance: orders of blocks, moments of audits, mutations.

/// A small generator (Marsaglia's xorshift64*); the same seed gives the same throws.
///
/// Not a crate's: a tune that is resumed goes on with the numbers of its seed, in any later version of this program too.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// With this seed; 0 is as good as any other.
    pub fn new(seed: u64) -> Self {
        // Zero is the one state that xorshift never leaves.
        Self(if seed == 0 { 0x9E37_79B9_7F4A_7C15 } else { seed })
    }

    /// A seed that nobody can know beforehand.
    pub fn entropy() -> u64 {
        use std::hash::{BuildHasher, RandomState};
        // Each RandomState is seeded anew from the system.
        RandomState::new().hash_one(std::process::id())
    }

    /// The generator of the `n`-th member of a series: independent of how many came before.
    pub fn of_series(seed: u64, n: u64) -> Self {
        // SplitMix64's finaliser spreads neighbouring numbers over the whole range.
        let mut z = seed.wrapping_add(n.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        Self::new(z ^ (z >> 31))
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// A number below `n`, which is not 0; the bias for small `n` is far below anything measured with it.
    pub fn below(&mut self, n: usize) -> usize {
        ((self.next() >> 33) % n as u64) as usize
    }

    /// Heads or tails.
    pub fn coin(&mut self) -> bool {
        self.next() >> 63 == 1
    }

    /// Uniform in `[0, 1)`.
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Standard normal, by Box and Muller.
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.unit()).cos()
    }

    /// One of several; `None` of none.
    pub fn pick<'a, T>(&mut self, of: &'a [T]) -> Option<&'a T> {
        if of.is_empty() { None } else { of.get(self.below(of.len())) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn throws_are_fair_and_series_differ() {
        let mut rng = Rng::new(0);
        let heads = (0..10_000).filter(|_| rng.coin()).count();
        assert!((4_800..5_200).contains(&heads), "{heads}");
        let mean: f64 = (0..10_000).map(|_| rng.normal()).sum::<f64>() / 1e4;
        assert!(mean.abs() < 0.05, "{mean}");
        // The first throws of neighbouring series are as independent as those of one.
        let heads = (0..10_000).filter(|&n| Rng::of_series(7, n).coin()).count();
        assert!((4_800..5_200).contains(&heads), "{heads}");
    }
}
