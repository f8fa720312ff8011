//! Problems as people write them: `mission:causal`, `b2h32/8s1/8192d128:paged=16`.
//!
//! docs/problems.md has the table.

use std::{fmt, str::FromStr};

use crate::{
    Alignment, Blocks, Broadcast, Chunk, DType, Error, Granularity, Kinds, Mask, PageSize, Precision, Shape,
    Sizes, Softcap,
    error::nearest,
    shape::{MAX_SEQUENCE, NAMED},
};

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Sizes { batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v } = self.sizes();
        if let Some(name) = self.name() {
            f.write_str(name)?;
        } else {
            write!(f, "b{batch}")?;
            for (letter, first, second) in
                [('h', heads_q, heads_kv), ('s', seq_q, seq_kv), ('d', dim_qk, dim_v)]
            {
                write!(f, "{letter}{first}")?;
                if second != first {
                    write!(f, "/{second}")?;
                }
            }
        }
        write_mask(f, self.mask())?;
        write_kinds(f, self.kinds())
    }
}

fn write_mask(f: &mut fmt::Formatter<'_>, mask: Mask) -> fmt::Result {
    match mask {
        Mask::Full => Ok(()),
        Mask::Causal(Alignment::TopLeft) => f.write_str(":causal"),
        Mask::Causal(Alignment::BottomRight) => f.write_str(":causal-br"),
        Mask::Window { left, right, alignment } => {
            let side = |bound: Option<usize>| bound.map_or("inf".to_owned(), |n| n.to_string());
            let suffix = match alignment {
                Alignment::TopLeft => "window-tl",
                Alignment::BottomRight => "window",
            };
            write!(f, ":{suffix}={}/{}", side(left), side(right))
        }
    }
}

fn write_kinds(f: &mut fmt::Formatter<'_>, kinds: Kinds) -> fmt::Result {
    let Kinds { lengths, scores, types, precision, batch_invariant } = kinds;
    match (lengths.packed_queries, lengths.packed_keys) {
        (true, true) => f.write_str(":varlen")?,
        (true, false) => f.write_str(":varlen=q")?,
        (false, true) => f.write_str(":varlen=kv")?,
        (false, false) => {}
    }
    if lengths.used {
        f.write_str(":used")?;
    }
    for (suffix, asked) in
        [("used-q", lengths.used_queries), ("leftpad", lengths.left_padded), ("indexed", lengths.indexed)]
    {
        if asked {
            write!(f, ":{suffix}")?;
        }
    }
    if let Some(page) = lengths.page {
        write!(f, ":paged={}", page.tokens())?;
    }
    if let Some(cap) = scores.softcap {
        write!(f, ":softcap={}", cap.value())?;
    }
    if scores.alibi {
        f.write_str(":alibi")?;
    }
    for (suffix, broadcast) in [("bias", scores.bias), ("mask", scores.mask)] {
        match broadcast {
            Some(Broadcast::SHARED) => write!(f, ":{suffix}")?,
            Some(broadcast) => write!(f, ":{suffix}={}", broadcast.letters())?,
            None => {}
        }
    }
    if let Some(blocks) = scores.blocks {
        let letter = |own: bool, letter: &'static str| if own { letter } else { "" };
        let (b, h) = (letter(blocks.batch, "b"), letter(blocks.heads, "h"));
        write!(f, ":blocks={b}{h}{}", blocks.queries())?;
        if blocks.keys() != blocks.queries() {
            write!(f, "/{}", blocks.keys())?;
        }
    }
    if let Some(chunk) = scores.chunk {
        write!(f, ":chunk={}", chunk.keys())?;
    }
    if scores.sinks {
        f.write_str(":sinks")?;
    }
    if let Some(kv) = types.kv {
        write!(f, ":kv={kv}")?;
    }
    if let Some(output) = types.output {
        write!(f, ":o={}", output.dtype())?;
    }
    if types.scales != Granularity::default() {
        write!(f, ":scales={}", types.scales)?;
    }
    if precision == Precision::High {
        f.write_str(":precise")?;
    }
    if batch_invariant { f.write_str(":invariant") } else { Ok(()) }
}

impl FromStr for Shape {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let fail = |why: String| Error::Shape { text: text.to_owned(), why };
        let mut parts = text.split(':');
        let base = parts.next().unwrap_or_default();
        let mut suffixes = Suffixes::default();
        for suffix in parts {
            suffixes.read(suffix).map_err(fail)?;
        }
        let Suffixes { mask, kinds, .. } = suffixes;
        let mask = mask.unwrap_or(Mask::Full);
        if let Some(&(name, batch, heads, seq, dim)) = NAMED.iter().find(|named| named.0 == base) {
            let sizes = Sizes::square(batch, heads, seq, dim);
            return Ok(Self::new(sizes, mask)?.with_kinds(kinds)?.named(name));
        }
        // Sizes start with `b` and a number; anything else was meant as a name.
        let looks_like_sizes =
            base.starts_with('b') && base[1..].starts_with(|c: char| c.is_ascii_digit() || c == '-');
        if !looks_like_sizes {
            return Err(match nearest(base, Self::names()) {
                Some(name) => fail(format!("there is no shape named `{base}`, did you mean `{name}`?")),
                None => fail(format!("there is no shape named `{base}`")),
            });
        }
        Self::new(parse_sizes(base).map_err(fail)?, mask)?.with_kinds(kinds)
    }
}

/// Reads `b2h32/8s1/8192d192/128`.
fn parse_sizes(text: &str) -> Result<Sizes, String> {
    let mut rest = text;
    let mut field = |letter: char| -> Result<(usize, Option<usize>), String> {
        rest = rest.strip_prefix(letter).ok_or_else(|| match rest.chars().next() {
            Some(found) => format!("expected `{letter}` and a number, found `{found}`"),
            None => format!("`{letter}` and a number are missing at the end"),
        })?;
        let first = take_number(&mut rest, letter)?;
        let second = match rest.strip_prefix('/') {
            Some(after) => {
                rest = after;
                Some(take_number(&mut rest, letter)?)
            }
            None => None,
        };
        Ok((first, second))
    };
    let (batch, extra) = field('b')?;
    if let Some(extra) = extra {
        return Err(format!("the batch has one size, found `/{extra}`"));
    }
    let (heads_q, heads_kv) = field('h')?;
    let (seq_q, seq_kv) = field('s')?;
    let (dim_qk, dim_v) = field('d')?;
    if !rest.is_empty() {
        return Err(format!("`{rest}` is left over at the end"));
    }
    Ok(Sizes {
        batch,
        heads_q,
        heads_kv: heads_kv.unwrap_or(heads_q),
        seq_q,
        seq_kv: seq_kv.unwrap_or(seq_q),
        dim_qk,
        dim_v: dim_v.unwrap_or(dim_qk),
    })
}

fn take_number(rest: &mut &str, after: char) -> Result<usize, String> {
    let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    let (number, tail) = rest.split_at(digits);
    if number.is_empty() {
        let found: String = rest.chars().take(8).collect();
        return Err(format!("expected a positive whole number after `{after}`, found `{found}`"));
    }
    *rest = tail;
    number.parse().map_err(|_| format!("{number} after `{after}` is too large"))
}

/// The suffixes of a shape, as far as they are read.
#[derive(Default)]
struct Suffixes<'a> {
    mask: Option<Mask>,
    kinds: Kinds,
    /// The names read so far: each may come once.
    seen: Vec<&'a str>,
}

/// Every suffix, with an example of its value: what errors suggest from.
const SUFFIXES: [&str; 23] = [
    "causal",
    "causal-br",
    "window=255/0",
    "window-tl=255/0",
    "varlen",
    "varlen=q",
    "used",
    "used-q",
    "leftpad",
    "indexed",
    "paged=16",
    "softcap=30",
    "alibi",
    "bias=h",
    "mask=b",
    "blocks=128",
    "chunk=8192",
    "sinks",
    "kv=e4m3",
    "o=f32",
    "scales=token",
    "precise",
    "invariant",
];

impl<'a> Suffixes<'a> {
    fn read(&mut self, suffix: &'a str) -> Result<(), String> {
        let (name, value) =
            suffix.split_once('=').map_or((suffix, None), |(name, value)| (name, Some(value)));
        if self.seen.contains(&name) {
            return Err(format!("`:{name}` is there twice; give it once"));
        }
        self.seen.push(name);
        let Kinds { lengths, scores, types, precision, batch_invariant } = &mut self.kinds;
        match (name, value) {
            ("causal", None) => self.set_mask(suffix, Mask::Causal(Alignment::TopLeft))?,
            ("causal-br", None) => self.set_mask(suffix, Mask::Causal(Alignment::BottomRight))?,
            ("window", Some(bounds)) => {
                self.set_mask(suffix, parse_window(bounds, Alignment::BottomRight)?)?;
            }
            ("window-tl", Some(bounds)) => {
                self.set_mask(suffix, parse_window(bounds, Alignment::TopLeft)?)?;
            }
            ("varlen", what) => {
                (lengths.packed_queries, lengths.packed_keys) = match what {
                    None => (true, true),
                    Some("q") => (true, false),
                    Some("kv") => (false, true),
                    Some(other) => {
                        return Err(format!(
                            "`:varlen=` packs `q` or `kv`, found `{other}`; `:varlen` packs both"
                        ));
                    }
                }
            }
            ("used", None) => lengths.used = true,
            ("used-q", None) => lengths.used_queries = true,
            ("leftpad", None) => lengths.left_padded = true,
            ("indexed", None) => lengths.indexed = true,
            ("paged", Some(tokens)) => {
                lengths.page = Some(PageSize::new(number(name, tokens)?).map_err(|e| e.to_string())?);
            }
            ("softcap", Some(cap)) => {
                let value: f32 = cap.parse().map_err(|_| format!("a softcap is a number, found `{cap}`"))?;
                scores.softcap = Some(Softcap::new(value).map_err(|e| e.to_string())?);
            }
            ("alibi", None) => scores.alibi = true,
            ("bias", value) => scores.bias = Some(broadcast(name, value)?),
            ("mask", value) => scores.mask = Some(broadcast(name, value)?),
            ("blocks", Some(value)) => scores.blocks = Some(blocks(name, value)?),
            ("chunk", Some(keys)) => {
                scores.chunk = Some(Chunk::new(number(name, keys)?).map_err(|e| e.to_string())?);
            }
            ("sinks", None) => scores.sinks = true,
            ("kv", Some(dtype)) => types.kv = Some(dtype.parse().map_err(|e: Error| e.to_string())?),
            ("o", Some(dtype)) => {
                let given: DType = dtype.parse().map_err(|e: Error| e.to_string())?;
                let float = given.float().ok_or_else(|| {
                    format!("an output is f32, f16 or bf16, found `{given}`: codes need a scale that nobody knows yet")
                })?;
                types.output = Some(float);
            }
            ("scales", Some(reach)) => types.scales = reach.parse().map_err(|e: Error| e.to_string())?,
            ("precise", None) => *precision = Precision::High,
            ("invariant", None) => *batch_invariant = true,
            _ => return Err(unknown_suffix(suffix, name)),
        }
        Ok(())
    }

    fn set_mask(&mut self, suffix: &str, mask: Mask) -> Result<(), String> {
        match self.mask.replace(mask) {
            None => Ok(()),
            Some(_) => Err(format!("`:{suffix}` is a second mask; give one")),
        }
    }
}

fn unknown_suffix(suffix: &str, name: &str) -> String {
    let named = |name: &str| SUFFIXES.into_iter().find(|known| known.split('=').next() == Some(name));
    // With a value of its own, as `:pagd=3`, it is near to no suffix as a whole.
    let near = || {
        let names = SUFFIXES.into_iter().filter_map(|known| known.split('=').next());
        named(&nearest(name, names)?).map(str::to_owned)
    };
    match named(name).map(str::to_owned).or_else(|| nearest(suffix, SUFFIXES)).or_else(near) {
        Some(known) => format!("unknown suffix `:{suffix}`, did you mean `:{known}`?"),
        None => format!("unknown suffix `:{suffix}`"),
    }
}

fn number(name: &str, text: &str) -> Result<usize, String> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    if !digits {
        return Err(format!("`:{name}=` takes a positive whole number, found `{text}`"));
    }
    text.parse().map_err(|_| format!("`:{name}={text}`: the number is too large"))
}

fn broadcast(name: &str, letters: Option<&str>) -> Result<Broadcast, String> {
    let Some(letters) = letters else { return Ok(Broadcast::SHARED) };
    Broadcast::from_letters(letters).ok_or_else(|| {
        format!(
            "`:{name}=` says what has its own: `b` each sequence, `h` each head, both as `bh`, and `k` at the end when all \
             queries share a row; found `{letters}`"
        )
    })
}

/// Reads `128`, `h128/64`.
fn blocks(name: &str, value: &str) -> Result<Blocks, String> {
    let (batch, rest) = value.strip_prefix('b').map_or((false, value), |rest| (true, rest));
    let (heads, rest) = rest.strip_prefix('h').map_or((false, rest), |rest| (true, rest));
    let (queries, keys) = rest.split_once('/').unwrap_or((rest, rest));
    Blocks::new(number(name, queries)?, number(name, keys)?, batch, heads).map_err(|e| e.to_string())
}

/// Reads `255/0`.
fn parse_window(bounds: &str, alignment: Alignment) -> Result<Mask, String> {
    let (left, right) =
        bounds.split_once('/').ok_or_else(|| format!("a window is `left/right`, found `{bounds}`"))?;
    let side = |text: &str| -> Result<Option<usize>, String> {
        if text == "inf" {
            return Ok(None);
        }
        let refuse = || format!("a window's side is a number below 2^30 or `inf`, found `{text}`");
        match text.parse::<usize>() {
            Ok(n) if n < MAX_SEQUENCE && text.bytes().all(|b| b.is_ascii_digit()) => Ok(Some(n)),
            _ => Err(refuse()),
        }
    };
    Ok(Mask::Window { left: side(left)?, right: side(right)?, alignment })
}

impl serde::Serialize for Shape {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> serde::Deserialize<'de> for Shape {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests;
