//! Chart: the lineage of a tune's candidates.

use std::collections::BTreeMap;

use super::{super::evolution::Evolution, Canvas, Chart, short};

const COLUMN: f64 = 74.0;
const ROW: f64 = 34.0;
const MARGIN: f64 = 44.0;
/// More than this are not told apart any more: the accepted ones and their ancestors are kept.
const MOST: usize = 120;

/// A column for each generation, a node for each candidate, a line from each parent.
pub(crate) fn chart(id: &str, evolution: &Evolution) -> Option<Chart> {
    let all = &evolution.evaluations;
    if all.is_empty() {
        return None;
    }
    let wanted = |i: usize| all.len() <= MOST || all[i].accepted;
    let shown: Vec<usize> = (0..all.len()).filter(|&i| wanted(i)).take(MOST).collect();
    let index: BTreeMap<&str, usize> = all.iter().enumerate().map(|(i, e)| (e.id.as_str(), i)).collect();
    let mut depth = vec![0usize; all.len()];
    for (i, evaluation) in all.iter().enumerate() {
        // Parents come before their children in the log; one that does not is not an ancestor.
        let parents =
            evaluation.parents.iter().filter_map(|parent| index.get(parent.as_str())).filter(|&&p| p < i);
        depth[i] = parents.map(|&parent| depth[parent] + 1).max().unwrap_or(0);
    }
    let mut used: BTreeMap<usize, usize> = BTreeMap::new();
    let mut places: BTreeMap<usize, [f64; 2]> = BTreeMap::new();
    for &i in &shown {
        let row = used.entry(depth[i]).or_default();
        places.insert(i, [MARGIN + depth[i] as f64 * COLUMN, MARGIN + *row as f64 * ROW]);
        *row += 1;
    }
    let columns = used.len().max(1) as f64;
    let rows = used.values().max().copied().unwrap_or(1) as f64;
    let width = (2.0 * MARGIN + (columns - 1.0) * COLUMN).max(360.0);
    let mut canvas = Canvas::new(id, width, 2.0 * MARGIN + (rows - 1.0) * ROW);
    for &i in &shown {
        for parent in all[i].parents.iter().filter_map(|parent| index.get(parent.as_str())) {
            if let (Some(from), Some(to)) = (places.get(parent), places.get(&i)) {
                let middle = (from[0] + to[0]) / 2.0;
                canvas.push(format_args!(
                    r#"<path d="M{:.1} {:.1}C{middle:.1} {:.1} {middle:.1} {:.1} {:.1} {:.1}" class="edge"/>"#,
                    from[0], from[1], from[1], to[1], to[0], to[1]
                ));
            }
        }
    }
    let elites: Vec<&str> = evolution.elites().iter().map(|elite| elite.id.as_str()).collect();
    for &i in &shown {
        let (evaluation, [x, y]) = (&all[i], places[&i]);
        let class = match evaluation.fitness {
            _ if elites.contains(&evaluation.id.as_str()) => "elite",
            None => "stopped-node",
            Some(_) if evaluation.accepted => "accepted",
            Some(_) => "rejected",
        };
        let tunables: Vec<String> =
            evaluation.tunables.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let outcome = match (&evaluation.stopped_by, evaluation.fitness) {
            (Some(why), _) => why.clone(),
            (None, Some(fitness)) => format!("fitness {}", short(fitness)),
            (None, None) => "no fitness".to_owned(),
        };
        let tip = format!(
            "{} by {}: {} {}; {outcome}",
            evaluation.id,
            evaluation.operator,
            evaluation.kernel,
            tunables.join(" ")
        );
        let shape = format_args!(r#"circle cx="{x:.1}" cy="{y:.1}" r="7""#);
        canvas.mark(evaluation.id.clone(), evaluation.fitness.unwrap_or(0.0), shape, class, &tip);
        canvas.text(x, y + 18.0, "tick middle", &evaluation.id.chars().take(9).collect::<String>());
    }
    Some(canvas.finish("Lineage"))
}
