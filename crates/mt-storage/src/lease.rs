//! Exclusive use of a directory in a store, which has no locks: an object that names its owner, who renews it.

use std::{
    collections::hash_map::RandomState,
    fmt::Debug,
    fs,
    hash::BuildHasher,
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::write::{Condition, Version, put, read_versioned, remove};

/// A lease that has not been renewed for this time is another's to take.
const DURATION: Duration = Duration::from_secs(60);
const RENEWAL: Duration = Duration::from_secs(15);
/// Steps of waiting for an owner to show that it lives.
const TICK: Duration = Duration::from_millis(500);

/// An object that one process owns. It is renewed until it is dropped, which removes it.
pub struct Lease {
    path: PathBuf,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    contents: String,
    lost: AtomicBool,
    ends: Mutex<bool>,
    wakes: Condvar,
}

/// Another process has the lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    pub machine: String,
    pub process: Option<u32>,
}

impl Lease {
    /// Takes the lease. If another process has it, waits until that is clear: an owner on this machine is looked up, and
    /// one elsewhere renews it within some seconds, or has ended when a minute passes without a renewal. No clocks of
    /// different machines are compared.
    ///
    /// # Errors
    /// The store refuses; the inner result is the owner, if one has it.
    pub fn acquire(path: &Path) -> io::Result<Result<Self, Owner>> {
        let nonce = RandomState::new().hash_one(Instant::now());
        let contents = json!({
            "owner": format!("{nonce:016x}"),
            "machine": machine(),
            "boot": boot(),
            "process": std::process::id(),
        })
        .to_string();
        let mut seen: Option<(Vec<u8>, Version, Instant)> = None;
        loop {
            let condition = match &seen {
                None => Condition::New,
                Some((held, version, since)) => {
                    if !has_ended(held) && since.elapsed() < DURATION {
                        std::thread::sleep(TICK);
                        match read_versioned(path) {
                            Ok((now, newer)) if is_same(version, &newer) && now == *held => continue,
                            // It was renewed, or taken by another one.
                            Ok((now, _)) => return Ok(Err(owner(&now))),
                            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                                seen = None;
                                continue;
                            }
                            Err(error) => return Err(error),
                        }
                    }
                    Condition::Unchanged(version.clone())
                }
            };
            match put(path, with_time(&contents), condition) {
                Ok(version) => return Ok(Ok(Self::start(path, contents, version))),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => match read_versioned(path) {
                    Ok((held, version)) => match seen {
                        Some(_) => return Ok(Err(owner(&held))),
                        None => seen = Some((held, version, Instant::now())),
                    },
                    Err(error) if error.kind() == io::ErrorKind::NotFound => seen = None,
                    Err(error) => return Err(error),
                },
                Err(error) => return Err(error),
            }
        }
    }

    fn start(path: &Path, contents: String, version: Version) -> Self {
        let shared = Arc::new(Shared {
            contents,
            lost: AtomicBool::new(false),
            ends: Mutex::new(false),
            wakes: Condvar::new(),
        });
        let (path, own) = (path.to_owned(), Arc::clone(&shared));
        let renewed = path.clone();
        let thread = std::thread::Builder::new()
            .name("lease".to_owned())
            .spawn(move || own.renew(&renewed, version))
            .expect("the system starts a thread");
        Self { path, shared, thread: Some(thread) }
    }

    /// Whether another process has taken the lease, or may have, because it could not be renewed for a minute.
    pub fn is_lost(&self) -> bool {
        self.shared.lost.load(Ordering::Relaxed)
    }

    /// A question for other threads: whether the lease is lost.
    pub fn watch(&self) -> impl Fn() -> bool + Send + Sync + 'static {
        let shared = Arc::clone(&self.shared);
        move || shared.lost.load(Ordering::Relaxed)
    }
}

impl Debug for Lease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lease").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Shared {
    fn renew(&self, path: &Path, mut version: Version) {
        let mut renewed = Instant::now();
        let mut ends = self.ends.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let (guard, _) = self.wakes.wait_timeout(ends, RENEWAL).unwrap_or_else(PoisonError::into_inner);
            ends = guard;
            if *ends {
                return;
            }
            match put(path, with_time(&self.contents), Condition::Unchanged(version.clone())) {
                Ok(newer) => (version, renewed) = (newer, Instant::now()),
                Err(error)
                    if matches!(error.kind(), io::ErrorKind::AlreadyExists | io::ErrorKind::NotFound) =>
                {
                    self.lost.store(true, Ordering::Relaxed);
                    return;
                }
                // The store may answer again before another process takes over.
                Err(_) => self.lost.store(renewed.elapsed() >= DURATION, Ordering::Relaxed),
            }
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        *self.shared.ends.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.shared.wakes.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        if !self.is_lost() {
            // If this fails, another process takes the lease when it is old.
            let _ = remove(&self.path);
        }
    }
}

/// Each renewal has other contents, so that also stores whose versions are hashes of contents show it.
fn with_time(contents: &str) -> String {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let mut value: Value = serde_json::from_str(contents).unwrap_or_default();
    value["renewed"] = (now.as_millis() as u64).into();
    value.to_string()
}

fn is_same(one: &Version, other: &Version) -> bool {
    one.0.e_tag == other.0.e_tag && one.0.version == other.0.version
}

/// Whether the owner ran on this machine and has ended.
fn has_ended(held: &[u8]) -> bool {
    let Ok(value) = serde_json::from_slice::<Value>(held) else { return true };
    let is_here = value["boot"].as_str().is_some_and(|of| !of.is_empty() && of == boot());
    let process = value["process"].as_u64();
    is_here && process.is_some_and(|id| !Path::new(&format!("/proc/{id}")).exists())
}

fn owner(held: &[u8]) -> Owner {
    let value: Value = serde_json::from_slice(held).unwrap_or_default();
    Owner {
        machine: value["machine"].as_str().unwrap_or("another machine").to_owned(),
        process: value["process"].as_u64().and_then(|id| u32::try_from(id).ok()),
    }
}

fn machine() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim().to_owned()
}

/// The identity of this start of the machine and of this container's processes.
fn boot() -> String {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let processes = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    format!("{} {}", boot.trim(), processes.display())
}
