//! Conversations: tokens and losses as in transformers and TRL (`goldens/conversations/generate.py`), and records that are
//! no examples.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mt_data::{
    AddedEnds, ChatTemplate, ConversationColumns, Conversations, DatasetOptions, Packing, RecordFormat,
    Remainder, Source, Tokenizer, TrainIterator, arrays,
};
use serde_json::{Value, json};

const BOTH: AddedEnds = AddedEnds { bos: false, eos: true };

fn goldens(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(name)
}

fn golden_cases() -> Value {
    serde_json::from_slice(&fs::read(goldens("conversations/conversations.json")).unwrap()).unwrap()
}

/// A directory with the tokenizer of the goldens.
fn tokenizer() -> (tempfile::TempDir, Tokenizer) {
    let directory = tempfile::tempdir().unwrap();
    fs::copy(goldens("conversations/tokenizer.json"), directory.path().join("tokenizer.json")).unwrap();
    let config = json!({ "bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>" });
    fs::write(directory.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    let tokenizer = Tokenizer::load(directory.path()).unwrap();
    (directory, tokenizer)
}

fn template(name: &str, directory: &Path) -> ChatTemplate {
    let text = match name {
        "marked" => golden_cases()["marked"].as_str().unwrap().to_owned(),
        _ => fs::read_to_string(goldens("chat_templates").join(format!("{name}.jinja"))).unwrap(),
    };
    ChatTemplate::from_text(name, &text, directory).unwrap()
}

fn columns(record: &Value) -> ConversationColumns {
    let names = if record.get("messages").is_some() { &["messages"][..] } else { &["prompt", "completion"] };
    ConversationColumns::of(&names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>()).unwrap()
}

#[test]
fn tokens_and_losses_are_those_of_the_references() {
    let (directory, tokenizer) = tokenizer();
    let content = golden_cases();
    for case in content["cases"].as_array().unwrap() {
        let template = case["template"].as_str().map(|name| template(name, directory.path()));
        let form = Conversations::new(columns(&case["record"]), template, true);
        let document = form.encode(&case["record"].to_string(), &tokenizer, BOTH, 1000).unwrap();
        assert_eq!(json!(document.tokens), case["tokens"], "{case}");
        assert_eq!(json!(document.trained), case["trained"], "{case}");
    }
}

/// Without marks, answers begin behind the prompt for them, and end with their last token.
#[test]
fn unmarked_templates_have_the_same_answers() {
    let (directory, tokenizer) = tokenizer();
    let content = golden_cases();
    for case in content["cases"].as_array().unwrap().iter().filter(|case| case["template"] == "marked") {
        let marked = content["marked"].as_str().unwrap();
        let text = marked.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "");
        // White space around the tags is removed by those of neighbors.
        let text = text.replace("\\n\\n' }}\n        \n        {{ message", "\\n\\n' }}{{ message");
        let text = text.replace("<|eot_id|>\n        \n    {%- else", "<|eot_id|>{%- else");
        let unmarked = ChatTemplate::from_text("unmarked", &text, directory.path()).unwrap();
        let form = Conversations::new(columns(&case["record"]), Some(unmarked), true);
        let document = form.encode(&case["record"].to_string(), &tokenizer, BOTH, 1000).unwrap();
        assert_eq!(json!(document.tokens), case["tokens"]);
        assert_eq!(json!(document.trained), case["trained"]);
    }
}

#[test]
fn all_tokens_have_a_loss_on_request() {
    let (directory, tokenizer) = tokenizer();
    let record =
        json!({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]});
    let form = Conversations::new(columns(&record), Some(template("llama3", directory.path())), false);
    let document = form.encode(&record.to_string(), &tokenizer, BOTH, 1000).unwrap();
    assert!((0..document.tokens.len()).all(|index| document.is_trained(index)));
}

#[test]
fn records_that_are_no_examples_are_named() {
    let (directory, tokenizer) = tokenizer();
    let check = |name: Option<&str>, record: Value, expected: &str| {
        let form =
            Conversations::new(columns(&record), name.map(|name| template(name, directory.path())), true);
        let error = form.encode(&record.to_string(), &tokenizer, BOTH, 1000).unwrap_err();
        assert!(error.contains(expected), "{error}");
    };
    let turns = |content: Value| json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]);
    check(None, json!({"messages": turns("Ho".into())}), "has no chat template\nhint: name one");
    check(None, json!({"prompt": "a", "completion": "  "}), "the answer in column `completion` is empty");
    check(None, json!({"prompt": "a", "completion": null}), "column `completion` is empty");
    check(Some("llama3"), json!({"messages": turns(" ".into())}), "column `messages`, message 1, is empty");
    check(Some("llama3"), json!({"messages": turns(Value::Null)}), "message 1, is empty");
    check(
        Some("llama3"),
        json!({"messages": [{"role": "user", "content": "a"}]}),
        "has the role `assistant`",
    );
    check(
        Some("llama3"),
        json!({"messages": [{"content": "a"}]}),
        "message 0 in column `messages` has no `role`",
    );
    check(Some("llama3"), json!({"messages": "Hi"}), "does not hold a list of messages");
    check(Some("llama3"), json!({"prompt": 3, "completion": "a"}), "neither a text nor a list of messages");
}

/// A template that leaves reasoning out of earlier answers changes them when the conversation continues.
#[test]
fn templates_that_change_earlier_answers_are_refused() {
    let (directory, tokenizer) = tokenizer();
    let text = "{% for message in messages %}{{ message.role }}: {% if message.reasoning_content and loop.last %}\
                <think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}<|end|>{% endfor %}\
                {% if add_generation_prompt %}assistant: {% endif %}";
    let answer = |text: &str| json!({"role": "assistant", "content": text, "reasoning_content": "hm"});
    let user = json!({"role": "user", "content": "?"});
    let encode = |messages: Value| {
        let record = json!({"messages": messages});
        let template = ChatTemplate::from_text("stripping", text, directory.path()).unwrap();
        Conversations::new(columns(&record), Some(template), true).encode(
            &record.to_string(),
            &tokenizer,
            BOTH,
            1000,
        )
    };
    assert!(encode(json!([user, answer("a")])).is_ok());
    let error = encode(json!([user, answer("a"), user, answer("b")])).unwrap_err();
    assert!(
        error.contains("renders the conversation before an answer otherwise") && error.contains("hint: "),
        "{error}"
    );
}

#[test]
fn long_examples_are_cut_or_left_out_and_counted() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("pairs.jsonl");
    let pair = |prompt: usize, answer: usize| {
        json!({"prompt": "p".repeat(prompt), "completion": "a".repeat(answer), "further": 3}).to_string()
    };
    let lines = [pair(3, 4), pair(3, 40), pair(40, 3), pair(2, 2)];
    fs::write(&path, lines.join("\n")).unwrap();
    let columns: Vec<String> = ["prompt", "completion"].map(str::to_owned).into();
    let form = Arc::new(Conversations::new(ConversationColumns::of(&columns).unwrap(), None, true));
    let files = vec![path.to_str().unwrap().to_owned()];
    let source = Source::Records { files, format: RecordFormat::JsonLines, columns };
    let options = DatasetOptions {
        conversations: Some(form.clone()),
        packing: Packing::FirstFit,
        shuffle: false,
        num_epoch: Some(1),
        remainder: Remainder::Pad,
        add_bos: false,
        ..DatasetOptions::training(source, 12, 2)
    };
    let mut iterator = TrainIterator::open(options, Some(Arc::new(Tokenizer::bytes()))).unwrap();
    let batch = iterator.next().unwrap().unwrap();
    assert_eq!(
        batch.integers(arrays::INPUTS_SEGMENTATION),
        [[1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 0], [1; 12],].concat()
    );
    // The first token of an answer is the target of the prompt's last one. EOS is learned unless it was cut away.
    assert_eq!(
        batch.integers(arrays::TARGETS_SEGMENTATION),
        [[0, 0, 1, 1, 1, 1, 1, 0, 2, 2, 2, 0], [0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],].concat()
    );
    assert_eq!(batch.target_bytes, 4 + 10 + 2);
    assert!(iterator.next().unwrap().is_none());
    let counts = form.counts();
    assert_eq!([counts.read(), counts.shortened(), counts.left_out()], [4, 1, 1]);
}

#[test]
fn a_record_is_named_by_its_line() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("pairs.jsonl");
    fs::write(&path, "{\"q\": \"a\", \"a\": \"b\"}\n\n{\"q\": \"a\", \"a\": \"\"}\n").unwrap();
    let columns: Vec<String> = ["q", "a"].map(str::to_owned).into();
    let open = |columns: &[String]| {
        let form = Conversations::new(ConversationColumns::of(columns).unwrap(), None, true);
        let files = vec![path.to_str().unwrap().to_owned()];
        let source = Source::Records { files, format: RecordFormat::JsonLines, columns: columns.to_vec() };
        let options = DatasetOptions {
            conversations: Some(Arc::new(form)),
            shuffle: false,
            ..DatasetOptions::training(source, 8, 1)
        };
        TrainIterator::open(options, Some(Arc::new(Tokenizer::bytes())))
            .and_then(|mut iterator| iterator.next())
    };
    let error = open(&columns).unwrap_err();
    assert!(error.is_user_error());
    assert_eq!(error.to_string(), format!("`{}`, line 3: the answer in column `a` is empty", path.display()));
    let error = open(&["q".to_owned(), "answer".to_owned()]).unwrap_err().to_string();
    assert!(error.contains("line 1 has no column `answer`; it has `q`, `a`"), "{error}");
}
