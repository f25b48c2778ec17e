//! Conversations: tokens and losses as in transformers and TRL (`goldens/conversations/generate.py`), and records that are
//! no examples.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mt_data::{
    AddedEnds, BatchSource, ChatTemplate, ConversationColumns, Conversations, Dataset, DatasetOptions,
    Examples, MismatchedSource, Packing, PromptLimit, RecordFormat, Remainder, Source, Tokenizer,
    TrainIterator, arrays,
};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

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
    let template = ChatTemplate::from_text(name, &text, directory).unwrap();
    template.at(golden_cases()["now"].as_str().unwrap()).unwrap()
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
    check(None, json!({"prompt": "a", "completion": 3}), "`completion` holds neither a text nor a list");
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

/// Without answers only, nothing depends on where answers are: templates may change earlier ones, and there may be none.
#[test]
fn all_tokens_of_any_conversation_can_be_learned() {
    let (directory, tokenizer) = tokenizer();
    let turn = |role: &str, content: &str| json!({"role": role, "content": content});
    let turns = json!([turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "d")]);
    for messages in [turns, json!([turn("user", "a")])] {
        let record = json!({ "messages": messages });
        let form = Conversations::new(columns(&record), Some(template("chatml", directory.path())), false);
        let document = form.encode(&record.to_string(), &tokenizer, BOTH, 1000).unwrap();
        assert!(document.tokens.len() > 5 && document.trained.is_empty());
    }
}

#[test]
fn whole_characters_are_learned() {
    let directory = tempfile::tempdir().unwrap();
    let text = "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}\
                {% endgeneration %}|{% else %}{{ message.content }}|{% endif %}{% endfor %}";
    let template = ChatTemplate::from_text("short", text, directory.path()).unwrap();
    let record =
        json!({"messages": [{"role": "user", "content": "é"}, {"role": "assistant", "content": "a漢"}]});
    let form = Conversations::new(columns(&record), Some(template), true);
    let document = form.encode(&record.to_string(), &Tokenizer::bytes(), BOTH, 1000).unwrap();
    let [no, yes] = [false, true];
    assert_eq!(document.trained, [no, no, no, yes, yes, yes, yes, no]);
}

#[test]
fn templates_that_leave_out_the_end_of_answers_are_noticed() {
    let (directory, tokenizer) = tokenizer();
    let check = |answer: &str, expected: Option<&str>| {
        let text = format!(
            "{{% for message in messages %}}{{% if message.role == 'assistant' %}}{answer}{{% else %}}\
             {{{{ message.content }}}}<|eot_id|>{{% endif %}}{{% endfor %}}"
        );
        let template = ChatTemplate::from_text("given", &text, directory.path()).unwrap();
        let messages = ConversationColumns::Messages("messages".to_owned());
        let form = Conversations::new(messages, Some(template), true);
        assert_eq!(form.unlearned_end(&tokenizer), expected, "{answer}");
    };
    check("{% generation %}{{ message.content }}<|eot_id|>{% endgeneration %}", None);
    check("{% generation %}{{ message.content }}<|eot_id|>\n{% endgeneration %}", None);
    check("{% generation %}{{ message.content }}{% endgeneration %}<|eot_id|>", Some("`given`"));
    check("{% generation %}{{ message.content }}{% endgeneration %}", Some("`given`"));
    // Without marks, answers include the text that ends them.
    check("{{ message.content }}<|eot_id|>", None);
}

#[test]
fn answers_that_a_template_does_not_mark_are_an_error() {
    let (directory, tokenizer) = tokenizer();
    let text = "{% for message in messages %}{{ message.content }}{% if message.marked %}{% generation %}x\
                {% endgeneration %}{% endif %}{% endfor %}";
    let template = ChatTemplate::from_text("unmarked", text, directory.path()).unwrap();
    let record =
        json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]});
    let form = Conversations::new(columns(&record), Some(template), true);
    let error = form.encode(&record.to_string(), &tokenizer, BOTH, 1000).unwrap_err();
    assert!(error.starts_with("no token has a loss"), "{error}");
}

#[test]
fn templates_without_roles_are_refused() {
    let (directory, tokenizer) = tokenizer();
    let turn = |role: &str, content: &str| json!({"role": role, "content": content});
    let record = json!({"messages": [turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "d")]});
    let encode = |text: &str| {
        let template = ChatTemplate::from_text("given", text, directory.path()).unwrap();
        let form = Conversations::new(columns(&record), Some(template), true);
        form.encode(&record.to_string(), &tokenizer, BOTH, 1000)
    };
    let error = encode("{% for message in messages %}{{ message.content }}{% endfor %}").unwrap_err();
    assert!(error.starts_with("the chat template renders messages of all roles alike"), "{error}");
    assert!(error.contains("hint: let it write `message.role`"), "{error}");
    // Marks distinguish answers, and so does a template that refuses other orders of roles.
    encode(
        "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}\
         {% endgeneration %}{% else %}{{ message.content }}{% endif %}{% endfor %}",
    )
    .unwrap();
    encode(
        "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}\
         {{ raise_exception('roles take turns') }}{% endif %}{{ message.content }}|{% endfor %}",
    )
    .unwrap();
}

#[test]
fn parquet_files_hold_the_same_conversations() {
    let (directory, tokenizer) = tokenizer();
    let files = vec![goldens("conversations/conversations.parquet").to_str().unwrap().to_owned()];
    let columns = vec!["messages".to_owned()];
    let open = |columns: Vec<String>| {
        Dataset::open(&Source::Records { files: files.clone(), format: RecordFormat::Parquet, columns })
    };
    let dataset = open(columns.clone()).unwrap();
    let template = template("marked", directory.path());
    let form = Conversations::new(ConversationColumns::of(&columns).unwrap(), Some(template), true);
    let content = golden_cases();
    assert_eq!(dataset.num_documents(), 3);
    for (index, record) in dataset.documents().enumerate() {
        let document = form.encode(&record.unwrap(), &tokenizer, BOTH, 1000).unwrap();
        assert_eq!(json!(document.tokens), content["cases"][index]["tokens"], "{index}");
        assert_eq!(json!(document.trained), content["cases"][index]["trained"], "{index}");
    }
    let error = open(vec!["turns".to_owned()]).unwrap_err().to_string();
    assert!(error.contains("has no column `turns`; it has `id`, `messages`"), "{error}");
}

/// Neither a template's place nor the day changes the meaning of a data position.
#[test]
fn templates_are_the_same_wherever_they_are() {
    let (first, second) = (tokenizer().0, tokenizer().0);
    let text = "{{ strftime_now('%Y-%m-%d %H:%M:%S') }}{% for message in messages %}{{ message.content }}{% endfor %}";
    let open = |directory: &Path| {
        fs::write(directory.join("chat_template.jinja"), text).unwrap();
        ChatTemplate::load(directory).unwrap().unwrap()
    };
    fs::write(first.path().join("chat_template_time.txt"), "2024-07-06T09:05:03\n").unwrap();
    let template = open(first.path()).at_first_use_in(first.path()).unwrap();
    fs::copy(first.path().join("chat_template_time.txt"), second.path().join("chat_template_time.txt"))
        .unwrap();
    let moved = open(second.path()).at_first_use_in(second.path()).unwrap();
    let form = |template: ChatTemplate| {
        let columns = ConversationColumns::of(&["messages".to_owned()]).unwrap();
        Conversations::new(columns, Some(template), true)
    };
    let rendered = template.render(&[], false, None).unwrap();
    assert_eq!(rendered, "2024-07-06 09:05:03");
    assert!(form(template.clone()) == form(moved));
    let other = open(first.path()).at("2025-01-01T00:00:00").unwrap();
    assert!(form(template) != form(other));
    let fresh = tokenizer().0;
    let now = open(fresh.path()).at_first_use_in(fresh.path()).unwrap();
    assert!(form(now) == form(open(fresh.path()).at_first_use_in(fresh.path()).unwrap()));
}

#[test]
fn several_templates_are_kept() {
    let (directory, _) = tokenizer();
    let content = json!({"chat_template": [
        {"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"},
    ]});
    let file = directory.path().join("both.json");
    fs::write(&file, content.to_string()).unwrap();
    fs::write(directory.path().join("chat_template.jinja"), "earlier").unwrap();
    ChatTemplate::load_file(&file, directory.path()).unwrap().save(directory.path()).unwrap();
    let kept = ChatTemplate::load(directory.path()).unwrap().unwrap();
    assert_eq!(kept.render(&[], false, None).unwrap(), "plain");
    assert_eq!(kept.render(&[], false, Some(&json!([{"name": "a"}]))).unwrap(), "with tools");
}

#[test]
fn tools_are_a_list_or_its_text() {
    let (directory, tokenizer) = tokenizer();
    let text = "{{ tools | tojson }}{% for message in messages %}{{ message.content }}|{% endfor %}";
    let template = ChatTemplate::from_text("tools", text, directory.path()).unwrap();
    let encode = |tools: Value| {
        let record = json!({"prompt": "a", "completion": "b", "tools": tools});
        let form = Conversations::new(columns(&record), Some(template.clone()), true);
        form.encode(&record.to_string(), &tokenizer, BOTH, 1000)
    };
    let [none, empty, text] = [Value::Null, json!([]), json!("[]")].map(|tools| encode(tools).unwrap());
    assert!(none == empty && none == text);
    assert_eq!(encode(json!([{"a": 1}])).unwrap(), encode(json!("[{\"a\": 1}]")).unwrap());
    for wrong in [json!("{}"), json!(3), json!("nothing")] {
        assert!(encode(wrong).unwrap_err().contains("column `tools`"));
    }
}

/// Opens records of preference data in rows of `length` tokens, two to a batch.
fn preference_rows(records: &[Value], examples: Examples, length: usize) -> TrainIterator {
    let columns: &[&str] = match (examples, records[0].get("prompt")) {
        (Examples::JudgedAnswers, _) => &["prompt", "completion", "label"],
        (_, Some(_)) => &["prompt", "chosen", "rejected"],
        (_, None) => &["chosen", "rejected"],
    };
    let columns: Vec<String> = columns.iter().map(|column| (*column).to_owned()).collect();
    let named = match examples {
        Examples::JudgedAnswers => ConversationColumns::of_judged(&columns),
        _ => ConversationColumns::of_pairs(&columns),
    };
    let form = Arc::new(Conversations::preference(named.unwrap(), None, CUT));
    let documents = records.iter().map(Value::to_string).collect();
    let source = Source::Memory { name: "records".into(), documents };
    let options = DatasetOptions {
        conversations: Some(form),
        examples,
        packing: Packing::Off,
        drops_long_ends: Some(false),
        shuffle: false,
        num_epoch: Some(1),
        remainder: Remainder::Pad,
        ..DatasetOptions::training(source, length, 2)
    };
    TrainIterator::open(options, Some(Arc::new(Tokenizer::bytes()))).unwrap()
}

/// The tokens that the targets with a loss spell, for each sequence of a batch, and its first input.
fn answers(batch: &mt_data::Batch, length: usize) -> Vec<(i32, String)> {
    let of = |name| batch.integers(name).chunks(length);
    let rows = of(arrays::INPUTS).zip(of(arrays::TARGETS)).zip(of(arrays::TARGETS_SEGMENTATION));
    let spelled = |((inputs, targets), counted): ((&[i32], &[i32]), &[i32])| {
        let counted = targets.iter().zip(counted).filter(|(_, segment)| **segment != 0);
        let text = counted.map(|(token, _)| match token {
            2 => '.',
            token => char::from((token - 3) as u8),
        });
        (inputs[0], text.collect::<String>())
    };
    rows.map(spelled).collect()
}

const CUT: PromptLimit = PromptLimit { tokens: 4, always: false };

#[test]
fn rows_hold_pairs_and_padding() {
    let records = [
        json!({"prompt": "ab", "chosen": "xyz", "rejected": "w"}),
        // A long prompt keeps its end, and a long answer its begin.
        json!({"prompt": "abcdef", "chosen": "x", "rejected": "vwxyzvwxyz"}),
        json!({"prompt": "ab", "chosen": "x", "rejected": "y"}),
    ];
    let mut rows = preference_rows(&records, Examples::Pairs, 9);
    let first = rows.next().unwrap().unwrap();
    assert_eq!(first.array(arrays::INPUTS).unwrap().dims(), [2, 2, 9]);
    let of = |first: i32, text: &str| (first, text.to_owned());
    let begin = i32::from(b'c') + 3;
    assert_eq!(answers(&first, 9), [of(1, "xyz."), of(1, "w."), of(begin, "x."), of(begin, "vwxyzv")]);
    let state = rows.state();
    let last = rows.next().unwrap().unwrap();
    assert_eq!(answers(&last, 9)[..2], [of(1, "x."), of(1, "y.")]);
    assert!(last.integers(arrays::INPUTS_SEGMENTATION)[18..].iter().all(|segment| *segment == 0));
    rows.restore(&state).unwrap();
    assert_eq!(rows.next().unwrap().unwrap(), last);
}

#[test]
fn the_common_beginning_of_two_answers_is_a_prompt() {
    let records = [
        json!({"chosen": "say hello", "rejected": "say bye"}),
        json!({"chosen": "onety", "rejected": "onetwo"}),
    ];
    let mut rows = preference_rows(&records, Examples::Pairs, 12);
    let batch = rows.next().unwrap().unwrap();
    let texts: Vec<String> = answers(&batch, 12).into_iter().map(|(_, text)| text).collect();
    // The space before the difference belongs to the answers, as in TRL.
    assert_eq!(texts, [" hello.", " bye.", "y.", "wo."]);
}

#[test]
fn judged_answers_get_the_answers_of_other_rows() {
    let judged = |prompt: &str, answer: &str, label: bool| json!({"prompt": prompt, "completion": answer, "label": label});
    let records = [judged("a", "xyz", true), judged("bcd", "w", false), judged("e", "u", true)];
    let rows = preference_rows(&records, Examples::JudgedAnswers, 6);
    let mut rows = MismatchedSource::new(rows);
    let first = rows.next_batch().unwrap().unwrap();
    assert_eq!(first.array(arrays::INPUTS).unwrap().dims(), [2, 2, 6]);
    assert_eq!(first.array(arrays::LABELS).unwrap().to_f64(), [1.0, 0.0]);
    let texts: Vec<String> = answers(&first, 6).into_iter().map(|(_, text)| text).collect();
    // The second row's prompt leaves room for three tokens.
    assert_eq!(texts, ["xyz.", "w.", "w.", "xyz"]);
    let last = rows.next_batch().unwrap().unwrap();
    let texts: Vec<String> = answers(&last, 6).into_iter().map(|(_, text)| text).collect();
    assert_eq!(texts, ["u.", "u.", "", ""]);
}

/// In lists of messages, the published templates of known families get marks, by which answers are those of TRL's training
/// templates; in prompts with answers, the published templates themselves render both, as in TRL
/// (`goldens/known_templates/generate.py`).
#[test]
fn answers_in_known_templates_are_those_of_the_reference() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    fs::copy(goldens("known_templates/tokenizer.json"), directory.join("tokenizer.json")).unwrap();
    let tokenizer = Tokenizer::load(directory).unwrap();
    let content = fs::read(goldens("known_templates/known_templates.json")).unwrap();
    let content: Value = serde_json::from_slice(&content).unwrap();
    for case in content["cases"].as_array().unwrap() {
        let name = case["template"].as_str().unwrap();
        fs::write(directory.join("tokenizer_config.json"), content["special"][name].to_string()).unwrap();
        let text = content["templates"][name].as_str().unwrap();
        let template = ChatTemplate::from_text(name, text, directory).unwrap();
        let template = template.at(content["now"].as_str().unwrap()).unwrap();
        let form = Conversations::new(columns(&case["record"]), Some(template.clone()), true);
        let is_marked = case["record"].get("messages").is_some();
        assert_eq!(form.unlearned_end(&tokenizer), None, "{name}");
        assert_eq!(form.marked_family().is_some(), is_marked, "{name}");
        let document = form.encode(&case["record"].to_string(), &tokenizer, BOTH, 10_000).unwrap();
        let sha256 = Sha256::digest(json!(document.tokens).to_string());
        let sha256: String = sha256.iter().map(|byte| format!("{byte:02x}")).collect();
        let text =
            tokenizer.decode(&document.tokens.iter().map(|token| *token as u32).collect::<Vec<_>>(), false);
        assert_eq!(
            (json!(document.tokens.len()), json!(sha256)),
            (case["tokens"].clone(), case["sha256"].clone()),
            "{name}: {text:?}"
        );
        let answers: Vec<[usize; 2]> = document
            .trained
            .chunk_by(|one, next| one == next)
            .scan(0, |end, run| {
                let start = *end;
                *end += run.len();
                Some((run[0], [start, *end]))
            })
            .filter_map(|(is_trained, range)| is_trained.then_some(range))
            .collect();
        assert_eq!(json!(answers), case["answers"], "{name}: {text:?}");
        // Templates without marks have the same answers in lists of messages that end with the only one.
        let [prompt, completion] = ["prompt", "completion"].map(|column| case["record"][column].as_array());
        let Some((prompt, [answer])) = prompt.zip(completion.map(Vec::as_slice)) else { continue };
        let messages = [&prompt[..], std::slice::from_ref(answer)].concat();
        let record = json!({"messages": messages, "tools": case["record"]["tools"]});
        let form = Conversations::new(columns(&record), Some(template), true);
        if form.marked_family().is_none() && prompt.iter().all(|message| message["role"] != "assistant") {
            let of_messages = form.encode(&record.to_string(), &tokenizer, BOTH, 10_000).unwrap();
            assert_eq!(
                (of_messages.tokens, of_messages.trained),
                (document.tokens, document.trained),
                "{name}"
            );
        }
    }
}
