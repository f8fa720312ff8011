//! The project's chores.
//!
//! `cargo xtask test` is what a contributor runs before a commit and what CI runs on a fresh clone.

mod browser;
mod cross;
mod gpu;
mod packaging;
#[cfg(test)]
mod pages;
mod python;
mod suite;
mod trial;
mod wheel;

use std::{
    env,
    process::{Command, ExitCode},
    thread,
    time::Instant,
};

use anyhow::{Context, bail};

const USAGE: &str = "usage: cargo xtask COMMAND

  setup         install what tests need and this machine lacks: the CUDA compiler (needs python3 with pip, no GPU)
  test          everything CI checks: format, lints, documentation, features, tests, the Python package, packages, licences
  browser       the HTML report in headless Chromium; pictures go to target/report
  python        the Python package alone: build its wheel, test it in clean environments with and without PyTorch
  package       the crates as others get them: each feature of the library alone, and packages
  cross         the CPU kernels' tests on 64-bit ARM under qemu, and the library checked for macOS and Windows
  gpu           everything that only a GPU can show, resumable, within a budget: documents go to results/ (gpu --help)
  trial         what docs/promises.md says, measured again: bad input, stopping, kills, wrong words (trial --help)
  wheel [FOR]   build the wheel that users install: for this machine, for targets by name, or for `all`
  fuzz [SECS]   run the fuzz targets for SECS seconds each (needs cargo-fuzz and a nightly toolchain)
";

fn main() -> ExitCode {
    let args: Vec<String> = env::args().skip(1).collect();
    if let Some(("gpu", options)) = args.split_first().map(|(name, rest)| (name.as_str(), rest)) {
        return gpu(options);
    }
    if let Some(("trial", options)) = args.split_first().map(|(name, rest)| (name.as_str(), rest)) {
        return trial(options);
    }
    let done = match args.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["help" | "--help" | "-h"] => {
            print!("{USAGE}");
            Ok(())
        }
        ["setup"] => setup(),
        ["test"] => test(),
        ["browser"] => browser::check(None, true),
        ["python"] => python(),
        ["cross"] => cross::check(),
        ["package"] => packaging::features().and_then(|()| packaging::package()),
        ["wheel", "all"] => wheel::build(&wheel::TARGETS),
        ["wheel", targets @ ..] => wheel::build(targets),
        ["fuzz"] => fuzz("60"),
        ["fuzz", seconds] => fuzz(seconds),
        _ => {
            eprint!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// On a machine without Rust: `xtask gpu --binary evosdpa`, with both built elsewhere.
fn gpu(options: &[String]) -> ExitCode {
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    if options.contains(&"--help") {
        print!("{}", gpu::USAGE);
        return ExitCode::SUCCESS;
    }
    match gpu::gpu(&options) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn trial(options: &[String]) -> ExitCode {
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    if options.contains(&"--help") {
        print!("{}", trial::USAGE);
        return ExitCode::SUCCESS;
    }
    match trial::trial(&options) {
        Ok(kept) => ExitCode::from(u8::from(!kept)),
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::from(2)
        }
    }
}

/// The compiler goes into a folder of its own under the user's cache; where one is found nothing is installed.
fn setup() -> anyhow::Result<()> {
    step("setup", &["run", "--quiet", "--package", "evosdpa-cli", "--", "doctor", "--fix"], &[])
}

fn test() -> anyhow::Result<()> {
    // Waiting for a network takes no processor: packages come while the tests are built.
    let fetching = thread::spawn(|| {
        python::fetch();
        cross::fetch();
        browser::fetch();
    });
    step("format", &["fmt", "--all", "--check"], &[])?;
    let lints = ["clippy", "--quiet", "--workspace", "--all-targets"];
    let module = ["--features", "evosdpa-py/extension-module"];
    let strict = ["--", "-D", "warnings"];
    step("lints", &[&lints[..], &strict].concat(), &[])?;
    step("lints of the Python module", &[&lints[..], &module, &strict].concat(), &[])?;
    let strict_docs = [("RUSTDOCFLAGS", "-D warnings")];
    step("documentation", &["doc", "--quiet", "--workspace", "--no-deps"], &strict_docs)?;
    packaging::features()?;
    let built = suite::build()?;
    let evosdpa = built.evosdpa.clone();
    // What `setup` does, by the program that is there already.
    run("setup", &evosdpa.display().to_string(), &["doctor", "--fix"], &[])?;
    suite::run(built)?;
    // What went wrong there is said by the step that needs it.
    let _ = fetching.join();
    // An emulator and Python's tests each keep about one processor busy.
    thread::scope(|scope| {
        let elsewhere = scope.spawn(cross::check);
        let here = python().and_then(|()| browser::check(Some(&evosdpa), false));
        // A panic there has been printed.
        let elsewhere = elsewhere.join().unwrap_or_else(|_| bail!("the step for other machines panicked"));
        here.and(elsewhere)
    })?;
    packaging::package()?;
    // The policy is kept in deny.toml; the tool itself takes minutes to build, so it is used where it is installed.
    if tool_is_there("deny") {
        step("licences and advisories", &["deny", "check"], &[])?;
    } else {
        eprintln!("== licences and advisories: UNAVAILABLE, `cargo install cargo-deny` to check deny.toml");
    }
    Ok(())
}

fn python() -> anyhow::Result<()> {
    let start = Instant::now();
    match python::test()? {
        python::Outcome::Passed => eprintln!("== python: passed in {:.0} s", start.elapsed().as_secs_f64()),
        python::Outcome::Unavailable(why) => eprintln!("== python: UNAVAILABLE, {why}"),
    }
    Ok(())
}

/// What is fuzzed, with the options of its own: `ptx` starts from small kernels and knows the words of PTX.
const FUZZ_TARGETS: [(&str, &[&str], &[&str]); 3] = [
    ("shape", &[], &["-max_len=200"]),
    ("ptx", &["fuzz/seeds/ptx"], &["-max_len=12000", "-dict=fuzz/ptx.dict"]),
    ("launch", &[], &["-max_len=2000"]),
];

fn fuzz(seconds: &str) -> anyhow::Result<()> {
    let seconds: u32 = seconds.parse().with_context(|| format!("`{seconds}` is not a number of seconds"))?;
    if !tool_is_there("fuzz") {
        bail!("cargo-fuzz is not installed: `cargo install cargo-fuzz`");
    }
    let limit = format!("-max_total_time={seconds}");
    for (target, seeds, options) in FUZZ_TARGETS {
        // What is found goes into the first folder, which must be there and is not committed.
        let corpus = format!("fuzz/corpus/{target}");
        std::fs::create_dir_all(&corpus).with_context(|| format!("cannot make {corpus}"))?;
        // A launch may hold 2 GB of blocks; an input that takes 20 s does not end.
        let common = ["--", &limit, "-rss_limit_mb=6000", "-timeout=20"];
        let start = ["run", "nightly", "cargo", "fuzz", "run", target, corpus.as_str()];
        let args = [&start[..], seeds, &common[..], options].concat();
        run(&format!("fuzz {target}"), "rustup", &args, &[])?;
    }
    Ok(())
}

fn step(name: &str, args: &[&str], env: &[(&str, &str)]) -> anyhow::Result<()> {
    let cargo = env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    run(name, &cargo, args, env)
}

fn run(name: &str, program: &str, args: &[&str], env: &[(&str, &str)]) -> anyhow::Result<()> {
    let line = format!("{} {}", program.rsplit('/').next().unwrap_or(program), args.join(" "));
    eprintln!("== {name}: {line}");
    let start = Instant::now();
    let mut command = Command::new(program);
    command.args(args).envs(env.iter().copied());
    let status = command.status().with_context(|| format!("cannot run {program}"))?;
    if !status.success() {
        bail!("{name} failed: {line}");
    }
    eprintln!("== {name}: passed in {:.0} s", start.elapsed().as_secs_f64());
    Ok(())
}

fn tool_is_there(subcommand: &str) -> bool {
    let output = Command::new("cargo").args([subcommand, "--version"]).output();
    output.is_ok_and(|output| output.status.success())
}

fn tool_is_on_path(name: &str) -> bool {
    env::var_os("PATH").is_some_and(|path| env::split_paths(&path).any(|folder| folder.join(name).is_file()))
}
