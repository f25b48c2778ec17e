//! SentencePiece and tiktoken tokenizers compared with the reference libraries (`goldens/tokenizer_models/generate.py`
//! and `goldens/generate_models.py`).

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

/// Checks encoding, decoding at once and in a stream, and byte counts.
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

/// Models with unused pieces, overlapping user-defined symbols, replacement rules, and white space as a suffix.
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

#[test]
fn kinds_are_told_by_content_and_checked() {
    let directory = tempfile::tempdir().unwrap();
    let (path, model) = (directory.path(), directory.path().join("tokenizer.model"));
    let kind = |path: &Path| Tokenizer::load(path).unwrap().kind();
    let refuse = |path: &Path, kind, expected: &str| {
        let error = Tokenizer::load_as(path, kind).unwrap_err();
        assert!(error.is_user_error() && error.to_string().contains(expected), "{error}");
    };
    fs::copy(goldens("models/tiktoken.model"), &model).unwrap();
    assert_eq!(kind(path), TokenizerKind::Tiktoken);
    refuse(path, TokenizerKind::SentencePiece, "`tokenizer_type` is `sentencepiece`, but `");
    refuse(
        path,
        TokenizerKind::SentencePiece,
        "is a tiktoken file of ranks\nhint: use `tokenizer_type=tiktoken`",
    );
    fs::copy(goldens("models/bpe_llama2.model"), &model).unwrap();
    assert_eq!(kind(path), TokenizerKind::SentencePiece);
    refuse(path, TokenizerKind::Tiktoken, "tokenizer.model` is a SentencePiece model");
    refuse(&model, TokenizerKind::HuggingFace, "hint: use `tokenizer_type=sentencepiece`");
    // A Hugging Face directory may hold only this file. Its `tokenizer.json` takes precedence unless another kind is
    // requested.
    let load_as = |kind| Tokenizer::load_as(path, kind).unwrap().kind();
    assert_eq!(load_as(TokenizerKind::HuggingFace), TokenizerKind::SentencePiece);
    Tokenizer::bytes().save(path).unwrap();
    fs::remove_file(path.join("tokenizer_config.json")).unwrap();
    assert_eq!(kind(path), TokenizerKind::HuggingFace);
    assert_eq!(load_as(TokenizerKind::SentencePiece), TokenizerKind::SentencePiece);
    fs::remove_file(&model).unwrap();
    refuse(path, TokenizerKind::Tiktoken, "tokenizer.json` is a Hugging Face `tokenizer.json`");
}

#[test]
fn files_beside_a_model_are_read_and_saved() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let write = |name: &str, content: Value| fs::write(one.path().join(name), content.to_string()).unwrap();
    fs::copy(goldens("models/bpe_llama2.model"), one.path().join("tokenizer.model")).unwrap();
    let plain = Tokenizer::load(one.path()).unwrap();
    let size = plain.vocab_size() as u32;
    assert_eq!((plain.end_ids().iter().copied().collect::<Vec<_>>(), plain.adds_bos()), (vec![2], None));
    let added = json!({
        "2": { "content": "</s>", "special": true },
        (size.to_string()): { "content": "<|turn|>", "special": true },
    });
    write(
        "tokenizer_config.json",
        json!({ "add_bos_token": true, "eos_token": "<|turn|>", "bos_token": "<s>", "added_tokens_decoder": added }),
    );
    write("added_tokens.json", json!({ "<|turn|>": size, "<tool>": size + 1 }));
    write("config.json", json!({ "eos_token_id": 5 }));
    let check = |tokenizer: &Tokenizer, ends: &[u32]| {
        assert_eq!(tokenizer.vocab_size() as u32, size + 2);
        assert_eq!(tokenizer.special().eos, Some(size));
        assert_eq!(tokenizer.end_ids().iter().copied().collect::<Vec<_>>(), ends);
        assert_eq!((tokenizer.adds_bos(), tokenizer.adds_eos()), (Some(true), None));
        let (a, b) = (tokenizer.encode("in", false, false), tokenizer.encode("the", false, false));
        let expected = [vec![1], a.unwrap(), vec![size], b.unwrap(), vec![size + 1, 2]].concat();
        let text = "<s>in<|turn|>the<tool></s>";
        assert_eq!(tokenizer.encode_with_special_tokens(text).unwrap(), expected);
        assert_eq!(tokenizer.decode(&expected, true).unwrap(), "in the<tool>");
        assert_eq!(tokenizer.decode(&expected, false).unwrap(), "<s> in<|turn|> the<tool></s>");
        assert_eq!(tokenizer.token(size + 1).unwrap(), "<tool>");
        assert_eq!(tokenizer.token_id("<tool>"), Some(size + 1));
    };
    check(&Tokenizer::load(one.path()).unwrap(), &[5, size]);
    Tokenizer::load(one.path()).unwrap().save(two.path()).unwrap();
    check(&Tokenizer::load(two.path()).unwrap(), &[5, size]);
    write("generation_config.json", json!({ "eos_token_id": [7, 9] }));
    check(&Tokenizer::load(one.path()).unwrap(), &[7, 9, size]);
    write("generation_config.json", json!({ "eos_token_id": "</s>" }));
    let error = Tokenizer::load(one.path()).unwrap_err();
    assert!(
        error.to_string().contains("generation_config.json`: its `eos_token_id` holds `\"</s>\"`"),
        "{error}"
    );
    assert!(Tokenizer::is_saved_in(two.path()) && !Tokenizer::is_saved_in(&two.path().join("other")));
}

#[test]
fn a_tokenizer_file_says_what_it_adds() {
    let adds = |name: &str| {
        let tokenizer = Tokenizer::load(goldens(&format!("{name}.json"))).unwrap();
        (tokenizer.adds_bos(), tokenizer.adds_eos())
    };
    assert_eq!(adds("t5"), (Some(false), Some(false)));
    let directory = tempfile::tempdir().unwrap();
    fs::copy(goldens("llama3.json"), directory.path().join("tokenizer.json")).unwrap();
    fs::write(directory.path().join("special_tokens_map.json"), r#"{"bos_token": "<|bos|>"}"#).unwrap();
    assert_eq!(Tokenizer::load(directory.path()).unwrap().adds_bos(), Some(true));
    fs::write(directory.path().join("tokenizer_config.json"), r#"{"add_bos_token": false}"#).unwrap();
    assert_eq!(Tokenizer::load(directory.path()).unwrap().adds_bos(), Some(false));
}
