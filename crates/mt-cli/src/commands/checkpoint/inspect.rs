//! `maxtext checkpoint inspect`.

use std::collections::BTreeMap;

use mt_checkpoint::{GgufValue, ListedTensor, Listing, SourceKind, Totals, WeightsSource};
use mt_models::hugging_face::quantization_of;
use serde_json::{Map, Value, json};

use super::table::{Align, by_name, bytes, counted, elements, lines};
use crate::{
    arguments::Inspect,
    commands::report_loaded,
    failure::{Failure, print},
};

pub fn run(arguments: &Inspect) -> Result<(), Failure> {
    let source = WeightsSource::open(&arguments.path)?;
    report_loaded(source.skipped(), &[], None);
    let mut listing = source.listing()?;
    listing.tensors.sort_by(|left, right| by_name(&left.name, &right.name));
    let metadata = metadata(&source);
    if arguments.json {
        let mut object = object(&listing);
        if !metadata.is_empty() {
            object["metadata"] = metadata.into();
        }
        return print(&format!("{object:#}"));
    }
    let mut text = text(&listing);
    if !metadata.is_empty() {
        let values =
            metadata.iter().map(|(key, value)| format!("\n  {key}: {}", mt_config::value_text(value)));
        text.extend(std::iter::once("\nmetadata:".to_owned()).chain(values));
    }
    print(&text)
}

/// The metadata of a GGUF file. An array, such as a vocabulary, is shown by its length.
fn metadata(source: &WeightsSource) -> Map<String, Value> {
    let WeightsSource::Gguf(file) = source else { return Map::new() };
    let shown = |value: &GgufValue| match value {
        GgufValue::U8(value) => (*value).into(),
        GgufValue::I8(value) => (*value).into(),
        GgufValue::U16(value) => (*value).into(),
        GgufValue::I16(value) => (*value).into(),
        GgufValue::U32(value) => (*value).into(),
        GgufValue::I32(value) => (*value).into(),
        GgufValue::U64(value) => (*value).into(),
        GgufValue::I64(value) => (*value).into(),
        GgufValue::F32(value) => (*value).into(),
        GgufValue::F64(value) => (*value).into(),
        GgufValue::Bool(value) => (*value).into(),
        GgufValue::Text(text) => text.clone().into(),
        GgufValue::Array(_, values) => Value::from(format!("array of {}", values.len())),
    };
    file.metadata().iter().map(|(key, value)| (key.clone(), shown(value))).collect()
}

/// The method of quantization of the listed weights. A description that cannot be read is not the concern of a list.
fn quantization(listing: &Listing) -> Option<&'static str> {
    quantization_of(&listing.path).ok().flatten().map(|quantized| quantized.method)
}

/// The name of a format of weights.
pub fn kind_name(kind: SourceKind) -> &'static str {
    match kind {
        SourceKind::Safetensors => "safetensors",
        SourceKind::Torch => "PyTorch",
        SourceKind::Gguf => "GGUF",
        SourceKind::Orbax => "Orbax",
    }
}

/// The shape, such as `[2, 3]`.
pub fn shape(tensor: &ListedTensor) -> String {
    format!("{:?}", tensor.dims)
}

/// The tensor as a JSON object.
pub fn tensor_object(tensor: &ListedTensor) -> Value {
    json!({
        "name": tensor.name,
        "dtype": tensor.dtype.to_string(),
        "shape": tensor.dims,
        "elements": tensor.num_elements(),
        "bytes": tensor.bytes,
        "file": tensor.place.display().to_string(),
    })
}

fn text(listing: &Listing) -> String {
    let step = listing.step.map_or_else(String::new, |step| format!(", step {step}"));
    let kind = kind_name(listing.kind);
    let quantized =
        quantization(listing).map_or_else(String::new, |method| format!(", quantized: `{method}`"));
    let mut text = vec![format!("{} ({kind}{step}{quantized})", listing.path.display()), String::new()];
    let heading = ["name", "dtype", "shape", "size"].map(str::to_owned).to_vec();
    let rows = listing.tensors.iter().map(|tensor| {
        vec![tensor.name.clone(), tensor.dtype.to_string(), shape(tensor), bytes(tensor.bytes)]
    });
    let rows: Vec<Vec<String>> = std::iter::once(heading).chain(rows).collect();
    text.extend(lines(&[Align::Left, Align::Left, Align::Left, Align::Right], &rows));
    text.push(String::new());

    let mut rows = vec![totals_row("total", listing.totals())];
    rows.extend(
        listing.by_dtype().into_iter().map(|(dtype, totals)| totals_row(&format!("  {dtype}"), totals)),
    );
    let entries = listing.by_entry();
    if entries.len() > 1 {
        rows.push(vec!["by entry".to_owned(), String::new(), String::new(), String::new()]);
        rows.extend(entries.into_iter().map(|(entry, totals)| totals_row(&format!("  {entry}"), totals)));
    }
    let files = by_file(listing);
    if files.len() > 1 {
        rows.push(vec!["by file".to_owned(), String::new(), String::new(), String::new()]);
        rows.extend(files.into_iter().map(|(file, totals)| totals_row(&format!("  {file}"), totals)));
    }
    text.extend(lines(&[Align::Left, Align::Right, Align::Right, Align::Right], &rows));
    if !listing.other_items.is_empty() {
        text.push(format!("other items: {}", listing.other_items.join(", ")));
    }
    text.join("\n")
}

fn totals_row(name: &str, totals: Totals) -> Vec<String> {
    let Totals { tensors, elements: number, bytes: size } = totals;
    vec![name.to_owned(), counted(tensors, "tensor"), format!("{} elements", elements(number)), bytes(size)]
}

/// The totals per file, if files hold several tensors.
fn by_file(listing: &Listing) -> BTreeMap<String, Totals> {
    let mut files: BTreeMap<String, Totals> = BTreeMap::new();
    if listing.kind == SourceKind::Orbax {
        return files;
    }
    for tensor in &listing.tensors {
        let name = tensor.place.file_name().unwrap_or_default().to_string_lossy();
        let totals = files.entry(name.into_owned()).or_default();
        totals.tensors += 1;
        totals.elements += tensor.num_elements();
        totals.bytes += tensor.bytes;
    }
    files
}

fn object(listing: &Listing) -> Value {
    let of = |totals: Totals| json!({ "tensors": totals.tensors, "elements": totals.elements, "bytes": totals.bytes });
    let by_dtype = listing.by_dtype().into_iter().map(|(dtype, totals)| (dtype.to_string(), of(totals)));
    let by_entry = listing.by_entry().into_iter().map(|(entry, totals)| (entry, of(totals)));
    json!({
        "path": listing.path.display().to_string(),
        "kind": kind_name(listing.kind),
        "step": listing.step,
        "quantization": quantization(listing),
        "tensors": listing.tensors.iter().map(tensor_object).collect::<Vec<_>>(),
        "total": of(listing.totals()),
        "by_dtype": by_dtype.collect::<Map<String, Value>>(),
        "by_entry": by_entry.collect::<Map<String, Value>>(),
        "other_items": listing.other_items,
    })
}
