//! Functions of the user in Python: `formatting_func_path` and `dataset_processor_path`.

use std::fs;

use serde_json::json;

use crate::{
    sft::write_conversations,
    support::{Outcome, Sandbox, outcome},
};

/// A module with functions that are right, and functions that are wrong in one way each.
const MODULE: &str = r#"
import os
import sys

print("importing")

def chat(row, ending="."):
    print("a line that is no answer")
    turn = lambda role, content: {"role": role, "content": content}
    return {"messages": [turn("user", row["question"]), turn("assistant", row["answer"] + ending)]}

def raising(row):
    if row["answer"] == "It is 3":
        raise ValueError("three is out")
    return chat(row)

def listing(row):
    return [row]

def without(row):
    return {"conversation": []}

def strange(row):
    return {"messages": {1, 2}}

def infinite(row):
    return {"messages": float("nan")}

def leaving(row):
    os._exit(7)

def stopping(row):
    sys.exit("enough")

constant = 3
"#;

const PROCESSOR: &str = r#"
def process_data(dataset_name, tokenizer, template, config, x):
    assert dataset_name == "rows.jsonl" and config.train_data_columns == ["prompt", "chosen", "rejected"]
    return {"prompt": x["question"], "chosen": x["answer"], "rejected": x["answer"] + " not"}
"#;

fn sandbox() -> Sandbox {
    let sandbox = Sandbox::new();
    write_conversations(&sandbox);
    let row = |index: u32| json!({"question": format!("Say {index}"), "answer": format!("It is {index}"), "id": index});
    let rows: Vec<String> = (0..12).map(|index| row(index % 6).to_string()).collect();
    // Blank lines are no rows.
    fs::write(sandbox.path("rows.jsonl"), format!("{}\n\n{}\n", rows[..6].join("\n"), rows[6..].join("\n")))
        .unwrap();
    fs::write(sandbox.path("mine.py"), MODULE).unwrap();
    fs::write(sandbox.path("processor.py"), PROCESSOR).unwrap();
    sandbox
}

fn run(sandbox: &Sandbox, arguments: &[&str]) -> Outcome {
    outcome(&mut sandbox.program(arguments))
}

/// As [`run`], with nothing in PATH.
fn run_without_python(sandbox: &Sandbox, arguments: &[&str]) -> Outcome {
    outcome(sandbox.program(arguments).env("PATH", sandbox.path("nothing")))
}

const SFT: &[&str] = &["sft", "model.yml", "hf_train_files=rows.jsonl"];

#[test]
fn rows_become_conversations_once_and_runs_resume_without_python() {
    let sandbox = sandbox();
    // Rows and run names make the only difference from conversations in a file.
    let turn = |role: &str, content: String| json!({"role": role, "content": content});
    let lines: Vec<String> = (0..12)
        .map(|index| {
            let question = turn("user", format!("Say {}", index % 6));
            json!({"messages": [question, turn("assistant", format!("It is {}!", index % 6))]}).to_string()
        })
        .collect();
    fs::write(sandbox.path("chats.jsonl"), lines.join("\n")).unwrap();
    run(&sandbox, &["sft", "model.yml", "hf_train_files=chats.jsonl", "run_name=plain", "steps=8"])
        .succeeded();
    let function = ["formatting_func_path=mine.chat", "formatting_func_kwargs={'ending': '!'}"];
    let keys = [SFT, &function].concat();
    run(&sandbox, &[&keys[..], &["run_name=whole", "steps=8"]].concat()).succeeded();
    run(&sandbox, &[&keys[..], &["run_name=cut", "steps=5"]].concat()).succeeded();
    assert_eq!(sandbox.metrics("whole").losses(), sandbox.metrics("plain").losses());
    // The run has its own copy of the function's rows.
    let copy = fs::read_to_string(sandbox.path("runs/cut/data/train.jsonl")).unwrap();
    assert_eq!(copy.lines().count(), 12);
    fs::remove_file(sandbox.path("mine.py")).unwrap();
    run_without_python(&sandbox, &[&keys[..], &["run_name=cut", "steps=8"]].concat()).succeeded();
    assert_eq!(sandbox.metrics("whole").losses(), sandbox.metrics("cut").losses());
    let other = ["formatting_func_path=mine.raising", "run_name=cut", "steps=9"];
    run(&sandbox, &[SFT, &other].concat()).failed(2, &["formatting_func_path"]);
}

#[test]
fn a_processor_makes_the_columns_that_are_read() {
    let sandbox = sandbox();
    let columns = "train_data_columns=[prompt,chosen,rejected]";
    let keys =
        ["dpo", "model.yml", "hf_train_files=rows.jsonl", "dataset_processor_path=processor.py", columns];
    run(&sandbox, &[&keys[..], &["run_name=pairs", "steps=3"]].concat()).succeeded();
    let copy = fs::read_to_string(sandbox.path("runs/pairs/data/train.jsonl")).unwrap();
    assert!(
        copy.starts_with("{\"chosen\":\"It is 0\"") || copy.contains("\"rejected\":\"It is 0 not\""),
        "{copy}"
    );
    let of_run = ["run_name=pairs", "base_output_directory=runs"];
    let shown = run(&sandbox, &[&["data", "show", "--count", "1"], &of_run[..]].concat()).succeeded().output;
    assert!(shown.contains("It is"), "{shown}");
}

#[test]
fn mistakes_name_the_file_and_the_row() {
    let sandbox = sandbox();
    let failed = |function: &str, fragments: &[&str]| {
        let key = format!("formatting_func_path={function}");
        run(&sandbox, &[SFT, &[key.as_str(), "run_name=wrong"]].concat()).failed(2, fragments);
        assert!(!sandbox.path("runs/wrong/data/train.jsonl").exists());
    };
    failed(
        "mine.raising",
        &["`rows.jsonl`, line 4: ", "raised ValueError: three is out", "mine.py", "line 14"],
    );
    failed("mine.listing", &["`rows.jsonl`, line 1: ", "returned list, not a dictionary"]);
    failed("mine.without", &["line 1: ", "returned `conversation` without `messages`", "hint: "]);
    failed("mine.strange", &["line 1: ", "returned what JSON cannot hold", "set"]);
    failed("mine.infinite", &["line 1: ", "returned what JSON cannot hold"]);
    failed("mine.leaving", &["line 1: ", "`python3` ended (exit status: 7) instead of answering"]);
    failed("mine.stopping", &["line 1: ", "raised SystemExit: enough"]);
    failed(
        "mine.absent",
        &["`formatting_func_path=mine.absent`: it cannot be imported", "absent", "hint: write"],
    );
    failed("mine.constant", &["cannot be imported", "`constant` is no function"]);
    failed("nowhere.chat", &["cannot be imported", "No module named 'nowhere'"]);
    failed("chat", &["cannot be imported", "write `module.function`"]);

    let key = "formatting_func_path=mine.chat";
    run_without_python(&sandbox, &[SFT, &[key, "run_name=wrong"]].concat())
        .failed(2, &["`formatting_func_path=mine.chat`: there is no `python3`", "hint: install Python 3"]);
    // Nothing else needs an interpreter.
    run_without_python(&sandbox, &["sft", "model.yml", "hf_train_files=chats.jsonl", "steps=1"]).succeeded();

    let dpo = ["dpo", "model.yml", "hf_train_files=rows.jsonl", "run_name=wrong"];
    let processed = |file: &str, fragments: &[&str]| {
        let key = format!("dataset_processor_path={file}");
        run(&sandbox, &[&dpo[..], &[key.as_str()]].concat()).failed(2, fragments);
    };
    processed("mine.py", &["`dataset_processor_path=mine.py`: it cannot be imported", "process_data"]);
    processed("none.py", &["cannot be imported", "none.py"]);
    run(&sandbox, &[SFT, &[key, "dataset_processor_path=processor.py"]].concat())
        .refused(&["formatting_func_path", "rows have one function"]);
    run(&sandbox, &["sft", "model.yml", "hf_path=instructions", key])
        .refused(&["formatting_func_path", "generates"]);
}
