//! Dependencies between crates point to lower layers.

use super::Finding;
use crate::repository::Repository;

/// The crates from the bottom to the top. A crate may depend on those in lower rows.
const LAYERS: &[&[&str]] = &[
    &["mt-shape", "mt-derive", "mt-array-record", "mt-storage"],
    &["mt-config", "mt-kernels", "mt-mosaic", "mt-testing"],
    &["mt-ir", "mt-pjrt"],
    &["mt-autodiff", "mt-runtime"],
    &["mt-trace"],
    &["mt-nn", "mt-optim", "mt-data", "mt-checkpoint"],
    &["mt-models", "mt-rl", "mt-clean"],
    &["mt-train", "mt-engine"],
    &["mt-plan"],
    &["mt-server"],
    &["mt-cli"],
];

/// Crates that only some of the higher crates may use.
const RESERVED: &[(&str, &[&str], &str)] =
    &[("mt-pjrt", &["mt-runtime", "mt-cli"], "programs reach the devices through `mt-runtime`")];

/// Lower crates that a crate must not use.
const FORBIDDEN: &[(&str, &[&str], &str)] = &[
    ("mt-data", &["mt-ir", "mt-trace", "mt-autodiff", "mt-runtime"], "data knows no tensors"),
    ("mt-checkpoint", &["mt-ir", "mt-trace", "mt-autodiff"], "checkpoints know no models"),
    ("mt-ir", &["mt-pjrt"], "the graph knows no devices"),
];

/// A dependency on a crate of the workspace.
struct Dependency<'a> {
    name: &'a str,
    line: usize,
}

pub(super) fn check(repository: &Repository) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (folder, manifest) in repository.packages() {
        let Some(name) = folder.strip_prefix("crates/") else { continue };
        let path = format!("{folder}/Cargo.toml");
        match declared_name(manifest) {
            Some((declared, line)) if declared != name => {
                let message =
                    format!("crate `{declared}` is in the folder `{name}`: give both the same name");
                findings.push(Finding::new(&path, line, message));
            }
            Some(_) => {}
            None => findings.push(Finding::new(&path, 1, "the package has no name")),
        }
        let Some(layer) = layer(name) else {
            let message =
                format!("crate `{name}` is in no layer: place it in `LAYERS` of xtask/src/tidy/layers.rs");
            findings.push(Finding::new(&path, 1, message));
            continue;
        };
        for dependency in dependencies(manifest) {
            if let Some(reason) = reason_against(name, layer, dependency.name) {
                let message = format!("`{name}` must not depend on `{}`: {reason}", dependency.name);
                findings.push(Finding::new(&path, dependency.line, message));
            }
        }
    }
    findings
}

fn layer(name: &str) -> Option<usize> {
    LAYERS.iter().position(|layer| layer.contains(&name))
}

fn reason_against(name: &str, layer_of_name: usize, dependency: &str) -> Option<&'static str> {
    if layer(dependency).is_none_or(|below| below >= layer_of_name) {
        return Some("dependencies point to lower layers only");
    }
    let reserved = RESERVED.iter().find(|(crate_, users, _)| *crate_ == dependency && !users.contains(&name));
    let forbidden =
        FORBIDDEN.iter().find(|(crate_, without, _)| *crate_ == name && without.contains(&dependency));
    reserved.or(forbidden).map(|(_, _, reason)| *reason)
}

/// The package's name and its line.
fn declared_name(manifest: &str) -> Option<(&str, usize)> {
    let (index, line) = manifest.lines().enumerate().find(|(_, line)| line.starts_with("name = "))?;
    Some((line.split('"').nth(1)?, index + 1))
}

/// The workspace's crates among the dependencies of a manifest.
///
/// Development dependencies are unrestricted: tests of lower layers run programs, which needs the upper layers.
fn dependencies(manifest: &str) -> Vec<Dependency<'_>> {
    let mut found = Vec::new();
    let mut in_dependencies = false;
    for (index, line) in manifest.lines().enumerate() {
        let line = line.trim();
        let key = if let Some(header) = line.strip_prefix('[') {
            let header = header.trim_end_matches(']');
            // Either the table of all dependencies, or `[dependencies.name]`.
            let table_of_all = |kind: &str| header == kind || header.ends_with(&format!(".{kind}"));
            in_dependencies = table_of_all("dependencies") || table_of_all("build-dependencies");
            match header.rsplit_once('.') {
                Some((table, name)) if table == "dependencies" || table.ends_with(".dependencies") => name,
                _ => continue,
            }
        } else if in_dependencies {
            line.split(['.', '=', ' ']).next().unwrap_or_default()
        } else {
            continue;
        };
        if key.starts_with("mt-") {
            found.push(Dependency { name: key, line: index + 1 });
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_manifest(folder: &str, dependencies: &str, expected: &[&str]) {
        let name = folder.trim_start_matches("crates/");
        let manifest = format!("[package]\nname = \"{name}\"\n{dependencies}");
        let path = format!("{folder}/Cargo.toml");
        let findings = check(&Repository::of(&[(&path, &manifest)]));
        let findings: Vec<_> = findings.iter().map(ToString::to_string).collect();
        assert_eq!(findings, expected);
    }

    #[test]
    fn dependencies_point_down() {
        check_manifest(
            "crates/mt-nn",
            "[dependencies]\nmt-trace.workspace = true\nmt-shape = { path = \"../mt-shape\" }\n",
            &[],
        );
        check_manifest(
            "crates/mt-nn",
            "[dependencies]\nserde = \"1\"\nmt-models.workspace = true\n",
            &["crates/mt-nn/Cargo.toml:5: `mt-nn` must not depend on `mt-models`: \
               dependencies point to lower layers only"],
        );
        check_manifest(
            "crates/mt-nn",
            "[dependencies.mt-optim]\nworkspace = true\n",
            &["crates/mt-nn/Cargo.toml:3: `mt-nn` must not depend on `mt-optim`: \
               dependencies point to lower layers only"],
        );
        check_manifest(
            "crates/mt-trace",
            "[target.'cfg(unix)'.dependencies]\nmt-train = { workspace = true }\n",
            &["crates/mt-trace/Cargo.toml:4: `mt-trace` must not depend on `mt-train`: \
               dependencies point to lower layers only"],
        );
        check_manifest("crates/mt-autodiff", "[dev-dependencies]\nmt-trace.workspace = true\n", &[]);
    }

    #[test]
    fn some_lower_crates_are_out_of_bounds() {
        check_manifest("crates/mt-runtime", "[dependencies]\nmt-pjrt.workspace = true\n", &[]);
        check_manifest(
            "crates/mt-train",
            "[dependencies]\nmt-pjrt.workspace = true\n",
            &["crates/mt-train/Cargo.toml:4: `mt-train` must not depend on `mt-pjrt`: \
               programs reach the devices through `mt-runtime`"],
        );
        check_manifest(
            "crates/mt-data",
            "[dependencies]\nmt-trace.workspace = true\n",
            &["crates/mt-data/Cargo.toml:4: `mt-data` must not depend on `mt-trace`: data knows no tensors"],
        );
    }

    #[test]
    fn crates_have_a_layer_and_their_folders_name() {
        check_manifest(
            "crates/mt-misc",
            "",
            &["crates/mt-misc/Cargo.toml:1: crate `mt-misc` is in no layer: \
               place it in `LAYERS` of xtask/src/tidy/layers.rs"],
        );
        let renamed = Repository::of(&[("crates/mt-nn/Cargo.toml", "[package]\nname = \"mt-layers\"\n")]);
        let findings = check(&renamed);
        assert_eq!(findings.len(), 1);
        assert_eq!(findings[0].line, 2);
    }
}
