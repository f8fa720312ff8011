//! What a model is shown, and what it is asked to make a candidate of: the variants of EvoEngineer (arXiv 2510.03760).
//!
//! | | I1 task | I2 elites | I3 insights | goes on from |
//! |---|---|---|---|---|
//! | Free | yes | | | the best |
//! | Insight | yes | | yes, apart from solutions | the best |
//! | Full | yes | yes | yes | one elite (mutation) or two (crossover) |

use serde_json::{Value, json};

use super::{answer::Parsed, request::Request};

/// As asked for on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Choice {
    /// The task and the best candidate
    Free,
    /// The same and insights
    Insight,
    /// The same, all elites, and what failed and why
    Full,
    /// Each of the three in turn, so that one log compares them
    Compare,
}

/// What a model is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Strategy {
    Free,
    Insight,
    Full,
}

/// What a candidate is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operator {
    /// The best.
    Improve,
    /// One elite.
    Mutation,
    /// Two elites.
    Crossover,
    /// What the model answered last and a gate turned away.
    Repair,
}

/// How one candidate is to be made.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) strategy: Strategy,
    pub(crate) kind: Operator,
    pub(crate) parents: Vec<u64>,
}

impl Plan {
    /// The plan for a request. It follows from the request alone, so that a resumed tune asks the same.
    pub(crate) fn new(choice: Choice, request: &Request, is_repair: bool) -> Self {
        // A repair goes on with what was tried.
        let turn = if is_repair { request.number.saturating_sub(1) } else { request.number };
        let strategy = match choice {
            Choice::Free => Strategy::Free,
            Choice::Insight => Strategy::Insight,
            Choice::Full => Strategy::Full,
            Choice::Compare => [Strategy::Free, Strategy::Insight, Strategy::Full][(turn % 3) as usize],
        };
        let elites: Vec<u64> = request.elites.iter().map(|elite| elite.number).collect();
        let step = (request.number / 2) as usize;
        let (kind, parents) = match (strategy, elites.as_slice()) {
            _ if is_repair => (Operator::Repair, vec![request.number - 1]),
            (Strategy::Full, [first, .., _]) if request.number.is_multiple_of(2) => {
                let other = elites[1 + step % (elites.len() - 1)];
                (Operator::Crossover, vec![*first, other])
            }
            (Strategy::Full, [_, ..]) => (Operator::Mutation, vec![elites[step % elites.len()]]),
            (_, elites) => (Operator::Improve, elites.first().copied().into_iter().collect()),
        };
        Self { strategy, kind, parents }
    }

    /// Its name in the log.
    pub(crate) fn operator(&self) -> String {
        let strategy = match self.strategy {
            Strategy::Free => "llm-free",
            Strategy::Insight => "llm-insight",
            Strategy::Full => "llm-full",
        };
        let kind = match self.kind {
            Operator::Improve => "",
            Operator::Mutation => "-mutation",
            Operator::Crossover => "-crossover",
            Operator::Repair => "-repair",
        };
        format!("{strategy}{kind}")
    }

    /// The lab's answer with a candidate.
    pub(crate) fn answer(&self, parsed: Parsed) -> Value {
        let Parsed { tunables, source, rationale } = parsed;
        let mut answer = json!({"tunables": tunables, "operator": self.operator(), "parents": self.parents});
        if let Some(source) = source {
            answer["source"] = source.into();
        }
        if let Some(rationale) = rationale {
            answer["rationale"] = rationale.into();
        }
        answer
    }

    /// The lab's answer without one.
    pub(crate) fn nothing(&self, why: String) -> Value {
        json!({"none": why, "operator": self.operator(), "parents": self.parents})
    }
}
