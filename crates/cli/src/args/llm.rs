//! A language model as the proposer of `evosdpa tune`.

use std::{ffi::OsString, path::PathBuf};

use clap::Args;

/// The options of `--llm`. What they mean is decided by `evosdpa-agent`, which gets them.
#[derive(Args)]
#[command(next_help_heading = "A language model as the proposer (needs evosdpa-agent; docs/llm.md)")]
pub(crate) struct Llm {
    /// Ask the language model at this address: chat completions, or Anthropic's messages. A key is read from
    /// EVOSDPA_LLM_API_KEY, or from the service's own variable for its own address
    #[arg(long, value_name = "URL", requires = "model", conflicts_with_all = ["proposer", "simulate"])]
    pub(crate) llm: Option<String>,
    /// The model's name there
    #[arg(long, value_name = "NAME", requires = "llm")]
    pub(crate) model: Option<String>,
    /// How the address is spoken to: openai or anthropic [default: as the address suggests]
    #[arg(long, value_name = "API", value_parser = ["openai", "anthropic"], requires = "llm")]
    llm_api: Option<String>,
    /// What the model is shown: free (task and best), insight (and insights), full (and elites and failures), or compare (each
    /// in turn) [default: full]
    #[arg(long, value_name = "NAME", value_parser = ["free", "insight", "full", "compare"])]
    llm_strategy: Option<String>,
    /// Times in a row that the model is asked to repair an answer that a gate rejected or that cannot be read [default: 2]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=100), allow_negative_numbers = true)]
    llm_repairs: Option<u32>,
    /// Tokens at most for the whole tune, questions and answers together
    #[arg(long, value_name = "N", requires = "llm", value_parser = clap::value_parser!(u64).range(1..), allow_negative_numbers = true)]
    llm_tokens: Option<u64>,
    /// Money at most for the whole tune, in the currency of --llm-price
    #[arg(long, value_name = "AMOUNT", requires = "llm_price")]
    llm_cost: Option<f64>,
    /// Price of a million tokens, of questions and of answers, such as 3/15
    #[arg(long, value_name = "IN/OUT", requires = "llm")]
    llm_price: Option<String>,
    /// Tokens of one answer at most [default: 16384]
    #[arg(long, value_name = "N", requires = "llm", value_parser = clap::value_parser!(u64).range(1..), allow_negative_numbers = true)]
    llm_answer_tokens: Option<u64>,
    /// Instead of a model: what one said in an earlier tune, whose folder this is
    #[arg(long, value_name = "FOLDER", conflicts_with_all = ["llm", "proposer", "simulate"])]
    pub(crate) llm_replay: Option<PathBuf>,
}

impl Llm {
    /// Whether a model, or what one said, proposes.
    pub(crate) fn is_asked_for(&self) -> bool {
        self.llm.is_some() || self.llm_replay.is_some()
    }

    /// The arguments of `evosdpa-agent propose`.
    pub(crate) fn arguments(&self, folder: &std::path::Path, limit_s: f64) -> Vec<OsString> {
        let number = |value: Option<u64>| value.map(|value| value.to_string());
        let texts = [
            ("--url", self.llm.clone()),
            ("--model", self.model.clone()),
            ("--api", self.llm_api.clone()),
            ("--strategy", self.llm_strategy.clone()),
            ("--repairs", number(self.llm_repairs.map(u64::from))),
            ("--tokens", number(self.llm_tokens)),
            ("--cost", self.llm_cost.map(|cost| cost.to_string())),
            ("--price", self.llm_price.clone()),
            ("--answer-tokens", number(self.llm_answer_tokens)),
            ("--timeout", Some(limit_s.to_string())),
        ];
        let paths = [("--folder", Some(folder)), ("--replay", self.llm_replay.as_deref())];
        let texts = texts.into_iter().filter_map(|(name, value)| Some((name, OsString::from(value?))));
        let paths = paths.into_iter().filter_map(|(name, path)| Some((name, path?.as_os_str().to_owned())));
        let joined = |(name, value): (&str, OsString)| {
            let mut argument = OsString::from(format!("{name}="));
            argument.push(value);
            argument
        };
        [OsString::from("propose")].into_iter().chain(texts.chain(paths).map(joined)).collect()
    }
}
