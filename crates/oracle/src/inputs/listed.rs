//! Lengths of sequences as a list: `2x2048,60x1`, or `63x100-534` for 63 of them from 100 to 534.

use std::{fmt, str::FromStr};

use evosdpa_core::Error;

/// The most parts of a list.
const PARTS_MAX: usize = 8;

/// Lengths of sequences, in order. A small value, as arrangements are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Listed {
    /// Those without sequences stand behind the others.
    parts: [Part; PARTS_MAX],
}

/// So many sequences, the first and the last of these lengths, the others evenly between.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Part {
    count: u32,
    first: u32,
    last: u32,
}

impl Part {
    fn length(self, at: usize) -> usize {
        let (first, last, steps) = (u64::from(self.first), u64::from(self.last), u64::from(self.count) - 1);
        let between = |distance: u64| (distance * at as u64).checked_div(steps).unwrap_or(0);
        let length =
            if first <= last { first + between(last - first) } else { first - between(first - last) };
        length as usize
    }
}

impl Listed {
    fn parts(&self) -> impl Iterator<Item = Part> + '_ {
        self.parts.iter().copied().take_while(|part| part.count > 0)
    }

    /// How many sequences there are.
    pub fn count(&self) -> usize {
        self.parts().map(|part| part.count as usize).sum()
    }

    /// The longest of them.
    pub fn longest(&self) -> usize {
        self.parts().map(|part| part.first.max(part.last) as usize).max().unwrap_or(0)
    }

    /// The length of a sequence; 0 behind the last.
    pub fn length(&self, sequence: usize) -> usize {
        let mut at = sequence;
        for part in self.parts() {
            if at < part.count as usize {
                return part.length(at);
            }
            at -= part.count as usize;
        }
        0
    }
}

impl fmt::Display for Listed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, Part { count, first, last }) in self.parts().enumerate() {
            let comma = if i == 0 { "" } else { "," };
            match (count, first == last) {
                (1, true) => write!(f, "{comma}{first}")?,
                (_, true) => write!(f, "{comma}{count}x{first}")?,
                (_, false) => write!(f, "{comma}{count}x{first}-{last}")?,
            }
        }
        Ok(())
    }
}

impl FromStr for Listed {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let wrong = |part: &str, why: &'static str| Error::LengthList { part: part.to_owned(), why };
        let mut listed = Self { parts: [Part::default(); PARTS_MAX] };
        for (at, part) in text.split(',').enumerate() {
            let place = listed.parts.get_mut(at).ok_or_else(|| wrong(part, "a list has at most 8 parts"))?;
            let number = |digits: &str| match digits.parse::<u32>() {
                Ok(number) if number <= i32::MAX as u32 => Ok(number),
                _ => Err(wrong(part, "write a length, COUNTxLENGTH or COUNTxFIRST-LAST, in whole numbers")),
            };
            let (count, lengths) = part.split_once('x').map_or((None, part), |(count, of)| (Some(count), of));
            let (first, last) = lengths.split_once('-').unwrap_or((lengths, lengths));
            let count = count.map_or(Ok(1), number)?;
            *place = Part { count, first: number(first)?, last: number(last)? };
            match (place.count, place.first == place.last) {
                (0, _) => return Err(wrong(part, "there must be at least one sequence")),
                (1, false) => return Err(wrong(part, "one sequence has one length")),
                _ => {}
            }
        }
        Ok(listed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lengths(text: &str) -> Vec<usize> {
        let listed: Listed = text.parse().unwrap();
        assert_eq!(listed.to_string(), text);
        (0..listed.count()).map(|sequence| listed.length(sequence)).collect()
    }

    #[test]
    fn parts_are_repeated_and_spread() {
        assert_eq!(lengths("3x7"), [7, 7, 7]);
        assert_eq!(lengths("16384,4x100-103,0"), [16384, 100, 101, 102, 103, 0]);
        assert_eq!(lengths("3x9-4"), [9, 7, 4]);
        let mix = lengths("16384,63x100-534");
        assert_eq!((mix.len(), mix[1], mix[2], mix[63]), (64, 100, 107, 534));
        assert_eq!("2x5,1x9".parse::<Listed>().unwrap().longest(), 9);
        assert_eq!("2x5".parse::<Listed>().unwrap().length(2), 0);
    }

    #[test]
    fn what_is_no_list_is_refused_with_the_part() {
        for (text, expected) in [
            ("5,,6", "``: write a length"),
            ("5,0x3", "`0x3`: there must be at least one"),
            ("3-4", "`3-4`: one sequence has one length"),
            ("2x", "`2x`: write a length"),
            ("2x3-", "`2x3-`: write a length"),
            ("4294967295", "`4294967295`: write a length"),
            ("2x-5", "`2x-5`: write a length"),
            ("1,2,3,4,5,6,7,8,9", "`9`: a list has at most 8 parts"),
        ] {
            let error = text.parse::<Listed>().unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
