//! The effects of dropout.

use mt_nn::{
    Dropout, SequenceOrder,
    attention::{Additions, KeysValues, dense},
    axes::{BATCH, EMBED, GROUP, HEAD_DIM, KV_HEADS, KV_POSITION, POSITION, VALUE_DIM},
    dropout,
};
use mt_shape::{Axis, DType, axis};

use crate::harness::{CAUSAL_ATTENTION, run};

const SIZE: usize = 20_000;

#[test]
fn a_share_of_elements_is_dropped_and_the_mean_stays() {
    let results = run("dropout", &[], |region, _| {
        let x = region.full(DType::F32, &[axis(EMBED, SIZE)], 2.0);
        let key = region.key(5);
        let on = Dropout::On { rate: 0.25, key, order: SequenceOrder::AsRead };
        vec![
            dropout(x, 0.25, key, SequenceOrder::AsRead),
            on.apply("one", x),
            on.apply("two", x),
            on.apply("one", x),
            Dropout::Off.apply("one", x),
        ]
    });
    let values: Vec<Vec<f64>> = results.iter().map(|result| result.to_f64()).collect();
    for dropped in &values[..4] {
        let kept = dropped.iter().filter(|value| **value != 0.0).count();
        assert!(dropped.iter().all(|value| *value == 0.0 || (*value - 2.0 / 0.75).abs() < 1e-6));
        // Four standard deviations of a binomial distribution.
        let deviation = (SIZE as f64 * 0.25 * 0.75).sqrt();
        assert!((kept as f64 - SIZE as f64 * 0.75).abs() < 4.0 * deviation, "{kept}");
    }
    assert_ne!(values[1], values[2], "sites draw differently");
    assert_eq!(values[1], values[3], "a site draws the same again");
    assert!(values[4].iter().all(|value| *value == 2.0));
}

#[test]
fn a_share_of_attention_weights_is_dropped() {
    const KEYS: usize = 1000;
    let results = run("weights", &[], |region, _| {
        let (keys, width) = (axis(KV_POSITION, KEYS), axis(VALUE_DIM, KEYS));
        let (batch, heads, head_dim) = (axis(BATCH, 1), axis(KV_HEADS, 1), axis(HEAD_DIM, 4));
        let zeros = |axes: &[Axis]| region.full(DType::F32, axes, 0.0);
        let query = zeros(&[batch, axis(POSITION, 1), heads, axis(GROUP, 1), head_dim]);
        let of_values = [batch, keys, heads, width];
        let number = |axis| region.iota(DType::I32, axis).broadcast(&of_values);
        // Each value marks its key, so that the context is the weights.
        let value = number(keys).equals(number(width)).cast(DType::F32);
        let mask = zeros(&[batch, axis(POSITION, 1), keys]).equals(0.0);
        let attend = |dropout| {
            let keys_values = KeysValues { key: zeros(&[batch, keys, heads, head_dim]), value };
            let additions = Additions { dropout, ..Additions::default() };
            dense(query, keys_values, mask, additions, &CAUSAL_ATTENTION, false).context
        };
        let on = Dropout::On { rate: 0.25, key: region.key(5), order: SequenceOrder::AsRead };
        vec![attend(on), attend(on.within("cross_attention")), attend(Dropout::Off)]
    });
    let values: Vec<Vec<f64>> = results.iter().map(|result| result.to_f64()).collect();
    let weight = 1.0 / KEYS as f64;
    for dropped in &values[..2] {
        let kept = dropped.iter().filter(|value| **value != 0.0).count();
        assert!(dropped.iter().all(|one| *one == 0.0 || (one / weight - 1.0 / 0.75).abs() < 1e-5));
        let deviation = (KEYS as f64 * 0.25 * 0.75).sqrt();
        assert!((kept as f64 - KEYS as f64 * 0.75).abs() < 4.0 * deviation, "{kept}");
    }
    assert_ne!(values[0], values[1], "self-attention and cross-attention draw differently");
    assert!(values[2].iter().all(|one| (one / weight - 1.0).abs() < 1e-5));
}

#[test]
fn the_same_tokens_are_dropped_in_every_order() {
    const LENGTH: usize = 24;
    let results = run("ordered", &[], |region, _| {
        let x = region.full(DType::F32, &[axis(POSITION, LENGTH), axis(EMBED, 5)], 1.0);
        let drop = |order| dropout(x, 0.5, region.key(5), order);
        let paired = SequenceOrder::Paired { shards: 3 };
        let as_read = drop(SequenceOrder::AsRead);
        let indices = region.iota(DType::I32, axis(POSITION, LENGTH));
        vec![
            as_read,
            paired.read(drop(paired), POSITION),
            paired.store(as_read, POSITION),
            drop(paired),
            paired.places(indices, LENGTH),
        ]
    });
    assert_eq!(results[0], results[1]);
    assert_eq!(results[2], results[3]);
    assert_ne!(results[0], results[2]);
    let places: Vec<f64> =
        (0..LENGTH).map(|index| SequenceOrder::Paired { shards: 3 }.place(index, LENGTH) as f64).collect();
    assert_eq!(results[4].to_f64(), places);
}
