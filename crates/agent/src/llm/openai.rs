//! Chat completions, as OpenAI's service and most servers of open models speak them.

use serde::Deserialize;
use serde_json::{Value, json};

use super::{Reply, Role, Stop, Turn};

/// The request's body. Servers of open models know the limit by its first name, OpenAI's own models by its second.
pub(crate) fn body(model: &str, turns: &[Turn], tokens_max: u64, is_openai: bool) -> Value {
    let role = |role| match role {
        Role::System => "system",
        Role::User => "user",
        Role::Assistant => "assistant",
    };
    let messages: Vec<Value> =
        turns.iter().map(|turn| json!({"role": role(turn.role), "content": turn.text})).collect();
    let limit = if is_openai { "max_completion_tokens" } else { "max_tokens" };
    json!({"model": model, "messages": messages, limit: tokens_max})
}

#[derive(Deserialize)]
struct Completion {
    choices: Vec<Choice>,
    usage: Option<Usage>,
}

#[derive(Deserialize)]
struct Choice {
    message: Message,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct Message {
    content: Option<String>,
    refusal: Option<String>,
}

#[derive(Deserialize)]
struct Usage {
    prompt_tokens: u64,
    completion_tokens: u64,
}

/// The answer in a response's body.
pub(crate) fn reply(body: &[u8]) -> Result<Reply, String> {
    let completion: Completion = serde_json::from_slice(body).map_err(|error| error.to_string())?;
    let choice = completion.choices.into_iter().next().ok_or("it has no choices")?;
    let refusal = choice.message.refusal.filter(|refusal| !refusal.is_empty());
    let stop = match choice.finish_reason.as_deref() {
        _ if refusal.is_some() => Stop::Refused,
        Some("content_filter") => Stop::Refused,
        Some("length") => Stop::Cut,
        _ => Stop::Complete,
    };
    let text = refusal.or(choice.message.content).unwrap_or_default();
    let usage = completion.usage.map(|usage| (usage.prompt_tokens, usage.completion_tokens));
    Ok(Reply { text, stop, usage })
}
