//! Promises of the documents, and text that no file may contain.

use super::Finding;
use crate::generated::Generated;
use crate::repository::{Repository, TextFile};

/// The quick start's commands in the README's code blocks.
const QUICK_START: &[&str] = &["cargo run --release -- train", "cargo test"];

/// Package hosts. No file names one, since packages are fetched through clients as the user configured them. The names
/// are split so that this file is no finding.
const PACKAGE_HOSTS: &[&str] = &[
    concat!("py", "pi.org"),
    concat!("python", "hosted.org"),
    concat!("crates", ".io"),
    concat!("npm", "js.org"),
    concat!("docker", ".io"),
    concat!("ghcr", ".io"),
];

pub(super) fn check(repository: &Repository) -> Vec<Finding> {
    let mut findings = Vec::new();
    check_readme(repository, &mut findings);
    for file in &repository.files {
        // Cargo writes the index's address into its lock file.
        if file.path != "Cargo.lock" {
            check_hosts(file, &mut findings);
        }
        if file.path.ends_with(".md") {
            check_links(repository, file, &mut findings);
        }
    }
    findings
}

/// Checks that generated files equal the output of the code.
pub(super) fn check_generated(repository: &Repository, generated: &[Generated]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for generated in generated {
        let contents = (generated.contents)();
        let text = repository.text(generated.path).unwrap_or_default();
        if text != contents {
            let same = text.lines().zip(contents.lines()).take_while(|(now, then)| now == then).count();
            let message = "is out of date: run `cargo xtask generate`";
            findings.push(Finding::new(generated.path, same + 1, message));
        }
    }
    findings
}

fn check_readme(repository: &Repository, findings: &mut Vec<Finding>) {
    let Some(readme) = repository.text("README.md") else {
        findings.push(Finding::new("README.md", 1, "the repository has no README"));
        return;
    };
    for command in QUICK_START {
        if !code_lines(readme).any(|line| line == *command) {
            let message = format!("the quick start lacks the command `{command}` on a line of a code block");
            findings.push(Finding::new("README.md", 1, message));
        }
    }
}

fn check_hosts(file: &TextFile, findings: &mut Vec<Finding>) {
    for (index, line) in file.text.lines().enumerate() {
        if let Some(host) = PACKAGE_HOSTS.iter().find(|host| line.contains(**host)) {
            let message = format!("names the package host `{host}`: say what is fetched, not from where");
            findings.push(Finding::new(&file.path, index + 1, message));
        }
    }
}

/// Checks that links between files of the repository have targets.
fn check_links(repository: &Repository, file: &TextFile, findings: &mut Vec<Finding>) {
    let folder = file.path.rsplit_once('/').map_or("", |(folder, _)| folder);
    let mut in_code = false;
    for (index, line) in file.text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
        }
        if in_code {
            continue;
        }
        for target in line.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let target = target.split('#').next().unwrap_or_default();
            if target.is_empty() || target.contains(':') {
                continue;
            }
            let path = resolved(folder, target);
            let folder = format!("{path}/");
            let exists =
                repository.files.iter().any(|known| known.path == path || known.path.starts_with(&folder))
                    || repository.root.join(&path).is_file();
            if !exists {
                findings.push(Finding::new(
                    &file.path,
                    index + 1,
                    format!("the link `{target}` leads nowhere"),
                ));
            }
        }
    }
}

/// The path of a link's target from the root of the repository.
fn resolved(folder: &str, target: &str) -> String {
    let mut segments: Vec<&str> = folder.split('/').filter(|segment| !segment.is_empty()).collect();
    for segment in target.split('/') {
        match segment {
            "" | "." => {}
            ".." => {
                segments.pop();
            }
            name => segments.push(name),
        }
    }
    segments.join("/")
}

/// The lines inside fenced code blocks.
fn code_lines(text: &str) -> impl Iterator<Item = &str> {
    let mut in_code = false;
    text.lines().map(str::trim).filter(move |line| {
        let fence = line.starts_with("```");
        in_code ^= fence;
        in_code && !fence
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const README: (&str, &str) =
        ("README.md", "# A\n\n```sh\ncargo run --release -- train\ncargo test\n```\n");

    fn check_files(files: &[(&str, &str)], expected: &[&str]) {
        let findings: Vec<_> = check(&Repository::of(files)).iter().map(ToString::to_string).collect();
        assert_eq!(findings, expected);
    }

    #[test]
    fn the_readme_holds_the_quick_start() {
        check_files(&[README], &[]);
        check_files(&[], &["README.md:1: the repository has no README"]);
        check_files(
            &[("README.md", "Run `cargo run --release -- train`.\n\n```sh\ncargo test --workspace\n```\n")],
            &[
                "README.md:1: the quick start lacks the command `cargo run --release -- train` \
                 on a line of a code block",
                "README.md:1: the quick start lacks the command `cargo test` on a line of a code block",
            ],
        );
    }

    #[test]
    fn no_package_host_is_named() {
        let text = format!("first\nhttps://{}/simple\n", PACKAGE_HOSTS[0]);
        let expected = format!(
            "a.rs:2: names the package host `{}`: say what is fetched, not from where",
            PACKAGE_HOSTS[0]
        );
        check_files(&[README, ("a.rs", &text)], &[&expected]);
        check_files(&[README, ("Cargo.lock", &text)], &[]);
    }

    #[test]
    fn links_lead_to_files() {
        let text = "[a](b.md) [c](../README.md#top) [d](#here) [e](https://example.com/x) [f](deep/)\n\
                    [g](gone.md)\n```\nx[0](y)\n```\n";
        check_files(
            &[README, ("docs/a.md", text), ("docs/b.md", ""), ("docs/deep/c.md", "")],
            &["docs/a.md:2: the link `gone.md` leads nowhere"],
        );
    }

    #[test]
    fn generated_files_are_current() {
        let generated = [Generated { path: "docs/keys.md", contents: || "one\ntwo\n".to_owned() }];
        let check = |text: &str, expected: Option<usize>| {
            let findings = check_generated(&Repository::of(&[("docs/keys.md", text)]), &generated);
            assert_eq!(findings.first().map(|finding| finding.line), expected, "{text:?}");
        };
        check("one\ntwo\n", None);
        check("one\nthree\n", Some(2));
        check("", Some(1));
    }
}
