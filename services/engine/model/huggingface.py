"""Models of the Hugging Face hub, fetched by its own client, and why one cannot be."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from services.engine.model.errors import ModelError
from services.engine.model.sources import hub_is_offline, near_model

FILES: Final = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
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
        path = huggingface_hub.snapshot_download(hub_id, allow_patterns=list(FILES), local_files_only=offline)
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
