//! The table of suffixes in docs/problems.md: each is one, and there is none that it leaves out.

use evosdpa_core::{DType, Feature, Features, Problem, Shape};

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/problems.md");

/// The suffix in the first column of each row.
fn suffixes() -> Vec<String> {
    let page = std::fs::read_to_string(PAGE).unwrap();
    let table = page.split("\n## ").find(|section| section.starts_with("Suffixes")).unwrap();
    let rows = table.lines().filter_map(|line| line.strip_prefix("| `:"));
    rows.map(|row| row.split('`').next().unwrap().to_owned()).collect()
}

#[test]
fn the_documented_suffixes_are_those_that_there_are() {
    let mut found: Vec<Feature> = Vec::new();
    for suffix in suffixes().iter().map(String::as_str).chain(["scales=tensor"]) {
        let text = format!("b2h4/2s9/33d16:{suffix}");
        let shape: Shape = text.parse().unwrap_or_else(|error| panic!("{text}: {error}"));
        assert_eq!(shape.to_string(), text, "a row shows how a suffix is printed");
        // Scales belong to 8-bit queries, other types of K, V and O to the rest.
        let problems = [DType::BF16, DType::E4M3].map(|dtype| Problem::new(shape, dtype));
        let features = problems.iter().flatten().map(Problem::features);
        found.extend(
            Feature::ALL.into_iter().filter(|f| features.clone().any(|all: Features| all.contains(*f))),
        );
    }
    let missing: Vec<Feature> = Feature::ALL.into_iter().filter(|feature| !found.contains(feature)).collect();
    assert!(missing.is_empty(), "{PAGE} has no row for {missing:?}");
}
