//! Findings that are known and accepted: a file with a line for each.
//!
//! A line is `KIND WHERE`, each with `*` for any text. WHERE is compared with the places (`file.cu:12`, of every frame of both
//! sides), with the files alone, with the variable, and with the entry. `#` starts a comment.

use super::{Finding, Kind};
use std::fmt;

/// Why a suppressions file was not understood.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SuppressionError {
    /// The line, from 1.
    pub line: usize,
    /// What is wrong with it.
    pub reason: String,
}

impl fmt::Display for SuppressionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.reason)
    }
}

impl std::error::Error for SuppressionError {}

#[derive(Debug, Clone)]
struct Rule {
    line: usize,
    kind: String,
    place: String,
    hits: u64,
}

/// What is not to be reported, and how often each of it was there.
#[derive(Debug, Clone, Default)]
pub struct Suppressions {
    rules: Vec<Rule>,
}

impl Suppressions {
    /// Reads the text of a suppressions file.
    pub fn parse(text: &str) -> Result<Self, SuppressionError> {
        let mut rules = Vec::new();
        for (at, line) in text.lines().enumerate() {
            let line_number = at + 1;
            let wrong = |reason: String| SuppressionError { line: line_number, reason };
            let words: Vec<&str> = line.split('#').next().unwrap_or_default().split_whitespace().collect();
            let (kind, place) = match words[..] {
                [] => continue,
                [kind, place] => (kind, place),
                _ => {
                    return Err(wrong(format!(
                        "expected `KIND WHERE`, such as `race kernel.cu:12`, found `{}`",
                        line.trim()
                    )));
                }
            };
            if !Kind::ALL.into_iter().any(|known| matches(kind, known.name())) {
                let names = Kind::ALL.map(Kind::name).join(", ");
                return Err(wrong(format!("no kind `{kind}`; there are {names}, and * for any text")));
            }
            rules.push(Rule { line: line_number, kind: kind.to_owned(), place: place.to_owned(), hits: 0 });
        }
        Ok(Suppressions { rules })
    }

    /// Takes the findings of an entry out that a rule names; returns how many.
    pub fn apply(&mut self, entry: &str, findings: &mut Vec<Finding>) -> usize {
        let before = findings.len();
        findings.retain(|finding| match self.rules.iter_mut().find(|rule| rule.covers(entry, finding)) {
            Some(rule) => {
                rule.hits += finding.count;
                false
            }
            None => true,
        });
        before - findings.len()
    }

    /// Lines of the file that have not suppressed anything, as written: they may be out of date.
    pub fn unused(&self) -> impl Iterator<Item = (usize, String)> + '_ {
        let unused = self.rules.iter().filter(|rule| rule.hits == 0);
        unused.map(|rule| (rule.line, format!("{} {}", rule.kind, rule.place)))
    }
}

impl Rule {
    fn covers(&self, entry: &str, finding: &Finding) -> bool {
        if !matches(&self.kind, finding.kind.name()) {
            return false;
        }
        let fits = |text: &str| matches(&self.place, text);
        let sites = [Some(&finding.site), finding.other.as_ref()];
        let mut frames = sites.into_iter().flatten().flat_map(|site| &site.stack);
        fits(entry)
            || finding.variable.as_ref().is_some_and(|variable| fits(&variable.name))
            || frames.any(|f| fits(&f.to_string()) || fits(f.file_name()) || fits(&f.file))
    }
}

/// Whether `text` is what `pattern` says, where `*` is any text.
fn matches(pattern: &str, text: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else { return pattern == text };
    let Some(mut text) = text.strip_prefix(first) else { return false };
    let parts: Vec<&str> = rest.split('*').collect();
    let (last, middle) = parts.split_last().unwrap_or((&"", &[]));
    for part in middle {
        match text.find(part) {
            Some(at) => text = &text[at + part.len()..],
            None => return false,
        }
    }
    text.len() >= last.len() && text.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_stand_for_any_text() {
        for (pattern, text, is_match) in [
            ("a.cu:1", "a.cu:1", true),
            ("a.cu:1", "a.cu:12", false),
            ("a.cu:*", "a.cu:12", true),
            ("*", "", true),
            ("*tile*", "_ZZ4tileE", true),
            ("a*b*c", "axxbyyc", true),
            ("a*b*c", "axxcyyb", false),
            ("ab*ba", "aba", false),
        ] {
            assert_eq!(matches(pattern, text), is_match, "{pattern} {text}");
        }
    }

    #[test]
    fn wrong_lines_are_named() {
        let error = Suppressions::parse("# known\nrace a.cu:3\nraces b.cu:4\n").unwrap_err();
        assert_eq!(error.line, 3);
        assert!(error.to_string().contains("no kind `races`; there are race,"), "{error}");
        assert!(Suppressions::parse("race").is_err());
        assert!(Suppressions::parse("race a b").is_err());
        assert!(Suppressions::parse("* *  # everything\n\n").is_ok());
    }
}
