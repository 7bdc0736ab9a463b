"""How a checkpoint's token states become one vector: read from the files of sentence-transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from services.engine.model.checks import read_json
from services.engine.model.errors import ModelError


class Pooling(Enum):
    """Which token states make the vector."""

    CLS = "cls"
    MEAN = "mean"
    LAST = "last"


class Activation(Enum):
    """What makes the answer of a pooled state or of logits."""

    NONE = "none"
    UNIT = "unit"
    """Scale to length 1."""
    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"


@dataclass(frozen=True, slots=True)
class PoolingSettings:
    """max_length: the longest document in tokens that the files allow, None if they do not say."""

    pooling: Pooling
    normalize: bool
    max_length: int | None = None

    @property
    def activation(self) -> Activation:
        """What is left to do to a vector."""
        return Activation.UNIT if self.normalize else Activation.NONE


# Names in 1_Pooling/config.json; None: known to sentence-transformers, not computed here.
_MODES: dict[str, Pooling | None] = {
    "pooling_mode_cls_token": Pooling.CLS,
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_lasttoken": Pooling.LAST,
    "pooling_mode_max_tokens": None,
    "pooling_mode_mean_sqrt_len_tokens": None,
    "pooling_mode_weightedmean_tokens": None,
}
_NAMED = {"cls": Pooling.CLS, "mean": Pooling.MEAN, "lasttoken": Pooling.LAST}


def read_pooling(directory: Path, default: Pooling) -> PoolingSettings:
    """The settings of a checkpoint; `default` and vectors of length 1 where no file says otherwise.

    Raises ModelError for modules or ways of pooling that are not computed here.
    """
    modules = directory / "modules.json"
    if not modules.is_file():
        return PoolingSettings(default, normalize=True)
    pooling, normalize = default, False
    for module in _read_list(modules):
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            # A plain directory of this one: a path that points elsewhere is not followed.
            pooling = _pooling(directory / Path(str(module.get("path", ""))).name / "config.json")
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise ModelError(f"{modules} has a module of type {kind}, which is not supported")
    return PoolingSettings(pooling, normalize, _max_length(directory / "sentence_bert_config.json"))


def _read_list(path: Path) -> list[dict[str, Any]]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise ModelError(f"{path} is not valid JSON") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise ModelError(f"{path} does not hold a list of modules")
    return value


def _pooling(path: Path) -> Pooling:
    config = read_json(path)
    named = config.get("pooling_mode")
    if isinstance(named, str):
        chosen = [_NAMED.get(named)]
    else:
        chosen = [mode for name, mode in _MODES.items() if config.get(name)]
    if len(chosen) != 1 or chosen[0] is None:
        raise ModelError(f"{path} asks for a way of pooling that is not one of cls, mean and lasttoken")
    return chosen[0]


def _max_length(path: Path) -> int | None:
    value = read_json(path).get("max_seq_length") if path.is_file() else None
    if value is not None and (not isinstance(value, int) or value < 1):
        raise ModelError(f"{path} has a max_seq_length of {value!r}, which is no length")
    return value
