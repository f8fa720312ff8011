//! Numbers of a named type: text to bytes and back.

use anyhow::{Context, Result, bail};
use std::fmt::Display;
use std::str::FromStr;

/// The types that values are written in.
pub(crate) const TYPES: &str = "i8, i16, i32, i64, u8, u16, u32, u64, f16, bf16, f32, f64";

/// The bytes of one or more numbers, `1,2,3`; `None` if `kind` is no type.
pub(crate) fn parse(kind: &str, text: &str) -> Option<Result<Vec<u8>>> {
    Some(match kind {
        "i8" => all(kind, text, |v: i8| v.to_le_bytes().to_vec()),
        "i16" => all(kind, text, |v: i16| v.to_le_bytes().to_vec()),
        "i32" => all(kind, text, |v: i32| v.to_le_bytes().to_vec()),
        "i64" => all(kind, text, |v: i64| v.to_le_bytes().to_vec()),
        "u8" => all(kind, text, |v: u8| v.to_le_bytes().to_vec()),
        "u16" => all(kind, text, |v: u16| v.to_le_bytes().to_vec()),
        "u32" => all(kind, text, |v: u32| v.to_le_bytes().to_vec()),
        "u64" => all(kind, text, |v: u64| v.to_le_bytes().to_vec()),
        "f16" => all(kind, text, |v: f32| half::f16::from_f32(v).to_le_bytes().to_vec()),
        "bf16" => all(kind, text, |v: f32| half::bf16::from_f32(v).to_le_bytes().to_vec()),
        "f32" => all(kind, text, |v: f32| v.to_le_bytes().to_vec()),
        "f64" => all(kind, text, |v: f64| v.to_le_bytes().to_vec()),
        _ => return None,
    })
}

fn all<T: FromStr>(kind: &str, text: &str, bytes: impl Fn(T) -> Vec<u8>) -> Result<Vec<u8>> {
    let mut out = Vec::new();
    for part in text.split(',') {
        let value = part.trim().parse::<T>().ok();
        let what = if kind.starts_with(['f', 'b']) { "number" } else { "whole number that fits" };
        out.extend(bytes(value.with_context(|| format!("`{part}` is no {what} for {kind}"))?));
    }
    Ok(out)
}

/// The numbers that bytes hold, as JSON has them: numbers, or text where JSON has none (NaN, infinities).
pub(crate) fn show(kind: &str, bytes: &[u8]) -> Result<Vec<serde_json::Value>> {
    fn each<const N: usize, T>(bytes: &[u8], from: impl Fn([u8; N]) -> T) -> Vec<serde_json::Value>
    where
        T: serde::Serialize + Display,
    {
        let words = bytes.chunks_exact(N).filter_map(|c| c.try_into().ok()).map(from);
        let shown = |v: T| match serde_json::to_value(&v) {
            Ok(serde_json::Value::Null) | Err(_) => v.to_string().into(),
            Ok(value) => value,
        };
        words.map(shown).collect()
    }
    let width = match kind {
        "i8" | "u8" => 1,
        "i16" | "u16" | "f16" | "bf16" => 2,
        "i32" | "u32" | "f32" => 4,
        _ => 8,
    };
    if !bytes.len().is_multiple_of(width) {
        bail!("{} bytes are no whole number of {kind}", bytes.len());
    }
    Ok(match kind {
        "i8" => each(bytes, i8::from_le_bytes),
        "i16" => each(bytes, i16::from_le_bytes),
        "i32" => each(bytes, i32::from_le_bytes),
        "i64" => each(bytes, i64::from_le_bytes),
        "u8" => each(bytes, u8::from_le_bytes),
        "u16" => each(bytes, u16::from_le_bytes),
        "u32" => each(bytes, u32::from_le_bytes),
        "u64" => each(bytes, u64::from_le_bytes),
        "f16" => each(bytes, |b| half::f16::from_le_bytes(b).to_f32()),
        "bf16" => each(bytes, |b| half::bf16::from_le_bytes(b).to_f32()),
        "f32" => each(bytes, f32::from_le_bytes),
        "f64" => each(bytes, f64::from_le_bytes),
        other => bail!("`{other}` is no type; there are {TYPES}"),
    })
}

/// Bytes in hexadecimal.
pub(crate) fn hex(text: &str) -> Result<Vec<u8>> {
    if !text.is_ascii() || !text.len().is_multiple_of(2) {
        bail!("`{text}`: an even number of hexadecimal digits is needed, such as bytes:00ff");
    }
    let byte = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).ok();
    let bytes: Option<Vec<u8>> = (0..text.len()).step_by(2).map(byte).collect();
    bytes.with_context(|| format!("`{text}`: only hexadecimal digits are possible, such as bytes:00ff"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_go_there_and_back() {
        for (kind, text, shown) in [
            ("i8", "-1,2", "[-1,2]"),
            ("u64", "18446744073709551615", "[18446744073709551615]"),
            ("f16", "0.5", "[0.5]"),
            ("bf16", "-2", "[-2.0]"),
            ("f32", "1.5,nan,inf", "[1.5,\"NaN\",\"inf\"]"),
            ("f64", "1e300", "[1e+300]"),
        ] {
            let bytes = parse(kind, text).unwrap().unwrap();
            assert_eq!(serde_json::to_string(&show(kind, &bytes).unwrap()).unwrap(), shown, "{kind}");
        }
        assert!(parse("i128", "1").is_none());
        assert!(parse("u8", "256").unwrap().unwrap_err().to_string().contains("`256`"));
        assert!(show("f32", &[0; 3]).is_err() && show("x", &[0; 8]).is_err());
        assert_eq!(hex("00fF").unwrap(), [0, 255]);
    }
}
