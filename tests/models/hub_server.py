"""A local server with the few answers of the Hugging Face hub that downloading a model needs, and its errors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REFUSALS = {
    "missing/nothing": (404, "RepoNotFound"),
    "owner/private": (401, "RepoNotFound"),
    "owner/broken": (500, ""),
    "owner/token": (401, ""),
}
"""Repositories that cannot be read → the server's status and error code."""
GATED = "owner/gated"


class FakeHub:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests: list[str] = []
        self.address = ""

    def files(self) -> dict[str, Path]:
        return {str(file.relative_to(self.folder)): file for file in self.folder.rglob("*") if file.is_file()}


@contextmanager
def serve_hub(folder: Path) -> Iterator[FakeHub]:
    """`owner/model` is the pipeline in `folder`; `owner/gated` is the same behind a gate."""
    hub = FakeHub(folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(body=True)

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def log_message(self, *_: object) -> None:
            """Log nothing: the tests read `FakeHub.requests`."""

        def _answer(self, body: bool) -> None:
            path = urlparse(self.path).path
            hub.requests.append(f"{self.command} {path}")
            status, headers, content = _reply(hub, path)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                self.wfile.write(content)

    return Handler


def _reply(hub: FakeHub, path: str) -> tuple[int, dict[str, str], bytes]:
    parts = path.strip("/").split("/")
    api = parts[:2] == ["api", "models"]
    repository = "/".join(parts[2:4] if api else parts[:2])
    if repository in REFUSALS:
        status, code = REFUSALS[repository]
        wrong_token = {"X-Error-Message": "Invalid credentials in Authorization header"} if status == 401 else {}
        return status, {"X-Error-Code": code} if code else wrong_token, b"{}"
    if api and parts[4:5] == ["revision"]:
        if parts[5] not in ("main", "v1", COMMIT):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        return 200, {}, json.dumps({"id": repository, "sha": COMMIT, "siblings": []}).encode()
    if api and parts[4:5] == ["tree"]:
        return 200, {}, json.dumps([_entry(name, file) for name, file in sorted(hub.files().items())]).encode()
    if repository == GATED:
        return 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"}, b""
    name = "/".join(parts[4:])
    content = hub.files()[name].read_bytes()
    return 200, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}, content


def _entry(name: str, file: Path) -> dict[str, object]:
    content = file.read_bytes()
    return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
