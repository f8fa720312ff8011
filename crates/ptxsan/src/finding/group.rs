//! One mistake is one finding: what the same pair of source lines shows is brought together.

use super::{Finding, Kind, Site};

/// What findings are the same by: kind, and the two places whichever came first.
#[derive(PartialEq, Eq)]
struct Key {
    kind: Kind,
    places: [Option<Place>; 2],
    /// An output that is not written has no place of its own.
    output: Option<String>,
}

/// A line of the source with its inline stack; without line information, the line of the PTX.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    Source(String),
    Ptx(u32),
}

impl Key {
    fn of(finding: &Finding) -> Self {
        let place = |site: &Site| match &site.source {
            Some(source) => Place::Source(source.clone()),
            None => Place::Ptx(site.ptx_line),
        };
        let mut places = [Some(place(&finding.site)), finding.other.as_ref().map(place)];
        places.sort();
        let is_output = finding.kind == Kind::UnwrittenOutput;
        let output = finding.variable.as_ref().filter(|_| is_output).map(|variable| variable.name.clone());
        Key { kind: finding.kind, places, output }
    }
}

/// Adds findings to others. What the same pair of source lines shows becomes one: counts are added, and the worst occurrence is
/// the one that is told, of equal ones that between the threads furthest apart. Worse findings come first; else the order in which they showed stays.
pub fn merge(into: &mut Vec<Finding>, more: impl IntoIterator<Item = Finding>) {
    let mut keys: Vec<Key> = into.iter().map(Key::of).collect();
    for mut finding in more {
        let key = Key::of(&finding);
        match keys.iter().position(|known| *known == key) {
            None => {
                keys.push(key);
                into.push(finding);
            }
            Some(at) => {
                let known = &mut into[at];
                let count = known.count.saturating_add(finding.count);
                let mut schedules = std::mem::take(&mut known.schedules);
                schedules.append(&mut finding.schedules);
                schedules.sort_unstable();
                schedules.dedup();
                let rank = |finding: &Finding| (finding.severity, finding.reach);
                if rank(&finding) > rank(known) {
                    *known = finding;
                }
                (known.count, known.schedules) = (count, schedules);
            }
        }
    }
    into.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
}
