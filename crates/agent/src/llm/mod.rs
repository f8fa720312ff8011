//! Language models: what is said to them, what comes back, and what can go wrong.

pub(crate) mod anthropic;
pub(crate) mod http;
pub(crate) mod openai;
pub(crate) mod replay;

use std::time::Instant;

use serde::{Deserialize, Serialize};

/// Who says something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Role {
    System,
    User,
    Assistant,
}

/// One thing said.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Turn {
    pub(crate) role: Role,
    pub(crate) text: String,
}

impl Turn {
    pub(crate) fn new(role: Role, text: impl Into<String>) -> Self {
        Self { role, text: text.into() }
    }
}

/// Why an answer ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Stop {
    /// It was complete.
    Complete,
    /// It reached the limit of tokens.
    Cut,
    /// The model, or who runs it, would not answer.
    Refused,
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reply {
    pub(crate) text: String,
    pub(crate) stop: Stop,
    /// Tokens of the question and of the answer, where the service says them.
    pub(crate) usage: Option<(u64, u64)>,
}

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// There will be none: what was asked of the service is wrong, or it is not there.
    Fatal(String),
    /// None this time.
    Unanswered(String),
    /// All recorded answers were given.
    UsedUp,
}

/// Something that answers.
pub(crate) trait Model {
    /// The answer to a conversation, for evaluation `number`, of at most so many tokens and before the deadline.
    fn ask(
        &mut self,
        number: u64,
        turns: &[Turn],
        tokens_max: u64,
        deadline: Instant,
    ) -> Result<Reply, Failure>;
}

/// How a service is spoken to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Api {
    /// Chat completions
    Openai,
    /// Messages
    Anthropic,
}
