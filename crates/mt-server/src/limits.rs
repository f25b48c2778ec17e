//! The limits of a server.

use std::time::Duration;

/// The limits of requests, so that no client exhausts memory or time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerLimits {
    /// The maximum number of open connections.
    pub max_connections: usize,
    /// The maximum number of bytes of a request's head: its first line and its headers.
    pub max_head: usize,
    /// The maximum number of bytes of a request's body.
    pub max_body: usize,
    /// The maximum number of bytes of all bodies that arrive or are read at one time.
    pub max_bodies: usize,
    /// The maximum number of requests that run or wait.
    pub max_requests: usize,
    /// The maximum number of answers to one request, over all its prompts.
    pub max_answers: usize,
    /// The time that the head of a request may take to arrive, and that a connection may be idle before it.
    pub head_time: Duration,
    /// The time that a request's body may take to arrive.
    pub body_time: Duration,
    /// The time after which a client that reads nothing has gone.
    pub write_time: Duration,
    /// The time that an answer may take, with its time in the queue.
    pub answer_time: Duration,
    /// The time after a signal in which accepted requests may finish.
    pub drain_time: Duration,
}

impl Default for ServerLimits {
    fn default() -> Self {
        Self {
            max_connections: 4096,
            max_head: 64 << 10,
            max_body: 32 << 20,
            max_bodies: 128 << 20,
            max_requests: 1024,
            max_answers: 128,
            head_time: Duration::from_secs(30),
            body_time: Duration::from_secs(30),
            write_time: Duration::from_secs(60),
            answer_time: Duration::from_secs(3600),
            drain_time: Duration::from_secs(30),
        }
    }
}
