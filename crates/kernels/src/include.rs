//! Which headers a source needs: the quoted includes, followed through.
//!
//! Only what is included is handed to the compiler, so that a change of one header recompiles only its users.

use std::collections::BTreeMap;

/// A header as the source includes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The name between the quotes.
    pub name: String,
    /// Its text.
    pub text: String,
}

/// Files by their path from the root, with `/`.
pub(crate) type Files = BTreeMap<String, String>;

/// The folder that headers are found in from everywhere.
pub(crate) const COMMON: &str = "common";

/// The headers that the file at `path` includes, directly or not.
///
/// A name that is not among the files is left to the compiler, which finds the toolkit's own headers.
pub(crate) fn headers(path: &str, text: &str, files: &Files) -> Vec<Header> {
    let mut found: BTreeMap<String, String> = BTreeMap::new();
    let mut pending = vec![(path.to_owned(), text.to_owned())];
    while let Some((includer, text)) = pending.pop() {
        for name in quoted_includes(&text) {
            if found.contains_key(name) {
                continue;
            }
            let places = [join(folder(&includer), name), join(COMMON, name), join("", name)];
            let Some((place, text)) = places.iter().find_map(|place| files.get_key_value(place)) else {
                continue;
            };
            found.insert(name.to_owned(), text.clone());
            pending.push((place.clone(), text.clone()));
        }
    }
    found.into_iter().map(|(name, text)| Header { name, text }).collect()
}

fn quoted_includes(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| {
        let directive = line.trim_start().strip_prefix('#')?.trim_start().strip_prefix("include")?;
        directive.trim_start().strip_prefix('"')?.split('"').next()
    })
}

/// `path`'s folder, empty at the root.
pub(crate) fn folder(path: &str) -> &str {
    path.rfind('/').map_or("", |slash| &path[..slash])
}

/// `folder/name` with `.` and `..` resolved.
pub(crate) fn join(folder: &str, name: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in folder.split('/').chain(name.split('/')) {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    parts.join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn follows_quoted_includes_and_leaves_the_toolkits() {
        let files: Files = [
            ("common/params.h", "struct P {};"),
            ("common/softmax.cuh", "#include \"math.cuh\"\n"),
            ("common/math.cuh", "#include \"softmax.cuh\" // a cycle is harmless\n"),
            ("line/local.cuh", ""),
            ("common/unused.cuh", ""),
        ]
        .map(|(path, text)| (path.to_owned(), text.to_owned()))
        .into();
        let source = "#include \"params.h\"\n  #  include \"softmax.cuh\"\n#include \"local.cuh\"\n\
                      #include <mma.h>\n#include \"cuda_fp16.h\"\n// #include \"unused.cuh\"\n";
        let names: Vec<String> =
            headers("line/kernel.cu", source, &files).into_iter().map(|header| header.name).collect();
        assert_eq!(names, ["local.cuh", "math.cuh", "params.h", "softmax.cuh"]);
    }

    #[test]
    fn resolves_parents() {
        assert_eq!(join("mutants", "../line/a.cu"), "line/a.cu");
        assert_eq!(join("", "./a.cu"), "a.cu");
        assert_eq!(folder("line/a.cu"), "line");
        assert_eq!(folder("a.cu"), "");
    }
}
