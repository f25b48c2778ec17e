//! Files of the reference libraries, compared with the libraries' own reading of them (`goldens/generate.py`).

use std::path::{Path, PathBuf};
use std::sync::Arc;

use mt_data::{Dataset, DecodeStream, Source, Tokenizer};

fn goldens() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens")
}

#[test]
fn tokenizers_agree_with_the_reference() {
    let text = std::fs::read_to_string(goldens().join("tokenizers.json")).unwrap();
    let content: serde_json::Value = serde_json::from_str(&text).unwrap();
    let texts: Vec<String> = serde_json::from_value(content["texts"].clone()).unwrap();
    for (name, expected) in content["tokenizers"].as_object().unwrap() {
        let tokenizer = Arc::new(Tokenizer::load(goldens().join(format!("{name}.json"))).unwrap());
        let ids: Vec<Vec<u32>> = serde_json::from_value(expected["ids"].clone()).unwrap();
        let decoded: Vec<String> = serde_json::from_value(expected["texts"].clone()).unwrap();
        for ((text, ids), decoded) in texts.iter().zip(ids).zip(decoded) {
            assert_eq!(tokenizer.encode(text, false, false).unwrap(), ids, "{name}: {text:?}");
            assert_eq!(tokenizer.decode(&ids, true).unwrap(), decoded, "{name}: {text:?}");
            let document = tokenizer.encode_document(text, false, false).unwrap();
            assert!(document.tokens.iter().map(|id| *id as u32).eq(ids.iter().copied()));
            assert_eq!(document.bytes.iter().sum::<u32>() as usize, text.len(), "{name}: {text:?}");
            let mut stream = DecodeStream::new(tokenizer.clone(), true);
            let mut streamed: String = ids.iter().map(|id| stream.push(*id).unwrap()).collect();
            streamed.push_str(&stream.finish().unwrap());
            assert_eq!(streamed, decoded, "{name}: {text:?}");
        }
        assert!(tokenizer.special().bos.is_some() || name != "llama2");
    }
}

#[test]
fn parquet_files_of_the_reference_writer_are_read() {
    let expected: Vec<String> = (0..500)
        .map(|n| if n % 10 == 3 { String::new() } else { format!("row {} {}", n % 7, "é".repeat(n % 5)) })
        .collect();
    for codec in ["snappy", "zstd", "gzip", "lz4"] {
        for version in [1, 2] {
            let file = goldens().join(format!("{codec}_v{version}.parquet")).to_string_lossy().into_owned();
            for column in ["text", "large", "body.text"] {
                let source = Source::Parquet { files: vec![file.clone()], column: column.into() };
                let documents =
                    Dataset::open(&source).unwrap().documents().collect::<Result<Vec<_>, _>>().unwrap();
                assert!(documents == expected, "{file}, column {column}");
            }
            let source = |column: &str| Source::Parquet { files: vec![file.clone()], column: column.into() };
            let error = Dataset::open(&source("tags.list.element")).unwrap_err().to_string();
            assert!(error.contains("column `tags.list.element` holds lists, not text"), "{error}");
            let error = Dataset::open(&source("body")).unwrap_err().to_string();
            assert!(error.contains("it has `id`, `body.text`, `body.n`, `text`, `large`"), "{error}");
        }
    }
}
