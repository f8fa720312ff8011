//! Recursive descent, one function per precedence level.

use super::{Binary, ExprError, Function, Kind, Node};
use crate::names::{nearest, suggestion};
use evosdpa_core::DType;

/// Deep enough for any manifest a person writes; shallow enough for any stack.
const DEPTH_LIMIT: usize = 64;

/// Bounds the depth of the tree that chains of operators can build.
const LENGTH_LIMIT_BYTES: usize = 4096;

pub(super) fn parse(text: &str) -> Result<Node, ExprError> {
    if text.len() > LENGTH_LIMIT_BYTES {
        let start = text.chars().take(40).collect::<String>() + "…";
        let problem = format!("longer than {LENGTH_LIMIT_BYTES} bytes");
        return Err(ExprError { text: start, column: LENGTH_LIMIT_BYTES + 1, problem });
    }
    let mut parser = Parser { text, tokens: tokenize(text)?, next: 0, depth: 0 };
    let root = parser.choice()?;
    if let Some(token) = parser.tokens.get(parser.next) {
        return Err(parser.error(token.at, format!("`{}` is not expected here", token.text)));
    }
    parser.refuse_stray_types(&root)?;
    Ok(root)
}

#[derive(Clone, Copy)]
struct Token<'a> {
    at: usize,
    text: &'a str,
}

const OPERATORS: [&str; 20] = [
    "==", "!=", "<=", ">=", "&&", "||", "<", ">", "+", "-", "*", "/", "%", "!", "?", ":", "(", ")", ",", "=",
];

fn tokenize(text: &str) -> Result<Vec<Token<'_>>, ExprError> {
    let error = |at: usize, problem: String| ExprError { text: text.to_owned(), column: at + 1, problem };
    let mut tokens = Vec::new();
    let mut at = 0;
    while let Some(first) = text[at..].chars().next() {
        let rest = &text[at..];
        if first.is_whitespace() {
            at += first.len_utf8();
            continue;
        }
        let length = if first.is_ascii_alphanumeric() || first == '_' {
            rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len())
        } else if let Some(operator) = OPERATORS.iter().find(|operator| rest.starts_with(**operator)) {
            if *operator == "=" {
                return Err(error(at, "`=` is no operator; compare with `==`".to_owned()));
            }
            operator.len()
        } else {
            return Err(error(at, format!("`{first}` is no operator here")));
        };
        tokens.push(Token { at, text: &rest[..length] });
        at += length;
    }
    Ok(tokens)
}

struct Parser<'a> {
    text: &'a str,
    tokens: Vec<Token<'a>>,
    next: usize,
    depth: usize,
}

type Parsed = Result<Node, ExprError>;

impl<'a> Parser<'a> {
    fn choice(&mut self) -> Parsed {
        self.deeper(|parser| {
            let condition = parser.either()?;
            let Some(token) = parser.take(&["?"]) else { return Ok(condition) };
            let yes = parser.choice()?;
            parser.expect(":")?;
            let no = parser.choice()?;
            Ok(Node { at: token.at, kind: Kind::Choose(Box::new(condition), Box::new(yes), Box::new(no)) })
        })
    }

    fn either(&mut self) -> Parsed {
        self.left_associative(&[("||", Binary::Or)], Self::both)
    }

    fn both(&mut self) -> Parsed {
        self.left_associative(&[("&&", Binary::And)], Self::equality)
    }

    fn equality(&mut self) -> Parsed {
        self.left_associative(&[("==", Binary::Equal), ("!=", Binary::NotEqual)], Self::comparison)
    }

    fn comparison(&mut self) -> Parsed {
        let operators = [
            ("<=", Binary::LessEqual),
            (">=", Binary::GreaterEqual),
            ("<", Binary::Less),
            (">", Binary::Greater),
        ];
        self.left_associative(&operators, Self::sum)
    }

    fn sum(&mut self) -> Parsed {
        self.left_associative(&[("+", Binary::Add), ("-", Binary::Sub)], Self::product)
    }

    fn product(&mut self) -> Parsed {
        self.left_associative(&[("*", Binary::Mul), ("/", Binary::Div), ("%", Binary::Rem)], Self::unary)
    }

    fn unary(&mut self) -> Parsed {
        self.deeper(|parser| match parser.take(&["-", "!"]) {
            Some(token) => {
                let operand = Box::new(parser.unary()?);
                let kind = if token.text == "-" { Kind::Negate(operand) } else { Kind::Not(operand) };
                Ok(Node { at: token.at, kind })
            }
            None => parser.primary(),
        })
    }

    fn primary(&mut self) -> Parsed {
        let Some(token) = self.tokens.get(self.next).copied() else {
            return Err(self.error(self.text.len(), "the expression ends too early".to_owned()));
        };
        self.next += 1;
        let first = token.text.as_bytes()[0];
        if token.text == "(" {
            let inner = self.choice()?;
            self.expect(")")?;
            return Ok(inner);
        }
        if first.is_ascii_digit() {
            let value = token.text.parse().map_err(|_| {
                self.error(token.at, format!("`{}` is not an integer of 64 bits", token.text))
            })?;
            return Ok(Node { at: token.at, kind: Kind::Integer(value) });
        }
        if !(first.is_ascii_alphabetic() || first == b'_') {
            return Err(self.error(token.at, format!("`{}` is not expected here", token.text)));
        }
        if self.take(&["("]).is_some() {
            return self.call(token);
        }
        Ok(Node { at: token.at, kind: Kind::Name(token.text.to_owned()) })
    }

    fn call(&mut self, name: Token<'a>) -> Parsed {
        let Some(function) = Function::from_name(name.text) else {
            let near = nearest(name.text, Function::NAMES);
            let known = Function::NAMES.join(", ");
            let problem = format!("no function `{}` (there are {known}){}", name.text, suggestion(&near));
            return Err(self.error(name.at, problem));
        };
        let mut arguments = vec![self.choice()?];
        while self.take(&[","]).is_some() {
            arguments.push(self.choice()?);
        }
        self.expect(")")?;
        if arguments.len() != 2 {
            let problem = format!("`{}` takes 2 arguments, {} given", name.text, arguments.len());
            return Err(self.error(name.at, problem));
        }
        Ok(Node { at: name.at, kind: Kind::Call(function, arguments) })
    }

    fn left_associative(
        &mut self,
        operators: &[(&str, Binary)],
        operand: impl Fn(&mut Self) -> Parsed,
    ) -> Parsed {
        let symbols: Vec<&str> = operators.iter().map(|(symbol, _)| *symbol).collect();
        let mut left = operand(self)?;
        while let Some(token) = self.take(&symbols) {
            let right = operand(self)?;
            let operator = operators.iter().find(|(symbol, _)| *symbol == token.text);
            // `take` returned one of these symbols.
            let operator = operator.map_or(Binary::Add, |(_, operator)| *operator);
            left = self.join(token, operator, left, right)?;
        }
        Ok(left)
    }

    /// A comparison of `dtype` with a type's name is its own node, so that no other use of either can slip in.
    fn join(&self, token: Token<'_>, operator: Binary, left: Node, right: Node) -> Parsed {
        let is_dtype = |node: &Node| matches!(&node.kind, Kind::Name(name) if name == "dtype");
        if is_dtype(&left) || is_dtype(&right) {
            let (at, other) = if is_dtype(&left) { (left.at, &right) } else { (right.at, &left) };
            let (Binary::Equal | Binary::NotEqual, Kind::Name(name)) = (operator, &other.kind) else {
                return Err(self.error(at, "`dtype` can only be compared with a type's name".to_owned()));
            };
            let dtype = name.parse::<DType>().map_err(|error| self.error(other.at, error.to_string()))?;
            return Ok(Node { at, kind: Kind::DtypeIs { dtype, negated: operator == Binary::NotEqual } });
        }
        Ok(Node { at: token.at, kind: Kind::Binary(operator, Box::new(left), Box::new(right)) })
    }

    fn refuse_stray_types(&self, node: &Node) -> Result<(), ExprError> {
        if let Kind::Name(name) = &node.kind
            // Not parsed: an error of that would look for what the name may have meant.
            && (name == "dtype" || DType::ALL.iter().any(|dtype| dtype.name() == name))
        {
            let problem = format!("`{name}` only makes sense in a comparison such as `dtype == bf16`");
            return Err(self.error(node.at, problem));
        }
        super::children(node).into_iter().try_for_each(|child| self.refuse_stray_types(child))
    }

    fn deeper(&mut self, inner: impl FnOnce(&mut Self) -> Parsed) -> Parsed {
        self.depth += 1;
        if self.depth > DEPTH_LIMIT {
            let at = self.tokens.get(self.next).map_or(self.text.len(), |token| token.at);
            return Err(self.error(at, format!("nested deeper than {DEPTH_LIMIT}")));
        }
        let node = inner(self);
        self.depth -= 1;
        node
    }

    fn take(&mut self, wanted: &[&str]) -> Option<Token<'a>> {
        let token = *self.tokens.get(self.next)?;
        wanted.contains(&token.text).then(|| {
            self.next += 1;
            token
        })
    }

    fn expect(&mut self, wanted: &str) -> Result<(), ExprError> {
        if self.take(&[wanted]).is_some() {
            return Ok(());
        }
        let at = self.tokens.get(self.next).map_or(self.text.len(), |token| token.at);
        Err(self.error(at, format!("`{wanted}` expected")))
    }

    fn error(&self, at: usize, problem: String) -> ExprError {
        ExprError { text: self.text.to_owned(), column: at + 1, problem }
    }
}
