//! Every command that a page or `--help` shows is one that this program understands.

use std::{collections::BTreeSet, fs, path::PathBuf};

use clap::{CommandFactory, Parser, error::ErrorKind};

use super::Cli;

/// Pages of the repository that show commands.
fn pages() -> Vec<(String, String)> {
    let root = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    let listed = |folder: &str| -> Vec<PathBuf> {
        let entries = fs::read_dir(root.join(folder)).unwrap();
        entries.map(|entry| entry.unwrap().path()).collect()
    };
    let crates = listed("crates").into_iter().map(|folder| folder.join("README.md"));
    let all = listed(".").into_iter().chain(listed("docs")).chain(crates);
    let is_page = |path: &PathBuf| path.extension().is_some_and(|ending| ending == "md");
    let read = |path: PathBuf| (path.display().to_string(), fs::read_to_string(&path).unwrap());
    let mut pages: Vec<_> = all.filter(is_page).map(read).collect();
    // What --help shows.
    let mut program = Cli::command();
    program.build();
    for command in program.get_subcommands() {
        if let Some(text) = command.get_after_help() {
            pages.push((format!("{} --help", command.get_name()), format!("```sh\n{text}\n```\n")));
        }
    }
    pages
}

/// Commands of a page: lines of its code blocks, and what stands between backticks.
fn commands(page: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (at, part) in page.split("\n```").enumerate() {
        let is_block = at % 2 == 1;
        if is_block {
            found.extend(part.replace("\\\n", " ").lines().map(str::to_owned));
        } else {
            let text = part.trim_start_matches('`').replace('\n', " ");
            found.extend(text.split('`').skip(1).step_by(2).map(str::to_owned));
        }
    }
    found
}

/// The words of a line behind the program's name, as a shell reads them; none where it is another program's.
fn words(line: &str) -> Option<Vec<String>> {
    let line = line.trim().trim_start_matches("$ ").replace("cargo run --release -- ", "evosdpa ");
    let (mut words, mut word, mut quote) = (Vec::new(), String::new(), None);
    for c in line.chars().chain([' ']) {
        match (c, quote) {
            ('\'' | '"', None) => quote = Some(c),
            (c, Some(open)) if c == open => quote = None,
            (' ', None) => words.extend(Some(std::mem::take(&mut word)).filter(|word| !word.is_empty())),
            ('|' | '>' | '#' | ';', None) if word.is_empty() => break,
            (c, _) => word.push(c),
        }
    }
    let program = words.iter().position(|word| !word.contains('='))?;
    let is_command = |word: &String| word.starts_with('-') || word.chars().all(char::is_alphanumeric);
    let is_ours = words[program] == "evosdpa" && words.get(program + 1).is_some_and(is_command);
    // `…` stands for what a page leaves out.
    is_ours.then(|| words.into_iter().skip(program).filter(|word| word != "…" && word != "...").collect())
}

#[test]
fn commands_of_pages_are_understood() {
    let (mut seen, mut faults) = (BTreeSet::new(), Vec::new());
    for (page, text) in pages() {
        for words in commands(&text).iter().filter_map(|line| words(line)) {
            seen.insert(words[1].clone());
            match Cli::try_parse_from(&words) {
                Ok(_) => {}
                // A page may name a command or an option alone.
                Err(error)
                    if matches!(
                        error.kind(),
                        ErrorKind::MissingRequiredArgument
                            | ErrorKind::DisplayHelp
                            | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
                    ) => {}
                // An option alone: `evosdpa tune --llm`.
                Err(error)
                    if error.kind() == ErrorKind::InvalidValue
                        && words.last().is_some_and(|word| word.starts_with("--")) => {}
                // `evosdpa COMMAND --help`, `evosdpa plan SHAPE…`.
                Err(_)
                    if words
                        .iter()
                        .any(|word| word.trim_end_matches('…').chars().all(char::is_uppercase)) => {}
                Err(error) => faults.push(format!("{page}: {}\n  {error}", words.join(" "))),
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    let missing: Vec<_> = Cli::command()
        .get_subcommands()
        .filter(|command| !command.is_hide_set() && !seen.contains(command.get_name()))
        .map(|command| command.get_name().to_owned())
        .collect();
    assert!(missing.is_empty(), "no page shows {missing:?}");
}
