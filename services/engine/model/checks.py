"""Check a model directory and the numbers of its config before anything is built or loaded."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any


class ModelError(Exception):
    """The model cannot be served. The text is one line for the operator: what is wrong, and where."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class UnknownModelError(ModelError):
    """The model option names nothing: not the model is wrong, but the command line."""


# Far beyond any model: numbers above these are damage, and memory would be asked for by them.
_MOST_LAYERS = 10_000
_MOST_PARTS = 1 << 16
_MOST_WIDTH = 1 << 24
_MOST_TOKENS = (1 << 31) - 1
_SHOWN = 40


@dataclass(frozen=True, slots=True)
class _Range:
    """`whole`: an integer; else any number that is finite. `above`: the lower end is not in it."""

    low: float
    high: float
    whole: bool = True
    above: bool = False

    def holds(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.whole else (int, float)):
            return False
        # Integers that no float can hold are compared exactly; NaN fails every comparison.
        return (self.low < value if self.above else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        if self.above:
            return f"{kind} above {self.low:g}, at most {self.high:g}"
        return f"{kind} from {self.low:g} to {self.high:.10g}"


_LAYERS = _Range(1, _MOST_LAYERS)
_PARTS = _Range(1, _MOST_PARTS)
_MAYBE_PARTS = _Range(0, _MOST_PARTS)
_WIDTH = _Range(1, _MOST_WIDTH)
_TOKENS = _Range(1, _MOST_TOKENS)
_TOKEN_ID = _Range(-1, _MOST_TOKENS)
_EPSILON = _Range(0, 1, whole=False)
_FACTOR = _Range(0, 1e9, whole=False, above=True)
_SHARE = _Range(0, 1, whole=False, above=True)
_BASE = _Range(0, 1e18, whole=False, above=True)

# By the names that transformers' configs have; a list, as one for each layer, has every value in the range.
_RANGES = MappingProxyType(
    dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), _LAYERS)
    | dict.fromkeys(
        (
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "num_key_value_heads",
            "num_kv_heads",
            "decoder_sparse_step",
        ),
        _PARTS,
    )
    | dict.fromkeys(
        (
            "num_experts",
            "num_local_experts",
            "n_routed_experts",
            "num_experts_per_tok",
            "n_shared_experts",
            "first_k_dense_replace",
            "max_window_layers",
            "mlp_only_layers",
            "type_vocab_size",
            "n_group",
            "topk_group",
        ),
        _MAYBE_PARTS,
    )
    | dict.fromkeys(
        (
            "hidden_size",
            "n_embd",
            "d_model",
            "intermediate_size",
            "n_inner",
            "ffn_dim",
            "moe_intermediate_size",
            "head_dim",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
            "kv_lora_rank",
            "q_lora_rank",
        ),
        _WIDTH,
    )
    | dict.fromkeys(
        (
            "vocab_size",
            "max_position_embeddings",
            "n_positions",
            "max_seq_len",
            "sliding_window",
            "original_max_position_embeddings",
        ),
        _TOKENS,
    )
    | dict.fromkeys(("pad_token_id", "bos_token_id"), _TOKEN_ID)
    | dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"), _EPSILON)
    | dict.fromkeys(
        (
            "attention_multiplier",
            "embedding_multiplier",
            "residual_multiplier",
            "logits_scaling",
            "query_pre_attn_scalar",
            "attn_logit_softcapping",
            "final_logit_softcapping",
            "factor",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "high_freq_factor",
            "low_freq_factor",
            "long_factor",
            "short_factor",
        ),
        _FACTOR,
    )
    | {"mscale": _Range(0, 1e9, whole=False), "mscale_all_dim": _Range(0, 1e9, whole=False)}
    | {"partial_rotary_factor": _SHARE}
    | dict.fromkeys(("rope_theta", "rope_local_base_freq", "rotary_emb_base"), _BASE)
)
# 0 is no window and no rank to some.
_ZERO_IS_NONE = frozenset({"sliding_window", "q_lora_rank", "n_inner", "moe_intermediate_size"})
_ROPES = ("rope_parameters", "rope_scaling")


def check_numbers(path: Path, config: Mapping[str, Any]) -> None:
    """Check the numbers of a config that was read from `path`. Raises ModelError naming file and field.

    null is left to what reads the field: it stands for a default, or for one that is missing.
    """
    for place, values in _objects(config):
        for name, value in values.items():
            if (wrong := why_not(name, value)) is not None:
                raise ModelError(f"{path}: {place}{name} is {wrong}")


def why_not(name: str, value: object) -> str | None:
    """Return what a value of the field `name` is and must be, if it is outside of its range."""
    allowed = _RANGES.get(name)
    if allowed is None or value is None or (value == 0 and name in _ZERO_IS_NONE):
        return None
    for item in value if isinstance(value, list) else [value]:
        if not allowed.holds(item):
            return f"{shown(item)}, and must be {allowed}"
    return None


def check_sizes(path: Path, config: Mapping[str, Any], tensors: int, elements: int) -> None:
    """Compare sizes with the weights, `tensors` that hold `elements` numbers. Raises ModelError.

    Weights that are not there would be found as well, but only after memory for them was asked for.
    """
    text = config.get("text_config")
    sizes = text if isinstance(text, dict) else config
    for name, most, of in (
        ("num_hidden_layers", tensors, f"{tensors} tensors"),
        ("vocab_size", elements, f"{elements} numbers"),
        ("hidden_size", elements, f"{elements} numbers"),
        ("intermediate_size", elements, f"{elements} numbers"),
        ("head_dim", elements, f"{elements} numbers"),
        ("num_experts", elements, f"{elements} numbers"),
        ("num_local_experts", elements, f"{elements} numbers"),
    ):
        value = sizes.get(name)
        if isinstance(value, int) and value > most:
            raise ModelError(f"{path}: {name} is {value}, and the weights are {of} in all")


def _objects(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The config, that of its text model and those of its rotary embeddings, with names of their places."""
    for place, values in (("", config), ("text_config.", config.get("text_config"))):
        if not isinstance(values, dict):
            continue
        yield place, values
        for name in _ROPES:
            settings = values.get(name)
            if not isinstance(settings, dict):
                continue
            yield f"{place}{name}.", settings
            # By the type of layer, where these differ.
            for kind, inner in settings.items():
                if isinstance(inner, dict):
                    yield f"{place}{name}.{kind}.", inner


def shown(value: object) -> str:
    """Return a value of a file for a message of one line."""
    text = str(value) if isinstance(value, float) and not math.isfinite(value) else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


# The format itself limits a header to 100 MB; no configuration or tokenizer is as large as the second.
_MAX_HEADER_BYTES = 100 * 2**20
_MAX_JSON_BYTES = 256 * 2**20
_INDEX = "model.safetensors.index.json"
_QUANTIZATION = ("quantization_config", "compression_config")
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
# Masks and positions, which old checkpoints hold beside their weights.
_INTEGERS = frozenset({"BOOL", "U8", "I32", "I64"})


def read_json(path: Path) -> dict[str, Any]:
    """Read one JSON object of a model directory. Raises ModelError if it is missing or broken."""
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
    """Check config.json and every weight file's header and size; return the config. Raises ModelError.

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
    """Compare a safetensors file's header with its size; return how many tensors and numbers it has.

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
