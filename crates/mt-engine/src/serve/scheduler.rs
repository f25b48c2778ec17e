//! The order of work: which sequences run, which pages they have, and what each step processes.
//!
//! A step processes pieces of prompts and one token of every sequence whose prompt has been read. Sequences are admitted
//! in order of arrival while there are pages for their tokens. If pages run out, the youngest running sequence is put
//! back and starts again later, so that the oldest one always makes progress.

use std::collections::{BTreeSet, HashMap};

use super::{
    host_pages::{HostMoves, HostPages},
    pages::{NULL_PAGE, PageId, PagePool, Prefix, PrefixHasher},
    snapshots::Snapshots,
};

/// The number of a sequence, in order of arrival.
pub(crate) type SequenceId = u64;

/// The sizes of the cache, and how it is used.
#[derive(Clone, Debug)]
pub(crate) struct SchedulerOptions {
    /// The number of slots in a page.
    pub page_size: usize,
    /// The pools: for each, the number of latest tokens that queries see, and the number of pages.
    pub pools: Vec<PoolOptions>,
    /// The number of sequences that run at once.
    pub num_sequences: usize,
    /// The number of prompt tokens that a step processes.
    pub piece: usize,
    /// Whether pages are kept for prompts with the same beginning.
    pub keeps_prefixes: bool,
    /// The number of states that are kept with them, if the model has arrays without pages.
    pub num_snapshots: Option<usize>,
}

/// A pool of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PoolOptions {
    pub reach: Option<usize>,
    /// Includes the null page.
    pub num_pages: usize,
}

/// The work of a step, in this order.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Plan {
    pub copies: Vec<StateCopy>,
    pub pieces: Vec<Piece>,
    /// The sequences whose next token is chosen.
    pub decoded: Vec<SequenceId>,
    /// Sequences that were put back.
    pub preempted: Vec<SequenceId>,
    /// Pages to and from host memory.
    pub host: HostMoves,
}

impl Plan {
    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.copies.is_empty() && self.pieces.is_empty() && self.decoded.is_empty()
    }
}

/// The state of one sequence that becomes that of another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StateCopy {
    pub to_sequence: SequenceId,
    /// Entries in arrays without pages, from one to the other.
    pub entries: [u32; 2],
    /// For each pool the page with the last tokens, from one to the other; null pages if it has no tokens to copy.
    pub pages: Vec<[PageId; 2]>,
}

/// Consecutive tokens of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub sequence: SequenceId,
    pub first: usize,
    pub count: usize,
}

/// Whether further tokens of a sequence are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pause {
    No,
    /// Once the pending token is known.
    UntilKnown,
    /// None is, since the pending token is the last one.
    AtEnd,
}

/// A sequence of tokens and the place of its state.
#[derive(Debug)]
pub(crate) struct Sequence {
    /// The prompt and the answer so far.
    pub tokens: Vec<u32>,
    /// The number of last tokens that steps choose which have started. They are not known yet, and 0 stands for them.
    pub num_pending: usize,
    /// Whether no step starts for the sequence at present.
    pause: Pause,
    /// The number of tokens whose state is in the cache, or will be after the steps that have started.
    pub cached: usize,
    /// The pages in order, for each pool.
    pub tables: Vec<Vec<PageId>>,
    /// The entry in arrays without pages; 0 if the sequence does not run.
    pub entry: u32,
    /// The number of tokens that came from the prefix cache when the sequence was last admitted.
    pub found: usize,
    /// The number of tokens that the next step verifies behind the last one.
    pub num_drafts: usize,
    /// The number of tokens behind them for which the step needs pages.
    num_ahead: usize,
    /// The number of pages that other sequences can find.
    registered: usize,
    /// The prefixes of whole pages, as far as they are known.
    prefixes: Vec<Prefix>,
    /// The number of the adapter; 0 for none.
    pub adapter: u32,
    /// The prefix before the first token. It differs for sequences that must not share pages.
    root: Prefix,
    finds_prefixes: bool,
    /// Pages of its beginning that are in host memory alone, by pool and number, until the sequence is admitted.
    absent: Vec<(usize, usize)>,
    /// Sequences that begin with the same prompt and wait for its state.
    followers: Vec<SequenceId>,
}

impl Sequence {
    /// Whether the cache holds all tokens but the last one.
    pub fn is_ready(&self) -> bool {
        self.cached + 1 == self.tokens.len()
    }

    /// The number of tokens that are known.
    pub fn num_known(&self) -> usize {
        self.tokens.len() - self.num_pending
    }

    /// The number of tokens for which the next step needs pages, if the sequence is ready.
    pub fn num_next(&self) -> usize {
        1 + self.num_drafts + self.num_ahead
    }
}

/// The state of all sequences.
pub(crate) struct Scheduler {
    options: SchedulerOptions,
    hasher: PrefixHasher,
    pools: Vec<PagePool>,
    /// Keeps pages that lose their places on the device.
    host: Option<HostPages>,
    entries: Vec<u32>,
    /// States of arrays without pages, if the model has such arrays. Their entries follow those of sequences.
    snapshots: Option<Snapshots>,
    sequences: HashMap<SequenceId, Sequence>,
    /// In order of arrival.
    running: Vec<SequenceId>,
    /// In order of arrival.
    waiting: BTreeSet<SequenceId>,
    next: SequenceId,
}

impl Scheduler {
    pub fn new(options: SchedulerOptions) -> Self {
        Self {
            pools: options.pools.iter().map(|pool| PagePool::new(pool.num_pages)).collect(),
            host: None,
            entries: (1..=options.num_sequences as u32).rev().collect(),
            snapshots: options
                .num_snapshots
                .map(|count| Snapshots::new(options.num_sequences as u32 + 1, count)),
            hasher: PrefixHasher::default(),
            sequences: HashMap::new(),
            running: Vec::new(),
            waiting: BTreeSet::new(),
            next: 0,
            options,
        }
    }

    /// The same scheduler with host memory of `bytes` for pages, of which those of each pool have `page_bytes`.
    pub fn with_host_memory(mut self, bytes: u64, page_bytes: Vec<u64>) -> Self {
        self.host = self.options.keeps_prefixes.then(|| HostPages::new(bytes, page_bytes));
        self.pools.iter_mut().for_each(|pool| drop(pool.take_evicted()));
        self
    }

    /// The bytes of pages in host memory.
    pub fn host_bytes(&self) -> u64 {
        self.host.as_ref().map_or(0, HostPages::used)
    }

    /// Adds sequences that begin with the same prompt, which is read once. `finds_prefixes`: whether its beginning
    /// may come from the prefix cache.
    pub fn add(&mut self, prompt: &[u32], count: usize, finds_prefixes: bool) -> Vec<SequenceId> {
        let ids: Vec<SequenceId> = (self.next..).take(count).collect();
        self.next += count as u64;
        for id in &ids {
            let sequence = Sequence {
                tokens: prompt.to_vec(),
                num_pending: 0,
                pause: Pause::No,
                cached: 0,
                tables: vec![Vec::new(); self.pools.len()],
                entry: 0,
                found: 0,
                num_drafts: 0,
                num_ahead: 0,
                registered: 0,
                prefixes: Vec::new(),
                adapter: 0,
                root: Prefix::EMPTY,
                absent: Vec::new(),
                finds_prefixes: finds_prefixes && self.options.keeps_prefixes,
                followers: if *id == ids[0] { ids[1..].to_vec() } else { Vec::new() },
            };
            self.sequences.insert(*id, sequence);
        }
        self.waiting.insert(ids[0]);
        ids
    }

    /// Gives sequences an adapter, before they run. Pages of other adapters hold other states for the same tokens.
    pub fn choose_adapter(&mut self, ids: &[SequenceId], adapter: u32) {
        for id in ids {
            let sequence = self.sequences.get_mut(id).expect("the sequence was added");
            (sequence.adapter, sequence.root) = (adapter, Prefix::of_adapter(adapter));
        }
    }

    pub fn sequence(&self, id: SequenceId) -> &Sequence {
        &self.sequences[&id]
    }

    pub fn num_running(&self) -> usize {
        self.running.len()
    }

    /// The number of sequences that do not run.
    pub fn num_waiting(&self) -> usize {
        self.sequences.len() - self.running.len()
    }

    pub fn is_idle(&self) -> bool {
        self.sequences.is_empty()
    }

    /// The number of pages that sequences have, and that they can have.
    pub fn pages(&self) -> (usize, usize) {
        let total = self.pools.iter().map(PagePool::total).sum::<usize>();
        (total - self.pools.iter().map(PagePool::available).sum::<usize>(), total)
    }

    /// The maximum number of tokens of a sequence, so that it can run alone in these pools.
    pub fn longest(pools: &[PoolOptions], page_size: usize) -> usize {
        let unbounded = pools.iter().filter(|pool| pool.reach.is_none());
        unbounded.map(|pool| (pool.num_pages - 1) * page_size).min().unwrap_or(usize::MAX)
    }

    /// Plans the next step.
    pub fn plan(&mut self) -> Plan {
        self.planned(true)
    }

    /// Plans a step that reads prompts and chooses no token.
    pub fn plan_pieces(&mut self) -> Plan {
        self.planned(false)
    }

    /// Plans the choice of the next token of one sequence, which is ready.
    pub fn plan_next(&mut self, id: SequenceId) -> Plan {
        let mut plan = Plan::default();
        if self.make_room(id, 1, &mut plan) {
            plan.decoded.push(id);
        }
        plan
    }

    /// Sets whether further tokens of a sequence are chosen.
    pub fn pause(&mut self, id: SequenceId, pause: Pause) {
        if let Some(sequence) = self.sequences.get_mut(&id) {
            sequence.pause = pause;
        }
    }

    fn planned(&mut self, chooses: bool) -> Plan {
        let mut plan = Plan::default();
        let mut index = 0;
        while let Some(&id) = self.running.get(index).filter(|_| chooses) {
            if !self.sequences[&id].is_ready() || self.sequences[&id].pause != Pause::No {
                index += 1;
            } else if self.make_room(id, self.sequences[&id].num_next(), &mut plan) {
                plan.decoded.push(id);
                index += 1;
            }
        }
        self.continue_from_leaders(&mut plan);
        let mut budget = self.options.piece;
        index = 0;
        while let Some(&id) = self.running.get(index).filter(|_| budget > 0) {
            let sequence = &self.sequences[&id];
            let count = self.length_of_piece(sequence, budget);
            if count == 0 {
                index += 1;
            } else if self.make_room(id, count, &mut plan) {
                plan.pieces.push(Piece { sequence: id, first: self.sequences[&id].cached, count });
                budget -= count;
                index += 1;
            }
        }
        while budget > 0 && plan.preempted.is_empty() {
            let Some(id) = self.admit(&mut plan) else { break };
            let sequence = &self.sequences[&id];
            let count = self.length_of_piece(sequence, budget);
            let needed = if count == 0 { sequence.num_next() } else { count };
            if !self.make_room(id, needed, &mut plan) {
                break;
            }
            let sequence = &self.sequences[&id];
            if count > 0 {
                plan.pieces.push(Piece { sequence: id, first: sequence.cached, count });
                budget -= count;
            } else if sequence.followers.is_empty() && chooses && sequence.pause == Pause::No {
                // Followers continue from a state before the first choice, in the next step.
                plan.decoded.push(id);
            }
        }
        if let Some(host) = &mut self.host {
            // Pages that lost their places hold their old contents until the step begins.
            for (number, pool) in self.pools.iter_mut().enumerate() {
                pool.take_evicted().into_iter().for_each(|(page, prefix)| host.save(number, prefix, page));
            }
            plan.host = host.take_moves();
        }
        plan
    }

    /// The number of tokens of a prompt's next piece. If states are kept, pieces end with pages.
    fn length_of_piece(&self, sequence: &Sequence, budget: usize) -> usize {
        let count = (sequence.tokens.len() - 1 - sequence.cached).min(budget);
        let beyond = (sequence.cached + count) % self.options.page_size;
        let keeps = self.options.keeps_prefixes && self.options.num_snapshots.is_some_and(|count| count > 0);
        if keeps && sequence.finds_prefixes && beyond < count { count - beyond } else { count }
    }

    /// Takes note that a piece has been processed. Returns the copy that keeps the state after it, which is to be made at
    /// once.
    pub fn has_read(&mut self, piece: Piece) -> Option<StateCopy> {
        let sequence = self.sequences.get_mut(&piece.sequence)?;
        sequence.cached = piece.first + piece.count;
        self.has_grown(piece.sequence);
        let sequence = &self.sequences[&piece.sequence];
        let size = self.options.page_size;
        if !self.options.keeps_prefixes || !sequence.cached.is_multiple_of(size) {
            return None;
        }
        let prefix = *sequence.prefixes.get(sequence.cached / size - 1)?;
        let entry = self.snapshots.as_mut()?.keep(prefix)?;
        Some(self.entry_copied(piece.sequence, [sequence.entry, entry]))
    }

    /// A copy of the state in arrays without pages.
    fn entry_copied(&self, to_sequence: SequenceId, entries: [u32; 2]) -> StateCopy {
        StateCopy { to_sequence, entries, pages: vec![[NULL_PAGE; 2]; self.pools.len()] }
    }

    /// Takes note of a step that has started and chooses the token that continues a sequence.
    pub fn has_started(&mut self, id: SequenceId, pause: Pause) {
        if let Some(sequence) = self.sequences.get_mut(&id) {
            sequence.cached = sequence.tokens.len();
            sequence.tokens.push(0);
            sequence.num_pending += 1;
            sequence.pause = pause;
        }
    }

    /// Adds a sequence with the tokens and the state of another one, which runs. The copy is to be made at once; without
    /// it, the sequence is read on its own later, since there is no room for it now.
    pub fn fork(&mut self, id: SequenceId) -> (SequenceId, Option<StateCopy>) {
        let child = self.next;
        self.next += 1;
        let parent = &self.sequences[&id];
        let sequence = Sequence {
            tokens: parent.tokens.clone(),
            tables: vec![Vec::new(); self.pools.len()],
            prefixes: parent.prefixes.clone(),
            followers: Vec::new(),
            absent: Vec::new(),
            cached: 0,
            entry: 0,
            found: 0,
            registered: 0,
            ..*parent
        };
        let is_running = parent.entry != 0;
        self.sequences.insert(child, sequence);
        let copy = if is_running { self.copied(id, child) } else { None };
        if self.host.is_some() {
            // The copy does not wait for a step, before which pages are saved.
            self.pools.iter_mut().for_each(|pool| drop(pool.take_evicted()));
        }
        (child, copy)
    }

    /// Puts the youngest sequence back that waits for its token to be known, so that others have room.
    pub fn put_back_paused(&mut self) {
        let is_paused = |id: &&SequenceId| self.sequences[*id].pause == Pause::UntilKnown;
        if let Some(youngest) = self.running.iter().rev().find(is_paused).copied() {
            self.put_back(youngest);
        }
    }

    /// Puts a sequence back, which waits as soon as all of its tokens are known.
    fn put_back(&mut self, id: SequenceId) {
        self.put_down(id);
        if self.sequences[&id].num_pending == 0 {
            self.waiting.insert(id);
        }
    }

    /// Takes note of the first token that was not known.
    pub fn has_chosen(&mut self, id: SequenceId, token: u32) {
        if let Some(sequence) = self.sequences.get_mut(&id) {
            if sequence.entry == 0 {
                self.waiting.insert(id);
            }
            let place = sequence.num_known();
            sequence.tokens[place] = token;
            sequence.num_pending -= 1;
            if sequence.pause == Pause::UntilKnown {
                sequence.pause = Pause::No;
            }
            self.has_grown(id);
        }
    }

    /// Sets the number of tokens that the next step verifies, and of those behind them for which it needs pages.
    pub fn set_drafts(&mut self, id: SequenceId, num_drafts: usize, num_ahead: usize) {
        if let Some(sequence) = self.sequences.get_mut(&id) {
            (sequence.num_drafts, sequence.num_ahead) = (num_drafts, num_ahead);
        }
    }

    /// Releases the pages that hold only tokens that were verified and not accepted.
    pub fn roll_back(&mut self, id: SequenceId) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        let kept = sequence.cached.div_ceil(self.options.page_size);
        for (pool, table) in self.pools.iter_mut().zip(&mut sequence.tables) {
            table.drain(kept.min(table.len())..).for_each(|page| pool.release(page));
        }
    }

    /// Removes a sequence, whose pages are free from now on.
    pub fn remove(&mut self, id: SequenceId) {
        self.put_down(id);
        self.waiting.remove(&id);
        let Some(sequence) = self.sequences.remove(&id) else { return };
        for follower in sequence.followers {
            if self.sequences.contains_key(&follower) {
                self.waiting.insert(follower);
            }
        }
    }

    /// Forgets all sequences and pages.
    pub fn forget(&mut self) {
        let (next, host) = (self.next, self.host.take().map(HostPages::emptied));
        *self = Self { next, host, ..Self::new(self.options.clone()) };
        if self.host.is_some() {
            self.pools.iter_mut().for_each(|pool| drop(pool.take_evicted()));
        }
    }

    /// Gives the state of leaders to the sequences that wait for it. Those for which there is no room are read on their
    /// own later.
    fn continue_from_leaders(&mut self, plan: &mut Plan) {
        let leads = |id: &SequenceId| !self.sequences[id].followers.is_empty();
        let leaders: Vec<SequenceId> = plan.decoded.iter().copied().filter(leads).collect();
        for leader in leaders {
            let followers = std::mem::take(&mut self.sequences.get_mut(&leader).expect("it runs").followers);
            for follower in followers {
                if !self.sequences.contains_key(&follower) {
                    continue;
                }
                match self.copied(leader, follower) {
                    Some(copy) => {
                        plan.copies.push(copy);
                        plan.decoded.push(follower);
                    }
                    None => {
                        self.waiting.insert(follower);
                    }
                }
            }
        }
    }

    /// The copy that lets a sequence continue from the state of another one, with which it shares all whole pages.
    fn copied(&mut self, leader: SequenceId, follower: SequenceId) -> Option<StateCopy> {
        let size = self.options.page_size;
        let from = &self.sequences[&leader];
        // The page of the token to process, which has copied tokens before it unless it is a new page.
        let (last, is_new) = (from.cached / size, from.cached.is_multiple_of(size));
        if self.entries.is_empty() || self.pools.iter().any(|pool| pool.available() == 0) {
            return None;
        }
        let (entry, cached, tables) = (from.entry, from.cached, from.tables.clone());
        let to = self.entries.pop().expect("there is one");
        let mut copy = StateCopy {
            to_sequence: follower,
            entries: [entry, to],
            pages: Vec::with_capacity(tables.len()),
        };
        let mut own = Vec::with_capacity(tables.len());
        for (pool, mut table) in self.pools.iter_mut().zip(tables) {
            table.truncate(last);
            table.iter().filter(|page| **page != NULL_PAGE).for_each(|page| pool.share(*page));
            let page = pool.allocate().expect("one is available");
            table.push(page);
            own.push(table);
            copy.pages.push([NULL_PAGE, page]);
        }
        if is_new {
            copy.pages.iter_mut().for_each(|pages| *pages = [NULL_PAGE; 2]);
        } else {
            let from = &self.sequences[&leader].tables;
            copy.pages.iter_mut().zip(from).for_each(|(pages, table)| pages[0] = table[last]);
        }
        let sequence = self.sequences.get_mut(&follower).expect("it exists");
        (sequence.tables, sequence.cached, sequence.entry) = (own, cached, to);
        (sequence.found, sequence.registered) = (cached, cached / size);
        self.run(follower);
        Some(copy)
    }

    /// Adds to the running sequences, in order of arrival.
    fn run(&mut self, id: SequenceId) {
        let place = self.running.partition_point(|other| *other < id);
        self.running.insert(place, id);
    }

    /// Admits the first waiting sequence if there is room for its tokens, with the pages of its beginning that are kept.
    fn admit(&mut self, plan: &mut Plan) -> Option<SequenceId> {
        let id = *self.waiting.first()?;
        if self.entries.is_empty() {
            return None;
        }
        let size = self.options.page_size;
        let num_found = self.find_pages(id);
        let sequence = &self.sequences[&id];
        let length = sequence.tokens.len();
        // Room for running sequences to grow for a while before one has to be put back.
        let headroom = self.running.len().div_ceil(4);
        let has_room =
            self.pools.iter().zip(&self.options.pools).enumerate().all(|(number, (pool, options))| {
                let rest = length - num_found * size;
                let reached = options.reach.map_or(rest, |reach| rest.min(reach + self.options.piece));
                let absent = sequence.absent.iter().filter(|(pool, _)| *pool == number).count();
                pool.available() >= reached.div_ceil(size) + absent + headroom
            });
        if !has_room && !self.running.is_empty() {
            self.give_up_pages(id);
            return None;
        }
        self.waiting.remove(&id);
        let entry = self.entries.pop().expect("there is one");
        self.restore_absent(id);
        let sequence = self.sequences.get_mut(&id).expect("it waits");
        sequence.entry = entry;
        sequence.cached = num_found * size;
        sequence.found = sequence.cached;
        sequence.registered = num_found;
        let last = num_found.checked_sub(1).map(|last| sequence.prefixes[last]);
        if let (Some(snapshots), Some(prefix)) = (&mut self.snapshots, last) {
            let kept = snapshots.find(prefix).expect("prefixes are found with their states");
            plan.copies.push(self.entry_copied(id, [kept, entry]));
        }
        self.run(id);
        Some(id)
    }

    /// Gives a sequence pages for those of its beginning that are in host memory alone.
    fn restore_absent(&mut self, id: SequenceId) {
        let sequence = self.sequences.get_mut(&id).expect("it waits");
        for (pool, number) in std::mem::take(&mut sequence.absent) {
            // A sequence without others has room for all of its tokens.
            let page = self.pools[pool].allocate().expect("there is room for the sequence");
            let prefix = sequence.prefixes[number];
            self.pools[pool].register(page, prefix);
            sequence.tables[pool][number] = page;
            self.host.as_mut().expect("the page is in host memory").restore(pool, prefix, page);
        }
    }

    /// Shares the kept pages of the sequence's beginning; returns their number. A pool whose queries see a limited number
    /// of tokens needs only the last pages.
    fn find_pages(&mut self, id: SequenceId) -> usize {
        let sequence = self.sequences.get_mut(&id).expect("it waits");
        debug_assert_eq!(sequence.num_pending, 0, "steps that had started have ended");
        if !sequence.finds_prefixes {
            return 0;
        }
        let size = self.options.page_size;
        let most = (sequence.tokens.len() - 1) / size;
        while sequence.prefixes.len() < most {
            let number = sequence.prefixes.len();
            let before = sequence.prefixes.last().copied().unwrap_or(sequence.root);
            let tokens = &sequence.tokens[number * size..(number + 1) * size];
            sequence.prefixes.push(self.hasher.extend(before, tokens));
        }
        let first_needed = |reach: Option<usize>, count: usize| first_seen(reach, count * size, size);
        let host = self.host.as_ref();
        let has = |pool: usize, number: usize| {
            let prefix = sequence.prefixes[number];
            self.pools[pool].find(prefix).is_some() || host.is_some_and(|host| host.has(pool, prefix))
        };
        let pools = || self.options.pools.iter().enumerate();
        let unbounded = pools().filter(|(_, options)| options.reach.is_none());
        let kept = unbounded.map(|(pool, _)| (0..most).take_while(|number| has(pool, *number)).count());
        let bounded: Vec<_> = pools().filter(|(_, options)| options.reach.is_some()).collect();
        let snapshots = self.snapshots.as_ref();
        let has_state = |count: usize| {
            let last = count.checked_sub(1).map(|last| sequence.prefixes[last]);
            last.is_none_or(|last| snapshots.is_none_or(|snapshots| snapshots.contains(last)))
        };
        let fits = |count: &usize| {
            has_state(*count)
                && bounded.iter().all(|(pool, options)| {
                    (first_needed(options.reach, *count)..*count).all(|number| has(*pool, number))
                })
        };
        let num_found = (0..=kept.min().unwrap_or(most)).rev().find(fits).unwrap_or(0);
        let pools = self.pools.iter_mut().zip(&self.options.pools).enumerate();
        for ((index, (pool, options)), table) in pools.zip(&mut sequence.tables) {
            let first = first_needed(options.reach, num_found);
            for number in 0..num_found {
                let page = if number < first { None } else { pool.find(sequence.prefixes[number]) };
                if number >= first && page.is_none() {
                    sequence.absent.push((index, number));
                }
                page.into_iter().for_each(|page| pool.share(page));
                table.push(page.unwrap_or(NULL_PAGE));
            }
        }
        num_found
    }

    /// Gives a sequence the pages for its next `count` tokens, for which the youngest sequences are put back if need be.
    /// `false` if the sequence itself had to be.
    fn make_room(&mut self, id: SequenceId, count: usize, plan: &mut Plan) -> bool {
        while !self.grow(id, count) {
            let youngest = *self.running.last().expect("the sequence runs");
            self.put_back(youngest);
            plan.preempted.push(youngest);
            plan.decoded.retain(|other| *other != youngest);
            plan.pieces.retain(|piece| piece.sequence != youngest);
            plan.copies.retain(|copy| copy.to_sequence != youngest);
            if youngest == id {
                return false;
            }
        }
        true
    }

    fn grow(&mut self, id: SequenceId, count: usize) -> bool {
        let sequence = self.sequences.get_mut(&id).expect("it runs");
        let needed = (sequence.cached + count).div_ceil(self.options.page_size);
        let missing = |table: &Vec<PageId>| needed.saturating_sub(table.len());
        let mut pools = self.pools.iter().zip(&sequence.tables);
        if !pools.all(|(pool, table)| pool.available() >= missing(table)) {
            return false;
        }
        for (pool, table) in self.pools.iter_mut().zip(&mut sequence.tables) {
            for _ in table.len()..needed {
                table.push(pool.allocate().expect("enough are available"));
            }
        }
        true
    }

    /// Registers the pages that have become full, and releases those that no later query sees.
    fn has_grown(&mut self, id: SequenceId) {
        let size = self.options.page_size;
        let sequence = self.sequences.get_mut(&id).expect("it exists");
        let num_settled = sequence.cached.min(sequence.num_known());
        let num_full = num_settled / size;
        if self.options.keeps_prefixes {
            while sequence.prefixes.len() < num_full {
                let number = sequence.prefixes.len();
                let before = sequence.prefixes.last().copied().unwrap_or(sequence.root);
                let tokens = &sequence.tokens[number * size..(number + 1) * size];
                sequence.prefixes.push(self.hasher.extend(before, tokens));
            }
            for (pool, table) in self.pools.iter_mut().zip(&sequence.tables) {
                for (page, prefix) in
                    table.iter().zip(&sequence.prefixes).take(num_full).skip(sequence.registered)
                {
                    if *page != NULL_PAGE {
                        pool.register(*page, *prefix);
                    }
                }
            }
            sequence.registered = num_full;
        }
        for ((pool, options), table) in
            self.pools.iter_mut().zip(&self.options.pools).zip(&mut sequence.tables)
        {
            let seen = first_seen(options.reach, num_settled, size).min(table.len());
            // Pages before the last released one were released earlier.
            for page in table[..seen].iter_mut().rev().take_while(|page| **page != NULL_PAGE) {
                pool.release(*page);
                *page = NULL_PAGE;
            }
        }
    }

    /// Takes pages and entry from a sequence that runs.
    fn put_down(&mut self, id: SequenceId) {
        let Ok(place) = self.running.binary_search(&id) else { return };
        self.running.remove(place);
        self.give_up_pages(id);
        let sequence = self.sequences.get_mut(&id).expect("it runs");
        self.entries.push(std::mem::take(&mut sequence.entry));
        (sequence.cached, sequence.registered) = (0, 0);
    }

    fn give_up_pages(&mut self, id: SequenceId) {
        let sequence = self.sequences.get_mut(&id).expect("it exists");
        sequence.absent.clear();
        for (pool, table) in self.pools.iter_mut().zip(&mut sequence.tables) {
            // The last pages are the least useful ones to others, so they are forgotten first.
            for page in table.drain(..).rev().filter(|page| *page != NULL_PAGE) {
                pool.release(page);
            }
        }
    }

    /// Checks that pages are where sequences say.
    #[cfg(test)]
    pub fn check(&self) {
        for (index, pool) in self.pools.iter().enumerate() {
            pool.check();
            let mut counts: HashMap<PageId, u32> = HashMap::new();
            for sequence in self.sequences.values() {
                let pages = sequence.tables[index].iter().filter(|page| **page != NULL_PAGE);
                pages.for_each(|page| *counts.entry(*page).or_default() += 1);
            }
            for page in 1..self.options.pools[index].num_pages as PageId {
                assert_eq!(pool.references(page), counts.get(&page).copied().unwrap_or(0), "page {page}");
            }
        }
        self.host.iter().for_each(HostPages::check);
        assert!(self.running.is_sorted());
        assert_eq!(self.entries.len() + self.running.len(), self.options.num_sequences);
    }
}

/// The first page that queries from the token at `position` on see, if they see the last `reach` tokens.
fn first_seen(reach: Option<usize>, position: usize, page_size: usize) -> usize {
    reach.map_or(0, |reach| (position + 1).saturating_sub(reach) / page_size)
}
