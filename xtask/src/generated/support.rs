//! The README's section on what is built and what is not, generated from the key table. It therefore promises only
//! values that the program accepts.

use std::{fs, path::Path};

use mt_config::{Class, Key, Kind, Literal, table};

/// The file that contains the section.
pub const README: &str = "README.md";

/// The markers around the section; the rest of the file is written by hand.
const BEGIN: &str = "<!-- support: made by `cargo xtask generate` -->\n";
const END: &str = "<!-- end of support -->\n";

/// The title of each row, and the key whose choices it lists.
const ROWS: &[(&str, &str)] = &[
    ("Model families", "decoder_block"),
    ("Attention", "attention"),
    ("Attention masks", "attention_type"),
    ("Rotary scaling", "rope_type"),
    ("Type of activations", "dtype"),
    ("Type of weights for inference", "weight_dtype"),
    ("Rematerialization", "remat_policy"),
    ("Optimizers", "opt_type"),
    ("Schedules", "lr_schedule_type"),
    ("Data", "dataset_type"),
    ("Packing", "grain_packing_type"),
    ("Tokenizers", "tokenizer_type"),
    ("Sampling", "decode_sampling_strategy"),
    ("Hardware", "hardware"),
];

/// Choices that are accepted although their names promise more than works or is tested: a row, a name in it, and the
/// remark after the name.
const QUALIFIED: &[(&str, &str, &str)] = &[
    ("hardware", "gpu", "compiled for, never run"),
    ("hardware", "tpu", "compiled for, never run"),
    (PARALLELISM, "expert", "gathers tokens; no all-to-all"),
];

/// The row of mesh axes, as its heading names the keys.
const PARALLELISM: &str = "ici_*_parallelism";

/// The README on disk with the section generated anew.
pub fn readme() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(README);
    // Without the file or its markers no section is replaced; another check requires the README.
    with_rows(&fs::read_to_string(path).unwrap_or_default(), &rows())
}

fn with_rows(text: &str, rows: &str) -> String {
    let Some((before, rest)) = text.split_once(BEGIN) else { return text.to_owned() };
    let Some((_, after)) = rest.split_once(END) else { return text.to_owned() };
    format!("{before}{BEGIN}\n{rows}\n{END}{after}")
}

fn rows() -> String {
    let mut text = String::from("| | works | not built yet |\n|---|---|---|\n");
    for (title, name) in ROWS {
        let key = table::lookup(name).expect("the rows name keys of the table");
        text.push_str(&row(title, name, &choices(key)));
    }
    text.push_str(&row("Parallelism", PARALLELISM, &mesh_axes()));
    text.push_str("\nFeatures that keys request and that are not built: ");
    text.push_str(&refused_features().join(", "));
    text.push_str(".\n");
    text
}

/// Names of features that are built, and of those that are not.
struct Split {
    built: Vec<&'static str>,
    missing: Vec<&'static str>,
}

fn row(title: &str, key: &str, split: &Split) -> String {
    let named = |name: &&str| {
        let of_name = |(of, qualified, _): &&(&str, &str, &str)| *of == key && qualified == name;
        match QUALIFIED.iter().find(of_name) {
            Some((_, _, what)) => format!("`{name}` ({what})"),
            None => format!("`{name}`"),
        }
    };
    let list = |names: &[&str]| names.iter().map(named).collect::<Vec<_>>().join(", ");
    format!("| {title} (`{key}`) | {} | {} |\n", list(&split.built), list(&split.missing))
}

fn choices(key: &Key) -> Split {
    let Kind::Choice(choices) = key.kind else { unreachable!("`{}` has choices", key.name) };
    let is_built = |choice: &&str| match (key.class, key.default) {
        (Class::Refused(_), Literal::Text(default)) => default == *choice,
        _ => key.refused_choices.iter().all(|(refused, _)| refused != choice),
    };
    let (built, missing) = choices.iter().copied().partition(is_built);
    Split { built, missing }
}

fn mesh_axes() -> Split {
    let mut split = Split { built: Vec::new(), missing: Vec::new() };
    for key in table::keys() {
        let Some(axis) = key.name.strip_prefix("ici_").and_then(|name| name.strip_suffix("_parallelism"))
        else {
            continue;
        };
        if matches!(key.class, Class::Refused(_)) { split.missing.push(axis) } else { split.built.push(axis) }
    }
    split
}

/// The features that refused keys need, each once.
fn refused_features() -> Vec<&'static str> {
    let mut features = Vec::new();
    for key in table::keys() {
        if let Class::Refused(feature) = key.class
            && !features.contains(&feature)
        {
            features.push(feature);
        }
    }
    features
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_rows_change() {
        let text = format!("before\n{BEGIN}old\n{END}after\n");
        let made = with_rows(&text, "new\n");
        assert_eq!(made, format!("before\n{BEGIN}\nnew\n\n{END}after\n"));
        assert_eq!(with_rows(&made, "new\n"), made);
        assert_eq!(with_rows("no marks\n", "new\n"), "no marks\n");
    }

    #[test]
    fn refused_choices_are_not_said_to_work() {
        let rows = rows();
        assert!(rows.contains("`mamba2`, `bamba`, `t5`, `simple`, `simple_mlp` |  |"), "{rows}");
        assert!(
            rows.contains(
                "| Attention (`attention`) | `autoselected`, `dot_product`, `flash` | `cudnn_flash_te`, "
            ),
            "{rows}"
        );
        assert!(rows.contains("`fsdp`, `fsdp_transpose`, `sequence`"), "{rows}");
        assert!(rows.contains("no all-to-all) | `diloco`, `pipeline`"), "{rows}");
    }

    #[test]
    fn qualified_choices_are_among_those_that_work() {
        let rows = rows();
        for (key, name, what) in QUALIFIED {
            let row = rows.lines().find(|line| line.contains(&format!("(`{key}`)"))).unwrap();
            let built = row.split(" | ").nth(1).unwrap();
            assert!(built.contains(&format!("`{name}` ({what})")), "{key}: {row}");
        }
    }
}
