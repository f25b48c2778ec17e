use std::sync::Arc;

use mt_shape::{DType, HostArray};
use serde_json::{Value, json};

use super::*;
use crate::{Batch, BatchSource, NamedArray};

const LENGTH: usize = 5;
const TOP_K: usize = 3;
const VOCAB: usize = 11;

/// A batch of two rows, and its logits, which depend on the number.
fn batch(number: i32) -> (Batch, HostArray, HostArray) {
    let tokens = |offset: i32| -> Vec<i32> {
        (0..2 * LENGTH as i32).map(|index| (index + offset + number) % VOCAB as i32).collect()
    };
    let array = |dims: &[usize], values: &[i32]| HostArray::from_slice(DType::I32, dims, values).unwrap();
    let arrays = FEATURES.iter().enumerate().map(|(index, name)| {
        let values = Arc::new(array(&[2, LENGTH], &tokens(index as i32)));
        NamedArray { name, values }
    });
    let dims = [2, LENGTH, TOP_K];
    let count = 2 * LENGTH * TOP_K;
    let logits: Vec<f32> = (0..count).map(|index| number as f32 - (index % TOP_K) as f32 * 0.5).collect();
    let indices: Vec<i32> = (0..count as i32).map(|index| (index * 3 + number) % VOCAB as i32).collect();
    let batch = Batch { rows: 2, arrays: arrays.collect(), target_bytes: 0 };
    (batch, HostArray::from_slice(DType::F32, &dims, &logits).unwrap(), array(&dims, &indices))
}

fn identity() -> Value {
    json!({ "teacher": "a", "number of logits": TOP_K })
}

/// Writes the batches `from..to`; `finishes` tells whether the process ends well.
fn write(directory: &Path, to: i32, finishes: bool) -> u64 {
    let mut writer = LogitsWriter::open(directory, identity(), 2, json!(0)).unwrap();
    let from = writer.progress().full_batches;
    assert_eq!(writer.progress().position, json!(from));
    for number in from as i32..to {
        let (batch, logits, indices) = batch(number);
        writer.write(&batch, &logits, &indices, json!(number + 1)).unwrap();
    }
    if finishes {
        assert_eq!(writer.finish().unwrap().batches, to as u64);
    }
    from
}

fn contents(directory: &Path) -> Vec<(String, Vec<u8>)> {
    let files = files_in(directory).unwrap().into_iter();
    files
        .map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), fs::read(path).unwrap()))
        .collect()
}

fn options(batch_rows: usize) -> StoredLogitsOptions {
    StoredLogitsOptions {
        length: LENGTH,
        vocab_size: VOCAB,
        batch_rows,
        shuffle: false,
        seed: 3,
        num_epoch: Some(2),
    }
}

#[test]
fn killed_writers_go_on_and_rows_come_back() {
    let [whole, pieces] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    write(whole.path(), 5, true);
    // Killed in the second file, ended in the middle of the third one, and continued.
    assert_eq!(write(pieces.path(), 3, false), 0);
    assert_eq!(write(pieces.path(), 5, true), 2);
    let [expected, found] = [&whole, &pieces].map(|directory| contents(directory.path()));
    assert_eq!(expected, found);
    assert_eq!(found.len(), 3);
    assert_eq!(found[2].0, "teacher_top_k_part_00002_host_000.array_record");
    assert_eq!(write(pieces.path(), 6, true), 4);

    let stored = StoredLogits::open(pieces.path()).unwrap();
    assert_eq!((stored.shape(), stored.rows()), (LogitsShape { length: LENGTH, top_k: TOP_K }, 12));
    let mut seen = 0;
    stored.check(VOCAB, |done| seen = done).unwrap();
    assert_eq!(seen, 12);
    let mut source = StoredLogitsSource::open(pieces.path(), options(2)).unwrap();
    for number in [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5] {
        let (mut expected, logits, indices) = batch(number);
        expected.arrays.push(NamedArray { name: TOP_K_LOGITS, values: Arc::new(logits) });
        expected.arrays.push(NamedArray { name: TOP_K_INDICES, values: Arc::new(indices) });
        assert_eq!(source.next_batch().unwrap(), Some(expected));
    }
    assert_eq!(source.next_batch().unwrap(), None);
}

/// A file of MaxText's form, which `tests/goldens/stored_logits/generate.py` wrote with the package `array_record` and
/// protobuf's own library.
#[test]
fn files_of_other_programs_are_read() {
    let name = "teacher_top_k_part_00000_host_000.array_record";
    let golden = format!("{}/tests/goldens/stored_logits/{name}.zst", env!("CARGO_MANIFEST_DIR"));
    let bytes = zstd::decode_all(fs::File::open(golden).unwrap()).unwrap();
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join(name), bytes).unwrap();
    let stored = StoredLogits::open(directory.path()).unwrap();
    assert_eq!((stored.rows(), stored.shape()), (4, LogitsShape { length: LENGTH, top_k: TOP_K }));
    stored.check(VOCAB, |_| ()).unwrap();
    for number in 0..4 {
        let tokens: Vec<i32> = (0..=5).map(|place| (number * 3 + place) % VOCAB as i32).collect();
        let each = |value: &dyn Fn(i32, i32) -> f64| -> Vec<f64> {
            (0..5)
                .flat_map(|place| (0..3).map(move |k| (place, k)))
                .map(|(place, k)| value(place, k))
                .collect()
        };
        let logits = each(&|place, k| f64::from(number - place) + 0.5 - 0.25 * f64::from(k));
        let indices = each(&|place, k| f64::from((number + place + 4 * k) % VOCAB as i32));
        let expected = LogitsRow {
            integers: [
                tokens[..5].to_vec(),
                vec![0, 1, 2, 3, 4],
                vec![1; 5],
                tokens[1..].to_vec(),
                vec![0, 0, 1, 1, 1],
            ],
            logits: logits.iter().map(|value| *value as f32).collect(),
            indices: indices.iter().map(|value| *value as i32).collect(),
        };
        assert_eq!(stored.row(number as u64, VOCAB).unwrap(), expected);
    }
}

#[test]
fn positions_are_exact() {
    let directory = tempfile::tempdir().unwrap();
    write(directory.path(), 5, true);
    let shuffled = || {
        let options = StoredLogitsOptions { shuffle: true, num_epoch: None, ..options(3) };
        StoredLogitsSource::open(directory.path(), options).unwrap()
    };
    let mut source = shuffled();
    let mut rows = std::collections::BTreeMap::<String, usize>::new();
    for _ in 0..10 {
        let position = source.position();
        let next = source.next_batch().unwrap().unwrap();
        let mut again = shuffled();
        again.seek(&position).unwrap();
        assert_eq!(again.next_batch().unwrap().unwrap(), next);
        let values = next.array(TOP_K_LOGITS).unwrap().to_f64();
        let tokens = next.integers("inputs").chunks(LENGTH);
        for (tokens, logits) in tokens.zip(values.chunks(LENGTH * TOP_K)) {
            *rows.entry(format!("{tokens:?} {logits:?}")).or_default() += 1;
        }
    }
    // Thirty rows are three epochs of ten.
    assert_eq!(rows.values().copied().collect::<Vec<_>>(), [3; 10]);
    let position = source.position();
    let mut in_order = StoredLogitsSource::open(directory.path(), options(3)).unwrap();
    let error = in_order.seek(&position).unwrap_err().to_string();
    assert!(error.contains("the stored logits is") && error.contains("shuffled by 3"), "{error}");
}

#[test]
fn wrong_files_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let check = |parts: &[&str]| {
        let made = StoredLogitsSource::open(directory.path(), options(2));
        let error = made.and_then(|mut source| {
            while source.next_batch()?.is_some() {}
            source.stored.check(VOCAB, |_| ())
        });
        let error = error.unwrap_err();
        assert!(error.is_user_error(), "{error}");
        let text = error.to_string();
        assert!(parts.iter().all(|part| text.contains(part)), "{text} lacks {parts:?}");
    };
    check(&["has no file `*.array_record`", "hint: `maxtext data save-logits`"]);
    write(directory.path(), 2, true);
    let path = files_in(directory.path()).unwrap().remove(0);
    let whole = fs::read(&path).unwrap();
    fs::write(&path, &whole[..whole.len() - 1000]).unwrap();
    check(&["is damaged", "its writer was not finished, or it is cut"]);
    fs::write(&path, b"other").unwrap();
    check(&["is not an ArrayRecord file"]);
    let mut flipped = whole.clone();
    flipped[300] ^= 1;
    fs::write(&path, &flipped).unwrap();
    check(&["is damaged at byte"]);

    let with_records = |records: &[Vec<u8>]| {
        let mut writer = mt_array_record::Writer::create(&path, Default::default()).unwrap();
        records.iter().for_each(|record| writer.write(record).unwrap());
        writer.finish().unwrap();
    };
    with_records(&[]);
    check(&["its files hold no record"]);
    with_records(&[b"\x80\x04\x95 a pickled record".to_vec()]);
    check(&["record 1 of", "it is no `tf.train.Example`"]);
    let row = || -> LogitsRow {
        LogitsRow {
            integers: FEATURES.map(|_| vec![1; LENGTH]),
            logits: [3.0, 2.0, 1.0].repeat(LENGTH),
            indices: [4, 5, 6].repeat(LENGTH),
        }
    };
    let mut example = Example::default();
    example.set_integers("inputs", vec![1; LENGTH]);
    with_records(&[example.to_bytes()]);
    check(&["it lacks `inputs_position` and holds `inputs`"]);
    let two = |change: &dyn Fn(&mut LogitsRow)| {
        let mut second = row();
        change(&mut second);
        with_records(&[row().to_record(), second.to_record()]);
    };
    two(&|row| row.indices[2] = VOCAB as i32);
    check(&["record 2 of", "holds the token 11, but `vocab_size` is 11"]);
    two(&|row| row.logits[4] = f32::NAN);
    check(&["`top_k_logits` holds NaN"]);
    two(&|row| row.logits[4] = 9.0);
    check(&["the logits of position 1 are not in descending order"]);
    two(&|row| row.indices[4] = 4);
    check(&["position 1 has two logits of one token"]);
    two(&|row| row.integers[3].truncate(2));
    check(&["`targets` has 2 elements, but `inputs` has 5"]);
    two(&|row| {
        row.logits.truncate(2 * LENGTH);
        row.indices.truncate(2 * LENGTH);
    });
    check(&["5 positions with 2 logits each, but the first record has 5 with 3"]);

    write_refuses(directory.path());
}

fn write_refuses(directory: &Path) {
    let fails =
        |identity: Value| LogitsWriter::open(directory, identity, 2, json!(0)).err().unwrap().to_string();
    let other = fails(json!({ "teacher": "b", "number of logits": TOP_K }));
    assert!(other.contains("holds logits with another teacher: `\"a\"`, which now is `\"b\"`"), "{other}");
    fs::write(directory.join("teacher_top_k.json"), "{").unwrap();
    assert!(fails(identity()).contains("it is damaged"));
    fs::remove_file(directory.join("teacher_top_k.json")).unwrap();
    assert!(fails(identity()).contains("but not `teacher_top_k.json`"));
}
