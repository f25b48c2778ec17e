//! Requests and responses on the wire.

use std::time::Duration;

use serde_json::Value;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

/// The time in which any request is answered.
const PATIENCE: Duration = Duration::from_secs(300);

/// A response.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    pub body: Vec<u8>,
}

impl Reply {
    pub fn json(&self) -> Result<Value, String> {
        serde_json::from_slice(&self.body).map_err(|error| format!("{error} in {}", self.text()))
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The data of server-sent events, and whether the last one is the mark of the end.
    pub fn events(&self) -> Result<(Vec<Value>, bool), String> {
        let text = self.text();
        let data: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
        let is_complete = data.last() == Some(&"[DONE]");
        let events = data.iter().filter(|data| **data != "[DONE]").map(|data| serde_json::from_str(data));
        Ok((events.collect::<Result<_, _>>().map_err(|error| format!("{error} in {text}"))?, is_complete))
    }
}

/// Opens a connection and sends a request on it.
pub async fn send(address: &str, method: &str, path: &str, body: &[u8]) -> Result<TcpStream, String> {
    let text = |error: std::io::Error| error.to_string();
    let mut stream = TcpStream::connect(address).await.map_err(text)?;
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: stress\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await.map_err(text)?;
    stream.write_all(body).await.map_err(text)?;
    Ok(stream)
}

/// Reads a response to its end, with a pause after each `size` bytes at most.
pub async fn receive(stream: TcpStream, size: usize, pause: Duration) -> Result<Reply, String> {
    let reply = tokio::time::timeout(PATIENCE, receive_all(stream, size, pause)).await;
    reply.unwrap_or_else(|_| Err(format!("no answer within {PATIENCE:?}")))
}

/// Sends a request and reads the response.
pub async fn request(address: &str, method: &str, path: &str, body: &[u8]) -> Result<Reply, String> {
    let stream = send(address, method, path, body).await?;
    receive(stream, 64 << 10, Duration::ZERO).await
}

async fn receive_all(mut stream: TcpStream, size: usize, pause: Duration) -> Result<Reply, String> {
    let (mut bytes, mut buffer) = (Vec::new(), vec![0; size]);
    loop {
        let read = stream.read(&mut buffer).await.map_err(|error| error.to_string())?;
        if read == 0 {
            return parse(&bytes);
        }
        bytes.extend_from_slice(&buffer[..read]);
        if !pause.is_zero() {
            tokio::time::sleep(pause).await;
        }
    }
}

fn parse(bytes: &[u8]) -> Result<Reply, String> {
    let broken =
        || format!("a broken response: {:?}", String::from_utf8_lossy(&bytes[..bytes.len().min(200)]));
    let end = bytes.windows(4).position(|four| four == b"\r\n\r\n").ok_or_else(broken)?;
    let head = String::from_utf8_lossy(&bytes[..end]).to_ascii_lowercase();
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).ok_or_else(broken)?;
    let mut body = bytes[end + 4..].to_vec();
    if head.contains("transfer-encoding: chunked") {
        body = unchunked(&body).ok_or_else(|| {
            format!("a response of chunks that ends early: {:?}", String::from_utf8_lossy(&body))
        })?;
    }
    Ok(Reply { status, body })
}

/// The bytes of chunks; `None` if the last one is missing.
fn unchunked(mut bytes: &[u8]) -> Option<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let end = bytes.windows(2).position(|two| two == b"\r\n")?;
        let size = usize::from_str_radix(std::str::from_utf8(&bytes[..end]).ok()?, 16).ok()?;
        if size == 0 {
            return Some(body);
        }
        body.extend_from_slice(bytes.get(end + 2..end + 2 + size)?);
        bytes = bytes.get(end + 2 + size + 2..)?;
    }
}
