//! SentencePiece's `.model` file.

use prost::Message;

use super::TrainingOptions;

/// The special pieces, in the order of their ids. Padding is 0, so that zeros are padding.
pub(super) const SPECIAL: [&str; 4] = ["<pad>", "<unk>", "<s>", "</s>"];
/// The id of unknown text.
pub(super) const UNKNOWN: usize = 1;
/// The special pieces and the bytes.
pub(super) const RESERVED: usize = SPECIAL.len() + 256;
/// The types of models.
pub(super) const UNIGRAM: i32 = 1;
pub(super) const BYTE_PAIR: i32 = 2;

#[derive(Clone, PartialEq, Message)]
struct Model {
    #[prost(message, repeated, tag = "1")]
    pieces: Vec<Piece>,
    #[prost(message, optional, tag = "2")]
    trainer: Option<Trainer>,
    #[prost(message, optional, tag = "3")]
    normalizer: Option<Normalizer>,
}

#[derive(Clone, PartialEq, Message)]
struct Piece {
    #[prost(string, optional, tag = "1")]
    piece: Option<String>,
    #[prost(float, optional, tag = "2")]
    score: Option<f32>,
    #[prost(int32, optional, tag = "3")]
    kind: Option<i32>,
}

#[derive(Clone, PartialEq, Message)]
struct Trainer {
    #[prost(int32, optional, tag = "3")]
    model_type: Option<i32>,
    #[prost(int32, optional, tag = "4")]
    vocab_size: Option<i32>,
    #[prost(float, optional, tag = "10")]
    character_coverage: Option<f32>,
    #[prost(bool, optional, tag = "35")]
    byte_fallback: Option<bool>,
    #[prost(int32, optional, tag = "40")]
    unk_id: Option<i32>,
    #[prost(int32, optional, tag = "41")]
    bos_id: Option<i32>,
    #[prost(int32, optional, tag = "42")]
    eos_id: Option<i32>,
    #[prost(int32, optional, tag = "43")]
    pad_id: Option<i32>,
    #[prost(string, optional, tag = "45")]
    unk_piece: Option<String>,
    #[prost(string, optional, tag = "46")]
    bos_piece: Option<String>,
    #[prost(string, optional, tag = "47")]
    eos_piece: Option<String>,
    #[prost(string, optional, tag = "48")]
    pad_piece: Option<String>,
}

#[derive(Clone, PartialEq, Message)]
struct Normalizer {
    #[prost(string, optional, tag = "1")]
    name: Option<String>,
    #[prost(bool, optional, tag = "3")]
    add_dummy_prefix: Option<bool>,
    #[prost(bool, optional, tag = "4")]
    remove_extra_whitespaces: Option<bool>,
    #[prost(bool, optional, tag = "5")]
    escape_whitespaces: Option<bool>,
}

/// The bytes of a model: special pieces, bytes, then `pieces`. Texts are not normalized, so that decoding gives them back.
pub(super) fn write(pieces: &[(String, f32)], model_type: i32, options: &TrainingOptions) -> Vec<u8> {
    let (normal, unknown, control, byte) = (1, 2, 3, 6);
    let piece = |text: String, score: f32, kind: i32| Piece {
        piece: Some(text),
        score: Some(score),
        kind: Some(kind),
    };
    let special = SPECIAL
        .iter()
        .enumerate()
        .map(|(id, text)| piece((*text).to_owned(), 0.0, if id == UNKNOWN { unknown } else { control }));
    let bytes = (0..256).map(|value| piece(format!("<0x{value:02X}>"), 0.0, byte));
    let normal = pieces.iter().map(|(text, score)| piece(text.clone(), *score, normal));
    let pieces: Vec<Piece> = special.chain(bytes).chain(normal).collect();
    let [pad_piece, unk_piece, bos_piece, eos_piece] = SPECIAL.map(|text| Some(text.to_owned()));
    let model = Model {
        trainer: Some(Trainer {
            model_type: Some(model_type),
            vocab_size: Some(pieces.len() as i32),
            character_coverage: Some(options.character_coverage as f32),
            byte_fallback: Some(true),
            pad_id: Some(0),
            unk_id: Some(1),
            bos_id: Some(2),
            eos_id: Some(3),
            pad_piece,
            unk_piece,
            bos_piece,
            eos_piece,
        }),
        normalizer: Some(Normalizer {
            name: Some("identity".to_owned()),
            add_dummy_prefix: Some(true),
            remove_extra_whitespaces: Some(false),
            escape_whitespaces: Some(true),
        }),
        pieces,
    };
    model.encode_to_vec()
}
