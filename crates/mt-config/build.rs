//! Embeds the YAML files of models and presets; adding a file adds a model or a preset.

use std::{env, fmt::Write as _, fs, path::Path};

fn main() {
    let root = env::var("CARGO_MANIFEST_DIR").expect("cargo sets it");
    let mut code = String::new();
    for (constant, folder) in [("MODELS", "src/models"), ("PRESETS", "src/presets")] {
        println!("cargo::rerun-if-changed={folder}");
        let folder = Path::new(&root).join(folder);
        let mut names = Vec::new();
        list(&folder, "", &mut names);
        names.sort();
        writeln!(code, "pub(crate) const {constant}: &[(&str, &str)] = &[").expect("texts can be written to");
        for name in names {
            let path = folder.join(format!("{name}.yml"));
            writeln!(code, "    ({name:?}, include_str!({path:?})),").expect("texts can be written to");
        }
        code.push_str("];\n");
    }
    let out = env::var("OUT_DIR").expect("cargo sets it");
    fs::write(Path::new(&out).join("embedded.rs"), code).expect("the output directory is writable");
}

/// Appends the names of the files below `folder`, without extensions.
fn list(folder: &Path, prefix: &str, names: &mut Vec<String>) {
    for entry in fs::read_dir(folder).expect("the folders of YAML files exist").flatten() {
        let name = entry.file_name().into_string().expect("names are UTF-8");
        if entry.path().is_dir() {
            list(&entry.path(), &format!("{prefix}{name}/"), names);
        } else if let Some(stem) = name.strip_suffix(".yml") {
            names.push(format!("{prefix}{stem}"));
        }
    }
}
