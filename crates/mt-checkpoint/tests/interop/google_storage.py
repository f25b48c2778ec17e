"""Google's XML API in front of gcp-storage-emulator, which stores the objects and speaks the JSON API: google_storage.py PORT BUCKET.

The emulator knows no conditions on generations and no uploads in pieces of the XML API. Conditions are checked here, under
a lock, and pieces are objects of the emulator that its `compose` joins.
"""

import http.client
import json
import re
import sys
import threading
import uuid
from email.utils import formatdate
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

from gcp_storage_emulator.server import create_server

PORT, BUCKET = int(sys.argv[1]), sys.argv[2]
PIECES = ".pieces/"
lock = threading.Lock()


def emulator(method, path, body=b"", headers=None):
    """A request to the emulator: the status and the body of its answer."""
    connection = http.client.HTTPConnection("127.0.0.1", inner_port)
    connection.request(method, path, body, headers or {})
    answer = connection.getresponse()
    contents = answer.read()
    connection.close()
    return answer.status, contents


def route(key):
    return f"/storage/v1/b/{BUCKET}/o/{quote(key, safe='')}"


def description(key):
    """What the emulator knows of an object, or `None`."""
    status, contents = emulator("GET", route(key))
    return json.loads(contents) if status == 200 else None


def store(key, contents):
    upload = f"/upload/storage/v1/b/{BUCKET}/o?name={quote(key, safe='')}&uploadType="
    if contents:
        status, answer = emulator("POST", upload + "media", contents, {"Content-Type": "application/octet-stream"})
    else:
        # The emulator takes an empty object only in this form.
        body = b"--x\r\nContent-Type: application/json\r\n\r\n{}\r\n--x\r\nContent-Type: text/plain\r\n\r\n\r\n--x--\r\n"
        status, answer = emulator("POST", upload + "multipart", body, {"Content-Type": "multipart/related; boundary=x"})
    assert status == 200, (key, status, answer)
    return json.loads(answer)


def tag(found):
    return f'"{found["generation"]}"'


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def answer(self, status, body=b"", headers=None):
        self.send_response(status)
        headers = {"Content-Length": str(len(body)), **(headers or {})}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status, code):
        self.answer(status, f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode())

    def handle_request(self):
        parts = urlsplit(self.path)
        query = parse_qs(parts.query, keep_blank_values=True)
        self.query = {name: values[0] for name, values in query.items()}
        bucket, _, key = parts.path.lstrip("/").partition("/")
        self.bucket, self.key = unquote(bucket), unquote(key)
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.bucket != BUCKET:
            return self.refuse(404, "NoSuchBucket")
        handler = {
            ("GET", False): self.list,
            ("GET", True): self.get,
            ("HEAD", True): self.get,
            ("PUT", True): self.put,
            ("POST", True): self.post,
            ("DELETE", True): self.delete,
        }
        return handler[self.command, bool(self.key)]()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_request

    def list(self):
        fields = {"prefix": self.query.get("prefix", ""), "delimiter": self.query.get("delimiter", "")}
        query = "&".join(f"{name}={quote(value, safe='')}" for name, value in fields.items() if value)
        with lock:
            status, contents = emulator("GET", f"/storage/v1/b/{BUCKET}/o?{query}")
        assert status == 200, (status, contents)
        listed = json.loads(contents)
        text = "<?xml version='1.0'?><ListBucketResult>"
        for found in listed.get("items", []):
            if not found["name"].startswith(PIECES):
                text += f"<Contents><Key>{escape(found['name'])}</Key><LastModified>{found['updated']}</LastModified>"
                text += f"<ETag>{escape(tag(found))}</ETag><Size>{found['size']}</Size></Contents>"
        for prefix in listed.get("prefixes", []):
            text += f"<CommonPrefixes><Prefix>{escape(prefix)}</Prefix></CommonPrefixes>"
        self.answer(200, (text + "</ListBucketResult>").encode())

    def get(self):
        with lock:
            found = description(self.key)
            if found is None:
                return self.refuse(404, "NoSuchKey")
            if self.headers.get("If-Match", tag(found)) != tag(found):
                return self.refuse(412, "PreconditionFailed")
            ranged, size = self.headers.get("Range"), int(found["size"])
            headers = {
                "ETag": tag(found),
                "x-goog-generation": found["generation"],
                "Last-Modified": formatdate(datetime.fromisoformat(found["updated"]).timestamp(), usegmt=True),
            }
            if self.command == "HEAD":
                return self.answer(200, b"", {**headers, "Content-Length": str(size)})
            status, contents = emulator("GET", route(self.key) + "?alt=media", headers={"Range": ranged} if ranged else {})
        if ranged:
            start = int(re.match(r"bytes=(\d+)-", ranged)[1])
            if start >= size:
                return self.refuse(416, "InvalidRange")
            headers["Content-Range"] = f"bytes {start}-{start + len(contents) - 1}/{size}"
        self.answer(status, contents, headers)

    def put(self):
        if "partNumber" in self.query:
            with lock:
                stored = store(f"{PIECES}{self.query['uploadId']}/{self.query['partNumber']}", self.body)
            return self.answer(200, b"", {"ETag": tag(stored)})
        with lock:
            wanted = self.headers.get("x-goog-if-generation-match")
            if wanted is not None:
                found = description(self.key)
                if wanted != (found["generation"] if found else "0"):
                    return self.refuse(412, "PreconditionFailed")
            source = self.headers.get("x-goog-copy-source")
            if source is None:
                stored = store(self.key, self.body)
            else:
                key = unquote(unquote(source).partition("/")[2])
                status, answer = emulator("POST", route(key) + "/copyTo" + route(self.key).removeprefix("/storage/v1"))
                if status != 200:
                    return self.refuse(status, "NoSuchKey")
                stored = json.loads(answer)
        self.answer(200, b"", {"ETag": tag(stored), "x-goog-generation": stored["generation"]})

    def post(self):
        if "uploads" in self.query:
            upload = uuid.uuid4().hex
            with lock:
                uploads.add(upload)
            text = f"<?xml version='1.0'?><InitiateMultipartUploadResult><UploadId>{upload}</UploadId>"
            return self.answer(200, f"{text}</InitiateMultipartUploadResult>".encode())
        upload = self.query["uploadId"]
        numbers = re.findall(r"<PartNumber>(\d+)</PartNumber>", self.body.decode())
        with lock:
            if upload not in uploads:
                return self.refuse(404, "NoSuchUpload")
            pieces = [{"name": f"{PIECES}{upload}/{number}"} for number in numbers]
            body = json.dumps({"sourceObjects": pieces, "destination": {}}).encode()
            headers = {"Content-Type": "application/json"}
            status, answer = emulator("POST", route(self.key) + "/compose", body, headers)
            if status != 200:
                return self.refuse(400, "InvalidPart")
            self.give_up(upload)
        stored = json.loads(answer)
        text = f"<?xml version='1.0'?><CompleteMultipartUploadResult><ETag>{escape(tag(stored))}</ETag>"
        headers = {"x-goog-generation": stored["generation"]}
        self.answer(200, f"{text}</CompleteMultipartUploadResult>".encode(), headers)

    def give_up(self, upload):
        uploads.discard(upload)
        _, contents = emulator("GET", f"/storage/v1/b/{BUCKET}/o?prefix={quote(PIECES + upload, safe='')}")
        for piece in json.loads(contents).get("items", []):
            emulator("DELETE", route(piece["name"]))

    def delete(self):
        with lock:
            if "uploadId" in self.query:
                if self.query["uploadId"] not in uploads:
                    return self.refuse(404, "NoSuchUpload")
                self.give_up(self.query["uploadId"])
                return self.answer(204)
            status, _ = emulator("DELETE", route(self.key))
        return self.answer(204) if status == 200 else self.refuse(404, "NoSuchKey")


class Front(ThreadingHTTPServer):
    request_queue_size = 128


uploads = set()
inner = create_server("127.0.0.1", 0, in_memory=True, default_bucket=BUCKET)
inner.start()
inner_port = inner._api._httpd.server_address[1]
Front(("127.0.0.1", PORT), Handler).serve_forever()
