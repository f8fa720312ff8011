//! Anthropic's messages.

use serde::Deserialize;
use serde_json::{Value, json};

use super::{Reply, Role, Stop, Turn};

/// The version of the interface that requests name.
pub(crate) const VERSION: &str = "2023-06-01";

/// The request's body.
pub(crate) fn body(model: &str, turns: &[Turn], tokens_max: u64) -> Value {
    let of = |role| turns.iter().filter(move |turn| turn.role == role).map(|turn| turn.text.as_str());
    let said = turns.iter().filter(|turn| turn.role != Role::System).map(|turn| {
        let role = if turn.role == Role::Assistant { "assistant" } else { "user" };
        json!({"role": role, "content": turn.text})
    });
    json!({
        "model": model,
        "max_tokens": tokens_max,
        "system": of(Role::System).collect::<Vec<_>>().join("\n\n"),
        "messages": said.collect::<Vec<Value>>(),
    })
}

#[derive(Deserialize)]
struct Message {
    content: Vec<Block>,
    stop_reason: Option<String>,
    usage: Option<Usage>,
}

#[derive(Deserialize)]
struct Block {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    text: String,
}

#[derive(Deserialize)]
struct Usage {
    input_tokens: u64,
    output_tokens: u64,
    /// Tokens of the question that were kept for another time, or were kept before: `input_tokens` leaves them out.
    #[serde(default)]
    cache_creation_input_tokens: Option<u64>,
    #[serde(default)]
    cache_read_input_tokens: Option<u64>,
}

/// The answer in a response's body.
pub(crate) fn reply(body: &[u8]) -> Result<Reply, String> {
    let message: Message = serde_json::from_slice(body).map_err(|error| error.to_string())?;
    let text: Vec<String> =
        message.content.into_iter().filter(|block| block.kind == "text").map(|block| block.text).collect();
    let stop = match message.stop_reason.as_deref() {
        Some("max_tokens") => Stop::Cut,
        Some("refusal") => Stop::Refused,
        _ => Stop::Complete,
    };
    let usage = message.usage.map(|usage| {
        let kept =
            usage.cache_creation_input_tokens.unwrap_or(0) + usage.cache_read_input_tokens.unwrap_or(0);
        (usage.input_tokens + kept, usage.output_tokens)
    });
    Ok(Reply { text: text.concat(), stop, usage })
}
