"""A model's config.json alone, for what needs no weights. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.engine.model.checks import read_config, read_config_file
from services.engine.model.gguf_header import read_gguf_config
from services.engine.model.huggingface import download_config
from services.engine.model.preparation import converted_directory, default_cache_dir, modelscope_config
from services.engine.model.sources import ModelSource, SourceKind, expanded, resolve_source

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
