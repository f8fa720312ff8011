//! Shapes as people write them: `mission:causal`, `b2h32/8s1/8192d128`.

use std::{fmt, str::FromStr};

use crate::{
    Error,
    error::nearest,
    mask::{Alignment, Mask},
};

/// The largest head dimension a problem may have.
pub const MAX_HEAD_DIM: usize = 512;
/// Sequence lengths stay below this, so that positions and their sums fit 32-bit arithmetic in kernels.
pub const MAX_SEQUENCE: usize = 1 << 30;

/// The sizes that have names: (name, batch, heads, sequence, head dimension).
const NAMED: [(&str, usize, usize, usize, usize); 5] = [
    ("tiny", 1, 1, 32, 64),
    ("mission", 1, 8, 512, 64),
    ("small", 2, 8, 512, 64),
    ("long", 2, 8, 2048, 64),
    ("long128", 2, 8, 2048, 128),
];

/// The sizes of a problem and its mask. Always valid: it can only be made by [`Shape::new`] or by parsing.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    name: Option<&'static str>,
    sizes: Sizes,
    mask: Mask,
}

/// The sizes of a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sizes {
    /// Independent sequences.
    pub batch: usize,
    /// Query heads; a multiple of `heads_kv`.
    pub heads_q: usize,
    /// Key/value heads.
    pub heads_kv: usize,
    /// Queries per sequence.
    pub seq_q: usize,
    /// Keys per sequence.
    pub seq_kv: usize,
    /// Head dimension of queries and keys.
    pub dim_qk: usize,
    /// Head dimension of values and output.
    pub dim_v: usize,
}

impl Sizes {
    /// Equal lengths, equal heads, equal head dimensions.
    pub fn square(batch: usize, heads: usize, seq: usize, dim: usize) -> Self {
        Self { batch, heads_q: heads, heads_kv: heads, seq_q: seq, seq_kv: seq, dim_qk: dim, dim_v: dim }
    }
}

impl Shape {
    /// Checks every size.
    pub fn new(sizes: Sizes, mask: Mask) -> Result<Self, Error> {
        let Sizes { batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v } = sizes;
        let counts = [
            ("batch", batch, MAX_SEQUENCE, "from 1 to 2^30 - 1"),
            ("number of query heads", heads_q, MAX_SEQUENCE, "from 1 to 2^30 - 1"),
            ("number of key/value heads", heads_kv, MAX_SEQUENCE, "from 1 to 2^30 - 1"),
            ("query length", seq_q, MAX_SEQUENCE, "from 1 to 2^30 - 1"),
            ("key length", seq_kv, MAX_SEQUENCE, "from 1 to 2^30 - 1"),
            ("head dimension", dim_qk, MAX_HEAD_DIM + 1, "from 1 to 512"),
            ("value head dimension", dim_v, MAX_HEAD_DIM + 1, "from 1 to 512"),
        ];
        for (what, value, limit, allowed) in counts {
            if value == 0 || value >= limit {
                return Err(Error::Size { what, value, allowed });
            }
        }
        if !heads_q.is_multiple_of(heads_kv) {
            return Err(Error::Heads { heads_q, heads_kv });
        }
        Ok(Self { name: None, sizes, mask })
    }

    /// Parses a comma-separated list, such as `mission,long:causal`.
    pub fn parse_list(text: &str) -> Result<Vec<Self>, Error> {
        text.split(',').map(|part| part.trim().parse()).collect()
    }

    /// The sizes.
    pub fn sizes(&self) -> Sizes {
        self.sizes
    }

    /// The mask.
    pub fn mask(&self) -> Mask {
        self.mask
    }

    /// The same for one head alone.
    pub(crate) fn of_one_head(self) -> Self {
        Self { sizes: Sizes { batch: 1, heads_q: 1, heads_kv: 1, ..self.sizes }, ..self }
    }

    /// The same sizes under another mask.
    pub fn with_mask(self, mask: Mask) -> Self {
        Self { mask, ..self }
    }

    /// Names with a size of their own, smallest first.
    pub fn names() -> impl Iterator<Item = &'static str> {
        NAMED.iter().map(|named| named.0)
    }
}

impl PartialEq for Shape {
    /// A name is a way of writing, not a part of what is asked.
    fn eq(&self, other: &Self) -> bool {
        (self.sizes, self.mask) == (other.sizes, other.mask)
    }
}

impl Eq for Shape {}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Sizes { batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v } = self.sizes;
        if let Some(name) = self.name {
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
        match self.mask {
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
}

impl FromStr for Shape {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let fail = |why: String| Error::Shape { text: text.to_owned(), why };
        let mut parts = text.split(':');
        let base = parts.next().unwrap_or_default();
        let mut mask = Mask::Full;
        for suffix in parts {
            if mask != Mask::Full {
                return Err(fail(format!("`:{suffix}` is a second mask; give one")));
            }
            mask = parse_mask(suffix).map_err(fail)?;
        }
        if let Some(&(name, batch, heads, seq, dim)) = NAMED.iter().find(|named| named.0 == base) {
            return Ok(Self { name: Some(name), sizes: Sizes::square(batch, heads, seq, dim), mask });
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
        Self::new(parse_sizes(base).map_err(fail)?, mask)
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

fn parse_mask(suffix: &str) -> Result<Mask, String> {
    match suffix {
        "causal" => return Ok(Mask::Causal(Alignment::TopLeft)),
        "causal-br" => return Ok(Mask::Causal(Alignment::BottomRight)),
        _ => {}
    }
    let (kind, bounds) = suffix.split_once('=').ok_or_else(|| {
        let known = ["causal", "causal-br", "window=255/0"];
        match nearest(suffix, known) {
            Some(name) => format!("unknown suffix `:{suffix}`, did you mean `:{name}`?"),
            None => format!("unknown suffix `:{suffix}`"),
        }
    })?;
    let alignment = match kind {
        "window" => Alignment::BottomRight,
        "window-tl" => Alignment::TopLeft,
        _ => return Err(format!("unknown suffix `:{kind}=`, did you mean `:window=`?")),
    };
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
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn text_prints_back_the_same() {
        for text in [
            "tiny",
            "mission",
            "mission:causal",
            "long128:causal-br",
            "b2h8s2048d128",
            "b2h32/8s1/8192d128",
            "b1h1s7/9d192/128:window=255/0",
            "small:window=3/inf",
            "small:window-tl=inf/2",
        ] {
            assert_eq!(text.parse::<Shape>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn names_mean_their_sizes() {
        assert_eq!("mission".parse::<Shape>().unwrap(), "b1h8s512d64".parse::<Shape>().unwrap());
        let decode = "b2h32/8s1/8192d128".parse::<Shape>().unwrap().sizes();
        assert_eq!((decode.heads_q, decode.heads_kv, decode.seq_q, decode.seq_kv), (32, 8, 1, 8192));
    }

    #[test]
    fn errors_name_the_value_and_the_cure() {
        for (text, expected) in [
            ("misson", "did you mean `mission`"),
            ("huge", "no shape named `huge`"),
            ("b0h8s512d64", "batch is 0"),
            ("b1h8s512d513", "head dimension is 513, but must be from 1 to 512"),
            ("b1h8/3s512d64", "multiple"),
            ("b-1h8s512d64", "found `-1h8s512`"),
            ("b1h8s512", "`d` and a number are missing"),
            ("b1h8s512d64x", "`x` is left over"),
            ("b1h99999999999999999999s1d1", "too large"),
            ("b1/2h8s512d64", "the batch has one size"),
            ("mission:casual", "did you mean `:causal`"),
            ("mission:causal:causal", "second mask"),
            ("mission:window=3", "left/right"),
            ("mission:window=-1/0", "found `-1`"),
            ("", "no shape named ``"),
        ] {
            let message = text.parse::<Shape>().unwrap_err().to_string();
            assert!(message.contains(expected), "{text}: {message}");
        }
    }

    #[test]
    fn a_bad_entry_fails_the_whole_list() {
        assert_eq!(Shape::parse_list("mission, long:causal").unwrap().len(), 2);
        assert!(Shape::parse_list("mission,,long").is_err());
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "\\PC{0,40}") {
            if let Ok(shape) = text.parse::<Shape>() {
                prop_assert_eq!(shape.to_string().parse::<Shape>().unwrap(), shape);
            }
        }

        #[test]
        fn any_valid_shape_prints_and_reads_back(
            batch in 1usize..9, heads_kv in 1usize..9, group in 1usize..5,
            seq_q in 1usize..5000, seq_kv in 1usize..5000, dim_qk in 1usize..=512, dim_v in 1usize..=512,
        ) {
            let sizes = Sizes { batch, heads_q: heads_kv * group, heads_kv, seq_q, seq_kv, dim_qk, dim_v };
            let shape = Shape::new(sizes, Mask::Causal(Alignment::BottomRight)).unwrap();
            prop_assert_eq!(shape.to_string().parse::<Shape>().unwrap(), shape);
        }
    }
}
