//! A small pool of worker threads that answers fast.
//!
//! Attention at small shapes takes tens of microseconds, less than waking a sleeping thread. Workers therefore watch for
//! a short while after each job before they sleep, and the caller never waits for a worker that has not begun.
//!
//! Callers are independent: each opens a job of its own, works on it itself, and gets whichever workers are free. A task may
//! itself run tasks.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

/// How long an idle worker watches for the next job before it sleeps. It costs whoever wants the core meanwhile up to 10 µs, and
/// saves our next call twice that (docs/log/cpu.md).
const WATCH: Duration = Duration::from_micros(50);

/// Runs `task(0) … task(tasks - 1)`, each once, on up to `threads` threads (the caller is one of them), taken in order from
/// a shared queue. Returns when all are done.
pub(crate) fn run(threads: usize, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
    let workers = threads.min(tasks).saturating_sub(1);
    if workers == 0 {
        (0..tasks).for_each(task);
        return;
    }
    let next = AtomicUsize::new(0);
    pool().run(workers, &|| {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= tasks {
                break;
            }
            task(index);
        }
    });
}

/// This process's pool. A forked child starts one of its own: it has the parent's memory, but none of its threads.
fn pool() -> &'static Pool {
    static POOL: AtomicPtr<Pool> = AtomicPtr::new(std::ptr::null_mut());
    let process = std::process::id();
    let known = POOL.load(Ordering::Acquire);
    // SAFETY: what is stored there is never freed.
    if let Some(pool) = unsafe { known.as_ref() }.filter(|pool| pool.process == process) {
        return pool;
    }
    let fresh = Box::into_raw(Box::new(Pool {
        process,
        shared: Arc::new(Shared::default()),
        workers: Mutex::new(Vec::new()),
    }));
    match POOL.compare_exchange(known, fresh, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: never freed from here on.
        Ok(_) => unsafe { &*fresh },
        Err(first) => {
            // SAFETY: nobody has seen `fresh`; `first` was stored by another thread of this process and is never freed.
            unsafe {
                drop(Box::from_raw(fresh));
                &*first
            }
        }
    }
}

struct Pool {
    process: u32,
    shared: Arc<Shared>,
    workers: Mutex<Vec<Thread>>,
}

#[derive(Default)]
struct Shared {
    /// Jobs that workers may still join, oldest first.
    open: Mutex<Vec<Seats>>,
    /// Counts jobs; a change is what idle workers watch for.
    epoch: AtomicU64,
}

/// Places for workers in a job.
struct Seats {
    free: usize,
    job: JobRef,
}

/// What a caller and the workers of its job share; it lies on the caller's stack.
struct Job<'a> {
    body: &'a (dyn Fn() + Sync),
    /// Workers inside the body.
    active: AtomicUsize,
    panicked: AtomicBool,
}

#[derive(Clone, Copy, PartialEq)]
struct JobRef(*const Job<'static>);

// SAFETY: a job is only read through this, its body is Sync, and `Pool::run` keeps it alive until no worker is inside it.
unsafe impl Send for JobRef {}

impl Pool {
    fn run(&self, workers: usize, body: &(dyn Fn() + Sync)) {
        let job = Job { body, active: AtomicUsize::new(0), panicked: AtomicBool::new(false) };
        // Only the lifetime changes; this function does not return before the last worker has left the job.
        let job_ref = JobRef((&raw const job).cast());
        lock(&self.shared.open).push(Seats { free: workers, job: job_ref });
        self.shared.epoch.fetch_add(1, Ordering::Release);
        self.wake(workers);
        let own = catch_unwind(AssertUnwindSafe(body));
        // Nobody joins any more; who is inside finishes.
        lock(&self.shared.open).retain(|seats| seats.job != job_ref);
        let mut spins = 0u32;
        while job.active.load(Ordering::Acquire) > 0 {
            spins += 1;
            if spins < 2_000 { std::hint::spin_loop() } else { thread::yield_now() }
        }
        match own {
            Err(payload) => resume_unwind(payload),
            Ok(()) => {
                assert!(!job.panicked.load(Ordering::Relaxed), "a task panicked on a worker thread");
            }
        }
    }

    /// Sees to it that `count` workers look for a job, starting them where there are fewer. A machine that refuses more threads
    /// just gets fewer.
    fn wake(&self, count: usize) {
        let mut workers = lock(&self.workers);
        while workers.len() < count {
            let shared = Arc::clone(&self.shared);
            let name = format!("evosdpa-{}", workers.len() + 1);
            match thread::Builder::new().name(name).spawn(move || work(&shared)) {
                Ok(handle) => workers.push(handle.thread().clone()),
                Err(_) => break,
            }
        }
        workers.iter().take(count).for_each(Thread::unpark);
    }
}

/// A worker's life.
fn work(shared: &Shared) {
    let mut seen = 0;
    loop {
        seen = next_epoch(shared, seen);
        // More than one job may be open, and one may have come while another was worked on.
        while let Some(job) = join(shared) {
            // SAFETY: `active` was raised before the job closed, so the caller keeps it alive until that falls.
            let job = unsafe { &*job.0 };
            if catch_unwind(AssertUnwindSafe(job.body)).is_err() {
                job.panicked.store(true, Ordering::Relaxed);
            }
            job.active.fetch_sub(1, Ordering::Release);
        }
    }
}

/// Takes a seat in the oldest job that has one.
fn join(shared: &Shared) -> Option<JobRef> {
    let mut open = lock(&shared.open);
    let seats = open.iter_mut().find(|seats| seats.free > 0)?;
    seats.free -= 1;
    // SAFETY: a listed job is alive. Inside the lock: the caller closes the job under it and then waits for this count.
    unsafe { &*seats.job.0 }.active.fetch_add(1, Ordering::Relaxed);
    Some(seats.job)
}

/// Waits for a job newer than `seen`: watching first, then asleep.
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
        if start.elapsed() > WATCH {
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
    fn callers_on_many_threads_all_get_their_work_done() {
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

    /// Two callers whose tasks wait for each other: with one job at a time neither would end.
    #[test]
    fn a_caller_does_not_wait_for_another() {
        let arrived = [AtomicBool::new(false), AtomicBool::new(false)];
        let begin = Instant::now();
        let meet = |own: usize| {
            arrived[own].store(true, Ordering::SeqCst);
            while !arrived[1 - own].load(Ordering::SeqCst) {
                assert!(begin.elapsed() < Duration::from_secs(60), "the other caller has not begun");
                thread::yield_now();
            }
        };
        thread::scope(|scope| {
            scope.spawn(|| run(2, 2, &|_| meet(0)));
            scope.spawn(|| run(2, 2, &|_| meet(1)));
        });
    }

    #[test]
    fn a_task_may_run_tasks() {
        let total = AtomicUsize::new(0);
        run(3, 6, &|_| {
            run(3, 5, &|_| {
                total.fetch_add(1, Ordering::Relaxed);
            });
        });
        assert_eq!(total.into_inner(), 30);
    }

    #[test]
    fn a_panic_reaches_its_own_caller_and_the_pool_survives() {
        thread::scope(|scope| {
            let other = scope.spawn(|| (0..50).for_each(|_| run(2, 64, &|_| ())));
            let outcome = catch_unwind(|| run(2, 64, &|i| assert!(i != 63, "task 63 fails")));
            assert!(outcome.is_err());
            assert!(other.join().is_ok());
        });
        every_task_runs_once();
    }
}
