//! Links of the repository's pages lead somewhere: to a file that is there, and to a heading of it.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

/// Where links to this repository's own files begin, on pages that are read elsewhere too.
const OWN: &str = "https://github.com/evosdpa/evosdpa/blob/main/";

/// Every page, by its path in the repository.
fn pages(root: &Path) -> BTreeMap<PathBuf, String> {
    let mut found = BTreeMap::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap()) {
            let (path, name) = (entry.path(), entry.file_name().into_string().unwrap_or_default());
            if entry.file_type().unwrap().is_dir() {
                let is_made = name.starts_with('.') || name == "target" || name == "corpus";
                folders.extend(Some(path).filter(|_| !is_made));
            } else if name.ends_with(".md") {
                found.insert(path.strip_prefix(root).unwrap().to_owned(), fs::read_to_string(&path).unwrap());
            }
        }
    }
    found
}

/// The text outside of code blocks.
fn prose(page: &str) -> String {
    let mut fence: Option<usize> = None;
    let mut kept = String::new();
    for line in page.lines() {
        let ticks = line.chars().take_while(|c| *c == '`').count();
        match fence {
            None if ticks >= 3 => fence = Some(ticks),
            None => kept.extend([line, "\n"]),
            Some(open) if ticks >= open => fence = None,
            Some(_) => {}
        }
    }
    kept
}

/// The names under which GitHub knows the headings of a page.
fn anchors(page: &str) -> Vec<String> {
    let prose = prose(page);
    let headings = prose.lines().filter(|line| line.starts_with('#'));
    let name = |line: &str| -> String {
        let text = line.trim_start_matches('#').trim().to_lowercase().replace(' ', "-");
        text.chars().filter(|c| c.is_alphanumeric() || "-_".contains(*c)).collect()
    };
    headings.map(name).collect()
}

/// Targets of `[text](target)`, which may be broken over lines.
fn links(page: &str) -> Vec<String> {
    let prose = prose(page);
    prose.split("](").skip(1).filter_map(|rest| Some(rest.split_once(')')?.0.trim().to_owned())).collect()
}

#[test]
fn links_lead_somewhere() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let pages = pages(root);
    let mut faults = Vec::new();
    for (page, text) in &pages {
        for link in links(text) {
            let (place, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let target = match (place, place.strip_prefix(OWN)) {
                (_, Some(own)) => PathBuf::from(own),
                ("", _) => page.clone(),
                (place, _) if place.contains("://") => continue,
                (place, _) => page.parent().unwrap().join(place),
            };
            if !root.join(&target).exists() {
                faults.push(format!("{}: {link}: there is no such file", page.display()));
                continue;
            }
            let linked = root.join(&target).canonicalize().unwrap();
            let linked = linked.strip_prefix(root.canonicalize().unwrap()).unwrap();
            let has_it =
                pages.get(linked).is_none_or(|text| anchors(text).iter().any(|known| known == anchor));
            if !anchor.is_empty() && !has_it {
                faults.push(format!("{}: {link}: there is no such heading", page.display()));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    let count: usize = pages.values().map(|text| links(text).len()).sum();
    assert!(pages.len() > 20 && count > 100, "{} pages with {count} links", pages.len());
}
