//! `maxtext decode`.

use std::{
    fs,
    io::{self, IsTerminal, Write},
    ops::ControlFlow,
    path::{Path, PathBuf},
    sync::Arc,
};

use mt_config::{
    Config, DecodeConfig, DecodeGroup, Entry, Origin, Request as ConfigRequest, run_directory_of,
    saved_config_path,
};
use mt_data::{DataError, DecodeStream, Tokenizer};
use mt_engine::{
    GeneratedToken, Generation, Limits, Loaded, Request, SamplingOptions, Timing, check_checkpoint,
    encode_prompt, load, load_tokenizer,
};
use serde_json::json;

use crate::{
    arguments::Decode,
    commands::warn,
    failure::{Failure, print},
};

/// Runs `maxtext decode`.
pub fn run(command: Decode) -> Result<(), Failure> {
    let (config, run_directory) = configure(command.settings.settings)?;
    let decode = DecodeConfig::from_config(&config)?;
    // A tokenizer that is named for this command goes before the run's own.
    let named_here = ["tokenizer_path", "tokenizer_type"].iter().any(|key| is_set_here(config.entry(key)));
    let tokenizer = load_tokenizer(&decode.tokenizer, run_directory.as_deref().filter(|_| !named_here))?;
    let prompts = prompts(&decode.decode)?;
    let mut asked: Vec<Asked<'_>> = Vec::new();
    for prompt in &prompts {
        let tokens = encode_prompt(&tokenizer, prompt, decode.tokenizer.add_bos)?;
        asked.extend(
            (0..decode.decode.decode_num_samples as u64)
                .map(|sample| Asked { prompt, request: Request { prompt: tokens.clone(), sample } }),
        );
    }

    let loaded = load(&decode, tokenizer)?;
    report_loading(&loaded);
    let json = command.json;
    let (generation, texts) = generate(&loaded, &decode.decode, &asked, json)?;
    if json {
        for ((asked, row), text) in asked.iter().zip(&generation.rows).zip(&texts) {
            let object = json!({
                "prompt": asked.prompt,
                "sample": asked.request.sample,
                "text": text,
                "tokens": row.tokens,
                "finish": row.finish.name(),
            });
            print(&object.to_string())?;
        }
    } else if asked.len() > 1 {
        let blocks: Vec<String> = asked
            .iter()
            .zip(&texts)
            .enumerate()
            .map(|(index, (asked, text))| {
                format!("[{} of {}] {:?}\n{text}\n", index + 1, texts.len(), asked.prompt)
            })
            .collect();
        print(blocks.join("\n").trim_end_matches('\n'))?;
    }
    report_timing(&generation.timing);
    check_expectation(&decode.decode, &texts)
}

/// A prompt, and what the engine is asked for it.
struct Asked<'a> {
    prompt: &'a str,
    request: Request,
}

/// The configuration, on top of that of the run whose weights are loaded, and that run's directory. A checkpoint that
/// belongs to no run of ours needs its model described by keys.
fn configure(arguments: Vec<String>) -> Result<(Config, Option<PathBuf>), Failure> {
    let mut request = ConfigRequest::from_process(arguments);
    let given = Config::resolve(&request)?;
    let keys = ["load_parameters_path", "load_full_state_path"];
    let path_of = |key: &str| given.entry(key).value.as_str().unwrap_or_default().to_owned();
    let load = keys.into_iter().map(|key| (key, path_of(key))).find(|(_, path)| !path.is_empty());
    let Some((key, path)) = load else {
        return Err(Failure::user(
            "nothing says which model to decode with\n\
             hint: name a run or a checkpoint: `load_parameters_path=maxtext_output/my_run`",
        ));
    };
    if !Path::new(&path).exists() {
        return Err(Failure::user(format!(
            "`{key}` is `{path}` ({}), which does not exist\nhint: name the directory of a run or of a checkpoint",
            given.entry(key).origin
        )));
    }
    check_checkpoint(Path::new(&path))?;
    let run_directory = run_directory_of(Path::new(&path));
    let config = match &run_directory {
        Some(directory) => {
            request = request.over_saved(saved_config_path(directory));
            // What the run itself started from is not what is loaded now.
            let others = keys.iter().filter(|other| **other != key && path_of(other).is_empty());
            request.arguments.extend(others.map(|other| format!("{other}=")));
            // A file that is named here replaces whatever kind of tokenizer the run has.
            let is_default = |key: &str| given.entry(key).origin == Origin::Default;
            if !is_default("tokenizer_path") && is_default("tokenizer_type") {
                request.arguments.push("tokenizer_type=huggingface".to_owned());
            }
            over_run(request)?
        }
        None => given,
    };
    warn(&config);
    Ok((config, run_directory))
}

/// The configuration on top of a run's. Where the run's sequences are no longer than prompts may be by default, so are
/// prompts.
fn over_run(mut request: ConfigRequest) -> Result<Config, Failure> {
    let config = Config::resolve(&request)?;
    let size = |key: &str| config.entry(key).value.as_u64().unwrap_or_default();
    let (prompt, target) = (size("max_prefill_predict_length"), size("max_target_length"));
    if prompt < target || target < 2 || is_set_here(config.entry("max_prefill_predict_length")) {
        return Ok(config);
    }
    request.arguments.push(format!("max_prefill_predict_length={}", target - 1));
    Ok(Config::resolve(&request)?)
}

/// Whether a value belongs to this command rather than to the run.
fn is_set_here(entry: &Entry) -> bool {
    matches!(entry.origin, Origin::Argument | Origin::Environment { .. })
}

fn prompts(group: &DecodeGroup) -> Result<Vec<String>, Failure> {
    let Some(path) = &group.prompts_file else {
        let one = || vec![group.prompt.clone()];
        return Ok(if group.prompts.is_empty() { one() } else { group.prompts.clone() });
    };
    let text = fs::read_to_string(path).map_err(|error| {
        Failure::user(format!(
            "cannot read the prompts in `{}`: {error}\nhint: `prompts_file` names a text file with a prompt on each line",
            path.display()
        ))
    })?;
    let prompts: Vec<String> = text.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect();
    if prompts.is_empty() {
        return Err(Failure::user(format!(
            "`{}` has no prompt\nhint: write a prompt on each line",
            path.display()
        )));
    }
    Ok(prompts)
}

/// Generates all answers; shows a single one as it comes. Returns the texts as well.
fn generate(
    loaded: &Loaded,
    group: &DecodeGroup,
    asked: &[Asked<'_>],
    json: bool,
) -> Result<(Generation, Vec<String>), Failure> {
    let requests: Vec<Request> = asked.iter().map(|asked| asked.request.clone()).collect();
    let limits = Limits { max_new_tokens: None, stop: loaded.tokenizer.special().eos.into_iter().collect() };
    let mut answers = asked
        .iter()
        .map(|asked| AnswerText::after(&asked.request.prompt, &loaded.tokenizer))
        .collect::<Result<Vec<_>, _>>()?;
    let shows = asked.len() == 1 && !json;
    let mut screen = Screen { open: shows };
    if let ([only], true, true) = (asked, shows, io::stdout().is_terminal()) {
        screen.show(only.prompt)?;
    }
    let mut progress = Progress { visible: !shows && io::stderr().is_terminal(), num_tokens: 0 };
    let mut failure: Option<Failure> = None;
    let generation = loaded.engine.generate(
        &requests,
        &SamplingOptions::from_config(group),
        &limits,
        |GeneratedToken { row, token, .. }| {
            progress.advance();
            let shown = answers[row].push(token).map_err(Failure::from).and_then(|new| screen.show(&new));
            match shown {
                Ok(()) if screen.open || !shows => ControlFlow::Continue(()),
                Ok(()) => ControlFlow::Break(()),
                Err(error) => {
                    failure.get_or_insert(error);
                    ControlFlow::Break(())
                }
            }
        },
    )?;
    progress.clear();
    if let Some(failure) = failure {
        return Err(failure);
    }
    let mut texts = Vec::with_capacity(answers.len());
    for mut answer in answers {
        screen.show(&answer.finish()?)?;
        texts.push(answer.text);
    }
    screen.show("\n")?;
    Ok((generation, texts))
}

/// The text of an answer as its tokens come.
struct AnswerText {
    stream: DecodeStream,
    text: String,
}

impl AnswerText {
    /// An answer after a prompt, whose tokens decide how the answer's first ones read.
    fn after(prompt: &[u32], tokenizer: &Arc<Tokenizer>) -> Result<Self, DataError> {
        let mut stream = DecodeStream::new(tokenizer.clone(), true);
        for token in prompt {
            stream.push(*token)?;
        }
        Ok(Self { stream, text: String::new() })
    }

    /// The text that a token adds.
    fn push(&mut self, token: u32) -> Result<String, DataError> {
        let new = self.stream.push(token)?;
        self.text += &new;
        Ok(new)
    }

    fn finish(&mut self) -> Result<String, DataError> {
        let new = self.stream.finish()?;
        self.text += &new;
        Ok(new)
    }
}

/// Standard output, as long as someone reads it.
struct Screen {
    open: bool,
}

impl Screen {
    fn show(&mut self, text: &str) -> Result<(), Failure> {
        if !self.open || text.is_empty() {
            return Ok(());
        }
        let mut output = io::stdout().lock();
        match output.write_all(text.as_bytes()).and_then(|()| output.flush()) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                self.open = false;
                Ok(())
            }
            Err(error) => Err(Failure::run(format!("cannot write to standard output: {error}"))),
        }
    }
}

/// A count of tokens on a terminal, where nothing else shows that answers are being written.
struct Progress {
    visible: bool,
    num_tokens: usize,
}

impl Progress {
    fn advance(&mut self) {
        self.num_tokens += 1;
        if self.visible && self.num_tokens.is_multiple_of(16) {
            eprint!("\r{} tokens", self.num_tokens);
        }
    }

    fn clear(&self) {
        if self.visible {
            eprint!("\r\x1b[K");
        }
    }
}

fn report_loading(loaded: &Loaded) {
    for skipped in &loaded.skipped {
        eprintln!("warning: checkpoint {} is passed over: {}", skipped.step, skipped.reason);
    }
    let step = loaded.step.map_or_else(String::new, |step| format!(" of step {step}"));
    eprintln!("decoding with the checkpoint{step}: {}", loaded.checkpoint.display());
}

fn report_timing(timing: &Timing) {
    eprintln!(
        "{} tokens in {:.2} s ({:.1} tokens/s), the first after {:.2} s; programs were ready after {:.2} s",
        timing.num_tokens,
        timing.total.as_secs_f64(),
        timing.tokens_per_second(),
        timing.first_token.as_secs_f64(),
        timing.compile.as_secs_f64(),
    );
}

fn check_expectation(group: &DecodeGroup, texts: &[String]) -> Result<(), Failure> {
    let Some(expected) = &group.autoregressive_decode_assert else { return Ok(()) };
    match texts.iter().find(|text| *text != expected) {
        Some(text) => Err(Failure::run(format!(
            "the answer is {text:?}, but `autoregressive_decode_assert` expects {expected:?}"
        ))),
        None => Ok(()),
    }
}
