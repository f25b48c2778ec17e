//! Tokenizers: text to token ids and back.

mod backend;
mod bpe;
mod companions;
mod hugging_face;
mod learn;
mod load;
mod merge;
mod pieces;
mod sentencepiece;
mod special;
mod stream;
mod tiktoken;
mod trie;

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
pub use load::TokenizerKind;
pub use special::SpecialTokens;
pub(crate) use special::text_of;
pub use stream::DecodeStream;

/// The file that holds a whole tokenizer.
pub const TOKENIZER_FILE: &str = "tokenizer.json";
/// The file that holds a SentencePiece model, or the ranks of a tiktoken one.
const MODEL_FILE: &str = "tokenizer.model";
/// The file beside it that says which tokens are special.
pub const TOKENIZER_CONFIG_FILE: &str = "tokenizer_config.json";

/// A tokenizer, whatever its kind. The byte-level tokenizer and those trained here are a Hugging Face `tokenizer.json`
/// underneath; what is saved with a run can be read by other programs.
pub struct Tokenizer {
    name: String,
    backend: Backend,
    special: SpecialTokens,
    end_ids: BTreeSet<u32>,
    /// Whether texts begin and end with the tokens for it, where the tokenizer's files say so.
    adds: [Option<bool>; 2],
    vocab_size: usize,
    fingerprint: String,
    /// The files as they were read, to save them unchanged.
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
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EncodedDocument {
    /// The token ids.
    pub tokens: Vec<i32>,
    /// How many bytes of the text each token stands for; their sum is the text's length. A token that starts inside a
    /// character counts none of its bytes, the one before it counts all.
    pub bytes: Vec<u32>,
}

impl Tokenizer {
    /// The tokenizer that needs no file: padding 0, BOS 1, EOS 2, and each byte's value plus 3.
    pub fn bytes() -> Self {
        let json = bpe::byte_level_json(&BYTE_LEVEL_SPECIAL_TOKENS, &[]);
        Self::from_json("`byte`".into(), json.into_bytes())
            .expect("the built-in tokenizer's description is valid")
    }

    /// Reads a `tokenizer.json`, a SentencePiece model or a tiktoken file of ranks, told apart by their content, or what
    /// the directory `path` holds: its `tokenizer.json`, or else its `tokenizer.model`.
    ///
    /// Which tokens are special is read from `tokenizer_config.json` or `special_tokens_map.json` beside it, or else
    /// from the model, or known by name. The pattern of a tiktoken tokenizer is `pat_str` of `tokenizer_config.json`,
    /// and its special tokens are the `added_tokens_decoder` there; without them they are those of Llama 3.
    ///
    /// # Errors
    /// A missing file, one that is no tokenizer, and special tokens that it does not have.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        Self::load_path(path.as_ref(), None)
    }

    /// Like [`Tokenizer::load`], for a tokenizer that is to be of the `kind`. Of a directory that holds several, the one
    /// of this kind is read; as a Hugging Face directory any will do.
    ///
    /// # Errors
    /// As [`Tokenizer::load`]; a tokenizer of another kind.
    pub fn load_as(path: impl AsRef<Path>, kind: TokenizerKind) -> Result<Self> {
        Self::load_path(path.as_ref(), Some(kind))
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

    /// A tokenizer from the text of a `tokenizer.json`, without any other file.
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
            // What the tokenizer's own last step adds.
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

    /// The token ids of a text, with BOS before and EOS after it where asked for and where the tokenizer has them.
    ///
    /// The literal text of a special token becomes that token if the library that the tokenizer was made with does so:
    /// a `tokenizer.json` does, SentencePiece and tiktoken do not. See [`Tokenizer::encode_with_special_tokens`].
    ///
    /// # Errors
    /// Text that the tokenizer's model refuses.
    pub fn encode(&self, text: &str, add_bos: bool, add_eos: bool) -> Result<Vec<u32>> {
        let ids = self.backend.encode(text).map_err(|reason| self.failure("encode a text", reason))?;
        let (bos, eos) = (self.special.bos.filter(|_| add_bos), self.special.eos.filter(|_| add_eos));
        Ok(bos.into_iter().chain(ids).chain(eos).collect())
    }

    /// The token ids of a text in which special tokens are spelled out, as [`crate::ChatTemplate::render`] does: they
    /// become these tokens, whatever the kind of tokenizer, and nothing is added.
    ///
    /// # Errors
    /// Text that the tokenizer's model refuses.
    pub fn encode_with_special_tokens(&self, text: &str) -> Result<Vec<u32>> {
        let ids = self.backend.encode_with_special_tokens(text);
        ids.map_err(|reason| self.failure("encode a text", reason))
    }

    /// Like [`Tokenizer::encode`], with the bytes that each token stands for.
    ///
    /// # Errors
    /// Text that the tokenizer's model refuses.
    pub fn encode_document(&self, text: &str, add_bos: bool, add_eos: bool) -> Result<EncodedDocument> {
        let mut document = EncodedDocument::default();
        let bos = self.special.bos.filter(|_| add_bos);
        document.tokens.extend(bos.map(|id| id as i32));
        document.bytes.extend(bos.map(|_| 0));
        let before = document.tokens.len();
        // Offsets may leave out white space, and those of the bytes of a character are the same; what is counted is how
        // far into the text each token gets.
        let mut covered = 0;
        let encoded = self.backend.for_each_token(text, |(id, end)| {
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
        let eos = self.special.eos.filter(|_| add_eos);
        document.tokens.extend(eos.map(|id| id as i32));
        document.bytes.extend(eos.map(|_| 0));
        Ok(document)
    }

    /// The text of token ids; bytes that form no character become U+FFFD.
    ///
    /// # Errors
    /// An id that the tokenizer does not have.
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String> {
        if let Some(id) = ids.iter().find(|id| **id as usize >= self.vocab_size) {
            let (tokenizer, last) = (self.name.clone(), self.vocab_size as u32 - 1);
            return Err(DataError::UnknownToken { tokenizer, id: *id, last });
        }
        let text = self.backend.decode(ids, skip_special_tokens);
        text.map_err(|reason| self.failure("decode token ids", reason))
    }

    /// The token itself, as the vocabulary spells it.
    pub fn token(&self, id: u32) -> Option<String> {
        self.backend.token(id)
    }

    /// The id of a token as the vocabulary spells it.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.backend.id(token)
    }

    /// One more than the largest id.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Refuses a tokenizer with ids that a model with `vocab_size` embeddings does not have. Special ones may be left
    /// over, as models that only read text are published with the tokenizers of those that also see.
    ///
    /// # Errors
    /// [`DataError::TokenizerTooLarge`].
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

    /// The ids with a meaning of their own.
    pub fn special(&self) -> &SpecialTokens {
        &self.special
    }

    /// The tokens at which generation stops: the one that ends a text, and those that `generation_config.json` lists.
    pub fn end_ids(&self) -> &BTreeSet<u32> {
        &self.end_ids
    }

    /// Whether the tokenizer itself begins texts with BOS (`add_bos_token`, or what a `tokenizer.json` does), where its
    /// files say so.
    pub fn adds_bos(&self) -> Option<bool> {
        self.adds[0]
    }

    /// Whether the tokenizer itself ends texts with EOS, as [`Tokenizer::adds_bos`].
    pub fn adds_eos(&self) -> Option<bool> {
        self.adds[1]
    }

    /// The library whose file the tokenizer is.
    pub fn kind(&self) -> TokenizerKind {
        self.kind
    }

    /// The id that fills what is left of a row: padding, or 0 where there is none.
    pub fn pad_id(&self) -> u32 {
        self.special.pad.unwrap_or(0)
    }

    /// What the tokenizer is called in messages, in backticks.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A hash of its vocabulary, rules and special tokens.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Writes the tokenizer's file and those that belong to it into `directory`, as they were read; [`Tokenizer::load`]
    /// and other programs read them back.
    ///
    /// # Errors
    /// Files that cannot be written.
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
