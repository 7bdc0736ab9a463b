"""Plain data that callers send for templates: reading it under limits, and the texts in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from catenary.json_bounds import Excess, json_excess
from services.tokenizer.rendering.errors import RenderRefused


class JsonLimits(msgspec.Struct, frozen=True):
    """Of each JSON text: arrays and objects inside of one another, and values in all."""

    max_depth: int = 64
    max_values: int = 200_000


def read_json(text: str, *, param: str, limits: JsonLimits) -> Any:
    """The value of a JSON text: strict, so without NaN and lone surrogates. Raises RenderRefused."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise RenderRefused(f"Invalid '{param}': it is not valid JSON.", param=param) from None
    _check_bounds(value, param, limits)
    return value


def json_or_none(text: str, *, param: str, limits: JsonLimits) -> Any:
    """As `read_json`, but None for what is not valid JSON. Raises RenderRefused for what is beyond limits."""
    try:
        value = msgspec.json.decode(text)
    except RecursionError:
        raise _too_deep(param, limits) from None
    except (msgspec.MsgspecError, ValueError):
        return None
    _check_bounds(value, param, limits)
    return value


def _check_bounds(value: Any, param: str, limits: JsonLimits) -> None:
    excess = json_excess(value, limits.max_depth, limits.max_values)
    if excess is Excess.DEPTH:
        raise _too_deep(param, limits)
    if excess is Excess.VALUES:
        raise RenderRefused(f"Invalid '{param}': it has more than {limits.max_values} values.", param=param)


def _too_deep(param: str, limits: JsonLimits) -> RenderRefused:
    return RenderRefused(
        f"Invalid '{param}': it is nested deeper than {limits.max_depth} levels.", param=param
    )


def read_objects(text: str, *, param: str, limits: JsonLimits) -> list[dict[str, Any]]:
    """An array of objects. Raises RenderRefused."""
    value = read_json(text, param=param, limits=limits)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RenderRefused(f"Invalid '{param}': it must be an array of objects.", param=param)
    return value


def read_object(text: str, *, param: str, limits: JsonLimits) -> dict[str, Any]:
    """An object. Raises RenderRefused."""
    value = read_json(text, param=param, limits=limits)
    if not isinstance(value, dict):
        raise RenderRefused(f"Invalid '{param}': it must be an object.", param=param)
    return value


def strings(value: Any) -> Iterator[str]:
    """Every text in plain data, names of fields included: a template may show those too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield name
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Plain data with every text changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(name): map_strings(item, change) for name, item in value.items()}
    if isinstance(value, list):
        return [map_strings(item, change) for item in value]
    return value
