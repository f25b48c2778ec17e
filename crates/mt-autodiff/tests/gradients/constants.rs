//! Constants and conversions: the printed text denotes the exact value.

use mt_shape::{Axis, DType, HostArray, axis};
use mt_trace::{Region, Tensor, program};

use crate::harness::{COMPUTED, Compiled, array, options};

const A: Axis = axis("a", 2);
const B: Axis = axis("b", 3);
const ONE: Axis = axis("one", 1);
const NONE: Axis = axis("none", 0);

#[track_caller]
fn check(name: &str, expected: Vec<HostArray>, code: impl for<'t> FnOnce(Region<'t>) -> Vec<Tensor<'t>>) {
    let program = program(&options(name), |inputs| {
        let tensors = code(inputs.region());
        tensors.iter().map(|tensor| inputs.replicated(name, *tensor)).collect()
    });
    let actual = Compiled::new(program.unwrap()).run(&[]);
    assert_eq!(actual.len(), expected.len());
    for (index, (actual, expected)) in actual.iter().zip(&expected).enumerate() {
        // Compares bits, so zeros have signs and NaN equals itself.
        let same = (actual.dtype(), actual.dims(), actual.bytes());
        assert_eq!(same, (expected.dtype(), expected.dims(), expected.bytes()), "result {index} of `{name}`");
    }
}

/// The largest and smallest numbers of a type, and other special values.
fn samples(dtype: DType) -> [f64; 6] {
    let bits = 8 * dtype.byte_size() as i32;
    match dtype {
        DType::Bool => [0.0, 1.0, 1.0, 0.0, 1.0, 0.0],
        _ if dtype.is_float() => [-0.0, 0.1, f64::INFINITY, -1.0, 1.0 / 3.0, 6e-5],
        _ if dtype.is_unsigned() => [0.0, 1.0, 2.0_f64.powi(bits - 1), 2.0_f64.powi(bits - 2), 7.0, 100.0],
        _ => [-(2.0_f64.powi(bits - 1)), -1.0, 0.0, 2.0_f64.powi(bits - 2), 7.0, 100.0],
    }
}

#[test]
fn tables_of_every_type_and_shape() {
    let shapes: [&[Axis]; 6] = [&[A, B], &[B, ONE, A], &[axis("six", 6)], &[ONE], &[], &[A, NONE]];
    let mut all = Vec::new();
    for dtype in COMPUTED {
        for axes in shapes {
            let dims: Vec<usize> = axes.iter().map(|axis| axis.size).collect();
            all.push((array(dtype, &dims, &samples(dtype)[..dims.iter().product()]), axes));
        }
    }
    let expected = all.iter().map(|(table, _)| table.clone()).collect();
    check("tables", expected, |region| {
        all.iter().map(|(table, axes)| region.table(table.clone(), axes)).collect()
    });
}

#[test]
fn splats_of_every_type() {
    let values = |dtype: DType| -> Vec<f64> {
        let mut values = samples(dtype).to_vec();
        if dtype.is_float() {
            // Numbers without a short decimal form, the smallest ones, and numbers that round to infinity in narrow
            // types.
            values.extend([
                -f64::INFINITY,
                f64::NAN,
                1e-45,
                5e-324,
                3.402_823_4e38,
                16_777_217.0,
                1e300,
                7.038_531e-26,
            ]);
        }
        values
    };
    let mut expected = Vec::new();
    for dtype in COMPUTED {
        expected.extend(values(dtype).iter().map(|value| array(dtype, &[2, 3], &[*value; 6])));
        expected.push(array(dtype, &[0, 2], &[]));
    }
    check("splats", expected, |region| {
        let mut tensors = Vec::new();
        for dtype in COMPUTED {
            tensors.extend(values(dtype).iter().map(|value| region.full(dtype, &[A, B], *value)));
            tensors.push(region.full(dtype, &[NONE, A], 1.0));
        }
        tensors
    });
}

#[test]
fn integers_are_exact() {
    let signed = [i64::MIN, i64::MAX, -1, 0, (1 << 53) + 1];
    let mut expected: Vec<HostArray> =
        signed.iter().map(|value| HostArray::from_slice(DType::I64, &[], &[*value]).unwrap()).collect();
    let unsigned = signed.map(i64::cast_unsigned);
    expected.extend(unsigned.iter().map(|value| HostArray::from_slice(DType::U64, &[], &[*value]).unwrap()));
    check("integers", expected, |region| {
        let all = [DType::I64, DType::U64].into_iter().flat_map(|dtype| signed.map(|value| (dtype, value)));
        all.map(|(dtype, value)| region.integer(dtype, value)).collect()
    });
}

#[test]
fn counting_up() {
    let types = COMPUTED.into_iter().filter(|dtype| *dtype != DType::Bool);
    let expected = types.clone().map(|dtype| array(dtype, &[3], &[0.0, 1.0, 2.0])).collect();
    check("iota", expected, |region| types.map(|dtype| region.iota(dtype, B)).collect());
}

/// Every type to every other, and bit casts to types of the same size.
#[test]
fn conversions() {
    let values = [0.0, 1.0, 3.0];
    let mut expected = Vec::new();
    for from in COMPUTED {
        let held = array(from, &[3], &values).to_f64();
        expected.extend(COMPUTED.iter().map(|to| array(*to, &[3], &held)));
    }
    for from in COMPUTED {
        let same_size =
            COMPUTED.iter().filter(|to| to.byte_size() == from.byte_size() && **to != DType::Bool);
        let bits = array(from, &[3], &values);
        let same_size = same_size.filter(|_| from != DType::Bool);
        expected.extend(same_size.map(|to| HostArray::from_bytes(*to, &[3], bits.bytes()).unwrap()));
    }
    check("conversions", expected, |region| {
        let table = |dtype: DType| region.table(array(dtype, &[3], &values), &[B]);
        let mut tensors = Vec::new();
        for from in COMPUTED {
            tensors.extend(COMPUTED.iter().map(|to| table(from).cast(*to)));
        }
        for from in COMPUTED.into_iter().filter(|from| *from != DType::Bool) {
            let same_size =
                COMPUTED.iter().filter(|to| to.byte_size() == from.byte_size() && **to != DType::Bool);
            tensors.extend(same_size.map(|to| table(from).bitcast(*to)));
        }
        tensors
    });
}

#[test]
fn integer_arithmetic() {
    let (x, y) = ([7.0, 2.0, 100.0], [3.0, 5.0, 7.0]);
    let types: Vec<DType> = COMPUTED.into_iter().filter(|dtype| dtype.is_integer()).collect();
    type Binary = (fn(f64, f64) -> f64, for<'t> fn(Tensor<'t>, Tensor<'t>) -> Tensor<'t>);
    let binary: [Binary; 11] = [
        (|x, y| x + y, |x, y| x + y),
        (|x, y| x.max(y) - x.min(y), |x, y| x.maximum(y) - x.minimum(y)),
        (|x, y| x.max(y) * 1.0, |x, y| x.maximum(y) * 1.0),
        (|x, y| (x / y).floor(), |x, y| x / y),
        (|x, y| x % y, |x, y| x.remainder(y)),
        (|x, y| f64::from(x as u32 & y as u32), |x, y| x.logical_and(y)),
        (|x, y| f64::from(x as u32 | y as u32), |x, y| x.logical_or(y)),
        (|x, y| f64::from(x as u32 ^ y as u32), |x, y| x.logical_xor(y)),
        (|x, _| f64::from(x as u32 >> 1), |x, _| x.shift_right(1.0)),
        (|_, y| f64::from((y as u32) << 2), |_, y| y.shift_left(2.0)),
        (|x, y| if x < y { x } else { y }, |x, y| x.less(y).select(x, y)),
    ];
    let mut expected = Vec::new();
    for dtype in &types {
        for (reference, _) in binary {
            let values: Vec<f64> = x.iter().zip(y).map(|(x, y)| reference(*x, y)).collect();
            expected.push(array(*dtype, &[3], &values));
        }
    }
    check("arithmetic", expected, |region| {
        let mut tensors = Vec::new();
        for dtype in &types {
            let [x, y] = [x, y].map(|values| region.table(array(*dtype, &[3], &values), &[B]));
            tensors.extend(binary.iter().map(|(_, function)| function(x, y)));
        }
        tensors
    });
}
