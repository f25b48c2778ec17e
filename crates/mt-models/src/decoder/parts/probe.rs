//! A mixer and a feed-forward part for tests, which use every feature of [`crate::decoder::part`].

use mt_derive::Tree;
use mt_nn::{
    Initializer, Linear, ParamSpec,
    axes::{BATCH, EMBED, KV_POSITION, POSITION},
};
use mt_shape::{DType, axis, logical};
use mt_trace::{ScanOptions, Tensor};

use crate::{
    Kept, LayerOutput, StateSpec,
    decoder::{
        Activation,
        part::{BatchDims, Part, PartDescription, PartInputs, PartOutputs, SpecBuilder, StateDims},
    },
};

/// A recurrent mixer: each token adds a decaying sum of the inputs so far to the residual stream.
#[derive(Clone, Debug, PartialEq)]
pub struct DecayConfig {
    pub decay: f64,
}

#[derive(Clone, Debug, Tree)]
pub struct Decay<L> {
    /// `[embed, embed]`
    pub input: Linear<L>,
}

const INNER: &str = "inner";

#[derive(Tree)]
struct Token<L> {
    input: L,
    is_padding: L,
}

impl Part for DecayConfig {
    type Parameters<L> = Decay<L>;

    fn specs(&self, builder: &SpecBuilder) -> Decay<ParamSpec> {
        let inner = axis(INNER, builder.embed.size);
        Decay { input: builder.linear(1, [(builder.embed, logical::EMBED), (inner, logical::MLP)]) }
    }

    fn forward<'t>(
        &self,
        parameters: &Decay<Tensor<'t>>,
        x: Tensor<'t>,
        inputs: &PartInputs<'_, 't>,
    ) -> PartOutputs<'t> {
        let read = parameters.input.forward(x, &[EMBED]).rename(INNER, EMBED).cast(DType::F32);
        let (rows, places) = (read.axes()[0], read.axis(POSITION));
        let start = match inputs.state {
            Some(state) => state.arrays[0],
            None => x.region().full(DType::F32, &[rows, read.axis(EMBED)], 0.0),
        };
        let padding = inputs.segments.query.differs(0.0).cast(DType::F32) * -1.0 + 1.0;
        let by_place = Token {
            input: read.order(&[POSITION, rows.name, EMBED]),
            is_padding: padding.order(&[POSITION, rows.name]),
        };
        let options = ScanOptions::over(places);
        let ([last], [sums]) = x.region().scan(options, [start], &by_place, |_, [sum], token| {
            // Padding does not change the sum.
            let is_padding = token.is_padding.broadcast(&sum.axes());
            let next = (sum * self.decay + token.input) * (is_padding * -1.0 + 1.0) + sum * is_padding;
            ([next], [next])
        });
        let output = sums.order(&[rows.name, POSITION, EMBED]).cast(x.dtype());
        PartOutputs { state: inputs.state.map(|_| last).into_iter().collect(), ..PartOutputs::only(output) }
    }
}

impl PartDescription for DecayConfig {
    fn scope(&self) -> &'static str {
        "decay"
    }

    fn state(&self, dims: &StateDims) -> Vec<StateSpec> {
        vec![StateSpec {
            group: 0,
            name: "sum",
            axes: vec![axis(BATCH, dims.batch), axis(EMBED, dims.embed)],
            logical_axes: vec![Some(logical::DECODE_BATCH), None],
            dtype: DType::F32,
            kept: Kept::Whole,
        }]
    }

    fn activations(&self, _batch: &BatchDims) -> Vec<Activation> {
        Vec::new()
    }
}

/// A feed-forward part that adds a learned fraction of the previous token, and penalizes large fractions.
#[derive(Clone, Debug, PartialEq)]
pub struct ShiftConfig;

#[derive(Clone, Debug, Tree)]
pub struct Shift<L> {
    /// `[embed]`
    pub share: L,
}

/// The name of its auxiliary loss.
pub const SHARES: &str = "learning/shares_loss";

impl Part for ShiftConfig {
    type Parameters<L> = Shift<L>;

    fn specs(&self, builder: &SpecBuilder) -> Shift<ParamSpec> {
        let share = builder.array([(builder.embed, logical::NORM)], Initializer::Normal { deviation: 0.5 });
        Shift { share }
    }

    fn forward<'t>(
        &self,
        parameters: &Shift<Tensor<'t>>,
        x: Tensor<'t>,
        inputs: &PartInputs<'_, 't>,
    ) -> PartOutputs<'t> {
        let share = parameters.share;
        let as_kept = x.rename(POSITION, KV_POSITION);
        let length = x.axis(POSITION).size;
        let before = match inputs.state.filter(|_| inputs.segments.first_query.is_some()) {
            Some(state) => {
                let all = state.arrays[0].dynamic_update(KV_POSITION, state.start, as_kept);
                all.pad(KV_POSITION, 1, 0, 0.0).dynamic_slice(KV_POSITION, state.start, length)
            }
            None => as_kept.pad(KV_POSITION, 1, 0, 0.0).slice(KV_POSITION, 0, length),
        };
        let output = before.rename(KV_POSITION, POSITION) * share.cast(x.dtype());
        let loss = share.cast(DType::F32).square().sum(&[EMBED]);
        PartOutputs {
            state: inputs.state.map(|_| as_kept).into_iter().collect(),
            others: vec![(LayerOutput::AuxiliaryLoss.named(SHARES), loss)],
            ..PartOutputs::only(output)
        }
    }
}

impl PartDescription for ShiftConfig {
    fn scope(&self) -> &'static str {
        "shift"
    }

    fn state(&self, dims: &StateDims) -> Vec<StateSpec> {
        vec![StateSpec {
            group: 0,
            name: "inputs",
            axes: vec![axis(BATCH, dims.batch), axis(KV_POSITION, dims.slots), axis(EMBED, dims.embed)],
            logical_axes: vec![Some(logical::DECODE_BATCH), Some(logical::CACHE_SEQUENCE), None],
            dtype: dims.dtype,
            kept: Kept::Slots { reach: None },
        }]
    }

    fn activations(&self, _batch: &BatchDims) -> Vec<Activation> {
        Vec::new()
    }
}
