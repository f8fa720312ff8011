//! The first five minutes of README, as somebody would spend them. Needs NVRTC, as `cargo xtask setup` installs it.

use std::process::Command;

/// Code blocks of a section, each with its language.
fn blocks(readme: &str, section: &str) -> Vec<(String, Vec<String>)> {
    let (_, text) = readme.split_once(&format!("## {section}\n")).expect("the section");
    let text = text.split("\n## ").next().unwrap();
    let mut all: Vec<(String, Vec<String>)> = Vec::new();
    let mut is_open = false;
    for line in text.lines() {
        match line.strip_prefix("```") {
            Some(language) if !is_open => all.push((language.to_owned(), Vec::new())),
            Some(_) => {}
            None if is_open => all.last_mut().unwrap().1.push(line.to_owned()),
            None => {}
        }
        is_open ^= line.starts_with("```");
    }
    all
}

#[test]
fn the_first_five_minutes_are_as_written() {
    let readme = include_str!("../README.md");
    let folder = tempfile::tempdir().unwrap();
    let mut commands = 0;
    for (language, lines) in blocks(readme, "Five minutes to the first race") {
        if language == "cuda" {
            let name = lines[0].strip_prefix("// ").expect("the name of the file");
            std::fs::write(folder.path().join(name), lines.join("\n")).unwrap();
        }
        if language != "console" {
            continue;
        }
        let mut said = String::new();
        for line in lines {
            let Some(command) = line.strip_prefix("$ ") else {
                // What stands below a command is what it prints.
                assert!(
                    line.trim().is_empty() || said.lines().any(|s| s == line),
                    "README: {line}\nprinted:\n{said}"
                );
                continue;
            };
            if let Some(words) = command.strip_prefix("ptxsan ") {
                let output = Command::new(env!("CARGO_BIN_EXE_ptxsan"))
                    .args(words.split_whitespace().map(|word| word.trim_matches('\'')))
                    .current_dir(folder.path())
                    .output()
                    .unwrap();
                assert_ne!(output.status.code(), Some(2), "{command}: {output:?}");
                said = String::from_utf8(output.stdout).unwrap();
                commands += 1;
            }
        }
    }
    assert!(commands >= 4, "{commands}");
}
