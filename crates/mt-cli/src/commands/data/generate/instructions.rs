//! New instructions with answers, after the example of given ones: Self-Instruct.

use std::collections::BTreeMap;

use mt_rl::synthesis::{InstructionPool, InstructionRules, Refused};
use serde_json::{Value, json};

use super::{
    given_prompt, option_or,
    output::Output,
    writer::{Draw, Writer, show_progress, user},
};
use crate::{arguments::GenerateInstructions, failure::Failure};

/// The requests of a round.
const REQUESTS: u64 = 16;

/// The rounds in a row without a new instruction after which the model is considered to have no more.
const FRUITLESS: u64 = 20;

/// The kinds of draws.
const OF_INSTRUCTIONS: u64 = 1;
const OF_ANSWERS: u64 = 2;

/// Runs `maxtext data generate instructions`.
pub fn run(mut arguments: GenerateInstructions) -> Result<(), Failure> {
    arguments.generated.complete()?;
    let settings = &mut arguments.generated.settings;
    let count: u64 = option_or(settings, ("--count", "INSTRUCTIONS"), arguments.count, 100)?;
    let usual = InstructionRules::default();
    let rules = InstructionRules {
        examples: option_or(settings, ("--examples", "EXAMPLES"), arguments.examples, usual.examples)?,
        similarity: option_or(settings, ("--similarity", "SHARE"), arguments.similarity, usual.similarity)?,
        seed: option_or(settings, ("--seed", "SEED"), arguments.seed, usual.seed)?,
        ..usual
    };
    let keys = std::mem::take(&mut settings.settings);
    let writer = Writer::open(keys.clone(), arguments.generated.max_tokens)?;
    let given = writer.prompts(&arguments.generated)?;
    let (column, _) = arguments.generated.columns();
    let text = |prompt| match given_prompt(prompt, &column) {
        Value::String(text) => Ok(text.clone()),
        _ => Err(Failure::user(format!(
            "`{column}` holds messages, but instructions are texts\nhint: name a column of texts with `--columns`"
        ))),
    };
    let given: Vec<String> = given.prompts.iter().map(text).collect::<Result<_, _>>()?;
    let mut pool = InstructionPool::new(given, rules);
    let options = json!([
        "instructions",
        arguments.generated.prompts,
        arguments.generated.columns,
        arguments.generated.max_tokens,
        rules.examples,
        rules.similarity,
        rules.seed,
        keys,
    ]);
    let mut output = Output::open(arguments.generated.output()?, options, 1)?;
    for row in output.rows()? {
        // Lines are known to be new, and become known to the pool again.
        let _ = pool.add(row["prompt"].as_str().unwrap_or_default());
    }
    let (mut refused, mut fruitless) = (BTreeMap::<Refused, u64>::new(), 0);
    while output.counts()[0] < count && fruitless < FRUITLESS {
        let round = output.done();
        let wanted = (count - output.counts()[0]) as usize;
        let new = new_instructions(&writer, &mut pool, round, &mut refused)?;
        let new = &new[..new.len().min(wanted)];
        fruitless = if new.is_empty() { fruitless + 1 } else { 0 };
        let rows = answered(&writer, new, output.counts()[0])?;
        output.add(&rows, 1, &[rows.len() as u64])?;
        show_progress(output.counts()[0], count, "instructions");
    }
    let made = output.counts()[0];
    output.finish()?;
    let reasons: Vec<String> =
        refused.iter().map(|(reason, count)| format!("{count} {}", reason.name())).collect();
    let reasons =
        if reasons.is_empty() { String::new() } else { format!("; refused: {}", reasons.join(", ")) };
    say!("{made} new instructions with answers{reasons}");
    if made < count {
        say!(
            "the model wrote no new instruction in {FRUITLESS} rounds; give more examples, or raise `--similarity`"
        );
    }
    Ok(())
}

/// The instructions of a round, which join the pool.
fn new_instructions(
    writer: &Writer,
    pool: &mut InstructionPool,
    round: u64,
    refused: &mut BTreeMap<Refused, u64>,
) -> Result<Vec<String>, Failure> {
    let request = |number| -> Result<(Vec<u32>, u64), Failure> {
        Ok((writer.tokens(&[user(pool.request(round, number))])?, round * REQUESTS + number))
    };
    let asked: Vec<(Vec<u32>, u64)> = (0..REQUESTS).map(request).collect::<Result<_, _>>()?;
    let written = writer.answers(&asked, Draw::Sampled(OF_INSTRUCTIONS))?;
    if written.iter().all(Option::is_none) {
        return Err(Failure::user(
            "the examples of a request leave no room for an instruction\n\
             hint: raise `max_target_length`, or lower `--examples`",
        ));
    }
    let mut new = Vec::new();
    for written in written.into_iter().flatten() {
        for instruction in InstructionPool::read(&written.text, written.is_complete) {
            match pool.add(&instruction) {
                Ok(()) => new.push(instruction),
                Err(reason) => *refused.entry(reason).or_default() += 1,
            }
        }
    }
    Ok(new)
}

/// Instructions with their answers, as lines of fine-tuning data.
fn answered(writer: &Writer, new: &[String], first: u64) -> Result<Vec<Value>, Failure> {
    let ask = |(instruction, number): (&String, u64)| -> Result<(Vec<u32>, u64), Failure> {
        Ok((writer.tokens(&[user(instruction.clone())])?, number))
    };
    let asked: Vec<(Vec<u32>, u64)> = new.iter().zip(first..).map(ask).collect::<Result<_, _>>()?;
    let written = writer.answers(&asked, Draw::Sampled(OF_ANSWERS))?;
    let row = |(instruction, answer): (&String, Option<_>)| {
        let answer: super::writer::Written = answer?;
        Some(json!({"prompt": instruction, "completion": answer.text}))
    };
    Ok(new.iter().zip(written).filter_map(row).collect())
}
