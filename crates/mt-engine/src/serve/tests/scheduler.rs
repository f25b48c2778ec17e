//! Random operations on the scheduler alone.

use std::collections::{HashMap, HashSet};

use mt_testing::Random;

use crate::serve::scheduler::{Pause, Piece, PoolOptions, Scheduler, SchedulerOptions, SequenceId};

const NUM_STEPS: usize = 40_000;
const LONGEST: usize = 48;

/// Continues a sequence by a token and some of its drafts, and drafts others. Returns the number of new tokens.
fn verify(
    scheduler: &mut Scheduler,
    id: SequenceId,
    step: usize,
    random: &mut Random,
    open: &mut HashMap<SequenceId, usize>,
    most_drafts: usize,
) -> usize {
    let num_tokens = 1 + random.below(scheduler.sequence(id).num_drafts + 1);
    for number in 1..=num_tokens {
        if scheduler.sequence(id).tokens.len() + 1 >= open[&id] {
            open.remove(&id);
            scheduler.remove(id);
            return number;
        }
        scheduler.has_started(id, Pause::No);
        scheduler.has_chosen(id, (step % 5) as u32);
    }
    scheduler.roll_back(id);
    let sequence = scheduler.sequence(id);
    let kept = sequence.cached.div_ceil(4);
    assert!(sequence.tables.iter().all(|table| table.len() == kept));
    let rest = open[&id] - sequence.tokens.len() - 1;
    let num_drafts = random.below(most_drafts + 1).min(rest);
    scheduler.set_drafts(id, num_drafts, (most_drafts / 2).min(rest - num_drafts));
    num_tokens
}

/// Receives the tokens of a step. Some sequences end early, when another token is already pending.
fn receive(
    scheduler: &mut Scheduler,
    open: &mut HashMap<SequenceId, usize>,
    random: &mut Random,
    sequences: Vec<SequenceId>,
    token: u32,
) {
    for id in sequences {
        let Some(length) = open.get(&id) else { continue };
        if scheduler.sequence(id).num_known() + 1 >= *length || random.below(60) == 0 {
            open.remove(&id);
            scheduler.remove(id);
        } else {
            scheduler.has_chosen(id, token);
        }
    }
}

/// Lets requests arrive and be cancelled at random.
fn arrive(scheduler: &mut Scheduler, open: &mut HashMap<SequenceId, usize>, random: &mut Random) {
    if open.len() < 14 && random.below(3) == 0 {
        let kind = random.below(3) as u32;
        let prompt: Vec<u32> = (0..=random.below(30) as u32).map(|index| index * 3 + kind).collect();
        let count = 1 + random.below(6) / 5 * random.below(3);
        let length = prompt.len() + 1 + random.below(LONGEST - prompt.len());
        for id in scheduler.add(&prompt, count, true) {
            open.insert(id, length);
        }
    }
    if random.below(40) == 0
        && let Some(id) = open.keys().min().copied()
    {
        open.remove(&id);
        scheduler.remove(id);
    }
}

/// Reads pieces, which have pages.
fn read(scheduler: &mut Scheduler, pieces: &[Piece]) {
    for Piece { sequence, first, count } in pieces {
        let sequence = scheduler.sequence(*sequence);
        assert_eq!(sequence.cached, *first);
        assert!(first + count < sequence.tokens.len());
        let has_pages =
            |table: &Vec<u32>| table[first / 4..(first + count).div_ceil(4)].iter().all(|page| *page > 0);
        assert!(sequence.entry > 0 && sequence.tables.iter().all(has_pages));
    }
    for piece in pieces {
        let kept = scheduler.has_read(*piece);
        assert!(kept.is_none_or(|copy| copy.entries[1] > 7 && copy.entries[0] > 0));
    }
}

/// Starts the choice of a sequence's next token, of `length` tokens in all.
fn start(scheduler: &mut Scheduler, id: SequenceId, length: usize, random: &mut Random) {
    let is_last = scheduler.sequence(id).tokens.len() + 1 >= length;
    let pause = match random.below(9) {
        _ if is_last => Pause::AtEnd,
        0 => Pause::UntilKnown,
        _ => Pause::No,
    };
    scheduler.has_started(id, pause);
}

/// Runs steps with requests that arrive and are cancelled at random, and checks pages and tables.
fn check(
    reaches: &[Option<usize>],
    num_pages: usize,
    keeps_prefixes: bool,
    num_snapshots: Option<usize>,
    host_pages: usize,
) {
    for most_drafts in [0, 5] {
        check_with(reaches, num_pages, keeps_prefixes, num_snapshots, host_pages, most_drafts);
    }
}

fn check_with(
    reaches: &[Option<usize>],
    num_pages: usize,
    keeps_prefixes: bool,
    num_snapshots: Option<usize>,
    host_pages: usize,
    most_drafts: usize,
) {
    let pool = |reach: &Option<usize>| PoolOptions { reach: *reach, num_pages };
    let mut scheduler = Scheduler::new(SchedulerOptions {
        page_size: 4,
        pools: reaches.iter().map(pool).collect(),
        num_sequences: 7,
        piece: 12,
        keeps_prefixes,
        num_snapshots,
    });
    if host_pages > 0 {
        // A page counts one byte.
        scheduler = scheduler.with_host_memory(host_pages as u64, vec![1; reaches.len()]);
    }
    let (mut in_host, mut num_restored) = (HashSet::new(), 0);
    let mut random = Random::new(num_pages as u64);
    // The length at which each sequence ends.
    let mut open: HashMap<SequenceId, usize> = HashMap::new();
    // The sequences of the last step.
    let mut started: Vec<SequenceId> = Vec::new();
    let (mut num_tokens, mut num_preempted, mut num_copied) = (0, 0, 0);
    for step in 0..NUM_STEPS {
        arrive(&mut scheduler, &mut open, &mut random);
        let before = scheduler.num_running();
        let plan = scheduler.plan();
        (num_preempted, num_copied) = (num_preempted + plan.preempted.len(), num_copied + plan.copies.len());
        assert!(plan.pieces.iter().map(|piece| piece.count).sum::<usize>() <= 12);
        assert!(plan.host.forgotten.iter().all(|number| in_host.remove(number)));
        assert!(plan.host.saved.iter().all(|moved| in_host.insert(moved.number)));
        assert!(plan.host.restored.iter().all(|moved| in_host.contains(&moved.number)));
        assert!(in_host.len() <= host_pages && scheduler.host_bytes() == in_host.len() as u64);
        num_restored += plan.host.restored.len();
        read(&mut scheduler, &plan.pieces);
        for id in &plan.decoded {
            let sequence = scheduler.sequence(*id);
            assert!(sequence.is_ready() && sequence.entry > 0);
            // The tokens of the last step alone are not known.
            assert_eq!(sequence.num_pending, usize::from(started.contains(id)));
            let own = sequence.cached / 4;
            let count = (sequence.cached + sequence.num_next()).div_ceil(4);
            assert!(sequence.tables.iter().all(|table| table.len() == count && table[own] > 0));
            if most_drafts > 0 {
                num_tokens += verify(&mut scheduler, *id, step, &mut random, &mut open, most_drafts);
                continue;
            }
            num_tokens += 1;
            start(&mut scheduler, *id, open[id], &mut random);
        }
        let had_started = !started.is_empty();
        // Verified tokens are known at once.
        let now = if most_drafts == 0 { plan.decoded.clone() } else { Vec::new() };
        let ended = std::mem::replace(&mut started, now);
        receive(&mut scheduler, &mut open, &mut random, ended, (step % 5) as u32);
        let has_work =
            had_started || !plan.decoded.is_empty() || !plan.pieces.is_empty() || !plan.preempted.is_empty();
        let has_admitted = scheduler.num_running() > before;
        assert!(has_work || has_admitted || scheduler.is_idle(), "a step makes progress");
        if step % 16 == 0 {
            scheduler.check();
        }
    }
    assert!(num_tokens > NUM_STEPS / 2 && num_copied > 100, "{num_tokens} tokens, {num_copied} copies");
    assert_eq!(num_preempted > 0, num_pages < 40, "{num_preempted}");
    assert_eq!(num_restored > 0, host_pages > 0, "{num_restored}");
    open.into_keys().for_each(|id| scheduler.remove(id));
    scheduler.check();
    assert!(scheduler.is_idle() && scheduler.pages().0 == 0);
}

#[test]
fn sequences_have_the_pages_of_their_tokens() {
    check(&[None], 16, true, None, 0);
    check(&[None], 16, false, None, 0);
    check(&[None], 100, true, None, 0);
    check(&[Some(6)], 13, true, None, 0);
    check(&[None, Some(9)], 15, true, None, 0);
    check(&[None, Some(9)], 15, true, Some(3), 0);
}

#[test]
fn host_memory_stays_within_its_bound() {
    check(&[None], 16, true, None, 5);
    check(&[None], 16, true, None, 200);
    check(&[None, Some(9)], 15, true, None, 40);
}
