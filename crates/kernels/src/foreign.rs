//! What an untrusted source may include: headers, and no other file of this machine.
//!
//! A compiler reads whatever an `#include` names and quotes it in its messages, which go to whoever proposed the source. So
//! every include of such a source is a plain name of a header, known or the toolkit's. This looks at every `#` of the text, in
//! comments and strings too: a refusal too many is harmless, and nothing hides.

use crate::include::Files;

/// Directives that read a file.
const READING: [&str; 4] = ["include", "include_next", "import", "embed"];

/// Words that ask whether a file exists.
const ASKING: [&str; 2] = ["__has_include", "__has_embed"];

/// Endings of a header's name.
const ENDINGS: [&str; 4] = [".h", ".hpp", ".cuh", ".inl"];

/// Why a source is refused, if it is; `known` are headers that are handed to the compiler as text.
pub(crate) fn refusal(source: &str, known: &Files) -> Option<String> {
    let is_strange = |c: char| c.is_control() && !matches!(c, '\n' | '\r' | '\t');
    if let Some(strange) = source.chars().find(|c| is_strange(*c)) {
        return Some(format!("it has the control character U+{:04X}", u32::from(strange)));
    }
    if let Some(trigraph) = ["??=", "??/"].into_iter().find(|trigraph| source.contains(trigraph)) {
        return Some(format!("it has the trigraph `{trigraph}`"));
    }
    let text = spliced(source);
    if let Some(asking) = ASKING.into_iter().find(|word| text.contains(word)) {
        return Some(format!("`{asking}` asks for files of this machine; include what is needed"));
    }
    let hashes = text.match_indices('#').chain(text.match_indices("%:"));
    hashes.filter_map(|(at, hash)| operand(&text[at + hash.len()..])).find_map(|operand| {
        let shown: String = operand.lines().next().unwrap_or_default().chars().take(60).collect();
        (!is_header(operand, known)).then(|| {
            format!(
                "`#include {}` is not the plain name of a header: allowed are the kernel's own headers and the toolkit's, \
                 such as \"softmax.cuh\" or <mma.h>",
                shown.trim_end()
            )
        })
    })
}

/// The text with lines joined where a backslash ends one.
fn spliced(source: &str) -> String {
    let mut text = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find('\\') {
        text.push_str(&rest[..at]);
        let after = &rest[at + 1..];
        let blank = after.len() - after.trim_start_matches([' ', '\t', '\r']).len();
        rest = match after[blank..].strip_prefix('\n') {
            Some(next_line) => next_line,
            None => {
                text.push('\\');
                after
            }
        };
    }
    text + rest
}

/// What follows the name of a directive that reads a file.
fn operand(after_hash: &str) -> Option<&str> {
    let directive = uncommented(after_hash);
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let start = directive.find(|c: char| is_word(c) || c == '\n')?;
    let word = &directive[start..];
    let end = word.find(|c| !is_word(c)).unwrap_or(word.len());
    READING.contains(&&word[..end]).then(|| uncommented(&word[end..]))
}

/// The text after blanks and comments.
fn uncommented(text: &str) -> &str {
    let text = text.trim_start_matches([' ', '\t', '\r']);
    match text.strip_prefix("/*").and_then(|comment| comment.split_once("*/")) {
        Some((_, after)) => uncommented(after),
        None => text,
    }
}

fn is_header(operand: &str, known: &Files) -> bool {
    let between =
        |open: char, close: char| operand.strip_prefix(open)?.split_once(close).map(|(name, _)| name);
    if let Some(name) = between('"', '"') {
        return known.contains_key(name)
            || known.contains_key(&format!("{}/{name}", crate::include::COMMON))
            || (is_plain(name) && has_ending(name));
    }
    // The toolkit's C++ headers have no ending.
    between('<', '>').is_some_and(|name| is_plain(name) && (has_ending(name) || !name.contains('.')))
}

fn has_ending(name: &str) -> bool {
    ENDINGS.iter().any(|ending| name.ends_with(ending))
}

fn is_plain(name: &str) -> bool {
    let is_part = |part: &str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part.chars().all(|c| c.is_ascii_alphanumeric() || "_.-+".contains(c))
    };
    name.split('/').all(is_part)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(source: &str) -> bool {
        let known: Files = [("common/softmax.cuh", ""), ("../own.cuh", ""), ("table", "")]
            .map(|(name, text)| (name.to_owned(), text.to_owned()))
            .into();
        refusal(source, &known).is_some()
    }

    #[test]
    fn headers_are_allowed() {
        for source in [
            "",
            "#include \"softmax.cuh\"\n#include <mma.h>\n # include <cuda_fp16.h> // why\n",
            "#include \"../own.cuh\"\n#include \"table\"\n#include \"cuda_bf16.h\"",
            "#include <cuda/std/type_traits>\n#include <nv/target>",
            "#pragma unroll\n#define INCLUDE 1\n#define JOIN(a, b) a##b\n#if defined(includes)\n#endif",
            "// see section 3 of the manual\nint x = 'a'; const char* s = \"\\n\";",
        ] {
            assert!(!refused(source), "{source}: {:?}", refusal(source, &Files::new()));
        }
    }

    #[test]
    fn no_other_file_is_read() {
        for source in [
            "#include \"/etc/passwd\"",
            "#include </proc/self/environ>",
            "#include \"../../.ssh/id_rsa\"",
            "#include \"../secret.h\"",
            "#include \".env\"",
            "#include \"id_rsa\"",
            "#include <../x.h>",
            "#include \"a//b.h\"",
            "%:include \"/etc/passwd\"",
            "??=include \"/etc/passwd\"",
            "#/* */ include /* \n */ \"/etc/passwd\"",
            "#inc\\\nlude \"/etc/passwd\"",
            "#inc\\  \nlude \"/etc/passwd\"",
            "#include \\\r\n \"/etc/passwd\"",
            "/* */ #include \"/etc/passwd\"",
            "#define X \"/etc/passwd\"\n#include X",
            "#include",
            "#import \"/etc/passwd\"",
            "#include_next \"/etc/passwd\"",
            "#embed \"/etc/passwd\"",
            "#if __has_include(\"/etc/passwd\")\n#endif",
            "#\u{b}include \"/etc/passwd\"",
            "#\u{a0}include \"/etc/passwd\"",
            "const char* s = R\"(\n#include \"/etc/passwd\"\n)\";",
            "int\0 x;",
        ] {
            assert!(refused(source), "{source}");
        }
    }
}
