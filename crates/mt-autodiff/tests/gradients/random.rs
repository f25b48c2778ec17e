//! Random numbers: their distribution, and their dependence on the key alone.

use mt_shape::{Axis, DType, HostArray, axis};
use mt_trace::{Key, ScanOptions, Tensor, program};

use crate::harness::{Compiled, Leaf, array, column_axis, mesh, options, options_on, row_axis};

const MANY: Axis = axis("many", 1 << 16);
const ROWS: Axis = axis("rows", 8);
const COLUMNS: Axis = axis("columns", 6);

#[track_caller]
fn check_moments(
    name: &str,
    values: &HostArray,
    mean: f64,
    deviation: f64,
    bounds: std::ops::RangeInclusive<f64>,
) {
    let values = values.to_f64();
    let count = values.len() as f64;
    let actual_mean = values.iter().sum::<f64>() / count;
    let variance = values.iter().map(|value| (value - actual_mean).powi(2)).sum::<f64>() / count;
    // Five standard errors.
    assert!((actual_mean - mean).abs() < 5.0 * deviation / count.sqrt(), "mean of `{name}` is {actual_mean}");
    assert!(
        (variance.sqrt() - deviation).abs() < 0.02 * deviation,
        "deviation of `{name}` is {}",
        variance.sqrt()
    );
    assert!(values.iter().all(|value| bounds.contains(value)), "`{name}` leaves {bounds:?}");
}

#[test]
fn moments() {
    let program = program(&options("moments"), |inputs| {
        let key = inputs.region().key(7);
        let results = [
            ("uniform", key.uniform(&[MANY])),
            ("normal", key.fold_in_name("a").normal(&[MANY])),
            ("truncated", key.fold_in_name("b").truncated_normal(&[MANY])),
            ("bits", key.bits(&[MANY])),
        ];
        results.map(|(name, tensor)| inputs.replicated(name, tensor)).into()
    });
    let results = Compiled::new(program.unwrap()).run(&[]);
    check_moments("uniform", &results[0], 0.5, 1.0 / 12.0_f64.sqrt(), 0.0..=1.0 - 1e-8);
    check_moments("normal", &results[1], 0.0, 1.0, -6.0..=6.0);
    check_moments("truncated", &results[2], 0.0, 0.879_626, -2.0..=2.0);
    check_moments(
        "bits",
        &results[3],
        2.0_f64.powi(31),
        2.0_f64.powi(32) / 12.0_f64.sqrt(),
        0.0..=2.0_f64.powi(32),
    );
    // Adjacent numbers are uncorrelated, and so are those of different keys.
    let correlation =
        |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>() / x.len() as f64;
    let [normal, truncated] = [results[1].to_f64(), results[2].to_f64()];
    assert!(correlation(&normal[1..], &normal[..normal.len() - 1]).abs() < 0.02);
    assert!(correlation(&normal, &truncated).abs() < 0.02);
}

/// Keys that differ in anything, including the order of folding, draw different bits.
#[test]
fn keys_differ() {
    let program = program(&options("keys"), |inputs| {
        let seed = inputs.input("seed", DType::U64, &[], &[], false);
        let key = Key::new(seed);
        let integer = |value: i64| inputs.region().integer(DType::I32, value);
        let keys = [
            key,
            key.fold_in(integer(0)),
            key.fold_in(integer(1)),
            key.fold_in(integer(0)).fold_in(integer(1)),
            key.fold_in(integer(1)).fold_in(integer(0)),
            key.fold_in_name("a"),
            key.fold_in_name("b"),
            inputs.region().key(3),
            inputs.region().key(u64::MAX),
        ];
        let mut outputs: Vec<_> = keys.iter().map(|key| inputs.replicated("value", key.value())).collect();
        outputs.extend(keys.iter().map(|key| inputs.replicated("bits", key.bits(&[axis("two", 2)]))));
        outputs
    });
    let results = Compiled::new(program.unwrap()).run(&[array(DType::U64, &[], &[3.0])]);
    let (values, bits) = results.split_at(9);
    // The constant seed is the same as the argument.
    assert_eq!((&values[0], &bits[0]), (&values[7], &bits[7]));
    assert_eq!(values[8].as_slice::<u64>().unwrap(), [u64::MAX]);
    for first in 0..9 {
        for second in first + 1..9 {
            let same = (first, second) == (0, 7);
            assert_eq!(values[first] == values[second], same, "keys {first} and {second}");
            assert_eq!(bits[first] == bits[second], same, "bits of keys {first} and {second}");
        }
    }
}

/// Split keys are distinct from each other and from folded ones, and do not depend on their number.
#[test]
fn split_keys_differ_and_stay() {
    let program = program(&options("split"), |inputs| {
        let key = inputs.region().key(11);
        let folded = (0..4).map(|index| key.fold_in(inputs.region().integer(DType::I32, index)));
        let mut keys = key.split(6);
        keys.push(key);
        keys.extend(folded);
        keys.extend(key.split(3));
        keys.iter().map(|key| inputs.replicated("value", key.value())).collect()
    });
    let values = Compiled::new(program.unwrap()).run(&[]);
    let values: Vec<u64> = values.iter().map(|value| value.as_slice::<u64>().unwrap()[0]).collect();
    let distinct: std::collections::BTreeSet<u64> = values[..11].iter().copied().collect();
    assert_eq!(distinct.len(), 11, "{values:?}");
    assert_eq!(values[..3], values[11..]);
    // Random streams must not change from one version to the next.
    assert_eq!(values[..2], [11_169_227_059_624_890_280, 8_706_208_582_943_293_541]);
}

fn drawn<'t>(key: Key<'t>, layer: Tensor<'t>) -> Tensor<'t> {
    key.fold_in(layer).normal(&[ROWS, COLUMNS])
}

/// The same key gives the same bits in a scan, outside of it, and sharded over devices.
#[test]
fn bits_do_not_depend_on_where() {
    let layers = axis("layers", 3);
    let unrolled = program(&options("unrolled"), |inputs| {
        let region = inputs.region();
        let draw = |index| drawn(region.key(5), region.integer(DType::I32, index));
        (0..3).map(|index| inputs.replicated("drawn", draw(index))).collect()
    });
    let unrolled = Compiled::new(unrolled.unwrap()).run(&[]);
    for (name, placement) in [("scanned", mt_shape::Placement::single()), ("sharded", mesh())] {
        let scanned = program(&options_on(name, placement), |inputs| {
            let region = inputs.region();
            let key = region.key(5).value();
            let index = Leaf { value: region.iota(DType::I32, layers) };
            let ([], [drawn]) = region.scan(ScanOptions::over(layers), [], &index, |_, [], index| {
                ([], [drawn(Key::new(key), index.value).constrain(&[row_axis(), column_axis()])])
            });
            let placed = [None, row_axis(), column_axis()];
            vec![inputs.output("drawn", drawn, &placed)]
        });
        let scanned = Compiled::new(scanned.unwrap()).run(&[]);
        let all: Vec<u8> = unrolled.iter().flat_map(|array| array.bytes().to_vec()).collect();
        assert!(scanned[0].bytes() == all, "`{name}` draws other numbers");
    }
}
