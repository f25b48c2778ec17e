//! Checkpoints through servers of the clouds' protocols on the loopback: moto (Amazon), azurite (Azure) and
//! gcp-storage-emulator (Google), and a process that is killed at random moments.
//!
//! A test starts a server and then this binary again, with the environment that names the server.

#[path = "interop/python.rs"]
#[expect(dead_code, reason = "the other tests use all of it")]
mod python;
#[path = "suite/support.rs"]
#[expect(dead_code, reason = "the other tests use all of it")]
mod support;

use std::{
    io::{Read, Write},
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use mt_checkpoint::{
    Checkpoint, CheckpointManager, Entry, ManagerOptions, RunLock, SaveRequest, complete_steps, open_latest,
};
use mt_shape::DType;
use python::Environment;
use support::{array, check_state, formats, request, synchronous};

const URL: &str = "MT_CLOUDS_URL";
const SAVES: &str = "MT_CLOUDS_SAVES";
/// Bytes of an array that is sent in pieces.
const LARGE: usize = 40 << 20;

const EMULATOR: Environment = Environment { packages: &["gcp-storage-emulator==2026.7.19"], base: None };
const MOTO: Environment = Environment { packages: &["moto[s3,server]==5.2.5"], base: None };

/// A server that ends with the test.
struct Server {
    child: Child,
    address: String,
}

impl Server {
    fn start(mut command: Command, address: &str) -> Self {
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let server = Self { child, address: address.to_owned() };
        let started = Instant::now();
        while TcpStream::connect(address).is_err() {
            assert!(started.elapsed() < Duration::from_secs(60), "no server at {address}");
            std::thread::sleep(Duration::from_millis(100));
        }
        server
    }

    /// Sends a request without a body.
    fn request(&self, line: &str, headers: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let host = &self.address;
        write!(
            stream,
            "{line} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\n{headers}Connection: close\r\n\r\n"
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A port that is free now.
fn address() -> String {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

fn again(test: &str, environment: &[(&str, &str)]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture"]).envs(environment.iter().copied());
    command
}

fn drive(environment: &[(&str, &str)]) {
    let cache = tempfile::tempdir().unwrap();
    let status = again("driver", environment).env("XDG_CACHE_HOME", cache.path()).status().unwrap();
    assert!(status.success());
}

#[test]
fn amazon() {
    let address = address();
    let mut command = Command::new(MOTO.create().join("bin/moto_server"));
    command.args(["-H", "127.0.0.1", "-p", address.rsplit(':').next().unwrap()]);
    let server = Server::start(command, &address);
    server.request("PUT /bucket", "");
    let endpoint = format!("http://{address}");
    drive(&[
        (URL, "s3://bucket/runs/run"),
        ("AWS_ENDPOINT_URL", &endpoint),
        ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
    ]);
    let uploads = server.request("GET /bucket?uploads", "");
    assert!(uploads.contains("ListMultipartUploadsResult") && !uploads.contains("<UploadId>"), "{uploads}");
}

#[test]
fn azure() {
    let directory = tempfile::tempdir().unwrap();
    let packages = std::env::temp_dir().join("maxtext-interop/azurite-3.35.0");
    if !packages.join("node_modules/.bin/azurite-blob").exists() {
        std::fs::create_dir_all(&packages).unwrap();
        let status = Command::new("npm")
            .args(["install", "--no-audit", "--no-fund", "azurite@3.35.0"])
            .current_dir(&packages)
            .status()
            .unwrap();
        assert!(status.success());
    }
    let address = address();
    let mut command = Command::new(packages.join("node_modules/.bin/azurite-blob"));
    let port = address.rsplit(':').next().unwrap();
    command.args(["--blobHost", "127.0.0.1", "--blobPort", port, "--silent", "--skipApiVersionCheck"]);
    command.arg("--location").arg(directory.path());
    let server = Server::start(command, &address);
    // The well-known account and key of the emulator.
    let key = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";
    let endpoint = format!("http://{address}/devstoreaccount1");
    create_container(&server, key);
    let connection = format!(
        "DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey={key};BlobEndpoint={endpoint};"
    );
    drive(&[(URL, "az://container/runs/run"), ("AZURE_STORAGE_CONNECTION_STRING", &connection)]);
}

/// The emulator speaks the JSON API; `interop/google_storage.py` turns requests of the XML API, which the clients of
/// `object_store` send, into its own.
#[test]
fn google() {
    let address = address();
    let mut command = Command::new(EMULATOR.create().join("bin/python"));
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/interop/google_storage.py"));
    command.args([address.rsplit(':').next().unwrap(), "bucket"]);
    let server = Server::start(command, &address);
    drive(&[(URL, "gs://bucket/runs/run"), ("STORAGE_EMULATOR_HOST", &server.address)]);
}

/// Creates the container `container` by a request that Node.js signs.
fn create_container(server: &Server, key: &str) {
    let date = "Wed, 25 Nov 2026 00:00:00 GMT";
    let script = format!(
        "const text = 'PUT' + '\\n'.repeat(12) + 'x-ms-date:{date}\\nx-ms-version:2021-08-06\\n' +
         '/devstoreaccount1/devstoreaccount1/container\\nrestype:container';
         console.log(require('crypto').createHmac('sha256', Buffer.from('{key}', 'base64')).update(text, 'utf8').digest('base64'))"
    );
    let signed = Command::new("node").args(["-e", &script]).output().unwrap();
    let signature = String::from_utf8(signed.stdout).unwrap();
    let headers = format!(
        "x-ms-date: {date}\r\nx-ms-version: 2021-08-06\r\nAuthorization: SharedKey devstoreaccount1:{}\r\n",
        signature.trim()
    );
    let answer = server.request("PUT /devstoreaccount1/container?restype=container", &headers);
    assert!(answer.starts_with("HTTP/1.1 201"), "{answer}");
}

/// Does nothing unless another test starts it with a server.
#[test]
fn driver() {
    let Ok(url) = std::env::var(URL) else { return };
    if std::env::var(SAVES).is_ok() {
        return;
    }
    let run = PathBuf::from(url);
    for (index, format) in formats().into_iter().enumerate() {
        let directory = run.with_file_name(format!("format{index}"));
        let lock = RunLock::acquire(&directory).unwrap();
        let options = ManagerOptions { format, max_to_keep: Some(1), ..ManagerOptions::default() };
        let mut manager = CheckpointManager::open(directory.join("checkpoints"), &lock, options).unwrap();
        for step in [1, 2] {
            manager.save(step, request(step)).unwrap();
        }
        manager.wait_until_finished().unwrap();
        check_state(&Checkpoint::open_path(&directory).unwrap(), 2);
        assert_eq!(manager.set_aside(2).unwrap().file_name().unwrap(), "2.damaged");
        // A second process is refused, by the object that the first one holds.
        let error = RunLock::acquire(&directory).unwrap_err();
        assert!(error.is_user_error() && error.to_string().contains("in use by another run"), "{error}");
    }
    check_copies(&run.with_file_name("inputs"));
    kill_at_random_moments(&run);
}

/// Inputs are copied to this machine, by directory and by file, and again when they change.
fn check_copies(inputs: &Path) {
    let large: Vec<u8> = (0..20_u32 << 20).map(|index| (index.wrapping_mul(7919) >> 9) as u8).collect();
    let put = |name: &str, contents: &[u8]| {
        mt_storage::put(&inputs.join(name), contents, mt_storage::Condition::Any).unwrap();
    };
    put("a.txt", b"one");
    put("below/a name with spaces, ä and +.bin", &large);
    let copy = mt_storage::local(inputs).unwrap();
    assert_eq!(std::fs::read(copy.join("a.txt")).unwrap(), b"one");
    assert!(std::fs::read(copy.join("below/a name with spaces, ä and +.bin")).unwrap() == large);
    let file = mt_storage::local(&inputs.join("a.txt")).unwrap();
    assert_eq!(file, copy.join("a.txt"));
    let written = std::fs::metadata(&file).unwrap().modified().unwrap();
    mt_storage::local(inputs).unwrap();
    assert_eq!(std::fs::metadata(&file).unwrap().modified().unwrap(), written, "it is copied once");
    put("a.txt", b"two");
    assert_eq!(std::fs::read(mt_storage::local(&inputs.join("a.txt")).unwrap()).unwrap(), b"two");
    let other = inputs.with_file_name("others/b.bin");
    mt_storage::copy(&inputs.join("below/a name with spaces, ä and +.bin"), &other).unwrap();
    assert_eq!(mt_storage::metadata(&other).unwrap().bytes, large.len() as u64);
    mt_storage::remove_all(inputs, &[]).unwrap();
    assert!(mt_storage::local(inputs).is_err() && !mt_storage::exists(inputs));
}

fn large(step: u64) -> SaveRequest {
    let mut request = request(step);
    let large = array(DType::F32, &[LARGE / 4 / 1024, 1024], step + 9);
    request.entries.push(Entry::new(vec!["params".into(), "large".into()], large));
    request
}

fn check_large(checkpoint: &Checkpoint, step: u64) {
    checkpoint.verify().unwrap();
    let found = checkpoint.read_all("params.large").unwrap();
    assert!(found == array(DType::F32, &[LARGE / 4 / 1024, 1024], step + 9), "step {step}");
}

/// Does nothing unless the driver starts it: saves steps until it is killed.
#[test]
fn saver() {
    let (Ok(url), Ok(_)) = (std::env::var(URL), std::env::var(SAVES)) else { return };
    let run = PathBuf::from(url);
    let lock = RunLock::acquire(&run).unwrap();
    let options = ManagerOptions { max_to_keep: Some(2), ..ManagerOptions::default() };
    let mut manager = CheckpointManager::open(run.join("checkpoints"), &lock, options).unwrap();
    let started = Instant::now();
    for step in manager.latest().unwrap().map_or(0, |step| step + 1).. {
        if started.elapsed() > Duration::from_secs(120) {
            break;
        }
        manager.save(step, large(step)).unwrap();
    }
}

fn kill_at_random_moments(run: &Path) {
    let kills: u64 = std::env::var("MT_CLOUDS_KILLS").ok().and_then(|kills| kills.parse().ok()).unwrap_or(60);
    let checkpoints = run.join("checkpoints");
    let mut newest = None;
    for attempt in 0..kills {
        let mut child = again("saver", &[(SAVES, "1")]).stdout(Stdio::null()).spawn().unwrap();
        while newest.is_none() && complete_steps(&checkpoints).unwrap().is_empty() {
            assert!(child.try_wait().unwrap().is_none());
            std::thread::sleep(Duration::from_millis(20));
        }
        std::thread::sleep(Duration::from_millis(300 + attempt * 7919 % 1500));
        assert!(child.try_wait().unwrap().is_none(), "the saver ended by itself");
        child.kill().unwrap();
        child.wait().unwrap();
        let latest = open_latest(&checkpoints).unwrap().unwrap();
        assert!(latest.skipped.is_empty(), "{:?}", latest.skipped);
        check_large(&latest.value, latest.step);
        assert!(Some(latest.step) >= newest, "{newest:?} was lost");
        newest = Some(latest.step);
        // The run that follows leaves nothing but complete steps.
        let lock = RunLock::acquire(run).unwrap();
        let manager = CheckpointManager::open(&checkpoints, &lock, synchronous()).unwrap();
        let steps: Vec<String> = manager.steps().unwrap().iter().map(u64::to_string).collect();
        for (file, _) in mt_storage::files_below(&checkpoints).unwrap() {
            let step = file.iter().next().unwrap().to_string_lossy().into_owned();
            assert!(steps.contains(&step), "{}", file.display());
        }
    }
    println!("{kills} kills, newest step {newest:?}");
}
