//! What is chosen for many problems, value by value: a change of a rule shows here all that it changes.

use std::{collections::BTreeMap, fmt::Write as _};

use super::*;

const GOLDEN: &str = include_str!("golden.txt");

/// The kernel of a choice with the values that its code is compiled with, as a line.
fn line(choice: &Choice) -> String {
    let mut line = choice.variant.id.kernel.clone();
    for (name, value) in choice.settings.iter() {
        write!(line, " {name}={value}").unwrap();
    }
    line
}

#[test]
fn choices_are_those_of_the_list() {
    let planner = embedded();
    let problems: Vec<_> = GOLDEN.lines().filter_map(|line| line.strip_prefix("  ")).collect();
    let mut chosen: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for problem in &problems {
        let (shape, dtype) = problem.split_once(' ').unwrap();
        let choice =
            choose_with(&planner, shape, dtype.parse().unwrap(), (Arch::Sm90a, None), |_| {}).unwrap();
        chosen.entry(line(&choice)).or_default().push(problem);
    }
    let text: String =
        chosen.iter().map(|(line, problems)| format!("{line}\n  {}\n", problems.join("\n  "))).collect();
    let listed: Vec<_> = GOLDEN.lines().filter(|line| !line.starts_with('#')).collect();
    let differs = text.lines().zip(&listed).find(|(now, then)| now != *then);
    assert!(
        differs.is_none() && text.lines().count() == listed.len(),
        "not what golden.txt says, first at {differs:?}; if that is meant, this is the new list:\n{text}"
    );
    assert_eq!(problems.len(), 320);
}
