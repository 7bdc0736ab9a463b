"""Fetches a model from ModelScope, or from a mirror of it, through its HTTP file API.

Two calls are used: `/api/v1/models/GROUP/NAME/repo/files?Revision=master&Recursive=true` lists the files with
sizes and hashes, `/api/v1/models/GROUP/NAME/repo?Revision=master&FilePath=PATH` is one of them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from http.client import HTTPException, HTTPMessage, HTTPResponse
from pathlib import Path
from typing import IO, Any, Final
from urllib.parse import quote, urlencode, urlsplit

from catenary.directories import NoHomeError, expanded
from services.engine.model.checks import ModelError

# Without one byte from the hub, not for the whole of a file: a slow line is no failure.
_TIMEOUT_S: Final = 60.0


class HttpStatus(Exception):
    """The server answered with an error; its code is in `code`."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"HTTP status {code} {reason}".strip())
        self.code = code


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to http and https, and leaves the credentials behind when the host changes."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is None:
            return None
        if urlsplit(newurl).scheme not in ("http", "https"):
            raise HttpStatus(code, "with a redirect to another kind of URL")
        if urlsplit(newurl)[:2] != urlsplit(req.full_url)[:2]:
            for name in ("Cookie", "Authorization"):
                request.remove_header(name)
        return request


class Client:
    """Sends GET requests. Proxies come from the environment (HTTPS_PROXY, NO_PROXY)."""

    def __init__(self, *, token: str = "") -> None:
        self._token = token
        self._opener = urllib.request.build_opener(_Redirects())

    def get(self, url: str) -> HTTPResponse:
        """The answer, to be read in pieces and closed. Raises HttpStatus and OSError."""
        # ModelScope knows its users by a cookie.
        headers = {"User-Agent": "catenary"} | (
            {"Cookie": f"m_session_id={self._token}"} if self._token else {}
        )
        try:
            answer = self._opener.open(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            error.close()
            raise HttpStatus(error.code, str(error.reason)) from None
        if not isinstance(answer, HTTPResponse):
            raise HttpStatus(0, "is no HTTP answer")
        return answer


DEFAULT_DOMAIN: Final = "www.modelscope.cn"
_REVISION: Final = "master"
# A listing of more files than any model has is the answer of something else. Tries are for lost connections.
_MAX_LISTING: Final = 16 << 20
_MAX_FILES: Final = 10_000
_CHUNK: Final = 1 << 20
_TRIES: Final = 3
_RETRY_S: Final = 1.0

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    size: int
    sha256: str


def endpoint(environment: Mapping[str, str]) -> str:
    """Base URL of ModelScope: MODELSCOPE_DOMAIN, a host or an http(s) URL, or the public one.

    Raises ModelError for another scheme, and for what cannot be read.
    """
    domain = environment.get("MODELSCOPE_DOMAIN", "").strip().rstrip("/") or DEFAULT_DOMAIN
    url = domain if "://" in domain else f"https://{domain}"
    try:
        readable = urlsplit(url).scheme in ("http", "https") and urlsplit(url).hostname
    except ValueError:
        readable = None
    if not readable:
        raise ModelError(f"MODELSCOPE_DOMAIN {domain[:100]!r} must be a host name or an http(s) URL")
    return url


def known_directory(hub_id: str, environment: Mapping[str, str]) -> Path | None:
    """Where ModelScope's own library has put this model, None if it has not."""
    configured = environment.get("MODELSCOPE_CACHE", "").strip()
    try:
        root = expanded(configured or "~/.cache/modelscope/hub")
    except NoHomeError:
        return None
    group, name = hub_id.split("/")
    for above in (root / "models", root, root / "hub" / "models", root / "hub"):
        for written in (name, name.replace(".", "___")):
            directory = above / group / written
            if (directory / "config.json").is_file():
                return directory
    return None


def fetch(
    hub_id: str, target: Path, environment: Mapping[str, str], patterns: list[str], say: Progress
) -> None:
    """Fetches the files of the top level that fit `patterns` into `target`, which appears when all are there.

    Files of an interrupted try are kept for the next. Raises ModelError, one line.
    """
    base = f"{endpoint(environment)}/api/v1/models/{quote(hub_id)}/repo"
    client = Client(token=environment.get("MODELSCOPE_API_TOKEN", "").strip())
    try:
        files = _listed(client, base, hub_id, patterns)
        # Files of two states of a model must not mix.
        state = hashlib.sha256(repr(files).encode()).hexdigest()[:12]
        scratch = target.with_name(f".{target.name}.{state}.partial")
        scratch.mkdir(parents=True, exist_ok=True)
        _check_room(files, scratch, hub_id)
        for number, file in enumerate(files, 1):
            say(f"fetching {hub_id} from ModelScope: {file.name} ({number} of {len(files)})")
            _fetch_with_retries(client, base, file, scratch)
        scratch.rename(target)
    except (HttpStatus, HTTPException, OSError) as error:
        reason = getattr(error, "strerror", None) or getattr(error, "reason", None) or error
        raise ModelError(
            f"model {hub_id!r} cannot be fetched from {base.split('/api/')[0]}: {reason}"
        ) from None


def _listed(client: Client, base: str, hub_id: str, patterns: list[str]) -> list[_File]:
    query = urlencode({"Revision": _REVISION, "Recursive": "true"})
    with client.get(f"{base}/files?{query}") as answer:
        data = answer.read(_MAX_LISTING + 1)
    if len(data) > _MAX_LISTING:
        raise ModelError(f"ModelScope's list of the files of {hub_id!r} is larger than {_MAX_LISTING} bytes")
    try:
        entries = json.loads(data)["Data"]["Files"]
        files = [_file(entry) for entry in entries[: _MAX_FILES + 1] if entry.get("Type") != "tree"]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ModelError(f"ModelScope's list of the files of {hub_id!r} has not the expected form") from None
    if len(entries) > _MAX_FILES:
        raise ModelError(f"ModelScope lists more than {_MAX_FILES} files of {hub_id!r}")
    for file in files:
        parts = file.name.split("/")
        if file.name.startswith("/") or "\\" in file.name or "\0" in file.name or ".." in parts:
            raise ModelError(
                f"ModelScope lists a file of {hub_id!r} that lies elsewhere: {file.name[:100]!r}"
            )
    kept = [file for file in files if any(fnmatchcase(file.name, pattern) for pattern in patterns)]
    return [file for file in kept if "/" not in file.name and not file.name.startswith(".")]


def _file(entry: Mapping[str, Any]) -> _File:
    name, size, digest = entry["Path"], entry["Size"], entry.get("Sha256") or ""
    if not isinstance(name, str) or not isinstance(digest, str) or type(size) is not int or size < 0:
        raise ValueError("not a file")
    return _File(name, size, digest.lower())


def _check_room(files: list[_File], directory: Path, hub_id: str) -> None:
    needed = sum(file.size for file in files if not _is_there(file, directory))
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise ModelError(
            f"model {hub_id!r} needs {needed / 2**30:.1f} GiB in {directory.parent}, where "
            f"{free / 2**30:.1f} GiB are free: name another place with MODELSCOPE_CACHE or --cache-dir"
        )


def _is_there(file: _File, directory: Path) -> bool:
    path = directory / file.name
    return path.is_file() and path.stat().st_size == file.size


def _fetch_with_retries(client: Client, base: str, file: _File, directory: Path) -> None:
    if _is_there(file, directory):
        return
    for left in range(_TRIES - 1, -1, -1):
        try:
            _fetch_file(client, base, file, directory)
            break
        except HttpStatus as error:
            if not left or error.code < 500:
                raise
        except (OSError, HTTPException):
            if not left:
                raise
        time.sleep(_RETRY_S)


def _fetch_file(client: Client, base: str, file: _File, directory: Path) -> None:
    """Writes one file. A longer or shorter answer than listed is an error, and so is another hash."""
    part, digest, size = directory / f".{file.name}.part", hashlib.sha256(), 0
    query = urlencode({"Revision": _REVISION, "FilePath": file.name})
    with client.get(f"{base}?{query}") as answer, part.open("wb") as out:
        while size <= file.size and (data := answer.read(min(_CHUNK, file.size - size + 1))):
            out.write(data)
            digest.update(data)
            size += len(data)
    if size != file.size:
        raise ModelError(f"ModelScope sent {size} bytes or more of {file.name}, listed with {file.size}")
    if file.sha256 and digest.hexdigest() != file.sha256:
        raise ModelError(f"{file.name} from ModelScope has another SHA-256 than listed")
    part.rename(directory / file.name)
