//! `maxtext bench`.

mod checkpoint;
mod inference;

use std::env;

use mt_server::bench::{Arrival, Load, LoadReport, Quantiles, run as put};

use crate::{
    arguments::{BenchCommand, BenchServe},
    commands::serve::API_KEYS,
    failure::{Failure, print},
};

/// Runs `maxtext bench`.
pub fn run(command: BenchCommand) -> Result<(), Failure> {
    match command {
        BenchCommand::Serve(command) => serve(&command),
        BenchCommand::Inference(command) => inference::run(command),
        BenchCommand::Checkpoint(command) => checkpoint::run(command),
    }
}

fn serve(command: &BenchServe) -> Result<(), Failure> {
    let mut arrivals: Vec<Arrival> = command.concurrency.iter().copied().map(Arrival::Concurrency).collect();
    arrivals.extend(command.rate.iter().copied().map(Arrival::Rate));
    if arrivals.is_empty() {
        arrivals = [1, 8, 32].map(Arrival::Concurrency).to_vec();
    }
    let keys = env::var(API_KEYS).unwrap_or_default();
    let loads: Vec<Load> = arrivals
        .into_iter()
        .zip(0..)
        .map(|(arrival, index)| Load {
            url: command.url.clone(),
            api_key: keys.lines().next().map(|key| key.trim().to_owned()),
            model: command.model.clone(),
            num_requests: command.requests,
            prompt_tokens: command.prompt_tokens,
            answer_tokens: command.answer_tokens,
            arrival,
            // Each measurement has prompts of its own, which no prefix cache has seen.
            seed: command.seed.wrapping_add(index),
        })
        .collect();
    let (mut failure, mut has_head) = (None, command.json);
    put(&loads, |report| {
        if !std::mem::replace(&mut has_head, true) {
            failure = print(HEAD).err();
        }
        let line = if command.json { report.json().to_string() } else { row(report) };
        failure = failure.take().or(print(&line).err());
        if let (Some(message), false) = (&report.failure, command.json) {
            say!("warning: {} requests failed; the first with: {message}", report.num_failed);
        }
    })?;
    failure.map_or(Ok(()), Err)
}

const HEAD: &str = "                 req/s   tokens/s       first token (ms)         between tokens (ms)          request (ms)
load                                 median     p90     p99   median     p90     p99   median     p90     p99";

fn row(report: &LoadReport) -> String {
    let load = match report.arrival {
        Arrival::Concurrency(1) => "1 client".to_owned(),
        Arrival::Concurrency(number) => format!("{number} clients"),
        Arrival::Rate(rate) => format!("{rate} a second"),
    };
    let times = |quantiles: Quantiles| {
        format!("{:>8.1}{:>8.1}{:>8.1} ", quantiles.median, quantiles.p90, quantiles.p99)
    };
    format!(
        "{load:<14}{:>8.2}{:>11.1} {}{}{}",
        report.requests_per_second(),
        report.tokens_per_second(),
        times(report.first_token),
        times(report.inter_token),
        times(report.whole)
    )
}
