//! A running `maxtext serve`, for tests.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    process::{Child, Command, Stdio},
};

use serde_json::Value;

/// A running server, which ends with this value.
pub struct Server {
    process: Child,
    /// The host and the port.
    pub address: String,
}

impl Server {
    /// Starts the server of a command, which names no port, and waits until it is ready.
    pub fn start(command: &mut Command) -> Self {
        let mut process = command.args(["--port", "0"]).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(process.stderr.take().unwrap()).lines();
        let mut log = String::new();
        let ready = lines.find_map(|line| {
            let line = line.unwrap();
            log += &format!("{line}\n");
            let (_, rest) = line.split_once("is ready at http://")?;
            rest.split(' ').next().map(str::to_owned)
        });
        let address = ready.unwrap_or_else(|| panic!("the server does not start:\n{log}"));
        // The server must not wait for a reader of its log.
        std::thread::spawn(move || lines.for_each(drop));
        Self { process, address }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The status and the JSON of a response.
    pub fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        self.request("POST", path, &body.to_string())
    }

    pub fn request(&self, method: &str, path: &str, body: &str) -> (u16, Value) {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).unwrap();
        let status = reply.split(' ').nth(1).unwrap().parse().unwrap();
        let (_, body) = reply.split_once("\r\n\r\n").unwrap();
        (status, serde_json::from_str(body).unwrap_or_else(|_| panic!("{reply}")))
    }

    /// Ends the server as an operator does.
    pub fn end(mut self) {
        let id = self.process.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
        assert!(self.process.wait().unwrap().success());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It has ended if the test has passed.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
