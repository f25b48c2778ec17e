//! Training of tokenizers: byte pairs, unigram models and WordPiece, in Hugging Face's and SentencePiece's files.

mod characters;
mod model_file;
mod quality;
mod symbols;
mod unigram;
mod wordpiece;

use std::path::Path;

use super::load::TokenizerKind;
use super::{BYTE_LEVEL_SPECIAL_TOKENS, Companions, MODEL_FILE, Tokenizer, train_bpe};
use crate::error::{DataError, Result};
use crate::watch::Watch;

pub use quality::TokenizerQuality;

/// The model of a tokenizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenizerModel {
    /// Merges of frequent pairs.
    Bpe,
    /// The most probable division into pieces.
    Unigram,
    /// Merges within words, whose later pieces begin with `##`.
    WordPiece,
}

impl TokenizerModel {
    /// All models with their names.
    pub const NAMES: [(&'static str, Self); 3] =
        [("bpe", Self::Bpe), ("unigram", Self::Unigram), ("wordpiece", Self::WordPiece)];
}

/// The kind of a trained tokenizer, and its size.
#[derive(Debug, Clone, PartialEq)]
pub struct TrainingOptions {
    pub model: TokenizerModel,
    /// The library whose file is written.
    pub format: TokenizerKind,
    /// The most tokens, special ones included.
    pub vocab_size: usize,
    /// The share of the characters of the text that have pieces of their own. Rarer ones are spelled by bytes, or unknown
    /// to WordPiece. Byte-level vocabularies have all.
    pub character_coverage: f64,
    /// Whether WordPiece reads all text in lower case, without accents.
    pub lowercase: bool,
}

/// Trains a tokenizer on documents. The same documents in the same order give the same tokenizer.
///
/// # Errors
/// The model has no file of the format; the vocabulary is too small; `documents` yields an error, or no text;
/// [`DataError::Stopped`].
pub fn train_tokenizer<I>(documents: I, options: &TrainingOptions, watch: Watch<'_>) -> Result<Tokenizer>
where
    I: IntoIterator<Item = Result<String>>,
{
    if !(options.character_coverage > 0.0 && options.character_coverage <= 1.0) {
        return Err(DataError::Options(format!(
            "a coverage of {} of the characters is not between 0 and 1\nhint: use 0.9995, or 1 for all",
            options.character_coverage
        )));
    }
    match (options.model, options.format) {
        (TokenizerModel::Bpe, TokenizerKind::HuggingFace) => {
            train_bpe(documents, options.vocab_size, &BYTE_LEVEL_SPECIAL_TOKENS, watch)
        }
        (TokenizerModel::Bpe, TokenizerKind::SentencePiece) => {
            let pieces = symbols::train_pieces(documents, options, watch)?;
            from_model(&model_file::write(&pieces, model_file::BYTE_PAIR, options))
        }
        (TokenizerModel::Unigram, TokenizerKind::SentencePiece) => {
            let pieces = unigram::train(documents, options, watch)?;
            from_model(&model_file::write(&pieces, model_file::UNIGRAM, options))
        }
        (TokenizerModel::Unigram, TokenizerKind::HuggingFace) => {
            let pieces = unigram::train(documents, options, watch)?;
            Tokenizer::from_json("`trained here`".into(), unigram::json(&pieces).into_bytes())
        }
        (TokenizerModel::WordPiece, TokenizerKind::HuggingFace) => {
            let json = wordpiece::train(documents, options, watch)?;
            Tokenizer::from_json("`trained here`".into(), json.into_bytes())
        }
        (TokenizerModel::WordPiece, format) => Err(DataError::Options(format!(
            "WordPiece has no file in the format `{}`\nhint: use `--format huggingface`",
            format.name()
        ))),
        (_, TokenizerKind::Tiktoken) => Err(DataError::Options(
            "files of ranks are not trained\nhint: use `--format huggingface` or `--format sentencepiece`"
                .into(),
        )),
    }
}

fn from_model(bytes: &[u8]) -> Result<Tokenizer> {
    let (name, file, kind) =
        ("`trained here`".to_owned(), Path::new(MODEL_FILE), TokenizerKind::SentencePiece);
    Tokenizer::build(name, file, bytes.to_vec(), kind, Companions::default())
}

/// The error of a vocabulary without room for the characters.
fn too_small(options: &TrainingOptions, minimum: usize) -> DataError {
    DataError::Options(format!(
        "a vocabulary of {} tokens has no room for special tokens, bytes and the characters of the text, which are {minimum} \
         together\nhint: raise `--vocab-size`, or lower `--character-coverage`",
        options.vocab_size
    ))
}

/// The error of documents without text.
fn no_text() -> DataError {
    DataError::Train { reason: "the documents hold no text".into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str =
        "the river and the mill, the miller and the river; 12 mills by 3 rivers\nthe old mill-wheel turns";

    fn train(model: TokenizerModel, format: TokenizerKind, vocab_size: usize) -> Result<Tokenizer> {
        let options = TrainingOptions { model, format, vocab_size, character_coverage: 1.0, lowercase: true };
        let documents = (0..30).map(|number| Ok(format!("{TEXT} {number} wheels")));
        train_tokenizer(documents, &options, Watch::silent())
    }

    #[test]
    fn each_model_reads_what_it_writes_and_gives_texts_back() {
        for (model, format, vocab_size) in [
            (TokenizerModel::Bpe, TokenizerKind::HuggingFace, 300),
            (TokenizerModel::Bpe, TokenizerKind::SentencePiece, 330),
            (TokenizerModel::Unigram, TokenizerKind::SentencePiece, 330),
            (TokenizerModel::Unigram, TokenizerKind::HuggingFace, 330),
        ] {
            let tokenizer = train(model, format, vocab_size).unwrap();
            assert!(tokenizer.vocab_size() <= vocab_size, "{model:?} {}", tokenizer.vocab_size());
            for text in [TEXT, "  two  spaces\n\nand ünknown 漢字 ", "river"] {
                let ids = tokenizer.encode(text, false, false).unwrap();
                assert_eq!(tokenizer.decode(&ids, true).unwrap(), text, "{model:?} {format:?}");
            }
            let one = tokenizer.encode(" river", false, false).unwrap().len();
            assert!(one <= 3, "{model:?} {format:?}: {one} tokens");
            let directory = tempfile::tempdir().unwrap();
            tokenizer.save(directory.path()).unwrap();
            let again = Tokenizer::load(directory.path()).unwrap();
            assert_eq!(again.fingerprint(), tokenizer.fingerprint());
            assert_eq!(train(model, format, vocab_size).unwrap().fingerprint(), tokenizer.fingerprint());
        }
    }

    #[test]
    fn unigram_models_are_the_same_in_both_formats() {
        let one = train(TokenizerModel::Unigram, TokenizerKind::SentencePiece, 330).unwrap();
        let other = train(TokenizerModel::Unigram, TokenizerKind::HuggingFace, 330).unwrap();
        assert_eq!(one.encode(TEXT, true, true).unwrap(), other.encode(TEXT, true, true).unwrap());
    }

    #[test]
    fn word_pieces_continue_words() {
        let tokenizer = train(TokenizerModel::WordPiece, TokenizerKind::HuggingFace, 120).unwrap();
        let ids = tokenizer.encode("The Rivers, 漢", false, false).unwrap();
        let tokens: Vec<String> = ids.iter().filter_map(|id| tokenizer.token(*id)).collect();
        assert_eq!(tokens[0], "the");
        assert!(
            tokens.contains(&",".to_owned()) && tokens.last().is_some_and(|last| last == "[UNK]"),
            "{tokens:?}"
        );
        assert_eq!(tokenizer.decode(&ids[..ids.len() - 1], true).unwrap().replace(' ', ""), "therivers,");
        let message =
            train(TokenizerModel::WordPiece, TokenizerKind::SentencePiece, 120).unwrap_err().to_string();
        assert!(message.contains("--format huggingface"), "{message}");
    }

    #[test]
    fn small_vocabularies_are_refused() {
        let message =
            train(TokenizerModel::Unigram, TokenizerKind::SentencePiece, 270).unwrap_err().to_string();
        assert!(message.contains("270 tokens") && message.contains("--vocab-size"), "{message}");
    }
}
