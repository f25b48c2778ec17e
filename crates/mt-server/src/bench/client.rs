//! The HTTP client of the load generator.

use std::{io, time::Instant};

use axum::{
    body::{Body, Bytes},
    http::{Method, Request, Response, header},
};
use http_body_util::BodyExt;
use hyper::{body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;

use super::{BenchError, measure::Observed};

/// The address of a server.
#[derive(Clone, Debug)]
pub struct Address {
    url: String,
    /// The host and the port.
    authority: String,
    api_key: Option<String>,
}

impl Address {
    /// The address in a URL.
    ///
    /// # Errors
    /// The URL is not that of an unencrypted server.
    pub fn parse(url: &str, api_key: Option<String>) -> Result<Self, BenchError> {
        let wrong = || BenchError::Url { url: url.to_owned() };
        let rest = url.strip_prefix("http://").ok_or_else(wrong)?;
        let authority = rest.trim_end_matches('/');
        if authority.is_empty() || authority.contains(['/', '@', ' ']) {
            return Err(wrong());
        }
        let has_port = authority.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        let authority = if has_port { authority.to_owned() } else { format!("{authority}:80") };
        Ok(Self { url: url.to_owned(), authority, api_key })
    }
}

async fn send(
    address: &Address,
    method: &str,
    route: &str,
    body: Option<&Value>,
) -> io::Result<Response<Incoming>> {
    let stream = TcpStream::connect(&address.authority).await?;
    stream.set_nodelay(true)?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
    // The connection ends with its response, or with an error that the response reports.
    tokio::spawn(connection);
    let mut request = Request::builder()
        .method(Method::from_bytes(method.as_bytes()).map_err(io::Error::other)?)
        .uri(route)
        .header(header::HOST, &address.authority)
        .header(header::CONTENT_TYPE, "application/json");
    if let Some(key) = &address.api_key {
        request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
    }
    let body = body.map_or_else(Bytes::new, |body| Bytes::from(body.to_string()));
    let request = request.body(Body::from(body)).map_err(io::Error::other)?;
    sender.send_request(request).await.map_err(io::Error::other)
}

/// The JSON that a route answers.
///
/// # Errors
/// The server cannot be reached or refuses the request.
pub async fn request(
    address: &Address,
    method: &str,
    route: &'static str,
    body: Option<&Value>,
) -> Result<Value, BenchError> {
    let unreachable = |source| BenchError::Unreachable { url: address.url.clone(), source };
    let response = send(address, method, route, body).await.map_err(unreachable)?;
    let status = response.status().as_u16();
    let bytes = response.into_body().collect().await.map_err(|error| unreachable(io::Error::other(error)))?;
    let text = String::from_utf8_lossy(&bytes.to_bytes()).into_owned();
    if status != 200 {
        return Err(BenchError::Refused { route, status, message: text });
    }
    serde_json::from_str(&text).map_err(|_| BenchError::Unexpected { route, message: text })
}

/// Reads a stream of events, and notes when its tokens arrive.
///
/// # Errors
/// The server cannot be reached, refuses the request, or ends the stream early.
pub async fn stream(address: &Address, route: &str, body: &Value) -> Result<Observed, String> {
    let mut observed = Observed::begin(Instant::now());
    let response = send(address, "POST", route, Some(body)).await.map_err(|error| error.to_string())?;
    let status = response.status();
    let mut body = response.into_body();
    if !status.is_success() {
        let bytes = body.collect().await.map_err(|error| error.to_string())?.to_bytes();
        return Err(format!("status {status}: {}", String::from_utf8_lossy(&bytes)));
    }
    let mut held: Vec<u8> = Vec::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| error.to_string())?;
        let Ok(data) = frame.into_data() else { continue };
        let now = Instant::now();
        held.extend_from_slice(&data);
        while let Some(end) = held.windows(2).position(|pair| pair == b"\n\n") {
            let block: Vec<u8> = held.drain(..end + 2).collect();
            let block = String::from_utf8_lossy(&block);
            for data in block.lines().filter_map(|line| line.strip_prefix("data: ")) {
                if data.trim() == "[DONE]" {
                    observed.end(Instant::now());
                    return Ok(observed);
                }
                let event: Value = serde_json::from_str(data).map_err(|error| error.to_string())?;
                if let Some(message) = event["error"]["message"].as_str() {
                    return Err(message.to_owned());
                }
                observed.receive(&event, now);
            }
        }
    }
    Err("the stream ended before its last event".to_owned())
}
