//! Answers that reward functions accept: rejection sampling.

use mt_config::{Config, Request, RlGroup, RolloutGroup, table};
use mt_rl::rewards::{Judge, Judged, Verdict};
use mt_train::{TrainError, reward_settings};
use serde_json::{Value, json};

use super::{
    given_prompt, in_form_of, option_or,
    output::Output,
    writer::{CHUNK, Draw, Writer, Written, distinct, show_progress},
};
use crate::{arguments::GenerateAnswers, commands::warn, failure::Failure};

/// Runs `maxtext data generate answers`.
pub fn run(mut arguments: GenerateAnswers) -> Result<(), Failure> {
    arguments.generated.complete()?;
    let settings = &mut arguments.generated.settings;
    let samples = option_or(settings, ("--samples", "ANSWERS"), arguments.samples, 8)?;
    let keep = option_or(settings, ("--keep", "ANSWERS"), arguments.keep, 1)?;
    let least = option_or(settings, ("--keep-above", "REWARD"), arguments.keep_above, 1.0)?;
    if samples == 0 || keep == 0 {
        return Err(Failure::user("`--samples` and `--keep` are at least 1"));
    }
    let (of_rewards, of_model): (Vec<String>, Vec<String>) =
        std::mem::take(&mut settings.settings).into_iter().partition(|word| is_of_rewards(word));
    let mut judge = judge(&of_rewards)?;
    let writer = Writer::open(of_model.clone(), arguments.generated.max_tokens)?;
    let prompts = writer.prompts(&arguments.generated)?;
    check_answers(&judge, &prompts)?;
    let options = json!([
        "answers",
        arguments.generated.prompts,
        arguments.generated.columns,
        arguments.generated.max_tokens,
        samples,
        keep,
        least,
        of_rewards,
        of_model,
    ]);
    let mut output = Output::open(arguments.generated.output()?, options, 2)?;
    let ((column, _), total) = (arguments.generated.columns(), prompts.prompts.len() as u64);
    while output.done() < total {
        let first = output.done() as usize;
        let chunk = &prompts.prompts[first..(first + CHUNK).min(prompts.prompts.len())];
        let asked: Vec<(Vec<u32>, u64)> = (first..first + chunk.len())
            .flat_map(|row| (0..samples).map(move |sample| (row, sample)))
            .map(|(row, sample)| (prompts.prompts[row].tokens.clone(), (row * samples + sample) as u64))
            .collect();
        let written = writer.answers(&asked, Draw::Sampled(0))?;
        let judged: Vec<Judged<'_>> = written
            .iter()
            .enumerate()
            .map(|(index, written)| {
                let prompt = &chunk[index / samples];
                Judged {
                    prompt: &prompt.text,
                    completion: written.as_ref().map_or("", |written| &written.text),
                    answer: prompt.answer.as_deref(),
                    tokens: written.as_ref().map_or(0, |written| written.tokens),
                    columns: &prompt.columns,
                }
            })
            .collect();
        let verdicts = judge.judge(&judged).map_err(TrainError::from)?;
        let mut rows = Vec::new();
        let mut answered = 0;
        for (prompt, (written, verdicts)) in
            chunk.iter().zip(written.chunks(samples).zip(verdicts.chunks(samples)))
        {
            let kept = best(written, verdicts, (keep, least));
            answered += u64::from(!kept.is_empty());
            let prompt = given_prompt(prompt, &column);
            rows.extend(kept.into_iter().map(|(written, verdict)| row(prompt, written, verdict)));
        }
        output.add(&rows, chunk.len() as u64, &[rows.len() as u64, answered])?;
        show_progress(output.done(), total, "prompts");
    }
    for (function, failures) in judge.failures() {
        say!(
            "warning: the reward `{function}` has failed {} times; the last time, {}",
            failures.count,
            failures.last
        );
    }
    let [kept, answered] = [output.counts()[0], output.counts()[1]];
    output.finish()?;
    say!("{kept} answers to {answered} of {total} prompts have a reward of {least} or more");
    Ok(())
}

/// The different answers with the largest rewards among those with the least one, in the order of rewards.
fn best<'a>(
    written: &'a [Option<Written>],
    verdicts: &'a [Verdict],
    (keep, least): (usize, f64),
) -> Vec<(&'a Written, &'a Verdict)> {
    let reward = |verdict: &Verdict| verdict.total.filter(|total| *total >= least);
    let pairs = written.iter().zip(verdicts);
    let mut good: Vec<(&Written, &Verdict)> = pairs
        .filter_map(|(written, verdict)| {
            reward(verdict).and(written.as_ref().map(|written| (written, verdict)))
        })
        .collect();
    good.sort_by(|one, other| other.1.total.unwrap_or_default().total_cmp(&one.1.total.unwrap_or_default()));
    let places = distinct(good.iter().map(|(written, _)| written.text.as_str()));
    places.into_iter().take(keep).map(|place| good[place]).collect()
}

/// A line of fine-tuning data.
fn row(prompt: &Value, written: &Written, verdict: &Verdict) -> Value {
    let completion = in_form_of(prompt, &written.text);
    json!({"prompt": prompt, "completion": completion, "reward": verdict.total, "rewards": verdict.rewards})
}

/// Recognizes keys of rewards among those of the model.
fn is_of_rewards(word: &str) -> bool {
    const OF_MODEL: [&str; 4] =
        ["decode_seed", "system_prompt", "max_prefill_predict_length", "stop_strings"];
    let name = word.split_once('=').and_then(|(name, _)| table::canonical(name.trim()));
    name.is_some_and(|key| {
        let is_reward = RolloutGroup::KEYS.contains(&key.name) || key.name == "reward_weights";
        is_reward && !OF_MODEL.contains(&key.name)
    })
}

/// The judge that keys of rewards describe.
fn judge(keys: &[String]) -> Result<Judge, Failure> {
    let names = |word: &String| word.split('=').next().and_then(|name| table::canonical(name.trim()));
    let has_functions = keys
        .iter()
        .filter_map(names)
        .any(|key| ["reward_functions", "reward_command", "reward_url"].contains(&key.name));
    // Without functions, right answers count.
    let usual = if has_functions { "" } else { "reward_functions=math" };
    let own = [usual, "use_rl=true"].into_iter().filter(|word| !word.is_empty()).map(str::to_owned);
    let arguments = keys.iter().cloned().chain(own).collect();
    let config = Config::resolve(&Request { arguments, ..Request::default() })?;
    warn(&config);
    let rollouts = RolloutGroup::from_config(&config)?;
    if rollouts.reward_model_path.is_some() {
        return Err(Failure::user(
            "`reward_model_path` is not built for `data generate answers`\n\
             hint: write the answers with `--keep-above -1e9`, and judge them with `maxtext reward score`",
        ));
    }
    let settings = reward_settings(&RlGroup::from_config(&config)?, &rollouts)?;
    Ok(Judge::new(settings).map_err(TrainError::from)?)
}

/// Refuses prompts without the answers with which functions compare.
fn check_answers(judge: &Judge, prompts: &mt_rl::PromptSet) -> Result<(), Failure> {
    let needing = judge.settings().functions.iter().find(|(function, _)| function.needs_answer());
    let (Some((function, _)), Some(index)) = (needing, prompts.without_answer()) else { return Ok(()) };
    let text = prompts.prompts[index].text.clone();
    Err(TrainError::NoAnswer { function: function.name(), text }.into())
}
