//! Normalization of a text before it is segmented, and of the joined pieces after decoding.

use super::super::trie::{ByteTrie, character_length};
use super::proto::NormalizerSpec;

/// The character that represents a space in pieces, U+2581.
pub(super) const SPACE: &str = "▁";

/// Replaces characters by a model's rules, and normalizes white space as the model requires.
#[derive(Debug)]
pub(super) struct Normalizer {
    rules: Option<Rules>,
    add_dummy_prefix: bool,
    remove_extra_whitespaces: bool,
    whitespace_is_suffix: bool,
    space: &'static [u8],
}

/// A normalized text.
#[derive(Debug, Default)]
pub(super) struct Normalized {
    pub bytes: Vec<u8>,
    /// The offset in the original text from which each byte comes, and the end of the last one.
    pub origin: Vec<u32>,
}

/// Replacement rules as a double-array trie in the layout of the Darts library. A leaf's value is the offset of the
/// replacement, which ends with a zero byte.
#[derive(Debug)]
struct Rules {
    units: Vec<u32>,
    replacements: Vec<u8>,
}

impl Normalizer {
    pub(super) fn new(spec: &NormalizerSpec, whitespace_is_suffix: bool) -> Result<Self, String> {
        Ok(Self {
            rules: Rules::parse(&spec.charsmap)?,
            add_dummy_prefix: spec.add_dummy_prefix,
            remove_extra_whitespaces: spec.remove_extra_whitespaces,
            whitespace_is_suffix,
            space: if spec.escape_whitespaces { SPACE.as_bytes() } else { b" " },
        })
    }

    /// Normalizes a text. Entries of `user_defined` are left unchanged.
    pub(super) fn normalize(&self, text: &str, user_defined: &ByteTrie) -> Normalized {
        let (input, mut at) = (text.as_bytes(), 0);
        let mut normalized = Normalized {
            bytes: Vec::with_capacity(input.len() + input.len() / 2),
            origin: Vec::with_capacity(input.len() + input.len() / 2 + 1),
        };
        if self.remove_extra_whitespaces {
            while at < input.len() {
                let (piece, length) = self.prefix(&input[at..], user_defined);
                if piece != b" " {
                    break;
                }
                at += length;
            }
        }
        if at == input.len() {
            return normalized;
        }
        if self.add_dummy_prefix && !self.whitespace_is_suffix {
            normalized.push(self.space, at);
        }
        let mut after_space = self.remove_extra_whitespaces;
        while at < input.len() {
            let (mut piece, length) = self.prefix(&input[at..], user_defined);
            while after_space && let [b' ', rest @ ..] = piece {
                piece = rest;
            }
            for byte in piece {
                match byte {
                    b' ' => normalized.push(self.space, at),
                    byte => normalized.push(&[*byte], at),
                }
            }
            if let Some(last) = piece.last() {
                after_space = self.remove_extra_whitespaces && *last == b' ';
            }
            at += length;
        }
        if self.remove_extra_whitespaces {
            while normalized.bytes.ends_with(self.space) {
                let length = normalized.bytes.len() - self.space.len();
                at = normalized.origin[length] as usize;
                normalized.bytes.truncate(length);
                normalized.origin.truncate(length);
            }
        }
        if self.add_dummy_prefix && self.whitespace_is_suffix {
            normalized.push(self.space, at);
        }
        normalized.origin.push(at as u32);
        normalized
    }

    /// Whether decoding drops the first space of a text.
    pub(super) fn drops_first_space(&self) -> bool {
        self.add_dummy_prefix || self.remove_extra_whitespaces
    }

    /// Whether decoding drops all leading spaces of a text.
    pub(super) fn drops_all_first_spaces(&self) -> bool {
        self.remove_extra_whitespaces
    }

    /// Whether the model has replacement rules.
    pub(super) fn has_rules(&self) -> bool {
        self.rules.is_some()
    }

    /// The replacement of a prefix of `input`, and the length of that prefix.
    fn prefix<'a>(&'a self, input: &'a [u8], user_defined: &ByteTrie) -> (&'a [u8], usize) {
        if let Some((length, _)) = user_defined.longest_prefix(input) {
            return (&input[..length], length);
        }
        if let Some(found) = self.rules.as_ref().and_then(|rules| rules.longest_prefix(input)) {
            return found;
        }
        let length = character_length(input);
        (&input[..length], length)
    }
}

impl Normalized {
    fn push(&mut self, bytes: &[u8], origin: usize) {
        self.bytes.extend_from_slice(bytes);
        self.origin.extend(bytes.iter().map(|_| origin as u32));
    }
}

impl Rules {
    fn parse(blob: &[u8]) -> Result<Option<Self>, String> {
        if blob.is_empty() {
            return Ok(None);
        }
        let damaged = || "its normalization rules are damaged".to_string();
        let (size, rest) = blob.split_first_chunk().ok_or_else(damaged)?;
        let size = u32::from_le_bytes(*size) as usize;
        let (trie, replacements) = rest.split_at_checked(size).ok_or_else(damaged)?;
        let (units, remainder) = trie.as_chunks::<4>();
        if units.is_empty() || !remainder.is_empty() {
            return Err(damaged());
        }
        let units = units.iter().map(|unit| u32::from_le_bytes(*unit)).collect();
        Ok(Some(Self { units, replacements: replacements.to_vec() }))
    }

    /// The replacement of the longest prefix of `input` that has one, and the length of that prefix.
    fn longest_prefix(&self, input: &[u8]) -> Option<(&[u8], usize)> {
        let offset = |unit: u32| ((unit >> 10) << ((unit & (1 << 9)) >> 6)) as usize;
        let mut node = offset(*self.units.first()?);
        let mut found = None;
        for (index, byte) in input.iter().enumerate() {
            node ^= usize::from(*byte);
            let Some(unit) = self.units.get(node).filter(|unit| *unit & 0x8000_00ff == u32::from(*byte))
            else {
                break;
            };
            node ^= offset(*unit);
            if unit & (1 << 8) != 0 {
                let Some(leaf) = self.units.get(node) else { break };
                found = Some(((leaf & 0x7fff_ffff) as usize, index + 1));
            }
        }
        let (start, length) = found?;
        let rest = self.replacements.get(start..)?;
        let end = rest.iter().position(|byte| *byte == 0).unwrap_or(rest.len());
        Some((&rest[..end], length))
    }
}
