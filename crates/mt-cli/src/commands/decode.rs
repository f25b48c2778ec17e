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
    EngineError, FinishReason, GeneratedToken, GenerationEvent, Limits, Loaded, Request, SamplingOptions,
    Timing, check_checkpoint, encode_prompt, load, load_tokenizer,
};
use serde_json::json;

use crate::{
    arguments::{Decode, Settings},
    commands::warn,
    failure::Failure,
};

/// Runs `maxtext decode`.
pub fn run(mut command: Decode) -> Result<(), Failure> {
    command.json |= command.settings.take_flag("--json");
    let Prepared { decode, tokenizer, prompts, .. } = prepare(command.settings)?;
    let asked: Vec<Asked<'_>> = prompts
        .iter()
        .flat_map(|(prompt, tokens)| {
            (0..decode.decode.decode_num_samples as u64)
                .map(|sample| Asked { prompt, request: Request { prompt: tokens.clone(), sample } })
        })
        .collect();
    let loaded = load(&decode, tokenizer)?;
    report_loading(&loaded);
    let (timing, texts) = generate(&loaded, &decode.decode, &asked, command.json)?;
    report_timing(&timing);
    check_expectation(&decode.decode, &texts)
}

/// What decoding needs, before any hardware is started or any weight is read.
pub struct Prepared {
    pub config: Config,
    pub decode: DecodeConfig,
    tokenizer: Tokenizer,
    /// The prompts with their tokens.
    prompts: Vec<(String, Vec<u32>)>,
}

/// Reads all but the weights.
pub fn prepare(settings: Settings) -> Result<Prepared, Failure> {
    let (config, run_directory) = configure(settings.settings)?;
    let decode = DecodeConfig::from_config(&config)?;
    // A tokenizer that is named for this command goes before the run's own.
    let named_here = ["tokenizer_path", "tokenizer_type"].iter().any(|key| is_set_here(config.entry(key)));
    let tokenizer = load_tokenizer(&decode.tokenizer, run_directory.as_deref().filter(|_| !named_here))?;
    let prompts = prompts(&decode.decode)?
        .into_iter()
        .map(|prompt| {
            let tokens = encode_prompt(&tokenizer, &prompt, decode.tokenizer.add_bos)?;
            Ok((prompt, tokens))
        })
        .collect::<Result<Vec<_>, Failure>>()?;
    Ok(Prepared { config, decode, tokenizer, prompts })
}

impl Prepared {
    /// Checks what the engine would refuse: a tokenizer that is too large, and prompts that are too long.
    pub fn check_prompts(&self) -> Result<(), Failure> {
        self.tokenizer.check_vocab_size(self.decode.model.vocab_size)?;
        let group = &self.decode.decode;
        for (index, (_, tokens)) in self.prompts.iter().enumerate() {
            let length = tokens.len();
            for (taken, limit, key) in [
                (length + 1, group.max_target_length, "max_target_length"),
                (length, group.max_prefill_predict_length, "max_prefill_predict_length"),
            ] {
                if taken > limit {
                    return Err(EngineError::PromptTooLong { number: index + 1, length, limit, key }.into());
                }
            }
        }
        Ok(())
    }
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
            let config = over_run(request)?;
            note_length(&config, directory)?;
            config
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

/// Says so if sequences may become longer than the run has seen.
fn note_length(config: &Config, run: &Path) -> Result<(), Failure> {
    let length = |config: &Config| config.entry("max_target_length").value.as_u64().unwrap_or_default();
    let trained = length(&Config::resolve(&ConfigRequest::default().over_saved(saved_config_path(run)))?);
    if length(config) > trained {
        eprintln!(
            "note: the run was trained on sequences of {trained} tokens; text beyond that length may make no sense"
        );
    }
    Ok(())
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

/// Generates all answers and shows them: a single one as it comes, several each as soon as it is complete. Returns the
/// texts as well.
fn generate(
    loaded: &Loaded,
    group: &DecodeGroup,
    asked: &[Asked<'_>],
    json: bool,
) -> Result<(Timing, Vec<String>), Failure> {
    let requests: Vec<Request> = asked.iter().map(|asked| asked.request.clone()).collect();
    let limits = Limits { max_new_tokens: None, stop: loaded.tokenizer.special().eos.into_iter().collect() };
    let answers = asked
        .iter()
        .map(|asked| AnswerText::after(&asked.request.prompt, &loaded.tokenizer))
        .collect::<Result<Vec<_>, _>>()?;
    let format = match asked.len() {
        _ if json => Format::Json,
        1 => Format::Stream,
        _ => Format::Blocks,
    };
    let progress =
        Progress { visible: format != Format::Stream && io::stderr().is_terminal(), num_tokens: 0 };
    let mut receiver =
        Receiver { asked, answers, format, screen: Screen { open: true }, progress, num_shown: 0 };
    if let ([only], Format::Stream, true) = (asked, format, io::stdout().is_terminal()) {
        receiver.screen.show(only.prompt)?;
    }
    let mut failure: Option<Failure> = None;
    let generation =
        loaded.engine.generate(&requests, &SamplingOptions::from_config(group), &limits, |event| {
            if failure.is_none() {
                failure = receiver.receive(event).err();
            }
            // Nothing is left to be done for those who read no more.
            let goes_on = failure.is_none() && receiver.screen.open;
            if goes_on { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        })?;
    match failure {
        Some(failure) => Err(failure),
        None => Ok((generation.timing, receiver.answers.into_iter().map(|answer| answer.text).collect())),
    }
}

/// How answers are shown.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Format {
    /// The text as it comes.
    Stream,
    /// Each answer under its number and prompt.
    Blocks,
    /// An object a line.
    Json,
}

/// Takes answers as they come, and shows them as soon as the format allows.
struct Receiver<'a> {
    asked: &'a [Asked<'a>],
    answers: Vec<AnswerText>,
    format: Format,
    screen: Screen,
    progress: Progress,
    num_shown: usize,
}

impl Receiver<'_> {
    fn receive(&mut self, event: GenerationEvent) -> Result<(), Failure> {
        match event {
            GenerationEvent::Token(GeneratedToken { row, token, .. }) => {
                self.progress.advance();
                let new = self.answers[row].push(token)?;
                if self.format == Format::Stream { self.screen.show(&new) } else { Ok(()) }
            }
            GenerationEvent::Finished { row, reason } => {
                let last = self.answers[row].finish()?;
                let shown = match self.format {
                    Format::Stream => last + "\n",
                    Format::Blocks => self.block(row),
                    Format::Json => self.object(row, reason),
                };
                self.num_shown += 1;
                self.progress.clear();
                self.screen.show(&shown)
            }
        }
    }

    fn block(&self, row: usize) -> String {
        let separator = if self.num_shown == 0 { "" } else { "\n" };
        let (number, total, prompt) = (row + 1, self.asked.len(), self.asked[row].prompt);
        format!("{separator}[{number} of {total}] {prompt:?}\n{}\n", self.answers[row].text)
    }

    fn object(&self, row: usize, reason: FinishReason) -> String {
        let (asked, answer) = (&self.asked[row], &self.answers[row]);
        let object = json!({
            "number": row + 1,
            "prompt": asked.prompt,
            "sample": asked.request.sample,
            "text": answer.text,
            "tokens": answer.tokens,
            "finish": reason.name(),
        });
        format!("{object}\n")
    }
}

/// The text of an answer as its tokens come.
struct AnswerText {
    stream: DecodeStream,
    text: String,
    tokens: Vec<u32>,
}

impl AnswerText {
    /// An answer after a prompt, whose tokens decide how the answer's first ones read.
    fn after(prompt: &[u32], tokenizer: &Arc<Tokenizer>) -> Result<Self, DataError> {
        let mut stream = DecodeStream::new(tokenizer.clone(), true);
        for token in prompt {
            stream.push(*token)?;
        }
        Ok(Self { stream, text: String::new(), tokens: Vec::new() })
    }

    /// The text that a token adds.
    fn push(&mut self, token: u32) -> Result<String, DataError> {
        let new = self.stream.push(token)?;
        self.tokens.push(token);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_shown_in_the_order_of_their_ends() {
        let tokenizer = Arc::new(Tokenizer::bytes());
        let asked = ["one", "two"].map(|prompt| Asked {
            prompt,
            request: Request { prompt: tokenizer.encode(prompt, false, false).unwrap(), sample: 0 },
        });
        let answers = asked.iter().map(|asked| AnswerText::after(&asked.request.prompt, &tokenizer).unwrap());
        let mut receiver = Receiver {
            asked: &asked,
            answers: answers.collect(),
            format: Format::Blocks,
            screen: Screen { open: false },
            progress: Progress { visible: false, num_tokens: 0 },
            num_shown: 0,
        };
        let token = |row: usize, byte: u8| {
            GenerationEvent::Token(GeneratedToken { row, token: u32::from(byte) + 3, log_probability: 0.0 })
        };
        receiver.receive(token(0, b'x')).unwrap();
        receiver.receive(token(1, b'y')).unwrap();
        assert_eq!(receiver.block(1), "[2 of 2] \"two\"\ny\n");
        receiver.receive(GenerationEvent::Finished { row: 1, reason: FinishReason::Stop }).unwrap();
        receiver.receive(token(0, b'z')).unwrap();
        assert_eq!(receiver.block(0), "\n[1 of 2] \"one\"\nxz\n");
        let object: serde_json::Value =
            serde_json::from_str(&receiver.object(0, FinishReason::Length)).unwrap();
        let expected = json!({
            "number": 1, "prompt": "one", "sample": 0, "text": "xz", "tokens": [123, 125], "finish": "length",
        });
        assert_eq!(object, expected);
        assert_eq!((receiver.num_shown, receiver.progress.num_tokens), (1, 3));
    }
}
