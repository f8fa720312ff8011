//! Entries and variables by the names that people use: as the compiler wrote them, demangled, or plain where only one has it.

use crate::error::{Error, Result};
use crate::module::Module;
use cpp_demangle::{DemangleOptions, Symbol};

/// Names from outside are parsed no deeper.
const DEPTH: u32 = 64;

/// Names in one message.
const MOST_LISTED: usize = 16;

/// The C++ name of a symbol with its parameters; the symbol itself where it is no mangled one.
pub fn demangled(symbol: &str) -> String {
    written(symbol, DemangleOptions::new()).unwrap_or_else(|| symbol.to_owned())
}

fn written(symbol: &str, options: DemangleOptions) -> Option<String> {
    // A lone letter is a mangled type: `e` would be a long double.
    if !symbol.starts_with("_Z") {
        return None;
    }
    let parsed =
        Symbol::new_with_options(symbol, &cpp_demangle::ParseOptions::default().recursion_limit(DEPTH));
    let name = parsed.ok()?.demangle_with_options(&options.recursion_limit(DEPTH)).ok()?;
    // What is static to a file is in a namespace that the compiler makes up.
    let Some(start) = name.find("_INTERNAL_") else { return Some(name) };
    let end = name[start..].find("::").map_or(start, |at| start + at + 2);
    Some(format!("{}{}", &name[..start], &name[end..]))
}

/// Every spelling that means a symbol, from `void ns::scale<float>(float*)` down to `scale`.
fn spellings(symbol: &str) -> Vec<String> {
    let mut all = vec![symbol.to_owned()];
    all.extend(written(symbol, DemangleOptions::new()));
    all.extend(written(symbol, DemangleOptions::new().no_return_type()));
    if let Some(name) = written(symbol, DemangleOptions::new().no_params().no_return_type()) {
        let plain = without_arguments(&name);
        let last = plain.rsplit("::").next().unwrap_or(&plain).to_owned();
        // `ns::scale<float>` without its namespace.
        let start = plain.rfind("::").map_or(0, |at| at + 2);
        all.extend([name.get(start..).unwrap_or(&name).to_owned(), last, plain, name]);
    }
    let uncast: Vec<String> = all.iter().filter_map(|name| without_casts(name)).collect();
    all.extend(uncast);
    all
}

/// A name whose template arguments are written as people write them, `block<128>` of `block<(unsigned int)128>`; none if they are.
fn without_casts(name: &str) -> Option<String> {
    let mut out = String::with_capacity(name.len());
    let (mut depth, mut rest) = (0, name);
    while let Some(c) = rest.chars().next() {
        let is_argument = depth > 0 && out.trim_end().ends_with(['<', ',']);
        let cast = rest.strip_prefix('(').filter(|_| is_argument).and_then(|cast| cast.split_once(')'));
        match cast.filter(|(_, value)| value.starts_with(|c: char| c.is_ascii_digit() || c == '-')) {
            Some((_, value)) => rest = value,
            None => {
                depth += i32::from(c == '<') - i32::from(c == '>');
                out.push(c);
                rest = &rest[c.len_utf8()..];
            }
        }
    }
    (out.len() < name.len()).then_some(out)
}

/// A name without its template arguments.
fn without_arguments(name: &str) -> String {
    let mut depth = 0;
    let outside = |c: char| {
        depth += i32::from(c == '<') - i32::from(c == '>');
        depth == 0 && c != '>'
    };
    let mut outside = outside;
    name.chars().filter(|c| outside(*c)).collect()
}

/// Spaces say nothing: `float *` and `float*` are the same.
fn squeezed(text: &str) -> String {
    text.chars().filter(|c| !c.is_whitespace()).collect()
}

/// The symbols that a name means: the one of exactly that name, else all that can be written so.
fn meant<'a>(name: &str, symbols: &[&'a str]) -> Vec<&'a str> {
    if let Some(exact) = symbols.iter().find(|symbol| **symbol == name) {
        return vec![exact];
    }
    let name = squeezed(name);
    let is_meant = |symbol: &&str| spellings(symbol).iter().any(|spelling| squeezed(spelling) == name);
    symbols.iter().copied().filter(is_meant).collect()
}

/// Names for a message, as people write them; of many those that are called what was asked for, if any are.
fn listed(symbols: &[&str], asked: &str) -> String {
    if symbols.is_empty() {
        return "none".to_owned();
    }
    let is_meant = |symbol: &&str| {
        let plain = |name: &str| without_arguments(name.split('(').next().unwrap_or(name)).trim().to_owned();
        let last = |name: String| name.rsplit("::").next().unwrap_or(&name).to_owned();
        spellings(symbol).contains(&last(plain(asked)))
    };
    let mut named: Vec<&str> = symbols.iter().copied().filter(is_meant).collect();
    if symbols.len() <= MOST_LISTED || named.is_empty() {
        named = symbols.to_vec();
    }
    let mut names: Vec<String> = named.iter().take(MOST_LISTED).map(|symbol| demangled(symbol)).collect();
    let more = symbols.len() - names.len();
    if more > 0 {
        names.push(format!("and {more} more"));
    }
    names.join(", ")
}

impl Module {
    /// The entry that a name means: its symbol, its C++ name with or without parameters, or the function's plain name where
    /// only one entry has it. Entries that cannot be run are found too, so that a launch can say why.
    pub fn entry_named(&self, name: &str) -> Result<String> {
        let all = self.all_entries()?;
        match meant(name, &all)[..] {
            [only] => Ok(only.to_owned()),
            [] => Err(Error::NoSuchEntry { name: name.to_owned(), available: listed(&all, name) }),
            ref several => {
                Err(Error::AmbiguousName { name: name.to_owned(), candidates: listed(several, name) })
            }
        }
    }

    /// The only entry there is.
    pub fn only_entry(&self) -> Result<String> {
        match self.all_entries()?[..] {
            [only] => Ok(only.to_owned()),
            ref several => Err(Error::EntryNeeded { available: listed(several, "") }),
        }
    }

    fn all_entries(&self) -> Result<Vec<&str>> {
        let all: Vec<&str> = self.entries().chain(self.refused().map(|(entry, _)| entry)).collect();
        if all.is_empty() { Err(Error::NoEntries) } else { Ok(all) }
    }

    /// The `__device__` or `__constant__` variable that a name means, as [`Module::entry_named`].
    pub fn variable_named(&self, name: &str) -> Result<String> {
        let mut all: Vec<&str> = self.variables().map(|(name, _)| name).collect();
        all.sort_unstable();
        match meant(name, &all)[..] {
            [only] => Ok(only.to_owned()),
            [] => Err(Error::NoSuchVariable { name: name.to_owned(), available: listed(&all, name) }),
            ref several => {
                Err(Error::AmbiguousName { name: name.to_owned(), candidates: listed(several, name) })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLOAT: &str = "_ZN2ns5scaleIfEEvPT_i";
    const DOUBLE: &str = "_ZN2ns5scaleIdEEvPT_i";

    #[test]
    fn a_symbol_has_many_spellings() {
        let all = [FLOAT, DOUBLE, "_Z5otherPi", "plain"];
        for name in [FLOAT, "ns::scale<float>", "scale<float>", "void ns::scale<float>(float *, int)"] {
            assert_eq!(meant(name, &all), [FLOAT], "{name}");
        }
        for name in ["scale", "ns::scale"] {
            assert_eq!(meant(name, &all), [FLOAT, DOUBLE], "{name}");
        }
        assert_eq!(meant("other", &all), ["_Z5otherPi"]);
        assert_eq!(meant("other(int*)", &all), ["_Z5otherPi"]);
        assert_eq!(meant("plain", &all), ["plain"]);
        assert!(meant("nothing", &all).is_empty());
        assert_eq!(demangled("_Z5otherPi"), "other(int*)");
        assert_eq!(demangled("_ZN37_INTERNAL_00000000_7_demo_cu_ccb4ed0b2ns6hiddenE"), "ns::hidden");
    }

    #[test]
    fn template_arguments_may_be_written_without_their_types() {
        // reduce<int, (unsigned int)128, true>(int*) and the same of 64; at<(short)-1>().
        let all = ["_Z6reduceIiLj128ELb1EEvPT_", "_Z6reduceIiLj64ELb1EEvPT_", "_Z2atILsn1EEvv"];
        for (i, name) in ["reduce<int, 128, true>", "reduce<int,64,true>", "at<-1>"].iter().enumerate() {
            assert_eq!(meant(name, &all), [all[i]], "{name}");
        }
        assert_eq!(meant("reduce<int, (unsigned int)128, true>(int*)", &all), [all[0]]);
        let enums = ["_Z2atIL1A0EEvv", "_Z2atIL1B0EEvv"];
        assert_eq!(meant("at<0>", &enums), enums);
        assert_eq!(meant("at<(B)0>", &enums), [enums[1]]);
    }

    #[test]
    fn a_message_names_what_is_near() {
        let many: Vec<String> = (0..200).map(|i| format!("_Z4manyILi{i}EEvv")).collect();
        let mut all: Vec<&str> = many.iter().map(String::as_str).collect();
        all.push("_ZN2ns3oneIfEEvPT_");
        let text = listed(&all, "one<double>");
        assert_eq!(text, "void ns::one<float>(float*), and 200 more");
        assert!(listed(&all, "other").ends_with("and 185 more"));
        assert_eq!(listed(&all[..2], "other"), "void many<0>(), void many<1>()");
        assert_eq!(listed(&[], "x"), "none");
    }

    #[test]
    fn hostile_symbols_are_their_own_names() {
        for symbol in
            ["_Z", "_ZN", "", "e", "main", "_Z99999999999999999999x", &format!("_Z{}", "PK".repeat(100_000))]
        {
            assert_eq!(demangled(symbol), symbol);
            let _ = spellings(symbol);
        }
    }
}
