//! Published clients, and a browser with the chat page, against `maxtext serve`.

use std::{
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use serde_json::Value;

use crate::python;

const CLIENTS: &[&str] = &["openai==3.57.0", "anthropic==2.14.0"];

/// Marks turns as Qwen does, with tool calls in its form.
const TEMPLATE: &str = "{% if tools %}<tools>{{ tools | tojson }}</tools><tool_call>{% endif %}\
                        {% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}\
                        {% if add_generation_prompt %}[assistant]{% endif %}";

/// A running server. It ends with this value.
struct Server {
    process: Child,
    /// A file with the address.
    url: PathBuf,
}

impl Server {
    /// Trains a small model, and serves it.
    fn start(directory: &Path) -> Self {
        crate::train(directory, "run", &["max_target_length=512", "steps=3"]);
        let template = directory.join("template.jinja");
        fs::write(&template, TEMPLATE).unwrap();
        let keys = directory.join("keys.txt");
        fs::write(&keys, "another-key\nkey-of-test\n").unwrap();
        let mut process = Command::new(env!("CARGO_BIN_EXE_maxtext"))
            .args(["serve", "--port", "0", "--api-key-file"])
            .arg(keys)
            .arg(format!("load_parameters_path={}", directory.join("run").display()))
            .arg(format!("chat_template_path={}", template.display()))
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(process.stderr.take().unwrap()).lines();
        let mut log = String::new();
        let ready = lines.find_map(|line| {
            let line = line.unwrap();
            log += &format!("{line}\n");
            let (_, rest) = line.split_once("is ready at ")?;
            rest.split(' ').next().map(str::to_owned)
        });
        let address = ready.unwrap_or_else(|| panic!("the server does not start:\n{log}"));
        // The server must not wait for a reader of its log.
        std::thread::spawn(move || lines.for_each(drop));
        let url = directory.join("url.txt");
        fs::write(&url, address).unwrap();
        Self { process, url }
    }

    /// Ends the server as an operator does.
    fn end(mut self) {
        let id = self.process.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
        assert!(self.process.wait().unwrap().success());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It has ended if the test has passed.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn clients_of_openai_and_anthropic_are_served() {
    let directory = tempfile::tempdir().unwrap();
    let server = Server::start(directory.path());
    let found = python::python(CLIENTS, "serve_clients.py", &[&server.url]);
    let found: Value = serde_json::from_str(&found).unwrap();
    assert_eq!(found["model"], "run");
    // The server continues texts as `decode` does.
    let output = Command::new(env!("CARGO_BIN_EXE_maxtext"))
        .args([
            "decode",
            "--json",
            "prompt=All happy",
            "decode_sampling_strategy=greedy",
            "max_target_length=22",
        ])
        .arg(format!("load_parameters_path={}", directory.path().join("run").display()))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let decoded: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(decoded["text"], found["completion"]);
    server.end();
}

/// Needs `chromium`, Debian's package. `SCREENSHOTS` names a directory that keeps the pictures.
#[test]
fn the_chat_page_works_in_a_browser() {
    let directory = tempfile::tempdir().unwrap();
    let server = Server::start(directory.path());
    let pictures = std::env::var_os("SCREENSHOTS").map_or_else(|| directory.path().to_owned(), PathBuf::from);
    let found = python::python(CLIENTS, "serve_page.py", &[&server.url, &pictures]);
    let found: Value = serde_json::from_str(&found).unwrap();
    assert!(found["note"].as_str().unwrap().contains("tokens/s"), "{found}");
    assert!(pictures.join("chat-dark.png").is_file() && pictures.join("chat-light.png").is_file());
    server.end();
}
