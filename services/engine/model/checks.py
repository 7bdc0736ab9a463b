"""Checks of a model directory that need no weights in memory: they run before anything is loaded."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from services.engine.model.errors import ModelError
from services.engine.model.numbers import check_numbers, check_sizes

# The format itself limits a header to 100 MB; no configuration or tokenizer is as large as the second.
_MAX_HEADER_BYTES = 100 * 2**20
_MAX_JSON_BYTES = 256 * 2**20
_INDEX = "model.safetensors.index.json"
_QUANTIZATION = ("quantization_config", "compression_config")
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
# Masks and positions, which old checkpoints hold beside their weights.
_INTEGERS = frozenset({"BOOL", "U8", "I32", "I64"})


def read_json(path: Path) -> dict[str, Any]:
    """Reads one JSON object of a model directory. Raises ModelError if it is missing or broken."""
    try:
        # A pipe would never answer, and a device never end.
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ModelError(f"{path} is not a file")
        if path.is_file() and path.stat().st_size > _MAX_JSON_BYTES:
            raise ModelError(f"{path} is larger than {_MAX_JSON_BYTES} bytes")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"model directory {path.parent} has no {path.name}") from None
    except (ValueError, RecursionError):
        raise ModelError(f"{path} is not valid JSON") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value


def read_config(directory: Path) -> dict[str, Any]:
    """The parsed config.json of a model directory. Raises ModelError."""
    if not directory.is_dir():
        raise ModelError(f"model directory {directory} does not exist")
    return read_config_file(directory / "config.json")


def read_config_file(path: Path) -> dict[str, Any]:
    """The parsed file, which is a model's config.json, perhaps under another name.

    Its numbers are in their ranges. Raises ModelError.
    """
    config = read_json(path)
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"{path} names no model_type")
    check_numbers(path, config)
    return config


def check_directory(directory: Path) -> dict[str, Any]:
    """Checks config.json and every weight file's header and size; returns the config. Raises ModelError.

    Quantized weights are refused whatever the config says: read as plain numbers, without their scales, they
    would load and mean nothing.
    """
    config = read_config(directory)
    if any(config.get(name) for name in _QUANTIZATION):
        raise ModelError(f"model {directory} has quantized weights, which are not supported yet")
    found = [check_safetensors(path) for path in weight_files(directory)]
    tensors, elements = (sum(counts) for counts in zip(*found, strict=True))
    check_sizes(directory / "config.json", config, tensors, elements)
    return config


def weight_files(directory: Path) -> tuple[Path, ...]:
    """The safetensors files that hold the weights. Raises ModelError if there are none or one is missing."""
    index = directory / _INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index} has no weight_map")
        # A shard is a plain file of this directory: an index that points elsewhere is not followed.
        files = [directory / Path(str(name)).name for name in sorted(set(map(str, weight_map.values())))]
        for path in files:
            if not path.is_file():
                raise ModelError(f"model directory {directory} has no {path.name}, which {_INDEX} names")
        return tuple(files)
    single = directory / "model.safetensors"
    if single.is_file():
        return (single,)
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt")) or any(directory.glob("*.pth")):
        raise ModelError(
            f"model directory {directory} has pickled weights only; they can run code and are not loaded: "
            "convert them to safetensors"
        )
    raise ModelError(f"model directory {directory} has no weights (model.safetensors)")


def check_safetensors(path: Path) -> tuple[int, int]:
    """Compares a safetensors file's header with its size; returns how many tensors and numbers it has.

    Raises ModelError if it is cut short or broken, or holds quantized weights.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
            if not 2 <= length <= _MAX_HEADER_BYTES or 8 + length > size:
                raise ModelError(f"{path} is cut short or not a safetensors file")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        ends = [entry["data_offsets"][1] for entry in header.values()]
        kinds = {str(name): str(entry["dtype"]) for name, entry in header.items()}
        data_bytes = max(ends, default=0)
        elements = sum(math.prod(entry["shape"]) for entry in header.values())
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        raise ModelError(f"{path} has a broken safetensors header") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    if not ends:
        raise ModelError(f"{path} holds no tensors")
    if 8 + length + data_bytes != size:
        raise ModelError(
            f"{path} is cut short: it has {size} bytes, its header says {8 + length + data_bytes}"
        )
    for name, kind in kinds.items():
        if kind not in _FLOATS and (kind not in _INTEGERS or name.endswith("weight")):
            raise ModelError(
                f"tensor {name} of {path} is of type {kind}: quantized weights are not supported yet"
            )
    return len(ends), elements
