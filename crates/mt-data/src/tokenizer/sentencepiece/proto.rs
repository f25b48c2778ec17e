//! The fields of SentencePiece's `.model` file, a protocol buffer, that encoding and decoding need.

/// The content of the file.
#[derive(Debug, Default)]
pub(in crate::tokenizer) struct ModelProto {
    pub pieces: Vec<Piece>,
    pub trainer: Trainer,
    pub normalizer: NormalizerSpec,
    pub denormalizer: NormalizerSpec,
}

#[derive(Debug)]
pub(in crate::tokenizer) struct Piece {
    pub text: String,
    pub score: f32,
    pub kind: PieceKind,
}

/// The values of the file's enumeration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::tokenizer) enum PieceKind {
    Normal = 1,
    Unknown = 2,
    Control = 3,
    UserDefined = 4,
    Unused = 5,
    Byte = 6,
}

#[derive(Debug)]
pub(in crate::tokenizer) struct Trainer {
    /// 1 unigram, 2 byte pair encoding, 3 words, 4 characters.
    pub model_type: u64,
    pub byte_fallback: bool,
    pub treat_whitespace_as_suffix: bool,
    pub unknown_surface: String,
    pub bos_piece: String,
    pub eos_piece: String,
    pub pad_piece: String,
}

impl Default for Trainer {
    fn default() -> Self {
        Self {
            model_type: 1,
            byte_fallback: false,
            treat_whitespace_as_suffix: false,
            unknown_surface: " \u{2047} ".into(),
            bos_piece: "<s>".into(),
            eos_piece: "</s>".into(),
            pad_piece: "<pad>".into(),
        }
    }
}

#[derive(Debug)]
pub(in crate::tokenizer) struct NormalizerSpec {
    /// A trie of the replaced strings, and the replacements.
    pub charsmap: Vec<u8>,
    pub add_dummy_prefix: bool,
    pub remove_extra_whitespaces: bool,
    pub escape_whitespaces: bool,
}

impl Default for NormalizerSpec {
    fn default() -> Self {
        let charsmap = Vec::new();
        Self { charsmap, add_dummy_prefix: true, remove_extra_whitespaces: true, escape_whitespaces: true }
    }
}

/// The value of one field.
enum Field<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

impl ModelProto {
    pub(in crate::tokenizer) fn parse(bytes: &[u8]) -> Result<Self, String> {
        let mut model = Self::default();
        fields(bytes, |number, field| {
            match (number, field) {
                (1, Field::Bytes(bytes)) => model.pieces.push(Piece::parse(bytes)?),
                (2, Field::Bytes(bytes)) => model.trainer.merge(bytes)?,
                (3, Field::Bytes(bytes)) => model.normalizer.merge(bytes)?,
                (5, Field::Bytes(bytes)) => model.denormalizer.merge(bytes)?,
                _ => {}
            }
            Ok(())
        })?;
        Ok(model)
    }
}

impl Piece {
    fn parse(bytes: &[u8]) -> Result<Self, String> {
        let mut piece = Self { text: String::new(), score: 0.0, kind: PieceKind::Normal };
        fields(bytes, |number, field| {
            match (number, field) {
                (1, Field::Bytes(bytes)) => piece.text = text(bytes)?,
                (2, Field::Number(bits)) => piece.score = f32::from_bits(bits as u32),
                (3, Field::Number(kind)) => {
                    piece.kind = match kind {
                        1 => PieceKind::Normal,
                        2 => PieceKind::Unknown,
                        3 => PieceKind::Control,
                        4 => PieceKind::UserDefined,
                        5 => PieceKind::Unused,
                        6 => PieceKind::Byte,
                        other => return Err(format!("a piece is of the unknown kind {other}")),
                    }
                }
                _ => {}
            }
            Ok(())
        })?;
        Ok(piece)
    }
}

impl Trainer {
    fn merge(&mut self, bytes: &[u8]) -> Result<(), String> {
        fields(bytes, |number, field| {
            match (number, field) {
                (3, Field::Number(value)) => self.model_type = value,
                (24, Field::Number(value)) => self.treat_whitespace_as_suffix = value != 0,
                (35, Field::Number(value)) => self.byte_fallback = value != 0,
                (44, Field::Bytes(bytes)) => self.unknown_surface = text(bytes)?,
                (46, Field::Bytes(bytes)) => self.bos_piece = text(bytes)?,
                (47, Field::Bytes(bytes)) => self.eos_piece = text(bytes)?,
                (48, Field::Bytes(bytes)) => self.pad_piece = text(bytes)?,
                _ => {}
            }
            Ok(())
        })
    }
}

impl NormalizerSpec {
    fn merge(&mut self, bytes: &[u8]) -> Result<(), String> {
        fields(bytes, |number, field| {
            match (number, field) {
                (2, Field::Bytes(bytes)) => self.charsmap = bytes.to_vec(),
                (3, Field::Number(value)) => self.add_dummy_prefix = value != 0,
                (4, Field::Number(value)) => self.remove_extra_whitespaces = value != 0,
                (5, Field::Number(value)) => self.escape_whitespaces = value != 0,
                _ => {}
            }
            Ok(())
        })
    }
}

/// Calls `visit` with the number and value of each field of a message.
fn fields(
    mut bytes: &[u8],
    mut visit: impl FnMut(u64, Field<'_>) -> Result<(), String>,
) -> Result<(), String> {
    while !bytes.is_empty() {
        let tag = varint(&mut bytes)?;
        let field = match tag & 7 {
            0 => Field::Number(varint(&mut bytes)?),
            1 => Field::Bytes(take(&mut bytes, 8)?),
            2 => {
                let length = varint(&mut bytes)?;
                Field::Bytes(take(&mut bytes, length)?)
            }
            5 => {
                let value = take(&mut bytes, 4)?;
                Field::Number(u64::from(u32::from_le_bytes(std::array::from_fn(|index| value[index]))))
            }
            other => return Err(format!("a field has the unknown encoding {other}")),
        };
        visit(tag >> 3, field)?;
    }
    Ok(())
}

fn varint(bytes: &mut &[u8]) -> Result<u64, String> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let byte = take(bytes, 1)?[0];
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Ok(value);
        }
    }
    Err("a number does not end".into())
}

fn take<'a>(bytes: &mut &'a [u8], length: u64) -> Result<&'a [u8], String> {
    let length = usize::try_from(length).ok().filter(|length| *length <= bytes.len());
    let (taken, rest) = bytes.split_at(length.ok_or("the file ends too early")?);
    *bytes = rest;
    Ok(taken)
}

fn text(bytes: &[u8]) -> Result<String, String> {
    String::from_utf8(bytes.to_vec()).map_err(|_| "a text of it is not UTF-8".into())
}
