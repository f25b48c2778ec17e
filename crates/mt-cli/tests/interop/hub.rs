//! Hugging Face's own library sends to the hub of the tests what this program sends to it, and reads that.

use std::{collections::BTreeMap, fs, path::Path, process::Command};

use mt_testing::servers::HubServer;

use crate::{python::Environment, train};

const HUB: Environment = Environment { packages: &["huggingface_hub==2.4.0"], base: None };
const TOKEN: &str = "hf_writer";

fn files(directory: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(directory).unwrap().map(Result::unwrap);
    let read = |entry: fs::DirEntry| {
        (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap_or_default())
    };
    entries.map(read).collect()
}

#[test]
fn the_hubs_own_library_sends_and_reads_the_same() {
    let (hub, directory) = (HubServer::start(), tempfile::tempdir().unwrap());
    let root = directory.path();
    hub.accept(TOKEN, 100_000, 20_000);
    train(root, "run", &[]);
    let export = |output: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_maxtext"));
        command.args(["checkpoint", "export", "--shard-size", "80KB", "--output", output]);
        command.arg(format!("load_parameters_path={}", root.join("run").display())).current_dir(root);
        let command = command.env("HF_ENDPOINT", hub.endpoint()).env("HF_TOKEN", TOKEN);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    export("exported");
    export("hf://owner/ours");
    let exported = files(&root.join("exported"));
    let python = |task: &str, path: &Path| {
        let environment = HUB.create();
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/interop/hub_client.py");
        let mut command = Command::new(environment.join("bin/python"));
        command.arg(script).arg(task).arg(path);
        let command =
            command.env("HF_ENDPOINT", hub.endpoint()).env("HF_TOKEN", TOKEN).env("HF_HOME", root.join("hf"));
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    python("upload", &root.join("exported"));
    let of = |repository: &str| {
        let (_, mut files) = hub.files(repository, "main").unwrap();
        files.remove(".gitattributes");
        files
    };
    assert!(of("models/owner/ours") == exported && of("models/owner/theirs") == exported);
    python("download", root);
    assert!(files(&root.join("ours")) == exported);
}
