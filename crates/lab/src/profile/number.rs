//! Numbers as profilers print them: with thousands separators, in the locale of whoever ran the profiler, with units.

/// Which of `.` and `,` separates thousands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Locale {
    /// `1,234.5`
    English,
    /// `1.234,5`
    European,
}

/// Whether a cell looks like a number at all.
pub(super) fn looks_numeric(text: &str) -> bool {
    let text = text.trim();
    text.bytes().any(|c| c.is_ascii_digit())
        && text.bytes().all(|c| c.is_ascii_digit() || matches!(c, b'.' | b',' | b'+' | b'-' | b'e' | b'E'))
}

/// The locale that a number gives away, if it does: `1,234` may be either.
pub(super) fn witness(text: &str) -> Option<Locale> {
    let text = text.trim().trim_start_matches(['+', '-']);
    let mantissa = text.split(['e', 'E']).next().unwrap_or(text);
    let (dots, commas) = (mantissa.matches('.').count(), mantissa.matches(',').count());
    match (dots, commas) {
        (0, 0) => None,
        (1.., 1..) if mantissa.rfind('.') > mantissa.rfind(',') => Some(Locale::English),
        (1.., 1..) => Some(Locale::European),
        (0, 2..) => Some(Locale::English),
        (2.., 0) => Some(Locale::European),
        (1, 0) => decimal_only(mantissa, '.').then_some(Locale::English),
        (0, 1) => decimal_only(mantissa, ',').then_some(Locale::European),
    }
}

/// Whether a single separator can only be the decimal one: not exactly three digits after it, or none, a zero or more than
/// three before it.
fn decimal_only(mantissa: &str, separator: char) -> bool {
    let Some((whole, fraction)) = mantissa.split_once(separator) else { return false };
    fraction.len() != 3 || whole.is_empty() || whole == "0" || whole.len() > 3
}

/// Reads a number; `None` for `n/a`, an empty cell and what is no number.
pub(super) fn parse(text: &str, locale: Locale) -> Option<f64> {
    if !looks_numeric(text) {
        return None;
    }
    let plain = match locale {
        Locale::English => text.trim().replace(',', ""),
        Locale::European => text.trim().replace('.', "").replace(',', "."),
    };
    plain.parse().ok()
}

/// What a value in this unit is multiplied with to be in the base unit: `Kbyte` 1e3, `us` 1e-6, `cycle/nsecond` 1e9.
/// Units without a prefix that is known here (inst, sector, warp, %) have a factor of one.
pub(super) fn unit_factor(unit: &str) -> f64 {
    let mut parts = unit.split('/');
    let numerator = parts.next().map_or(1.0, |part| part_factor(part.trim()));
    parts.fold(numerator, |factor, part| factor / part_factor(part.trim()))
}

fn part_factor(part: &str) -> f64 {
    match part {
        "ns" | "nsecond" => 1e-9,
        "us" | "usecond" => 1e-6,
        "ms" | "msecond" => 1e-3,
        _ => {
            let prefixed = ["byte", "hz", "Hz", "bit"].iter().find_map(|base| part.strip_suffix(base));
            match prefixed {
                Some("K" | "k") => 1e3,
                Some("M") => 1e6,
                Some("G") => 1e9,
                Some("T") => 1e12,
                _ => 1.0,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn separators_give_the_locale_away_or_do_not() {
        for text in ["1,215,000,000.00", "1,234.5", "12.5", "0.123", "1234.567", "1,234,567"] {
            assert_eq!(witness(text), Some(Locale::English), "{text}");
        }
        for text in ["27.595.520", "1.234,5", "12,5", "0,123", "-3,25"] {
            assert_eq!(witness(text), Some(Locale::European), "{text}");
        }
        for text in ["1,234", "1.234", "17", "n/a", ""] {
            assert_eq!(witness(text), None, "{text}");
        }
    }

    #[test]
    fn numbers_are_read_in_their_locale() {
        assert_eq!(parse("1,215,000,000.00", Locale::English), Some(1.215e9));
        assert_eq!(parse("27.595.520", Locale::European), Some(27_595_520.0));
        assert_eq!(parse("12,5", Locale::European), Some(12.5));
        assert_eq!(parse(" 1.5e-3 ", Locale::English), Some(0.0015));
        for text in ["n/a", "", "PolicySpread", "(256, 1, 1)", "-", "no data"] {
            assert_eq!(parse(text, Locale::English), None, "{text}");
        }
    }

    #[test]
    fn units_are_brought_to_their_base() {
        for (unit, factor) in [
            ("%", 1.0),
            ("byte", 1.0),
            ("Kbyte/block", 1e3),
            ("us", 1e-6),
            ("nsecond", 1e-9),
            ("Gbyte/s", 1e9),
            ("Tbyte/second", 1e12),
            ("cycle/nsecond", 1e9),
            ("Ghz", 1e9),
            ("register/thread", 1.0),
        ] {
            let got = unit_factor(unit);
            assert!((got / factor - 1.0).abs() < 1e-12, "{unit}: {got}");
        }
    }
}
