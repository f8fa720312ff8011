//! A timeline in Chrome's trace format, which ui.perfetto.dev opens.
//!
//! Samples lie where they were taken, counted from the beginning of their run, and evaluations of a tune from its first moment.
//! Records that do not say when are laid end to end: samples in the order in which they were interleaved, round by round, and
//! evaluations one after the other.

use serde_json::{Value, json};

use super::super::{document::Document, evolution::Evolution};
use crate::{measure::interleave, record::Row};

pub(crate) fn render(document: &Document) -> String {
    let mut trace = Trace::default();
    let mut at_us = 0.0;
    for (i, problem) in document.problems().iter().enumerate() {
        let timed: Vec<&Row> =
            problem.rows.iter().copied().filter(|row| !row.samples_us.is_empty()).collect();
        trace.tracks(i + 1, &problem.name, &timed);
        if timed.iter().all(|row| row.samples_began_ns.len() == row.samples_us.len()) {
            trace.as_taken(i + 1, &timed);
        } else {
            at_us = trace.end_to_end(i + 1, &timed, at_us);
        }
    }
    for (i, evolution) in document.evolutions.iter().enumerate() {
        trace.tune(1000 + i, evolution);
    }
    format!("{}\n", json!({ "traceEvents": trace.events, "displayTimeUnit": "ns" }))
}

#[derive(Default)]
struct Trace {
    events: Vec<Value>,
}

impl Trace {
    fn name(&mut self, what: &str, pid: usize, tid: usize, name: &str) {
        self.events
            .push(json!({ "ph": "M", "name": what, "pid": pid, "tid": tid, "args": { "name": name } }));
    }

    /// A problem's name and those of its rows.
    fn tracks(&mut self, pid: usize, name: &str, rows: &[&Row]) {
        self.name("process_name", pid, 0, name);
        for (tid, row) in rows.iter().enumerate() {
            self.name("thread_name", pid, tid + 1, &row.kernel);
        }
    }

    fn sample(&mut self, row: &Row, place: [usize; 2], number: usize, round: usize, at_us: f64) {
        let [pid, tid] = place;
        self.events.push(json!({
            "ph": "X", "name": row.kernel, "cat": if row.baseline { "baseline" } else { "kernel" },
            "ts": at_us, "dur": row.samples_us[number], "pid": pid, "tid": tid,
            "args": { "sample": number, "round": round },
        }));
    }

    /// One problem's samples at the moments they were taken.
    fn as_taken(&mut self, pid: usize, rows: &[&Row]) {
        for (who, row) in rows.iter().enumerate() {
            let rounds = row.samples_per_round.iter().enumerate();
            let mut round_of = rounds.flat_map(|(round, count)| std::iter::repeat_n(round, *count));
            for (number, began_ns) in row.samples_began_ns.iter().enumerate() {
                let round = round_of.next().unwrap_or_default();
                self.sample(row, [pid, who + 1], number, round, *began_ns as f64 / 1e3);
            }
        }
    }

    /// One problem's samples from `start_us` on; gives where they end.
    fn end_to_end(&mut self, pid: usize, rows: &[&Row], start_us: f64) -> f64 {
        let mut at_us = start_us;
        let mut taken = vec![0usize; rows.len()];
        let rounds = rows.iter().map(|row| row.samples_per_round.len().max(1)).max().unwrap_or_default();
        for round in 0..rounds.max(interleave::ROUNDS.min(rounds)) {
            for turn in 0..rows.len() {
                // As measured: the order rotates from round to round.
                let who = (turn + round) % rows.len();
                let row = rows[who];
                let in_round = row.samples_per_round.get(round).copied();
                let count = in_round.unwrap_or(if round == 0 { row.samples_us.len() } else { 0 });
                for (i, us) in row.samples_us.iter().enumerate().skip(taken[who]).take(count) {
                    self.sample(row, [pid, who + 1], i, round, at_us);
                    at_us += us;
                }
                taken[who] += count;
            }
        }
        at_us
    }

    /// The evaluations of a tune on one track, with their parts inside them; what was done ahead on as many as it needs.
    fn tune(&mut self, pid: usize, evolution: &Evolution) {
        self.name("process_name", pid, 0, &format!("tune {}", evolution.source));
        self.name("thread_name", pid, 1, "evaluations");
        let began: Option<Vec<f64>> = evolution.evaluations.iter().map(|e| e.began_us).collect();
        let spans = || evolution.evaluations.iter().flat_map(|evaluation| &evaluation.spans);
        let moments = || began.iter().flatten().copied().chain(spans().map(|span| span.began_us as f64));
        let origin_us = moments().fold(f64::INFINITY, f64::min);
        // When each track of what is done ahead is free again.
        let mut free_us: Vec<f64> = Vec::new();
        let mut end_us = 0.0;
        for (i, evaluation) in evolution.evaluations.iter().enumerate() {
            // A second where the log does not say.
            let took_us = evaluation.took_us.unwrap_or(1e6);
            let at_us = began.as_ref().map_or(end_us, |began| began[i] - origin_us);
            let label = format!("{} {}", evaluation.operator, evaluation.id);
            self.events.push(json!({
                "ph": "X", "name": label, "cat": "evaluation", "ts": at_us, "dur": took_us, "pid": pid, "tid": 1,
                "args": {
                    "kernel": evaluation.kernel, "tunables": evaluation.tunables, "fitness": evaluation.fitness,
                    "accepted": evaluation.accepted, "insight": evaluation.insight,
                },
            }));
            end_us = at_us + took_us;
            // Beside evaluations of which nobody knows when, parts have no place.
            for span in evaluation.spans.iter().filter(|_| began.is_some()) {
                let (from_us, took_us) = (span.began_us as f64 - origin_us, 1e6 * span.seconds);
                let tid = if from_us >= at_us { 1 } else { 2 + track(&mut free_us, from_us, took_us) };
                let name = if tid == 1 { span.what.clone() } else { format!("{} {label}", span.what) };
                self.events.push(json!({
                    "ph": "X", "name": name, "cat": span.what, "ts": from_us, "dur": took_us, "pid": pid, "tid": tid,
                    "args": { "evaluation": evaluation.id },
                }));
            }
        }
        for track in 0..free_us.len() {
            self.name("thread_name", pid, 2 + track, "ahead");
        }
    }
}

/// The first track that is free at a moment; it is taken from then on.
fn track(free_us: &mut Vec<f64>, from_us: f64, took_us: f64) -> usize {
    let found = free_us.iter().position(|free| *free <= from_us).unwrap_or(free_us.len());
    if found == free_us.len() {
        free_us.push(0.0);
    }
    free_us[found] = from_us + took_us;
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{evolve::span::Span, report::Evaluation};

    fn row(kernel: &str, began_ns: &[u64]) -> Row {
        let mut row = Row::new(kernel, false, crate::device::DeviceId::Cpu, "tiny f32");
        row.samples_us = vec![2.0, 3.0, 4.0];
        row.samples_per_round = vec![2, 1];
        row.samples_began_ns = began_ns.to_vec();
        row
    }

    /// Where the samples of a kernel begin.
    fn starts(rows: &[&Row], kernel: &str) -> Vec<f64> {
        let mut trace = Trace::default();
        if rows.iter().all(|row| !row.samples_began_ns.is_empty()) {
            trace.as_taken(1, rows);
        } else {
            trace.end_to_end(1, rows, 0.0);
        }
        let own = trace.events.iter().filter(|event| event["name"] == kernel);
        own.map(|event| event["ts"].as_f64().unwrap()).collect()
    }

    #[test]
    fn samples_lie_where_they_were_taken_or_end_to_end() {
        let (a, b) = (row("a", &[1_000, 9_500, 40_000]), row("b", &[20_000, 25_000, 31_000]));
        assert_eq!(starts(&[&a, &b], "a"), [1.0, 9.5, 40.0]);
        assert_eq!(starts(&[&a, &b], "b"), [20.0, 25.0, 31.0]);
        let old = row("a", &[]);
        // Two of a, two of b, then b's third before a's: the order rotates.
        assert_eq!(starts(&[&old, &b], "a"), [0.0, 2.0, 14.0]);
    }
    fn evaluation(id: &str, began_us: Option<f64>, spans: &[(&str, u64)]) -> Evaluation {
        let span = |&(what, began_us): &(&str, u64)| Span { what: what.into(), began_us, seconds: 2e-6 };
        let mut evaluation =
            Evolution::parse(r#"{"kind":"evaluation","number":0,"operator":"sample","seconds":5e-6}"#)
                .evaluations
                .remove(0);
        evaluation.id = id.to_owned();
        evaluation.began_us = began_us;
        evaluation.spans = spans.iter().map(span).collect();
        evaluation
    }

    #[test]
    fn evaluations_lie_where_they_were_made_with_what_was_done_ahead_beside_them() {
        let first = evaluation("0", Some(1_000.0), &[("measure", 1_001)]);
        let second = evaluation("1", Some(1_040.0), &[("compile", 990), ("sim", 995), ("profile", 1_042)]);
        // Compiled at the same time as the second.
        let third = evaluation("2", Some(1_060.0), &[("compile", 991)]);
        let places = |evaluations: &[&Evaluation]| -> Vec<(String, f64, u64)> {
            let mut trace = Trace::default();
            let evaluations = evaluations.iter().map(|e| (*e).clone()).collect();
            trace.tune(7, &Evolution { evaluations, ..Evolution::default() });
            let slices = trace.events.iter().filter(|event| event["ph"] == "X");
            let place = |e: &Value| {
                (e["cat"].as_str().unwrap().into(), e["ts"].as_f64().unwrap(), e["tid"].as_u64().unwrap())
            };
            slices.map(place).collect()
        };
        let expected = [
            ("evaluation", 10.0, 1),
            ("measure", 11.0, 1),
            ("evaluation", 50.0, 1),
            ("compile", 0.0, 2),
            ("sim", 5.0, 2),
            ("profile", 52.0, 1),
            ("evaluation", 70.0, 1),
            ("compile", 1.0, 3),
        ];
        let expected = expected.map(|(cat, ts, tid)| (cat.to_owned(), ts, tid));
        assert_eq!(places(&[&first, &second, &third]), expected);
        // One from before the log said when: end to end.
        let old = evaluation("3", None, &[]);
        let starts: Vec<f64> = places(&[&old, &first]).into_iter().map(|(_, ts, _)| ts).collect();
        assert_eq!(starts, [0.0, 5.0]);
    }
}
