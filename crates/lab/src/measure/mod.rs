//! Measuring: samples, honest comparisons, and the order in which things are timed.

pub mod compare;
pub mod interleave;
pub mod samples;

/// A small deterministic generator for resampling: the same samples always give the same interval.
pub(crate) struct Resampler(u64);

impl Resampler {
    pub(crate) fn new() -> Self {
        Self(0x2545_F491_4F6C_DD1D)
    }

    /// A number below `n`, by Marsaglia's xorshift64*; the bias for small `n` is far below the resampling error.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        ((self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) % n as u64) as usize
    }
}
