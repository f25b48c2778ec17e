//! The server's process and its `/health` during the load.

use std::{
    fs,
    io::{Read, Write},
    net::TcpStream,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::{Options, http};

/// The period of the clock, and the delay of a tick that only a stopped process has.
const TICK: Duration = Duration::from_millis(20);
const SUSPENSION: Duration = Duration::from_secs(2);

/// The observations.
#[derive(Clone, Debug, Default)]
pub struct Watched {
    pub first_bytes: u64,
    pub most_bytes: u64,
    last_bytes: u64,
    /// The most memory in each half of the time.
    pub half_bytes: [u64; 2],
    most_threads: u64,
    most_files: usize,
    suspensions: u64,
    pub slowest_health: Duration,
    pub health_failures: usize,
    /// The times of `/health` in milliseconds.
    health: Vec<f64>,
}

impl Watched {
    pub fn report(&self, bound: u64) -> Value {
        let mut times = self.health.clone();
        times.sort_by(f64::total_cmp);
        let at = |fraction: f64| {
            times.get(((times.len() as f64 * fraction) as usize).min(times.len().saturating_sub(1)))
        };
        let mebibytes = |bytes: u64| bytes >> 20;
        json!({
            "health_requests": times.len(),
            "health_ms": { "median": at(0.5), "p99": at(0.99), "p999": at(0.999), "max": times.last() },
            "memory_mib": {
                "before": mebibytes(self.first_bytes), "most": mebibytes(self.most_bytes),
                "first_half": mebibytes(self.half_bytes[0]), "second_half": mebibytes(self.half_bytes[1]),
                "after": mebibytes(self.last_bytes), "bound": mebibytes(bound),
            },
            "most_threads": self.most_threads,
            "most_open_files": self.most_files,
            "suspensions": self.suspensions,
        })
    }
}

/// Threads that watch.
pub struct Watch {
    stop: Arc<AtomicBool>,
    health: JoinHandle<Watched>,
    process: JoinHandle<Watched>,
    suspensions: Arc<AtomicU64>,
}

impl Watch {
    pub fn start(options: &Options) -> Result<Self, String> {
        let (pid, address) = (options.pid, options.address.clone());
        let half = Duration::from_secs(options.seconds) / 2;
        let first = memory(pid).ok_or_else(|| format!("there is no process {pid}"))?;
        let stop = Arc::new(AtomicBool::new(false));
        let suspensions = Arc::new(AtomicU64::new(0));
        std::thread::spawn({
            let (stop, suspensions) = (stop.clone(), suspensions.clone());
            move || watch_clock(&stop, &suspensions)
        });
        let health = std::thread::spawn({
            let (stop, suspensions) = (stop.clone(), suspensions.clone());
            move || watch_health(&address, &stop, &suspensions)
        });
        let process = std::thread::spawn({
            let stop = stop.clone();
            move || watch_process(pid, first, half, &stop)
        });
        Ok(Self { stop, health, process, suspensions })
    }

    pub fn end(self) -> Watched {
        self.stop.store(true, Ordering::SeqCst);
        let health = self.health.join().unwrap_or_default();
        Watched {
            slowest_health: health.slowest_health,
            health_failures: health.health_failures,
            health: health.health,
            suspensions: self.suspensions.load(Ordering::SeqCst),
            ..self.process.join().unwrap_or_default()
        }
    }
}

/// Counts how often this process was stopped for a while, as a whole machine or its background work can be. Times across
/// such a stop say nothing.
fn watch_clock(stop: &AtomicBool, suspensions: &AtomicU64) {
    let mut before = Instant::now();
    while !stop.load(Ordering::SeqCst) {
        std::thread::sleep(TICK);
        let now = Instant::now();
        if now - before > SUSPENSION {
            suspensions.fetch_add(1, Ordering::SeqCst);
        }
        before = now;
    }
}

fn watch_health(address: &str, stop: &AtomicBool, suspensions: &AtomicU64) -> Watched {
    let mut watched = Watched::default();
    while !stop.load(Ordering::SeqCst) {
        let before = suspensions.load(Ordering::SeqCst);
        let asked = Instant::now();
        let is_well = health(address).is_ok_and(|reply| reply.starts_with("HTTP/1.1 200 "));
        let time = asked.elapsed();
        if time > SUSPENSION {
            // The clock's own thread needs a moment.
            std::thread::sleep(5 * TICK);
            if suspensions.load(Ordering::SeqCst) > before {
                continue;
            }
        }
        watched.health_failures += usize::from(!is_well);
        watched.slowest_health = watched.slowest_health.max(time);
        watched.health.push(time.as_secs_f64() * 1e3);
        std::thread::sleep(Duration::from_millis(100).saturating_sub(time));
    }
    watched
}

fn health(address: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    stream.write_all(b"GET /health HTTP/1.1\r\nhost: stress\r\nconnection: close\r\n\r\n")?;
    let mut reply = String::new();
    stream.read_to_string(&mut reply)?;
    Ok(reply)
}

fn watch_process(pid: u32, first: u64, half: Duration, stop: &AtomicBool) -> Watched {
    let started = Instant::now();
    let mut watched =
        Watched { first_bytes: first, most_bytes: first, last_bytes: first, ..Watched::default() };
    while !stop.load(Ordering::SeqCst) {
        if let Some(bytes) = memory(pid) {
            watched.most_bytes = watched.most_bytes.max(bytes);
            watched.last_bytes = bytes;
            let most = &mut watched.half_bytes[usize::from(started.elapsed() > half)];
            *most = bytes.max(*most);
        }
        watched.most_threads = watched.most_threads.max(status(pid, "Threads:").unwrap_or(0));
        let files = fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count);
        watched.most_files = watched.most_files.max(files);
        std::thread::sleep(Duration::from_millis(500));
    }
    watched
}

fn memory(pid: u32) -> Option<u64> {
    status(pid, "VmRSS:").map(|kibibytes| kibibytes << 10)
}

fn status(pid: u32, name: &str) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    text.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next()?.parse().ok())
}

/// Counts of the engine: how often it put requests back for want of pages, and how much it found in the prefix cache.
pub async fn counts(address: &str) -> Result<Value, String> {
    let metrics = http::request(address, "GET", "/metrics", b"").await?.text();
    let names = ["num_preemptions_total", "prefix_cache_hits_total", "prefix_cache_queries_total"];
    Ok(names.into_iter().map(|name| (name.to_owned(), json!(value_of(&metrics, name)))).collect())
}

/// A single value among metrics.
fn value_of(metrics: &str, name: &str) -> Option<f64> {
    let line = metrics.lines().find(|line| line.starts_with(&format!("vllm:{name}{{")))?;
    line.rsplit(' ').next()?.parse::<f64>().ok()
}

/// Waits until the server has nothing to do, and returns the fraction of its pages in use.
pub async fn until_idle(address: &str) -> Result<f64, String> {
    let mut last = String::new();
    for _ in 0..600 {
        let metrics = http::request(address, "GET", "/metrics", b"").await?.text();
        let value = |name: &str| value_of(&metrics, name);
        let load = http::request(address, "GET", "/load", b"").await?.json()?["server_load"].as_u64();
        let found = (
            load,
            value("num_requests_running"),
            value("num_requests_waiting"),
            value("kv_cache_usage_perc"),
        );
        if let (Some(0), Some(0.0), Some(0.0), Some(0.0)) = found {
            return Ok(0.0);
        }
        last = format!("{found:?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    Err(format!("the server does not become idle: load, running, waiting and pages are {last}"))
}
