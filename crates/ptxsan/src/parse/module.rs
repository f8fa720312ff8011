//! Module-level rules: directives, variables, functions.

use super::Cursor;
use super::ast::{Ast, Function, Initial, Space, Type, Variable};
use super::body::Body;
use super::lexer::Token;
use crate::error::{Error, Result};

/// No single variable may be larger: hostile text must not make us allocate without bound.
const MAX_VARIABLE_BYTES: u64 = 256 << 20;

/// Reads a whole module.
pub(crate) fn parse(text: &str) -> Result<Ast> {
    let mut cursor = Cursor::new(text)?;
    let mut ast = Ast::default();
    let mut next_instruction = 0;
    loop {
        let line = cursor.line();
        match cursor.peek() {
            Token::End => break,
            Token::Dot("version") => {
                cursor.next();
                ast.version = match cursor.next() {
                    Token::F64(bits) => format!("{:.1}", f64::from_bits(bits)),
                    Token::Int(v) => v.to_string(),
                    _ => return Err(Error::parse(line, "`.version` needs a number such as 8.0")),
                };
            }
            Token::Dot("target") => {
                cursor.next();
                ast.target = cursor.word("a target such as sm_80")?.to_owned();
                while cursor.eat(',') {
                    cursor.word("a target option")?;
                }
            }
            Token::Dot("address_size") => {
                cursor.next();
                if cursor.int("64")? != 64 {
                    return Err(Error::parse(line, "only `.address_size 64` is supported"));
                }
            }
            Token::Dot("file") => {
                cursor.next();
                file(&mut cursor, &mut ast)?;
            }
            Token::Dot("section") => skip_section(&mut cursor)?,
            Token::Dot("pragma") => {
                cursor.next();
                skip_to_semicolon(&mut cursor)?;
            }
            Token::Punct(';') => {
                cursor.next();
            }
            _ => item(&mut cursor, &mut ast, &mut next_instruction)?,
        }
    }
    super::pointers::resolve(&mut ast);
    Ok(ast)
}

fn file(cursor: &mut Cursor<'_>, ast: &mut Ast) -> Result<()> {
    let index = cursor.int("a file number")?;
    match cursor.next() {
        Token::Str(name) => ast.files.push((index, name.to_owned())),
        _ => return Err(cursor.unexpected("a file name in quotes")),
    }
    while cursor.eat(',') {
        cursor.int("a number")?;
    }
    Ok(())
}

fn skip_section(cursor: &mut Cursor<'_>) -> Result<()> {
    cursor.next();
    cursor.next();
    cursor.expect('{')?;
    let mut depth = 1u32;
    while depth > 0 {
        match cursor.next() {
            Token::Punct('{') => depth += 1,
            Token::Punct('}') => depth -= 1,
            Token::End => return Err(cursor.unexpected("`}` closing the section")),
            _ => {}
        }
    }
    Ok(())
}

pub(super) fn skip_to_semicolon(cursor: &mut Cursor<'_>) -> Result<()> {
    loop {
        match cursor.next() {
            Token::Punct(';') => return Ok(()),
            Token::End => return Err(cursor.unexpected("`;`")),
            _ => {}
        }
    }
}

/// A function or a variable, with its linkage.
fn item(cursor: &mut Cursor<'_>, ast: &mut Ast, next_instruction: &mut u32) -> Result<()> {
    let mut is_extern = false;
    loop {
        match cursor.peek() {
            Token::Dot("extern") => is_extern = true,
            Token::Dot("visible" | "weak" | "common") => {}
            _ => break,
        }
        cursor.next();
    }
    match cursor.peek() {
        Token::Dot("entry") => {
            cursor.next();
            let line = cursor.line();
            let function = function(cursor, ast, next_instruction, true)?;
            if function.body.is_some() && !ast.entries.insert(function.name.clone()) {
                return Err(Error::parse(
                    line,
                    format!("a second entry `{}`: the module has one already", function.name),
                ));
            }
            ast.functions.push(function);
        }
        Token::Dot("func") => {
            cursor.next();
            let function = function(cursor, ast, next_instruction, false)?;
            ast.functions.push(function);
        }
        Token::Dot(word) if space(word).is_some() => {
            let variables = variables(cursor, is_extern)?;
            ast.variables.extend(variables);
        }
        Token::Dot("alias") => skip_to_semicolon(cursor)?,
        _ => return Err(cursor.unexpected("a directive, a variable or a function")),
    }
    Ok(())
}

pub(super) fn space(word: &str) -> Option<Space> {
    Some(match word {
        "global" => Space::Global,
        "shared" => Space::Shared,
        "local" => Space::Local,
        "const" => Space::Const,
        "param" => Space::Param,
        _ => return None,
    })
}

/// `.space [.align n] [.attribute(…)] [.v2|.v4] .type name [dims] [= values] {, name …} ;`
pub(super) fn variables(cursor: &mut Cursor<'_>, is_extern: bool) -> Result<Vec<Variable>> {
    let mut out = Vec::new();
    let head = variable_head(cursor)?;
    loop {
        out.push(variable_tail(cursor, &head, is_extern)?);
        if !cursor.eat(',') {
            break;
        }
    }
    cursor.expect(';')?;
    Ok(out)
}

struct Head {
    space: Space,
    align: Option<u64>,
    vector: u64,
    element: Type,
}

fn variable_head(cursor: &mut Cursor<'_>) -> Result<Head> {
    let space = match cursor.next() {
        Token::Dot(word) => space(word).ok_or_else(|| cursor.unexpected("a state space"))?,
        _ => return Err(cursor.unexpected("a state space")),
    };
    let (mut align, mut vector) = (None, 1);
    loop {
        match cursor.peek() {
            Token::Dot("align") => {
                cursor.next();
                let value = cursor.int("an alignment")?;
                if !value.is_power_of_two() || value > 4096 {
                    return Err(Error::parse(
                        cursor.line(),
                        format!("alignment {value} is not a power of two up to 4096"),
                    ));
                }
                align = Some(value);
            }
            Token::Dot("v2") => {
                cursor.next();
                vector = 2;
            }
            Token::Dot("v4") => {
                cursor.next();
                vector = 4;
            }
            Token::Dot("ptr") => {
                // `.param .u64 .ptr .global .align 4 x`: a note about what the pointer points at.
                cursor.next();
                while let Token::Dot(word) = cursor.peek() {
                    cursor.next();
                    if word == "align" {
                        cursor.int("an alignment")?;
                    }
                }
            }
            Token::Dot("attribute") => {
                cursor.next();
                cursor.expect('(')?;
                while !cursor.eat(')') {
                    if cursor.next() == Token::End {
                        return Err(cursor.unexpected("`)`"));
                    }
                }
            }
            Token::Dot(word) => {
                // What a texture is called by is a handle; only who uses it is refused.
                let is_handle = matches!(word, "texref" | "samplerref" | "surfref");
                let named = if is_handle { Some(Type::B64) } else { Type::named(word) };
                let element = named.filter(|t| *t != Type::Pred);
                let element = element.ok_or_else(|| cursor.unexpected("a type"))?;
                cursor.next();
                if matches!(cursor.peek(), Token::Dot("ptr")) {
                    cursor.next();
                    while let Token::Dot(word) = cursor.peek() {
                        cursor.next();
                        if word == "align" {
                            cursor.int("an alignment")?;
                        }
                    }
                }
                return Ok(Head { space, align, vector, element });
            }
            _ => return Err(cursor.unexpected("a type")),
        }
    }
}

fn variable_tail(cursor: &mut Cursor<'_>, head: &Head, is_extern: bool) -> Result<Variable> {
    let line = cursor.line();
    let name = cursor.word("a variable name")?.to_owned();
    let mut count: u64 = head.vector;
    let mut is_dynamic = false;
    while cursor.eat('[') {
        if cursor.eat(']') {
            is_dynamic = true;
            continue;
        }
        let length = cursor.int("an array length")?;
        count = count.saturating_mul(length);
        cursor.expect(']')?;
    }
    let values = if cursor.eat('=') { initialiser(cursor)? } else { Vec::new() };
    let element_bytes = u64::from(head.element.bytes());
    if is_dynamic {
        count = if is_extern { 0 } else { values.len() as u64 };
    }
    let bytes = count.saturating_mul(element_bytes);
    if bytes > MAX_VARIABLE_BYTES {
        return Err(Error::parse(
            line,
            format!("variable `{name}` of {bytes} bytes is larger than {MAX_VARIABLE_BYTES}"),
        ));
    }
    let natural = element_bytes * head.vector;
    let is_dynamic = is_dynamic && is_extern;
    let align = head.align.unwrap_or(natural).max(1) as u32;
    Ok(Variable { line, space: head.space, name, align, bytes, is_dynamic, element: head.element, values })
}

/// Braces only group: `{{1, 2}, {3, 4}}` is four values in order.
fn initialiser(cursor: &mut Cursor<'_>) -> Result<Vec<Initial>> {
    let mut values = Vec::new();
    let mut depth = 0u32;
    loop {
        match cursor.peek() {
            Token::Punct('{') => {
                cursor.next();
                depth += 1;
                continue;
            }
            Token::Punct('}') if depth > 0 => {
                cursor.next();
                depth -= 1;
            }
            _ => values.push(initial(cursor)?),
        }
        while depth > 0 && cursor.eat('}') {
            depth -= 1;
        }
        if depth == 0 {
            return Ok(values);
        }
        if !cursor.eat(',') && cursor.peek() != Token::Punct('}') {
            return Err(cursor.unexpected("`,` or `}`"));
        }
    }
}

fn initial(cursor: &mut Cursor<'_>) -> Result<Initial> {
    match cursor.peek() {
        Token::Word(word) => {
            cursor.next();
            let (generic, name) = if word == "generic" && cursor.eat('(') {
                let name = cursor.word("a variable name")?;
                cursor.expect(')')?;
                (true, name)
            } else {
                (false, word)
            };
            let offset = if cursor.eat('+') { cursor.signed("an offset")? } else { 0 };
            Ok(Initial::Address { name: name.to_owned(), offset, generic })
        }
        Token::F32(bits) => {
            cursor.next();
            Ok(Initial::Bits(u64::from(bits)))
        }
        Token::F64(bits) => {
            cursor.next();
            Ok(Initial::Bits(bits))
        }
        _ => Ok(Initial::Bits(cursor.signed("an initial value")? as u64)),
    }
}

fn function(
    cursor: &mut Cursor<'_>,
    ast: &mut Ast,
    next_instruction: &mut u32,
    is_entry: bool,
) -> Result<Function> {
    let results = if cursor.peek() == Token::Punct('(') { parameters(cursor)? } else { Vec::new() };
    let name = cursor.word("a function name")?.to_owned();
    let params = if cursor.peek() == Token::Punct('(') { parameters(cursor)? } else { Vec::new() };
    let mut max_threads = None;
    let (mut blocks_per_sm, mut max_registers, mut cluster) = (None, None, None);
    loop {
        match cursor.peek() {
            Token::Dot(word @ ("maxntid" | "reqntid")) => {
                cursor.next();
                let mut product = cursor.int("a thread count")?;
                while cursor.eat(',') {
                    product = product.saturating_mul(cursor.int("a thread count")?);
                }
                let _ = word;
                max_threads = Some(u32::try_from(product).unwrap_or(u32::MAX));
            }
            Token::Dot(
                word @ ("minnctapersm" | "maxnreg" | "maxnctapersm" | "reqnctapercluster" | "maxclusterrank"),
            ) => {
                cursor.next();
                let mut numbers = vec![cursor.int("a number")?];
                while cursor.eat(',') {
                    numbers.push(cursor.int("a number")?);
                }
                let at = |i: usize| numbers.get(i).map_or(1, |n| u32::try_from(*n).unwrap_or(u32::MAX));
                match word {
                    "minnctapersm" => blocks_per_sm = Some(at(0)),
                    "maxnreg" => max_registers = Some(at(0)),
                    "reqnctapercluster" => cluster = Some([at(0), at(1), at(2)]),
                    _ => {}
                }
            }
            Token::Dot("noreturn" | "explicitcluster" | "blocksareclusters" | "attribute" | "unique") => {
                cursor.next();
            }
            Token::Dot("pragma") => {
                cursor.next();
                skip_to_semicolon(cursor)?;
            }
            _ => break,
        }
    }
    let (mut refusal, mut refused_at) = (None, None);
    let body = if cursor.eat(';') {
        None
    } else {
        let start = cursor.at;
        let mut reader = Body::new(cursor, ast, next_instruction);
        let statements = reader.statements();
        let location = reader.location();
        Some(statements.or_else(|error| {
            // One function that cannot be read does not take the others with it.
            cursor.at = start;
            skip_body(cursor).map_err(|_| error.clone())?;
            (refusal, refused_at) = (Some(error), location);
            Ok(Vec::new())
        })?)
    };
    Ok(Function {
        name,
        is_entry,
        results,
        params,
        body,
        refusal,
        refused_at,
        max_threads,
        blocks_per_sm,
        max_registers,
        cluster,
    })
}

/// Passes over `{ … }`.
fn skip_body(cursor: &mut Cursor<'_>) -> Result<()> {
    cursor.expect('{')?;
    let mut depth = 1u32;
    while depth > 0 {
        match cursor.next() {
            Token::Punct('{') => depth += 1,
            Token::Punct('}') => depth -= 1,
            Token::End => return Err(cursor.unexpected("`}`")),
            _ => {}
        }
    }
    Ok(())
}

fn parameters(cursor: &mut Cursor<'_>) -> Result<Vec<Variable>> {
    cursor.expect('(')?;
    let mut out = Vec::new();
    if cursor.eat(')') {
        return Ok(out);
    }
    loop {
        if matches!(cursor.peek(), Token::Dot("reg")) {
            return Err(cursor.unexpected("a `.param` parameter (the register ABI is not supported)"));
        }
        let head = variable_head(cursor)?;
        out.push(variable_tail(cursor, &head, false)?);
        if cursor.eat(')') {
            return Ok(out);
        }
        cursor.expect(',')?;
    }
}
