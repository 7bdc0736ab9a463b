"""A model hub on loopback: ModelScope's file API, and what fetches need of Hugging Face's."""

from __future__ import annotations

import hashlib
import json
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def tiny_files() -> dict[str, bytes]:
    """The files of a directory that passes the checks for a model: a config and one weight."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    weights = struct.pack("<Q", len(header)) + header + struct.pack("<f", 1.0)
    config = {"model_type": "llama", "vocab_size": 1, "architectures": ["LlamaForCausalLM"]}
    return {
        "config.json": json.dumps(config).encode(),
        "model.safetensors": weights,
        "README.md": b"not needed",
    }


class Hub:
    """Serves `files` as the model GROUP/NAME of both hubs. `listing` replaces ModelScope's list of files.

    `failures` are the next status codes of file requests, `elsewhere` the base URL that files are at.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = dict(files)
        self.listing: Any = None
        self.failures: list[int] = []
        self.elsewhere = ""
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.url = ""

    def paths(self) -> list[str]:
        """The paths that were asked for, without their queries."""
        return [urlsplit(target).path for target, _ in self.requests]

    def answer(self, target: str, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        self.requests.append((target, headers))
        url = urlsplit(target)
        if url.path.endswith("/repo/files"):
            data = self._listed() if self.listing is None else self.listing
            return 200, {}, json.dumps(data).encode()
        if url.path.endswith("/repo"):
            return self._file(parse_qs(url.query)["FilePath"][0], target)
        if "/tree/" in url.path:
            return 200, {}, json.dumps(self._tree()).encode()
        if url.path.startswith("/api/models/"):
            return 200, {}, json.dumps(self._hugging_face()).encode()
        if "/resolve/" in url.path:
            return self._file(url.path.rsplit("/", 1)[-1], target)
        return 404, {}, b""

    def entry(self, name: str, **changes: Any) -> dict[str, Any]:
        data = self.files.get(name, b"")
        digest = hashlib.sha256(data).hexdigest()
        return {"Name": name, "Path": name, "Type": "blob", "Size": len(data), "Sha256": digest} | changes

    def _listed(self) -> Any:
        files = [self.entry(name) for name in self.files]
        files.append(self.entry("figures", Type="tree"))
        return {"Code": 200, "Success": True, "Data": {"Files": files}}

    def _hugging_face(self) -> Any:
        return {"id": "group/name", "sha": COMMIT, "siblings": [{"rfilename": name} for name in self.files]}

    def _tree(self) -> Any:
        return [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in self.files.items()
        ]

    def _file(self, name: str, target: str) -> tuple[int, dict[str, str], bytes]:
        if self.failures:
            return self.failures.pop(0), {}, b""
        if self.elsewhere:
            return 302, {"Location": self.elsewhere + target}, b""
        if name not in self.files:
            return 404, {}, b""
        data = self.files[name]
        etag = hashlib.sha256(data).hexdigest()
        return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, data


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serves the hub on a free port of loopback; its URL is in `url`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, headers, body = hub.answer(self.path, {k.lower(): v for k, v in self.headers.items()})
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            """Tests look at `requests`."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
