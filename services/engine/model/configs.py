"""A model's config.json alone, for what needs no weights. Imports no torch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.engine.model.checks import read_config
from services.engine.model.errors import ModelError
from services.engine.model.preparation import modelscope_config, prepare_model
from services.engine.model.sources import SourceKind, expanded, hub_is_offline, resolve_source


def find_config(model: str, *, progress: Callable[[str], None]) -> tuple[dict[str, Any], str, Path]:
    """The parsed config, the model's name and the directory of the config.

    `model`: an alias, a GGUF file (both are converted, once), a directory, a config.json or a hub id, of
    which only the config is fetched. Raises ModelError, one line.
    """
    path = expanded(model)
    if path.suffix.lower() == ".json" and path.is_file():
        return read_config(path.parent), path.resolve().parent.name, path.parent
    source = resolve_source(model)
    match source.kind:
        case SourceKind.DIRECTORY:
            directory = source.path or path
        case SourceKind.GGUF:
            directory = prepare_model(model, progress=progress)
        case SourceKind.HUB:
            progress(f"fetching the config of {source.hub_id}")
            directory = _fetch(str(source.hub_id))
        case SourceKind.MODELSCOPE:
            directory = modelscope_config(source, progress)
    return read_config(directory), source.name, directory


def _fetch(hub_id: str) -> Path:
    # The hub client costs a fifth of a second, which models on disk do not need.
    from huggingface_hub import hf_hub_download  # noqa: PLC0415

    # The reason is told once, at the end, and not for each of the client's tries.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    offline = hub_is_offline()
    try:
        return Path(hf_hub_download(hub_id, "config.json", local_files_only=offline)).parent
    except Exception as error:
        hint = " (hub access is off: HF_HUB_OFFLINE)" if offline else ""
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"model {hub_id!r} is no directory here and its config cannot be fetched from the hub{hint}: "
            f"{reason}"
        ) from None
