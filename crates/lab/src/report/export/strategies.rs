//! What each way of proposing came to, and whether insights help: tables over any number of tunes.

use std::{collections::BTreeMap, fmt::Write};

use super::super::{
    document::Document,
    evolution::{Evaluation, Evolution},
};

/// More than this share fitter than the parent is better: as a trial of an insight counts it.
const HELPED_FROM: f64 = 1.005;

pub(crate) fn render(document: &Document) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write(&mut out, &document.evolutions);
    out
}

fn write(out: &mut String, tunes: &[Evolution]) -> std::fmt::Result {
    writeln!(out, "# Strategies and insights\n")?;
    if tunes.is_empty() {
        return writeln!(out, "None of what was named is a tune.");
    }
    let all: usize = tunes.iter().map(|tune| tune.evaluations.len()).sum();
    writeln!(out, "{all} evaluations of {} tunes:\n", tunes.len())?;
    for tune in tunes {
        let verdict = tune.verdict().map_or(String::new(), |verdict| format!("; {verdict}"));
        writeln!(out, "- {}: {} evaluations{verdict}", tune.source, tune.evaluations.len())?;
    }
    writeln!(out, "\n## Ways of proposing\n")?;
    writeln!(
        out,
        "| way | proposed | passed the gates | better than its parent | accepted | a new best | best over the default |"
    )?;
    writeln!(out, "|---|---|---|---|---|---|---|")?;
    for (name, way) in ways(tunes) {
        let Way { proposed, passed, with_parent, better, accepted, new_best, best } = way;
        let best = best.map_or("–".to_owned(), |best| format!("{best:.3}×"));
        writeln!(
            out,
            "| {name} | {proposed} | {passed} | {better} of {with_parent} | {accepted} | {new_best} | {best} |"
        )?;
    }
    writeln!(out, "\n## Insights\n")?;
    writeln!(out, "| candidates that | were | better than their parent | share |")?;
    writeln!(out, "|---|---|---|---|")?;
    let (followed, others) = followers(tunes);
    for (name, Count { tried, helped }) in [("followed an insight", followed), ("followed none", others)] {
        let share = if tried == 0 {
            "–".to_owned()
        } else {
            format!("{:.0} %", 100.0 * helped as f64 / tried as f64)
        };
        writeln!(out, "| {name} | {tried} | {helped} | {share} |")?;
    }
    let insights = insights(tunes);
    if !insights.is_empty() {
        writeln!(out, "\n| insight | tried | helped |\n|---|---|---|")?;
    }
    for (id, Count { tried, helped }) in insights {
        writeln!(out, "| {id} | {tried} | {helped} |")?;
    }
    Ok(())
}

/// What came of candidates that were proposed one way.
#[derive(Debug, Default, PartialEq)]
struct Way {
    proposed: usize,
    passed: usize,
    /// Of those that passed, with a parent whose fitness is known.
    with_parent: usize,
    better: usize,
    accepted: usize,
    new_best: usize,
    best: Option<f64>,
}

/// The way of an operator: the strategies of a language model are told apart, and what they make candidates of is not.
fn way_of(operator: &str) -> &str {
    let strategies = ["llm-free", "llm-insight", "llm-full"];
    strategies.into_iter().find(|strategy| operator.starts_with(strategy)).unwrap_or(operator)
}

fn ways(tunes: &[Evolution]) -> BTreeMap<&str, Way> {
    let mut ways: BTreeMap<&str, Way> = BTreeMap::new();
    for tune in tunes {
        let mut best_before = f64::NEG_INFINITY;
        for evaluation in &tune.evaluations {
            let fitness = fitness(evaluation);
            if evaluation.operator != "default" {
                let way = ways.entry(way_of(&evaluation.operator)).or_default();
                way.proposed += 1;
                way.passed += usize::from(evaluation.stopped_by.is_none());
                way.accepted += usize::from(evaluation.accepted);
                way.new_best +=
                    usize::from(evaluation.accepted && fitness.is_some_and(|own| own > best_before));
                let better = is_better(tune, evaluation);
                way.with_parent += usize::from(better.is_some());
                way.better += usize::from(better == Some(true));
                way.best = way.best.into_iter().chain(fitness).reduce(f64::max);
            }
            best_before = fitness.map_or(best_before, |own| best_before.max(own));
        }
    }
    ways
}

/// The fitness of a candidate that passed its gates.
fn fitness(evaluation: &Evaluation) -> Option<f64> {
    evaluation.fitness.filter(|fitness| fitness.is_finite() && evaluation.stopped_by.is_none())
}

/// Whether a candidate is better than its first parent, where both are known; one that a gate stopped is not.
fn is_better(tune: &Evolution, evaluation: &Evaluation) -> Option<bool> {
    let parent = evaluation.parents.first()?;
    let parent = tune.evaluations.iter().find(|known| known.id == *parent)?;
    let before = fitness(parent)?;
    Some(fitness(evaluation).is_some_and(|own| own > HELPED_FROM * before))
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Count {
    tried: usize,
    helped: usize,
}

impl Count {
    fn add(&mut self, helped: bool) {
        self.tried += 1;
        self.helped += usize::from(helped);
    }
}

/// Candidates that went an insight's way and those that went none: the second is what chance and the search alone achieve.
fn followers(tunes: &[Evolution]) -> (Count, Count) {
    let (mut followed, mut others) = (Count::default(), Count::default());
    for tune in tunes {
        for evaluation in &tune.evaluations {
            let Some(better) = is_better(tune, evaluation) else { continue };
            let of = if evaluation.trials.is_empty() { &mut others } else { &mut followed };
            of.add(better);
        }
    }
    (followed, others)
}

fn insights(tunes: &[Evolution]) -> BTreeMap<String, Count> {
    let mut insights: BTreeMap<String, Count> = BTreeMap::new();
    for (id, tried, helped) in tunes.iter().flat_map(Evolution::insights) {
        let count = insights.entry(id).or_default();
        count.tried += tried;
        count.helped += helped;
    }
    insights
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = r#"{"kind":"evaluation","number":0,"operator":"default","fitness":1.0,"status":"kept"}
{"kind":"evaluation","number":1,"parents":[0],"operator":"llm-free","fitness":0.9,"status":"out"}
{"kind":"evaluation","number":2,"parents":[0],"operator":"llm-insight","trials":[{"insight":"4-issue","helped":true}],"fitness":1.2,"status":"promoted"}
{"kind":"evaluation","number":3,"parents":[2],"operator":"llm-full-mutation","trials":[{"insight":"4-issue","helped":false}],"fitness":1.1,"status":"accepted"}
{"kind":"evaluation","number":4,"parents":[2],"operator":"llm-full-crossover","fitness":1.3,"status":"promoted"}
{"kind":"evaluation","number":5,"parents":[4],"operator":"llm-full-repair","gates":[{"gate":"sim","verdict":"FAIL","detail":""}],"fitness":null,"status":"rejected"}"#;

    #[test]
    fn ways_and_insights_are_counted_over_all_tunes() {
        let tune = Evolution::parse(LOG);
        let tunes = [tune.clone(), tune];
        let ways = ways(&tunes);
        assert_eq!(ways.keys().copied().collect::<Vec<_>>(), ["llm-free", "llm-full", "llm-insight"]);
        assert_eq!(
            (ways["llm-free"].proposed, ways["llm-free"].better, ways["llm-free"].new_best),
            (2, 0, 0)
        );
        let full = &ways["llm-full"];
        assert_eq!((full.proposed, full.passed, full.better, full.with_parent), (6, 4, 2, 6));
        assert_eq!((full.accepted, full.new_best, full.best), (4, 2, Some(1.3)));
        let (followed, others) = followers(&tunes);
        assert_eq!((followed, others), (Count { tried: 4, helped: 2 }, Count { tried: 6, helped: 2 }));
        let mut out = String::new();
        write(&mut out, &tunes).unwrap();
        assert!(out.contains("| llm-insight | 2 | 2 | 2 of 2 | 2 | 2 | 1.200× |"), "{out}");
        assert!(
            out.contains("| 4-issue | 4 | 2 |") && out.contains("| followed an insight | 4 | 2 | 50 % |"),
            "{out}"
        );
    }
}
