//! Chart: the best fitness of a tune over its evaluations.

use super::{super::evolution::Evolution, Canvas, Chart, Scale, short};

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 260.0;
const X: [f64; 2] = [52.0, 700.0];
const Y: [f64; 2] = [216.0, 14.0];

/// Every evaluation's fitness, and the best so far as a line.
pub(crate) fn chart(id: &str, evolution: &Evolution) -> Option<Chart> {
    let fitness: Vec<f64> =
        evolution.evaluations.iter().filter_map(|e| e.fitness).filter(|f| f.is_finite()).collect();
    let (low, high) =
        fitness.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), f| (l.min(*f), h.max(*f)));
    if fitness.is_empty() {
        return None;
    }
    let x = Scale::between(1.0, (evolution.evaluations.len().max(2)) as f64, X);
    let y = Scale::between(low, high, Y);
    let mut canvas = Canvas::new(id, WIDTH, HEIGHT);
    for tick in x.ticks(8).into_iter().filter(|tick| *tick >= 1.0 && tick.fract() == 0.0) {
        canvas.text(x.place(tick), Y[0] + 16.0, "tick middle", &short_count(tick));
    }
    for tick in y.ticks(5) {
        canvas.line([X[0], y.place(tick)], [X[1], y.place(tick)], "grid");
        canvas.text(X[0] - 6.0, y.place(tick) + 4.0, "tick end", &format!("{tick:.3}"));
    }
    canvas.text((X[0] + X[1]) / 2.0, HEIGHT - 8.0, "axis middle", "evaluations");
    let mut path = String::new();
    for (i, best) in evolution.best_so_far().iter().enumerate() {
        let Some(best) = best else { continue };
        let (px, py) = (x.place((i + 1) as f64), y.place(*best));
        path.push_str(&if path.is_empty() {
            format!("M{px:.1} {py:.1}")
        } else {
            format!("H{px:.1}V{py:.1}")
        });
    }
    canvas.push(format_args!(r#"<path d="{path}" class="best"/>"#));
    for (i, evaluation) in evolution.evaluations.iter().enumerate() {
        let px = x.place((i + 1) as f64);
        let Some(fitness) = evaluation.fitness.filter(|f| f.is_finite()) else {
            // What a gate stopped has no fitness: a small cross on the axis.
            let py = Y[0];
            canvas.line([px - 3.0, py - 3.0], [px + 3.0, py + 3.0], "stopped");
            canvas.line([px - 3.0, py + 3.0], [px + 3.0, py - 3.0], "stopped");
            continue;
        };
        let class = if evaluation.accepted { "accepted" } else { "rejected" };
        let tip = format!("{} by {}: fitness {}", evaluation.id, evaluation.operator, short(fitness));
        let shape = format_args!(r#"circle cx="{px:.1}" cy="{:.1}" r="3.5""#, y.place(fitness));
        canvas.mark(evaluation.id.clone(), fitness, shape, class, &tip);
    }
    Some(canvas.finish("Fitness by evaluation, and the best so far"))
}

fn short_count(tick: f64) -> String {
    format!("{tick:.0}")
}
