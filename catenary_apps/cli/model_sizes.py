"""A model's sizes, from its config. No weights are read and no torch is imported."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from catenary.config import ConfigError
from catenary.runtime import StartRefused
from services.engine.memory import ModelShape, active_parameters, read_shape

# Files of older checkpoints that say how weights are packed, and whose they are.
_PACKING_FILES: Final = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq"}


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a decoder. `max_position` is None if the config names no limit.

    `parameters` are those that one token passes, estimated from the shapes: of experts, the chosen ones.
    """

    name: str
    max_position: int | None
    kv_bytes_per_token: int
    parameters: int
    parameter_bytes: int
    attention_width: int
    vocab_size: int


def find_shape(model: str) -> tuple[ModelShape, Path | None]:
    """Return the sizes in a model's config, by alias, directory, file or hub id, and its directory if it has
    one.

    Raises ConfigError if the option names nothing, StartRefused if its config is not found or says nonsense.
    """
    from services.engine.model import ModelError, UnknownModelError, find_config

    try:
        config, name, directory = find_config(model, progress=lambda line: print(line, file=sys.stderr))
    except UnknownModelError as error:
        raise ConfigError(f"--model: {error}") from None
    except ModelError as error:
        raise StartRefused(str(error)) from None
    packed = config if directory is None else _with_packing(config, directory)
    # A directory's name may hold anything; it is shown in one line.
    shown = "".join(c if c.isprintable() else "?" for c in name)
    try:
        return read_shape(packed, shown), directory
    except ValueError as error:
        raise StartRefused(str(error)) from None


def _with_packing(config: Mapping[str, Any], directory: Path) -> Mapping[str, Any]:
    """Return the config with what older checkpoints say of packed weights in a file of its own."""
    from services.engine.model import ModelError, read_json

    for name in _PACKING_FILES:
        if not config.get("quantization_config") and (directory / name).is_file():
            try:
                packed = read_json(directory / name)
            except ModelError as error:
                raise StartRefused(str(error)) from None
            own = packed.get("quantization") or packed
            method = {"quant_method": _PACKING_FILES[name]}
            return {**config, "quantization_config": method | own if isinstance(own, dict) else method}
    return config


def read_sizes(model: str) -> ModelSizes:
    """Return sizes of a model by its alias, directory, file or hub id. Raises as `find_shape`."""
    return sizes_of(find_shape(model)[0])


def sizes_of(shape: ModelShape) -> ModelSizes:
    """Return the sizes that follow from a shape."""
    width = 4 if shape.float32 else 2
    return ModelSizes(
        name=shape.name,
        max_position=shape.max_position,
        kv_bytes_per_token=shape.kv_values_per_token * width,
        parameters=active_parameters(shape),
        parameter_bytes=width,
        attention_width=shape.layers * shape.heads * shape.head_dim,
        vocab_size=shape.vocab,
    )
