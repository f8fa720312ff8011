//! What a model answered, read strictly: tunables, a source and a rationale, or why it is none of these.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::request::Request;

/// The longest source that is taken.
const SOURCE_BYTES_MAX: usize = 1 << 20;
/// As much of a rationale is kept.
const RATIONALE_CHARS_MAX: usize = 2000;

/// A proposal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Parsed {
    pub(crate) tunables: BTreeMap<String, i64>,
    pub(crate) source: Option<String>,
    pub(crate) rationale: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    #[serde(default)]
    tunables: BTreeMap<String, i64>,
    #[serde(default)]
    rationale: Option<String>,
    #[serde(default)]
    source: Option<String>,
}

impl Parsed {
    /// Reads an answer: a fenced `json` object, a fenced `cuda` source, both, or nothing but the object.
    pub(crate) fn of(text: &str, request: &Request) -> Result<Self, String> {
        let text = after_thinking(text);
        let blocks = blocks(text)?;
        let is_json = |block: &&Block| block.language == "json";
        let is_source = |block: &&Block| ["cuda", "cu", "cpp", "c++", "c"].contains(&block.language);
        let only = |mut found: Vec<&Block>, what: &str| match found.len() {
            0 | 1 => Ok(found.pop().map(|block| block.text.clone())),
            several => Err(format!("there are {several} {what} blocks; give one")),
        };
        let json = only(blocks.iter().filter(is_json).collect(), "json")?;
        let code = only(blocks.iter().filter(is_source).collect(), "cuda")?;
        let bare = || {
            let text = text.trim();
            (blocks.is_empty() && text.starts_with('{')).then(|| text.to_owned())
        };
        let Document { tunables, rationale, source } = match json.or_else(bare) {
            Some(json) => serde_json::from_str(&json).map_err(|error| format!("the json block: {error}"))?,
            None if code.is_some() => Document { tunables: BTreeMap::new(), rationale: None, source: None },
            None => return Err("there is no json block and no cuda block in it".to_owned()),
        };
        if source.is_some() && code.is_some() {
            return Err("the source is there twice: in the json block and in a cuda block".to_owned());
        }
        let source = source.or(code);
        let rationale = rationale.map(|text| {
            text.chars().filter(|c| !c.is_control() || *c == '\n').take(RATIONALE_CHARS_MAX).collect()
        });
        let parsed = Self { tunables, source, rationale };
        parsed.check(request)?;
        Ok(parsed)
    }

    /// What can be said without trying it.
    fn check(&self, request: &Request) -> Result<(), String> {
        let dimensions = &request.task.space.dimensions;
        for (name, value) in &self.tunables {
            let Some(dimension) = dimensions.iter().find(|dimension| dimension.name == *name) else {
                let names: Vec<&str> = dimensions.iter().map(|dimension| dimension.name.as_str()).collect();
                return Err(format!("there is no tunable `{name}`; there are {}", names.join(", ")));
            };
            if !dimension.values.contains(value) {
                return Err(format!("{name} cannot be {value}; it can be {:?}", dimension.values));
            }
        }
        match &self.source {
            Some(_) if request.source.is_none() => Err(format!(
                "{} has no source to replace; answer with tunables alone",
                request.task.space.kernel
            )),
            Some(source) if source.trim().is_empty() => Err("the source is empty".to_owned()),
            Some(source) if source.len() > SOURCE_BYTES_MAX => {
                Err("the source is longer than 1 MiB".to_owned())
            }
            Some(_) => Ok(()),
            None if self.tunables.is_empty() => Err("it has neither tunables nor a source".to_owned()),
            None => Ok(()),
        }
    }
}

/// What follows a model's thinking, where its server leaves that in the text.
fn after_thinking(text: &str) -> &str {
    match text.trim_start().strip_prefix("<think>").and_then(|thought| thought.split_once("</think>")) {
        Some((_, answer)) => answer,
        None => text,
    }
}

struct Block<'a> {
    language: &'a str,
    text: String,
}

/// The fenced blocks of a text: three backticks or more, closed by as many or more.
fn blocks(text: &str) -> Result<Vec<Block<'_>>, String> {
    let mut blocks = Vec::new();
    let mut open: Option<(usize, Block<'_>)> = None;
    for line in text.lines() {
        let trimmed = line.trim();
        let ticks = trimmed.len() - trimmed.trim_start_matches('`').len();
        let after = trimmed[ticks..].trim();
        match &mut open {
            None if ticks >= 3 => {
                let language = after.split_whitespace().next().unwrap_or_default();
                open = Some((ticks, Block { language, text: String::new() }));
            }
            None => {}
            Some((fence, _)) if ticks >= *fence && after.is_empty() => {
                // Just seen to be there.
                blocks.extend(open.take().map(|(_, block)| block));
            }
            Some((_, block)) => {
                block.text.push_str(line);
                block.text.push('\n');
            }
        }
    }
    match open {
        Some((_, block)) => Err(format!("its {} block is not closed", block.language)),
        None => Ok(blocks),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn request(source: Option<&str>) -> Request {
        let dimension = |name: &str, values: &[i64]| serde_json::json!({"name": name, "layer": "macro", "values": values, "default": values[0], "why": "because"});
        serde_json::from_value(serde_json::json!({
            "number": 1, "left": 5, "source": source,
            "task": {"space": {"kernel": "k", "dimensions": [dimension("A", &[1, 2]), dimension("B", &[8, 16])]},
                "device_name": "d", "arch": "sm_90a", "problems": ["tiny f16"]},
            "elites": [], "insights": [], "history": [],
        }))
        .unwrap()
    }

    #[test]
    fn what_is_well_formed_is_read() {
        let request = request(Some("old"));
        let fenced = "I think\n```json\n{\"tunables\": {\"A\": 2}, \"rationale\": \"x\\u001b[31m\"}\n```\nand\n````cuda\n// ```\nnew\n````\n";
        let parsed = Parsed::of(fenced, &request).unwrap();
        assert_eq!((parsed.tunables["A"], parsed.source.as_deref()), (2, Some("// ```\nnew\n")));
        assert_eq!(parsed.rationale.as_deref(), Some("x[31m"));
        let bare = Parsed::of(" {\"tunables\": {\"B\": 16}}\n", &request).unwrap();
        assert_eq!((bare.tunables["B"], bare.source), (16, None));
        let thought = Parsed::of("<think>```json\n{}\n</think>```cuda\nx\n```", &request).unwrap();
        assert_eq!(thought.source.as_deref(), Some("x\n"));
    }

    #[test]
    fn what_is_not_is_refused_with_its_fault() {
        let with_source = request(Some("old"));
        for (text, expected) in [
            ("", "no json block"),
            ("I cannot help with that.", "no json block"),
            ("```python\nimport os\n```", "no json block"),
            ("```json\n{\"tunables\": {\"A\": 2}}", "not closed"),
            ("```cuda\nx", "not closed"),
            ("```json\n{\"tunables\": {\"A\": 2}}\n```\n```json\n{}\n```", "2 json blocks"),
            ("```cuda\nx\n```\n```cpp\ny\n```", "2 cuda blocks"),
            ("```json\n{\"tunables\": {\"A\": \"2\"}}\n```", "invalid type"),
            (
                "```json\n{\"tunables\": {\"A\": 2}, \"command\": \"rm -rf /\"}\n```",
                "unknown field `command`",
            ),
            ("```json\n{\"tunables\": {\"C\": 2}}\n```", "no tunable `C`; there are A, B"),
            ("```json\n{\"tunables\": {\"A\": 3}}\n```", "A cannot be 3; it can be [1, 2]"),
            ("```json\n{}\n```", "neither tunables nor a source"),
            ("```json\n{\"source\": \"x\"}\n```\n```cuda\ny\n```", "twice"),
            ("```cuda\n\n```", "empty"),
            ("{\"tunables\": {\"A\": 2}} and more", "trailing"),
        ] {
            let why = Parsed::of(text, &with_source).unwrap_err();
            assert!(why.contains(expected), "{text}: {why}");
        }
        let why = Parsed::of("```cuda\nx\n```", &request(None)).unwrap_err();
        assert!(why.contains("k has no source to replace"), "{why}");
    }
}
