"""The smaller widths that a model's vectors may be cut to (matryoshka embeddings). Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.engine.model.errors import ModelError

_MOST = 64


@dataclass(frozen=True, slots=True)
class Dimensions:
    """`any`: every width from 1 on; else those of `widths`, rising."""

    any: bool = False
    widths: tuple[int, ...] = ()


def read_dimensions(config: Mapping[str, Any], option: str | None, width: int) -> Dimensions:
    """What the operator says (`any`, or widths with commas), else config.json; `width` is the whole vector's.

    Raises ModelError for what is no width.
    """
    if option is not None:
        parts = [part.strip() for part in option.split(",")]
        if parts == ["any"]:
            return Dimensions(any=True)
        return _widths([int(part) if part.isdecimal() else part for part in parts], width)
    listed = config.get("matryoshka_dimensions")
    if listed:
        return _widths(listed if isinstance(listed, list) else [listed], width)
    return Dimensions(any=config.get("is_matryoshka") is True)


def _widths(values: list[Any], width: int) -> Dimensions:
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= width:
            raise ModelError(f"embedding dimensions must be numbers from 1 to {width}, the model's width")
    if len(values) > _MOST:
        raise ModelError(f"there are more than {_MOST} embedding dimensions")
    return Dimensions(widths=tuple(sorted(set(values))))
