//! The bodies of requests, which together have a bound: a body of numbers takes many times its size as JSON values, so
//! that a few clients could otherwise exhaust the memory of a machine.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use axum::body::{Body, HttpBody};
use http_body_util::BodyExt;

use crate::{
    error::{ApiError, Result},
    limits::ServerLimits,
};

/// The memory of all bodies that arrive or are read.
#[derive(Default)]
pub struct Bodies {
    /// The number of bytes.
    held: Arc<AtomicUsize>,
}

/// A body that has arrived.
pub struct Received {
    pub bytes: Vec<u8>,
    pub room: BodyRoom,
}

/// The share of one body. Dropping it makes room for others.
pub struct BodyRoom {
    held: Arc<AtomicUsize>,
    bytes: usize,
}

impl Bodies {
    /// Receives a body.
    ///
    /// # Errors
    /// The body is too large or broken, or the bodies of other requests leave no room.
    pub async fn receive(&self, mut body: Body, limits: &ServerLimits) -> Result<Received> {
        let most = limits.max_body;
        let too_large = || {
            ApiError::too_large(format!("the request's body has more than {most} bytes, the server's limit"))
        };
        if body.size_hint().lower() > most as u64 {
            return Err(too_large());
        }
        // Only bytes that have arrived count, so that clients who announce much and send nothing take no room.
        let mut received =
            Received { bytes: Vec::new(), room: BodyRoom { held: self.held.clone(), bytes: 0 } };
        while let Some(frame) = body.frame().await {
            let broken = |error| ApiError::invalid(format!("the request's body cannot be read: {error}"));
            let Ok(data) = frame.map_err(broken)?.into_data() else { continue };
            if received.bytes.len() + data.len() > most {
                return Err(too_large());
            }
            received.room.grow(data.len(), limits.max_bodies)?;
            received.bytes.extend_from_slice(&data);
        }
        Ok(received)
    }
}

impl BodyRoom {
    fn grow(&mut self, bytes: usize, most: usize) -> Result<()> {
        let before = self.held.fetch_add(bytes, Ordering::SeqCst);
        self.bytes += bytes;
        if before + bytes > most { Err(ApiError::busy()) } else { Ok(()) }
    }
}

impl Drop for BodyRoom {
    fn drop(&mut self) {
        self.held.fetch_sub(self.bytes, Ordering::SeqCst);
    }
}
