//! Extracts the commands of a Markdown page.

/// A command of a page.
#[derive(Debug, PartialEq)]
pub struct Documented {
    /// Its text. Lines that end with a backslash are joined with the next.
    pub command: String,
    /// The number of its first line in the page.
    pub line: usize,
    /// The message with which it has to fail, if any.
    pub error: Option<String>,
}

/// A block of code: its language, the number of its first line, and its lines.
struct Block<'a> {
    language: &'a str,
    first_line: usize,
    lines: Vec<&'a str>,
}

fn blocks(text: &str) -> Vec<Block<'_>> {
    let mut blocks: Vec<Block> = Vec::new();
    let mut is_open = false;
    for (index, line) in text.lines().enumerate() {
        match line.trim_start().strip_prefix("```") {
            Some(language) => {
                is_open = !is_open;
                if is_open {
                    blocks.push(Block {
                        language: language.trim(),
                        first_line: index + 2,
                        lines: Vec::new(),
                    });
                }
            }
            None if is_open => blocks.last_mut().unwrap().lines.push(line),
            None => {}
        }
    }
    assert!(!is_open, "a block of code has no end");
    blocks
}

/// The commands of a page, in order.
pub fn commands_of(text: &str) -> Vec<Documented> {
    let mut commands: Vec<Documented> = Vec::new();
    for block in blocks(text) {
        let mut continues = false;
        // Output before the first command belongs to no command.
        let mut is_output = true;
        for (index, line) in block.lines.iter().enumerate() {
            let line = line.trim();
            let command = match block.language {
                "sh" if !line.is_empty() && !line.starts_with('#') => Some(line),
                "sh" => None,
                _ if continues => Some(line),
                _ => line.strip_prefix("$ "),
            };
            let Some(command) = command else {
                if let (false, Some(last)) = (is_output, commands.last_mut())
                    && line.starts_with("error: ")
                {
                    last.error = Some(line.to_owned());
                }
                continue;
            };
            is_output = false;
            let (command, goes_on) = match command.strip_suffix('\\') {
                Some(command) => (command.trim_end(), true),
                None => (command, false),
            };
            match commands.last_mut().filter(|_| continues) {
                Some(last) => last.command = format!("{} {command}", last.command),
                None => {
                    let line = block.first_line + index;
                    commands.push(Documented { command: command.to_owned(), line, error: None });
                }
            }
            continues = goes_on;
        }
    }
    commands
}

/// The text of the blocks marked `yaml`.
pub fn yaml_blocks(text: &str) -> Vec<String> {
    blocks(text)
        .into_iter()
        .filter(|block| block.language == "yaml")
        .map(|block| block.lines.join("\n"))
        .collect()
}

#[test]
fn commands_are_found() {
    let page = "# Page\n\n```sh\none a \\\n    b\n# remark\ntwo\n```\n\n  ```text\n  $ three\n  error: wrong\n  hint: x\n  $ four\n  fine\n  ```\n```text\nerror: none\n```\n";
    let command = |command: &str, line: usize, error: Option<&str>| Documented {
        command: command.to_owned(),
        line,
        error: error.map(str::to_owned),
    };
    let expected = [
        command("one a b", 4, None),
        command("two", 7, None),
        command("three", 11, Some("error: wrong")),
        command("four", 14, None),
    ];
    assert_eq!(commands_of(page), expected);
}
