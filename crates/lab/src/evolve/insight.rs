//! Insights: what a look at the best candidate suggests trying next, and whether such advice has helped before.
//!
//! An insight names tunables and the way to move them. A source of insights is anything that can look at an evaluation: the
//! built-in one reads resources and results, and a profile of the kernel can be another.

use std::{collections::BTreeMap, path::Path};

use serde::{Deserialize, Serialize};

use super::{
    log::{Evaluation, Status},
    space::{Point, Space},
};
use crate::{Error, error::IoContext, measure::dice::Dice, record::atomic};

/// Which way to move a tunable.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// To a larger value.
    Up,
    /// To a smaller value.
    Down,
    /// To one of these.
    To(Vec<i64>),
}

/// Advice.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Insight {
    /// What the advice is known by, from run to run.
    pub id: String,
    /// What holds the kernel back.
    pub bottleneck: String,
    /// How sure the source is, from 0 to 1.
    pub confidence: f64,
    /// The advice in words.
    pub suggestion: String,
    /// The tunables it points at.
    pub tunables: Vec<(String, Direction)>,
}

impl Insight {
    /// The point with one of the named tunables moved, where that is possible.
    pub fn applied(&self, space: &Space, point: &Point, dice: &mut Dice) -> Option<Point> {
        let mut moves = Vec::new();
        for (name, direction) in &self.tunables {
            let (Some(dimension), Some(now)) = (space.dimension(name), point.get(name)) else { continue };
            let fits = |value: &&i64| match direction {
                Direction::Up => **value > *now,
                Direction::Down => **value < *now,
                Direction::To(values) => **value != *now && values.contains(value),
            };
            moves.extend(dimension.values.iter().filter(fits).map(|value| (name.clone(), *value)));
        }
        let (name, value) = dice.pick(&moves)?.clone();
        let mut moved = point.clone();
        moved.insert(name, value);
        Some(moved)
    }
}

/// Something that looks at an evaluation and gives advice.
pub trait InsightSource {
    /// Advice on how to go on from here.
    fn insights(&self, best: &Evaluation, space: &Space) -> Vec<Insight>;
}

/// The built-in source: what resources, shapes of the results and the names of tunables say without a profiler.
#[derive(Clone, Copy, Debug, Default)]
pub struct StaticView;

/// Occupancy below which more blocks may hide more latency.
const LOW_OCCUPANCY: f64 = 0.25;

impl InsightSource for StaticView {
    fn insights(&self, best: &Evaluation, space: &Space) -> Vec<Insight> {
        let mut all = Vec::new();
        let mut add =
            |id: &str, bottleneck: &str, confidence: f64, suggestion: &str, moves: &[(&str, Direction)]| {
                let tunables: Vec<(String, Direction)> = moves
                    .iter()
                    .filter(|(name, _)| space.dimension(name).is_some())
                    .map(|(name, direction)| ((*name).to_owned(), direction.clone()))
                    .collect();
                if !tunables.is_empty() {
                    all.push(Insight {
                        id: id.to_owned(),
                        bottleneck: bottleneck.to_owned(),
                        confidence,
                        suggestion: suggestion.to_owned(),
                        tunables,
                    });
                }
            };
        use Direction::{Down, To, Up};
        match best.resources {
            Some(resources) if resources.spill_bytes > 0 => add(
                "spills",
                "registers spill to local memory",
                0.9,
                "smaller tiles need fewer registers",
                &[("BLOCK_M", Down), ("BLOCK_N", Down), ("NUM_PRODUCER_WARPS", Down)],
            ),
            Some(resources) if resources.occupancy < LOW_OCCUPANCY => add(
                "low-occupancy",
                "few warps are resident, so latency shows",
                0.5,
                "less shared memory per block lets more blocks share a multiprocessor, and a deeper pipeline hides more",
                &[("STAGES", Down), ("BLOCK_N", Down), ("STAGES", Up), ("USE_PERSISTENT_CTA", To(vec![0]))],
            ),
            Some(_) => add(
                "latency",
                "enough warps are resident: what is left is waiting inside each of them",
                0.4,
                "fetch further ahead, or let other warps fetch",
                &[("STAGES", Up), ("USE_CP_ASYNC", To(vec![1])), ("NUM_PRODUCER_WARPS", Up)],
            ),
            None => {}
        }
        add(
            "scalar-work",
            "exponentials and conversions run beside the tensor cores",
            0.5,
            "cheaper exponentials, scores that stay in registers, P.V on tensor cores",
            &[
                ("USE_FAST_EXP", To(vec![1])),
                ("USE_FUSED_SOFTMAX", To(vec![1])),
                ("USE_WMMA_PV", To(vec![1])),
                ("USE_KV_LUT", To(vec![0, 1])),
            ],
        );
        let shortest_us = best.shapes.values().map(|shape| shape.p50_us).fold(f64::INFINITY, f64::min);
        if shortest_us < 200.0 {
            add(
                "wake-up",
                "the call is about as short as waking a thread",
                0.6,
                "fewer threads, or larger pieces of work for each",
                &[("THREADS", Down), ("BLOCK_Q", Up)],
            );
        }
        add(
            "packing",
            "keys and values are packed once per block of queries",
            0.3,
            "more queries per block pack less often; more keys per block rescale less often",
            &[("BLOCK_Q", Up), ("BLOCK_KV", Up), ("BLOCK_M", Up)],
        );
        all
    }
}

/// How often an insight was followed, and how often that helped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Candidates made from it.
    pub tried: u32,
    /// Of those, better than the parent.
    pub helped: u32,
}

/// What is known of insights from earlier runs and this one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prior {
    /// By the insight's id.
    pub insights: BTreeMap<String, Record>,
}

/// The prior's file in a tune's folder.
pub const PRIOR_FILE: &str = "insights.json";

impl Prior {
    /// Reads what an earlier run learned.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let hint = "name the insights.json of an earlier tune with --prior";
        let text = std::fs::read_to_string(path).doing("read", path, hint)?;
        serde_json::from_str(&text)
            .map_err(|error| Error::Tune(format!("{} is not what a tune writes: {error}", path.display())))
    }

    /// With what this run's history adds.
    pub fn with(&self, history: &[Evaluation]) -> Self {
        let mut all = self.clone();
        for evaluation in history {
            if let (Some(id), Some(helped)) = (&evaluation.insight, evaluation.helped) {
                let record = all.insights.entry(id.clone()).or_default();
                record.tried += 1;
                record.helped += u32::from(helped);
            }
        }
        all
    }

    /// The chance that an insight helps: its record, with one success and one failure added so that new ones get theirs.
    pub fn chance(&self, id: &str) -> f64 {
        let Record { tried, helped } = self.insights.get(id).copied().unwrap_or_default();
        f64::from(helped + 1) / f64::from(tried + 2)
    }

    /// Writes it whole.
    pub fn write(&self, folder: &Path) -> Result<(), Error> {
        // Plain data always serialises.
        let mut text = serde_json::to_vec_pretty(self).expect("records are plain data");
        text.push(b'\n');
        atomic::write(&folder.join(PRIOR_FILE), &text)
    }
}

/// An insight drawn with a weight of confidence times chance.
pub fn choose<'a>(insights: &'a [Insight], prior: &Prior, dice: &mut Dice) -> Option<&'a Insight> {
    let weight = |insight: &Insight| insight.confidence.clamp(0.0, 1.0) * prior.chance(&insight.id);
    let total: f64 = insights.iter().map(weight).sum();
    let mut left = dice.unit() * total;
    insights.iter().find(|insight| {
        left -= weight(insight);
        left < 0.0
    })
}

/// Whether a candidate made from a parent is better by more than half a per cent.
pub fn helped(candidate: &Evaluation, parent: &Evaluation) -> bool {
    let better = candidate.fitness.zip(parent.fitness).is_some_and(|(own, parent)| own > parent * 1.005);
    better && candidate.status >= Status::Kept
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evolve::{
        log::tests::evaluation,
        space::{Layer, tests::space},
    };

    #[test]
    fn advice_moves_only_what_it_names_and_can_move() {
        let space = space(&[("STAGES", Layer::Micro, 3), ("BLOCK_M", Layer::Macro, 3)]);
        let insight = Insight {
            id: "x".into(),
            bottleneck: String::new(),
            confidence: 1.0,
            suggestion: String::new(),
            tunables: vec![("STAGES".into(), Direction::Up), ("ELSEWHERE".into(), Direction::Down)],
        };
        let mut dice = Dice::new(1);
        let moved = insight.applied(&space, &space.default_point(), &mut dice).unwrap();
        assert_eq!((moved["STAGES"], moved["BLOCK_M"]), (2, 1));
        assert!(insight.applied(&space, &moved, &mut dice).is_none(), "there is no larger value");
        assert!(!StaticView.insights(&evaluation(0, 1, 1.0), &space).is_empty());
    }

    #[test]
    fn what_helped_before_is_chosen_more_often() {
        let insight = |id: &str| Insight {
            id: id.into(),
            bottleneck: String::new(),
            confidence: 0.5,
            suggestion: String::new(),
            tunables: vec![],
        };
        let insights = [insight("good"), insight("bad")];
        let mut history = Vec::new();
        for n in 0..20 {
            let mut evaluation = evaluation(n, 0, 1.0);
            evaluation.insight = Some(if n % 2 == 0 { "good".into() } else { "bad".into() });
            evaluation.helped = Some(n % 2 == 0);
            history.push(evaluation);
        }
        let prior = Prior::default().with(&history);
        assert_eq!(prior.insights["good"], Record { tried: 10, helped: 10 });
        let mut dice = Dice::new(5);
        let good = (0..1000).filter(|_| choose(&insights, &prior, &mut dice).unwrap().id == "good").count();
        assert!(good > 850, "{good}");
        let folder = tempfile::tempdir().unwrap();
        prior.write(folder.path()).unwrap();
        assert_eq!(Prior::read(&folder.path().join(PRIOR_FILE)).unwrap(), prior);
    }
}
