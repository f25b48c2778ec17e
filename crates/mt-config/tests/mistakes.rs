//! User mistakes with their complete error messages.

mod common;

use std::{fmt::Write as _, fs};

use mt_config::Request;

/// One mistake of the table: files, environment variables and a command line.
#[derive(Default)]
struct Mistake {
    files: Vec<(String, String)>,
    command: String,
}

/// The message of a mistake, produced in a directory of its own.
fn message(mistake: &Mistake) -> String {
    let directory = tempfile::tempdir().unwrap();
    // Relative paths in messages do not depend on the machine.
    std::env::set_current_dir(directory.path()).unwrap();
    for (name, line) in &mistake.files {
        let text = fs::read_to_string(name).unwrap_or_default();
        fs::write(name, text + line + "\n").unwrap();
    }
    let mut words = common::words(&mistake.command);
    let command = words.iter().position(|word| ["train", "decode"].contains(&word.as_str())).unwrap();
    let arguments = words.split_off(command + 1);
    let variable =
        |word: &String| word.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()));
    let environment = words[..command].iter().map(|word| variable(word).unwrap()).collect();
    let request = Request { arguments, environment, ..Request::default() };
    match common::check(&words[command], request) {
        Ok(_) => panic!("`{}` is no mistake", mistake.command),
        Err(error) => {
            for problem in error.problems() {
                let hint = problem.hint().unwrap_or_else(|| panic!("no hint: {problem}"));
                assert!(!hint.is_empty(), "{problem}");
            }
            error.to_string()
        }
    }
}

#[test]
fn mistakes_are_explained() {
    let (mut table, mut count, mut mistake) = (String::new(), 0, Mistake::default());
    for line in include_str!("mistakes.txt").lines() {
        // Messages are indented.
        if line.starts_with("    ") {
            continue;
        }
        writeln!(table, "{line}").unwrap();
        if let Some(command) = line.strip_prefix("$ ") {
            mistake.command = command.to_owned();
            for line in message(&mistake).lines() {
                writeln!(table, "    {line}").unwrap();
            }
            mistake = Mistake::default();
            count += 1;
        } else if let Some((name, line)) = line.split_once("> ").filter(|_| !line.starts_with('#')) {
            mistake.files.push((name.to_owned(), line.to_owned()));
        }
    }
    assert!(count >= 50, "{count} mistakes");
    common::check_table("mistakes.txt", &table);
}
