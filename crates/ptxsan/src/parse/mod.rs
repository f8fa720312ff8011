//! PTX text to a syntax tree.

pub(crate) mod ast;
mod body;
mod lexer;
mod module;
mod pointers;

pub(crate) use module::parse;

use crate::error::{Error, Result};
use lexer::{Lexeme, Token};

/// A cursor over tokens with the small steps every rule needs.
pub(crate) struct Cursor<'a> {
    lexemes: Vec<Lexeme<'a>>,
    pub(crate) at: usize,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(text: &'a str) -> Result<Self> {
        Ok(Cursor { lexemes: lexer::tokens(text)?, at: 0 })
    }

    pub(crate) fn peek(&self) -> Token<'a> {
        self.lexemes[self.at].token
    }

    pub(crate) fn peek_second(&self) -> Token<'a> {
        self.lexemes.get(self.at + 1).map_or(Token::End, |l| l.token)
    }

    pub(crate) fn line(&self) -> u32 {
        self.lexemes[self.at].line
    }

    pub(crate) fn next(&mut self) -> Token<'a> {
        let token = self.peek();
        // The last lexeme is End and is never passed.
        if self.at + 1 < self.lexemes.len() {
            self.at += 1;
        }
        token
    }

    pub(crate) fn eat(&mut self, wanted: char) -> bool {
        let found = self.peek() == Token::Punct(wanted);
        if found {
            self.next();
        }
        found
    }

    pub(crate) fn expect(&mut self, wanted: char) -> Result<()> {
        if self.eat(wanted) { Ok(()) } else { Err(self.unexpected(&format!("`{wanted}`"))) }
    }

    pub(crate) fn word(&mut self, what: &str) -> Result<&'a str> {
        match self.peek() {
            Token::Word(word) => {
                self.next();
                Ok(word)
            }
            _ => Err(self.unexpected(what)),
        }
    }

    pub(crate) fn int(&mut self, what: &str) -> Result<u64> {
        match self.peek() {
            Token::Int(value) => {
                self.next();
                Ok(value)
            }
            _ => Err(self.unexpected(what)),
        }
    }

    pub(crate) fn signed(&mut self, what: &str) -> Result<i64> {
        let negative = self.eat('-');
        let value = self.int(what)? as i64;
        Ok(if negative { value.wrapping_neg() } else { value })
    }

    pub(crate) fn unexpected(&self, wanted: &str) -> Error {
        let found = match self.peek() {
            Token::Word(w) => format!("`{w}`"),
            Token::Dot(w) => format!("`.{w}`"),
            Token::Int(v) => format!("`{v}`"),
            Token::F32(_) | Token::F64(_) => "a floating-point number".into(),
            Token::Str(_) => "a string".into(),
            Token::Punct(c) => format!("`{c}`"),
            Token::End => "the end of the text".into(),
        };
        Error::parse(self.line(), format!("expected {wanted}, found {found}"))
    }
}
