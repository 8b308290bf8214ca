"""A local server that speaks the Hugging Face hub's protocol for pushing, with faults: accounts, repositories,
preupload, large files (LFS batch, PUT and verify) and commits.

Every error repeats the token that it received, in its body and in a header: a client must not show either.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any
from urllib.parse import urlparse

import pytest

TOKEN = "hf_ThisIsASecretThatNobodyMayEverSee12"
LARGE = (".safetensors", ".png", ".mp4")


@dataclass
class FakeRepository:
    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=lambda: [hashlib.sha1(b"initial").hexdigest()])
    messages: list[str] = field(default_factory=list)


@dataclass
class PushHub:
    """The state of the server."""

    address: str = ""
    account: dict[str, Any] = field(
        default_factory=lambda: {
            "name": "someone",
            "orgs": [{"name": "a-group"}],
            "auth": {"accessToken": {"role": "write"}},
        }
    )
    repositories: dict[str, FakeRepository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    faults: dict[str, list[int]] = field(default_factory=dict)
    """Step of the protocol → statuses of its next answers; 0: no answer until the server ends."""
    is_ending: Event = field(default_factory=Event)

    def uploads(self) -> list[str]:
        return [line for line in self.requests if line.startswith("PUT")]


@contextmanager
def serve_push_hub() -> Iterator[PushHub]:
    hub = PushHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.is_ending.set()
        server.shutdown()
        server.server_close()
        thread.join()


def use_push_hub(hub: PushHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process push to the server, with its token and without Xet, whose protocol the server does not speak."""
    import huggingface_hub

    files = "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.address)
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.address + files)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)


class Refusal(Exception):
    def __init__(self, status: int, code: str = "") -> None:
        self.status, self.code = status, code


def _handler(hub: PushHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer()

        do_POST = do_PUT = do_GET

        def log_message(self, *_: object) -> None:
            """Log nothing: the tests read `PushHub.requests`."""

        def _answer(self) -> None:
            path = urlparse(self.path).path
            body = self._read_body()
            hub.requests.append(f"{self.command} {path}")
            given = self.headers.get("Authorization") or ""
            headers: dict[str, str] = {}
            try:
                answer = _reply(hub, self.command, path, body, given)
                status, content = 200, answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            except Refusal as refusal:
                status, content = refusal.status, json.dumps({"error": f"refused: {given}"}).encode()
                headers = {"X-Error-Message": f"refused: {given}", "X-HF-Warning": f"careful; {given}"}
                if refusal.code:
                    headers["X-Error-Code"] = refusal.code
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def _read_body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

    return Handler


def _fail_if_asked(hub: PushHub, step: str) -> None:
    if hub.faults.get(step):
        status = hub.faults[step].pop(0)
        if status == 0:
            hub.is_ending.wait(30)
            status = 500
        if status != 200:
            raise Refusal(status, "GatedRepo" if status == 403 and step == "info" else "")


def _reply(hub: PushHub, method: str, path: str, body: bytes, given: str) -> Any:
    parts = path.strip("/").split("/")
    if parts[0] == "storage":  # large files go to a storage that must not see the token
        assert not given, "the token was sent to the storage"
        return _store(hub, parts[1], body)
    if given != f"Bearer {TOKEN}":
        raise Refusal(401)
    if path == "/api/whoami-v2":
        _fail_if_asked(hub, "whoami")
        return hub.account
    if path == "/api/repos/create":
        return _create(hub, json.loads(body))
    if path == "/api/validate-yaml":
        _fail_if_asked(hub, "yaml")
        return {"warnings": [{"message": f"careful: {given}"}], "errors": []}
    if path.endswith(".git/info/lfs/objects/batch"):
        return _batch(hub, json.loads(body))
    if path == "/verify":
        return {}
    if parts[:2] == ["api", "models"]:
        name = "/".join(parts[2:4])
        if name not in hub.repositories:
            raise Refusal(404, "RepoNotFound")
        return _repository_reply(hub, name, parts[4:], body)
    _fail_if_asked(hub, "resolve")
    repository, file = hub.repositories["/".join(parts[:2])], "/".join(parts[4:])
    if file not in repository.files:
        raise Refusal(404, "EntryNotFound")
    return repository.files[file]


def _create(hub: PushHub, asked: dict[str, Any]) -> Any:
    _fail_if_asked(hub, "create")
    name = f"{asked['organization']}/{asked['name']}"
    if name in hub.repositories:
        raise Refusal(409)  # the client is to look for the repository first
    if asked["organization"] not in (hub.account["name"], *(row["name"] for row in hub.account["orgs"])):
        raise Refusal(403)
    hub.repositories[name] = FakeRepository(asked.get("visibility") == "private" or bool(asked.get("private")))
    return {"url": f"{hub.address}/{name}"}


def _repository_reply(hub: PushHub, name: str, rest: list[str], body: bytes) -> Any:
    repository = hub.repositories[name]
    if rest[:1] == ["preupload"]:
        _fail_if_asked(hub, "preupload")
        return {"files": [_preupload(repository, row["path"]) for row in json.loads(body)["files"]]}
    if rest[:1] == ["commit"]:
        _fail_if_asked(hub, "commit")
        return _commit(hub, name, [json.loads(line) for line in body.splitlines()])
    _fail_if_asked(hub, "info")
    return {"id": name, "sha": repository.commits[-1], "private": repository.private, "siblings": []}


def _preupload(repository: FakeRepository, path: str) -> dict[str, Any]:
    is_large = path.endswith(LARGE)
    content, oid = repository.files.get(path), None
    if content is not None:
        blob = b"blob %d\0" % len(content) + content
        oid = hashlib.sha256(content).hexdigest() if is_large else hashlib.sha1(blob).hexdigest()
    return {"path": path, "uploadMode": "lfs" if is_large else "regular", "shouldIgnore": False, "oid": oid}


def _batch(hub: PushHub, asked: dict[str, Any]) -> Any:
    _fail_if_asked(hub, "batch")
    rows = []
    for row in asked["objects"]:
        if row["oid"] not in hub.objects:
            href = f"{hub.address}/storage/{row['oid']}"
            actions = {"upload": {"href": href}, "verify": {"href": f"{hub.address}/verify"}}
            row = {**row, "actions": actions}
        rows.append(row)
    return {"transfer": "basic", "objects": rows}


def _store(hub: PushHub, oid: str, body: bytes) -> Any:
    _fail_if_asked(hub, "storage")
    assert hashlib.sha256(body).hexdigest() == oid
    hub.objects[oid] = body
    return {}


def _commit(hub: PushHub, name: str, lines: list[dict[str, Any]]) -> Any:
    repository = hub.repositories[name]
    header = lines[0]["value"]
    if header.get("parentCommit") not in (None, repository.commits[-1]):
        raise Refusal(412)
    for line in lines[1:]:
        value = line["value"]
        is_large = line["key"] == "lfsFile"
        repository.files[value["path"]] = hub.objects[value["oid"]] if is_large else base64.b64decode(value["content"])
    repository.commits.append(hashlib.sha1(f"{time.monotonic_ns()}".encode()).hexdigest())
    repository.messages.append(header["summary"])
    return {"commitUrl": f"{hub.address}/{name}/commit/x", "commitOid": repository.commits[-1]}
