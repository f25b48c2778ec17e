//! SentencePiece models, encoded and decoded like the reference library.
//!
//! Existing conversions to other libraries' formats replace characters by grapheme, break ties between equal scores in
//! another order, and add prefixes to each stretch of a text, so some texts would get other tokens than during the
//! model's training. Here both searches, unigram and byte pair encoding, follow the reference, including the precision
//! of their sums.

mod normalizer;
mod proto;

use std::collections::HashMap;
use std::ops::Range;

use normalizer::{Normalized, Normalizer, SPACE};
use proto::Piece;
pub(super) use proto::{ModelProto, PieceKind};

use super::merge::{Symbol, join};
use super::trie::{ByteTrie, character_length};

/// The difference between the least score of a piece and the score of an unknown character.
const UNKNOWN_PENALTY: f32 = 10.0;
/// The score that each byte after the first adds to a user-defined piece, which makes this piece the most probable one.
const USER_DEFINED_SCORE: f64 = 0.1;
/// A greater sum is reset to zero before it loses precision.
const SCORE_LIMIT: f32 = 100_000.0;
/// The type of a unigram model, which chooses the most probable pieces, and of a byte pair model, which merges pairs.
const UNIGRAM: u64 = 1;
const BYTE_PAIR: u64 = 2;

/// A SentencePiece model.
#[derive(Debug)]
pub(super) struct SentencePiece {
    pieces: Vec<Piece>,
    /// The pieces that encode text.
    by_text: HashMap<String, u32>,
    /// The control, byte and unknown pieces.
    reserved: HashMap<String, u32>,
    trie: ByteTrie,
    user_defined: ByteTrie,
    normalizer: Normalizer,
    denormalizer: Option<Normalizer>,
    is_unigram: bool,
    unknown: u32,
    /// The ids of the byte pieces, if the model falls back to bytes for unknown characters.
    bytes: Option<[u32; 256]>,
    min_score: f32,
    unknown_surface: String,
    special: [String; 3],
}

/// A token and the offset at which it ends in the text.
pub(super) type Token = (u32, usize);

impl SentencePiece {
    /// Whether a file begins like a model: with the text of the first piece.
    pub(super) fn recognizes(bytes: &[u8]) -> bool {
        matches!(bytes, [0x0a, 0..0x80, 0x0a, ..])
    }

    /// Reads a `.model` file.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, String> {
        let ModelProto { pieces, trainer, normalizer, denormalizer } = ModelProto::parse(bytes)?;
        let is_unigram = match trainer.model_type {
            UNIGRAM => true,
            BYTE_PAIR => false,
            3 => return Err("it is a model of whole words, not of word pieces".into()),
            4 => return Err("it is a model of characters, not of word pieces".into()),
            other => return Err(format!("its type {other} is not known")),
        };
        let (mut by_text, mut reserved, mut user_defined) = (HashMap::new(), HashMap::new(), Vec::new());
        let (mut min_score, mut unknown) = (f32::MAX, None);
        for (id, piece) in pieces.iter().enumerate() {
            let id = id as u32;
            if piece.text.is_empty() {
                return Err(format!("its piece {id} is empty"));
            }
            let map = match piece.kind {
                PieceKind::Normal | PieceKind::UserDefined | PieceKind::Unused => &mut by_text,
                PieceKind::Unknown | PieceKind::Control | PieceKind::Byte => &mut reserved,
            };
            if map.insert(piece.text.clone(), id).is_some() {
                return Err(format!("it has the piece `{}` twice", piece.text));
            }
            match piece.kind {
                PieceKind::UserDefined => user_defined.push((piece.text.as_bytes(), id)),
                PieceKind::Unknown => unknown = Some(id),
                PieceKind::Normal => min_score = min_score.min(piece.score),
                PieceKind::Control | PieceKind::Unused | PieceKind::Byte => {}
            }
        }
        let unknown = unknown.ok_or("it has no piece for unknown text")?;
        let bytes = trainer.byte_fallback.then(|| byte_pieces(&reserved)).transpose()?;
        let entries = by_text.iter().map(|(text, id)| (text.as_bytes(), *id)).collect();
        let trie = ByteTrie::new(entries);
        let user_defined = ByteTrie::new(user_defined);
        let denormalizer = Normalizer::new(&denormalizer, false)?;
        Ok(Self {
            trie,
            user_defined,
            by_text,
            reserved,
            normalizer: Normalizer::new(&normalizer, trainer.treat_whitespace_as_suffix)?,
            denormalizer: denormalizer.has_rules().then_some(denormalizer),
            is_unigram,
            unknown,
            bytes,
            min_score,
            unknown_surface: trainer.unknown_surface,
            special: [trainer.bos_piece, trainer.eos_piece, trainer.pad_piece],
            pieces,
        })
    }

    /// The number of pieces.
    pub(super) fn len(&self) -> usize {
        self.pieces.len()
    }

    /// The piece of an id.
    pub(super) fn piece(&self, id: u32) -> Option<&str> {
        self.pieces.get(id as usize).map(|piece| piece.text.as_str())
    }

    /// The id of a piece.
    pub(super) fn id(&self, piece: &str) -> Option<u32> {
        self.reserved.get(piece).or_else(|| self.by_text.get(piece)).copied()
    }

    /// The model's own pieces for BOS, EOS, padding and unknown text.
    pub(super) fn special_ids(&self) -> [Option<u32>; 4] {
        let [bos, eos, pad] = self.special.each_ref().map(|piece| self.reserved.get(piece).copied());
        [bos, eos, pad, Some(self.unknown)]
    }

    /// The control pieces. No text encodes to them.
    pub(super) fn control_pieces(&self) -> impl Iterator<Item = (&str, u32)> {
        let controls = self.pieces.iter().enumerate().filter(|(_, piece)| piece.kind == PieceKind::Control);
        controls.map(|(id, piece)| (piece.text.as_str(), id as u32))
    }

    /// The tokens of a text.
    pub(super) fn encode(&self, text: &str) -> Vec<Token> {
        let normalized = self.normalizer.normalize(text, &self.user_defined);
        let cut = if self.is_unigram { self.likeliest(&normalized) } else { self.joined(&normalized) };
        let (mut tokens, mut after_unknown) = (Vec::with_capacity(cut.len()), false);
        for (range, id) in cut {
            let end = normalized.origin[range.end] as usize;
            match &self.bytes {
                Some(bytes) if id == self.unknown => {
                    let start = normalized.origin[range.start] as usize;
                    let spelled = &normalized.bytes[range];
                    tokens.extend(spelled.iter().map(|byte| (bytes[usize::from(*byte)], start)));
                    // The last byte covers the whole character.
                    if let Some(last) = tokens.last_mut() {
                        last.1 = end;
                    }
                }
                // Successive unknown characters are one token.
                _ if id == self.unknown && after_unknown => {
                    if let Some(last) = tokens.last_mut() {
                        last.1 = end;
                    }
                }
                _ => tokens.push((id, end)),
            }
            after_unknown = id == self.unknown;
        }
        tokens
    }

    /// The most probable pieces, by the Viterbi algorithm.
    fn likeliest(&self, normalized: &Normalized) -> Vec<(Range<usize>, u32)> {
        /// The last piece of the best segmentation up to an offset in the text.
        #[derive(Clone, Copy)]
        struct Best {
            score: f32,
            start: usize,
            id: u32,
        }
        const UNREACHED: usize = usize::MAX;
        let text = &normalized.bytes;
        let unknown_score = self.min_score - UNKNOWN_PENALTY;
        let mut best = vec![Best { score: 0.0, start: UNREACHED, id: 0 }; text.len() + 1];
        let (mut start, mut frontier) = (0, 0);
        while start < text.len() {
            let offset = best[start].score;
            if offset.abs() > SCORE_LIMIT {
                for ahead in &mut best[start..=frontier] {
                    ahead.score -= offset;
                }
            }
            let score_here = best[start].score;
            let character = character_length(&text[start..]);
            let mut has_character = false;
            self.trie.prefixes(&text[start..], |length, id| {
                let piece = &self.pieces[id as usize];
                let score = match piece.kind {
                    PieceKind::Unused => return,
                    PieceKind::UserDefined => (USER_DEFINED_SCORE * (length - 1) as f64) as f32,
                    _ => piece.score,
                };
                // Sums are in single precision, which decides between segmentations with nearly equal scores.
                let candidate = score + score_here;
                let target = &mut best[start + length];
                if target.start == UNREACHED || candidate > target.score {
                    *target = Best { score: candidate, start, id };
                }
                has_character |= length == character;
                frontier = frontier.max(start + length);
            });
            if !has_character {
                frontier = frontier.max(start + character);
                let candidate = unknown_score + score_here;
                let target = &mut best[start + character];
                if target.start == UNREACHED || candidate > target.score {
                    *target = Best { score: candidate, start, id: self.unknown };
                }
            }
            start += character;
        }
        let (mut cut, mut end) = (Vec::new(), text.len());
        while end > 0 {
            let Best { start, id, .. } = best[end];
            cut.push((start..end, id));
            end = start;
        }
        cut.reverse();
        cut
    }

    /// The remaining pieces after pairs are merged, the pair with the greatest score first.
    fn joined(&self, normalized: &Normalized) -> Vec<(Range<usize>, u32)> {
        let text = &normalized.bytes;
        let (mut symbols, mut start) = (Vec::new(), 0);
        while start < text.len() {
            let user_defined = self.user_defined.longest_prefix(&text[start..]);
            let length = user_defined.map_or_else(|| character_length(&text[start..]), |(length, _)| length);
            symbols.push(Symbol { range: start..start + length, frozen: user_defined.is_some() });
            start += length;
        }
        // The halves of merged pieces that are marked as unused and must be split again.
        let mut halves: HashMap<&[u8], (Range<usize>, Range<usize>)> = HashMap::new();
        let cut = join(symbols, |left, right| {
            let bytes = &text[left.start..right.end];
            let id = *self.by_text.get(std::str::from_utf8(bytes).ok()?)?;
            let piece = &self.pieces[id as usize];
            if piece.kind == PieceKind::Unused {
                halves.insert(bytes, (left.clone(), right.clone()));
            }
            Some(ordered(piece.score))
        });
        let mut output = Vec::with_capacity(cut.len());
        for range in cut {
            let mut stack = vec![range];
            while let Some(range) = stack.pop() {
                let id = std::str::from_utf8(&text[range.clone()]).ok().and_then(|piece| self.id(piece));
                let id = id.unwrap_or(self.unknown);
                let is_unused = self.pieces[id as usize].kind == PieceKind::Unused;
                if !is_unused {
                    output.push((range, id));
                } else if let Some((left, _)) = halves.get(&text[range.clone()]) {
                    // The halves may have been recorded at another offset of the text.
                    let middle = range.start + left.len();
                    stack.extend([middle..range.end, range.start..middle]);
                } else {
                    output.push((range, self.unknown));
                }
            }
        }
        output
    }

    /// The text of tokens. Control pieces have no text.
    pub(super) fn decode<'a>(&self, tokens: impl Iterator<Item = SentencePieceToken<'a>>) -> String {
        let (mut text, mut bytes) = (String::new(), Vec::new());
        let (mut at_start, mut dropped_space) = (true, false);
        for token in tokens {
            let (piece, kind) = match token {
                SentencePieceToken::Id(id) => {
                    let piece = &self.pieces[id as usize];
                    (piece.text.as_str(), piece.kind)
                }
                SentencePieceToken::Literal(literal) => (literal, PieceKind::UserDefined),
            };
            if kind == PieceKind::Byte {
                bytes.extend(byte_of(piece));
                continue;
            }
            push_bytes(&mut text, &mut bytes);
            if dropped_space || !text.is_empty() {
                at_start = false;
            }
            dropped_space = false;
            match kind {
                PieceKind::Control => {}
                PieceKind::Unknown => text.push_str(&self.unknown_surface),
                _ => {
                    let mut rest = piece;
                    if at_start
                        && self.normalizer.drops_first_space()
                        && let Some(stripped) = piece.strip_prefix(SPACE)
                    {
                        rest = stripped;
                        dropped_space = !self.normalizer.drops_all_first_spaces();
                    }
                    text.push_str(&rest.replace(SPACE, " "));
                }
            }
        }
        push_bytes(&mut text, &mut bytes);
        match &self.denormalizer {
            Some(denormalizer) => {
                let bytes = denormalizer.normalize(&text, &ByteTrie::new(Vec::new())).bytes;
                String::from_utf8_lossy(&bytes).into_owned()
            }
            None => text,
        }
    }
}

/// A token that [`SentencePiece::decode`] decodes.
pub(super) enum SentencePieceToken<'a> {
    /// A piece of the model.
    Id(u32),
    /// The text of a token outside the model, or of a control piece that is shown.
    Literal(&'a str),
}

/// A score as an integer with the same order.
fn ordered(score: f32) -> i32 {
    let bits = score.to_bits() as i32;
    bits ^ (((bits >> 31) as u32) >> 1) as i32
}

fn byte_pieces(reserved: &HashMap<String, u32>) -> Result<[u32; 256], String> {
    let mut ids = [0; 256];
    for (byte, id) in ids.iter_mut().enumerate() {
        let piece = format!("<0x{byte:02X}>");
        *id = *reserved.get(&piece).ok_or_else(|| format!("it has no piece `{piece}` for a byte"))?;
    }
    Ok(ids)
}

/// The byte that a piece such as `<0x0A>` represents.
pub(super) fn byte_of(piece: &str) -> Option<u8> {
    u8::from_str_radix(piece.strip_prefix("<0x")?.strip_suffix('>')?, 16).ok()
}

/// Appends the text of bytes. Each byte that belongs to no character becomes U+FFFD.
fn push_bytes(text: &mut String, bytes: &mut Vec<u8>) {
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        text.extend(chunk.invalid().iter().map(|_| '\u{fffd}'));
    }
    bytes.clear();
}
