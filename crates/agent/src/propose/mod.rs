//! A proposer that is a language model: reads the lab's requests line by line and answers each with one line.
//!
//! What the model says is data. It becomes tunables, a source text and a rationale, or nothing. This process starts no
//! program, and writes into the tune's folder alone.

mod answer;
mod budget;
mod prompt;
mod request;
mod strategy;
pub(crate) mod transcript;

use std::{
    io::{BufRead, Write},
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use serde_json::{Value, json};

use self::{
    answer::Parsed,
    budget::{Budget, Price},
    request::Request,
    strategy::Plan,
    transcript::{Line, Transcript},
};
use crate::{
    confine,
    llm::{Api, Failure, Model, Reply, Role, Stop, Turn, http::Http, replay::Replay},
};

/// Answers that may fail to come in a row before the tune is given up.
const UNANSWERED_MAX: u32 = 3;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// The tune's folder: every prompt and answer is kept in its llm.jsonl
    #[arg(long, value_name = "FOLDER")]
    folder: PathBuf,
    /// Where the model is
    #[arg(long, value_name = "URL", required_unless_present = "replay", requires = "model")]
    url: Option<String>,
    /// The model's name there
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// How it is spoken to [default: as its address suggests]
    #[arg(long, value_name = "API")]
    api: Option<Api>,
    /// What it is shown
    #[arg(long, default_value = "full", value_name = "NAME")]
    strategy: strategy::Choice,
    /// Times in a row that it is asked to repair what it answered
    #[arg(long, default_value_t = 2, value_name = "N")]
    repairs: u32,
    /// Tokens at most, questions and answers of the whole tune together
    #[arg(long, value_name = "N")]
    tokens: Option<u64>,
    /// Money at most, in the currency of --price
    #[arg(long, value_name = "AMOUNT", requires = "price")]
    cost: Option<f64>,
    /// Price of a million tokens, of questions and of answers: 3/15
    #[arg(long, value_name = "IN/OUT")]
    price: Option<Price>,
    /// Tokens of one answer at most
    #[arg(long, default_value_t = 16_384, value_name = "N")]
    answer_tokens: u64,
    /// Seconds for each of the lab's requests
    #[arg(long, default_value_t = 600.0, value_name = "SECONDS")]
    timeout: f64,
    /// Answer with what a model said in another tune, whose folder this is
    #[arg(long, value_name = "FOLDER", conflicts_with = "url")]
    replay: Option<PathBuf>,
    /// Only check the options
    #[arg(long)]
    check: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    ensure!(
        args.timeout.is_finite() && args.timeout > 0.0,
        "--timeout: {} is no number of seconds",
        args.timeout
    );
    let limit = Duration::try_from_secs_f64(args.timeout).context("--timeout")?;
    let budget = Budget::new(args.tokens, args.cost, args.price)?;
    let model: Box<dyn Model> = match (&args.replay, &args.url, &args.model) {
        (Some(folder), ..) => Box::new(Replay::read(folder).context("--llm-replay")?),
        (None, Some(url), Some(model)) => Box::new(Http::new(url, model, args.api)?),
        _ => anyhow::bail!("--url and --model are needed"),
    };
    if args.check {
        return Ok(());
    }
    confine::start_no_program().context("this process cannot be kept from starting programs")?;
    // Where there is no Landlock, answers are data all the same; see the module's words.
    confine::write_only_below(&[&args.folder]).context("--folder")?;
    let mut requests = std::io::stdin().lock().lines();
    let transcript = match Transcript::open(&args.folder) {
        Ok(transcript) => transcript,
        Err(error) => {
            // The lab hears it as an answer.
            requests.next().transpose()?;
            return say(&gave_up(&error));
        }
    };
    let mut proposer = Proposer {
        model,
        transcript,
        budget,
        name: args.model.clone().unwrap_or_else(|| "replay".to_owned()),
        is_replay: args.replay.is_some(),
        strategy: args.strategy,
        repairs: args.repairs,
        answer_tokens: args.answer_tokens,
        // Ends before the lab would end this process.
        limit: limit.mul_f64(0.9),
        unanswered: 0,
    };
    for line in requests {
        let request: Request = serde_json::from_str(&line?).context("the lab's request")?;
        say(&proposer.propose(&request).unwrap_or_else(|error| gave_up(&error)))?;
    }
    Ok(())
}

fn gave_up(error: &anyhow::Error) -> Value {
    json!({"error": format!("{error:#}")})
}

fn say(answer: &Value) -> anyhow::Result<()> {
    let mut output = std::io::stdout().lock();
    writeln!(output, "{answer}").and_then(|()| output.flush()).context("the lab does not listen")
}

struct Proposer {
    model: Box<dyn Model>,
    transcript: Transcript,
    budget: Budget,
    name: String,
    is_replay: bool,
    strategy: strategy::Choice,
    repairs: u32,
    answer_tokens: u64,
    limit: Duration,
    unanswered: u32,
}

/// How a question ended.
enum Said {
    Reply(Reply),
    /// No reply; this is what the lab is told.
    Nothing(Value),
}

impl Proposer {
    /// The answer to one request. An error is about the disk.
    fn propose(&mut self, request: &Request) -> anyhow::Result<Value> {
        let number = request.number;
        let failed = self.transcript.to_repair(request, self.repairs);
        let plan = Plan::new(self.strategy, request, failed.is_some());
        let mut turns = vec![
            Turn::new(Role::System, prompt::system(request)),
            Turn::new(Role::User, prompt::user(request, &plan, failed.as_ref())),
        ];
        // Of a tune that was killed before this one was evaluated: the same question has its answer.
        if let Some(known) = self.transcript.proposed(number, &turns) {
            return Ok(known.clone());
        }
        let deadline = Instant::now() + self.limit;
        for attempt in 0..=self.repairs {
            let reply = match self.ask(number, attempt, &plan, &turns, deadline)? {
                Said::Reply(reply) => reply,
                Said::Nothing(answer) => return Ok(answer),
            };
            if reply.stop == Stop::Refused {
                let shown: String = reply.text.chars().filter(|c| !c.is_control()).take(300).collect();
                return Ok(plan.nothing(format!("the model refused to answer: {shown}")));
            }
            match Parsed::of(&reply.text, request) {
                Ok(parsed) => {
                    let answer = plan.answer(parsed);
                    self.transcript.add(Line::Proposed { number, answer: answer.clone() })?;
                    return Ok(answer);
                }
                Err(why) if attempt == self.repairs => {
                    let times = u64::from(attempt) + 1;
                    return Ok(
                        plan.nothing(format!("the model's answer was no proposal, {times} times: {why}"))
                    );
                }
                Err(why) => {
                    let why = match reply.stop {
                        Stop::Cut => format!("{why}. It was cut off at the limit of tokens: answer shorter"),
                        _ => why,
                    };
                    turns.push(Turn::new(Role::Assistant, reply.text));
                    turns.push(Turn::new(Role::User, prompt::malformed(&why)));
                }
            }
        }
        Ok(plan.nothing("the model was not asked".to_owned()))
    }

    fn ask(
        &mut self,
        number: u64,
        attempt: u32,
        plan: &Plan,
        turns: &[Turn],
        deadline: Instant,
    ) -> anyhow::Result<Said> {
        let estimate = budget::estimate(turns);
        let spent = self.transcript.spent();
        let tokens_max = match self.budget.allows(spent, estimate, self.answer_tokens) {
            _ if self.is_replay => self.answer_tokens,
            Ok(tokens_max) => tokens_max,
            Err(why) => return Ok(Said::Nothing(json!({"end": why}))),
        };
        self.transcript.add(Line::Asked {
            number,
            attempt,
            operator: plan.operator(),
            model: self.name.clone(),
            turns: turns.to_vec(),
            input_tokens_estimate: estimate,
        })?;
        let start = Instant::now();
        match self.model.ask(number, turns, tokens_max, deadline) {
            Ok(reply) => {
                self.unanswered = 0;
                let (input_tokens, output_tokens) =
                    reply.usage.unwrap_or_else(|| (estimate, budget::tokens_of(&reply.text)));
                let cost = self.budget.cost(input_tokens, output_tokens);
                self.transcript.add(Line::Answered {
                    number,
                    attempt,
                    text: reply.text.clone(),
                    stop: reply.stop.clone(),
                    input_tokens,
                    output_tokens,
                    is_estimate: reply.usage.is_none(),
                    cost,
                    seconds: start.elapsed().as_secs_f64(),
                    is_replay: self.is_replay,
                })?;
                Ok(Said::Reply(reply))
            }
            Err(Failure::UsedUp) => Ok(Said::Nothing(json!({"end": "the recorded answers are used up"}))),
            Err(Failure::Fatal(why)) => {
                self.transcript.add(Line::Failed { number, attempt, why: why.clone() })?;
                Ok(Said::Nothing(json!({"error": why})))
            }
            Err(Failure::Unanswered(why)) => {
                self.transcript.add(Line::Failed { number, attempt, why: why.clone() })?;
                self.unanswered += 1;
                Ok(Said::Nothing(match self.unanswered {
                    UNANSWERED_MAX.. => {
                        json!({"error": format!("{why}, {} times in a row", self.unanswered)})
                    }
                    _ => plan.nothing(why),
                }))
            }
        }
    }
}
