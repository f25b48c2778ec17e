//! Chat templates compared with the transformers library (`goldens/chat_templates/generate.py`), and the errors of
//! templates.

use std::fs;
use std::path::{Path, PathBuf};

use mt_data::{ChatTemplate, Message};
use serde_json::{Map, Value, json};

fn goldens() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/chat_templates")
}

fn message(role: &str, content: &str) -> Message {
    Message { role: role.into(), content: content.into() }
}

/// A directory with a `tokenizer_config.json`.
fn directory(config: &Value) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    directory
}

fn template(text: &str) -> ChatTemplate {
    let directory = directory(&json!({ "bos_token": "<s>", "eos_token": { "content": "</s>" } }));
    ChatTemplate::from_text("chat_template", text, directory.path()).unwrap()
}

fn render(text: &str, variables: Value) -> String {
    let messages = json!([{ "role": "user", "content": "Hi" }]);
    template(text).render_with(messages, variables.as_object().unwrap().clone()).unwrap()
}

#[test]
fn templates_render_as_in_the_reference() {
    let content = fs::read_to_string(goldens().join("chat_templates.json")).unwrap();
    let content: Value = serde_json::from_str(&content).unwrap();
    for entry in content["renders"].as_array().unwrap() {
        let name = entry["template"].as_str().unwrap();
        let directory = directory(&content["special"][name]);
        let source = fs::read_to_string(goldens().join(format!("{name}.jinja"))).unwrap();
        let template = ChatTemplate::from_text(name, &source, directory.path()).unwrap();
        let template = template.at(content["now"].as_str().unwrap()).unwrap();
        let mut variables = entry["variables"].as_object().unwrap().clone();
        if variables.contains_key("continue_final_message") {
            continue;
        }
        let tools = variables.get("tools").and_then(Value::as_str).unwrap_or("none").to_string();
        variables.insert("tools".into(), content["tools"][&tools].clone());
        let messages = &content["conversations"][entry["conversation"].as_str().unwrap()];
        let rendered = template.render_with(messages.clone(), variables);
        let context = format!("{name}, {}, {}", entry["conversation"], entry["variables"]);
        match (entry["text"].as_str(), rendered) {
            (Some(expected), rendered) => assert_eq!(rendered.expect(&context), expected, "{context}"),
            (None, Ok(text)) => panic!("{context}: {text}"),
            (None, Err(error)) => {
                let expected = entry["error"].as_str().unwrap();
                assert!(error.to_string().ends_with(&format!(": {expected}")), "{context}: {error}");
            }
        }
    }
}

#[test]
fn json_is_written_as_in_python() {
    let value =
        json!({ "b": [1, 2.0, null, true, []], "a": { "text": "<é>\n\"\u{7f}👍" }, "n": -2e-7, "e": {} });
    let check = |arguments: &str, expected: &str| {
        let text = render(&format!("{{{{ value | tojson{arguments} }}}}"), json!({ "value": value }));
        assert!(text.starts_with(expected), "{text}");
    };
    check(
        "",
        "{\"b\": [1, 2.0, null, true, []], \"a\": {\"text\": \"<é>\\n\\\"\u{7f}👍\"}, \"n\": -2e-07, \"e\": {}}",
    );
    check(
        "(ensure_ascii=true, sort_keys=true)",
        "{\"a\": {\"text\": \"<\\u00e9>\\n\\\"\\u007f\\ud83d\\udc4d\"}, \"b\": [1, 2.0, null, true, []], \"e\": {}, \
         \"n\": -2e-07}",
    );
    check("(separators=(',', ':'))", "{\"b\":[1,2.0,nul");
    check("(indent=2)", "{\n  \"b\": [\n    1,\n    2.");
}

#[test]
fn the_environment_is_that_of_the_reference() {
    let check =
        |text: &str, expected: &str| assert_eq!(render(text, json!({ "none": null })), expected, "{text}");
    check("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ pad_token }}", "<s>Hi</s>");
    check("{{ tools }} {{ documents is none }} {{ add_generation_prompt }}", "None True False");
    check(
        "{% for n in [1, 2, 3, 4] %}{% if n == 2 %}{% continue %}{% elif n == 4 %}{% break %}{% endif %}{{ n }}{% endfor %}",
        "13",
    );
    check("a\n  {% if true %}\n  b\n  {%- endif %}\n", "a\n  b");
    check("a {%- generation -%}  b {% endgeneration %}\n c", "ab  c");
    check("{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}", "21");
    check(
        "{{ ' a '.strip() + 'b,c'.split(',')[1] + 'x'.upper() }}{{ {'k': 1}.items() | list }}",
        "acX[('k', 1)]",
    );
    check(
        "{{ 'text' is sequence }} {{ {} is iterable }} {{ missing is iterable }} {{ 1 is iterable }}",
        "True True True False",
    );
    check("{{ messages[0]['content'] is string and not messages[0].missing }}", "True");
    check("{{ strftime_now('%Y') | length }} {{ '<&>' }}", "4 <&>");
    check("{{ messages[0].thinking }}{{ [true, none, 1.0] }}", "[True, None, 1.0]");
}

#[test]
fn failing_templates_say_where() {
    let fail = |text: &str| {
        let error = template(text).render(&[message("user", "Hi")], true, None).unwrap_err();
        assert!(error.is_user_error());
        error.to_string()
    };
    assert_eq!(
        fail("a\n\n{{ raise_exception('take turns') }}"),
        "the chat template `chat_template` fails, line 3: take turns"
    );
    assert!(
        fail("a\n{% if %}").starts_with("the chat template `chat_template` fails, line 2: syntax error: ")
    );
    assert!(fail("{{ missing.field }}").contains("line 1: undefined value"));
    assert!(fail("{{ 'a'.shout() }}").contains("line 1: unknown method: "));
    assert!(fail("{{ strftime_now('%!') }}").contains("`%!` is not a date format"));
    assert!(fail("{{ missing | tojson }}").contains("cannot be written as JSON"));
}

#[test]
fn directories_hold_templates_in_several_ways() {
    let plain = directory(&json!({ "eos_token": "</s>" }));
    assert!(ChatTemplate::load(plain.path()).unwrap().is_none());
    let text = |directory: &Path, tools: Option<&Value>| {
        let template = ChatTemplate::load(directory).unwrap().unwrap();
        template.render(&[message("user", "Hi")], true, tools).unwrap()
    };
    let one = directory(&json!({ "chat_template": "one{{ eos_token }}" }));
    fs::write(one.path().join("special_tokens_map.json"), r#"{"eos_token": "</s>"}"#).unwrap();
    assert_eq!(text(one.path(), None), "one</s>");
    let named =
        json!([{ "name": "default", "template": "plain" }, { "name": "tool_use", "template": "tools" }]);
    let named = directory(&json!({ "chat_template": named }));
    assert_eq!(text(named.path(), None), "plain");
    assert_eq!(text(named.path(), Some(&json!([]))), "tools");
    fs::write(one.path().join("chat_template.jinja"), "file{{ add_generation_prompt }}").unwrap();
    assert_eq!(text(one.path(), None), "fileTrue");
    let file = named.path().join("template.json");
    fs::write(&file, r#"{"chat_template": "json"}"#).unwrap();
    let template = ChatTemplate::load_file(&file, named.path()).unwrap();
    assert_eq!(template.render_with(json!([]), Map::new()).unwrap(), "json");

    for (config, expected) in [
        (json!({ "chat_template": 7 }), "is neither a text nor a list of texts with names"),
        (json!({ "chat_template": [{ "name": "rag", "template": "" }] }), "has no `default`; it has `rag`"),
    ] {
        let directory = directory(&config);
        let rendered = ChatTemplate::load(directory.path())
            .and_then(|template| template.unwrap().render(&[], false, None));
        assert!(rendered.unwrap_err().to_string().ends_with(expected));
    }
}
