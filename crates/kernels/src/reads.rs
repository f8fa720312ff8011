//! Which compile-time values a source reads.
//!
//! A value that is passed to a compiler and never read makes other code of the same source: it is compiled, cached and
//! loaded again for nothing. So only what is read is passed, and what a manifest names in vain is refused.

use std::collections::{BTreeSet, HashMap};

use crate::{Error, Expr, Header, Manifest, Result};

/// What a source that asserts its shared memory reads: the launch's dynamic shared memory, evaluated.
pub(crate) const DYNAMIC_SMEM_BYTES: &str = "DYNAMIC_SMEM_BYTES";

/// The names of a manifest that its source or its headers read, outside comments and outside the directives that only ask
/// whether a name is defined, or define it.
pub(crate) fn names_read(
    manifest: &Manifest,
    source: &str,
    headers: &[Header],
    known: &mut Identifiers,
) -> BTreeSet<String> {
    let declared: BTreeSet<&str> = manifest.compile_time_names().chain([DYNAMIC_SMEM_BYTES]).collect();
    let mut read = BTreeSet::new();
    let headers = headers.iter().map(|header| (header.name.as_str(), header.text.as_str()));
    // A source has no name that includes it.
    for (name, text) in headers.chain([("", source)]) {
        let names = known.of(name, text);
        read.extend(declared.iter().filter(|name| names.contains(**name)).map(|name| (*name).to_owned()));
    }
    read
}

/// What headers read. Most are many kernels', and each is looked through once.
#[derive(Default)]
pub(crate) struct Identifiers {
    /// By the name that they are included by, with their texts: kernels of several folders may name theirs alike.
    by_name: HashMap<String, (String, BTreeSet<String>)>,
}

impl Identifiers {
    fn of(&mut self, name: &str, text: &str) -> &BTreeSet<String> {
        let known = self.by_name.entry(name.to_owned()).or_default();
        if known.0 != text {
            let mut names = BTreeSet::new();
            scan(text, |name| {
                if !names.contains(name) {
                    names.insert(name.to_owned());
                }
            });
            *known = (text.to_owned(), names);
        }
        &known.1
    }
}

/// Refuses names that nothing comes of.
pub(crate) fn check(manifest: &Manifest, file: &str, read: &BTreeSet<String>) -> Result<()> {
    let unused = |key: String, problem: String| Error::ManifestValue { file: file.to_owned(), key, problem };
    let defines = manifest.defines.keys().map(|name| ("defines", name));
    let kinds = manifest.kinds.iter().map(|kind| ("kind", &kind.name));
    if let Some((table, name)) = defines.chain(kinds).find(|(_, name)| !read.contains(*name)) {
        let problem = format!(
            "the source never reads `{name}`: remove it, or name it under [let] if other expressions use it"
        );
        return Err(unused(format!("{table}.{name}"), problem));
    }
    let used: BTreeSet<&str> =
        manifest.consequences().flat_map(|expr: &Expr| expr.names()).collect::<BTreeSet<_>>();
    for tunable in manifest.tunables.iter().filter(|tunable| !read.contains(&tunable.name)) {
        if !used.contains(tunable.name.as_str()) {
            let problem = "the source never reads it, and neither the launch nor a define follows from it";
            return Err(unused(format!("tunable.{}", tunable.name), problem.to_owned()));
        }
    }
    let in_constraints = manifest.constraints.iter().flat_map(|constraint| constraint.expr.names());
    let used: BTreeSet<&str> = used.into_iter().chain(in_constraints).collect();
    match manifest.lets.keys().find(|name| !used.contains(name.as_str())) {
        Some(name) => Err(unused(format!("let.{name}"), "no expression uses it; remove it".to_owned())),
        None => Ok(()),
    }
}

/// Calls back for every identifier that is read.
fn scan<'a>(text: &'a str, mut found: impl FnMut(&'a str)) {
    let bytes = text.as_bytes();
    let mut at = 0;
    // `#ifndef X` and the like: the next name is asked for or defined, not read.
    let mut skip_next = false;
    while at < bytes.len() {
        let rest = &bytes[at..];
        if rest.starts_with(b"//") {
            at += rest.iter().position(|byte| *byte == b'\n').unwrap_or(rest.len());
        } else if rest.starts_with(b"/*") {
            at += rest.windows(2).skip(2).position(|pair| pair == b"*/").map_or(rest.len(), |end| end + 4);
        } else if bytes[at].is_ascii_alphabetic() || bytes[at] == b'_' {
            let length =
                rest.iter().take_while(|byte| byte.is_ascii_alphanumeric() || **byte == b'_').count();
            let name = &text[at..at + length];
            if std::mem::take(&mut skip_next) {
                // Not read here.
            } else if is_directive(bytes, at) && matches!(name, "ifdef" | "ifndef" | "define" | "undef") {
                skip_next = true;
            } else {
                found(name);
            }
            at += length;
        } else if bytes[at].is_ascii_digit() {
            // A number with its suffix is no name.
            at += rest.iter().take_while(|byte| byte.is_ascii_alphanumeric() || **byte == b'_').count();
        } else {
            at += 1;
        }
    }
}

/// Whether a `#` stands before this place, spaces aside.
fn is_directive(bytes: &[u8], at: usize) -> bool {
    bytes[..at].iter().rev().find(|byte| !matches!(byte, b' ' | b'\t')) == Some(&b'#')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Vec<&str> {
        let mut names = Vec::new();
        scan(text, |name| names.push(name));
        names
    }

    #[test]
    fn headers_of_one_name_are_told_apart_by_their_texts() {
        let mut known = Identifiers::default();
        for (text, expected) in [("TILE", "TILE"), ("STAGES", "STAGES"), ("TILE", "TILE"), ("TILE", "TILE")] {
            let names: Vec<&String> = known.of("a.cuh", text).iter().collect();
            assert_eq!(names, [expected]);
        }
        assert!(known.of("", "").is_empty());
    }

    #[test]
    fn comments_and_definitions_do_not_read() {
        let text = "#ifndef TILE // TILE\n# define TILE 64u\n#endif\n/* TILE **/ int a = 0xTILE + STAGES;\n";
        assert_eq!(read(text), ["endif", "int", "a", "STAGES"]);
        assert_eq!(read("#if TILE > 2\n"), ["if", "TILE"]);
        assert_eq!(read("#define BOTH (TILE + 1)\n"), ["TILE"]);
        assert_eq!(read("/* open TILE"), [""; 0]);
        assert_eq!(read("a//b"), ["a"]);
    }
}
