//! What `printf` makes of its format and values: C's, for the conversions, flags and sizes that CUDA knows.

/// Fields wider, and digits more than this are cut.
const MAX_WIDTH: usize = 256;
const MAX_DIGITS: usize = 64;
/// The digits of a number with a fraction, unless the format says.
const DEFAULT_DIGITS: usize = 6;
/// The bits of a double's fraction.
const FRACTION_BITS: u32 = 52;

/// The values of one `printf`, in order, as they lie in memory.
pub(super) trait Values {
    /// The next value, of 4 or 8 bytes.
    fn next(&mut self, bytes: u64) -> u64;
    /// The text at an address.
    fn string(&mut self, address: u64) -> String;
}

/// One conversion: `%-8.3f` without its `f`.
#[derive(Default)]
struct Field {
    is_left: bool,
    has_plus: bool,
    has_space: bool,
    is_alternate: bool,
    is_zero: bool,
    width: usize,
    digits: Option<usize>,
}

/// The text of a format and its values, and how many values it took.
pub(super) fn format(format: &str, values: &mut impl Values) -> (String, u32) {
    let (mut out, mut taken) = (String::new(), 0);
    let mut chars = format.chars().peekable();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let field = field(&mut chars, values, &mut taken);
        let mut size = (0, 0);
        while let Some(c) = chars.next_if(|c| "lhzjtL".contains(*c)) {
            size = if c == 'h' { (size.0, size.1 + 1) } else { (size.0 + 1, size.1) };
        }
        match chars.next() {
            None => break,
            Some('%') => out.push('%'),
            Some(kind) if "diouxXcpsfFeEgGaA".contains(kind) => {
                let bytes = if size.0 > 0 || "fFeEgGaAsp".contains(kind) { 8 } else { 4 };
                let raw = values.next(bytes);
                taken += 1;
                out.push_str(&field.text(kind, raw, bytes, size.1, values));
            }
            Some(other) => out.extend(['%', other]),
        }
    }
    (out, taken)
}

/// Flags, width and precision. A `*` takes its number from the values; a negative width is one to the left.
fn field(
    chars: &mut std::iter::Peekable<std::str::Chars<'_>>,
    values: &mut impl Values,
    taken: &mut u32,
) -> Field {
    let mut field = Field::default();
    while let Some(flag) = chars.next_if(|c| "-+ #0".contains(*c)) {
        match flag {
            '-' => field.is_left = true,
            '+' => field.has_plus = true,
            ' ' => field.has_space = true,
            '#' => field.is_alternate = true,
            _ => field.is_zero = true,
        }
    }
    let mut number = |chars: &mut std::iter::Peekable<std::str::Chars<'_>>| -> i64 {
        if chars.next_if_eq(&'*').is_some() {
            *taken += 1;
            return i64::from(values.next(4) as u32 as i32);
        }
        let mut number = 0i64;
        while let Some(digit) = chars.peek().and_then(|c| c.to_digit(10)) {
            chars.next();
            number = number.saturating_mul(10).saturating_add(i64::from(digit));
        }
        number
    };
    let width = number(chars);
    field.is_left |= width < 0;
    field.width = (width.unsigned_abs() as usize).min(MAX_WIDTH);
    if chars.next_if_eq(&'.').is_some() {
        field.digits = usize::try_from(number(chars)).ok();
    }
    field
}

impl Field {
    fn text(&self, kind: char, raw: u64, bytes: u64, halvings: u32, values: &mut impl Values) -> String {
        let unsigned = match (bytes, halvings) {
            (8, _) => raw,
            (_, 0) => raw & 0xffff_ffff,
            (_, 1) => raw & 0xffff,
            _ => raw & 0xff,
        };
        match kind {
            'd' | 'i' => {
                let unused = 64 - if bytes == 8 { 64 } else { 32u32 >> halvings.min(2) };
                let signed = (raw << unused) as i64 >> unused;
                self.integer(self.sign(signed < 0), "", signed.unsigned_abs().to_string())
            }
            'u' => self.integer("", "", unsigned.to_string()),
            'x' => self.integer(
                "",
                if self.is_alternate && raw != 0 { "0x" } else { "" },
                format!("{unsigned:x}"),
            ),
            'X' => self.integer(
                "",
                if self.is_alternate && raw != 0 { "0X" } else { "" },
                format!("{unsigned:X}"),
            ),
            'o' => self.integer("", if self.is_alternate { "0" } else { "" }, format!("{unsigned:o}")),
            'c' => self.padded("", char::from(raw as u8).to_string(), false),
            'p' if raw == 0 => self.padded("", "(nil)".to_owned(), false),
            'p' => self.padded("", format!("{raw:#x}"), false),
            's' => {
                let text = values.string(raw);
                let cut = text.chars().take(self.digits.unwrap_or(usize::MAX)).collect();
                self.padded("", cut, false)
            }
            _ => self.float(kind, f64::from_bits(raw)),
        }
    }

    fn sign(&self, is_negative: bool) -> &'static str {
        match (is_negative, self.has_plus, self.has_space) {
            (true, ..) => "-",
            (_, true, _) => "+",
            (.., true) => " ",
            _ => "",
        }
    }

    /// With a precision at least so many digits, and no zeros that fill the width.
    fn integer(&self, sign: &str, prefix: &str, digits: String) -> String {
        let least = self.digits.unwrap_or(1).min(MAX_WIDTH);
        let digits = if least == 0 && digits == "0" { String::new() } else { digits };
        let zeros = "0".repeat(least.saturating_sub(digits.len()));
        self.padded(&format!("{sign}{prefix}"), zeros + &digits, self.is_zero && self.digits.is_none())
    }

    fn float(&self, kind: char, value: f64) -> String {
        let sign = self.sign(value.is_sign_negative() && !value.is_nan());
        let is_upper = kind.is_ascii_uppercase();
        let case = |text: String| if is_upper { text.to_ascii_uppercase() } else { text };
        if !value.is_finite() {
            let name = if value.is_nan() { "nan" } else { "inf" };
            return self.padded(sign, case(name.to_owned()), false);
        }
        let (size, digits) = (value.abs(), self.digits.map(|digits| digits.min(MAX_DIGITS)));
        let text = match kind.to_ascii_lowercase() {
            'f' => self.point(format!("{size:.*}", digits.unwrap_or(DEFAULT_DIGITS))),
            'e' => self.exponential(size, digits.unwrap_or(DEFAULT_DIGITS)),
            'g' => self.shortest(size, digits.unwrap_or(DEFAULT_DIGITS).max(1)),
            _ => {
                return self.padded(
                    &format!("{sign}{}", case("0x".into())),
                    case(hexadecimal(size, digits)),
                    self.is_zero,
                );
            }
        };
        self.padded(sign, case(text), self.is_zero)
    }

    /// `#` keeps the point of a number without a fraction.
    fn point(&self, text: String) -> String {
        if self.is_alternate && !text.contains('.') { text + "." } else { text }
    }

    /// `1.500000e+03`.
    fn exponential(&self, size: f64, digits: usize) -> String {
        let (mantissa, exponent) = parts(size, digits);
        let sign = if exponent < 0 { '-' } else { '+' };
        format!("{}e{sign}{:02}", self.point(mantissa), exponent.abs())
    }

    /// `%g`: so many digits that count, as a fraction or with an exponent, without zeros at the end.
    fn shortest(&self, size: f64, digits: usize) -> String {
        let (_, exponent) = parts(size, digits - 1);
        let as_fraction = exponent >= -4 && exponent < digits as i32;
        let strip = |text: String| match text.contains('.') && !self.is_alternate {
            true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
            false => text,
        };
        if as_fraction {
            let behind = (digits as i32 - 1 - exponent) as usize;
            return strip(self.point(format!("{size:.behind$}")));
        }
        let text = self.exponential(size, digits - 1);
        match text.split_once('e') {
            Some((mantissa, exponent)) => format!("{}e{exponent}", strip(mantissa.to_owned())),
            None => text,
        }
    }

    fn padded(&self, sign: &str, text: String, with_zeros: bool) -> String {
        let missing = self.width.saturating_sub(sign.chars().count() + text.chars().count());
        match (self.is_left, with_zeros) {
            (true, _) => format!("{sign}{text}{}", " ".repeat(missing)),
            (_, true) => format!("{sign}{}{text}", "0".repeat(missing)),
            _ => format!("{}{sign}{text}", " ".repeat(missing)),
        }
    }
}

/// The mantissa with so many digits behind the point, and the power of ten.
fn parts(size: f64, digits: usize) -> (String, i32) {
    let text = format!("{size:.digits$e}");
    let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    (mantissa.to_owned(), exponent.parse().unwrap_or(0))
}

/// `1.8p+1` of 3.0, behind its `0x`.
fn hexadecimal(size: f64, digits: Option<usize>) -> String {
    let bits = size.to_bits();
    let (biased, mut fraction) = ((bits >> FRACTION_BITS) as i32, bits & ((1 << FRACTION_BITS) - 1));
    let mut whole = u64::from(biased > 0);
    let exponent = match (biased, fraction) {
        (0, 0) => 0,
        (0, _) => -1022,
        _ => biased - 1023,
    };
    let all = FRACTION_BITS as usize / 4;
    let shown = digits.unwrap_or(all).min(all);
    let dropped = 4 * (all - shown) as u32;
    let rest = fraction & ((1 << dropped) - 1);
    fraction >>= dropped;
    let half = (1u64 << dropped) / 2;
    let is_odd = (if shown == 0 { whole } else { fraction }) & 1 == 1;
    if dropped > 0 && (rest > half || rest == half && is_odd) {
        fraction += 1;
        whole += fraction >> (4 * shown);
        fraction &= (1 << (4 * shown)) - 1;
    }
    let mut text = if shown == 0 { String::new() } else { format!("{fraction:0shown$x}") };
    if digits.is_none() {
        text.truncate(text.trim_end_matches('0').len());
    }
    text.extend(std::iter::repeat_n('0', digits.unwrap_or(0).saturating_sub(all)));
    let point = if text.is_empty() { "" } else { "." };
    format!("{whole}{point}{text}p{}{}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
}

#[cfg(test)]
mod tests {
    use super::{Values, format};

    struct Words(Vec<u64>);

    impl Values for Words {
        fn next(&mut self, _: u64) -> u64 {
            self.0.remove(0)
        }

        fn string(&mut self, _: u64) -> String {
            "abcdef".to_owned()
        }
    }

    fn text(pattern: &str, values: &[u64]) -> String {
        format(pattern, &mut Words(values.to_vec())).0
    }

    /// Every right side is what glibc prints.
    #[test]
    fn conversions_are_those_of_c() {
        let minus = |value: i64| value as u64;
        for (pattern, values, want) in [
            (
                "%d|%+d|% d|%5d|%-5d|%05d",
                &[minus(-7), 7, 7, 42, 42, minus(-42)][..],
                "-7|+7| 7|   42|42   |-0042",
            ),
            ("%.3d|%5.3d|%05.3d|%.0d|", &[5, 5, 5, 0], "005|  005|  005||"),
            (
                "%u|%x|%X|%#x|%#X|%o|%#o|%08X",
                &[4_000_000_000, 255, 255, 255, 255, 8, 8, 48879],
                "4000000000|ff|FF|0xff|0XFF|10|010|0000BEEF",
            ),
            ("%hd|%hhd|%hu|%hhx", &[65_533, 511, 65_537, 511], "-3|-1|1|ff"),
            ("%lld|%llu|%zu", &[minus(-1), u64::MAX, 3], "-1|18446744073709551615|3"),
            ("%*d|%-*d|%*d|", &[6, 42, 6, 42, minus(-6), 42], "    42|42    |42    |"),
            ("%c%%%s|%.3s|%8s|%-8s|", &[122, 0, 0, 0, 0], "z%abcdef|abc|  abcdef|abcdef  |"),
            ("%p %p", &[16, 0], "0x10 (nil)"),
            ("%y", &[], "%y"),
        ] {
            assert_eq!(text(pattern, values), want, "{pattern}");
        }
    }

    #[test]
    fn numbers_with_fractions_are_those_of_c() {
        for (pattern, value, want) in [
            ("%f", 2.5, "2.500000"),
            ("%8.2f", -5.678, "   -5.68"),
            ("%+08.2f", 5.678, "+0005.68"),
            ("%.0f", 2.5, "2"),
            ("%#.0f", 2.0, "2."),
            ("%e", 12345.678, "1.234568e+04"),
            ("%.2E", 1e-7, "1.00E-07"),
            ("%e", 0.0, "0.000000e+00"),
            ("%e", 1e100, "1.000000e+100"),
            ("%g", 0.0001, "0.0001"),
            ("%g", 0.00001, "1e-05"),
            ("%g", 123456.0, "123456"),
            ("%g", 1234567.0, "1.23457e+06"),
            ("%g", 100.0, "100"),
            ("%#g", 1.5, "1.50000"),
            ("%.3G", 1e-10, "1E-10"),
            ("%g", 999999.5, "1e+06"),
            ("%a", 3.0, "0x1.8p+1"),
            ("%.1a", 1.97, "0x2.0p+0"),
            ("%A", 0.5, "0X1P-1"),
            ("%f", f64::INFINITY, "inf"),
            ("%5F", f64::NEG_INFINITY, " -INF"),
            ("%05f", f64::NAN, "  nan"),
            ("%g", -0.0, "-0"),
        ] {
            assert_eq!(text(pattern, &[f64::to_bits(value)]), want, "{pattern} of {value}");
        }
        assert_eq!(text("%.*f|%*.*f", &[2, 2.736f64.to_bits(), 8, 1, 2.736f64.to_bits()]), "2.74|     2.7");
    }

    #[test]
    fn hostile_formats_end() {
        let huge = format!("%{}d", "9".repeat(400));
        assert_eq!(text(&huge, &[1]).len(), super::MAX_WIDTH);
        assert!(text("%.999999999f", &[1f64.to_bits()]).len() < 80);
        assert_eq!(text("%", &[]), "");
        assert_eq!(text("%-+ #0", &[]), "");
    }
}
