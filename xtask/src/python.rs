//! The Python package: its wheel, and its tests in clean environments.

use std::{
    collections::BTreeSet,
    env, fs,
    hash::{DefaultHasher, Hash, Hasher},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::Instant,
};

use anyhow::{Context, bail, ensure};

/// What builds a wheel.
pub(crate) const MATURIN: &str = "maturin==1.16.0";
/// What checks the package's types; the second brings the program that runs it along.
const MYPY: &str = "mypy==2.4.1";
const PYRIGHT: &str = "pyright[nodejs]==1.1.414";

/// Packages that an environment gets, kept in the user's cache because they are large and never change.
pub(crate) struct Base {
    pub(crate) name: &'static str,
    /// Each is one `pip install`, by name from PyPI.
    pub(crate) installs: &'static [&'static [&'static str]],
    /// A script of the repository that the environment's Python runs at last.
    pub(crate) finish: Option<&'static str>,
}

const TOOLS: Base = Base { name: "tools", installs: &[&[MATURIN, MYPY, PYRIGHT]], finish: None };

const NUMPY: Base =
    Base { name: "numpy", installs: &[&["numpy", "ml-dtypes", "pytest==9.2.0"]], finish: None };

/// PyTorch without the CUDA libraries it lists, which are gigabytes that a CPU never calls.
const TORCH: Base = Base {
    name: "torch",
    installs: &[
        &["--no-deps", "torch==2.15.0", "nvidia-cuda-runtime>=13,<14"],
        &["numpy", "filelock", "fsspec", "jinja2", "networkx", "sympy", "typing-extensions", "setuptools"],
        &["transformers==5.22.2", "pytest==9.2.0"],
    ],
    finish: Some("crates/python/tests/lean_torch.py"),
};

/// The oldest transformers that is supported, put before the newest on the path of the environment with PyTorch.
const OLD_TRANSFORMERS: Base = Base {
    name: "old-transformers",
    installs: &[
        &["--no-deps", "transformers==4.57.6", "huggingface-hub==0.36.2", "tokenizers==0.22.2"],
        &["--no-deps", "requests", "urllib3", "certifi", "charset-normalizer", "idna"],
    ],
    finish: None,
};

/// JAX without a GPU, put before the packages of the environments with NumPy and with PyTorch.
const JAX: Base = Base {
    name: "jax",
    installs: &[&["--no-deps", "jax==0.10.2", "jaxlib==0.10.2", "opt-einsum", "scipy", "ml-dtypes>=0.5"]],
    finish: None,
};

/// What the Python step found.
pub(crate) enum Outcome {
    Passed,
    /// Nothing could be tested, and why.
    Unavailable(String),
}

/// Builds the wheel, installs it in clean environments with PyTorch and with NumPy alone, and runs its tests in each; those of JAX in
/// both, where it is to be had.
pub(crate) fn test() -> anyhow::Result<Outcome> {
    let root = root();
    let (python, version) = match interpreter() {
        Ok(found) => found,
        Err(why) => return Ok(Outcome::Unavailable(format!("{why:#}"))),
    };
    let mut bases = Vec::new();
    for base in [&TOOLS, &NUMPY, &TORCH, &OLD_TRANSFORMERS] {
        match prepared(base, &python, &version, &root) {
            Ok(folder) => bases.push(folder),
            Err(why) => return Ok(Outcome::Unavailable(format!("{} environment: {why:#}", base.name))),
        }
    }
    let twice = compiled_twice(&root)?;
    if !twice.is_empty() {
        eprintln!("== python: compiled again, with other features than the tests have: {}", twice.join(", "));
        eprintln!("   `shared-build` in crates/python/Cargo.toml is there to ask for the same");
    }
    let target = target_folder(&root)?.join("python");
    types(&root, &bases[0], &bases[2], &target)?;
    let wheels = target.join("wheels");
    let _ = fs::remove_dir_all(&wheels);
    let mut maturin = Command::new(bases[0].join("bin/maturin"));
    // The profile and the features of the other tests, whose compiled dependencies are there already.
    maturin.args(["build", "--quiet", "--profile", "dev", "--features", "shared-build"]);
    maturin.args(["--compatibility", "linux", "--interpreter"]);
    passed(
        maturin.arg(bases[0].join("bin/python")).arg("--out").arg(&wheels).current_dir(&root),
        "build the wheel",
    )?;
    let wheel = only_wheel(&wheels)?;
    for (base, folder) in [&NUMPY, &TORCH].into_iter().zip(&bases[1..]) {
        let environment = target.join(base.name);
        clean_environment(&environment, folder)?;
        // The base's pip works on the clean environment, which has none of its own.
        let mut pip = Command::new(folder.join("bin/python"));
        pip.args(["-m", "pip", "--python"]).arg(environment.join("bin/python"));
        pip.args(["install", "--quiet", "--no-deps", "--no-index"]).arg(&wheel);
        passed(&mut pip, "install the wheel")?;
    }
    let pytest = |base: &Base, tests: &[&str]| {
        let mut command = Command::new(target.join(base.name).join("bin/python"));
        command.args(["-m", "pytest"]).args(tests).current_dir(&root).env("PYTHONDONTWRITEBYTECODE", "1");
        command
    };
    let all = ["crates/python/tests", "crates/lab/tests/baselines"];
    let mut with_old = pytest(&TORCH, &["crates/python/tests/test_torch_transformers.py"]);
    with_old.env("PYTHONPATH", packages(&bases[3])?);
    let jax = prepared(&JAX, &python, &version, &root).and_then(|folder| packages(&folder));
    let with_jax = |base: &Base, with: &str| match &jax {
        Ok(folder) => {
            let mut tests = pytest(base, &["crates/python/tests/test_jax.py"]);
            reported(tests.env("PYTHONPATH", folder), with)
        }
        Err(why) => {
            eprintln!("== python with {with}: UNAVAILABLE: {why:#}");
            Ok(())
        }
    };
    // Each keeps about one processor busy.
    thread::scope(|scope| {
        let torch = scope.spawn(|| reported(&mut pytest(&TORCH, &all), "torch"));
        let others = reported(&mut pytest(&NUMPY, &all), "numpy")
            .and_then(|()| with_jax(&NUMPY, "JAX and numpy"))
            .and_then(|()| with_jax(&TORCH, "JAX and torch"))
            .and_then(|()| reported(&mut with_old, "the oldest transformers"));
        // A panic there has been printed.
        others.and(torch.join().unwrap_or_else(|_| bail!("the tests with torch panicked")))
    })?;
    Ok(Outcome::Passed)
}

/// What the wheel needs with other features than the workspace's tests do.
fn compiled_twice(root: &Path) -> anyhow::Result<Vec<String>> {
    let tree = |args: &[&str]| -> anyhow::Result<BTreeSet<String>> {
        let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.args(["tree", "--no-dedupe", "--prefix", "none", "--format", "{p} [{f}]"]).args(args);
        let output = cargo.current_dir(root).output().context("cannot run cargo tree")?;
        ensure!(output.status.success(), "cargo tree: {}", String::from_utf8_lossy(&output.stderr));
        Ok(String::from_utf8(output.stdout)?.lines().map(str::to_owned).collect())
    };
    let tests = tree(&["--workspace", "--edges", "normal,build,dev"])?;
    let wheel = tree(&["--package", "evosdpa-py", "--features", "shared-build", "--edges", "normal,build"])?;
    // Name and version.
    let package = |line: &str| line.split(' ').take(2).collect::<Vec<_>>().join(" ");
    let known: BTreeSet<String> = tests.iter().map(|line| package(line)).collect();
    let differs = |line: &&String| {
        !tests.contains(*line) && known.contains(&package(line)) && !line.starts_with("evosdpa-py ")
    };
    Ok(wheel.iter().filter(differs).cloned().collect())
}

/// Runs tests and prints what they say when they have ended, so that two at a time can be read.
fn reported(tests: &mut Command, with: &str) -> anyhow::Result<()> {
    let start = Instant::now();
    let said = tests.output().with_context(|| format!("cannot start the tests with {with}"))?;
    let [out, err] = [&said.stdout, &said.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    eprintln!("{out}{err}== python with {with}: {:.0} s", start.elapsed().as_secs_f64());
    ensure!(said.status.success(), "the tests with {with} do not pass: {}", said.status);
    Ok(())
}

/// Fetches what the tests need; [`test()`] says what was not to be had.
pub(crate) fn fetch() {
    let root = root();
    if let Ok((python, version)) = interpreter() {
        for base in [&TOOLS, &NUMPY, &TORCH, &OLD_TRANSFORMERS, &JAX] {
            let _ = prepared(base, &python, &version, &root);
        }
    }
}

/// The package's types, and those that users see. What PyTorch and transformers say of theirs is left out of the first, which spares half a
/// minute; the second looks at that too.
fn types(root: &Path, tools: &Path, torch: &Path, target: &Path) -> anyhow::Result<()> {
    let mut mypy = Command::new(tools.join("bin/mypy"));
    mypy.args([
        "--no-error-summary",
        "--follow-imports=skip",
        "--allow-subclassing-any",
        "--python-executable",
    ]);
    mypy.arg(torch.join("bin/python")).arg("--cache-dir").arg(target.join("mypy")).current_dir(root);
    passed(&mut mypy, "pass the package's type checks")?;
    let mut pyright = Command::new(tools.join("bin/pyright"));
    pyright.args(["--warnings", "--pythonpath"]).arg(torch.join("bin/python")).current_dir(root);
    passed(&mut pyright, "pass pyright's type checks")
}

/// The user's Python and its version, if it can make environments.
pub(crate) fn interpreter() -> anyhow::Result<(PathBuf, String)> {
    let script = "import sys, venv, ensurepip; print(sys.executable); print('%d.%d' % sys.version_info[:2])";
    let said = Command::new("python3").args(["-c", script]).stderr(Stdio::null()).output();
    let said = said.context("python3 cannot be started; install Python 3.10 or newer")?;
    ensure!(
        said.status.success(),
        "python3 cannot make virtual environments (Debian: apt install python3-venv)"
    );
    let text = String::from_utf8(said.stdout)?;
    let (executable, version) = text.trim().split_once('\n').context("python3 did not say its version")?;
    let minor: u32 = version.strip_prefix("3.").and_then(|minor| minor.parse().ok()).unwrap_or(0);
    ensure!(minor >= 10, "python3 is {version}; 3.10 or newer is needed");
    Ok((PathBuf::from(executable), version.to_owned()))
}

/// The base environment, made if it is not there. It counts as there when its last step has been taken.
pub(crate) fn prepared(base: &Base, python: &Path, version: &str, root: &Path) -> anyhow::Result<PathBuf> {
    let finish = base.finish.map(|script| root.join(script));
    let finish_text = finish.as_ref().map(fs::read_to_string).transpose()?;
    let mut hasher = DefaultHasher::new();
    (base.installs, version, python, &finish_text).hash(&mut hasher);
    let name = format!("python-{version}-{}-{:016x}", base.name, hasher.finish());
    let folder = cache_folder()?.join(name);
    let complete = folder.join("complete");
    if complete.is_file() {
        return Ok(folder);
    }
    eprintln!("== python: preparing {}", folder.display());
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(folder.parent().unwrap_or(Path::new(".")))?;
    passed(Command::new(python).args(["-m", "venv"]).arg(&folder), "make a virtual environment")?;
    for packages in base.installs {
        let mut pip = Command::new(folder.join("bin/python"));
        pip.args(["-m", "pip", "install", "--quiet", "--no-compile", "--no-cache-dir"]);
        passed(pip.arg("--disable-pip-version-check").args(*packages), "install packages")?;
    }
    if let Some(script) = finish {
        passed(Command::new(folder.join("bin/python")).arg(script), "finish the environment")?;
    }
    fs::write(complete, "")?;
    Ok(folder)
}

/// A new environment that sees the base's packages and has nothing else.
fn clean_environment(folder: &Path, base: &Path) -> anyhow::Result<()> {
    let _ = fs::remove_dir_all(folder);
    let python = base.join("bin/python");
    passed(
        Command::new(&python).args(["-m", "venv", "--without-pip"]).arg(folder),
        "make a clean environment",
    )?;
    fs::write(packages(folder)?.join("base.pth"), format!("{}\n", packages(base)?.display()))?;
    Ok(())
}

/// Where an environment keeps its packages.
fn packages(of: &Path) -> anyhow::Result<PathBuf> {
    let script = "import sysconfig; print(sysconfig.get_paths()['purelib'])";
    let said = Command::new(of.join("bin/python")).args(["-c", script]).output()?;
    Ok(PathBuf::from(String::from_utf8(said.stdout)?.trim()))
}

fn only_wheel(folder: &Path) -> anyhow::Result<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("no wheel in {}", folder.display()))? {
        found.push(entry?.path());
    }
    match found.as_slice() {
        [wheel] => Ok(wheel.clone()),
        other => bail!("one wheel was expected in {}, not {}", folder.display(), other.len()),
    }
}

pub(crate) fn passed(command: &mut Command, to: &str) -> anyhow::Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let status = command.status().with_context(|| format!("cannot {to}: {name} cannot be started"))?;
    ensure!(status.success(), "cannot {to}: {command:?} ended with {status}");
    Ok(())
}

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map_or_else(|| PathBuf::from("."), Path::to_owned)
}

/// Where cargo puts what it builds.
pub(crate) fn target_folder(root: &Path) -> anyhow::Result<PathBuf> {
    let folder =
        env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), |folder| root.join(folder));
    fs::create_dir_all(&folder)?;
    Ok(folder)
}

/// `${XDG_CACHE_HOME:-~/.cache}/evosdpa`, where this project keeps what it downloads.
fn cache_folder() -> anyhow::Result<PathBuf> {
    let absolute = |name: &str| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")));
    Ok(base.context("neither XDG_CACHE_HOME nor HOME is an absolute path")?.join("evosdpa"))
}
