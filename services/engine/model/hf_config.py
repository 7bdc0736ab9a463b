"""A checkpoint's config as transformers reads it, and whether its weights fit the device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from services.engine.device import DTYPES, Device
from services.engine.memory import InsufficientMemory
from services.engine.model.checks import ModelError

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def own_architecture(model_type: str) -> str | None:
    """The name of the class that transformers runs a model type with; None if there is none."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    return None if name is None else str(name)


def load_config(
    directory: Path, kind: type[Any], architecture: str, max_model_len: int | None
) -> PreTrainedConfig:
    """Parse config.json as a config of class `kind` and check what it asks for. Raises ModelError."""
    try:
        config: PreTrainedConfig = kind.from_pretrained(directory, local_files_only=True)
    except Exception as error:
        raise ModelError(f"{directory / 'config.json'} is not accepted: {first_line(error)}") from None
    other = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if other:
        raise ModelError(
            f"architecture {architecture} is not supported with layers of type {', '.join(sorted(other))}"
        )
    _check_rope(config, max_model_len)
    # Balancing losses of training: a head alone has no router scores to compute them from.
    if getattr(config, "output_router_logits", False):
        config.output_router_logits = False
    return config


def first_line(error: BaseException) -> str:
    """An exception as the tail of a one-line message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def checkpoint_dtype(value: Any) -> torch.dtype | None:
    """A config's dtype, as transformers gives it or by name; None if it says none that is known."""
    return value if isinstance(value, torch.dtype) else DTYPES.get(str(value))


def _check_rope(config: PreTrainedConfig, max_model_len: int | None) -> None:
    """Refuse rotary embeddings that change with the longest sequence of a batch.

    Within the original context they are constant; beyond, a row's result would depend on its neighbours and
    on KV that was cached under other frequencies.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    for kind in kinds:
        if kind.get("rope_type") != "longrope":
            continue
        original = kind.get("original_max_position_embeddings") or config.max_position_embeddings
        limit = max_model_len or config.max_position_embeddings
        if limit > original:
            raise ModelError(
                f"rope type longrope is supported within the original context only: "
                f"set max-model-len to {original} or less (it is {limit})"
            )


_GIB = 2**30


def check_weights_fit(
    directory: Path, config: Mapping[str, Any], dtype: str, device: Device, *, native: bool = True
) -> None:
    """Compare the size of the files, converted to what the device keeps, with what is free.

    config: the content of config.json. native: whether `Kernels.native_decoder` may compute the model, which
    never takes more; once it is known that torch does, this is to be asked again. Raises InsufficientMemory
    with both numbers, DeviceError for a dtype that the device does not know.
    """
    stored = DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch."))
    chosen = (device.kernels.native_dtype if native else device.kernels.choose_dtype)(dtype, stored)
    packed = device.kernels.weight_size(chosen) if native else chosen.itemsize
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    needed = size if stored is None else _needed(size // stored.itemsize, config, chosen, packed)
    free = device.memory.figures().free
    if needed > free:
        raise InsufficientMemory(
            f"the model's weights take {needed / _GIB:.2f} GiB in {str(chosen).removeprefix('torch.')} and "
            f"{free / _GIB:.2f} GiB of the device's memory are free: choose a smaller model or dtype"
        )


def _needed(numbers: int, config: Mapping[str, Any], chosen: torch.dtype, packed: float) -> int:
    """Return bytes of so many weights of `packed` each; the embedding has the computation's type."""
    rows, width = config.get("vocab_size"), config.get("hidden_size")
    embedding = min(rows * width, numbers) if isinstance(rows, int) and isinstance(width, int) else 0
    if packed == chosen.itemsize:
        return numbers * chosen.itemsize
    return int(embedding * chosen.itemsize + numbers * packed)
