//! A timeline in Chrome's trace format, which ui.perfetto.dev opens.
//!
//! A record keeps how long each sample took and in which order they were taken, not when: samples are laid end to end in
//! that order, round by round, as they were interleaved, and so are the evaluations of a tune.

use serde_json::{Value, json};

use super::super::{document::Document, evolution::Evolution};
use crate::{measure::interleave, record::Row};

pub(crate) fn render(document: &Document) -> String {
    let mut trace = Trace::default();
    let mut at_us = 0.0;
    for (i, problem) in document.problems().iter().enumerate() {
        let timed: Vec<&Row> =
            problem.rows.iter().copied().filter(|row| !row.samples_us.is_empty()).collect();
        at_us = trace.problem(i + 1, &problem.name, &timed, at_us);
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

    /// One problem's samples from `start_us` on; gives where they end.
    fn problem(&mut self, pid: usize, name: &str, rows: &[&Row], start_us: f64) -> f64 {
        self.name("process_name", pid, 0, name);
        for (tid, row) in rows.iter().enumerate() {
            self.name("thread_name", pid, tid + 1, &row.kernel);
        }
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
                let samples = row.samples_us.iter().enumerate().skip(taken[who]).take(count);
                for (i, us) in samples {
                    self.events.push(json!({
                        "ph": "X", "name": row.kernel, "cat": if row.peer { "peer" } else { "kernel" },
                        "ts": at_us, "dur": us, "pid": pid, "tid": who + 1,
                        "args": { "sample": i, "round": round },
                    }));
                    at_us += us;
                }
                taken[who] += count;
            }
        }
        at_us
    }

    fn tune(&mut self, pid: usize, evolution: &Evolution) {
        self.name("process_name", pid, 0, &format!("tune {}", evolution.source));
        let mut at_us = 0.0;
        for evaluation in &evolution.evaluations {
            // The log says how long each took, not when: one after the other, a second where it does not say.
            let took_us = evaluation.took_us.unwrap_or(1e6);
            self.events.push(json!({
                "ph": "X", "name": format!("{} {}", evaluation.operator, evaluation.id), "cat": "evaluation",
                "ts": at_us, "dur": took_us, "pid": pid, "tid": 1,
                "args": {
                    "kernel": evaluation.kernel, "tunables": evaluation.tunables, "fitness": evaluation.fitness,
                    "accepted": evaluation.accepted, "insight": evaluation.insight,
                },
            }));
            at_us += took_us;
        }
    }
}
