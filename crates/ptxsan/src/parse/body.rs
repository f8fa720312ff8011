//! Rules inside a function: declarations, labels, instructions, operands.

use super::Cursor;
use super::ast::{Ast, Instruction, Location, Operand, Statement, Type};
use super::lexer::Token;
use super::module::{skip_to_semicolon, space, variables};
use crate::error::{Error, Result};
use std::collections::HashMap;

/// Scopes inside scopes; compilers need two or three.
const MAX_DEPTH: u32 = 64;
/// Frames of an inline stack that are kept.
const MAX_STACK: usize = 64;

/// Instructions whose operands are textures or surfaces.
fn is_texture(opcode: &str) -> bool {
    let name = opcode.split('.').next().unwrap_or(opcode);
    matches!(name, "tex" | "tld4" | "txq" | "suld" | "sust" | "sured" | "suq")
}

/// Reads one body. Braces are flattened into scope marks, so nesting cannot exhaust the stack.
pub(super) struct Body<'c, 'a> {
    cursor: &'c mut Cursor<'a>,
    ast: &'c mut Ast,
    next_instruction: &'c mut u32,
    location: Option<u32>,
    known: HashMap<Location, u32>,
    /// Where a location was itself inlined: `inlined_at` names one step, the chain goes on to the kernel's own line.
    inlined: HashMap<(u64, u32), (u64, u32)>,
    out: Vec<Statement>,
}

impl<'c, 'a> Body<'c, 'a> {
    pub(super) fn new(cursor: &'c mut Cursor<'a>, ast: &'c mut Ast, next_instruction: &'c mut u32) -> Self {
        let (known, inlined) = (HashMap::new(), HashMap::new());
        Body { cursor, ast, next_instruction, location: None, known, inlined, out: Vec::new() }
    }

    /// Where in the CUDA source the last instruction that was read stands.
    pub(super) fn location(&self) -> Option<u32> {
        self.location
    }

    pub(super) fn statements(&mut self) -> Result<Vec<Statement>> {
        self.cursor.expect('{')?;
        let mut depth = 1u32;
        while depth > 0 {
            match self.cursor.peek() {
                Token::Punct('{') => {
                    self.cursor.next();
                    depth += 1;
                    if depth > MAX_DEPTH {
                        return Err(Error::parse(
                            self.cursor.line(),
                            format!("more than {MAX_DEPTH} braces open"),
                        ));
                    }
                    self.out.push(Statement::Enter);
                }
                Token::Punct('}') => {
                    self.cursor.next();
                    depth -= 1;
                    self.out.push(Statement::Leave);
                }
                Token::Punct(';') => {
                    self.cursor.next();
                }
                Token::Dot(word) => self.directive(word)?,
                Token::Word(name) if self.cursor.peek_second() == Token::Punct(':') => self.label(name)?,
                Token::Word(_) | Token::Punct('@') => self.instruction()?,
                _ => return Err(self.cursor.unexpected("a statement")),
            }
        }
        self.out.pop();
        Ok(std::mem::take(&mut self.out))
    }

    fn label(&mut self, name: &'a str) -> Result<()> {
        let line = self.cursor.line();
        self.cursor.next();
        self.cursor.next();
        match self.cursor.peek() {
            Token::Dot("branchtargets" | "calltargets") => {
                self.cursor.next();
                let mut targets = vec![self.cursor.word("a label")?.to_owned()];
                while self.cursor.eat(',') {
                    targets.push(self.cursor.word("a label")?.to_owned());
                }
                self.cursor.expect(';')?;
                self.out.push(Statement::BranchTargets { label: name.to_owned(), targets });
            }
            Token::Dot("callprototype") => skip_to_semicolon(self.cursor)?,
            _ => self.out.push(Statement::Label { name: name.to_owned(), line }),
        }
        Ok(())
    }

    fn directive(&mut self, word: &str) -> Result<()> {
        match word {
            "reg" => self.registers(),
            "loc" => self.loc(),
            "pragma" | "callprototype" => {
                self.cursor.next();
                skip_to_semicolon(self.cursor)
            }
            word if space(word).is_some() => {
                let variables = variables(self.cursor, false)?;
                self.out.extend(variables.into_iter().map(Statement::Variable));
                Ok(())
            }
            _ => Err(self.cursor.unexpected("a declaration, `.loc` or an instruction")),
        }
    }

    fn registers(&mut self) -> Result<()> {
        self.cursor.next();
        let kind = match self.cursor.next() {
            Token::Dot(word) => Type::named(word),
            _ => None,
        };
        let kind = kind.ok_or_else(|| self.cursor.unexpected("a register type"))?;
        loop {
            let prefix = self.cursor.word("a register name")?.to_owned();
            let count = if self.cursor.eat('<') {
                let count = self.cursor.int("a register count")?;
                self.cursor.expect('>')?;
                Some(u32::try_from(count).unwrap_or(u32::MAX))
            } else {
                None
            };
            self.out.push(Statement::Registers { prefix, count, kind });
            if !self.cursor.eat(',') {
                return self.cursor.expect(';');
            }
        }
    }

    /// `.loc file line column [, function_name label[+n], inlined_at file line column]`
    fn loc(&mut self) -> Result<()> {
        self.cursor.next();
        let file = self.cursor.int("a file number")?;
        let line = self.cursor.int("a line number")? as u32;
        self.cursor.int("a column")?;
        let mut callers = Vec::new();
        if self.cursor.eat(',') {
            self.cursor.word("`function_name`")?;
            self.cursor.word("a label")?;
            if self.cursor.eat('+') {
                self.cursor.int("an offset")?;
            }
            self.cursor.expect(',')?;
            self.cursor.word("`inlined_at`")?;
            let outer = (self.cursor.int("a file number")?, self.cursor.int("a line number")? as u32);
            self.cursor.int("a column")?;
            self.inlined.insert((file, line), outer);
            callers = self.chain(outer);
        }
        if line == 0 {
            // The compiler has no line for what follows: keep the last one it had.
            return Ok(());
        }
        let location = Location { file, line, callers };
        let next = self.ast.locations.len() as u32;
        let index = *self.known.entry(location.clone()).or_insert(next);
        if index == next {
            self.ast.locations.push(location);
        }
        self.location = Some(index);
        Ok(())
    }

    /// A place and all that it was inlined into.
    fn chain(&self, at: (u64, u32)) -> Vec<(u64, u32)> {
        let mut chain = vec![at];
        while chain.len() < MAX_STACK
            && let Some(outer) = self.inlined.get(&chain[chain.len() - 1])
            && !chain.contains(outer)
        {
            chain.push(*outer);
        }
        chain
    }

    fn instruction(&mut self) -> Result<()> {
        let line = self.cursor.line();
        let guard = if self.cursor.eat('@') {
            let negated = self.cursor.eat('!');
            Some((self.cursor.word("a predicate register")?.to_owned(), negated))
        } else {
            None
        };
        let mut opcode = self.cursor.word("an instruction")?.to_owned();
        while let Token::Dot(part) = self.cursor.peek() {
            self.cursor.next();
            opcode.push('.');
            opcode.push_str(part);
        }
        if is_texture(&opcode) {
            let reason =
                "textures and surfaces are not simulated; read the data through a pointer instead".to_owned();
            return Err(Error::Unsupported { line, source_line: None, instruction: opcode, reason });
        }
        let mut operands = Vec::new();
        while !self.cursor.eat(';') {
            operands.push(self.operand()?);
            if !self.cursor.eat(',') && self.cursor.peek() != Token::Punct(';') {
                return Err(self.cursor.unexpected("`,` or `;`"));
            }
        }
        let id = *self.next_instruction;
        *self.next_instruction =
            id.checked_add(1).ok_or_else(|| Error::parse(line, "too many instructions"))?;
        let instruction = Instruction { id, line, location: self.location, guard, opcode, operands };
        self.out.push(Statement::Instruction(instruction));
        Ok(())
    }

    fn operand(&mut self) -> Result<Operand> {
        match self.cursor.peek() {
            Token::Punct('{') => Ok(Operand::Vector(self.group('{', '}')?)),
            Token::Punct('(') => Ok(Operand::List(self.group('(', ')')?)),
            Token::Punct('[') => self.address(),
            _ => self.scalar(),
        }
    }

    fn group(&mut self, open: char, close: char) -> Result<Vec<Operand>> {
        self.cursor.expect(open)?;
        let mut items = Vec::new();
        if self.cursor.eat(close) {
            return Ok(items);
        }
        loop {
            items.push(self.scalar()?);
            if self.cursor.eat(close) {
                return Ok(items);
            }
            self.cursor.expect(',')?;
        }
    }

    fn address(&mut self) -> Result<Operand> {
        self.cursor.expect('[')?;
        let base = Box::new(self.simple()?);
        let mut offset = 0i64;
        // `+8`, `-8` and `+-8` all occur.
        while self.cursor.eat('+') || self.cursor.peek() == Token::Punct('-') {
            offset = offset.wrapping_add(self.cursor.signed("an offset")?);
        }
        if self.cursor.eat(',') {
            let coordinates = self.group('{', '}')?;
            self.cursor.expect(']')?;
            return Ok(Operand::Tensor { map: base, offset, coordinates });
        }
        self.cursor.expect(']')?;
        Ok(Operand::Address { base, offset })
    }

    fn scalar(&mut self) -> Result<Operand> {
        if self.cursor.eat('!') {
            return Ok(Operand::Not(Box::new(self.simple()?)));
        }
        let first = self.simple()?;
        if self.cursor.eat('|') {
            let second = self.simple()?;
            return Ok(Operand::Pair(Box::new(first), Box::new(second)));
        }
        if let Operand::Name(name) = &first
            && matches!(self.cursor.peek(), Token::Punct('+' | '-'))
        {
            self.cursor.eat('+');
            let offset = self.cursor.signed("an offset")?;
            return Ok(Operand::Offset(name.clone(), offset));
        }
        Ok(first)
    }

    fn simple(&mut self) -> Result<Operand> {
        match self.cursor.peek() {
            Token::Word(name) => {
                self.cursor.next();
                if let Token::Dot(part) = self.cursor.peek() {
                    self.cursor.next();
                    return Ok(Operand::Component(name.to_owned(), part.to_owned()));
                }
                Ok(Operand::Name(name.to_owned()))
            }
            Token::F32(bits) => {
                self.cursor.next();
                Ok(Operand::F32(bits))
            }
            Token::F64(bits) => {
                self.cursor.next();
                Ok(Operand::F64(bits))
            }
            Token::Punct('-') if matches!(self.cursor.peek_second(), Token::F64(_)) => {
                self.cursor.next();
                match self.cursor.next() {
                    Token::F64(bits) => Ok(Operand::F64(bits ^ (1 << 63))),
                    _ => Err(self.cursor.unexpected("a number")),
                }
            }
            Token::Int(_) | Token::Punct('-') => Ok(Operand::Int(self.cursor.signed("a number")? as u64)),
            _ => Err(self.cursor.unexpected("an operand")),
        }
    }
}
