"""Decides, before any weight is read, whether a checkpoint's architecture can be served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from services.engine.model.errors import ModelError
from services.engine.model.hf_config import load_config, own_architecture

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
