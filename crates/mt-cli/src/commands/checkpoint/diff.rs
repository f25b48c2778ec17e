//! `maxtext checkpoint diff`.

use mt_checkpoint::{ListedDifference, ListedTensor, ListingDiff, ValueDifference, WeightsSource};
use serde_json::{Number, Value, json};

use super::{
    inspect::{shape, tensor_object},
    table::{Align, by_name, bytes, counted, lines},
};
use crate::{
    arguments::CheckpointDiff,
    commands::{largest, report_loaded},
    failure::{Failure, print},
};

/// The number of tensors listed per type of difference.
const SHOWN: usize = 20;

pub fn run(arguments: &CheckpointDiff) -> Result<(), Failure> {
    let (left, right) = (WeightsSource::open(&arguments.left)?, WeightsSource::open(&arguments.right)?);
    [&left, &right].into_iter().for_each(|source| report_loaded(source.skipped(), &[], None));
    let kinds_differ = left.listing()?.kind != right.listing()?.kind;
    let mut diff = ListingDiff::of(&left, &right, arguments.values)?;
    let of_name = |left: &ListedTensor, right: &ListedTensor| by_name(&left.name, &right.name);
    diff.only_left.sort_by(of_name);
    diff.only_right.sort_by(of_name);
    diff.shapes.sort_by(|one, other| of_name(&one.left, &other.left));
    diff.dtypes.sort_by(|one, other| of_name(&one.left, &other.left));
    diff.values.sort_by(|one, other| {
        let worst_first = other.max_absolute.total_cmp(&one.max_absolute);
        worst_first.then_with(|| by_name(&one.name, &other.name))
    });
    if arguments.json {
        return print(&format!("{:#}", object(&diff, arguments.values)));
    }
    print(&text(&diff, arguments.values, kinds_differ))
}

fn text(diff: &ListingDiff, with_values: bool, kinds_differ: bool) -> String {
    let mut text = Vec::new();
    for (side, tensors) in [("A", &diff.only_left), ("B", &diff.only_right)] {
        let rows = tensors.iter().map(|tensor| {
            vec![format!("  {}", tensor.name), tensor.dtype.to_string(), shape(tensor), bytes(tensor.bytes)]
        });
        let align = [Align::Left, Align::Left, Align::Left, Align::Right];
        section(&mut text, &format!("only in {side}"), &[], &align, rows.collect());
    }
    type Text = fn(&ListedTensor) -> String;
    let kinds: [(&str, &Vec<ListedDifference>, Text); 2] = [
        ("other shapes", &diff.shapes, shape),
        ("other types", &diff.dtypes, |tensor| tensor.dtype.to_string()),
    ];
    for (title, differences, of) in kinds {
        let rows = differences.iter().map(|ListedDifference { left, right }| {
            vec![format!("  {}", left.name), format!("{} → {}", of(left), of(right))]
        });
        section(&mut text, title, &[], &[Align::Left, Align::Left], rows.collect());
    }
    let rows = diff.values.iter().filter(|values| !values.is_equal()).map(|values| {
        vec![
            format!("  {}", values.name),
            format!("{} of {}", values.num_different, values.num_elements),
            format!("{:.3e}", values.max_absolute),
            format!("{:.3e}", values.max_relative),
        ]
    });
    let heading = ["  name", "elements", "max absolute", "max relative"];
    let align = [Align::Left, Align::Right, Align::Right, Align::Right];
    section(&mut text, "other values", &heading, &align, rows.collect());
    text.push(verdict(diff, with_values));
    if num_common(diff) == 0 && kinds_differ {
        text.push(
            "hint: the checkpoints have no name in common; `maxtext checkpoint export` converts to Hugging Face's names"
                .to_owned(),
        );
    }
    text.join("\n")
}

/// A title and a table, of which the first rows are shown.
fn section(text: &mut Vec<String>, title: &str, heading: &[&str], align: &[Align], rows: Vec<Vec<String>>) {
    if rows.is_empty() {
        return;
    }
    let hidden = rows.len().saturating_sub(SHOWN);
    text.push(format!("{title}:"));
    let heading = (!heading.is_empty()).then(|| heading.iter().map(|cell| (*cell).to_owned()).collect());
    let shown: Vec<Vec<String>> = heading.into_iter().chain(rows.into_iter().take(SHOWN)).collect();
    text.extend(lines(align, &shown));
    if hidden > 0 {
        text.push(format!("  … and {hidden} more; `--json` lists all"));
    }
    text.push(String::new());
}

/// The number of names in both checkpoints.
fn num_common(diff: &ListingDiff) -> usize {
    diff.num_same + diff.shapes.len() + diff.dtypes.len()
}

fn verdict(diff: &ListingDiff, with_values: bool) -> String {
    let common = counted(num_common(diff), "tensor");
    let (compared, equal) = (diff.values.len(), diff.num_equal());
    if diff.is_empty() {
        let alike = format!("{common} of the same names, shapes and types");
        return match (with_values, num_common(diff) - compared) {
            (false, _) => format!("alike: {alike}; `--values` compares values"),
            (true, 0) => format!("equal: {alike}, with the same values"),
            (true, unread) => {
                format!("alike: {alike}; {equal} have the same values, {unread} cannot be read")
            }
        };
    }
    let mut found: Vec<String> = [
        (diff.only_left.len(), "only in A"),
        (diff.only_right.len(), "only in B"),
        (diff.shapes.len(), "of another shape"),
        (diff.dtypes.len(), "of another type"),
    ]
    .into_iter()
    .filter(|(number, _)| *number > 0)
    .map(|(number, what)| format!("{number} {what}"))
    .collect();
    if with_values {
        let worst = largest(diff.values.iter().map(|values| values.max_absolute));
        let by = if compared > equal { format!(" (by up to {worst:.3e})") } else { String::new() };
        found.push(format!("{} of {compared} compared with other values{by}", compared - equal));
    }
    format!("different: {common} on both sides; {}", found.join(", "))
}

fn object(diff: &ListingDiff, with_values: bool) -> Value {
    let tensors = |tensors: &[ListedTensor]| tensors.iter().map(tensor_object).collect::<Vec<_>>();
    let shapes = diff.shapes.iter().map(
        |ListedDifference { left, right }| json!({ "name": left.name, "a": left.dims, "b": right.dims }),
    );
    let dtypes = diff.dtypes.iter().map(|ListedDifference { left, right }| {
        json!({ "name": left.name, "a": left.dtype.to_string(), "b": right.dtype.to_string() })
    });
    let mut object = json!({
        "equal": diff.is_empty(),
        "verdict": verdict(diff, with_values),
        "num_same": diff.num_same,
        "only_a": tensors(&diff.only_left),
        "only_b": tensors(&diff.only_right),
        "shapes": shapes.collect::<Vec<_>>(),
        "dtypes": dtypes.collect::<Vec<_>>(),
    });
    if with_values {
        object["values"] = diff.values.iter().map(value_object).collect();
    }
    object
}

/// The differences as JSON. JSON has no infinite numbers, so those become strings.
fn value_object(values: &ValueDifference) -> Value {
    let number = |value: f64| Number::from_f64(value).map_or_else(|| value.to_string().into(), Value::Number);
    json!({
        "name": values.name,
        "elements": values.num_elements,
        "different": values.num_different,
        "max_absolute": number(values.max_absolute),
        "max_relative": number(values.max_relative),
        "position": values.position,
    })
}
