//! Evaluators: processes that measure for a tune, on this machine or another, started by whatever runs commands there. They read
//! tasks from their standard input and answer on their standard output, a line of JSON each.
//!
//! A duel never leaves its evaluator: candidate and default are timed by the same process on the same device. The tune alone
//! proposes and writes the log.

mod pool;
mod remote;
mod serve;

use serde::{Deserialize, Serialize};

pub use pool::{Pool, Staff};
pub use serve::{give_up, serve};

use super::{
    insight::Diagnosis,
    log::Evaluation,
    space::Space,
    work::{Again, Done, Job},
};

/// The schema of what evaluators and tunes say to each other.
pub const SCHEMA: &str = "evosdpa.evaluator/1";

/// The variable that tells an evaluator its number, from 0.
pub const NUMBER_VARIABLE: &str = "EVOSDPA_EVALUATOR";

/// What an evaluator is, once it can work. All evaluators of a tune have to be alike, but for their host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ready {
    /// [`SCHEMA`].
    pub schema: String,
    /// Version of the program.
    pub version: String,
    /// The machine.
    pub host: String,
    /// The device's own name.
    pub device_name: String,
    /// What its kernels are compiled for.
    pub arch: String,
    /// SMs and the most shared memory of a block, on a GPU.
    pub gpu: Option<[u32; 2]>,
    /// What is tuned.
    pub space: Space,
}

impl Ready {
    /// What makes it another kind of evaluator than the first one.
    fn difference(&self, first: &Self) -> Option<String> {
        let pairs = [
            ("protocol", &self.schema, &first.schema),
            ("version of the program", &self.version, &first.version),
            ("device", &self.device_name, &first.device_name),
            ("architecture", &self.arch, &first.arch),
        ];
        for (what, own, of_first) in pairs {
            if own != of_first {
                return Some(format!(
                    "its {what} is {own}, the first evaluator's on {} {of_first}",
                    first.host
                ));
            }
        }
        let same = self.gpu == first.gpu && self.space == first.space;
        (!same)
            .then(|| format!("its GPU or tunables are others than the first evaluator's on {}", first.host))
    }
}

/// Work for an evaluator.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Order {
    /// What the answer is known by.
    id: u64,
    /// A source that the task's variant is made of, where it is not one of the program's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    source: Option<NewSource>,
    task: Task,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct NewSource {
    of: String,
    name: String,
    text: String,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Task {
    Default,
    Candidate(Job),
    Look(Box<Evaluation>),
    Confirm(String),
}

impl Task {
    fn kind(&self) -> &'static str {
        match self {
            Self::Default => "the default",
            Self::Candidate(_) => "a candidate",
            Self::Look(_) => "the look at the best",
            Self::Confirm(_) => "the confirmation",
        }
    }
}

/// What an evaluator says.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Word {
    /// It can work.
    Ready(Box<Ready>),
    /// It is still there.
    Alive,
    /// A task is done.
    Answer { id: u64, answer: Answer },
    /// It cannot go on, for this reason.
    GivesUp(String),
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    Done(Box<Done>),
    Diagnosis(Box<Diagnosis>),
    Again(Box<Again>),
}
