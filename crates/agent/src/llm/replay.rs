//! Recorded answers instead of a model.

use std::{
    collections::{BTreeMap, VecDeque},
    path::Path,
    time::Instant,
};

use super::{Failure, Model, Reply, Turn};
use crate::propose::transcript::{self, Line};

/// The answers of a recorded tune, by evaluation.
pub(crate) struct Replay {
    answers: BTreeMap<u64, VecDeque<Result<Reply, Failure>>>,
}

impl Replay {
    /// Reads the transcript of a tune's folder.
    pub(crate) fn read(folder: &Path) -> anyhow::Result<Self> {
        let path = folder.join(transcript::FILE);
        let mut answers: BTreeMap<u64, VecDeque<_>> = BTreeMap::new();
        for line in transcript::read(&path)?.lines {
            let (number, answer) = match line {
                Line::Answered { number, text, stop, input_tokens, output_tokens, .. } => {
                    (number, Ok(Reply { text, stop, usage: Some((input_tokens, output_tokens)) }))
                }
                Line::Failed { number, why, .. } => (number, Err(Failure::Unanswered(why))),
                Line::Asked { .. } | Line::Proposed { .. } => continue,
            };
            answers.entry(number).or_default().push_back(answer);
        }
        anyhow::ensure!(!answers.is_empty(), "{} has no answers to replay", path.display());
        Ok(Self { answers })
    }
}

impl Model for Replay {
    fn ask(&mut self, number: u64, _: &[Turn], _: u64, _: Instant) -> Result<Reply, Failure> {
        self.answers.get_mut(&number).and_then(VecDeque::pop_front).unwrap_or(Err(Failure::UsedUp))
    }
}
