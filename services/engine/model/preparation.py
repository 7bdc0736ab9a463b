"""Bring a model to this disk as a checked Hugging Face directory, or its config.json alone."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from catenary.directories import NoHomeError, cache_directory
from catenary.memory import MemoryWatch
from catenary.runtime import module_command
from services.engine.model.checks import ModelError, check_directory, read_config, read_config_file
from services.engine.model.facts import read_facts
from services.engine.model.gguf_file import check_gguf, read_gguf_config
from services.engine.model.sources import (
    HUB_FILES,
    ModelSource,
    SourceKind,
    download,
    download_config,
    expanded,
    fetch,
    hub_is_offline,
    known_directory,
    resolve_source,
)


@contextmanager
def exclusive(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold an exclusive lock on `path`; calls `on_wait` once if another process has it.

    The kernel drops the lock with its holder, so that a killed converter never blocks the next one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# Part of a cache entry's name: raise it when the converter writes something else.
_CONVERTER = "2"
# Where transformers looks for it.
_TOOLS_TEMPLATE = Path("additional_chat_templates") / "tool_use.jinja"
_SAMPLE_BYTES = 8 * 2**20

Progress = Callable[[str], None]


def default_cache_dir() -> Path:
    """`$CATENARY_CACHE`, else `~/.cache/catenary`. Raises ModelError for a user without a home directory."""
    try:
        return cache_directory()
    except NoHomeError as error:
        raise ModelError(str(error)) from None


def prepare_model(
    model: str,
    *,
    cache_dir: Path | None = None,
    progress: Progress = lambda _: None,
    convert_s: float | None = None,
) -> Path:
    """Return the checked directory of `model`: an alias, a .gguf file, a directory or a hub's id.

    A GGUF file is converted once into the cache, in at most `convert_s` seconds if given. Raises
    ModelError with one readable line.
    """
    source = resolve_source(model)
    cache = cache_dir if cache_dir is not None else default_cache_dir()
    if source.kind is SourceKind.GGUF:
        directory = _converted(source, cache, progress, convert_s)
    elif source.kind is SourceKind.HUB:
        directory = download(str(source.hub_id), progress)
    elif source.kind is SourceKind.MODELSCOPE:
        directory = _from_modelscope(source, cache, progress)
    else:
        directory = _path_of(source)
    # Refused now and not by the engine later: the facts' numbers are checked while they are read.
    read_facts(directory, check_directory(directory))
    return directory


def _path_of(source: ModelSource) -> Path:
    if source.path is None:
        raise ModelError(f"model {source.name} has no path")
    return source.path


def converted_directory(source: ModelSource, cache: Path) -> Path:
    """Return the directory of a GGUF file's conversion, made or not yet."""
    name = re.sub(r"[^\w.-]", "-", source.name)
    return cache / "models" / f"{name}-{_fingerprint(_path_of(source), _tools_of(source))}"


def _tools_of(source: ModelSource) -> bytes:
    return b"" if source.tools_template is None else source.tools_template.read_bytes()


def _converted(source: ModelSource, cache: Path, progress: Progress, convert_s: float | None) -> Path:
    target = converted_directory(source, cache)
    models, name, tools = target.parent, target.name.rpartition("-")[0], _tools_of(source)
    if target.is_dir():
        return target
    try:
        with exclusive(
            models / f".{target.name}.lock", lambda: progress(f"waiting for another converter of {name}")
        ):
            if not target.is_dir():
                _convert(source, target, tools, progress, convert_s)
    except OSError as error:
        raise ModelError(f"model cache {models} cannot be written: {error.strerror}") from None
    return target


def _convert(
    source: ModelSource, target: Path, tools: bytes, progress: Progress, convert_s: float | None
) -> None:
    file = _path_of(source)
    # A damaged one is told before torch is loaded for it.
    check_gguf(file)
    progress(f"converting {file.name} to safetensors, once; this takes half a minute for a small model")
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        # A process of its own gives the converter's memory back, and keeps torch out of this one.
        command = [*module_command("services.engine.model.gguf"), str(file), str(scratch)]
        memory = MemoryWatch()
        try:
            result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=convert_s)
        except subprocess.TimeoutExpired:
            raise ModelError(
                f"GGUF file {file} cannot be converted: the converter was ended after {convert_s:g} s "
                "(--convert-timeout-s)"
            ) from None
        if result.returncode != 0:
            lines = result.stderr.strip().splitlines() or [f"the converter ended with {result.returncode}"]
            raise ModelError(
                f"GGUF file {file} cannot be converted: {lines[-1]}{memory.explain(result.returncode)}"
            )
        _advise(scratch / "generation_config.json", source.sampling)
        if tools:
            (scratch / _TOOLS_TEMPLATE).parent.mkdir()
            (scratch / _TOOLS_TEMPLATE).write_bytes(tools)
        check_directory(scratch)
        # The cache may be a volume that several users' processes read.
        scratch.chmod(0o755)
        for entry in scratch.rglob("*"):
            entry.chmod(0o755 if entry.is_dir() else 0o644)
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    progress(f"converted {file.name} to {target}")


def _advise(generation_config: Path, sampling: Mapping[str, float]) -> None:
    defaults = json.loads(generation_config.read_text(encoding="utf-8"))
    generation_config.write_text(json.dumps(defaults | dict(sampling), indent=2), encoding="utf-8")


def _fingerprint(file: Path, tools: bytes) -> str:
    """A short hash of a GGUF file's size, head and tail, which are its metadata and a sample of its weights,
    and of the template for tools that comes with it."""
    digest = hashlib.sha256(_CONVERTER.encode() + tools)
    size = file.stat().st_size
    digest.update(str(size).encode())
    with file.open("rb") as stream:
        digest.update(stream.read(_SAMPLE_BYTES))
        stream.seek(max(0, size - _SAMPLE_BYTES))
        digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:12]


def modelscope_config(source: ModelSource, progress: Progress) -> Path:
    """A directory with the config.json of a model of ModelScope: the model's, or one with nothing else."""
    hub_id, cache = str(source.hub_id), default_cache_dir()
    directories = (known_directory(hub_id, os.environ), _modelscope_root(cache) / hub_id)
    for directory in directories:
        if directory is not None and directory.is_dir():
            return directory
    return _fetched(hub_id, cache / "modelscope-configs", ["config.json"], progress)


def _from_modelscope(source: ModelSource, cache: Path, progress: Progress) -> Path:
    """A model of ModelScope is fetched once, into MODELSCOPE_CACHE or our cache."""
    hub_id = str(source.hub_id)
    if (known := known_directory(hub_id, os.environ)) is not None:
        return known
    return _fetched(hub_id, _modelscope_root(cache), list(HUB_FILES), progress)


def _modelscope_root(cache: Path) -> Path:
    configured = os.environ.get("MODELSCOPE_CACHE", "").strip()
    return expanded(configured, "MODELSCOPE_CACHE") / "models" if configured else cache / "modelscope"


def _fetched(hub_id: str, root: Path, patterns: list[str], progress: Progress) -> Path:
    target = root / hub_id
    if target.is_dir():
        return target
    if hub_is_offline():
        raise ModelError(f"model {hub_id!r} is not in {root}, and hub access is off: HF_HUB_OFFLINE")
    try:
        with exclusive(
            target.parent / f".{target.name}.lock", lambda: progress(f"waiting for another fetch of {hub_id}")
        ):
            if not target.is_dir():
                fetch(hub_id, target, os.environ, patterns, progress)
    except OSError as error:
        raise ModelError(f"model cache {root} cannot be written: {error.strerror}") from None
    return target


_CONFIG = "config.json"


def find_config(model: str, *, progress: Callable[[str], None]) -> tuple[dict[str, Any], str, Path | None]:
    """The parsed config, the model's name and the directory of its weights, None where it has none yet.

    `model`: an alias, a GGUF file, of which only the metadata is read, a directory, a config.json under any
    name or a hub id, of which only the config is fetched. Raises ModelError, one line.
    """
    path = expanded(model)
    if path.suffix.lower() == ".json" and path.is_file():
        own = path.name == _CONFIG
        return (
            read_config_file(path),
            path.resolve().parent.name if own else path.stem,
            (path.parent if own else None),
        )
    source = resolve_source(model)
    match source.kind:
        case SourceKind.DIRECTORY:
            directory = source.path or path
        case SourceKind.GGUF:
            return _gguf(source)
        case SourceKind.HUB:
            progress(f"fetching the config of {source.hub_id}")
            directory = download_config(str(source.hub_id))
        case SourceKind.MODELSCOPE:
            directory = modelscope_config(source, progress)
    return read_config(directory), source.name, directory


def _gguf(source: ModelSource) -> tuple[dict[str, Any], str, Path | None]:
    """Of a file that was converted, what the conversion wrote; else what the file says of itself."""
    directory = converted_directory(source, default_cache_dir())
    if directory.is_dir():
        return read_config(directory), source.name, directory
    return read_gguf_config(source.path or Path()), source.name, None
