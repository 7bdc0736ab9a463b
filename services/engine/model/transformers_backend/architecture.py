"""Decides, before any weight is read, whether a checkpoint's architecture can be served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from services.engine.model.errors import ModelError

# By model type, what to use instead of checkpoints that bring their own code.
_INSTEAD = {
    "baichuan": "use a checkpoint that was converted to the llama format",
    "chatglm": "use a checkpoint of the model types glm or glm4",
    "internlm": "use a checkpoint of the model type internlm3, or one converted to the llama format",
    "internlm2": "use a checkpoint of the model type internlm3, or one converted to the llama format",
}
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


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


def load_config(
    directory: Path, model_type: str, model: type[PreTrainedModel], max_model_len: int | None
) -> PreTrainedConfig:
    """Parses config.json of a model type for the class and checks what it asks for. Raises ModelError."""
    kind: Any = model.config_class
    if MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type) == model.__name__:
        # Its own config, where the class is another type's.
        kind = CONFIG_MAPPING[model_type]
    try:
        config: PreTrainedConfig = kind.from_pretrained(directory, local_files_only=True)
    except Exception as error:
        raise ModelError(f"{directory / 'config.json'} is not accepted: {first_line(error)}") from None
    other = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if other:
        raise ModelError(
            f"architecture {model.__name__} is not supported with layers of type {', '.join(sorted(other))}"
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


def _architecture(config: dict[str, Any]) -> str:
    model_type = config["model_type"]
    own = str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, model_type))
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        return own
    # A model type without classes of its own: internlm3 runs as llama, whatever its checkpoints call that.
    found: Any = getattr(transformers, own, None)
    borrowed = found is not None and found.config_class.model_type != model_type
    return own if borrowed and names[0].endswith("ForCausalLM") else names[0]


def _check_rope(config: PreTrainedConfig, max_model_len: int | None) -> None:
    """Refuses rotary embeddings that change with the longest sequence of a batch.

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
