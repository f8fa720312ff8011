//! Tables for people, one JSON document for programs.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::Write,
};

use anstyle::{AnsiColor, Style};
use anyhow::Context;
use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use evosdpa_lab::{gate::Verdict, machine::Environment};
use serde::Serialize;
use serde_json::json;

use crate::Status;

pub(crate) const RED: Style = AnsiColor::Red.on_default().bold();
const GREEN: Style = AnsiColor::Green.on_default();
const YELLOW: Style = AnsiColor::Yellow.on_default();

/// Tables and text are never wider than this.
const WIDTH: u16 = 100;
/// A command between backticks stays on one line up to this width.
const LONGEST_COMMAND: usize = 90;

/// Writes text for people to standard output, its long lines broken; colours are dropped where nobody sees them.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    print_whole(&fitted(text))
}

/// Writes a document for programs to standard output as it is.
pub(crate) fn print_whole(text: &str) -> anyhow::Result<()> {
    let mut out = anstream::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("cannot write to standard output")
}

/// Writes a line to the standard error. That nobody can read it, because the disk behind it is full say, changes nothing.
pub(crate) fn tell(line: &str) {
    let _ = writeln!(anstream::stderr().lock(), "{line}");
}

/// Whether an error says only that nobody reads any more, as in `evosdpa runs | head -1`.
pub(crate) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<std::io::Error>().is_some_and(|io| io.kind() == std::io::ErrorKind::BrokenPipe)
}

/// Prints the one document of `--json`.
pub(crate) fn print_json(
    command: &str,
    environment: &Environment,
    rows: &impl Serialize,
) -> anyhow::Result<()> {
    let document = json!({
        "schema": format!("evosdpa.{command}/1"),
        "environment": environment,
        "rows": rows,
    });
    print_whole(&format!("{document:#}\n"))
}

/// A share in percent, with a digit more where there would be none.
pub(crate) fn percent(share: f64) -> String {
    let percent = 100.0 * share;
    if percent < 1.0 { format!("{percent:.1}") } else { format!("{percent:.0}") }
}

/// Why `--device auto` took the CPU.
pub(crate) fn no_gpu(why: &str) -> String {
    wrapped(&format!("no GPU, so on the CPU: {why}"), 2)
}

/// Says on the standard error, under whatever was printed, that nothing could be done, and each reason once with the kernels
/// that gave it.
pub(crate) fn nothing_done(done: &str, reasons: impl IntoIterator<Item = (String, String)>) -> Status {
    let mut kernels: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (kernel, why) in reasons {
        kernels.entry(why).or_default().insert(kernel);
    }
    let (red, plain) = (RED.render(), RED.render_reset());
    if kernels.is_empty() {
        tell(&format!("{red}error:{plain} nothing could be {done}: no kernel takes what was asked for"));
    } else {
        tell(&format!("{red}error:{plain} nothing could be {done}:"));
    }
    for (why, kernels) in kernels {
        let names: Vec<String> = kernels.into_iter().collect();
        tell(&fitted(&format!("  {}: {why}", names.join(", "))));
    }
    Status::Unavailable
}

/// A table of at most 100 columns, on whatever terminal. Columns from `numbers_from` on are right-aligned.
pub(crate) fn table(header: &[&str], numbers_from: usize, rows: Vec<Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Dynamic).set_width(WIDTH);
    table.set_header(header.iter().copied());
    table.add_rows(rows);
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
        if column.index >= numbers_from {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let lines: Vec<String> = table.lines().map(|line| line.trim_end().to_owned()).collect();
    lines.join("\n") + "\n"
}

/// Text whose lines are broken between words where they are wider than a table; what follows is indented two more. Lines of source
/// that somebody points into from the line below stay whole.
pub(crate) fn fitted(text: &str) -> String {
    let points = |line: &str| line.contains('^') && line.chars().all(|c| " |^~".contains(c));
    let lines: Vec<&str> = text.split('\n').collect();
    let fitted = |(at, line): (usize, &&str)| match points(line)
        || lines.get(at + 1).is_some_and(|next| points(next))
    {
        true => (*line).to_owned(),
        false => wrapped(line, line.len() - line.trim_start_matches(' ').len() + 2),
    };
    lines.iter().enumerate().map(fitted).collect::<Vec<_>>().join("\n")
}

/// Columns that a word takes: the codes of its colours take none.
fn columns(word: &str) -> usize {
    let mut in_code = false;
    let is_shown = |c: &char| {
        in_code |= *c == '\u{1b}';
        let shown = !in_code;
        in_code &= *c != 'm';
        shown
    };
    word.chars().filter(is_shown).count()
}

/// What stays on one line: words, and whole commands between backticks, so that they can be copied.
fn words(text: &str) -> Vec<&str> {
    let mut words = Vec::new();
    let mut rest = text;
    loop {
        let end = rest.find(' ').unwrap_or(rest.len());
        let is_open = rest[..end].matches('`').count() % 2 == 1;
        let closing = rest[end..].find('`').filter(|_| is_open).map(|at| end + at);
        // Behind the closing one to the next space.
        let whole = closing.map(|at| rest[at..].find(' ').map_or(rest.len(), |more| at + more));
        let end = whole.filter(|whole| columns(&rest[..*whole]) <= LONGEST_COMMAND).unwrap_or(end);
        words.push(&rest[..end]);
        match rest.get(end + 1..) {
            Some(more) => rest = more,
            None => return words,
        }
    }
}

/// Text broken between words so that no line is wider than a table; lines after the first are indented.
/// A word that is wider stays whole.
pub(crate) fn wrapped(text: &str, indent: usize) -> String {
    let mut lines = String::new();
    let mut width = 0;
    for (at, word) in words(text).into_iter().enumerate() {
        let own = columns(word);
        if width > indent && width + 1 + own > usize::from(WIDTH) {
            lines.push('\n');
            lines.push_str(&" ".repeat(indent));
            width = indent;
        } else if at > 0 {
            lines.push(' ');
            width += 1;
        }
        lines.push_str(word);
        width += own;
    }
    lines
}

/// PASS, FAIL or UNAVAILABLE in its colour.
pub(crate) fn coloured(verdict: &Verdict) -> String {
    let style = match verdict {
        Verdict::Pass => GREEN,
        Verdict::Fail(_) => RED,
        Verdict::Unavailable(_) => YELLOW,
    };
    format!("{}{}{}", style.render(), verdict.word(), style.render_reset())
}

/// A time in the unit that suits it.
pub(crate) fn time(us: f64) -> String {
    match us {
        us if us >= 1e6 => format!("{:.2} s", us / 1e6),
        us if us >= 1e4 => format!("{:.1} ms", us / 1e3),
        us if us >= 1e3 => format!("{:.2} ms", us / 1e3),
        us if us >= 100.0 => format!("{us:.0} µs"),
        us => format!("{us:.1} µs"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_are_broken_between_words() {
        let text = format!("  redundant  {}", "bar.sync at a.cu:7 and ".repeat(12));
        let lines = wrapped(text.trim_end(), 13);
        assert!(lines.lines().count() > 2 && lines.lines().all(|line| line.len() <= 100), "{lines}");
        assert!(lines.starts_with("  redundant  bar.sync at"), "{lines}");
        assert!(lines.lines().skip(1).all(|line| line.starts_with("             ")), "{lines}");
        let split = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(split(&lines), split(&text));
        let red = wrapped(&format!("{} {} b", "a".repeat(60), "\u{1b}[31mFAIL\u{1b}[0m".repeat(9)), 2);
        assert!(!red.contains('\n'), "colours take no room: {red:?}");
        let page = fitted(&format!("{}\n  tunables {}\nend\n", "x y ".repeat(24), "STAGES=2 ".repeat(20)));
        assert!(page.lines().all(|line| line.len() <= 100), "{page}");
        assert!(page.lines().filter(|line| line.starts_with("    STAGES")).count() >= 1, "{page}");
        assert!(page.ends_with("end\n"), "{page:?}");
        let hint = wrapped(
            &format!(
                "{}in a clone `cargo build --release --package evosdpa-agent`, or so",
                "a b ".repeat(20)
            ),
            2,
        );
        assert!(
            hint.contains("`cargo build --release --package evosdpa-agent`,\n  ")
                || hint.ends_with("agent`, or so"),
            "{hint}"
        );
        assert!(hint.lines().count() == 2 && hint.lines().all(|line| line.len() <= 100), "{hint}");
        let open = wrapped(&format!("it's ` {}", "word ".repeat(40)), 2);
        assert!(open.lines().count() > 1, "{open}");
        let source = format!("    {}\n{}^\n", "x = y; ".repeat(20), " ".repeat(120));
        assert_eq!(fitted(&source), source);
        assert_eq!(wrapped("short", 4), "short");
        assert_eq!(wrapped(&"x".repeat(120), 4), "x".repeat(120));
    }
}
