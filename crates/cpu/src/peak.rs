//! What this machine can do at most: arithmetic and memory, measured, to hold kernels against.

use crate::isa::Isa;
use crate::pool;
use crate::portable::Portable;
use crate::simd::Simd;
use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Independent chains of multiply-adds: more than latency × ports on any current core (4 × 2), within 16 registers.
const CHAINS: usize = 12;

/// Multiply-adds per chain between two looks at the clock.
const ROUNDS: usize = 20_000;

/// A measurement is this many trials, of which the median counts: kernels are judged by their median time, and on a machine shared
/// with others a best case would be a bar from another moment.
const TRIALS: usize = 9;
const TRIAL: Duration = Duration::from_millis(20);

/// The f32 multiply-add rate of `threads` threads together, in GFLOP/s, with the best instruction set. Takes about 0.2 s.
pub fn fma_peak_gflops(threads: usize) -> f64 {
    let threads = threads.max(1);
    median_rate(threads, &|| fma_flops_until(Instant::now() + TRIAL)) / 1e9
}

/// What `threads` threads could do at best, in GFLOP/s, however busy the machine is: the best of many bursts of one thread,
/// each far shorter than a scheduler's slice, times the threads. A bound on what a call may claim, not a bar to reach.
pub fn fma_ceiling_gflops(threads: usize) -> f64 {
    const BURSTS: usize = 300;
    let burst = |_| {
        let start = Instant::now();
        fma_burst() / start.elapsed().as_secs_f64()
    };
    (0..BURSTS).map(burst).fold(0.0, f64::max) * threads.max(1) as f64 / 1e9
}

/// The rate at which `threads` threads together read memory that is in no cache, in GB/s. Takes about 0.3 s.
pub fn memory_bandwidth_gbps(threads: usize) -> f64 {
    // Larger in total than any last-level cache share a thread can count on.
    const TOTAL_BYTES: usize = 128 << 20;
    let threads = threads.max(1);
    let words = TOTAL_BYTES / size_of::<u64>() / threads;
    let data = vec![1u64; words * threads];
    let parts: Vec<&[u64]> = data.chunks_exact(words).collect();
    let next = AtomicUsize::new(0);
    median_rate(threads, &|| {
        let part = parts[next.fetch_add(1, Ordering::Relaxed) % threads];
        black_box(sum_words(part));
        size_of_val(part) as f64
    }) / 1e9
}

/// Runs `work`, which returns what it got done, on every thread at once; the median over the trials of the rate per second.
fn median_rate(threads: usize, work: &(dyn Fn() -> f64 + Sync)) -> f64 {
    let mut rates = [0.0f64; TRIALS];
    for rate in &mut rates {
        let together = Mutex::new(0.0);
        pool::run(threads, threads, &|_| {
            let start = Instant::now();
            let own = work() / start.elapsed().as_secs_f64();
            *together.lock().unwrap_or_else(PoisonError::into_inner) += own;
        });
        *rate = together.into_inner().unwrap_or_else(PoisonError::into_inner);
    }
    rates.sort_by(f64::total_cmp);
    rates[TRIALS / 2]
}

fn fma_flops_until(end: Instant) -> f64 {
    let mut flops = 0.0;
    while Instant::now() < end {
        flops += fma_burst();
    }
    flops
}

/// A few dozen microseconds of multiply-adds; returns how many operations they were.
fn fma_burst() -> f64 {
    // SAFETY: the instruction set was found to be available.
    unsafe {
        match Isa::best() {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => fma_avx512(),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => fma_avx2(),
            _ => fma_chains::<Portable>(),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn fma_avx512() -> f64 {
    // SAFETY: the features are enabled here.
    unsafe { fma_chains::<crate::avx512::Avx512>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn fma_avx2() -> f64 {
    // SAFETY: the features are enabled here.
    unsafe { fma_chains::<crate::avx2::Avx2>() }
}

/// Returns the floating-point operations done.
///
/// # Safety
/// The instruction set of `S`.
#[inline(always)]
unsafe fn fma_chains<S: Simd>() -> f64 {
    // SAFETY: by contract; the sink holds a vector of any width.
    unsafe {
        // Hidden from the optimiser, or it would compute the result beforehand.
        let (a, b) = (S::splat(black_box(0.999)), S::splat(black_box(0.001)));
        let mut chains = [b; CHAINS];
        for _ in 0..ROUNDS {
            for chain in &mut chains {
                *chain = S::fma(*chain, a, b);
            }
        }
        let mut sink = [0.0f32; crate::simd::MAX_LANES];
        for chain in chains {
            S::store(sink.as_mut_ptr(), chain);
            black_box(&sink);
        }
    }
    (2 * CHAINS * ROUNDS * S::LANES) as f64
}

/// Reads every word; eight sums so that the additions never wait for each other.
fn sum_words(words: &[u64]) -> u64 {
    let mut sums = [0u64; 8];
    for chunk in words.chunks_exact(8) {
        for lane in 0..8 {
            sums[lane] = sums[lane].wrapping_add(chunk[lane]);
        }
    }
    sums.iter().fold(0, |a, b| a.wrapping_add(*b))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Any machine built this century, and none of this one, is between these.
    #[test]
    fn peaks_are_plausible() {
        let (flops, bandwidth) = (fma_peak_gflops(1), memory_bandwidth_gbps(1));
        assert!((0.05..2000.0).contains(&flops), "{flops} GFLOP/s");
        assert!((0.05..2000.0).contains(&bandwidth), "{bandwidth} GB/s");
        // No trial can beat the best burst by more than the processor's clock changes.
        let ceiling = fma_ceiling_gflops(1);
        assert!((flops / 1.5..2000.0).contains(&ceiling), "{ceiling} of {flops} GFLOP/s");
    }
}
