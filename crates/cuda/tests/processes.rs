//! What takes several processes: compile workers and a cache that two write to. This program starts itself again, so it
//! has its own `main`.

mod common;
#[path = "common/source.rs"]
mod source;

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use common::variant;
use evosdpa_cuda::{
    ArtifactKind, Builder, Cache, CompileRequest, Error,
    worker::{self, CompilePool},
};
use evosdpa_kernels::{Arch, Variant};
use source::with_source;

/// A worker that finds this file removes it and dies in the middle of its work.
const CRASH_FILE: &str = "EVOSDPA_TEST_CRASH_FILE";
const HAMMER: &str = "hammer-cache";

fn main() {
    if env::args().nth(1).is_some_and(|argument| argument == worker::ARGUMENT) {
        let crash = env::var_os(CRASH_FILE).is_some_and(|file| std::fs::remove_file(file).is_ok());
        if crash {
            let mut line = String::new();
            std::io::stdin().read_line(&mut line).unwrap();
            std::process::abort();
        }
    }
    worker::run_if_requested();
    if env::args().nth(1).is_some_and(|argument| argument == HAMMER) {
        hammer(Path::new(&env::args().nth(2).unwrap()));
        return;
    }
    // Environment variables are set before any thread starts.
    let crash_file = env::temp_dir().join(format!("evosdpa-crash-{}", std::process::id()));
    // SAFETY: this process has one thread.
    unsafe { env::set_var(CRASH_FILE, &crash_file) };
    let tests: [(&str, &dyn Fn()); 7] = [
        ("workers_compile_what_this_process_would", &workers_compile_what_this_process_would),
        ("a_source_that_does_not_compile_keeps_its_log", &a_source_that_does_not_compile_keeps_its_log),
        ("a_worker_that_takes_too_long_is_stopped", &a_worker_that_takes_too_long_is_stopped),
        ("a_worker_that_dies_is_replaced", &|| a_worker_that_dies_is_replaced(&crash_file)),
        ("a_program_that_is_no_worker_is_an_error", &a_program_that_is_no_worker_is_an_error),
        ("many_at_once_come_back_in_order", &many_at_once_come_back_in_order),
        ("two_processes_share_a_cache", &two_processes_share_a_cache),
    ];
    for (name, test) in tests {
        let start = Instant::now();
        test();
        println!("test {name} ... ok ({:.1} s)", start.elapsed().as_secs_f64());
    }
}

fn pool(workers: usize, limit: Duration) -> CompilePool {
    CompilePool::new(workers, limit).unwrap()
}

fn request(variant: &Variant) -> CompileRequest {
    CompileRequest::new(variant, ArtifactKind::Cubin)
}

fn workers_compile_what_this_process_would() {
    let variant = variant(Arch::Sm90a);
    let here = Builder::default().build(&variant).unwrap();
    let there = pool(1, Duration::from_secs(60)).compile(&request(&variant)).unwrap();
    assert_eq!(here.code, there.code);
    let registers = |log: &str| evosdpa_cuda::ptxas::Report::parse(log).unwrap().entries[0].resources;
    assert_eq!(registers(&here.log), registers(&there.log));
}

fn a_source_that_does_not_compile_keeps_its_log() {
    let broken = with_source(Arch::Sm80, "extern \"C\" __global__ void scale_rows() { y(); }\n");
    let pool = pool(1, Duration::from_secs(60));
    match pool.compile(&request(&broken)).unwrap_err() {
        Error::Compile(error) => assert!(error.log.contains("scale_rows.cu(1): error"), "{error}"),
        other => panic!("{other:?}"),
    }
    // The same worker goes on.
    assert!(pool.compile(&request(&variant(Arch::Sm80))).is_ok());
}

fn a_worker_that_takes_too_long_is_stopped() {
    // The front end evaluates this for far longer than the limit.
    let endless = "constexpr unsigned spin(unsigned n) { unsigned x = 1; for (unsigned i = 0; i < n; ++i) x = x * 3 + i; return x; }\n\
                   template <unsigned N> struct Many { static constexpr unsigned value = spin(300000) + Many<N - 1>::value; };\n\
                   template <> struct Many<0> { static constexpr unsigned value = 0; };\n\
                   extern \"C\" __global__ void scale_rows(unsigned* o) { o[0] = Many<150>::value; }\n";
    // Long enough for the next one, which a busy machine keeps waiting.
    let limit = Duration::from_secs(4);
    let pool = pool(1, limit);
    let start = Instant::now();
    let error = pool.compile(&request(&with_source(Arch::Sm80, endless))).unwrap_err();
    assert!(matches!(error, Error::CompileTimeout { .. }), "{error:?}");
    assert!(start.elapsed() < limit + Duration::from_secs(30), "{:?}", start.elapsed());
    assert!(error.to_string().contains("scale_rows[ROWS=32 THREADS=128]"), "{error}");
    // Its place is taken by another.
    assert!(pool.compile(&request(&variant(Arch::Sm80))).is_ok());
}

fn a_worker_that_dies_is_replaced(crash_file: &Path) {
    std::fs::write(crash_file, "").unwrap();
    let pool = pool(1, Duration::from_secs(60));
    let error = pool.compile(&request(&variant(Arch::Sm80))).unwrap_err();
    assert!(matches!(error, Error::WorkerDied { .. }), "{error:?}");
    assert!(error.to_string().contains("signal: 6"), "{error}");
    assert!(pool.compile(&request(&variant(Arch::Sm80))).is_ok());
}

fn a_program_that_is_no_worker_is_an_error() {
    for program in ["/bin/false", "/bin/echo", "/no/such/program"] {
        let pool = CompilePool::with_program(PathBuf::from(program), 1, Duration::from_secs(10));
        let error = pool.compile(&request(&variant(Arch::Sm80))).unwrap_err();
        assert!(matches!(error, Error::WorkerDied { .. }), "{program}: {error:?}");
    }
    // One that neither reads nor answers.
    let silent = tempfile::tempdir().unwrap();
    let script = silent.path().join("silent");
    std::fs::write(&script, "#!/bin/sh\nexec sleep 60\n").unwrap();
    std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let pool = CompilePool::with_program(script, 1, Duration::from_millis(300));
    let error = pool.compile(&request(&variant(Arch::Sm80))).unwrap_err();
    assert!(matches!(error, Error::CompileTimeout { .. }), "{error:?}");
}

fn many_at_once_come_back_in_order() {
    let variants: Vec<Variant> = [Arch::Sm80, Arch::Sm89, Arch::Sm90a, Arch::Sm80]
        .into_iter()
        .enumerate()
        .map(|(i, arch)| if i == 1 { with_source(arch, "not C") } else { variant(arch) })
        .collect();
    let builder = Builder::default().with_pool(pool(2, Duration::from_secs(60)));
    let results = builder.build_all(&variants, ArtifactKind::Cubin);
    assert_eq!(results.len(), 4);
    assert!(matches!(results[1], Err(Error::Compile(_))));
    let alone = Builder::default();
    for i in [0, 2, 3] {
        assert_eq!(results[i].as_ref().unwrap().code, alone.build(&variants[i]).unwrap().code);
    }
}

/// The entries that the hammering processes write, large enough to be torn if writing were not atomic.
fn hammered(i: u64) -> (String, Vec<u8>) {
    (format!("key{i}"), vec![i as u8; 200_000])
}

fn hammer(folder: &Path) {
    let cache = Cache::open(folder, 1_500_000).unwrap();
    for round in 0..60 {
        let (key, code) = hammered(round % 10);
        if let Some((found, _)) = cache.load(&key) {
            assert_eq!(found, code, "a reader saw half an entry");
        }
        cache.store(&key, "hammered", &code, "log").unwrap();
    }
}

fn two_processes_share_a_cache() {
    let folder = tempfile::tempdir().unwrap();
    let start = || Command::new(env::current_exe().unwrap()).arg(HAMMER).arg(folder.path()).spawn().unwrap();
    let (mut a, mut b) = (start(), start());
    assert!(a.wait().unwrap().success() && b.wait().unwrap().success());
    let cache = Cache::open(folder.path(), 1_500_000).unwrap();
    assert!(cache.size_bytes().unwrap() <= 1_700_000, "{}", cache.size_bytes().unwrap());
    let entries = cache.entries().unwrap();
    assert!(!entries.is_empty() && entries.iter().all(|entry| entry.label == "hammered"), "{entries:?}");
    // Nothing half-written stays.
    let names = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(names.filter(|name| name.to_string_lossy().starts_with(".writing")).count(), 0);
}
