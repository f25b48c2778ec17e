//! Resolves damaged files, variables and command lines, for a bounded time.
//!
//! ```sh
//! cargo run --release -p mt-config --example fuzz -- --seconds 20 --seed 1
//! cargo run --release -p mt-config --example fuzz -- --input failed.json
//! ```
//!
//! No input may cause a panic, a stack overflow, more than a second of work or an error without a message. Inputs run
//! in a child process, so that a fatal input is known: it is printed, and `--input` reruns it.

use std::{
    env, fs, io,
    path::{Path, PathBuf},
    process::{Command, ExitCode, ExitStatus},
    thread,
    time::{Duration, Instant},
};

use mt_config::{Config, ConfigError, DecodeConfig, Kind, Request, TrainConfig, table};
use serde_json::{Value, json};

/// The time limit of one input.
const LONGEST: Duration = Duration::from_secs(1);

/// The limit of a message in bytes, however long the values are that it shows.
const LONGEST_MESSAGE: usize = 4096;

/// The options of the program.
struct Options {
    seconds: u64,
    seed: u64,
    input: Option<PathBuf>,
    /// The file in which a worker records each input before running it.
    worker: Option<PathBuf>,
}

fn main() -> ExitCode {
    mt_storage::disconnect();
    let options = match options() {
        Ok(options) => options,
        Err(message) => {
            eprintln!("{message}\nusage: fuzz [--seconds N] [--seed N] [--input FILE]");
            return ExitCode::from(2);
        }
    };
    let outcome = match &options {
        Options { worker: Some(place), .. } => work(&options, place),
        Options { input: Some(path), .. } => rerun(path),
        _ => supervise(&options),
    };
    match outcome {
        Ok(summary) => {
            println!("{summary}");
            ExitCode::SUCCESS
        }
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}

fn options() -> Result<Options, String> {
    let mut options = Options { seconds: 20, seed: 1, input: None, worker: None };
    let mut arguments = env::args().skip(1);
    while let Some(name) = arguments.next() {
        let value = arguments.next().ok_or_else(|| format!("`{name}` needs a value"))?;
        let number = || value.parse().map_err(|_| format!("`{name}` is `{value}`, which is no number"));
        match name.as_str() {
            "--seconds" => options.seconds = number()?,
            "--seed" => options.seed = number()?,
            "--input" => options.input = Some(value.into()),
            "--worker" => options.worker = Some(value.into()),
            _ => return Err(format!("`{name}` is no option")),
        }
    }
    Ok(options)
}

/// Runs a worker, and reports its last input if the worker dies or hangs.
fn supervise(options: &Options) -> Result<String, String> {
    let place = env::temp_dir().join(format!("mt-config-fuzz-{}.json", std::process::id()));
    let status = watched(options, &place).map_err(|error| format!("cannot run a worker: {error}"))?;
    let what = match status {
        Some(status) if status.success() => {
            // The file only records the last input, so it may stay behind.
            let _ = fs::remove_file(&place);
            return Ok(format!("seed {}: nothing found", options.seed));
        }
        Some(status) => format!("an input ended the process: {status}"),
        None => "an input did not end".to_owned(),
    };
    let input = fs::read_to_string(&place).unwrap_or_default();
    Err(format!("{what}\n{input}\nrun it again with `--input {}`", place.display()))
}

/// The exit status of a worker, or none if it ran past its deadline and was killed.
fn watched(options: &Options, place: &Path) -> io::Result<Option<ExitStatus>> {
    let mut worker = Command::new(env::current_exe()?)
        .args(["--seconds", &options.seconds.to_string(), "--seed", &options.seed.to_string()])
        .arg("--worker")
        .arg(place)
        .spawn()?;
    let deadline = Instant::now() + Duration::from_secs(options.seconds) + 20 * LONGEST;
    while Instant::now() < deadline {
        if let Some(status) = worker.try_wait()? {
            return Ok(Some(status));
        }
        thread::sleep(Duration::from_millis(50));
    }
    worker.kill()?;
    worker.wait()?;
    Ok(None)
}

fn rerun(path: &Path) -> Result<String, String> {
    let text =
        fs::read_to_string(path).map_err(|error| format!("cannot read `{}`: {error}", path.display()))?;
    let value = serde_json::from_str(&text).map_err(|error| format!("`{}`: {error}", path.display()))?;
    let input = Input::from_json(&value).ok_or_else(|| format!("`{}` is no input", path.display()))?;
    let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
    run(&input, directory.path(), true).map(|_| "nothing found".to_owned())
}

fn work(options: &Options, place: &Path) -> Result<String, String> {
    let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
    let mut source = Source::new(options.seed);
    let deadline = Instant::now() + Duration::from_secs(options.seconds);
    let (mut count, mut taken, mut slowest) = (0_u64, 0_u64, Duration::ZERO);
    while Instant::now() < deadline {
        let input = source.input();
        fs::write(place, input.to_json().to_string()).map_err(|error| error.to_string())?;
        let begun = Instant::now();
        taken += u64::from(run(&input, directory.path(), false)?);
        let lasted = begun.elapsed();
        if lasted > LONGEST {
            return Err(format!("an input took {lasted:.1?}"));
        }
        slowest = slowest.max(lasted);
        count += 1;
    }
    Ok(format!("{count} inputs, {taken} of which resolved; the slowest took {slowest:.1?}"))
}

/// A command line with its environment variables and files.
#[derive(Clone, Debug, Default)]
struct Input {
    files: Vec<(String, String)>,
    environment: Vec<(String, String)>,
    arguments: Vec<String>,
}

impl Input {
    fn to_json(&self) -> Value {
        json!({ "files": self.files, "environment": self.environment, "arguments": self.arguments })
    }

    fn from_json(value: &Value) -> Option<Self> {
        let pairs = |name: &str| -> Option<Vec<(String, String)>> {
            let pair = |pair: &Value| Some((pair[0].as_str()?.to_owned(), pair[1].as_str()?.to_owned()));
            value[name].as_array()?.iter().map(pair).collect()
        };
        let arguments = value["arguments"].as_array()?.iter().map(|text| text.as_str().map(str::to_owned));
        Some(Self {
            files: pairs("files")?,
            environment: pairs("environment")?,
            arguments: arguments.collect::<Option<_>>()?,
        })
    }
}

/// Runs all steps of a command before it touches devices. Returns whether the input resolves.
fn run(input: &Input, directory: &Path, verbose: bool) -> Result<bool, String> {
    for (name, text) in &input.files {
        fs::write(directory.join(name), text).map_err(|error| error.to_string())?;
    }
    let in_directory = |argument: &String| match input.files.iter().any(|(name, _)| name == argument) {
        true => directory.join(argument).to_string_lossy().into_owned(),
        false => argument.clone(),
    };
    let request = Request {
        arguments: input.arguments.iter().map(in_directory).collect(),
        environment: input.environment.clone(),
        ..Request::default()
    };
    let config = match Config::resolve(&request.with_quick_start()) {
        Ok(config) => config,
        Err(error) => return check(&error, verbose).map(|()| false),
    };
    if config.notes().iter().any(String::is_empty) {
        return Err("a note is empty".to_owned());
    }
    config.to_json(false);
    let saved = directory.join("saved.yml");
    fs::write(&saved, config.to_yaml()).map_err(|error| error.to_string())?;
    let again = Request { arguments: vec![saved.to_string_lossy().into_owned()], ..Request::default() };
    let read = Config::resolve(&again).map_err(|error| format!("what is saved does not resolve: {error}"))?;
    if let Some(difference) = config.differences(&read).first() {
        return Err(format!("what is saved differs: {difference:?}"));
    }
    match TrainConfig::from_config(&config) {
        Ok(train) => {
            for num_devices in [1, 2, 8, 4096] {
                train.check_devices(num_devices).or_else(|error| check(&error, verbose))?;
            }
        }
        Err(error) => check(&error, verbose)?,
    }
    DecodeConfig::from_config(&config).map(|_| ()).or_else(|error| check(&error, verbose))?;
    Ok(true)
}

/// Checks that every problem has a message and a hint, neither too short nor too long.
fn check(error: &ConfigError, verbose: bool) -> Result<(), String> {
    if verbose {
        println!("{error}");
    }
    if error.problems().is_empty() {
        return Err("an error without problems".to_owned());
    }
    for problem in error.problems() {
        let (message, hint) = (problem.to_string(), problem.hint().unwrap_or_default());
        if message.trim().len() < 10 || hint.trim().len() < 5 {
            return Err(format!("a message without content: {message:?}, {hint:?}"));
        }
        if message.len() + hint.len() > LONGEST_MESSAGE {
            return Err(format!("a message of {} bytes: {message:.200}…", message.len() + hint.len()));
        }
    }
    Ok(())
}

/// Random numbers by SplitMix64 (Steele, Lea and Flood, 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }

    fn one_in(&mut self, number: usize) -> bool {
        self.below(number) == 0
    }

    fn pick<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        &choices[self.below(choices.len())]
    }
}

/// YAML's syntax, and characters that parsers often mishandle.
const SYNTAX: &[&str] = &[
    ": ",
    ":",
    "- ",
    "-",
    "? ",
    "[",
    "]",
    "{",
    "}",
    ",",
    "#",
    " #",
    "&a ",
    "*a",
    "&b ",
    "*b",
    "<<: *a",
    "!!str ",
    "!!int ",
    "!!binary ",
    "!x ",
    "|",
    ">",
    "|-",
    ">+",
    "'",
    "\"",
    "\\",
    "\\x",
    "\\u12",
    "%YAML 1.2",
    "%TAG",
    "---",
    "...",
    "\n",
    "\r\n",
    "\r",
    "\t",
    "  ",
    "\n  ",
    "\n\n",
    "=",
    "==",
    "\u{0}",
    "\u{1}",
    "\u{7f}",
    "\u{85}",
    "\u{a0}",
    "\u{feff}",
    "\u{2028}",
    "\u{fffd}",
    "\u{1f600}",
    "é",
    "@",
    "`",
];

const VALUES: &[&str] = &[
    "0",
    "1",
    "-1",
    "-0",
    "1.5",
    "1e3",
    "1e400",
    "-1e400",
    "0x7f",
    "0o7",
    "1_000",
    "9223372036854775807",
    "9223372036854775808",
    "-9223372036854775808",
    "18446744073709551616",
    "99999999999999999999999999999999999999999999",
    "1e-400",
    "nan",
    ".nan",
    "inf",
    "-.inf",
    "true",
    "False",
    "yes",
    "null",
    "None",
    "~",
    "''",
    "\"\"",
    "none",
    "[]",
    "{}",
    "[1, 2]",
    "[[a, b], [c, [d]]]",
    "[[norm, fsdp]]",
    "{a: 1}",
    "llama2-7b",
    "gemma3-4b",
    "deepseek3-671b",
    "llama3.1-8b-Instruct",
    "default",
    "hf",
    "synthetic",
    "custom",
    "pure-fsdp",
    "run.yml",
    "base.yml",
    "quick-start",
    "gs://bucket/a",
    "a/b",
    "../..",
    "/dev/null",
];

/// Generates inputs.
struct Source {
    random: Random,
    keys: Vec<String>,
    words: Vec<String>,
    seeds: Vec<String>,
}

impl Source {
    fn new(seed: u64) -> Self {
        let prefixes = table::groups().filter_map(|group| group.prefix);
        let nested = table::groups().flat_map(|group| {
            let prefix = group.prefix.into_iter();
            prefix.flat_map(|prefix| group.keys.iter().map(move |key| format!("{prefix}.{}", key.name)))
        });
        let keys = table::keys().map(|key| key.name.to_owned()).chain(nested).collect();
        let choices = table::keys().flat_map(|key| match key.kind {
            Kind::Choice(words) | Kind::ChoiceList(words) => words,
            _ => &[],
        });
        let words =
            choices.copied().chain(prefixes).chain(VALUES.iter().copied()).map(str::to_owned).collect();
        let mut seeds = vec![
            String::new(),
            "steps: 10\nlearning_rate: 3.e-5\nmlp_activations: [silu, linear]\n".to_owned(),
            "base_config: base.yml\nrl:\n  num_generations: 8\nlora:\n  enable_lora: true\n".to_owned(),
            "a: &a [1, 2]\nlogical_axis_rules: [['norm', 'fsdp'], ['embed', ['fsdp', 'tensor']]]\n"
                .to_owned(),
            "prompt: |\n  several\n  lines\nrun_name: \"quoted \\u00e9\"\n# a comment\nsteps: !!int 5\n"
                .to_owned(),
            Config::defaults().to_yaml(),
        ];
        let presets = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/presets/post_train");
        let files = fs::read_dir(presets).into_iter().flatten().flatten();
        let mut texts: Vec<String> = files.filter_map(|file| fs::read_to_string(file.path()).ok()).collect();
        // The order of directory entries varies, but a seed must name the same inputs everywhere.
        texts.sort();
        seeds.extend(texts);
        Self { random: Random(seed), keys, words, seeds }
    }

    fn input(&mut self) -> Input {
        let mut input = Input::default();
        for name in ["run.yml", "base.yml"] {
            if !self.random.one_in(3) {
                input.files.push((name.to_owned(), self.file()));
            }
        }
        if let Some((name, _)) = input.files.first() {
            input.arguments.push(name.clone());
        }
        for _ in 0..self.random.below(6) {
            let argument = self.argument();
            let place = self.random.below(input.arguments.len() + 1);
            input.arguments.insert(place, argument);
        }
        for _ in 0..self.random.below(3) {
            let name = match self.random.below(4) {
                0 => "XLA_FLAGS".to_owned(),
                1 => self.word(),
                _ => format!("M_{}", self.key().to_uppercase()),
            };
            let value = match self.random.below(3) {
                0 => format!("--xla_force_host_platform_device_count={}", self.word()),
                _ => self.value(),
            };
            input.environment.push((name, value));
        }
        input
    }

    fn key(&mut self) -> String {
        let key = self.random.pick(&self.keys).clone();
        if self.random.one_in(8) { self.damaged(key, 1) } else { key }
    }

    fn word(&mut self) -> String {
        self.random.pick(&self.words).clone()
    }

    fn value(&mut self) -> String {
        match self.random.below(12) {
            0 => self.extreme(),
            1 => {
                let word = self.word();
                self.damaged(word, 3)
            }
            2 => (0..self.random.below(12)).map(|_| *self.random.pick(SYNTAX)).collect(),
            3 => format!("[{}, {}]", self.word(), self.word()),
            _ => self.word(),
        }
    }

    /// A key with a value that is valid most of the time.
    fn setting(&mut self) -> (String, String) {
        let key = self.random.pick(&self.keys).clone();
        let kind = table::canonical(&key).map(|key| key.kind);
        let number =
            |random: &mut Random| ["0", "1", "2", "3", "4", "8", "64", "1024"][random.below(8)].to_owned();
        let value = match kind {
            _ if self.random.one_in(8) => self.value(),
            Some(Kind::Bool) => ["true", "false", "1", "no"][self.random.below(4)].to_owned(),
            Some(Kind::Integer { .. } | Kind::Integers | Kind::IntegerOrIntegers) => number(&mut self.random),
            Some(Kind::Float { .. } | Kind::Floats) => format!("0.{}", number(&mut self.random)),
            Some(Kind::Choice(words)) => (*self.random.pick(words)).to_owned(),
            Some(Kind::ChoiceList(words)) => format!("[{}]", self.random.pick(words)),
            Some(Kind::Mapping) => format!("{{ {}: {} }}", self.key(), self.word()),
            Some(Kind::AxisRules) => "[['norm', 'fsdp'], ['heads', ['tensor']]]".to_owned(),
            Some(Kind::TextLists) => "[[a, b], []]".to_owned(),
            Some(Kind::TextList | Kind::TextOrTexts) => "[a, b]".to_owned(),
            Some(Kind::Text) | None => format!("t{}", number(&mut self.random)),
        };
        (key, value)
    }

    fn argument(&mut self) -> String {
        let argument = match self.random.below(10) {
            0 => self.word(),
            1 => self.key(),
            2 => format!("{}.{}={}", self.key(), self.key(), self.value()),
            3 => format!("--{}={}", self.key(), self.value()),
            _ => {
                let (key, value) = self.setting();
                format!("{key}={value}")
            }
        };
        if self.random.one_in(16) { self.damaged(argument, 2) } else { argument }
    }

    /// A file, damaged at a few positions half of the time.
    fn file(&mut self) -> String {
        let mut text = self.random.pick(&self.seeds).clone();
        for _ in 0..self.random.below(4) {
            let (key, value) = self.setting();
            text += &format!("{key}: {value}\n");
        }
        // Half of the files are intact, so that inputs reach the code behind the YAML parser.
        let most = if self.random.one_in(2) { 0 } else { 1 + self.random.below(8) };
        self.damaged(text, most)
    }

    /// A value that is too deep, too long or too large, or that refers to itself too often.
    fn extreme(&mut self) -> String {
        let size = 1 << self.random.below(17);
        let few = size.min(4096);
        match self.random.below(12) {
            10 => (0..few).map(|number| format!("\nunknown_{number}: 1")).collect(),
            0 => "[".repeat(size),
            1 => format!("{}{}", "[".repeat(size), "]".repeat(size)),
            2 => "{a: ".repeat(size),
            3 => format!("{}1{}", "{a: ".repeat(few), "}".repeat(few)),
            4 => (0..few).map(|depth| format!("\n{}a:", " ".repeat(depth.min(512)))).collect(),
            5 => "- ".repeat(size),
            6 => "9".repeat(size),
            7 => self.word().repeat((size / 8).max(1)),
            8 => {
                let laughs = (1..few.min(40)).map(|level| {
                    let below = format!("*a{}", level - 1);
                    format!("\na{level}: &a{level} [{}]", [below.as_str(); 9].join(", "))
                });
                format!("x\na0: &a0 ha{}", laughs.collect::<String>())
            }
            9 => format!("\"{}", "\\u".repeat(size)),
            _ => format!("{}:\n", "? ".repeat(size)),
        }
    }

    /// A text with up to `most` random changes.
    fn damaged(&mut self, mut text: String, most: usize) -> String {
        for _ in 0..most {
            let place = self.place(&text);
            match self.random.below(9) {
                0 => text.insert_str(place, self.random.pick::<&str>(SYNTAX)),
                1 => text.insert_str(place, &self.word()),
                2 => {
                    let value = self.value();
                    text.insert_str(place, &value);
                }
                3 => {
                    let end = self.place(&text);
                    text.replace_range(place.min(end)..place.max(end), "");
                }
                4 => text.truncate(place),
                5 => {
                    let line = text[place..].lines().next().unwrap_or_default().to_owned();
                    text.insert_str(place, &format!("\n{line}\n"));
                }
                6 => {
                    let key = self.key();
                    text.insert_str(place, &format!("\n{key}: "));
                }
                7 => {
                    let character = char::from_u32(self.random.below(0x11_0000) as u32).unwrap_or('\u{fffd}');
                    text.insert(place, character);
                }
                _ => {
                    if self.random.one_in(6) {
                        let extreme = self.extreme();
                        text.insert_str(place, &extreme);
                    }
                }
            }
        }
        text
    }

    /// A random position on a character boundary.
    fn place(&mut self, text: &str) -> usize {
        let place = self.random.below(text.len() + 1);
        (0..=place).rev().find(|place| text.is_char_boundary(*place)).unwrap_or(0)
    }
}
