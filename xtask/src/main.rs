//! Repository automation: `cargo xtask tidy` checks what the compiler does not, `cargo xtask generate` writes the
//! files that are made from code.
//!
//! Phase: before a merge. It reads the tree as text and needs no network; of the other crates it knows those whose
//! code documents itself.

#![forbid(unsafe_code)]

mod generated;
mod repository;
mod tidy;

use std::process::ExitCode;

use anyhow::{Result, bail};

use repository::Repository;

const USAGE: &str = "\
usage: cargo xtask <task>

  tidy       check layering, crate headers, file sizes, leftovers, links and generated files
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
