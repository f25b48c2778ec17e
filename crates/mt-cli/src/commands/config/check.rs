//! `maxtext config check`.

use std::iter;

use clap::{CommandFactory, Parser};
use mt_config::{Config, Hardware, Named, PresetCommand, Request, TrainConfig};
use mt_plan::compile::Subject;
use mt_shape::DeviceAttributes;

use crate::{
    arguments::{Arguments, Check, Command, Compile, Decode, Estimate, Logits, Reward, Serve, Settings},
    commands::{
        check_output, compile, decode, estimate, logits, resolve_training, serve, warn, warn_of_training,
        warn_on,
    },
    failure::{Failure, print},
};

/// Commands of MaxText that are not built yet.
const NOT_BUILT: &[&str] = &["eval"];

/// The commands whose arguments are configurations, and can be checked.
pub fn checked() -> Vec<String> {
    let program = Arguments::command();
    let takes_settings =
        |command: &&clap::Command| command.get_positionals().any(|argument| argument.get_id() == "settings");
    program.get_subcommands().filter(takes_settings).map(|command| command.get_name().to_owned()).collect()
}

pub fn run(arguments: Check) -> Result<(), Failure> {
    let arguments = arguments.arguments;
    let first = arguments.first().cloned().unwrap_or_default();
    if checked().contains(&first) {
        // Mistakes in a command's options end the program here, as they do when the command runs.
        return check(Arguments::parse_from(iter::once("maxtext".to_owned()).chain(arguments)).command);
    }
    if Arguments::command().get_subcommands().any(|command| command.get_name() == first) {
        return Err(Failure::user(format!("`{first}` has no configuration to check\nhint: {}", checkable())));
    }
    if NOT_BUILT.contains(&first.as_str()) {
        return Err(not_built(&first));
    }
    check_train(None, Settings { settings: arguments })
}

fn check(command: Command) -> Result<(), Failure> {
    match command {
        Command::Train(settings) => check_train(None, settings),
        Command::Sft(settings) => check_train(PresetCommand::named("sft"), settings),
        Command::Dpo(settings) => check_train(PresetCommand::named("dpo"), settings),
        Command::Distill(settings) => check_train(PresetCommand::named("distill"), settings),
        Command::Rl(settings) => check_train(PresetCommand::named("rl"), settings),
        Command::Reward(Reward { command: None, settings }) => {
            check_train(PresetCommand::named("reward"), settings)
        }
        Command::Reward(_) => Err(Failure::user(
            "`reward score` has no configuration to check\nhint: check the training of a reward model: `maxtext config check reward …`",
        )),
        Command::Chat(settings) => check_chat(settings),
        Command::Serve(command) => check_serve(command),
        Command::Decode(command) => check_decode(command),
        Command::Estimate(command) => check_estimate(command),
        Command::Compile(command) => check_compile(command),
        Command::Logits(command) => check_logits(command),
        Command::Config(_)
        | Command::Bench(_)
        | Command::Checkpoint(_)
        | Command::Data(_)
        | Command::Tokenizer(_)
        | Command::Plugin(_)
        | Command::Completion { .. }
        | Command::Complete(_) => unreachable!("only commands that take settings are checked"),
    }
}

/// The hint that lists the commands.
fn checkable() -> String {
    let names: Vec<String> = checked().iter().map(|name| format!("`{name}`")).collect();
    format!("{} can be checked", names.join(", "))
}

fn check_train(preset: Option<&'static PresetCommand>, settings: Settings) -> Result<(), Failure> {
    // Presets name weights in stores that this machine need not reach.
    mt_storage::disconnect();
    let request = Request::from_process(settings.settings).with_quick_start().for_command(preset);
    let config = resolve_training(&request)?;
    warn(&config);
    // The quick start of such a command has the tokenizer of the run that it adapts, which may not exist yet.
    let config = match preset {
        Some(_) if config.is_quick_start() => config.with_derived("tokenizer_type", "byte"),
        _ => config,
    };
    let train = TrainConfig::from_config(&config)?;
    warn_of_training(&config);
    mt_models::build(&train.model)?;
    if let Some(teacher) = &train.distillation.teacher {
        mt_models::build(&teacher.model)?;
    }
    check_output(&train.run)?;
    if let Some(devices) = config.known_devices() {
        warn_on(&config, Hardware::Cpu);
        train.check_devices(train.placement.topology(devices, &DeviceAttributes::default())?)?;
    }
    report(if config.is_quick_start() { "the quick start" } else { "the configuration" }, &config)
}

fn check_decode(mut command: Decode) -> Result<(), Failure> {
    command.settings.take_flag("--json");
    let prepared = decode::prepare(command.settings)?;
    prepared.check_prompts(&*mt_models::build(&prepared.decode.model)?)?;
    if let Some(devices) = prepared.config.known_devices() {
        warn_on(&prepared.config, Hardware::Cpu);
        let placement = &prepared.decode.placement;
        placement.mesh(placement.topology(devices, &DeviceAttributes::default())?)?;
    }
    report("the configuration of `maxtext decode`", &prepared.config)
}

fn check_chat(settings: Settings) -> Result<(), Failure> {
    let prepared = decode::prepare_chat(settings)?;
    mt_models::build(&prepared.decode.model)?;
    report("the configuration of `maxtext chat`", &prepared.config)
}

fn check_serve(mut command: Serve) -> Result<(), Failure> {
    serve::take_options(&mut command)?;
    serve::api_keys(command.api_key_file.as_deref())?;
    let prepared = serve::prepare(command.settings)?;
    mt_models::build(&prepared.decode.model)?;
    report("the configuration of `maxtext serve`", &prepared.config)
}

fn check_estimate(mut command: Estimate) -> Result<(), Failure> {
    let (config, _) = estimate::estimate(&mut command)?;
    report("the configuration of `maxtext estimate`", &config)
}

fn check_compile(mut command: Compile) -> Result<(), Failure> {
    let (config, subject) = compile::configure(&mut command)?;
    mt_models::build(match &subject {
        Subject::Training(train) => &train.model,
        Subject::Decoding(decode, _) => &decode.model,
    })?;
    report("the configuration of `maxtext compile`", &config)
}

fn check_logits(mut command: Logits) -> Result<(), Failure> {
    let (config, _, load) = logits::configure(&mut command)?;
    mt_models::build(&load.model)?;
    report("the configuration of `maxtext logits`", &config)
}

fn report(what: &str, config: &Config) -> Result<(), Failure> {
    let changed = config.entries().filter(|entry| entry.is_changed()).count();
    let verb = if changed == 1 { "key differs from its default" } else { "keys differ from their defaults" };
    print(&format!("{what} has no mistakes; {changed} {verb}"))
}

fn not_built(command: &str) -> Failure {
    let preset = match Named::embedded(command) {
        Some(Named::Preset(preset)) => {
            format!("; to check the preset of that name, write `maxtext config check {preset}`")
        }
        _ => String::new(),
    };
    Failure::user(format!("the command `{command}` is not built yet\nhint: {}{preset}", checkable()))
}
