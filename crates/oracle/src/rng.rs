//! Random numbers: inputs, samples of rows, orders of blocks, moments of audits, mutations.

/// The step between states (the golden ratio in 64 bits).
const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

/// SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
///
/// Not a crate's: records name seeds, and a seed must give the same inputs and the same tune in every later version and on
/// every machine; crates promise that for one series of versions at most. The only generator here: `ptxsan`, which stands
/// alone, has the same one for the same reason.
#[derive(Clone, Debug)]
pub struct Rng(u64);

/// The generator's output for a state: a bijection that mixes all bits, and so a hash of indices.
pub fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(STEP);
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

impl Rng {
    /// With this seed; 0 is as good as any other.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A seed that nobody can know beforehand.
    pub fn entropy() -> u64 {
        use std::hash::{BuildHasher, RandomState};
        // Each RandomState is seeded anew from the system.
        RandomState::new().hash_one(std::process::id())
    }

    /// The generator of the `n`-th member of a series: independent of how many came before.
    pub fn of_series(seed: u64, n: u64) -> Self {
        // Of neighbouring states the streams would overlap; of mixed ones they do not.
        Self(mix(seed.wrapping_add(n.wrapping_mul(STEP))))
    }

    fn next(&mut self) -> u64 {
        let out = mix(self.0);
        self.0 = self.0.wrapping_add(STEP);
        out
    }

    /// A number below `n`, 0 if that is 0; the bias is far below anything measured with it.
    pub fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.next()) * n as u128) >> 64) as usize
    }

    /// Heads or tails.
    pub fn coin(&mut self) -> bool {
        self.next() >> 63 == 1
    }

    /// Uniform in `[0, 1)`.
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Standard normal, by Box and Muller; `libm` gives the same bits everywhere.
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * libm::log(1.0 - self.unit())).sqrt();
        radius * libm::cos(std::f64::consts::TAU * self.unit())
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
    fn a_seed_gives_the_numbers_it_always_gave() {
        // The published sequence of seed 1234567 (https://rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64).
        let mut rng = Rng::new(1_234_567);
        let expected = [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423];
        assert_eq!([(); 3].map(|()| rng.next()), expected);
    }

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
