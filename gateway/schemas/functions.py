"""OpenAI's older names of tools: `functions` and `function_call`."""

from __future__ import annotations

from typing import Any

from pydantic import Field, PlainValidator, WithJsonSchema

from gateway.schemas.base import FieldError, RequestModel, plain_object
from gateway.schemas.calls import NAME_SCHEMA, CallMode, FunctionName, ToolChoice, object_schema

_CHOICES = ("none", "auto")


class Function(RequestModel):
    """A function."""

    name: FunctionName = Field(description="1 to 64 letters, digits, underscores and dashes.")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON Schema of its arguments.")


def _read_call(value: Any) -> ToolChoice | None:
    if value is None:
        return None
    if isinstance(value, str):
        if value not in _CHOICES:
            raise FieldError("Invalid '{param}': must be 'none', 'auto', or an object with a 'name'.")
        return ToolChoice(CallMode(value))
    if not isinstance(value, dict):
        raise FieldError("Invalid type for '{param}': expected a string or an object.", "invalid_type")
    name = plain_object(value).get("name")
    if not isinstance(name, str) or len(value) != 1:
        raise FieldError("Invalid '{param}': must be an object with a 'name'.")
    return ToolChoice(CallMode.REQUIRED, (name,), named=True)


FUNCTION_CALL = (
    PlainValidator(_read_call),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "enum": list(_CHOICES)},
                object_schema(name=NAME_SCHEMA),
                {"type": "null"},
            ]
        }
    ),
)
"""What reads a `function_call`, as annotations of a field."""
