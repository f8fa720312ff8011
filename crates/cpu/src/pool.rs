//! A small pool of worker threads that answers fast.
//!
//! Attention at small shapes takes tens of microseconds, less than waking a sleeping thread. Workers therefore spin for
//! a short while after each job before they sleep, and the caller never waits for a worker that has not begun.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

/// How long an idle worker watches for the next job before it sleeps.
const SPIN: Duration = Duration::from_micros(50);

/// Runs `task(0) … task(tasks - 1)`, each once, on up to `threads` threads (the caller is one of them), taken in order from
/// a shared queue. Returns when all are done. One set of tasks runs at a time; a second caller waits its turn.
pub(crate) fn run(threads: usize, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
    let workers = threads.min(tasks).saturating_sub(1);
    if workers == 0 {
        (0..tasks).for_each(task);
        return;
    }
    static POOL: OnceLock<Mutex<Pool>> = OnceLock::new();
    let pool =
        POOL.get_or_init(|| Mutex::new(Pool { shared: Arc::new(Shared::default()), workers: Vec::new() }));
    let next = AtomicUsize::new(0);
    lock(pool).run(workers, &|| {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= tasks {
                break;
            }
            task(index);
        }
    });
}

struct Pool {
    shared: Arc<Shared>,
    workers: Vec<Thread>,
}

#[derive(Default)]
struct Shared {
    seats: Mutex<Option<Seats>>,
    /// Counts jobs; a change is what idle workers watch for.
    epoch: AtomicU64,
    /// Workers inside a job's body.
    active: AtomicUsize,
    panicked: AtomicBool,
}

/// A job that workers may still join.
struct Seats {
    free: usize,
    body: Body,
}

#[derive(Clone, Copy)]
struct Body(*const (dyn Fn() + Sync));

// SAFETY: the pointee is Sync, and `Pool::run` keeps it alive until no worker is inside it.
unsafe impl Send for Body {}

impl Pool {
    fn run(&mut self, workers: usize, body: &(dyn Fn() + Sync)) {
        self.grow_to(workers);
        // SAFETY: only the lifetime changes; this function does not return before the last worker has left the body.
        let body_erased: *const (dyn Fn() + Sync) = unsafe {
            std::mem::transmute::<*const (dyn Fn() + Sync + '_), *const (dyn Fn() + Sync + 'static)>(body)
        };
        let shared = &*self.shared;
        *lock(&shared.seats) = Some(Seats { free: workers, body: Body(body_erased) });
        shared.epoch.fetch_add(1, Ordering::Release);
        self.workers.iter().take(workers).for_each(Thread::unpark);
        let own = catch_unwind(AssertUnwindSafe(body));
        // Nobody joins any more; who is inside finishes.
        *lock(&shared.seats) = None;
        let mut spins = 0u32;
        while shared.active.load(Ordering::Acquire) > 0 {
            spins += 1;
            if spins < 20_000 { std::hint::spin_loop() } else { thread::yield_now() }
        }
        let worker_panicked = shared.panicked.swap(false, Ordering::Relaxed);
        match own {
            Err(payload) => resume_unwind(payload),
            Ok(()) => assert!(!worker_panicked, "a task panicked on a worker thread"),
        }
    }

    /// Starts workers up to `count`. A machine that refuses more threads just gets fewer.
    fn grow_to(&mut self, count: usize) {
        while self.workers.len() < count {
            let shared = Arc::clone(&self.shared);
            let name = format!("evosdpa-{}", self.workers.len() + 1);
            match thread::Builder::new().name(name).spawn(move || work(&shared)) {
                Ok(handle) => self.workers.push(handle.thread().clone()),
                Err(_) => break,
            }
        }
    }
}

/// A worker's life.
fn work(shared: &Shared) {
    let mut seen = 0;
    loop {
        seen = next_epoch(shared, seen);
        let joined = {
            let mut seats = lock(&shared.seats);
            match seats.as_mut() {
                Some(job) if job.free > 0 => {
                    job.free -= 1;
                    // Inside the lock: the caller closes the job under it and then waits for this count.
                    shared.active.fetch_add(1, Ordering::Relaxed);
                    Some(job.body)
                }
                _ => None,
            }
        };
        if let Some(body) = joined {
            // SAFETY: `active` was raised before the job closed, so the caller keeps the body alive until it falls.
            let outcome = catch_unwind(AssertUnwindSafe(|| unsafe { (*body.0)() }));
            if outcome.is_err() {
                shared.panicked.store(true, Ordering::Relaxed);
            }
            shared.active.fetch_sub(1, Ordering::Release);
        }
    }
}

/// Waits for a job newer than `seen`: spinning first, then asleep.
fn next_epoch(shared: &Shared, seen: u64) -> u64 {
    let start = Instant::now();
    loop {
        for _ in 0..64 {
            let epoch = shared.epoch.load(Ordering::Acquire);
            if epoch != seen {
                return epoch;
            }
            std::hint::spin_loop();
        }
        if start.elapsed() > SPIN {
            // A wake-up between the check above and this call is kept as a token: park returns at once.
            thread::park();
        }
    }
}

/// A panicking task leaves nothing half-changed behind these locks, so poison is ignored.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once() {
        for threads in [1, 2, 3, 8] {
            for tasks in [0, 1, 2, 7, 1000] {
                let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                run(threads, tasks, &|i| {
                    counts[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(
                    counts.iter().all(|c| c.load(Ordering::Relaxed) == 1),
                    "{threads} threads, {tasks} tasks"
                );
            }
        }
    }

    #[test]
    fn callers_on_many_threads_take_turns() {
        let total = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        run(3, 10, &|_| {
                            total.fetch_add(1, Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert_eq!(total.into_inner(), 4 * 50 * 10);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_survives() {
        let outcome = catch_unwind(|| run(2, 64, &|i| assert!(i != 63, "task 63 fails")));
        assert!(outcome.is_err());
        every_task_runs_once();
    }
}
