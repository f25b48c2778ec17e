//! Repository automation: `cargo xtask tidy` runs checks that the compiler does not, and `cargo xtask generate` writes
//! the generated files.
//!
//! Phase: before a merge. It reads the tree as text and needs no network. Generated files come from the crates whose
//! code they document.

#![forbid(unsafe_code)]

mod generated;
mod repository;
mod tidy;

use std::process::ExitCode;

use anyhow::{Result, bail};

use repository::Repository;

const USAGE: &str = "\
usage: cargo xtask <task>

  tidy       check layers, crate headers, lengths, leftovers, printing, prose, links and generated files
  generate   write the generated files anew";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match run(&arguments) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn run(arguments: &[&str]) -> Result<ExitCode> {
    match arguments {
        ["tidy"] => {
            let repository = Repository::open()?;
            let findings = tidy::findings(&repository);
            for finding in &findings {
                eprintln!("{finding}");
            }
            if findings.is_empty() {
                println!("tidy: {} files are in order", repository.files.len());
                Ok(ExitCode::SUCCESS)
            } else {
                eprintln!("tidy: {} to fix", findings.len());
                Ok(ExitCode::FAILURE)
            }
        }
        ["generate"] => {
            for path in generated::write(&Repository::open()?)? {
                println!("wrote {path}");
            }
            Ok(ExitCode::SUCCESS)
        }
        ["help" | "--help" | "-h"] => {
            println!("{USAGE}");
            Ok(ExitCode::SUCCESS)
        }
        [] => bail!("no task\n{USAGE}"),
        [unknown, ..] => bail!("unknown task or arguments: `{unknown}`\n{USAGE}"),
    }
}
