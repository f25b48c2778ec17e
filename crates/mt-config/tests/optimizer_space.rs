//! The space of the optimizer where the configuration leaves the choice to the program.

use std::{fs, path::Path};

use mt_config::{Config, OptimizerGroup, OptimizerSpace, Request, RunRecord};

fn resolved(arguments: &[&str]) -> Config {
    let arguments = arguments.iter().map(|&argument| argument.to_owned()).collect();
    Config::resolve(&Request { arguments, ..Request::default() }).unwrap()
}

#[track_caller]
fn check(arguments: &[&str], expected: OptimizerSpace) {
    let config = resolved(arguments);
    assert_eq!(OptimizerGroup::from_config(&config).unwrap().space, expected, "{arguments:?}");
    assert_eq!(RunRecord::new(config).shown("optimizer_space"), expected.name(), "{arguments:?}");
}

const MAXTEXT: OptimizerSpace = OptimizerSpace::MaxText;
const PUBLISHED: OptimizerSpace = OptimizerSpace::Published;

/// Writes a file, possibly empty, and creates its parent directories.
fn write(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

/// The path within a directory, as the value of a key.
fn key(name: &str, directory: &Path, rest: &str) -> String {
    format!("{name}={}", directory.join(rest).display())
}

#[test]
fn what_is_named_counts() {
    check(&["optimizer_space=maxtext", "hf_model_path=models/llama"], MAXTEXT);
    check(&["optimizer_space=published"], PUBLISHED);
}

#[test]
fn weights_decide_where_a_run_begins_with_some() {
    check(&[], MAXTEXT);
    check(&["run_name=fresh"], MAXTEXT);
    check(&["hf_model_path=models/llama"], PUBLISHED);
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| key("load_parameters_path", directory.path(), name);
    for file in ["a/config.json", "b/model.safetensors", "c/model.safetensors.index.json", "d/params.json"] {
        write(&directory.path().join(file), "");
    }
    write(&directory.path().join("d/consolidated.00.pth"), "");
    for published in ["a", "b", "c", "d"] {
        check(&[&at(published)], PUBLISHED);
    }
    // Checkpoints of MaxText and of runs.
    write(&directory.path().join("maxtext/0/items/_METADATA"), "");
    write(&directory.path().join("run/config.yml"), "resolved: true\noptimizer_space: maxtext\n");
    write(&directory.path().join("run/config.json"), "");
    for other in ["maxtext/0/items", "run", "nothing"] {
        check(&[&at(other)], MAXTEXT);
    }
    // A run that was tuned from published weights, and one that was saved before the key existed.
    write(&directory.path().join("tuned/config.yml"), "resolved: true\noptimizer_space: published\n");
    write(&directory.path().join("earlier/config.yml"), "resolved: true\n");
    for other in ["tuned", "tuned/checkpoints/5", "earlier"] {
        check(&[&at(other)], PUBLISHED);
    }
}

#[test]
fn a_whole_state_is_stepped_as_it_was() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| key("load_full_state_path", directory.path(), name);
    let run = |name: &str, text: &str| write(&directory.path().join(name).join("config.yml"), text);
    run("earlier", "resolved: true\n");
    run("published", "resolved: true\noptimizer_space: published\n");
    run("maxtext", "resolved: true\noptimizer_space: \"maxtext\"\n");
    run("other", "steps: 10\n");
    check(&[&at("earlier/checkpoints/5")], PUBLISHED);
    check(&[&at("published")], PUBLISHED);
    check(&[&at("maxtext/checkpoints/5/items")], MAXTEXT);
    check(&[&at("other/checkpoints/5")], MAXTEXT);
    check(&[&at("nothing/5/items")], MAXTEXT);
}

#[test]
fn a_run_goes_on_as_it_began() {
    let directory = tempfile::tempdir().unwrap();
    let output = key("base_output_directory", directory.path(), "");
    let runs = [("earlier", "", PUBLISHED), ("a", "published", PUBLISHED), ("b", "maxtext", MAXTEXT)];
    for (name, recorded, expected) in runs {
        let line = if recorded.is_empty() { String::new() } else { format!("optimizer_space: {recorded}\n") };
        let run = directory.path().join(name);
        write(&run.join("config.yml"), &format!("resolved: true\n{line}"));
        let name = format!("run_name={name}");
        // Without a complete checkpoint the run starts anew.
        fs::create_dir_all(run.join("checkpoints/5.partial")).unwrap();
        check(&[&output, &name], MAXTEXT);
        check(&[&output, &name, "hf_model_path=models/llama"], PUBLISHED);
        fs::create_dir_all(run.join("checkpoints/5")).unwrap();
        check(&[&output, &name], expected);
        check(&[&output, &name, "hf_model_path=models/llama"], expected);
        // The saved file reproduces the run under another name.
        let file = run.join("config.yml").display().to_string();
        check(&[&file, &output, "run_name=again"], expected);
    }
}

#[test]
fn a_run_that_would_go_on_in_another_space_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let output = key("base_output_directory", directory.path(), "");
    let file = directory.path().join("run/config.yml");
    fs::create_dir_all(directory.path().join("run/checkpoints/0")).unwrap();
    let check = |recorded: &str, now: &[&str], expected: Option<(&str, &str)>| {
        write(&file, &format!("resolved: true\n{recorded}\n"));
        let now = RunRecord::new(resolved(&[&[output.as_str(), "run_name=run"], now].concat()));
        let saved = RunRecord::load(&file).unwrap();
        let of_space = |differences: Vec<mt_config::Difference>| {
            let mut found = differences.into_iter().filter(|found| found.key.name == "optimizer_space");
            found.next().map(|found| (found.left, found.right))
        };
        let expected = expected.map(|(left, right)| (left.to_owned(), right.to_owned()));
        assert_eq!(of_space(now.conflicts(1, &saved, 1)), expected, "{recorded:?}");
        assert_eq!(of_space(now.changes(&saved)), expected, "{recorded:?}");
    };
    let (maxtext, published) = ("optimizer_space=maxtext", "optimizer_space=published");
    for recorded in ["", "optimizer_space: maxtext", "optimizer_space: published"] {
        check(recorded, &[], None);
        check(recorded, &["optimizer_space=auto"], None);
    }
    check("optimizer_space: maxtext", &[published], Some(("maxtext", "published")));
    check("optimizer_space: published", &[maxtext], Some(("published", "maxtext")));
    check("optimizer_space: published", &[published], None);
    check("", &[published], None);
    check("", &[maxtext], Some(("published", "maxtext")));
}

#[test]
fn a_run_that_is_named_late_keeps_its_space() {
    let directory = tempfile::tempdir().unwrap();
    write(&directory.path().join("tuned/config.yml"), "resolved: true\noptimizer_space: published\n");
    write(&directory.path().join("tuned/checkpoints/5/_CHECKPOINT_METADATA"), "");
    let space = |config: &Config| OptimizerGroup::from_config(config).unwrap().space;
    let config = resolved(&[&key("base_output_directory", directory.path(), "")]);
    assert_eq!(space(&config), MAXTEXT);
    assert_eq!(space(&config.with_run_name("tuned")), PUBLISHED);
}
