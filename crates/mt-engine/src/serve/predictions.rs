//! Drafts from the model's states: a module that predicts further tokens, or a decoder that predicts states (EAGLE), is
//! applied to its own results.
//!
//! A module reads the state of a token and the token that follows it. Its own keys and values are those of the tokens before
//! the last one, and so it has read as many tokens of a sequence as the model. Drafts that it reads beyond them are read
//! again, once they are accepted.

use mt_nn::{
    attention::PAGE_OF_ROW,
    axes::{BATCH, POSITION, VOCAB},
};
use mt_shape::DType;
use mt_trace::Tensor;

use super::{
    program::{ReadTokens, Rows, ServePrograms},
    speculation::{Drafter, States},
};
use crate::sampler::Sampler;

impl ServePrograms {
    /// Lets a module read tokens with the states before them. Returns its pools, and with `drafts` the most probable
    /// tokens that follow the last one of each row: `i32[batch, position]`.
    pub(super) fn predicted<'t>(
        &self,
        rows: &Rows<'t>,
        states: States<'t>,
        pools: &[Tensor<'t>],
        read: &ReadTokens<'t>,
        drafts: bool,
    ) -> (Vec<Tensor<'t>>, Option<Tensor<'t>>) {
        let first = match &self.drafter {
            // It predicts what the head receives.
            Some(Drafter::Eagle(_)) => states.of_layers.unwrap_or(states.hidden),
            _ => states.carried,
        };
        let (made, mut pools) = self.prediction_pass(rows, first, pools, read);
        if !drafts {
            return (pools, None);
        }
        let last = read.count - 1.0;
        let mut hidden = at_place(made.hidden, last);
        let mut carried = at_place(made.carried, last);
        let mut each = vec![self.likeliest(rows, hidden)];
        while each.len() < self.num_drafts {
            let before = read.before + read.count + (each.len() as f64 - 1.0);
            let one = ReadTokens {
                tokens: each[each.len() - 1],
                before,
                count: before * 0.0 + 1.0,
                slots: read.tables.iter().map(|(_, table)| self.slot_at(*table, before)).collect(),
                ..read.clone()
            };
            let (made, updated) = self.prediction_pass(rows, carried, &pools, &one);
            (hidden, carried, pools) = (made.hidden, made.carried, updated);
            each.push(self.likeliest(rows, hidden));
        }
        let drafts = each[0].concatenate(&each[1..], POSITION);
        (pools, Some(drafts))
    }

    fn prediction_pass<'t>(
        &self,
        rows: &Rows<'t>,
        carried: Tensor<'t>,
        pools: &[Tensor<'t>],
        read: &ReadTokens<'t>,
    ) -> (States<'t>, Vec<Tensor<'t>>) {
        let specs = self.pools().split_off(self.num_own_pools());
        let (model, parameters) = match &self.drafter {
            Some(Drafter::Eagle(eagle)) => (&eagle.draft.model, eagle.of_layer(&*self.programs.model, rows)),
            _ => (&self.programs.model, rows.parameters.clone()),
        };
        self.pass(pools, &specs, read, |tokens, forward| {
            let state = forward.state.expect("the pass has a state");
            let made = model.predict(&parameters, carried, tokens, state);
            (States { hidden: made.hidden, carried: made.carried, of_layers: None }, made.state)
        })
    }

    /// The most probable token of each row: `[batch, position, embed] -> i32[batch, position]`, for one position.
    fn likeliest<'t>(&self, rows: &Rows<'t>, hidden: Tensor<'t>) -> Tensor<'t> {
        if let Some(Drafter::Eagle(eagle)) = &self.drafter
            && eagle.reads_layers()
        {
            return self.likeliest_of_eagle(eagle, rows, hidden);
        }
        let logits = self.programs.model.head(&rows.parameters, hidden).squeeze(POSITION);
        let logits = logits.order(&[BATCH, VOCAB]).cast(DType::F32);
        let possible = logits.slice(VOCAB, 0, self.programs.num_choices);
        let tokens = Sampler::Greedy.choose(possible, rows.read.before, None);
        tokens.unsqueeze(POSITION).order(&[BATCH, POSITION])
    }

    /// The slot of a place of each row in a pool, or one of the null page if the row has no page for it.
    ///
    /// # Shapes
    /// `i32[batch, page_of_row], i32[batch] -> i32[batch, position]`
    fn slot_at<'t>(&self, table: Tensor<'t>, place: Tensor<'t>) -> Tensor<'t> {
        let page_size = self.sizes.page_size as f64;
        let number = place / page_size;
        let numbers = table.region().iota(DType::I32, table.axis(PAGE_OF_ROW)).broadcast(&table.axes());
        let page = numbers.equals(number).select(table, table * 0.0).sum(&[PAGE_OF_ROW]);
        let slot = page * page_size + (place - number * page_size);
        slot.unsqueeze(POSITION).order(&[BATCH, POSITION])
    }
}

/// The states of one place of each row, which keep an axis of positions.
///
/// # Shapes
/// `[batch, position, …], i32[batch] -> [batch, position, …]`
pub(super) fn at_place<'t>(states: Tensor<'t>, place: Tensor<'t>) -> Tensor<'t> {
    let position = states.axis(POSITION);
    if position.size == 1 {
        return states;
    }
    let region = states.region();
    let axes = states.axes();
    let order: Vec<&'static str> = axes.iter().map(|axis| axis.name).collect();
    let places = region.iota(DType::I32, position).broadcast(&[states.axis(BATCH), position]);
    let is_there = places.equals(place).broadcast(&axes);
    let nothing = region.full(states.dtype(), &axes, 0.0);
    is_there.select(states, nothing).sum(&[POSITION]).unsqueeze(POSITION).order(&order)
}
