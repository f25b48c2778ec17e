//! Tokenizers: text to token ids and back.

mod bpe;
mod special;
mod stream;

use std::fs;
use std::io::Write;
use std::path::Path;

use sha2::{Digest, Sha256};

use crate::error::{DataError, Result};
use crate::files::replace;
use crate::source::hex;

pub use bpe::{BYTE_LEVEL_SPECIAL_TOKENS, train_bpe};
pub use special::SpecialTokens;
pub use stream::DecodeStream;

/// The file that holds a whole tokenizer.
pub const TOKENIZER_FILE: &str = "tokenizer.json";
/// The file beside it that says which tokens are special.
pub const TOKENIZER_CONFIG_FILE: &str = "tokenizer_config.json";

/// A tokenizer, whatever its kind: everything is a Hugging Face `tokenizer.json` underneath, the byte-level tokenizer
/// and those trained here included, so what is saved with a run can be read by other programs.
pub struct Tokenizer {
    name: String,
    inner: tokenizers::Tokenizer,
    special: SpecialTokens,
    vocab_size: usize,
    fingerprint: String,
    /// The files as they were read, to save them unchanged.
    json: Vec<u8>,
    config: Option<Vec<u8>>,
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
        Self::from_json("`byte`".into(), Path::new("byte"), json.into_bytes(), None)
            .expect("the built-in tokenizer's description is valid")
    }

    /// Reads a `tokenizer.json`, or the one in the directory `path`. Which of its tokens are special is read from
    /// `tokenizer_config.json` or `special_tokens_map.json` beside it, or else known by name.
    ///
    /// # Errors
    /// A missing file, one that is no tokenizer, and special tokens that it does not have.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let file = if path.is_dir() { path.join(TOKENIZER_FILE) } else { path.to_path_buf() };
        let json = match fs::read(&file) {
            Ok(json) => json,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let hint = if path.is_dir() {
                    "\nhint: the directory must hold a `tokenizer.json`; for a SentencePiece `tokenizer.model`, export \
                     one with the library it was made for"
                } else {
                    "\nhint: name a `tokenizer.json` or a directory with one, train one with `maxtext tokenizer \
                     train`, or use the byte-level tokenizer"
                };
                return Err(DataError::Tokenizer {
                    path: file,
                    reason: "there is no such file".into(),
                    hint,
                });
            }
            Err(error) => return Err(DataError::io("read", file)(error)),
        };
        let directory = file.parent().map(Path::to_path_buf).unwrap_or_default();
        Self::from_json(format!("`{}`", path.display()), &file, json, Some(&directory))
    }

    /// A tokenizer from the text of a `tokenizer.json`.
    pub(crate) fn from_json(
        name: String,
        file: &Path,
        json: Vec<u8>,
        directory: Option<&Path>,
    ) -> Result<Self> {
        let mut inner = tokenizers::Tokenizer::from_bytes(&json).map_err(|error| {
            let hint = if json.first().is_some_and(|byte| *byte != b'{') {
                "\nhint: this is not a Hugging Face `tokenizer.json`, which starts with `{`"
            } else {
                ""
            };
            DataError::Tokenizer { path: file.into(), reason: error.to_string(), hint }
        })?;
        // Both are stored by some publishers and would lose or add tokens.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|error| DataError::Tokenizer {
            path: file.into(),
            reason: error.to_string(),
            hint: "",
        })?;
        let vocab_size = inner.get_vocab(true).values().max().map_or(0, |id| *id as usize + 1);
        if vocab_size == 0 {
            return Err(DataError::Tokenizer {
                path: file.into(),
                reason: "it has no token".into(),
                hint: "",
            });
        }
        let special = SpecialTokens::find(&inner, directory)?;
        let config = directory.and_then(|directory| fs::read(directory.join(TOKENIZER_CONFIG_FILE)).ok());
        let mut hash = Sha256::new();
        hash.update(&json);
        hash.update(format!("{special:?}"));
        let fingerprint = hex(&hash.finalize()[..16]);
        Ok(Self { name, inner, special, vocab_size, fingerprint, json, config })
    }

    /// The token ids of a text, with BOS before and EOS after it where asked for and where the tokenizer has them.
    ///
    /// The literal text of a special token becomes that token, as in the library that made the tokenizer.
    ///
    /// # Errors
    /// Text that the tokenizer's model refuses.
    pub fn encode(&self, text: &str, add_bos: bool, add_eos: bool) -> Result<Vec<u32>> {
        let encoding =
            self.inner.encode_fast(text, false).map_err(|error| self.failure("encode a text", &error))?;
        let (bos, eos) = (self.special.bos.filter(|_| add_bos), self.special.eos.filter(|_| add_eos));
        Ok(bos.into_iter().chain(encoding.get_ids().iter().copied()).chain(eos).collect())
    }

    /// Like [`Tokenizer::encode`], with the bytes that each token stands for.
    ///
    /// # Errors
    /// Text that the tokenizer's model refuses.
    pub fn encode_document(&self, text: &str, add_bos: bool, add_eos: bool) -> Result<EncodedDocument> {
        let encoding =
            self.inner.encode(text, false).map_err(|error| self.failure("encode a text", &error))?;
        let mut document = EncodedDocument::default();
        let bos = self.special.bos.filter(|_| add_bos);
        document.tokens.extend(bos.map(|id| id as i32));
        document.bytes.extend(bos.map(|_| 0));
        // Offsets may leave out white space, and those of the parts of a character overlap; what is counted is how far
        // into the text each token gets.
        let mut covered = 0;
        for (id, (_, end)) in encoding.get_ids().iter().zip(encoding.get_offsets()) {
            document.tokens.push(*id as i32);
            document.bytes.push(end.saturating_sub(covered) as u32);
            covered = covered.max(*end);
        }
        if !encoding.get_ids().is_empty()
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
        self.inner.decode(ids, skip_special_tokens).map_err(|error| self.failure("decode token ids", &error))
    }

    /// The token itself, as the vocabulary spells it.
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The id of a token as the vocabulary spells it.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// One more than the largest id.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Refuses a tokenizer with ids that a model with `vocab_size` embeddings does not have.
    ///
    /// # Errors
    /// [`DataError::TokenizerTooLarge`].
    pub fn check_vocab_size(&self, vocab_size: usize) -> Result<()> {
        if self.vocab_size > vocab_size {
            let (tokenizer, tokens) = (self.name.clone(), self.vocab_size);
            return Err(DataError::TokenizerTooLarge { tokenizer, tokens, vocab_size });
        }
        Ok(())
    }

    /// The ids with a meaning of their own.
    pub fn special(&self) -> &SpecialTokens {
        &self.special
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

    /// Writes `tokenizer.json` and `tokenizer_config.json` into `directory`, as they were read; [`Tokenizer::load`] and
    /// other programs read them back.
    ///
    /// # Errors
    /// Files that cannot be written.
    pub fn save(&self, directory: &Path) -> Result<()> {
        fs::create_dir_all(directory).map_err(DataError::io("create", directory))?;
        let config = match &self.config {
            Some(config) => config.clone(),
            None => self.special.config_json(&self.inner).into_bytes(),
        };
        replace(&directory.join(TOKENIZER_FILE), |file| file.write_all(&self.json))?;
        replace(&directory.join(TOKENIZER_CONFIG_FILE), |file| file.write_all(&config))
    }

    fn failure(&self, action: &'static str, error: &dyn std::fmt::Display) -> DataError {
        DataError::Tokenize { tokenizer: self.name.clone(), action, reason: error.to_string() }
    }
}
