//! PTX text to tokens.

use crate::error::{Error, Result};

/// One token; text is borrowed from the source.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Token<'a> {
    /// An identifier, register, label or mnemonic: `add`, `%r1`, `$L__BB0_2`.
    Word(&'a str),
    /// A word after a dot, without the dot: `global`, `shared::cta`, `m16n8k16`.
    Dot(&'a str),
    /// An integer, two's complement in 64 bits.
    Int(u64),
    /// `0f…`: the bits of an f32.
    F32(u32),
    /// `0d…` or a decimal fraction: the bits of an f64.
    F64(u64),
    /// A string literal without its quotes.
    Str(&'a str),
    /// Any other single character.
    Punct(char),
    /// End of the text.
    End,
}

/// A token and the line it starts on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lexeme<'a> {
    pub(crate) token: Token<'a>,
    pub(crate) line: u32,
}

/// Splits the whole text; the last lexeme is always [`Token::End`].
pub(crate) fn tokens(text: &str) -> Result<Vec<Lexeme<'_>>> {
    let mut lexer = Lexer { text, bytes: text.as_bytes(), at: 0, line: 1 };
    let mut out = Vec::with_capacity(text.len() / 6 + 1);
    loop {
        lexer.skip_blank()?;
        let line = lexer.line;
        let token = lexer.token()?;
        out.push(Lexeme { token, line });
        if token == Token::End {
            return Ok(out);
        }
    }
}

struct Lexer<'a> {
    text: &'a str,
    bytes: &'a [u8],
    at: usize,
    line: u32,
}

fn starts_word(b: u8) -> bool {
    b.is_ascii_alphabetic() || matches!(b, b'_' | b'$' | b'%')
}

fn in_word(b: u8) -> bool {
    b.is_ascii_alphanumeric() || matches!(b, b'_' | b'$')
}

impl<'a> Lexer<'a> {
    fn peek(&self, ahead: usize) -> u8 {
        self.bytes.get(self.at + ahead).copied().unwrap_or(0)
    }

    fn skip_blank(&mut self) -> Result<()> {
        while self.at < self.bytes.len() {
            match self.bytes[self.at] {
                b'\n' => {
                    self.line += 1;
                    self.at += 1;
                }
                b if b.is_ascii_whitespace() => self.at += 1,
                b'/' if self.peek(1) == b'/' => {
                    while self.at < self.bytes.len() && self.bytes[self.at] != b'\n' {
                        self.at += 1;
                    }
                }
                b'/' if self.peek(1) == b'*' => {
                    let start = self.line;
                    self.at += 2;
                    while !(self.peek(0) == b'*' && self.peek(1) == b'/') {
                        if self.at >= self.bytes.len() {
                            return Err(Error::parse(start, "comment is not closed"));
                        }
                        self.line += u32::from(self.bytes[self.at] == b'\n');
                        self.at += 1;
                    }
                    self.at += 2;
                }
                _ => break,
            }
        }
        Ok(())
    }

    fn slice_while(&mut self, from: usize, keep: impl Fn(u8) -> bool) -> &'a str {
        while self.at < self.bytes.len() && keep(self.bytes[self.at]) {
            self.at += 1;
        }
        // Only ASCII bytes are kept, so the slice ends on a character boundary.
        self.text.get(from..self.at).unwrap_or("")
    }

    fn token(&mut self) -> Result<Token<'a>> {
        if self.at >= self.bytes.len() {
            return Ok(Token::End);
        }
        let start = self.at;
        let b = self.bytes[start];
        if starts_word(b) {
            self.at += 1;
            return Ok(Token::Word(self.slice_while(start, in_word)));
        }
        if b.is_ascii_digit() {
            return self.number();
        }
        match b {
            b'.' if in_word(self.peek(1)) => {
                self.at += 1;
                self.dotted(start + 1)
            }
            b'"' => {
                self.at += 1;
                let text = self.slice_until_quote()?;
                Ok(Token::Str(text))
            }
            b if b.is_ascii() => {
                self.at += 1;
                Ok(Token::Punct(b as char))
            }
            _ => Err(Error::parse(self.line, "a byte outside ASCII")),
        }
    }

    /// A dot word may hold `::` (`shared::cta`) but not a single colon, which ends a label.
    fn dotted(&mut self, from: usize) -> Result<Token<'a>> {
        loop {
            self.slice_while(from, in_word);
            if self.peek(0) == b':' && self.peek(1) == b':' && in_word(self.peek(2)) {
                self.at += 2;
            } else {
                return Ok(Token::Dot(self.text.get(from..self.at).unwrap_or("")));
            }
        }
    }

    fn slice_until_quote(&mut self) -> Result<&'a str> {
        let (from, line) = (self.at, self.line);
        while self.at < self.bytes.len() {
            match self.bytes[self.at] {
                b'"' => {
                    let text = self.text.get(from..self.at);
                    self.at += 1;
                    return text.ok_or_else(|| Error::parse(line, "string is not UTF-8"));
                }
                b'\\' => self.at += 2,
                other => {
                    self.line += u32::from(other == b'\n');
                    self.at += 1;
                }
            }
        }
        Err(Error::parse(line, "string is not closed"))
    }

    fn number(&mut self) -> Result<Token<'a>> {
        let start = self.at;
        let line = self.line;
        let bad = |text: &str| Error::parse(line, format!("`{text}` is not a number"));
        let text = self.slice_while(start, |b| b.is_ascii_alphanumeric());
        let lower = text.to_ascii_lowercase();
        let body = lower.trim_end_matches('u');
        let parse = |digits: &str, radix| u64::from_str_radix(digits, radix).map_err(|_| bad(text));
        // The bits of a float are written out: with fewer digits it would be another number than the one that was meant.
        let is_whole = |hex: &str, digits: usize| match hex.len() == digits {
            true => Ok(()),
            false => Err(Error::parse(line, format!("`{text}` is not a number: {digits} digits are needed"))),
        };
        if let Some(hex) = lower.strip_prefix("0f") {
            is_whole(hex, 8)?;
            return u32::from_str_radix(hex, 16).map(Token::F32).map_err(|_| bad(text));
        }
        if let Some(hex) = lower.strip_prefix("0d") {
            is_whole(hex, 16)?;
            return parse(hex, 16).map(Token::F64);
        }
        if let Some(hex) = body.strip_prefix("0x") {
            return parse(hex, 16).map(Token::Int);
        }
        if let Some(binary) = body.strip_prefix("0b") {
            return parse(binary, 2).map(Token::Int);
        }
        if self.peek(0) == b'.' && self.peek(1).is_ascii_digit() {
            self.at += 1;
            self.slice_while(start, |b| b.is_ascii_digit() || matches!(b, b'e' | b'E'));
            let text = self.text.get(start..self.at).unwrap_or("");
            return text.parse::<f64>().map(|x| Token::F64(x.to_bits())).map_err(|_| bad(text));
        }
        if body.len() > 1 && body.starts_with('0') {
            return parse(&body[1..], 8).map(Token::Int);
        }
        parse(body, 10).map(Token::Int)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opcodes_numbers_and_comments() {
        let kinds: Vec<_> =
            tokens("ld.shared::cta.u32 %r1, [x+-8]; // end\n0f3F800000 0x10U 017 1.5 /* a\n */ L:")
                .unwrap()
                .iter()
                .map(|l| l.token)
                .collect();
        assert_eq!(kinds[..3], [Token::Word("ld"), Token::Dot("shared::cta"), Token::Dot("u32")]);
        assert!(kinds.contains(&Token::F32(0x3F80_0000)));
        assert!(kinds.contains(&Token::Int(16)) && kinds.contains(&Token::Int(15)));
        assert!(kinds.contains(&Token::F64(1.5f64.to_bits())));
        assert_eq!(kinds[kinds.len() - 3..], [Token::Word("L"), Token::Punct(':'), Token::End]);
    }

    #[test]
    fn unclosed_things_are_errors() {
        assert!(tokens("/* never").is_err());
        assert!(tokens("\"never").is_err());
        assert!(tokens("0fXYZ").is_err());
        assert!(tokens("0f3F8").is_err() && tokens("0f3F80000000").is_err() && tokens("0d3FF0").is_err());
        assert!(tokens("é").is_err());
        assert!(tokens("\"\\").is_err());
    }
}
