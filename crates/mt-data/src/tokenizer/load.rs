//! Lookup of a tokenizer's file, and detection of its kind from its content.

use std::fs;
use std::path::{Path, PathBuf};

use super::backend::{AddedToken, AddedTokens, Backend};
use super::companions::Companions;
use super::hugging_face::HuggingFace;
use super::sentencepiece::SentencePiece;
use super::tiktoken::Tiktoken;
use super::{MODEL_FILE, TOKENIZER_FILE};
use crate::error::{DataError, Result};

/// The library that defines a tokenizer's file format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenizerKind {
    /// A `tokenizer.json`. A directory of this kind may also hold another kind of file.
    HuggingFace,
    /// A `tokenizer.model` of SentencePiece.
    SentencePiece,
    /// A file of ranks, such as Llama 3's `tokenizer.model`.
    Tiktoken,
}

impl TokenizerKind {
    const ALL: [Self; 3] = [Self::HuggingFace, Self::SentencePiece, Self::Tiktoken];

    /// The name in a configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::HuggingFace => "huggingface",
            Self::SentencePiece => "sentencepiece",
            Self::Tiktoken => "tiktoken",
        }
    }

    /// The kind of this name.
    ///
    /// # Errors
    /// There is none.
    pub fn named(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| {
            DataError::Options(format!("`{name}` is no kind of tokenizer\nhint: use {}", Self::names()))
        })
    }

    /// The names of all kinds, for a hint.
    pub(super) fn names() -> String {
        Self::ALL.map(|kind| format!("`{}`", kind.name())).join(", ")
    }

    /// The file name under which such a tokenizer is saved.
    pub fn file_name(self) -> &'static str {
        match self {
            Self::HuggingFace => TOKENIZER_FILE,
            Self::SentencePiece | Self::Tiktoken => MODEL_FILE,
        }
    }

    fn of(bytes: &[u8]) -> Option<Self> {
        if bytes.trim_ascii_start().starts_with(b"{") {
            Some(Self::HuggingFace)
        } else if Tiktoken::recognizes(bytes) {
            Some(Self::Tiktoken)
        } else if SentencePiece::recognizes(bytes) {
            Some(Self::SentencePiece)
        } else {
            None
        }
    }

    fn description(self) -> &'static str {
        match self {
            Self::HuggingFace => "a Hugging Face `tokenizer.json`",
            Self::SentencePiece => "a SentencePiece model",
            Self::Tiktoken => "a tiktoken file of ranks",
        }
    }
}

/// A copy of the tokenizer that a name of the Hugging Face hub names, as in MaxText: `owner/name` with
/// `tokenizer_type=huggingface`, unless it is a path of this machine. `None` for other paths.
fn of_hub(path: &Path, asked: Option<TokenizerKind>) -> Result<Option<PathBuf>> {
    let is_asked = asked == Some(TokenizerKind::HuggingFace);
    let Some(name) = path.to_str().filter(|name| is_asked && mt_storage::hub::is_name(name)) else {
        return Ok(None);
    };
    let copy = mt_storage::input(Path::new(&format!("hf://{name}")));
    copy.map(Some).map_err(|source| DataError::Io {
        action: "download the tokenizer",
        path: path.into(),
        source,
    })
}

/// The file of the tokenizer at `path`, its content and its kind.
pub(super) fn find(path: &Path, asked: Option<TokenizerKind>) -> Result<(PathBuf, Vec<u8>, TokenizerKind)> {
    let copy = of_hub(path, asked)?;
    let path = copy.as_deref().unwrap_or(path);
    let is_directory = path.is_dir();
    let file = if is_directory {
        let names = match asked {
            None | Some(TokenizerKind::HuggingFace) => [TOKENIZER_FILE, MODEL_FILE],
            // A directory may hold the same tokenizer in the formats of several libraries.
            Some(TokenizerKind::SentencePiece | TokenizerKind::Tiktoken) => [MODEL_FILE, TOKENIZER_FILE],
        };
        let files = names.map(|name| path.join(name));
        files.iter().find(|file| file.is_file()).unwrap_or(&files[0]).clone()
    } else {
        path.to_path_buf()
    };
    let bytes = match fs::read(&file) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let hint = if is_directory {
                "\nhint: the directory must hold a `tokenizer.json` or a `tokenizer.model`"
            } else {
                "\nhint: name a `tokenizer.json`, a `tokenizer.model` or a directory with one, train one with `maxtext \
                 tokenizer train`, or use the byte-level tokenizer"
            };
            return Err(DataError::Tokenizer { path: file, reason: "there is no such file".into(), hint });
        }
        Err(error) => return Err(DataError::io("read", file)(error)),
    };
    let Some(found) = TokenizerKind::of(&bytes) else {
        return Err(DataError::Tokenizer {
            path: file,
            reason: "it has none of the known formats".into(),
            hint: "\nhint: a Hugging Face `tokenizer.json` starts with `{`, a SentencePiece `tokenizer.model` with its first \
                   piece, and each line of a tiktoken file is a token in base64 and a rank",
        });
    };
    match asked {
        Some(asked) if asked != found && !(is_directory && asked == TokenizerKind::HuggingFace) => {
            let (asked, kind, found) = (asked.name(), found.name(), found.description());
            Err(DataError::TokenizerKind { path: file, asked, found, kind })
        }
        _ => Ok((file, bytes, found)),
    }
}

/// Parses a tokenizer's file.
pub(super) fn parse(
    file: &Path,
    bytes: &[u8],
    kind: TokenizerKind,
    companions: &Companions,
) -> Result<Backend> {
    let invalid = |reason: String| DataError::Tokenizer { path: file.into(), reason, hint: "" };
    match kind {
        TokenizerKind::HuggingFace => {
            let mut inner =
                tokenizers::Tokenizer::from_bytes(bytes).map_err(|error| invalid(error.to_string()))?;
            // Some publishers store truncation and padding, which would remove or add tokens.
            inner.with_padding(None);
            inner.with_truncation(None).map_err(|error| invalid(error.to_string()))?;
            Ok(Backend::HuggingFace(Box::new(HuggingFace::new(inner, bytes))))
        }
        TokenizerKind::SentencePiece => {
            let model = SentencePiece::parse(bytes).map_err(invalid)?;
            let mut added = companions.added_tokens()?;
            // A listed token that the model has under the same name and id remains a token of the model.
            added.retain(|token| model.piece(token.id) != Some(&token.text));
            added.extend(model.control_pieces().map(|(text, id)| AddedToken {
                text: text.into(),
                id,
                is_special: true,
            }));
            Ok(Backend::SentencePiece(Box::new(model), AddedTokens::new(added)))
        }
        TokenizerKind::Tiktoken => {
            let pattern = companions.pattern()?;
            let listed = companions.added_tokens()?;
            let named = listed.iter().map(|token| (token.text.clone(), token.id)).collect();
            let special = (!listed.is_empty()).then_some(named);
            let model = Tiktoken::parse(bytes, pattern.as_deref(), special).map_err(invalid)?;
            let tokens = model.special().iter().map(|(text, id)| AddedToken {
                text: text.clone(),
                id: *id,
                is_special: listed.iter().find(|token| token.id == *id).is_none_or(|token| token.is_special),
            });
            let added = AddedTokens::new(tokens.collect());
            Ok(Backend::Tiktoken(Box::new(model), added))
        }
    }
}
