//! The small integer language of manifests: launch sizes, defines and constraints.
//!
//! Everything is a 64-bit integer; comparisons give 0 or 1; `&&`, `||` and `?:` evaluate only what they need. Every
//! operation is checked: an overflow or a division by zero is an error with its place, never a wrong number.

mod parse;

use std::fmt;

use crate::{ProblemFacts, Target};
use evosdpa_core::DType;

/// What is wrong with an expression, and where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("in `{text}`, column {column}: {problem}")]
pub struct ExprError {
    /// The expression.
    pub text: String,
    /// Where it is wrong, counted from 1.
    pub column: usize,
    /// What is wrong.
    pub problem: String,
}

/// A parsed expression.
#[derive(Clone, PartialEq, Eq)]
pub struct Expr {
    text: String,
    root: Node,
}

/// A syntax tree node with the byte offset it is reported at.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Node {
    at: usize,
    kind: Kind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    Integer(i64),
    Name(String),
    DtypeIs { dtype: DType, negated: bool },
    Not(Box<Node>),
    Negate(Box<Node>),
    Binary(Binary, Box<Node>, Box<Node>),
    Choose(Box<Node>, Box<Node>, Box<Node>),
    Call(Function, Vec<Node>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Binary {
    Add,
    Sub,
    Mul,
    Div,
    Rem,
    Equal,
    NotEqual,
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
    And,
    Or,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Function {
    Min,
    Max,
    CeilDiv,
    RoundUp,
    Gcd,
}

impl Function {
    const NAMES: [&'static str; 5] = ["min", "max", "ceil_div", "round_up", "gcd"];

    fn from_name(name: &str) -> Option<Self> {
        match name {
            "min" => Some(Self::Min),
            "max" => Some(Self::Max),
            "ceil_div" => Some(Self::CeilDiv),
            "round_up" => Some(Self::RoundUp),
            "gcd" => Some(Self::Gcd),
            _ => None,
        }
    }
}

/// Where an expression's names get their values.
pub(crate) trait Environment {
    /// The value of a name; `Ok(None)` when there is no such name.
    fn value(&self, name: &str) -> Result<Option<i64>, ExprError>;
    /// The problem's input type; `None` where an expression may not depend on the problem.
    fn dtype(&self) -> Option<DType>;
}

struct ProblemOnly<'a> {
    facts: &'a ProblemFacts,
    target: &'a Target,
}

impl Environment for ProblemOnly<'_> {
    fn value(&self, name: &str) -> Result<Option<i64>, ExprError> {
        Ok(self.facts.value(name, self.target))
    }

    fn dtype(&self) -> Option<DType> {
        Some(self.facts.dtype)
    }
}

impl Expr {
    /// Parses an expression.
    pub fn parse(text: &str) -> Result<Self, ExprError> {
        let root = parse::parse(text)?;
        Ok(Self { text: text.to_owned(), root })
    }

    /// The expression as it was written.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The names it uses, in order of appearance; `dtype` when it compares the input type.
    pub fn names(&self) -> Vec<&str> {
        let mut names = Vec::new();
        collect_names(&self.root, &mut names);
        names
    }

    /// Its value.
    pub(crate) fn evaluate(&self, environment: &dyn Environment) -> Result<i64, ExprError> {
        Evaluation { text: &self.text, environment }.node(&self.root)
    }

    /// Its value for a problem on a target, where there are no tunables and no defines.
    pub fn evaluate_for(&self, facts: &ProblemFacts, target: &Target) -> Result<i64, ExprError> {
        self.evaluate(&ProblemOnly { facts, target })
    }

    /// An error at a name of this expression, for checks made before evaluation.
    pub(crate) fn error_at_name(&self, name: &str, problem: String) -> ExprError {
        let mut at = 0;
        find_name(&self.root, name, &mut at);
        ExprError { text: self.text.clone(), column: at + 1, problem }
    }
}

impl fmt::Debug for Expr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Expr({:?})", self.text)
    }
}

impl fmt::Display for Expr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Integers, booleans and strings are all expressions in a manifest.
impl<'de> serde::Deserialize<'de> for Expr {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = Expr;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an integer, or a string with an integer expression")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Expr, E> {
                Expr::parse(text).map_err(E::custom)
            }

            fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<Expr, E> {
                Ok(Expr { text: value.to_string(), root: Node { at: 0, kind: Kind::Integer(value) } })
            }

            fn visit_bool<E: serde::de::Error>(self, value: bool) -> Result<Expr, E> {
                self.visit_i64(value.into())
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

fn collect_names<'a>(node: &'a Node, names: &mut Vec<&'a str>) {
    if let Some(name) = name_of(node)
        && !names.contains(&name)
    {
        names.push(name);
    }
    for child in children(node) {
        collect_names(child, names);
    }
}

fn find_name(node: &Node, name: &str, at: &mut usize) -> bool {
    if name_of(node) == Some(name) {
        *at = node.at;
        return true;
    }
    children(node).into_iter().any(|child| find_name(child, name, at))
}

fn name_of(node: &Node) -> Option<&str> {
    match &node.kind {
        Kind::Name(name) => Some(name),
        Kind::DtypeIs { .. } => Some("dtype"),
        _ => None,
    }
}

fn children(node: &Node) -> Vec<&Node> {
    match &node.kind {
        Kind::Integer(_) | Kind::Name(_) | Kind::DtypeIs { .. } => Vec::new(),
        Kind::Not(a) | Kind::Negate(a) => vec![a],
        Kind::Binary(_, a, b) => vec![a, b],
        Kind::Choose(a, b, c) => vec![a, b, c],
        Kind::Call(_, arguments) => arguments.iter().collect(),
    }
}

struct Evaluation<'a> {
    text: &'a str,
    environment: &'a dyn Environment,
}

impl Evaluation<'_> {
    fn node(&self, node: &Node) -> Result<i64, ExprError> {
        match &node.kind {
            Kind::Integer(value) => Ok(*value),
            Kind::Name(name) => match self.environment.value(name)? {
                Some(value) => Ok(value),
                None => Err(self.error(node, format!("`{name}` has no value here"))),
            },
            Kind::DtypeIs { dtype, negated } => match self.environment.dtype() {
                Some(actual) => Ok(i64::from((actual == *dtype) != *negated)),
                None => Err(self.error(node, "`dtype` has no value here".to_owned())),
            },
            Kind::Not(a) => Ok(i64::from(self.node(a)? == 0)),
            Kind::Negate(a) => {
                let a = self.node(a)?;
                a.checked_neg().ok_or_else(|| self.error(node, format!("-({a}) overflows")))
            }
            Kind::Binary(Binary::And, a, b) => Ok(i64::from(self.node(a)? != 0 && self.node(b)? != 0)),
            Kind::Binary(Binary::Or, a, b) => Ok(i64::from(self.node(a)? != 0 || self.node(b)? != 0)),
            Kind::Binary(operator, a, b) => self.binary(node, *operator, self.node(a)?, self.node(b)?),
            Kind::Choose(condition, yes, no) => self.node(if self.node(condition)? != 0 { yes } else { no }),
            Kind::Call(function, arguments) => {
                // The parser has checked that every call has exactly two arguments.
                let [a, b] = arguments.as_slice() else {
                    let given = arguments.len();
                    return Err(self.error(node, format!("2 arguments expected, {given} given")));
                };
                self.call(node, *function, self.node(a)?, self.node(b)?)
            }
        }
    }

    fn binary(&self, node: &Node, operator: Binary, a: i64, b: i64) -> Result<i64, ExprError> {
        let overflow = |symbol: &str| self.error(node, format!("{a} {symbol} {b} overflows"));
        if matches!(operator, Binary::Div | Binary::Rem) && b == 0 {
            return Err(self.error(node, format!("division of {a} by zero")));
        }
        match operator {
            Binary::Add => a.checked_add(b).ok_or_else(|| overflow("+")),
            Binary::Sub => a.checked_sub(b).ok_or_else(|| overflow("-")),
            Binary::Mul => a.checked_mul(b).ok_or_else(|| overflow("*")),
            Binary::Div => a.checked_div(b).ok_or_else(|| overflow("/")),
            Binary::Rem => a.checked_rem(b).ok_or_else(|| overflow("%")),
            Binary::Equal => Ok(i64::from(a == b)),
            Binary::NotEqual => Ok(i64::from(a != b)),
            Binary::Less => Ok(i64::from(a < b)),
            Binary::LessEqual => Ok(i64::from(a <= b)),
            Binary::Greater => Ok(i64::from(a > b)),
            Binary::GreaterEqual => Ok(i64::from(a >= b)),
            Binary::And => Ok(i64::from(a != 0 && b != 0)),
            Binary::Or => Ok(i64::from(a != 0 || b != 0)),
        }
    }

    fn call(&self, node: &Node, function: Function, a: i64, b: i64) -> Result<i64, ExprError> {
        let quotient_rounded_up = || match b {
            ..=0 => Err(self.error(node, format!("the divisor must be positive, it is {b}"))),
            _ => Ok(a.div_euclid(b) + i64::from(a.rem_euclid(b) != 0)),
        };
        match function {
            Function::Min => Ok(a.min(b)),
            Function::Max => Ok(a.max(b)),
            Function::CeilDiv => quotient_rounded_up(),
            Function::Gcd => greatest_common_divisor(a, b)
                .ok_or_else(|| self.error(node, format!("gcd({a}, {b}) of a number below 0"))),
            Function::RoundUp => quotient_rounded_up()?
                .checked_mul(b)
                .ok_or_else(|| self.error(node, format!("round_up({a}, {b}) overflows"))),
        }
    }

    fn error(&self, node: &Node, problem: String) -> ExprError {
        ExprError { text: self.text.to_owned(), column: node.at + 1, problem }
    }
}

/// That of 0 and a number is the number; `None` where one is negative.
fn greatest_common_divisor(mut a: i64, mut b: i64) -> Option<i64> {
    while a >= 0 && b > 0 {
        (a, b) = (b, a % b);
    }
    (a >= 0 && b == 0).then_some(a)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fixed(&'static [(&'static str, i64)], DType);

    impl Environment for Fixed {
        fn value(&self, name: &str) -> Result<Option<i64>, ExprError> {
            Ok(self.0.iter().find(|(known, _)| *known == name).map(|(_, value)| *value))
        }

        fn dtype(&self) -> Option<DType> {
            Some(self.1)
        }
    }

    const ENVIRONMENT: Fixed = Fixed(&[("seq_q", 1000), ("BLOCK_M", 64), ("zero", 0)], DType::BF16);

    fn value(text: &str) -> Result<i64, ExprError> {
        Expr::parse(text)?.evaluate(&ENVIRONMENT)
    }

    #[test]
    fn follows_c_precedence() {
        for (text, expected) in [
            ("1 + 2 * 3", 7),
            ("(1 + 2) * 3", 9),
            ("10 - 3 - 2", 5),
            ("100 / 7 % 5", 4),
            ("-2 * 3", -6),
            ("--5", 5),
            ("1 < 2 == 1", 1),
            ("1 || 0 && 0", 1),
            ("!0 + 1", 2),
            ("0 ? 1 : 0 ? 2 : 3", 3),
            ("1 ? 2 ? 3 : 4 : 5", 3),
            ("BLOCK_M % 16 == 0 && seq_q >= 1000", 1),
            ("ceil_div(seq_q, BLOCK_M)", 16),
            ("round_up(seq_q, 16)", 1008),
            ("gcd(128, 48)", 16),
            ("gcd(0, 80) + gcd(7, 0) + gcd(0, 0)", 87),
            ("min(3, max(1, 2))", 2),
            ("seq_q != 1000", 0),
            ("BLOCK_M <= 63", 0),
            ("BLOCK_M > 63", 1),
            (&format!("{}1", "1+".repeat(2000)), 2001),
        ] {
            assert_eq!(value(text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn compares_the_input_type_by_name() {
        assert_eq!(value("dtype == bf16"), Ok(1));
        assert_eq!(value("f16 == dtype"), Ok(0));
        assert_eq!(value("dtype != e4m3 ? 7 : 8"), Ok(7));
        assert_eq!(Expr::parse("dtype == bf16 && seq_q > 1").unwrap().names(), ["dtype", "seq_q"]);
        for misuse in ["dtype + 1", "bf16", "dtype == 2", "dtype == half", "dtype < bf16"] {
            assert!(value(misuse).is_err(), "{misuse}");
        }
        assert!(value("dtype == bf61").unwrap_err().problem.contains("bf16"));
    }

    #[test]
    fn evaluates_only_what_is_needed() {
        assert_eq!(value("zero != 0 && 1 / zero"), Ok(0));
        assert_eq!(value("zero == 0 || 1 / zero"), Ok(1));
        assert_eq!(value("zero ? 1 / zero : 5"), Ok(5));
    }

    #[test]
    fn refuses_arithmetic_that_has_no_value() {
        for (text, column, problem) in [
            ("1 / zero", 3, "division of 1 by zero"),
            ("1 + seq_q % zero", 11, "division of 1000 by zero"),
            ("9223372036854775807 + 1", 21, "overflows"),
            ("9223372036854775807 * seq_q", 21, "overflows"),
            ("-(-9223372036854775807 - 1)", 1, "overflows"),
            ("ceil_div(seq_q, zero)", 1, "must be positive"),
            ("round_up(9223372036854775806, 16)", 1, "overflows"),
            ("gcd(-4, 2)", 1, "below 0"),
            ("1 + gcd(4, -2)", 5, "below 0"),
            ("seq_q + BLOKC_M", 9, "`BLOKC_M` has no value"),
        ] {
            let error = value(text).unwrap_err();
            assert_eq!(error.column, column, "{error}");
            assert!(error.problem.contains(problem), "{error}");
        }
    }

    #[test]
    fn refuses_what_is_not_an_expression() {
        for (text, column) in [
            ("", 1),
            ("1 +", 4),
            ("(1", 3),
            ("1)", 2),
            ("1 2", 3),
            ("a $ b", 3),
            ("a = b", 3),
            ("a & b", 3),
            ("min(1)", 1),
            ("min(1, 2, 3)", 1),
            ("mni(1, 2)", 1),
            ("1 ? 2", 6),
            ("99999999999999999999", 1),
            ("12ab", 1),
        ] {
            let error = Expr::parse(text).unwrap_err();
            assert_eq!(error.column, column, "{error}");
        }
        assert!(Expr::parse("ciel_div(1, 2)").unwrap_err().problem.contains("did you mean `ceil_div`?"));
        // A hostile manifest must not overflow the stack.
        assert!(Expr::parse(&"(".repeat(4000)).unwrap_err().problem.contains("nested"));
        assert!(Expr::parse(&"-".repeat(4000)).unwrap_err().problem.contains("nested"));
        assert!(Expr::parse(&"1 ? 1 : ".repeat(500)).unwrap_err().problem.contains("nested"));
        assert!(Expr::parse(&"1+".repeat(4000)).unwrap_err().problem.contains("longer"));
    }

    proptest::proptest! {
        #[test]
        fn never_panics_on_any_text(text in "[a-zA-Z0-9_ ()+*/%<>=!&|?:,.-]{0,60}") {
            if let Ok(expr) = Expr::parse(&text) {
                let _ = expr.evaluate(&ENVIRONMENT);
            }
        }

        #[test]
        fn agrees_with_rust(a in -1000i64..1000, b in -1000i64..1000, c in 1i64..50) {
            let text = format!("({a}) * ({b}) - ({a}) / {c} + ({b}) % {c} * 3");
            proptest::prop_assert_eq!(value(&text), Ok(a * b - a / c + b % c * 3));
        }
    }
}
