"""Free-form JSON in a request: bounded before anything walks it."""

from __future__ import annotations

from typing import Any

from pydantic import BeforeValidator
from pydantic_core.core_schema import ValidationInfo

from catenary.json_bounds import Excess, json_excess
from gateway.schemas.base import FieldError, limits_of


def check_data(value: Any, max_depth: int, max_values: int) -> None:
    """Refuse arrays and objects inside of one another deeper than `max_depth`, or with more than `max_values`
    values in all. Raises FieldError.
    """
    excess = json_excess(value, max_depth, max_values)
    if excess is Excess.DEPTH:
        raise FieldError(f"Invalid '{{param}}': nested deeper than {max_depth} levels.")
    if excess is Excess.VALUES:
        raise FieldError(f"Invalid '{{param}}': at most {max_values} values are allowed.")


def _bounded(value: Any, info: ValidationInfo) -> Any:
    limits = limits_of(info)
    check_data(value, limits.max_json_depth, limits.max_json_values)
    return value


BOUNDED = BeforeValidator(_bounded)
"""The operator's limits on depth and number of values, as an annotation of a field."""
