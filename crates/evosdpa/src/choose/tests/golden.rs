//! The choice is what it was when it was written in the manifests, but for the differences that are meant.

use std::collections::BTreeMap;

use super::*;

/// A line with values, and the problems below it.
type Section<'a> = (&'a str, Vec<&'a str>);

fn sections(text: &'static str) -> Vec<Section<'static>> {
    let mut sections: Vec<Section<'_>> = Vec::new();
    for line in text.lines().filter(|line| !line.trim().is_empty() && !line.starts_with('#')) {
        match (line.strip_prefix("  "), sections.last_mut()) {
            (Some(problem), Some((_, problems))) => problems.push(problem),
            _ => sections.push((line, Vec::new())),
        }
    }
    sections
}

/// `hopper_fwd CONSUMERS=2 … # why` as the kernel and its values.
fn values(line: &str) -> (&str, BTreeMap<&str, i64>) {
    let (line, _) = line.split_once(" # ").unwrap_or((line, ""));
    let (kernel, pairs) = line.split_once(' ').unwrap();
    let pairs = pairs.split(' ').map(|pair| {
        let (name, value) = pair.split_once('=').unwrap();
        (name, value.parse().unwrap())
    });
    (kernel, pairs.collect())
}

#[test]
fn choices_are_as_they_were_but_for_what_is_meant() {
    let mut meant = BTreeMap::new();
    for (line, problems) in sections(include_str!("merged.txt")) {
        assert!(line.contains(" # "), "{line} needs a reason");
        for problem in problems {
            assert!(meant.insert(problem, values(line).1).is_none(), "{problem} is there twice");
        }
    }
    let planner = embedded();
    let mut seen = 0;
    for (line, problems) in sections(include_str!("golden.txt")) {
        let (kernel, before) = values(line);
        for problem in problems {
            let (shape, dtype) = problem.split_once(' ').unwrap();
            let choice =
                choose_with(&planner, shape, dtype.parse().unwrap(), (Arch::Sm90a, None), |_| {}).unwrap();
            assert_eq!(choice.variant.id.kernel, kernel, "{problem}");
            let mut expected = before.clone();
            expected.extend(meant.remove(problem).unwrap_or_default());
            for (name, value) in expected {
                let of_tunable = choice.variant.id.tunables.value(name);
                let now = of_tunable.or_else(|| choice.variant.defines.get(name).copied());
                assert_eq!(now, Some(value), "{name} of {problem}");
            }
            seen += 1;
        }
    }
    assert!(meant.is_empty(), "not in golden.txt: {meant:?}");
    assert_eq!(seen, 320);
}
