//! The HTML report in a real browser: it renders, logs no error, fits a phone, and its charts hold the record's numbers.

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};
use serde_json::Value;

/// Browsers that speak the same command line.
const BROWSERS: [&str; 4] = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];
/// A browser that has not drawn a page by then hangs.
const LIMIT: Duration = Duration::from_secs(30);
/// A phone's width. Browsers have no window that narrow, so the page is put into a frame.
const PHONE: u32 = 390;

/// Makes a report of a fresh benchmark and of stored results, and looks at both. `keep` leaves pictures in
/// `target/report`. `program` is an `evosdpa`; this checkout's is built without one.
pub(crate) fn check(program: Option<&Path>, keep: bool) -> anyhow::Result<()> {
    let browser = match fetch() {
        Some(browser) => browser,
        None => {
            eprintln!(
                "== report in a browser: UNAVAILABLE, none of {} is on PATH and apt-get could not install one",
                BROWSERS.join(", ")
            );
            return Ok(());
        }
    };
    let start = Instant::now();
    let folder = target_folder().join("report");
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let bench = [
        "bench",
        "--device",
        "cpu",
        "--no-baselines",
        "--shapes",
        "tiny,b1h2s96d64:causal",
        "--kernels",
        "cpu_naive",
        "--iters",
        "30",
        "--json",
    ];
    let document = evosdpa(program, &bench, &folder)?;
    let fresh = folder.join("bench.json");
    fs::write(&fresh, document)?;
    let tune = folder.join("log.jsonl");
    fs::write(&tune, TUNE_LOG)?;
    let words = folder.join("words.json");
    fs::write(&words, with_long_words(&fs::read_to_string(&fresh)?)?)?;
    let stored = stored_results()?;
    let pages = [("fresh", vec![fresh, tune.clone()]), ("words", vec![words, tune]), ("stored", stored)];
    for (name, inputs) in pages {
        let page = folder.join(format!("{name}.html"));
        let mut args = vec!["report".to_owned()];
        args.extend(inputs.iter().map(|path| path.display().to_string()));
        args.extend(["--out".to_owned(), page.display().to_string()]);
        evosdpa(program, &args.iter().map(String::as_str).collect::<Vec<_>>(), &folder)?;
        let phone = folder.join(format!("{name}-phone.html"));
        fs::write(&phone, framed(&format!("{name}.html")))?;
        let dom = dump(&browser, &page)?;
        for (window, dom) in [("desk", &dom), ("phone", &dump(&browser, &phone)?)] {
            let found = attribute(dom, "data-check")
                .with_context(|| format!("{name} on a {window}: no script ran"))?;
            ensure!(found.starts_with("ok "), "{name} on a {window}: {found}");
        }
        let numbers = holds_numbers(&dom, &inputs)?;
        eprintln!("   {name}: drawn on a desk and a phone, {numbers} numbers held against the JSON");
        if keep {
            let to = |which: &str| folder.join(format!("{name}-{which}.png"));
            picture(&browser, &page, &to("light"), "1000,3600", false)?;
            picture(&browser, &page, &to("dark"), "1000,3600", true)?;
            picture(&browser, &phone, &to("phone"), "500,3000", false)?;
        }
    }
    eprintln!("== report in a browser: passed in {:.0} s", start.elapsed().as_secs_f64());
    Ok(())
}

/// The same document as hostile as a name or a reason may be: one word, many times as wide as a phone, wherever words can stand.
fn with_long_words(document: &str) -> anyhow::Result<String> {
    let long = "antidisestablishmentarianism".repeat(20);
    let mut document: Value = serde_json::from_str(document)?;
    document["environment"]["cpu"] = long.as_str().into();
    let rows = document["rows"].as_array_mut().context("the benchmark has no rows")?;
    for (row, verdict) in rows.iter_mut().zip(["FAIL", "UNAVAILABLE", "PASS"]) {
        row["gates"] = serde_json::json!([{"gate": long, "verdict": verdict, "detail": long}]);
        row["kernel"] = format!("{verdict}{long}").into();
        if verdict != "PASS" {
            for number in ["p50_us", "p90_us", "p99_us", "gflops", "gbps", "percent_of_peak"] {
                row[number] = Value::Null;
            }
            row["samples_us"] = serde_json::json!([]);
            row["speedup"] = serde_json::json!({});
        }
    }
    Ok(document.to_string())
}

/// Every measured row of the inputs must be in the page's charts with the very number of the JSON.
fn holds_numbers(dom: &str, inputs: &[PathBuf]) -> anyhow::Result<usize> {
    let marks = marks(dom);
    let mut held = 0;
    for input in inputs.iter().filter(|path| path.extension().is_some_and(|ending| ending == "json")) {
        let document: Value = serde_json::from_str(&fs::read_to_string(input)?)?;
        for row in document["rows"].as_array().into_iter().flatten() {
            let text = |key: &str| row[key].as_str().unwrap_or_default();
            let key = format!("{}|{} · {}", text("kernel"), text("problem"), text("device"));
            for field in ["p50_us", "gflops"] {
                let Some(number) = row[field].as_f64() else { continue };
                let found = marks.get(&key).is_some_and(|values| values.contains(&number));
                ensure!(found, "{}: {key} {field} = {number} is not in the page", input.display());
                held += 1;
            }
        }
    }
    Ok(held)
}

/// Numbers by key, as they stand in the drawn page.
fn marks(dom: &str) -> BTreeMap<String, Vec<f64>> {
    let mut marks: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for piece in dom.split("data-key=\"").skip(1) {
        let Some((key, rest)) = piece.split_once('"') else { continue };
        let Some(value) = attribute(rest, "data-value").and_then(|text| text.parse().ok()) else { continue };
        marks.entry(key.replace("&amp;", "&")).or_default().push(value);
    }
    marks
}

/// The first value of an attribute.
fn attribute(text: &str, name: &str) -> Option<String> {
    let (_, rest) = text.split_once(&format!("{name}=\""))?;
    Some(rest.split_once('"')?.0.to_owned())
}

/// A page that shows another in a phone's width, and passes on what that one found.
fn framed(page: &str) -> String {
    format!(
        "<body style=\"margin:0\"><iframe src=\"{page}\" width=\"{PHONE}\" height=\"3000\" style=\"border:0\" \
         onload=\"document.documentElement.dataset.check=this.contentDocument.documentElement.dataset.check\"></iframe>"
    )
}

fn dump(browser: &Path, page: &Path) -> anyhow::Result<String> {
    chromium(browser, page, &["--window-size=1000,1600", "--allow-file-access-from-files", "--dump-dom"])
}

fn picture(browser: &Path, page: &Path, to: &Path, size: &str, dark: bool) -> anyhow::Result<()> {
    let (size, shot) = (format!("--window-size={size}"), format!("--screenshot={}", to.display()));
    let mut args = vec![size.as_str(), shot.as_str(), "--hide-scrollbars"];
    if dark {
        args.push("--blink-settings=preferredColorScheme=0");
    }
    chromium(browser, page, &args)?;
    ensure!(to.is_file(), "the browser drew no picture of {}", page.display());
    Ok(())
}

/// Runs the browser on a page and gives what it printed.
fn chromium(browser: &Path, page: &Path, args: &[&str]) -> anyhow::Result<String> {
    let folder = page.parent().context("the page lies in a folder")?;
    let said = folder.join("browser.out");
    let mut child = Command::new(browser)
        .args(["--headless", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"])
        // Containers run as root, where the sandbox does not start. The page is our own and asks for nothing.
        .args(["--no-sandbox", "--disable-extensions", "--host-resolver-rules=MAP * ~NOTFOUND"])
        .arg(format!("--user-data-dir={}", folder.join("browser").display()))
        .args(args)
        .arg(format!("file://{}", page.display()))
        .stdin(Stdio::null())
        .stdout(fs::File::create(&said)?)
        .stderr(Stdio::null())
        .spawn()
        .with_context(|| format!("cannot start {}", browser.display()))?;
    let deadline = Instant::now() + LIMIT;
    loop {
        match child.try_wait()? {
            Some(status) if status.success() => return Ok(fs::read_to_string(&said)?),
            Some(status) => bail!("{} ended with {status}", browser.display()),
            None if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(50)),
            None => {
                let _ = child.kill();
                let _ = child.wait();
                bail!("{} did not draw {} within {LIMIT:?}", browser.display(), page.display());
            }
        }
    }
}

/// Runs the program: the one `EVOSDPA` names, the given one, or this checkout's.
fn evosdpa(program: Option<&Path>, args: &[&str], folder: &Path) -> anyhow::Result<String> {
    let mut command = match env::var_os("EVOSDPA").or_else(|| program.map(Into::into)) {
        Some(program) => Command::new(program),
        None => {
            let mut cargo = Command::new(env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned()));
            cargo.args(["run", "--quiet", "--package", "evosdpa-cli", "--manifest-path"]);
            cargo.arg(env::current_dir()?.join("Cargo.toml")).arg("--");
            cargo
        }
    };
    let output = command.args(args).current_dir(folder).output().context("cannot run evosdpa")?;
    ensure!(
        output.status.success(),
        "evosdpa {} ended with {}: {}",
        args.join(" "),
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8(output.stdout)?)
}

/// Benchmarks and profiles among the stored results.
fn stored_results() -> anyhow::Result<Vec<PathBuf>> {
    let folder = env::current_dir()?.join("results/h200");
    let mut files = vec![folder.join("bench-named-shapes.json")];
    let mut profiles: Vec<PathBuf> = fs::read_dir(&folder)
        .with_context(|| format!("cannot list {}", folder.display()))?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("profile-")))
        .collect();
    profiles.sort();
    files.extend(profiles);
    Ok(files)
}

fn target_folder() -> PathBuf {
    let named = env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    let root = env::current_dir().unwrap_or_default();
    root.join(named.unwrap_or_else(|| PathBuf::from("target")))
}

/// The browser of this machine, installed where CI may and there is none.
pub(crate) fn fetch() -> Option<PathBuf> {
    find_browser().or_else(|| install().then(find_browser).flatten())
}

fn find_browser() -> Option<PathBuf> {
    let named = env::var_os("EVOSDPA_BROWSER").map(PathBuf::from);
    let path = env::var_os("PATH").unwrap_or_default();
    let on_path = env::split_paths(&path).flat_map(|folder| BROWSERS.map(|name| folder.join(name)));
    named.into_iter().chain(on_path).find(|candidate| candidate.is_file())
}

/// Asks the system's package manager; only in CI, where the machine is ours to change.
fn install() -> bool {
    if env::var_os("CI").is_none() {
        return false;
    }
    eprintln!("== report in a browser: apt-get install chromium");
    let apt = |args: &[&str]| {
        let done = Command::new("timeout").args(["90", "apt-get"]).args(args).stdout(Stdio::null()).status();
        done.is_ok_and(|status| status.success())
    };
    let install = ["install", "-y", "-q", "--no-install-recommends", "chromium"];
    apt(&install) || (apt(&["update", "-q"]) && apt(&install))
}

/// A short tune with every kind of outcome: accepted, kept, stopped by a gate, and a last line that was cut.
const TUNE_LOG: &str = r#"{"kind":"header","schema":"evosdpa.tune/1","space":{"kernel":"cpu_flash","dimensions":[]}}
{"kind":"evaluation","number":0,"point":{"ROWS":32},"operator":"default","parents":[],"gates":[{"gate":"correctness","verdict":"PASS","detail":""}],"shapes":{"mission f32":{"speedup":1.0,"p50_us":900.0}},"fitness":1.0,"status":"kept","seconds":1.0}
{"kind":"evaluation","number":1,"point":{"ROWS":64},"operator":"mutation","parents":[0],"gates":[{"gate":"correctness","verdict":"PASS","detail":""}],"shapes":{"mission f32":{"speedup":1.08,"p50_us":833.0}},"fitness":1.08,"status":"promoted","seconds":1.2}
{"kind":"evaluation","number":2,"point":{"ROWS":7},"operator":"insight","insight":"4-grid","helped":false,"parents":[0],"gates":[{"gate":"correctness","verdict":"FAIL","detail":"NaN at row 3"}],"shapes":{},"fitness":null,"status":"rejected","seconds":0.2}
{"kind":"evaluation","number":3,"point":{"ROWS":96},"operator":"crossover","parents":[0,1],"gates":[{"gate":"correctness","verdict":"PASS","detail":""}],"shapes":{"mission f32":{"speedup":1.05,"p50_us":857.0}},"fitness":1.05,"status":"accepted","seconds":1.1}
{"kind":"evaluation","number":4,"poi"#;
