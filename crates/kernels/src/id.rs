//! Which variant: the one place where `kernel[TUNABLE=value …]` is written and read.

use std::{fmt, str::FromStr};

use crate::{Assignment, Error};

/// A kernel and the values of its tunables, all of them or some.
///
/// ```
/// use evosdpa_kernels::VariantId;
///
/// let id: VariantId = "sdpa_v2c[STAGES=3 BLOCK_N=64]".parse()?;
/// assert_eq!((id.kernel.as_str(), id.tunables.value("STAGES")), ("sdpa_v2c", Some(3)));
/// assert_eq!(id.to_string(), "sdpa_v2c[BLOCK_N=64 STAGES=3]");
/// # Ok::<(), evosdpa_kernels::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VariantId {
    /// The kernel's name.
    pub kernel: String,
    /// The tunables that are set.
    pub tunables: Assignment,
}

impl VariantId {
    /// A kernel with these tunables set.
    pub fn new<'a>(kernel: &str, tunables: impl IntoIterator<Item = (&'a str, i64)>) -> Self {
        Self { kernel: kernel.to_owned(), tunables: tunables.into_iter().collect() }
    }

    /// The kernel in the name of a row, whatever stands behind it: records also name what is no variant.
    pub fn kernel_of(name: &str) -> &str {
        name.split_once(OPENS).map_or(name, |(kernel, _)| kernel)
    }
}

const OPENS: char = '[';
const CLOSES: char = ']';

/// `sdpa_v2b`, or `sdpa_v2b[BLOCK_M=64 STAGES=2]`.
impl fmt::Display for VariantId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.tunables.is_empty() {
            return f.write_str(&self.kernel);
        }
        write!(f, "{}{OPENS}{}{CLOSES}", self.kernel, self.tunables)
    }
}

impl FromStr for VariantId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let Some((kernel, rest)) = text.split_once(OPENS) else { return Ok(Self::new(text, [])) };
        let unreadable = || Error::VariantName { text: text.to_owned() };
        let pairs = rest.strip_suffix(CLOSES).ok_or_else(unreadable)?.split_whitespace().map(|pair| {
            let (tunable, value) = pair.split_once('=')?;
            Some((tunable, value.parse().ok()?))
        });
        let pairs: Vec<(&str, i64)> = pairs.collect::<Option<_>>().ok_or_else(unreadable)?;
        let id = Self::new(kernel, pairs.iter().copied());
        // Of two values for one tunable neither is meant.
        if kernel.is_empty() || id.tunables.iter().count() != pairs.len() {
            return Err(unreadable());
        }
        Ok(id)
    }
}

impl serde::Serialize for VariantId {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> serde::Deserialize<'de> for VariantId {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_read_as_it_is_written() {
        for text in ["sdpa_v1", "sdpa_v2c[BLOCK_N=64 STAGES=3]", "hopper_fwd[WAIT_AT=-1]"] {
            let id: VariantId = text.parse().unwrap();
            assert_eq!(id.to_string(), text);
            assert_eq!(VariantId::kernel_of(text), id.kernel);
        }
        // Order and spaces do not matter.
        let id: VariantId = "k[ B=2  A=1 ]".parse().unwrap();
        assert_eq!(id, VariantId::new("k", [("A", 1), ("B", 2)]));
        assert_eq!("k[]".parse::<VariantId>().unwrap(), VariantId::new("k", []));
    }

    #[test]
    fn other_names_are_refused_with_the_text() {
        for text in ["k[A=1", "k[A]", "k[A=x]", "k[A=1]b", "k[A=1 A=2]", "[A=1]", "k[A=1,B=2]"] {
            let message = text.parse::<VariantId>().unwrap_err().to_string();
            assert!(message.contains(&format!("`{text}`")) && message.contains("[STAGES=3"), "{message}");
        }
    }
}
