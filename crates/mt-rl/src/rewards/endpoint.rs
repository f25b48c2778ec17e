//! Rewards by an HTTP endpoint: a request with an answer as JSON, and a response with its reward.

use std::{
    io::{self, ErrorKind, Read, Write},
    net::{TcpStream, ToSocketAddrs},
    time::{Duration, Instant},
};

use super::{
    Judged,
    child::MOST,
    outcome::{Failures, Outcome, at_once, request, reward_of},
};

/// The most requests in flight.
const CONCURRENT: usize = 8;

/// The endpoint of a run and its limits.
#[derive(Clone, Debug, PartialEq)]
pub struct EndpointSettings {
    pub url: Url,
    /// The time for each answer.
    pub limit: Duration,
    /// The number of further attempts after a failure.
    pub retries: usize,
}

/// An address such as `http://127.0.0.1:8000/reward`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Url {
    /// The host, and the port if it is given.
    authority: String,
    /// With a port.
    address: String,
    path: String,
}

impl Url {
    /// Reads an address.
    ///
    /// # Errors
    /// The reason why it cannot be used.
    pub fn read(text: &str) -> Result<Self, String> {
        let Some(rest) = text.strip_prefix("http://") else {
            return Err(match text.starts_with("https://") {
                true => "encrypted connections are not built yet\nhint: let a proxy on this machine encrypt them, and \
                         name it as `http://127.0.0.1:8080/…`",
                false => "it does not begin with `http://`\nhint: write it as `http://127.0.0.1:8000/reward`",
            }
            .to_owned());
        };
        let (authority, path) = match rest.find('/') {
            Some(slash) => (&rest[..slash], &rest[slash..]),
            None => (rest, "/"),
        };
        let is_plain = |text: &str| text.bytes().all(|byte| byte.is_ascii_graphic());
        if authority.is_empty() || authority.contains('@') || !is_plain(rest) {
            return Err(
                "it has no host, a password, or a character that addresses cannot have\nhint: write it as \
                        `http://127.0.0.1:8000/reward`"
                    .to_owned(),
            );
        }
        let after_brackets = authority.rsplit_once(']').map_or(authority, |(_, rest)| rest);
        let address = match after_brackets.contains(':') {
            true => authority.to_owned(),
            false => format!("{authority}:80"),
        };
        Ok(Self { authority: authority.to_owned(), address, path: path.to_owned() })
    }
}

/// An endpoint that judges answers.
pub(super) struct EndpointReward {
    settings: EndpointSettings,
    pub failures: Failures,
}

impl EndpointReward {
    pub fn new(settings: EndpointSettings) -> Self {
        Self { settings, failures: Failures::default() }
    }

    /// The rewards of answers, several of which are requested at once.
    pub fn rewards(&mut self, answers: &[Judged<'_>]) -> Vec<Outcome> {
        let settings = &self.settings;
        at_once(answers, CONCURRENT, &mut self.failures, |answer, fail| {
            let body = request(answer).to_string();
            for _ in 0..=settings.retries {
                match post(settings, &body).and_then(|text| reward_of(&text)) {
                    Ok(reward) => return Outcome::Reward(reward),
                    Err(reason) => fail(reason),
                }
            }
            Outcome::Failed
        })
    }
}

/// The body of a response, or the reason why there is none.
fn post(settings: &EndpointSettings, body: &str) -> Result<String, String> {
    let until = Instant::now() + settings.limit;
    let rest = || until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    let Url { authority, address, path } = &settings.url;
    let failed = |error: io::Error| match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => {
            format!("it gave no answer within {} s", settings.limit.as_secs_f64())
        }
        _ => format!("`{address}` cannot be asked: {error}"),
    };
    let resolved = address.to_socket_addrs().map_err(failed)?.next();
    let resolved = resolved.ok_or_else(|| format!("`{address}` has no address"))?;
    let mut stream = TcpStream::connect_timeout(&resolved, rest()).map_err(failed)?;
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: {authority}\r\nContent-Type: application/json\r\nAccept: application/json\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.set_write_timeout(Some(rest())).map_err(failed)?;
    stream.write_all(format!("{head}{body}").as_bytes()).map_err(failed)?;
    let mut received = Vec::new();
    let mut piece = [0; 4096];
    loop {
        if let Some(body) = whole_body(&received, false)? {
            return Ok(body);
        }
        if Instant::now() >= until {
            return Err(failed(ErrorKind::TimedOut.into()));
        }
        stream.set_read_timeout(Some(rest())).map_err(failed)?;
        match stream.read(&mut piece).map_err(failed)? {
            0 => {
                let body = whole_body(&received, true)?;
                return body.ok_or_else(|| "its response is cut off".to_owned());
            }
            length => received.extend(&piece[..length]),
        }
        if received.len() as u64 > MOST {
            return Err(format!("its response is longer than {MOST} bytes"));
        }
    }
}

/// The body of a response if all of it has been received. `is_end` tells that nothing follows.
fn whole_body(received: &[u8], is_end: bool) -> Result<Option<String>, String> {
    let Some(end) = received.windows(4).position(|window| window == b"\r\n\r\n") else { return Ok(None) };
    let head = String::from_utf8_lossy(&received[..end]);
    let mut lines = head.split("\r\n");
    let status = lines.next().and_then(|line| line.split(' ').nth(1)).unwrap_or_default();
    if status.starts_with('1') {
        return whole_body(&received[end + 4..], is_end);
    }
    let header = |name: &str| {
        let found = |line: &str| {
            let (own, value) = line.split_once(':')?;
            own.eq_ignore_ascii_case(name).then(|| value.trim().to_owned())
        };
        head.split("\r\n").skip(1).find_map(found)
    };
    if status != "200" {
        return Err(format!("its status is `{status}`, not 200"));
    }
    let body = &received[end + 4..];
    let text = |body: &[u8]| {
        String::from_utf8(body.to_vec()).map(Some).map_err(|_| "its response is not UTF-8 text".to_owned())
    };
    if header("transfer-encoding").is_some_and(|coding| coding.eq_ignore_ascii_case("chunked")) {
        return dechunked(body).map_or(Ok(None), |body| text(&body));
    }
    match header("content-length") {
        Some(length) => {
            let length: usize = length
                .parse()
                .map_err(|_| format!("its `Content-Length` is `{length}`, which is no number"))?;
            body.get(..length).map_or(Ok(None), text)
        }
        None if is_end => text(body),
        None => Ok(None),
    }
}

/// The contents of all chunks, if the last one has been received.
fn dechunked(mut body: &[u8]) -> Option<Vec<u8>> {
    let mut whole = Vec::new();
    loop {
        let end = body.windows(2).position(|window| window == b"\r\n")?;
        let size = str::from_utf8(&body[..end]).ok()?;
        let size = usize::from_str_radix(size.split(';').next()?.trim(), 16).ok()?;
        if size == 0 {
            return Some(whole);
        }
        let chunk = body.get(end + 2..(end + 2).checked_add(size)?)?;
        whole.extend(chunk);
        body = body.get(end + 2 + size + 2..)?;
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead, BufReader},
        net::TcpListener,
    };

    use super::*;

    /// Milliseconds that suffice on a busy machine.
    const SLOW: u64 = 30_000;

    /// A server that answers each request with these bytes, and then closes the connection, or hangs.
    fn server(response: impl Fn(&str) -> Option<String> + Send + 'static) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/judge?a=b", listener.local_addr().unwrap());
        std::thread::spawn(move || {
            let mut hanging = Vec::new();
            for stream in listener.incoming().flatten() {
                let mut reader = BufReader::new(stream.try_clone().unwrap());
                let (mut head, mut length) = (String::new(), 0);
                while reader.read_line(&mut head).unwrap_or(0) > 2 {
                    let line = head.lines().last().unwrap_or_default();
                    if let Some(value) = line.strip_prefix("Content-Length: ") {
                        length = value.parse().unwrap();
                    }
                }
                let mut body = vec![0; length];
                reader.read_exact(&mut body).unwrap();
                assert!(head.starts_with("POST /judge?a=b HTTP/1.1\r\n"), "{head}");
                match response(&String::from_utf8(body).unwrap()) {
                    Some(response) => {
                        let _ = (&stream).write_all(response.as_bytes());
                    }
                    None => hanging.push(stream),
                }
            }
        });
        url
    }

    fn rewards(url: &str, completions: &[&str], milliseconds: u64) -> (Vec<Outcome>, Failures) {
        let limit = Duration::from_millis(milliseconds);
        let settings = EndpointSettings { url: Url::read(url).unwrap(), limit, retries: 1 };
        let mut endpoint = EndpointReward::new(settings);
        let columns = serde_json::Map::new();
        let judged =
            |completion| Judged { prompt: "p", completion, answer: None, tokens: 1, columns: &columns };
        let answers: Vec<Judged<'_>> = completions.iter().copied().map(judged).collect();
        (endpoint.rewards(&answers), endpoint.failures)
    }

    #[test]
    fn an_endpoint_judges_answers_in_order() {
        let url = server(|body| {
            let request: serde_json::Value = serde_json::from_str(body).unwrap();
            let reward = format!("{{\"reward\": {}}}", request["completion"].as_str().unwrap().len());
            Some(format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{reward}", reward.len()))
        });
        let texts: Vec<String> = (0..20).map(|length| "x".repeat(length)).collect();
        let (made, failures) = rewards(&url, &texts.iter().map(String::as_str).collect::<Vec<_>>(), SLOW);
        let expected: Vec<Outcome> = (0..20).map(|length| Outcome::Reward(f64::from(length))).collect();
        assert_eq!((made, failures), (expected, Failures::default()));
        for response in [
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\n{\"r\r\nc\r\neward\": 2.5}\r\n0\r\n\r\n",
            "HTTP/1.0 200 OK\r\n\r\n{\"reward\": 2.5}",
            "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n{\"reward\": 2.5}",
        ] {
            let url = server(move |_| Some(response.to_owned()));
            assert_eq!(rewards(&url, &["a"], SLOW).0, [Outcome::Reward(2.5)], "{response}");
        }
    }

    #[test]
    fn failures_stop_nothing_and_are_counted() {
        let flood = format!("HTTP/1.1 200 OK\r\n\r\n{}", "x".repeat(3_000_000));
        for (response, expected) in [
            (None, "no answer within 0.5 s"),
            (Some("HTTP/1.1 500 Oops\r\n\r\n".to_owned()), "its status is `500`"),
            (Some(flood), "longer than 1048576 bytes"),
            (Some("HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{\"rew".to_owned()), "cut off"),
            (Some("HTTP/1.1 200 OK\r\n\r\n{\"reward\": NaN}".to_owned()), "no object with a number"),
            (Some("HTTP/1.1 200 OK\r\n\r\n{\"reward\": 1e999}".to_owned()), "no object with a number"),
            (Some(String::new()), "cut off"),
        ] {
            let limit = if response.is_none() { 500 } else { SLOW };
            let url = server(move |_| response.clone());
            let (made, failures) = rewards(&url, &["a"], limit);
            assert_eq!((made, failures.count), (vec![Outcome::Failed], 2), "{expected}: {failures:?}");
            assert!(failures.last.contains(expected), "{expected}: {failures:?}");
        }
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let (made, failures) = rewards(&format!("http://127.0.0.1:{port}"), &["a"], SLOW);
        assert_eq!((made, failures.count), (vec![Outcome::Failed], 2));
        assert!(failures.last.contains("cannot be asked"), "{failures:?}");
    }

    #[test]
    fn addresses_are_read() {
        let url = Url::read("http://judge.example:81/a?b").unwrap();
        assert_eq!((url.address.as_str(), url.path.as_str()), ("judge.example:81", "/a?b"));
        assert_eq!(Url::read("http://[::1]").unwrap().address, "[::1]:80");
        assert_eq!(Url::read("http://a").unwrap().path, "/");
        for (text, expected) in [
            ("https://a", "encrypted connections"),
            ("a/b", "does not begin"),
            ("http://", "no host"),
            ("http://user@host/", "a password"),
            ("http://host/\r\nX: y", "a character"),
        ] {
            let reason = Url::read(text).unwrap_err();
            assert!(reason.contains(expected) && reason.contains("hint: "), "{text}: {reason}");
        }
    }
}
