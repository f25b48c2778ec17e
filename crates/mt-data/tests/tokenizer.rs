//! Tokenizers: round trips, training, saving, and detection of their kinds.

use std::path::Path;
use std::sync::Arc;

use mt_data::{
    BYTE_LEVEL_SPECIAL_TOKENS, DecodeStream, SpecialTokens, TOKENIZER_FILE, Tokenizer, Watch, train_bpe,
};
use proptest::prelude::*;

const TEXT: &str =
    "Grüße, Jürgen ❤ — 漢字かな交じり文 👩‍👩‍👧‍👦 naïve\n\tfn main() { println!(\"hi\"); }\r\n  \u{fffd} end";

fn corpus() -> Vec<String> {
    let words =
        ["train", "model", "token", "batch", "fn", "let", "the", "of", "naïve", "漢字", "::", "()", "42"];
    (0..300)
        .map(|n| (0..40).map(|k| words[(n * 7 + k * k) % words.len()]).collect::<Vec<_>>().join(" "))
        .collect()
}

fn train(documents: &[String], vocab_size: usize) -> Tokenizer {
    train_bpe(documents.iter().cloned().map(Ok), vocab_size, &BYTE_LEVEL_SPECIAL_TOKENS, Watch::silent())
        .unwrap()
}

fn saved(tokenizer: &Tokenizer) -> Vec<u8> {
    let directory = tempfile::tempdir().unwrap();
    tokenizer.save(directory.path()).unwrap();
    std::fs::read(directory.path().join(TOKENIZER_FILE)).unwrap()
}

fn stream(tokenizer: &Arc<Tokenizer>, ids: &[u32]) -> Vec<String> {
    let mut stream = DecodeStream::new(tokenizer.clone(), true);
    let mut pieces: Vec<String> = ids.iter().map(|id| stream.push(*id).unwrap()).collect();
    pieces.push(stream.finish().unwrap());
    pieces
}

#[test]
fn byte_tokenizer_is_what_it_says() {
    let tokenizer = Tokenizer::bytes();
    let special = SpecialTokens { bos: Some(1), eos: Some(2), pad: Some(0), unk: None };
    assert_eq!((tokenizer.vocab_size(), tokenizer.special(), tokenizer.pad_id()), (259, &special, 0));
    let expected: Vec<u32> = TEXT.bytes().map(|byte| u32::from(byte) + 3).collect();
    assert_eq!(tokenizer.encode(TEXT, false, false).unwrap(), expected);
    let ids = tokenizer.encode(TEXT, true, true).unwrap();
    assert_eq!((ids[0], ids[ids.len() - 1], ids.len()), (1, 2, expected.len() + 2));
    assert_eq!(tokenizer.decode(&ids, true).unwrap(), TEXT);
    assert_eq!(tokenizer.decode(&[1, 100, 2], false).unwrap(), "<|begin_of_text|>a<|end_of_text|>");
    let every_byte: Vec<u32> = (3..259).collect();
    assert_eq!(
        tokenizer.decode(&every_byte[..128], true).unwrap(),
        (0u8..128).map(char::from).collect::<String>()
    );
    let error = tokenizer.decode(&[259], true).unwrap_err();
    assert_eq!(error.to_string(), "the tokenizer `byte` has no token 259; its ids end at 258");
    tokenizer.check_vocab_size(259).unwrap();
    let error = tokenizer.check_vocab_size(256).unwrap_err();
    assert!(error.is_user_error());
    assert!(
        error
            .to_string()
            .contains("`byte` has 259 tokens, more than the model's `vocab_size` of 256\nhint: ")
    );
}

#[test]
fn a_kind_and_a_path_name_a_tokenizer() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    assert_eq!(Tokenizer::open(Some("byte"), None).unwrap().vocab_size(), 259);
    train(&corpus(), 300).save(path).unwrap();
    for kind in [None, Some("huggingface")] {
        assert_eq!(Tokenizer::open(kind, Some(path)).unwrap().vocab_size(), 300, "{kind:?}");
    }
    let refuse = |kind: Option<&str>, path: Option<&Path>, expected: &str| {
        let error = Tokenizer::open(kind, path).unwrap_err();
        assert!(error.is_user_error() && error.to_string().contains(expected), "{error}");
    };
    refuse(
        Some("byte"),
        Some(path),
        "`tokenizer_type` is `byte`, which has no file, but `tokenizer_path` is",
    );
    refuse(Some("sentencepiece"), Some(path), "hint: use `tokenizer_type=huggingface`");
    refuse(Some("bytes"), Some(path), "`bytes` is no kind of tokenizer");
    for kind in [None, Some("huggingface")] {
        refuse(kind, None, "no key names the tokenizer");
    }
}

#[test]
fn training_is_deterministic_and_compresses() {
    let documents = corpus();
    let tokenizer = train(&documents, 400);
    let file = saved(&tokenizer);
    for _ in 0..5 {
        assert!(saved(&train(&documents, 400)) == file, "the same documents give another file");
    }
    let one_thread = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    assert!(one_thread.install(|| saved(&train(&documents, 400))) == file);
    let text = &documents[0];
    let ids = tokenizer.encode(text, false, false).unwrap();
    assert!(ids.len() * 3 < text.len(), "{} tokens for {} bytes", ids.len(), text.len());
    assert_eq!(tokenizer.decode(&ids, true).unwrap(), *text);
    assert_eq!(tokenizer.special().eos, Some(2));
    assert!(tokenizer.vocab_size() > 259 && tokenizer.vocab_size() <= 400);
    assert_eq!(tokenizer.token(2).unwrap(), "<|end_of_text|>");
    assert_eq!(tokenizer.token_id("Ġtoken").map(|id| tokenizer.token(id).unwrap()), Some("Ġtoken".into()));
    assert_ne!(tokenizer.fingerprint(), train(&documents, 300).fingerprint());
}

#[test]
fn merges_go_by_frequency_then_by_id() {
    let tokenizer =
        train_bpe(["ab ab ab cd cd cd xy"].map(|text| Ok(text.to_string())), 261, &[], Watch::silent())
            .unwrap();
    // ` c`, `cd` and `ab` occur three times, and the smallest ids win; ` ab` occurs twice; ` xy` occurs once and is not
    // merged.
    let learnt: Vec<String> = (256..260).map(|id| tokenizer.token(id).unwrap()).collect();
    assert_eq!(learnt, ["Ġc", "ab", "Ġcd", "Ġab"]);
    assert_eq!(tokenizer.vocab_size(), 260);
}

#[test]
fn impossible_training_is_explained() {
    let error =
        train_bpe([Ok("text".to_string())], 258, &BYTE_LEVEL_SPECIAL_TOKENS, Watch::silent()).unwrap_err();
    assert!(error.is_user_error());
    assert!(error.to_string().contains("`vocab_size=258` is too small") && error.to_string().contains("259"));
    let error = train_bpe([Ok(String::new())], 300, &[], Watch::silent()).unwrap_err();
    assert_eq!(error.to_string(), "cannot train a tokenizer: the documents hold no text");
}

#[test]
fn saved_tokenizers_are_the_same_when_loaded() {
    for tokenizer in [Tokenizer::bytes(), train(&corpus(), 350)] {
        let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        tokenizer.save(one.path()).unwrap();
        let loaded = Tokenizer::load(one.path()).unwrap();
        assert_eq!(loaded.special(), tokenizer.special());
        assert_eq!(loaded.fingerprint(), tokenizer.fingerprint());
        assert_eq!(loaded.encode(TEXT, true, true).unwrap(), tokenizer.encode(TEXT, true, true).unwrap());
        let again = Tokenizer::load(one.path().join(TOKENIZER_FILE)).unwrap();
        again.save(two.path()).unwrap();
        for name in ["tokenizer.json", "tokenizer_config.json"] {
            assert_eq!(
                std::fs::read(one.path().join(name)).unwrap(),
                std::fs::read(two.path().join(name)).unwrap()
            );
        }
    }
}

#[test]
fn special_tokens_come_from_the_files_beside() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let tokens = ["<unk>", "<s>", "</s>", "<|im_end|>"];
    let tokenizer = train_bpe(corpus().into_iter().map(Ok), 300, &tokens, Watch::silent()).unwrap();
    std::fs::write(path.join(TOKENIZER_FILE), saved(&tokenizer)).unwrap();
    let check = |bos, eos, pad, unk| {
        assert_eq!(*Tokenizer::load(path).unwrap().special(), SpecialTokens { bos, eos, pad, unk });
    };
    check(Some(1), Some(2), None, Some(0));
    std::fs::write(
        path.join("special_tokens_map.json"),
        r#"{"eos_token": "<|im_end|>", "pad_token": "</s>"}"#,
    )
    .unwrap();
    check(None, Some(3), Some(2), None);
    let config =
        r#"{"bos_token": null, "eos_token": {"content": "</s>", "lstrip": false}, "model_max_length": 8}"#;
    std::fs::write(path.join("tokenizer_config.json"), config).unwrap();
    check(None, Some(2), None, None);
    std::fs::write(path.join("tokenizer_config.json"), r#"{"model_max_length": 8}"#).unwrap();
    check(None, Some(3), Some(2), None);
    std::fs::write(path.join("tokenizer_config.json"), r#"{"eos_token": "<gone>"}"#).unwrap();
    let error = Tokenizer::load(path).unwrap_err();
    assert!(error.to_string().contains("its `eos_token` `<gone>` is not in the vocabulary"), "{error}");
    std::fs::write(path.join("tokenizer_config.json"), "{").unwrap();
    assert!(Tokenizer::load(path).unwrap_err().is_user_error());
}

#[test]
fn unreadable_tokenizers_are_explained() {
    let directory = tempfile::tempdir().unwrap();
    let check = |path: &Path, expected: &[&str]| {
        let error = Tokenizer::load(path).unwrap_err();
        for fragment in expected {
            assert!(
                error.is_user_error() && error.to_string().contains(fragment),
                "`{fragment}` is not in: {error}"
            );
        }
    };
    check(directory.path(), &["tokenizer.json`: there is no such file\nhint: the directory must hold"]);
    check(&directory.path().join("my.json"), &["my.json`: there is no such file", "maxtext tokenizer train"]);
    let path = directory.path().join("tokenizer.model");
    std::fs::write(&path, "just\ntext").unwrap();
    check(
        &path,
        &["tokenizer.model`: it has none of the known formats\nhint: a Hugging Face `tokenizer.json` starts"],
    );
    std::fs::write(&path, [0x0a, 0x0e, 0x0a, 0x05]).unwrap();
    check(&path, &["tokenizer.model`: the file ends too early"]);
    std::fs::write(&path, "{\"version\": \"1.0\"}").unwrap();
    check(&path, &["cannot read the tokenizer"]);
}

#[test]
fn stored_truncation_and_padding_are_not_applied() {
    let directory = tempfile::tempdir().unwrap();
    let text = String::from_utf8(saved(&Tokenizer::bytes())).unwrap();
    let limited = text
        .replace(
            "\"truncation\": null",
            r#""truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}"#,
        )
        .replace(
            "\"padding\": null",
            r#""padding": {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0, "pad_token": "<|pad|>"}"#,
        );
    assert_ne!(text, limited);
    std::fs::write(directory.path().join(TOKENIZER_FILE), limited).unwrap();
    let tokenizer = Tokenizer::load(directory.path()).unwrap();
    assert_eq!(tokenizer.encode("abcdef", false, false).unwrap().len(), 6);
    assert_eq!(tokenizer.encode("a", false, false).unwrap().len(), 1);
}

#[test]
fn streams_never_split_a_character() {
    for tokenizer in [Tokenizer::bytes(), train(&corpus(), 300)] {
        let tokenizer = Arc::new(tokenizer);
        let ids = tokenizer.encode(TEXT, true, true).unwrap();
        let pieces = stream(&tokenizer, &ids);
        assert_eq!(pieces.concat(), TEXT);
        let halves = pieces.iter().filter(|piece| piece.contains('\u{fffd}')).count();
        assert_eq!(halves, 1, "only the one that is in the text");
    }
    let tokenizer = Arc::new(Tokenizer::bytes());
    // Bytes that form no character are emitted when a character follows, or at the end.
    let pieces = stream(&tokenizer, &[0xe2 + 3, 0x82 + 3, u32::from(b'a') + 3, 0xf0 + 3]);
    assert_eq!(pieces, ["", "", "\u{fffd}a", "", "\u{fffd}"]);
    let mut stream = DecodeStream::new(tokenizer, true);
    assert!(stream.push(9999).is_err());
    assert_eq!(stream.push(u32::from(b'x') + 3).unwrap(), "x");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_text_comes_back(text in "\\PC{0,40}", raw in any::<String>()) {
        let tokenizer = Arc::new(Tokenizer::bytes());
        for text in [text, raw] {
            let ids = tokenizer.encode(&text, false, false).unwrap();
            prop_assert_eq!(&tokenizer.decode(&ids, true).unwrap(), &text);
            prop_assert_eq!(&stream(&tokenizer, &ids).concat(), &text);
            let document = tokenizer.encode_document(&text, true, true).unwrap();
            prop_assert_eq!(document.bytes.iter().sum::<u32>() as usize, text.len());
            prop_assert_eq!(document.bytes.len(), document.tokens.len());
            prop_assert_eq!(document.tokens.len(), ids.len() + 2);
        }
    }

    #[test]
    fn streamed_bytes_join_to_the_whole(ids in proptest::collection::vec(3u32..259, 0..40)) {
        let tokenizer = Arc::new(Tokenizer::bytes());
        prop_assert_eq!(stream(&tokenizer, &ids).concat(), tokenizer.decode(&ids, true).unwrap());
    }
}

#[test]
fn one_endless_word_is_learnt_and_encoded_in_pieces() {
    let word = "a".repeat(3 << 20);
    let tokenizer = train(std::slice::from_ref(&word), 275);
    // The merges are the powers of two, up to the longest word that is counted as one.
    let learnt: Vec<usize> =
        (259..tokenizer.vocab_size() as u32).map(|id| tokenizer.token(id).unwrap().len()).collect();
    assert_eq!(learnt, (1..15).map(|power| 1 << power).collect::<Vec<_>>());
    for tokenizer in [tokenizer, Tokenizer::bytes()] {
        let document = tokenizer.encode_document(&word, false, true).unwrap();
        let ids: Vec<u32> = document.tokens.iter().map(|id| *id as u32).collect();
        assert_eq!(document.bytes.iter().map(|bytes| *bytes as usize).sum::<usize>(), word.len());
        assert!(tokenizer.decode(&ids, true).unwrap() == word);
    }
}

/// Tokens that differ in case, accents, forms of characters or white space alone have one number.
#[test]
fn compressed_vocabularies_are_those_of_the_normalizers_in_python() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/compressed");
    let expected = std::fs::read_to_string(folder.join("numbers.json")).unwrap();
    let expected: Vec<i32> = serde_json::from_str(&expected).unwrap();
    let compressed = Tokenizer::load(folder.join("tokenizer.json")).unwrap().compressed().unwrap();
    assert_eq!(compressed.numbers, expected);
    assert_eq!(compressed.size as i32, expected.iter().max().unwrap() + 1);
    assert!(compressed.size < expected.len());
}

#[test]
fn tokenizers_of_one_size_are_told_apart() {
    let (own, same) = (train(&corpus(), 300), train(&corpus(), 300));
    own.check_same_numbers(&same).unwrap();
    // The first tokens of both are the bytes, and the longer one has more.
    own.check_same_numbers(&train(&corpus(), 310)).unwrap();
    own.check_same_numbers(&Tokenizer::bytes()).unwrap();
    let others: Vec<String> = (0..50).map(|n| format!("zebra quartz {n} vexing jumps")).collect();
    let error = own.check_same_numbers(&train(&others, 300)).unwrap_err();
    assert!(error.is_user_error());
    let text = error.to_string();
    assert!(text.contains("but") && text.contains("in that of the teacher or reference"), "{text}");
    assert!(text.contains("hint: use that tokenizer"), "{text}");
}
