"""Loads a checked model directory with transformers onto a device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from services.engine.device import Device, DeviceError
from services.engine.model.checks import check_directory, read_config
from services.engine.model.errors import ModelError
from services.engine.model.fit import check_weights_fit
from services.engine.model.hf_config import checkpoint_dtype, first_line
from services.engine.model.transformers_backend.architecture import load_model_config, model_class
from services.engine.model.transformers_backend.attention import IMPLEMENTATION
from services.engine.model.transformers_backend.experts import use_static_experts
from services.engine.model.transformers_backend.paged_model import TransformersModel

# Not annotated by transformers.
_logging: Any = logging

_PADDING_CHECK = "warn_if_padding_and_no_attention_mask"


def load_model(
    directory: Path, device: Device, *, dtype: str, max_model_len: int | None
) -> TransformersModel:
    """Loads the model of a Hugging Face directory in `dtype` (auto, float32, bfloat16, float16).

    `max_model_len` None means the model's own. Raises ModelError with one readable line, InsufficientMemory.
    """
    _be_quiet()
    raw = check_directory(directory)
    kind: Any = model_class(directory, raw)
    config = load_model_config(directory, raw, kind, max_model_len)
    model, chosen = load_module(kind, directory, config, device, dtype=dtype, attention=IMPLEMENTATION)
    use_static_experts(model, device)
    model.to(device.torch_device).eval().requires_grad_(False)
    return TransformersModel(model, device, chosen)


def load_module(
    kind: Any, directory: Path, config: Any, device: Device, *, dtype: str, attention: str, **options: Any
) -> tuple[Any, torch.dtype]:
    """The module of class `kind` with a directory's weights, as the class loads it; and its dtype.

    `attention` names a registered implementation; `options` go to the class. Raises ModelError, or
    InsufficientMemory before anything is read.
    """
    _be_quiet()
    try:
        chosen = device.choose_dtype(dtype, checkpoint_dtype(config.dtype))
        check_weights_fit(directory, read_config(directory), dtype, device, native=False)
    except DeviceError as error:
        raise ModelError(str(error)) from None
    try:
        model, report = kind.from_pretrained(
            directory,
            config=config,
            dtype=chosen,
            attn_implementation=attention,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    except Exception as error:
        raise ModelError(f"model {directory} cannot be loaded: {first_line(error)}") from None
    missing = sorted(str(name) for name in report["missing_keys"])
    if missing:
        raise ModelError(f"model {directory} has no weights for {missing[0]} and {len(missing) - 1} more")
    for module in model.modules():
        # It looks for padding among the tokens of each forward: a device would have to be waited for.
        if hasattr(module, _PADDING_CHECK):
            setattr(module, _PADDING_CHECK, _warn_of_nothing)
    return model, chosen


def _be_quiet() -> None:
    """No bars, and no report of weights that the class has no place for: what is missing is an error here."""
    _logging.set_verbosity_error()
    _logging.disable_progress_bar()


def _warn_of_nothing(*arguments: object) -> None:
    return
