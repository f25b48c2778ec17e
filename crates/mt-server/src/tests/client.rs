//! A client that reads what is on the wire.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use serde_json::Value;

pub struct Client {
    pub stream: BufReader<TcpStream>,
}

/// A response.
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: String,
}

impl Client {
    pub fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        Self { stream: BufReader::new(stream) }
    }

    pub fn post(&mut self, path: &str, body: &Value) -> Reply {
        self.request("POST", path, &[], body.to_string().as_bytes())
    }

    pub fn request(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Reply {
        self.send(method, path, headers, body);
        self.reply()
    }

    pub fn send(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) {
        let mut head =
            format!("{method} {path} HTTP/1.1\r\nhost: test\r\ncontent-length: {}\r\n", body.len());
        for (name, value) in headers {
            head += &format!("{name}: {value}\r\n");
        }
        head += "\r\n";
        let stream = self.stream.get_mut();
        stream.write_all(head.as_bytes()).unwrap();
        // A server that refuses a body by its length may close first.
        let _ = stream.write_all(body);
    }

    /// The status and headers of a response.
    pub fn head(&mut self) -> (u16, Vec<(String, String)>) {
        let mut line = String::new();
        self.stream.read_line(&mut line).unwrap();
        let status =
            line.split(' ').nth(1).unwrap_or_else(|| panic!("no status in {line:?}")).parse().unwrap();
        let mut headers = Vec::new();
        loop {
            let mut line = String::new();
            self.stream.read_line(&mut line).unwrap();
            match line.trim().split_once(": ") {
                Some((name, value)) => headers.push((name.to_owned(), value.to_owned())),
                None => return (status, headers),
            }
        }
    }

    /// The next chunk of a body; empty at its end.
    pub fn chunk(&mut self) -> Vec<u8> {
        let mut line = String::new();
        self.stream.read_line(&mut line).unwrap();
        let length = usize::from_str_radix(line.trim(), 16).unwrap();
        let mut chunk = vec![0; length + 2];
        self.stream.read_exact(&mut chunk).unwrap();
        chunk.truncate(length);
        chunk
    }

    pub fn reply(&mut self) -> Reply {
        let (status, headers) = self.head();
        let value =
            |name: &str| headers.iter().find(|(found, _)| found == name).map(|(_, value)| value.clone());
        let mut body = Vec::new();
        match value("content-length") {
            Some(length) => {
                body.resize(length.parse().unwrap(), 0);
                self.stream.read_exact(&mut body).unwrap();
            }
            None => loop {
                let chunk = self.chunk();
                if chunk.is_empty() {
                    break;
                }
                body.extend(chunk);
            },
        }
        Reply { status, headers, body: String::from_utf8(body).unwrap() }
    }
}

impl Reply {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|_| panic!("{}", self.body))
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
    }

    /// The data of server-sent events.
    pub fn events(&self) -> Vec<Value> {
        let blocks = self.body.split("\n\n").filter(|block| !block.is_empty());
        let data = blocks.map(|block| block.lines().find_map(|line| line.strip_prefix("data: ")).unwrap());
        data.filter(|data| *data != "[DONE]").map(|data| serde_json::from_str(data).unwrap()).collect()
    }
}
