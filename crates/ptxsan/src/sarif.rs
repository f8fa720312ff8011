//! Findings as SARIF 2.1.0, which code hosts show beside the lines of a change.
//! See <https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html>.

use crate::finding::{Finding, Frame, Kind, Severity, Site};
use serde_json::{Value, json};
use std::path::Path;

const SCHEMA: &str =
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json";

/// A document of one run. `artifact` is the file that was run: it stands in for findings that have no line of a source.
pub fn document<'a>(artifact: &str, findings: impl IntoIterator<Item = (&'a str, &'a Finding)>) -> Value {
    let findings: Vec<(&str, &Finding)> = findings.into_iter().collect();
    let mut kinds: Vec<Kind> = Kind::ALL.into_iter().collect();
    kinds.retain(|kind| findings.iter().any(|(_, finding)| finding.kind == *kind));
    let rules: Vec<Value> = kinds
        .iter()
        .map(|kind| {
            json!({
                "id": kind.name(),
                "shortDescription": { "text": kind.title() },
                "defaultConfiguration": { "level": level(kind.severity()) },
            })
        })
        .collect();
    let results: Vec<Value> = findings
        .iter()
        .map(|(entry, finding)| {
            let rule = kinds.iter().position(|kind| *kind == finding.kind).unwrap_or(0);
            result(artifact, entry, finding, rule)
        })
        .collect();
    json!({
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [{
            "tool": { "driver": {
                "name": "ptxsan",
                "version": env!("CARGO_PKG_VERSION"),
                "informationUri": env!("CARGO_PKG_REPOSITORY"),
                "rules": rules,
            } },
            "columnKind": "unicodeCodePoints",
            "results": results,
        }],
    })
}

/// SARIF's word for a severity.
fn level(severity: Severity) -> &'static str {
    match severity {
        Severity::Info => "note",
        Severity::Warning => "warning",
        Severity::Error => "error",
    }
}

fn result(artifact: &str, entry: &str, finding: &Finding, rule: usize) -> Value {
    let mut text = format!("{}: {}", finding.kind.title(), finding.detail);
    if let Some(advice) = &finding.advice {
        text += &format!(". {advice}");
    }
    let mut result = json!({
        "ruleId": finding.kind.name(),
        "ruleIndex": rule,
        "level": level(finding.severity),
        "message": { "text": text },
        "locations": [location(artifact, &finding.site)],
        "occurrenceCount": finding.count.max(1),
        "properties": { "entry": entry, "ptxLine": finding.site.ptx_line },
    });
    let inlined = finding.site.stack.iter().rev().skip(1).map(|frame| (frame, "inlined here"));
    let mut related: Vec<Value> = inlined.map(|(frame, what)| with_words(at(frame), what)).collect();
    if let Some(other) = &finding.other {
        related.push(with_words(location(artifact, other), "the other access"));
    }
    if !related.is_empty() {
        result["relatedLocations"] = related.into();
    }
    result
}

/// Where a site is annotated: the outermost line, which is the kernel's own; in the PTX if there is no source.
fn location(artifact: &str, site: &Site) -> Value {
    match site.stack.last() {
        Some(frame) => at(frame),
        None => place(artifact, site.ptx_line),
    }
}

fn at(frame: &Frame) -> Value {
    place(&frame.file, frame.line)
}

fn place(file: &str, line: u32) -> Value {
    json!({ "physicalLocation": {
        "artifactLocation": { "uri": uri(file) },
        "region": { "startLine": line.max(1) },
    } })
}

fn with_words(mut location: Value, text: &str) -> Value {
    location["message"] = json!({ "text": text });
    location
}

/// A path as a URI: relative to the working folder where it lies below it, so that a code host finds the file.
fn uri(file: &str) -> String {
    let path = Path::new(file);
    let here = std::env::current_dir().ok();
    let relative = here.as_deref().and_then(|here| path.strip_prefix(here).ok()).unwrap_or(path);
    let text = relative.to_string_lossy();
    let text = text.strip_prefix("./").unwrap_or(&text);
    let mut out = String::with_capacity(text.len() + 8);
    if text.starts_with('/') {
        out += "file://";
    }
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => {
                out.push(char::from(byte))
            }
            other => out += &format!("%{other:02X}"),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::uri;

    #[test]
    fn paths_are_uris() {
        assert_eq!(uri("./a b.cu"), "a%20b.cu");
        assert_eq!(uri("/x/k.cu"), "file:///x/k.cu");
        let here = std::env::current_dir().unwrap().join("sub/k.cu");
        assert_eq!(uri(&here.display().to_string()), "sub/k.cu");
        assert_eq!(uri("é:%.cu"), "%C3%A9%3A%25.cu");
    }
}
