//! Span corruption: an encoder reads a text without some spans, and a decoder restores them (Raffel et al., 2020).

use mt_config::TrainConfig;
use mt_data::{
    SpanSizes, Tokenizer,
    arrays::{SOURCE, SOURCE_SEGMENTATION},
};
use mt_nn::axes::{BATCH, POSITION};
use mt_shape::{DType, axis};

use super::{BatchArray, CorruptedText, TextCorruption};
use crate::TrainError;

/// The objective of the tokens of removed spans, which a decoder predicts one after another from a source without them.
pub type SpanCorruption = CorruptedText<Spans>;

/// The spans that are removed from texts.
pub struct Spans {
    pub sizes: SpanSizes,
    /// The token before the first one of the decoder.
    pub start: i32,
    pub seed: u64,
}

impl Spans {
    /// The spans that the configuration describes. They follow the seed of the data.
    pub(super) fn of_config(settings: &TrainConfig) -> Self {
        let encoder = &settings.model.encoder;
        let sizes = SpanSizes {
            density: settings.objective.span_corruption_noise_density,
            mean_length: settings.objective.span_corruption_mean_span_length,
            source: encoder.max_source_length,
            target: settings.data.max_target_length,
        };
        let start = encoder.decoder_start_token_id as i32;
        Self { sizes, start, seed: settings.data.data_shuffle_seed }
    }
}

impl TextCorruption for Spans {
    type Change = mt_data::SpanCorruption;

    const NAME: &'static str = "span corruption";

    fn text_length(&self, _length: usize) -> usize {
        // The configuration refuses lengths into which no text fits.
        self.sizes.text_length().unwrap_or(2)
    }

    fn further_arrays(&self, rows: usize, vocab_size: usize) -> Vec<BatchArray> {
        let of_source = |name, below| BatchArray {
            name,
            dtype: DType::I32,
            axes: vec![axis(BATCH, rows), axis(POSITION, self.sizes.source)],
            below,
        };
        vec![of_source(SOURCE, Some(vocab_size)), of_source(SOURCE_SEGMENTATION, None)]
    }

    fn change(&self, tokenizer: Option<&Tokenizer>, vocab_size: usize) -> Result<Self::Change, TrainError> {
        let num_spans = self.sizes.num_spans();
        Ok(mt_data::SpanCorruption {
            sizes: self.sizes,
            first_sentinel: mt_data::SpanCorruption::first_sentinel(tokenizer, vocab_size, num_spans)?,
            eos: tokenizer.and_then(|tokenizer| tokenizer.special().eos).map(|eos| eos as i32),
            start: self.start,
            seed: self.seed,
        })
    }
}
