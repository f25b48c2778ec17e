//! Tokenizers: text to token ids and back.

mod backend;
mod bpe;
mod byte_level;
mod companions;
mod compressed;
mod ggml;
mod hugging_face;
mod learn;
mod load;
mod merge;
mod pieces;
mod sentencepiece;
mod special;
mod stream;
mod tiktoken;
mod token_bytes;
mod train;
mod trie;
mod words;

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::Path;

use sha2::{Digest, Sha256};

use crate::error::{DataError, Result};
use crate::files::replace;
use crate::source::hex;

use backend::Backend;
use companions::Companions;

pub use bpe::{BYTE_LEVEL_SPECIAL_TOKENS, train_bpe};
pub(crate) use companions::SPECIAL_TOKENS_MAP_FILE;
pub use compressed::CompressedVocabulary;
pub use ggml::{GgmlTokenKind, GgmlVocabulary};
pub use load::TokenizerKind;
pub use special::SpecialTokens;
pub(crate) use special::text_of;
pub use stream::DecodeStream;
pub use train::{TokenizerModel, TokenizerQuality, TrainingOptions, train_tokenizer};

/// The file that holds a whole tokenizer.
pub const TOKENIZER_FILE: &str = "tokenizer.json";
/// The file that holds a SentencePiece model, or the ranks of a tiktoken tokenizer.
pub const MODEL_FILE: &str = "tokenizer.model";
/// The kind of the byte tokenizer in a configuration.
const BYTE: &str = "byte";
/// The file beside a tokenizer that names special tokens.
pub const TOKENIZER_CONFIG_FILE: &str = "tokenizer_config.json";

/// A tokenizer of any kind. The byte-level tokenizer and trained ones have a Hugging Face `tokenizer.json`, so other
/// programs can read the tokenizer that is saved with a run.
pub struct Tokenizer {
    name: String,
    backend: Backend,
    special: SpecialTokens,
    end_ids: BTreeSet<u32>,
    /// Whether texts begin with BOS and end with EOS, if the tokenizer's files say so.
    adds: [Option<bool>; 2],
    vocab_size: usize,
    fingerprint: String,
    /// The file as it was read, so that it is saved unchanged.
    kind: TokenizerKind,
    file: Vec<u8>,
    companions: Companions,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Tokenizer")
            .field("name", &self.name)
            .field("vocab_size", &self.vocab_size)
            .field("special", &self.special)
            .field("fingerprint", &self.fingerprint)
            .finish()
    }
}

/// A document's tokens.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct EncodedDocument {
    /// The token ids.
    pub tokens: Vec<i32>,
    /// The number of bytes of the text that each token encodes; their sum is the text's length. A token that starts
    /// inside a character counts none of its bytes; the token before it counts all of them. Empty if the text is unknown.
    pub bytes: Vec<u32>,
    /// Whether each token has a loss where it is predicted; empty if all have one.
    pub trained: Vec<bool>,
    /// The example's second sequence, such as the rejected answer of a pair.
    pub second: Option<Box<EncodedDocument>>,
    /// Whether a judged answer is desirable: 1 or 0. For answers with rewards, the margin.
    pub label: f32,
    /// The class of each token that replaces it as a target; empty if tokens are targets themselves.
    pub classes: Vec<i32>,
    /// The document of each token, for rows that hold several; empty if all are of one.
    pub segments: Vec<i32>,
    /// The position of each token in its document; empty if they count from 0.
    pub positions: Vec<i32>,
}

impl EncodedDocument {
    /// Whether the token at `index` has a loss where it is predicted.
    pub fn is_trained(&self, index: usize) -> bool {
        self.trained.get(index).copied().unwrap_or(true)
    }
}

impl Tokenizer {
    /// The tokenizer that needs no file: padding is 0, BOS 1, EOS 2, and each byte is its value plus 3.
    pub fn bytes() -> Self {
        let json = bpe::byte_level_json(&BYTE_LEVEL_SPECIAL_TOKENS, &[]);
        Self::from_json("`byte`".into(), json.into_bytes())
            .expect("the built-in tokenizer's description is valid")
    }

    /// Reads a `tokenizer.json`, a SentencePiece model or a tiktoken file of ranks, which are distinguished by their
    /// content. If `path` is a directory, reads its `tokenizer.json` or, without one, its `tokenizer.model`.
    ///
    /// Special tokens are read from `tokenizer_config.json` or `special_tokens_map.json` beside the file. Otherwise
    /// they come from the model, or are recognized by common names. The split pattern of a tiktoken tokenizer is
    /// `pat_str` of `tokenizer_config.json`, and its special tokens are the `added_tokens_decoder` there; without these
    /// keys, both are those of Llama 3.
    ///
    /// # Errors
    /// The file is missing or is not a tokenizer, or its special tokens are not in the vocabulary.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        Self::load_path(path.as_ref(), None)
    }

    /// [`Tokenizer::load`] for a tokenizer of the given kind. If a directory holds several kinds, reads this one. A
    /// Hugging Face directory may hold any kind.
    ///
    /// # Errors
    /// As [`Tokenizer::load`]; a tokenizer of another kind.
    pub fn load_as(path: impl AsRef<Path>, kind: TokenizerKind) -> Result<Self> {
        Self::load_path(path.as_ref(), Some(kind))
    }

    /// Opens the tokenizer that a configuration names by its kind and its path. The kind is `byte`, which has no file,
    /// the name of a [`TokenizerKind`], or `None` for any kind.
    ///
    /// # Errors
    /// As [`Tokenizer::load_as`]; the kind is unknown, a path is missing, or the byte tokenizer has one.
    pub fn open(kind: Option<&str>, path: Option<&Path>) -> Result<Self> {
        match (kind, path) {
            (Some(BYTE), None) => Ok(Self::bytes()),
            (Some(BYTE), Some(path)) => {
                Err(DataError::BytesHaveNoFile { path: path.to_owned(), kinds: TokenizerKind::names() })
            }
            (_, None) => Err(DataError::NoTokenizer),
            (None, Some(path)) => Self::load(path),
            (Some(kind), Some(path)) => Self::load_as(path, TokenizerKind::named(kind)?),
        }
    }

    /// Whether a tokenizer has been saved in the directory.
    pub fn is_saved_in(directory: &Path) -> bool {
        [TOKENIZER_FILE, MODEL_FILE].iter().any(|name| directory.join(name).is_file())
    }

    fn load_path(path: &Path, kind: Option<TokenizerKind>) -> Result<Self> {
        let (file, bytes, kind) = load::find(path, kind)?;
        let directory = file.parent().map(Path::to_path_buf).unwrap_or_default();
        Self::build(format!("`{}`", path.display()), &file, bytes, kind, Companions::read(&directory)?)
    }

    /// Builds a tokenizer from the text of a `tokenizer.json` without companion files.
    pub(crate) fn from_json(name: String, json: Vec<u8>) -> Result<Self> {
        Self::build(name, Path::new(TOKENIZER_FILE), json, TokenizerKind::HuggingFace, Companions::default())
    }

    fn build(
        name: String,
        file: &Path,
        bytes: Vec<u8>,
        kind: TokenizerKind,
        companions: Companions,
    ) -> Result<Self> {
        let backend = load::parse(file, &bytes, kind, &companions)?;
        let vocab_size = backend.vocab_size();
        if vocab_size == 0 {
            return Err(DataError::Tokenizer {
                path: file.into(),
                reason: "it has no token".into(),
                hint: "",
            });
        }
        let special = SpecialTokens::find(&backend, &companions)?;
        let mut end_ids = companions.end_ids()?;
        end_ids.extend(special.eos);
        let mut adds = companions.adds()?;
        if let Backend::HuggingFace(tokenizer) = &backend {
            // The tokens that the tokenizer's own post-processor adds.
            let encoding = tokenizer.inner.encode_fast("a", true).ok();
            let ids = encoding.as_ref().map(|encoding| encoding.get_ids()).unwrap_or_default();
            adds[0] = adds[0].or(Some(special.bos.is_some() && ids.first().copied() == special.bos));
            adds[1] = adds[1].or(Some(special.eos.is_some() && ids.last().copied() == special.eos));
        }
        let mut hash = Sha256::new();
        hash.update(&bytes);
        hash.update(format!("{special:?}"));
        if let Backend::Tiktoken(model, _) = &backend {
            hash.update(format!("{:?} {:?}", model.pattern(), model.special()));
        }
        let fingerprint = hex(&hash.finalize()[..16]);
        Ok(Self {
            name,
            backend,
            special,
            end_ids,
            adds,
            vocab_size,
            fingerprint,
            kind,
            file: bytes,
            companions,
        })
    }

    /// The token ids of a text, with BOS before and EOS after it if requested and if the tokenizer has them.
    ///
    /// The literal text of a special token becomes that token if the tokenizer's library does so: Hugging Face does,
    /// SentencePiece and tiktoken do not. See [`Tokenizer::encode_with_special_tokens`].
    ///
    /// # Errors
    /// The tokenizer rejects the text.
    pub fn encode(&self, text: &str, add_bos: bool, add_eos: bool) -> Result<Vec<u32>> {
        let ids = self.backend.encode(text).map_err(|reason| self.failure("encode a text", reason))?;
        let (bos, eos) = (self.special.bos.filter(|_| add_bos), self.special.eos.filter(|_| add_eos));
        Ok(bos.into_iter().chain(ids).chain(eos).collect())
    }

    /// The token ids of a text that spells out special tokens, like the result of [`crate::ChatTemplate::render`]. The
    /// text of a special token becomes that token for every kind of tokenizer, and no token is added.
    ///
    /// # Errors
    /// The tokenizer rejects the text.
    pub fn encode_with_special_tokens(&self, text: &str) -> Result<Vec<u32>> {
        let ids = self.backend.encode_with_special_tokens(text);
        ids.map_err(|reason| self.failure("encode a text", reason))
    }

    /// [`Tokenizer::encode`] with the number of bytes that each token encodes.
    ///
    /// # Errors
    /// The tokenizer rejects the text.
    pub fn encode_document(&self, text: &str, add_bos: bool, add_eos: bool) -> Result<EncodedDocument> {
        let mut document = EncodedDocument::default();
        let bos = self.special.bos.filter(|_| add_bos);
        document.tokens.extend(bos.map(|id| id as i32));
        document.bytes.extend(bos.map(|_| 0));
        self.extend(&mut document, text, |visit| self.backend.for_each_token(text, visit))?;
        let eos = self.special.eos.filter(|_| add_eos);
        document.tokens.extend(eos.map(|id| id as i32));
        document.bytes.extend(eos.map(|_| 0));
        Ok(document)
    }

    /// [`Tokenizer::encode_with_special_tokens`] with the number of bytes that each token encodes.
    ///
    /// # Errors
    /// The tokenizer rejects the text.
    pub fn encode_rendered(&self, text: &str) -> Result<EncodedDocument> {
        let mut document = EncodedDocument::default();
        self.extend(&mut document, text, |visit| self.backend.for_each_token_with_special(text, visit))?;
        Ok(document)
    }

    /// Appends the tokens of a text, which `for_each` visits with the offsets at which they end.
    fn extend(
        &self,
        document: &mut EncodedDocument,
        text: &str,
        for_each: impl FnOnce(&mut dyn FnMut((u32, usize))) -> Result<(), String>,
    ) -> Result<()> {
        let before = document.tokens.len();
        // Offsets may omit white space, and byte tokens of one character share an offset. So a token counts the bytes
        // by which it extends the covered text.
        let mut covered = 0;
        let encoded = for_each(&mut |(id, end)| {
            document.tokens.push(id as i32);
            document.bytes.push(end.saturating_sub(covered) as u32);
            covered = covered.max(end);
        });
        encoded.map_err(|reason| self.failure("encode a text", reason))?;
        if document.bytes.len() > before
            && let Some(last) = document.bytes.last_mut()
        {
            *last += text.len().saturating_sub(covered) as u32;
        }
        Ok(())
    }

    /// The text of token ids. Bytes that form no character become U+FFFD.
    ///
    /// # Errors
    /// The tokenizer does not have an id.
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String> {
        if let Some(id) = ids.iter().find(|id| **id as usize >= self.vocab_size) {
            let (tokenizer, last) = (self.name.clone(), self.vocab_size as u32 - 1);
            return Err(DataError::UnknownToken { tokenizer, id: *id, last });
        }
        let text = self.backend.decode(ids, skip_special_tokens);
        text.map_err(|reason| self.failure("decode token ids", reason))
    }

    /// The token as the vocabulary spells it.
    pub fn token(&self, id: u32) -> Option<String> {
        self.backend.token(id)
    }

    /// The bytes that a token adds to a text. A special token has the bytes of its name.
    ///
    /// Unlike a decoded text, these are exact for tokens that hold only some bytes of a character. The bytes of a text's
    /// tokens join to the text, except that some tokenizers begin texts with an additional space.
    pub fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        self.backend.token_bytes(id)
    }

    /// Whether decoding with `skip_special_tokens` omits a token.
    pub fn is_special(&self, id: u32) -> bool {
        self.backend.is_special(id)
    }

    /// The tokens by what they mean to a reader.
    ///
    /// # Errors
    /// The tokenizer cannot decode a token.
    pub fn compressed(&self) -> Result<CompressedVocabulary> {
        CompressedVocabulary::of(self)
    }

    /// The id of a token as the vocabulary spells it.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.backend.id(token)
    }

    /// The largest id plus one.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Rejects a tokenizer with ids outside a vocabulary of `vocab_size`. Special tokens may exceed it, because
    /// text-only models are published with the tokenizers of their multimodal variants.
    ///
    /// # Errors
    /// [`DataError::TokenizerTooLarge`]
    pub fn check_vocab_size(&self, vocab_size: usize) -> Result<()> {
        let is_special = |id: usize| {
            let seen = u32::try_from(id).ok().and_then(|id| self.decode(&[id], true).ok());
            seen.is_some_and(|text| text.is_empty())
        };
        if !(vocab_size..self.vocab_size).all(is_special) {
            let (tokenizer, tokens) = (self.name.clone(), self.vocab_size);
            return Err(DataError::TokenizerTooLarge { tokenizer, tokens, vocab_size });
        }
        Ok(())
    }

    /// Rejects a tokenizer that gives tokens other numbers than that of another model. Special tokens may differ, because models
    /// for conversations are published with names for those that their bases leave unused.
    ///
    /// # Errors
    /// [`DataError::OtherNumbers`]
    pub fn check_same_numbers(&self, other: &Self) -> Result<()> {
        if self.fingerprint == other.fingerprint {
            return Ok(());
        }
        let text = |tokenizer: &Self, id: u32, skips| tokenizer.decode(&[id], skips).unwrap_or_default();
        let is_special = |id: u32| [self, other].iter().any(|tokenizer| text(tokenizer, id, true).is_empty());
        // Files of several formats spell a token differently.
        let differs = |id: &u32| {
            self.token(*id) != other.token(*id)
                && text(self, *id, false) != text(other, *id, false)
                && !is_special(*id)
        };
        let Some(id) = (0..self.vocab_size.min(other.vocab_size) as u32).find(differs) else {
            return Ok(());
        };
        Err(DataError::OtherNumbers {
            tokenizer: self.name.clone(),
            frozen: other.name.clone(),
            id,
            own: text(self, id, false),
            other: text(other, id, false),
        })
    }

    /// The special tokens.
    pub fn special(&self) -> &SpecialTokens {
        &self.special
    }

    /// The tokens that end generation: EOS, and those that `generation_config.json` lists.
    pub fn end_ids(&self) -> &BTreeSet<u32> {
        &self.end_ids
    }

    /// Whether the tokenizer itself begins texts with BOS (`add_bos_token`, or the post-processor of a
    /// `tokenizer.json`), if its files say so.
    pub fn adds_bos(&self) -> Option<bool> {
        self.adds[0]
    }

    /// Whether the tokenizer itself ends texts with EOS; see [`Tokenizer::adds_bos`].
    pub fn adds_eos(&self) -> Option<bool> {
        self.adds[1]
    }

    /// The library that defines the tokenizer's file format.
    pub fn kind(&self) -> TokenizerKind {
        self.kind
    }

    /// The id that fills the rest of a row: the padding token, or 0 without one.
    pub fn pad_id(&self) -> u32 {
        self.special.pad.unwrap_or(0)
    }

    /// The tokenizer's name in messages, in backticks.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A hash of the vocabulary, rules and special tokens.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Writes the tokenizer's file and its companions into `directory`, as they were read. [`Tokenizer::load`] and
    /// other programs can read them.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn save(&self, directory: &Path) -> Result<()> {
        fs::create_dir_all(directory).map_err(DataError::io("create", directory))?;
        replace(&directory.join(self.kind.file_name()), |file| file.write_all(&self.file))?;
        let files = self.companions.files();
        if !files.iter().any(|(name, _)| *name == TOKENIZER_CONFIG_FILE) {
            let config = self.special.config_json(&self.backend);
            replace(&directory.join(TOKENIZER_CONFIG_FILE), |file| file.write_all(config.as_bytes()))?;
        }
        for (name, bytes) in files {
            replace(&directory.join(name), |file| file.write_all(bytes))?;
        }
        Ok(())
    }

    fn failure(&self, action: &'static str, reason: String) -> DataError {
        DataError::Tokenize { tokenizer: self.name.clone(), action, reason }
    }
}
