//! SentencePiece and tiktoken, against what the reference libraries make of the same files
//! (`goldens/tokenizer_models/generate.py` and `goldens/generate_models.py`).

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mt_data::{DecodeStream, SpecialTokens, Tokenizer, TokenizerKind};
use serde_json::{Map, Value, json};

fn goldens(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(name)
}

fn read(name: &str) -> Value {
    serde_json::from_slice(&fs::read(goldens(name)).unwrap()).unwrap()
}

fn parse<T: serde::de::DeserializeOwned>(value: &Value) -> T {
    serde_json::from_value(value.clone()).unwrap()
}

/// Encodes, decodes whole and as a stream, and counts bytes.
fn check_text(tokenizer: &Arc<Tokenizer>, text: &str, ids: &[u32], decoded: &str) {
    let name = tokenizer.name();
    assert_eq!(tokenizer.encode(text, false, false).unwrap(), ids, "{name}: {text:?}");
    assert_eq!(tokenizer.decode(ids, true).unwrap(), decoded, "{name}: {text:?}");
    let document = tokenizer.encode_document(text, false, false).unwrap();
    assert!(document.tokens.iter().map(|id| *id as u32).eq(ids.iter().copied()), "{name}: {text:?}");
    if !ids.is_empty() {
        assert_eq!(document.bytes.iter().sum::<u32>() as usize, text.len(), "{name}: {text:?}");
    }
    check_stream(tokenizer, ids, decoded);
}

fn check_stream(tokenizer: &Arc<Tokenizer>, ids: &[u32], decoded: &str) {
    let mut stream = DecodeStream::new(tokenizer.clone(), true);
    let mut streamed: String = ids.iter().map(|id| stream.push(*id).unwrap()).collect();
    streamed.push_str(&stream.finish().unwrap());
    assert_eq!(streamed, decoded, "{}: {ids:?}", tokenizer.name());
}

#[test]
fn sentence_pieces_agree_with_the_reference() {
    let content = read("tokenizer_models/sentencepiece.json");
    let texts: Vec<String> = parse(&content["texts"]);
    for (name, expected) in content["models"].as_object().unwrap() {
        let path = goldens(&format!("tokenizer_models/{name}.model"));
        let tokenizer = Arc::new(Tokenizer::load_as(path, TokenizerKind::SentencePiece).unwrap());
        assert_eq!(tokenizer.vocab_size() as u64, expected["vocab_size"].as_u64().unwrap());
        let special = |role: &str| expected["special"][role].as_i64().and_then(|id| u32::try_from(id).ok());
        let special = SpecialTokens {
            bos: special("bos"),
            eos: special("eos"),
            pad: special("pad"),
            unk: special("unk"),
        };
        assert_eq!(*tokenizer.special(), special, "{name}");
        for (index, (text, ids)) in texts.iter().zip(parse::<Vec<Vec<u32>>>(&expected["ids"])).enumerate() {
            let decoded = expected["texts"][index.to_string()].as_str().unwrap_or(text);
            check_text(&tokenizer, text, &ids, decoded);
        }
        check_sequences(&tokenizer, &expected["sequences"]);
    }
}

fn check_sequences(tokenizer: &Arc<Tokenizer>, sequences: &Value) {
    for sequence in sequences.as_array().unwrap() {
        let (ids, text): (Vec<u32>, &str) = (parse(&sequence["ids"]), sequence["text"].as_str().unwrap());
        assert_eq!(tokenizer.decode(&ids, true).unwrap(), text, "{}: {ids:?}", tokenizer.name());
        check_stream(tokenizer, &ids, text);
    }
}

/// Models with pieces that are not used, user-defined symbols that overlap, rules, and white space as a suffix.
#[test]
fn unusual_models_agree_with_the_reference() {
    let content = read("models/models.json");
    let texts: Vec<String> = parse(&content["texts"]);
    for (name, expected) in content["models"].as_object().unwrap() {
        let tokenizer = Arc::new(Tokenizer::load(goldens(&format!("models/{name}.model"))).unwrap());
        let [bos, eos, pad, unk] = parse(&expected["special"]);
        assert_eq!(*tokenizer.special(), SpecialTokens { bos, eos, pad, unk }, "{name}");
        let (ids, decoded): (Vec<Vec<u32>>, Vec<String>) =
            (parse(&expected["ids"]), parse(&expected["decoded"]));
        let ends: Option<Vec<Vec<u32>>> = parse(&expected["ends"]);
        for (index, text) in texts.iter().enumerate() {
            check_text(&tokenizer, text, &ids[index], &decoded[index]);
            let Some(ends) = ends.as_ref().map(|ends| &ends[index]).filter(|ends| !ends.is_empty()) else {
                continue;
            };
            let mut covered = 0;
            let bytes = tokenizer.encode_document(text, false, false).unwrap().bytes;
            let reached: Vec<u32> = bytes
                .iter()
                .map(|bytes| {
                    covered += bytes;
                    covered
                })
                .collect();
            let last = ends.len() - 1;
            assert_eq!(reached[..last], ends[..last], "{name}: {text:?}");
        }
        if let Some(expected) = parse::<Option<Vec<Vec<u32>>>>(&expected["with_special"]) {
            for (text, expected) in texts.iter().zip(expected) {
                assert_eq!(tokenizer.encode_with_special_tokens(text).unwrap(), expected, "{name}: {text:?}");
            }
        }
        let (rows, decoded): (Vec<Vec<u32>>, Vec<String>) =
            (parse(&expected["rows"]), parse(&expected["rows_decoded"]));
        for (ids, text) in rows.iter().zip(decoded) {
            assert_eq!(tokenizer.decode(ids, true).unwrap(), text, "{name}: {ids:?}");
            check_stream(&tokenizer, ids, &text);
        }
    }
}

#[test]
fn tiktoken_agrees_with_the_reference() {
    let content = read("tokenizer_models/tiktoken.json");
    let texts: Vec<String> = parse(&content["texts"]);
    for expected in content["encodings"].as_object().unwrap().values() {
        let directory = tempfile::tempdir().unwrap();
        let special = expected["special"].as_object().unwrap();
        let ranks = goldens("tokenizer_models").join(expected["ranks"].as_str().unwrap());
        fs::copy(ranks, directory.path().join("tokenizer.model")).unwrap();
        let added: Map<String, Value> = special
            .iter()
            .map(|(token, id)| (id.to_string(), json!({ "content": token, "special": true })))
            .collect();
        let config = json!({ "pat_str": expected["pattern"], "added_tokens_decoder": added });
        fs::write(directory.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        let tokenizer = Tokenizer::load_as(directory.path(), TokenizerKind::Tiktoken).unwrap();
        let tokenizer = Arc::new(tokenizer);
        assert_eq!(tokenizer.special().bos.map(u64::from), special["<|begin_of_text|>"].as_u64());
        assert_eq!(tokenizer.special().eos.map(u64::from), special["<|end_of_text|>"].as_u64());
        for (index, (text, ids)) in texts.iter().zip(parse::<Vec<Vec<u32>>>(&expected["ids"])).enumerate() {
            check_text(&tokenizer, text, &ids, text);
            let with_special: Option<Vec<u32>> = parse(&expected["ids_with_special"][index.to_string()]);
            let with_special = with_special.unwrap_or(ids);
            assert_eq!(tokenizer.encode_with_special_tokens(text).unwrap(), with_special, "{text:?}");
            assert_eq!(tokenizer.decode(&with_special, false).unwrap(), *text);
        }
        check_sequences(&tokenizer, &expected["sequences"]);
    }
}
