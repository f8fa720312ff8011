//! Names as the source has them: the last part of what a C++ compiler makes of them.

/// The variable's own name in a mangled one: `tile` of `_ZZ4kernE4tile`.
pub(super) fn source_name(name: &str) -> &str {
    if let Some((_, own)) = name.rsplit_once("_non_const_") {
        return own;
    }
    if !name.starts_with("_Z") {
        return name;
    }
    // A local variable of a scope entered more than once carries a number: `tile_0`.
    let numbered = name.trim_end_matches('_').trim_end_matches(|c: char| c.is_ascii_digit());
    let whole = [name, numbered.trim_end_matches('_')];
    whole.into_iter().find_map(last_part).unwrap_or(name)
}

/// The identifier that ends the name, behind its length.
fn last_part(name: &str) -> Option<&str> {
    let bytes = name.as_bytes();
    (0..bytes.len()).find_map(|at| {
        let is_first = bytes[at].is_ascii_digit() && (at == 0 || !bytes[at - 1].is_ascii_digit());
        let is_start = is_first && !is_template_value(&bytes[..at]);
        let rest = is_start.then(|| name.get(at..)).flatten()?;
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let length: usize = rest[..digits].parse().ok()?;
        (rest.len() - digits == length && length > 0).then(|| &rest[digits..])
    })
}

/// Whether the number behind this is the value of a template argument, as in `Li14E` and `Lin14E`.
fn is_template_value(before: &[u8]) -> bool {
    let before = before.strip_suffix(b"n").unwrap_or(before);
    matches!(before, [.., b'L', kind] if kind.is_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::source_name;

    #[test]
    fn the_last_part_is_the_name() {
        for (mangled, own) in [
            ("_ZZ15missing_barrierE4tile", "tile"),
            ("_ZZ4kernPfE4tile_0", "tile"),
            ("_ZZN2ns4kernIfEEvPT_E6buffer", "buffer"),
            ("_ZN2ns5tableE", "_ZN2ns5tableE"),
            // 14 bytes follow the template argument 14, too.
            ("_ZZ4ringILi14EEvPKfPfiE3res", "res"),
            ("_ZZ4ringILin14EEvPKfPfiE3res", "res"),
            ("_ZZ4kernvE5x3abc", "x3abc"),
            ("tile", "tile"),
            ("_Z", "_Z"),
            ("_Z99999999999999999999x", "_Z99999999999999999999x"),
            ("__cuda_local_var_41_33_non_const_tile", "tile"),
        ] {
            assert_eq!(source_name(mangled), own, "{mangled}");
        }
    }
}
