"""Free-form JSON in a request: bounded before anything walks it."""

from __future__ import annotations

from typing import Any

from pydantic import BeforeValidator
from pydantic_core.core_schema import ValidationInfo

from gateway.schemas.base import FieldError, limits_of


def check_data(value: Any, max_depth: int, max_values: int) -> None:
    """Refuse arrays and objects inside of one another deeper than `max_depth`, or with more than `max_values`
    values in all. Raises FieldError.
    """
    depth = values = 0
    level = [value] if isinstance(value, dict | list) else []
    while level:
        depth += 1
        inner = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
        values += len(inner)
        if depth > max_depth:
            raise FieldError(f"Invalid '{{param}}': nested deeper than {max_depth} levels.")
        if values > max_values:
            raise FieldError(f"Invalid '{{param}}': at most {max_values} values are allowed.")
        level = [child for child in inner if isinstance(child, dict | list)]


def _bounded(value: Any, info: ValidationInfo) -> Any:
    limits = limits_of(info)
    check_data(value, limits.max_json_depth, limits.max_json_values)
    return value


BOUNDED = BeforeValidator(_bounded)
"""The operator's limits on depth and number of values, as an annotation of a field."""
