"""Load a checked model directory with transformers, if its architecture can be served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from services.engine.device import Device, DeviceError
from services.engine.model.checks import ModelError, check_directory, read_config
from services.engine.model.hf_config import (
    check_weights_fit,
    checkpoint_dtype,
    first_line,
    load_config,
    own_architecture,
)
from services.engine.model.transformers_backend.attention import IMPLEMENTATION
from services.engine.model.transformers_backend.experts import use_static_experts
from services.engine.model.transformers_backend.paged_model import TransformersModel

# By model type, what to use instead of checkpoints that bring their own code.
_INSTEAD = {
    "baichuan": "use a checkpoint that was converted to the llama format",
    "chatglm": "use a checkpoint of the model types glm or glm4",
    "internlm": "use a checkpoint of the model type internlm3, or one converted to the llama format",
    "internlm2": "use a checkpoint of the model type internlm3, or one converted to the llama format",
}


def model_class(directory: Path, config: dict[str, Any]) -> type[PreTrainedModel]:
    """The class that runs this checkpoint, from transformers alone: a checkpoint's own code is never
    imported.

    Raises ModelError with the architecture's name.
    """
    name = _architecture(config)
    known = {value for value in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() if isinstance(value, str)}
    if name not in known:
        if config.get("auto_map"):
            instead = _INSTEAD.get(config["model_type"], "use a checkpoint in transformers' own format")
            raise ModelError(
                f"model {directory} needs code from its own repository ({name}); "
                f"remote code is never run here: {instead}"
            )
        raise ModelError(
            f"architecture {name} is not supported: transformers {transformers.__version__} has no causal "
            "language model of that name"
        )
    found: Any = getattr(transformers, name)
    if not found.is_backend_compatible():
        raise ModelError(f"architecture {name} is not supported: its attention cannot be paged")
    if getattr(found, "_is_stateful", False):
        raise ModelError(f"architecture {name} is not supported: it keeps a recurrent state beside its KV")
    if config.get("is_encoder_decoder"):
        raise ModelError(f"architecture {name} is not supported: it is an encoder-decoder")
    result: type[PreTrainedModel] = found
    return result


def load_model_config(
    directory: Path, raw: dict[str, Any], model: type[PreTrainedModel], max_model_len: int | None
) -> PreTrainedConfig:
    """Parses config.json for the class, which is `model_class`'s, and checks it. Raises ModelError."""
    model_type = raw["model_type"]
    kind: Any = model.config_class
    if own_architecture(model_type) == model.__name__:
        # Its own config, where the class is another type's.
        kind = CONFIG_MAPPING[model_type]
    return load_config(directory, kind, model.__name__, max_model_len)


def _architecture(config: dict[str, Any]) -> str:
    model_type = config["model_type"]
    own = own_architecture(model_type) or model_type
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        return own
    # A model type without classes of its own: internlm3 runs as llama, whatever its checkpoints call that.
    found: Any = getattr(transformers, own, None)
    borrowed = found is not None and found.config_class.model_type != model_type
    return own if borrowed and names[0].endswith("ForCausalLM") else names[0]


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
    use_static_experts(model, device.kernels)
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
        chosen = device.kernels.choose_dtype(dtype, checkpoint_dtype(config.dtype))
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
