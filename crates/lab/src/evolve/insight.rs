//! Insights: what a look at the best candidate suggests trying next, and whether such advice has helped before.
//!
//! An insight names tunables and the way to move them; which tunables answer which diagnosis is known in one place, the
//! profile's. A source of insights is anything that can look at an evaluation: [`StaticView`] reads resources and results,
//! and [`Profiler`](super::profiler::Profiler) profiles the candidate.

use std::{collections::BTreeMap, path::Path};

use evosdpa_core::file;
use serde::{Deserialize, Serialize};

use super::{
    log::{Evaluation, Standing},
    space::{Point, Space},
    trial::Trial,
};
use crate::{
    Error,
    error::IoContext,
    profile::{self, Bottleneck, Direction, Evidence, Insight, Knob},
    record::atomic,
};
use evosdpa_oracle::rng::Rng;

/// What a look at an evaluation said. It is kept in the log, so that nothing is looked at twice and a replay gives the same
/// advice.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Diagnosis {
    /// The evaluation.
    pub number: u64,
    /// What it rests on.
    pub view: Seen,
    /// Why there are no counters behind it, where they were asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub without_counters: Option<String>,
    /// The advice.
    pub insights: Vec<Insight>,
}

/// What a diagnosis rests on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Seen {
    /// A profiler's counters.
    Counters,
    /// The compiler's report and the simulator's counts.
    Simulated,
    /// The compiler's report and the times.
    Static,
}

/// Something that looks at an evaluation and gives advice.
pub trait InsightSource {
    /// Advice on how to go on from here. Where it cannot look closely it says less, and never fails.
    fn look(&self, best: &Evaluation, space: &Space) -> Diagnosis;
}

/// The points that differ from one in a single tunable that an insight names, moved its way.
pub fn moves(insight: &Insight, space: &Space, point: &Point) -> Vec<Point> {
    let mut moves = Vec::new();
    for hint in &insight.tunables {
        let (Some(dimension), Some(now)) = (space.dimension(&hint.name), point.get(&hint.name)) else {
            continue;
        };
        for value in dimension.values.iter().filter(|value| is_towards(hint.direction, *now, **value)) {
            let mut moved = point.clone();
            moved.insert(hint.name.clone(), *value);
            moves.push(moved);
        }
    }
    moves
}

/// Whether a tunable that an insight names moves its way from one point to another.
pub fn points(insight: &Insight, from: &Point, to: &Point) -> bool {
    let moves = |hint: &profile::Hint| {
        let values = from.get(&hint.name).zip(to.get(&hint.name));
        values.is_some_and(|(from, to)| is_towards(hint.direction, *from, *to))
    };
    insight.tunables.iter().any(moves)
}

fn is_towards(direction: Direction, from: i64, to: i64) -> bool {
    match direction {
        Direction::Up => to > from,
        Direction::Down => to < from,
    }
}

/// The built-in source: what resources and times say without a look at the kernel.
#[derive(Clone, Copy, Debug, Default)]
pub struct StaticView;

/// A call of a CPU that is shorter than this is about as short as waking a thread.
const WAKE_UP_US: f64 = 200.0;

impl InsightSource for StaticView {
    fn look(&self, best: &Evaluation, space: &Space) -> Diagnosis {
        let has: Vec<String> = space.dimensions.iter().map(|dimension| dimension.name.clone()).collect();
        let mut insights = match best.resources {
            Some(used) => profile::statics::insights(used.spill_bytes, used.occupancy, &[], &has),
            None => on_cpu(best, &has),
        };
        insights.retain(|insight| !insight.tunables.is_empty());
        Diagnosis { number: best.number, view: Seen::Static, without_counters: None, insights }
    }
}

/// What the times of a kernel that is not compiled on demand say.
fn on_cpu(best: &Evaluation, has: &[String]) -> Vec<Insight> {
    let mut all = Vec::new();
    let shortest_us = best.shapes.values().map(|shape| shape.p50_us).fold(f64::INFINITY, f64::min);
    if shortest_us < WAKE_UP_US {
        all.push(Insight {
            id: "wake-up".to_owned(),
            bottleneck: Bottleneck::Overhead,
            confidence: 0.6,
            evidence: vec![Evidence::derived(
                "shortest median",
                shortest_us,
                "us",
                "about as short as waking a thread",
            )],
            suggestion: "Fewer threads, or larger pieces of work for each.".to_owned(),
            tunables: profile::hints(&[Knob::FewerThreads, Knob::MoreRows], has),
        });
    }
    all.push(Insight {
        id: "packing".to_owned(),
        bottleneck: Bottleneck::Reuse,
        confidence: 0.3,
        evidence: Vec::new(),
        suggestion: "Keys and values are packed once per block of queries: more queries per block pack less often, more keys \
                     per block rescale less often."
            .to_owned(),
        tunables: profile::hints(&[Knob::MoreRows, Knob::MoreKeys], has),
    });
    all
}

/// What a log's diagnoses said, by tunables; [`StaticView`] where there is none.
pub struct Recorded<'a> {
    by_point: BTreeMap<&'a Point, &'a Diagnosis>,
}

impl<'a> Recorded<'a> {
    /// Of a tune's evaluations and its diagnoses.
    pub fn new(evaluations: &'a [Evaluation], diagnoses: &'a [Diagnosis]) -> Self {
        let of = |diagnosis: &'a Diagnosis| {
            let evaluation =
                evaluations.iter().find(|e| e.number == diagnosis.number && e.kernel.is_none())?;
            Some((&evaluation.point, diagnosis))
        };
        Self { by_point: diagnoses.iter().filter_map(of).collect() }
    }
}

impl InsightSource for Recorded<'_> {
    fn look(&self, best: &Evaluation, space: &Space) -> Diagnosis {
        match self.by_point.get(&best.point) {
            Some(&known) => Diagnosis { number: best.number, ..known.clone() },
            None => StaticView.look(best, space),
        }
    }
}

/// How often an insight was followed, and how often that helped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Candidates that went its way.
    pub tried: u32,
    /// Of those, better than the parent.
    pub helped: u32,
    /// Of those, accepted or promoted.
    #[serde(default)]
    pub accepted: u32,
    /// How many times as fast as its parent the best of them was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub best_speedup: Option<f64>,
}

impl Record {
    fn add(&mut self, trial: &Trial) {
        self.tried += 1;
        self.helped += u32::from(trial.helped);
        self.accepted += u32::from(trial.accepted);
        // Of `None` and a number the number is the larger.
        if trial.speedup > self.best_speedup {
            self.best_speedup = trial.speedup;
        }
    }
}

/// What is known of insights from earlier runs and this one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
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
        let text = file::read_text(path, file::TEXT_BYTES_MAX).doing("read", path, hint)?;
        serde_json::from_str(&text)
            .map_err(|error| Error::Tune(format!("{} is not what a tune writes: {error}", path.display())))
    }

    /// With what this run's history adds.
    pub fn with(&self, history: &[Evaluation]) -> Self {
        let mut all = self.clone();
        for evaluation in history {
            for trial in &evaluation.trials {
                all.insights.entry(trial.insight.clone()).or_default().add(trial);
            }
            // In logs without trials the insight that led to a candidate is the only one known to be tried.
            let led = evaluation.insight.as_ref().filter(|_| evaluation.trials.is_empty());
            if let Some((id, helped)) = led.zip(evaluation.helped) {
                let record = all.insights.entry(id.clone()).or_default();
                record.tried += 1;
                record.helped += u32::from(helped);
            }
        }
        all
    }

    /// The chance that an insight helps: its record, with one success and one failure added so that new ones get theirs.
    pub fn chance(&self, id: &str) -> f64 {
        let Record { tried, helped, .. } = self.insights.get(id).copied().unwrap_or_default();
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

/// How much an insight counts: its confidence times the chance that it helps.
pub fn weight(insight: &Insight, prior: &Prior) -> f64 {
    insight.confidence.clamp(0.0, 1.0) * prior.chance(&insight.id)
}

/// One of several things, drawn by their weights; `None` where all are 0.
pub fn draw<T>(of: Vec<T>, weight: impl Fn(&T) -> f64, rng: &mut Rng) -> Option<T> {
    let total: f64 = of.iter().map(&weight).sum();
    let mut left = rng.unit() * total;
    of.into_iter().find(|one| {
        left -= weight(one);
        left < 0.0
    })
}

/// Whether a candidate made from a parent is better by more than half a per cent.
pub fn helped(candidate: &Evaluation, parent: &Evaluation) -> bool {
    let better = candidate.fitness.zip(parent.fitness).is_some_and(|(own, parent)| own > parent * 1.005);
    better && candidate.status >= Standing::Kept
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::evolve::{
        log::{Resources, tests::evaluation},
        space::{Layer, tests::space},
    };

    pub(crate) fn insight(id: &str, confidence: f64, tunables: &[(&str, Direction)]) -> Insight {
        let hint =
            |&(name, direction): &(&str, Direction)| profile::Hint { name: name.to_owned(), direction };
        Insight {
            id: id.into(),
            bottleneck: Bottleneck::Latency,
            confidence,
            evidence: vec![],
            suggestion: String::new(),
            tunables: tunables.iter().map(hint).collect(),
        }
    }

    #[test]
    fn advice_moves_only_what_it_names_and_can_move() {
        let space = space(&[("STAGES", Layer::Micro, 3), ("BLOCK_M", Layer::Macro, 3)]);
        let advice = insight("x", 1.0, &[("STAGES", Direction::Up), ("ELSEWHERE", Direction::Down)]);
        let [moved] = moves(&advice, &space, &space.default_point()).try_into().unwrap();
        assert_eq!((moved["STAGES"], moved["BLOCK_M"]), (2, 1));
        assert!(moves(&advice, &space, &moved).is_empty(), "there is no larger value");
        assert!(points(&advice, &space.default_point(), &moved));
        assert!(!points(&advice, &moved, &space.default_point()) && !points(&advice, &moved, &moved));
    }

    #[test]
    fn a_look_without_a_profile_names_tunables_of_the_space() {
        let cuda = space(&[("STAGES", Layer::Micro, 3), ("BLOCK_N", Layer::Macro, 3)]);
        let mut compiled = evaluation(0, 1, 1.0);
        let used =
            |spill_bytes, occupancy| Resources { registers: 99, smem_bytes: 0, spill_bytes, occupancy };
        compiled.resources = Some(used(8, 0.5));
        let ids = |evaluation: &Evaluation, space: &Space| -> Vec<String> {
            StaticView.look(evaluation, space).insights.into_iter().map(|insight| insight.id).collect()
        };
        assert_eq!(ids(&compiled, &cuda), ["0-resources", "4-latency"]);
        compiled.resources = Some(used(0, 0.1));
        assert_eq!(ids(&compiled, &cuda), ["s-few-warps"]);
        let cpu = space(&[("THREADS", Layer::Micro, 3), ("BLOCK_Q", Layer::Macro, 3)]);
        assert_eq!(ids(&evaluation(0, 1, 1.0), &cpu), ["wake-up", "packing"]);
    }

    #[test]
    fn what_was_seen_before_is_not_looked_at_again() {
        let space = space(&[("STAGES", Layer::Micro, 3)]);
        let history = [evaluation(0, 1, 1.0), evaluation(1, 2, 1.1)];
        let seen = Diagnosis {
            number: 1,
            view: Seen::Counters,
            without_counters: None,
            insights: vec![insight("4-grid", 0.7, &[("STAGES", Direction::Up)])],
        };
        let diagnoses = [seen.clone()];
        let recorded = Recorded::new(&history, &diagnoses);
        // A replay counts anew, so the number is another.
        let replayed = Evaluation { number: 7, ..history[1].clone() };
        assert_eq!(recorded.look(&replayed, &space), Diagnosis { number: 7, ..seen });
        assert_eq!(recorded.look(&history[0], &space).view, Seen::Static);
    }

    #[test]
    fn what_helped_before_is_chosen_more_often() {
        let insights = [insight("good", 0.5, &[]), insight("bad", 0.5, &[])];
        let mut history = Vec::new();
        for n in 0..20 {
            let mut evaluation = evaluation(n, 0, 1.0);
            evaluation.insight = Some(if n % 2 == 0 { "good".into() } else { "bad".into() });
            evaluation.helped = Some(n % 2 == 0);
            history.push(evaluation);
        }
        let prior = Prior::default().with(&history);
        assert_eq!(prior.insights["good"], Record { tried: 10, helped: 10, ..Record::default() });
        let mut rng = Rng::new(5);
        let mut drawn =
            || draw(insights.iter().collect(), |insight| weight(insight, &prior), &mut rng).unwrap();
        let good = (0..1000).filter(|_| drawn().id == "good").count();
        assert!(good > 850, "{good}");
        let folder = tempfile::tempdir().unwrap();
        prior.write(folder.path()).unwrap();
        assert_eq!(Prior::read(&folder.path().join(PRIOR_FILE)).unwrap(), prior);
    }
}
