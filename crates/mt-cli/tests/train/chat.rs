//! `maxtext chat` over a pipe.

use std::{
    io::Write,
    process::{Command, Stdio},
};

use crate::{
    sft::write_conversations,
    support::{Outcome, Sandbox},
};

/// Runs a command with this standard input.
fn with_input(command: &mut Command, input: &str) -> Outcome {
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    Outcome {
        status: output.status.code().unwrap(),
        output: String::from_utf8_lossy(&output.stdout).into_owned(),
        errors: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

#[test]
fn each_line_is_a_message_of_a_conversation() {
    let sandbox = Sandbox::new();
    write_conversations(&sandbox);
    let train = ["sft", "model.yml", "hf_train_files=chats.jsonl", "run_name=tuned", "steps=2"];
    crate::support::outcome(&mut sandbox.program(&train)).succeeded();
    let chat = |keys: &[&str], input: &str| {
        let arguments = [&["chat", "load_parameters_path=runs/tuned"], keys].concat();
        with_input(&mut sandbox.program(&arguments), input)
    };
    // The conversation begins anew, so the answers are the same.
    let outcome = chat(&[], "Say 3\n\n/reset\nSay 3\n/nothing\n").succeeded();
    let lines: Vec<&str> = outcome.output.split_inclusive('\n').collect();
    let (first, second) = outcome.output.split_at(outcome.output.len() / 2);
    assert!(!lines.is_empty() && first == second, "{}", outcome.output);
    assert!(
        outcome.errors.contains("`/nothing` is no command; there are /reset and /exit"),
        "{}",
        outcome.errors
    );
    // A full context forgets the oldest messages, and a message that fills it alone is refused.
    let long = "word ".repeat(5) + "\n";
    let outcome = chat(&[], &long.repeat(3)).succeeded();
    assert!(outcome.errors.contains("no longer fit into the context"), "{}", outcome.errors);
    let outcome = chat(&[], &("word ".repeat(40) + "\nSay 3\n")).succeeded();
    assert!(outcome.errors.contains("the message is too long"), "{}", outcome.errors);
    assert_eq!(outcome.output, first);
    // Such a message leaves the conversation as it was.
    let around = |between: &str| chat(&[], &format!("Say 1\n{between}Say 2\n")).succeeded().output;
    assert_eq!(around(""), around(&("word ".repeat(40) + "\n")));
    chat(&["use_chat_template=false"], "Say 3\n").failed(2, &["needs the chat template", "`maxtext decode`"]);
    let bare = ["chat_template_path=none.jinja"];
    chat(&bare, "Say 3\n").failed(2, &["none.jinja"]);
}
