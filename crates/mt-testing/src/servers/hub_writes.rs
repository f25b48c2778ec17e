//! The requests by which a hub takes files: announcements, the storage of large files, and commits.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
};

use ring::digest::{Algorithm, SHA1_FOR_LEGACY_USE_ONLY, SHA256, digest};
use serde_json::{Value, json};

use super::{
    Request, Response,
    hub::{HubFile, State},
};

/// The state of a hub that takes files.
#[derive(Default)]
pub(super) struct Writes {
    /// The token of those who may write; `None` if nobody may.
    token: Option<String>,
    large: usize,
    piece: usize,
    /// Large files by their hashes, and the pieces of unfinished ones.
    objects: BTreeMap<String, Vec<u8>>,
    pieces: BTreeMap<(String, usize), Vec<u8>>,
    commits: u64,
    pub intruder: Option<(String, Vec<u8>)>,
}

impl Writes {
    pub fn new(token: &str, large: usize, piece: usize) -> Self {
        Self { token: Some(token.to_owned()), large, piece, ..Self::default() }
    }
}

fn refused(status: u16, code: &str) -> Response {
    Response::new(status, "").with("X-Error-Code", code)
}

fn answered(value: &Value) -> Response {
    Response::new(200, value.to_string()).with("Content-Type", "application/json")
}

impl State {
    pub(super) fn whoami(&self, request: &Request) -> Response {
        let token = request.headers.get("authorization").and_then(|header| header.strip_prefix("Bearer "));
        let role = match token {
            Some("hf_reader") => "read",
            _ if token.is_some() && token == self.writes.token.as_deref() => "write",
            _ => return Response::new(401, ""),
        };
        answered(&json!({"name": "owner", "type": "user", "auth": {"accessToken": {"role": role}}}))
    }

    pub(super) fn write(&mut self, address: SocketAddr, request: &Request, path: &str) -> Response {
        let token = request.headers.get("authorization").and_then(|header| header.strip_prefix("Bearer "));
        if let Some(rest) = path.strip_prefix("upload/") {
            // Another place than the hub, to which no token may go.
            return if token.is_some() { Response::new(400, "") } else { self.take_piece(request, rest) };
        }
        if let Some(hash) = path.strip_prefix("complete/") {
            return self.complete(hash, &request.body);
        }
        if token.is_none() || token != self.writes.token.as_deref() {
            return Response::new(if token.is_none() { 401 } else { 403 }, "");
        }
        let body = |request: &Request| serde_json::from_slice::<Value>(&request.body).unwrap_or_default();
        if path == "api/repos/create" {
            return self.create(address, &body(request));
        }
        if let Some(hash) = path.strip_prefix("verify/") {
            let held = self.writes.objects.get(hash);
            let is_right =
                held.is_some_and(|held| body(request)["size"] == held.len() && hex(&SHA256, held) == hash);
            return Response::new(if is_right { 200 } else { 400 }, "");
        }
        if let Some(repository) = path.strip_suffix(".git/info/lfs/objects/batch") {
            return match self.repositories.contains_key(&format!("models/{repository}")) {
                true => self.batch(address, &body(request)),
                false => refused(404, "RepoNotFound"),
            };
        }
        let path = path.strip_prefix("api/").unwrap_or(path);
        for action in ["preupload", "commit", "branch"] {
            let Some((repository, revision)) = path.split_once(&format!("/{action}/")) else { continue };
            let Some(revisions) = self.repositories.get_mut(repository) else {
                return refused(404, "RepoNotFound");
            };
            if action == "branch" {
                let main = revisions.get("main").cloned().unwrap_or_default();
                let is_new = revisions.insert(revision.to_owned(), main).is_none();
                return Response::new(if is_new { 201 } else { 409 }, "");
            }
            if !revisions.contains_key(revision) {
                return refused(404, "RevisionNotFound");
            }
            return match action {
                "preupload" => self.announce(repository, revision, &body(request)),
                _ => self.commit(address, repository, revision, &request.body),
            };
        }
        Response::new(404, "")
    }

    fn create(&mut self, address: SocketAddr, body: &Value) -> Response {
        let text = |name: &str| body[name].as_str().unwrap_or_default().to_owned();
        let repository = format!("models/{}/{}", text("organization"), text("name"));
        if self.repositories.contains_key(&repository) {
            return Response::new(409, "");
        }
        let attributes = small(b"*.safetensors filter=lfs\n".to_vec());
        self.repositories.insert(repository.clone(), BTreeMap::new());
        let files = [(".gitattributes".to_owned(), attributes)].into();
        self.add_commit(&repository, "main", files);
        let url = format!("http://{address}/{}", repository.trim_start_matches("models/"));
        answered(&json!({"url": url}))
    }

    fn add_commit(&mut self, repository: &str, revision: &str, files: BTreeMap<String, HubFile>) -> String {
        self.writes.commits += 1;
        let commit = format!("{:040x}", 0xc0_ffee_0000 + self.writes.commits);
        let revisions = self.repositories.entry(repository.to_owned()).or_default();
        for name in [revision, &commit] {
            revisions.insert(name.to_owned(), (commit.clone(), files.clone()));
        }
        commit
    }

    fn announce(&mut self, repository: &str, revision: &str, body: &Value) -> Response {
        let files = &self.repositories[repository][revision].1;
        let described = body["files"].as_array().into_iter().flatten().map(|file| {
            let name = file["path"].as_str().unwrap_or_default();
            let is_large = file["size"].as_u64().unwrap_or_default() >= self.writes.large as u64
                || name.ends_with(".safetensors");
            let held = files.get(name).map(|file| file.hash.clone());
            let mode = if is_large { "lfs" } else { "regular" };
            json!({"path": name, "uploadMode": mode, "shouldIgnore": false, "oid": held})
        });
        let answer = json!({"files": described.collect::<Vec<_>>()});
        if let Some((name, contents)) = self.writes.intruder.take() {
            let mut files = files.clone();
            files.insert(name, small(contents));
            self.add_commit(repository, revision, files);
        }
        answered(&answer)
    }

    fn batch(&self, address: SocketAddr, body: &Value) -> Response {
        let piece = self.writes.piece;
        let objects = body["objects"].as_array().into_iter().flatten().map(|object| {
            let (hash, size) =
                (object["oid"].as_str().unwrap_or_default(), object["size"].as_u64().unwrap_or(0));
            if self.writes.objects.contains_key(hash) {
                return json!({"oid": hash, "size": size});
            }
            let verify = json!({"href": format!("http://{address}/verify/{hash}")});
            // A host of another name, as the hub's storage is one.
            let storage = format!("http://localhost:{}", address.port());
            let upload = match size as usize > piece {
                false => json!({"href": format!("{storage}/upload/{hash}/0"), "header": {"x-kind": "whole"}}),
                true => {
                    let mut header = json!({"chunk_size": piece.to_string()});
                    for index in 0..(size as usize).div_ceil(piece) {
                        header[format!("{:05}", index + 1)] =
                            format!("{storage}/upload/{hash}/{}", index + 1).into();
                    }
                    json!({"href": format!("http://{address}/complete/{hash}"), "header": header})
                }
            };
            json!({"oid": hash, "size": size, "actions": {"upload": upload, "verify": verify}})
        });
        answered(&json!({"transfer": "basic", "objects": objects.collect::<Vec<_>>()}))
    }

    fn take_piece(&mut self, request: &Request, path: &str) -> Response {
        let Some((hash, index)) = path.split_once('/') else { return Response::new(404, "") };
        let index: usize = index.parse().unwrap_or(0);
        if index == 0 {
            if request.headers.get("x-kind").map(String::as_str) != Some("whole") {
                return Response::new(403, "");
            }
            self.writes.objects.insert(hash.to_owned(), request.body.clone());
        } else {
            self.writes.pieces.insert((hash.to_owned(), index), request.body.clone());
        }
        Response::new(200, "").with("ETag", format!("\"piece-{index}\""))
    }

    fn complete(&mut self, hash: &str, body: &[u8]) -> Response {
        let body: Value = serde_json::from_slice(body).unwrap_or_default();
        let mut contents = Vec::new();
        for part in body["parts"].as_array().into_iter().flatten() {
            let number = part["partNumber"].as_u64().unwrap_or(0) as usize;
            let piece = self.writes.pieces.get(&(hash.to_owned(), number));
            let is_right = part["etag"] == format!("\"piece-{number}\"");
            let Some(piece) = piece.filter(|_| is_right) else { return Response::new(400, "") };
            contents.extend_from_slice(piece);
        }
        self.writes.pieces.retain(|(of, _), _| of != hash);
        self.writes.objects.insert(hash.to_owned(), contents);
        Response::new(200, "{}")
    }

    fn commit(&mut self, address: SocketAddr, repository: &str, revision: &str, body: &[u8]) -> Response {
        let (head, mut files) = self.repositories[repository][revision].clone();
        let mut names = BTreeSet::new();
        for line in String::from_utf8_lossy(body).lines() {
            let line: Value = serde_json::from_str(line).unwrap_or_default();
            let value = &line["value"];
            let name = value["path"].as_str().unwrap_or_default().to_owned();
            match line["key"].as_str().unwrap_or_default() {
                "header" if !value["parentCommit"].is_null() && value["parentCommit"] != head => {
                    return Response::new(412, "");
                }
                "header" => continue,
                "file" => {
                    let contents = base64_of(value["content"].as_str().unwrap_or_default());
                    files.insert(name.clone(), small(contents));
                }
                "lfsFile" => {
                    let hash = value["oid"].as_str().unwrap_or_default().to_owned();
                    let Some(contents) = self.writes.objects.get(&hash).cloned() else {
                        return Response::new(400, "");
                    };
                    files.insert(name.clone(), HubFile { contents, hash, is_large: true });
                }
                "deletedFile" => {
                    if files.remove(&name).is_none() {
                        return refused(404, "EntryNotFound");
                    }
                }
                _ => return Response::new(400, ""),
            }
            if !names.insert(name) {
                return Response::new(400, "");
            }
        }
        let commit = self.add_commit(repository, revision, files);
        let page = repository.trim_start_matches("models/");
        answered(
            &json!({"commitOid": commit, "commitUrl": format!("http://{address}/{page}/commit/{commit}")}),
        )
    }
}

/// A file that a commit itself holds, with git's hash.
fn small(contents: Vec<u8>) -> HubFile {
    let blob = [format!("blob {}\0", contents.len()).as_bytes(), &contents].concat();
    HubFile { hash: hex(&SHA1_FOR_LEGACY_USE_ONLY, &blob), contents, is_large: false }
}

fn hex(algorithm: &'static Algorithm, bytes: &[u8]) -> String {
    digest(algorithm, bytes).as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The bytes of a text in Base64.
fn base64_of(text: &str) -> Vec<u8> {
    const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digits = text.bytes().filter_map(|byte| DIGITS.iter().position(|digit| *digit == byte));
    let (mut bytes, mut bits, mut number) = (Vec::new(), 0, 0_u32);
    for digit in digits {
        number = number << 6 | digit as u32;
        bits += 6;
        if bits >= 8 {
            bits -= 8;
            bytes.push((number >> bits & 0xff) as u8);
        }
    }
    bytes
}
