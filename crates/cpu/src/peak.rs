//! What this machine can do at most: arithmetic and memory, measured, to hold kernels against.

use crate::isa::Isa;
use crate::portable::Portable;
use crate::simd::Simd;
use std::hint::black_box;
use std::panic::resume_unwind;
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Independent chains of multiply-adds: at least latency × ports on any current core. On x86-64 these are 4 × 2, within 16 registers; on ARM up to 4 × 4.
pub(crate) const CHAINS: usize = if cfg!(target_arch = "aarch64") { 24 } else { 12 };

/// Multiply-adds per chain between two looks at the clock: a few microseconds.
pub(crate) const ROUNDS: usize = 5_000;

/// A peak is the best of this many trials, after one that only warms: a trial may meet a busy moment, and a lower bar than the
/// machine's would let a kernel pass 100 %.
const TRIALS: usize = 8;
const TRIAL: Duration = Duration::from_millis(30);

/// Within a trial this share of a thread's bursts may be faster than the rate taken: those during which a sibling on the same
/// core happened to be away.
const LUCKY_SHARE: f64 = 0.1;

/// The multiply-add rate of `threads` threads at once, in GFLOP/s, with one instruction set that this machine has: of f32, or with
/// [`Isa::Avx512Bf16`], [`Isa::Amx`], [`Isa::NeonBf16`] and [`Isa::NeonMmla`] of bfloat16. Takes about 0.3 s.
///
/// Bursts are far shorter than a scheduler's slice, so that most are undisturbed even on a busy machine.
pub fn fma_peak_gflops(isa: Isa, threads: usize) -> f64 {
    let isa = if isa.is_available() { isa } else { Isa::Portable };
    let trial = || {
        let rates = on_all_threads(threads.max(1), &|| {
            let end = Instant::now() + TRIAL;
            let mut rates = Vec::new();
            while Instant::now() < end || rates.is_empty() {
                rates.push(burst_rate(isa));
            }
            upper_quantile(&mut rates, LUCKY_SHARE)
        });
        rates.iter().sum::<f64>()
    };
    best_of(TRIALS, trial) / 1e9
}

/// What `threads` threads could do at best, in GFLOP/s, however busy the machine is: the best of many bursts of one thread,
/// each far shorter than a scheduler's slice, times the threads. A bound on what a call may claim, not a bar to reach.
pub fn fma_ceiling_gflops(threads: usize) -> f64 {
    const BURSTS: usize = 300;
    let isa = Isa::best();
    (0..BURSTS).map(|_| burst_rate(isa)).fold(0.0, f64::max) * threads.max(1) as f64 / 1e9
}

/// The rate at which `threads` threads together read memory that is in no cache, in GB/s. Takes about 0.3 s.
pub fn memory_bandwidth_gbps(threads: usize) -> f64 {
    // Larger in total than any last-level cache share a thread can count on.
    const TOTAL_BYTES: usize = 256 << 20;
    let threads = threads.max(1);
    let words = TOTAL_BYTES / size_of::<u64>() / threads;
    let data = vec![1u64; words * threads];
    let trial = || {
        let next = AtomicUsize::new(0);
        // One clock for all: a thread that reads alone has more than its share.
        let spans = on_all_threads(threads, &|| {
            let part = &data[next.fetch_add(1, Ordering::Relaxed) * words..][..words];
            let start = Instant::now();
            black_box(sum_words(part));
            (start, Instant::now())
        });
        let first = spans.iter().map(|span| span.0).min();
        let last = spans.iter().map(|span| span.1).max();
        let seconds = first.zip(last).map_or(f64::INFINITY, |(first, last)| (last - first).as_secs_f64());
        size_of_val(&data[..]) as f64 / seconds
    };
    best_of(TRIALS, trial) / 1e9
}

/// The best of `trials` trials, after one that only warms.
fn best_of(trials: usize, mut trial: impl FnMut() -> f64) -> f64 {
    trial();
    (0..trials).map(|_| trial()).fold(0.0, f64::max)
}

/// Calls `work` once on each of `threads` threads, which begin together. Not on the pool: there one thread may take the
/// part of another that is late.
fn on_all_threads<T: Send>(threads: usize, work: &(dyn Fn() -> T + Sync)) -> Vec<T> {
    let gate = Barrier::new(threads);
    let body = || {
        gate.wait();
        work()
    };
    thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(body)).collect();
        let own = body();
        let join =
            |handle: thread::ScopedJoinHandle<'_, T>| handle.join().unwrap_or_else(|why| resume_unwind(why));
        std::iter::once(own).chain(others.into_iter().map(join)).collect()
    })
}

/// The value that a share `above` of `values` exceeds. `values` is not empty.
fn upper_quantile(values: &mut [f64], above: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    values[((values.len() - 1) as f64 * (1.0 - above)).round() as usize]
}

/// Operations per second of one burst of multiply-adds with an instruction set that this machine has.
fn burst_rate(isa: Isa) -> f64 {
    let start = Instant::now();
    // SAFETY: the instruction set is available by contract.
    let flops = unsafe {
        match isa {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Isa::Amx => crate::amx::burst(),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => dot_avx512bf16(),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => fma_avx512(),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => fma_avx2(),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonMmla => crate::neon_mmla::burst(),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonBf16 => dot_neon_bf16(),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => fma_neon(),
            _ => fma_chains::<Portable>(),
        }
    };
    flops / start.elapsed().as_secs_f64()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn fma_avx512() -> f64 {
    // SAFETY: the features are enabled here.
    unsafe { fma_chains::<crate::avx512::Avx512>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn dot_avx512bf16() -> f64 {
    // SAFETY: the features are enabled here.
    unsafe { fma_chains::<crate::avx512bf16::Avx512Bf16>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn fma_avx2() -> f64 {
    // SAFETY: the features are enabled here.
    unsafe { fma_chains::<crate::avx2::Avx2>() }
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
unsafe fn fma_neon() -> f64 {
    // SAFETY: the features are enabled here.
    unsafe { fma_chains::<crate::neon::Neon>() }
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon,bf16")]
unsafe fn dot_neon_bf16() -> f64 {
    // SAFETY: the features are enabled here.
    unsafe { fma_chains::<crate::neon_bf16::NeonBf16>() }
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
                // Where multiplying and adding are not fused, a multiplication that is always the same would be done once.
                *chain = if S::PACKED == 1 { S::fma(*chain, a, b) } else { S::dot(a, b, *chain) };
            }
        }
        let mut sink = [0.0f32; crate::simd::MAX_LANES];
        for chain in chains {
            S::store(sink.as_mut_ptr(), chain);
            black_box(&sink);
        }
    }
    (2 * CHAINS * ROUNDS * S::LANES * S::PACKED) as f64
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
    use std::sync::atomic::AtomicBool;

    /// Any machine built this century, and none of this one, is between these.
    #[test]
    fn peaks_are_plausible() {
        let (flops, bandwidth) = (fma_peak_gflops(Isa::best(), 1), memory_bandwidth_gbps(1));
        // An emulator rounds ARM's quads in software: 0.05 beside other work.
        assert!((0.005..20_000.0).contains(&flops), "{flops} GFLOP/s");
        assert!((0.05..2000.0).contains(&bandwidth), "{bandwidth} GB/s");
        // No trial can beat the best burst by more than the processor's clock changes.
        let ceiling = fma_ceiling_gflops(1);
        assert!((flops / 1.5..20_000.0).contains(&ceiling), "{ceiling} of {flops} GFLOP/s");
    }

    /// Work beside the measurement takes time from a peak's bursts, never from the rate of those it leaves alone.
    #[test]
    fn a_busy_machine_has_the_same_peak() {
        let quiet = fma_peak_gflops(Isa::best(), 1);
        let done = AtomicBool::new(false);
        let busy = thread::scope(|scope| {
            let cores = thread::available_parallelism().map_or(1, |n| n.get());
            for _ in 0..2 * cores {
                scope.spawn(|| {
                    while !done.load(Ordering::Relaxed) {
                        std::hint::spin_loop();
                    }
                });
            }
            let busy = fma_peak_gflops(Isa::best(), 1);
            done.store(true, Ordering::Relaxed);
            busy
        });
        // The clock of a processor falls when its other cores work, and a neighbour on the core takes half; medians over slices fell to a third.
        assert!(busy > 0.4 * quiet, "{busy} of {quiet} GFLOP/s");
    }

    #[test]
    fn the_quantile_leaves_the_lucky_out() {
        let mut values: Vec<f64> = (0..=100).rev().map(f64::from).collect();
        assert_eq!(upper_quantile(&mut values, 0.1), 90.0);
        assert_eq!(upper_quantile(&mut [7.0], 0.1), 7.0);
    }

    /// Every thread works, and all of them before any has left.
    #[test]
    fn all_threads_work_at_once() {
        let arrived = AtomicUsize::new(0);
        let seen = on_all_threads(4, &|| {
            arrived.fetch_add(1, Ordering::SeqCst);
            while arrived.load(Ordering::SeqCst) < 4 {
                thread::yield_now();
            }
            thread::current().id()
        });
        let distinct: std::collections::HashSet<_> = seen.into_iter().collect();
        assert_eq!(distinct.len(), 4);
    }
}
