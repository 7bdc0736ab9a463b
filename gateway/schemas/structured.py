"""Form of the answer: the parameters of all generating routes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, FailFast, Field, PlainValidator, WithJsonSchema
from pydantic_core.core_schema import ValidationInfo

from catenary.json_bounds import json_levels
from gateway.errors import bad_request
from gateway.schemas.base import (
    MAX_FIELDS,
    FieldError,
    RequestLimits,
    RequestModel,
    at_most,
    limits_of,
    within,
)

# Of a schema's name: OpenAI's own.
_MAX_NAME = 64


def _bounded(value: Any, info: ValidationInfo) -> Any:
    """Refuse JSON that is too deep or too large, whatever it holds."""
    limits = limits_of(info)
    values = 0
    for depth, level in enumerate(json_levels(value), start=1):
        values += len(level)
        if depth > limits.max_constraint_depth:
            raise FieldError(f"Invalid '{{param}}': nested deeper than {limits.max_constraint_depth} levels.")
        if values > limits.max_constraint_values:
            raise FieldError(
                f"Invalid '{{param}}': it holds more than {limits.max_constraint_values} values."
            )
    return value


def _none_for_empty(value: Any) -> Any:
    """Return None for an empty text, which is a field that was left empty. An empty object is a schema that
    allows any JSON, and an empty array of choices may be a mistake that must be reported."""
    return None if value == "" else value


def _object_or_text(value: Any, info: ValidationInfo) -> Any:
    value = _none_for_empty(value)
    if value is not None and not isinstance(value, dict | str):
        raise FieldError("Invalid type for '{param}': expected an object, or its text.", "invalid_type")
    return _short(_bounded(value, info), info)


def _schema_or_not(value: Any, info: ValidationInfo) -> Any:
    if value is not None and not isinstance(value, dict | bool):
        raise FieldError("Invalid type for '{param}': expected an object or a boolean.", "invalid_type")
    return _bounded(value, info)


def _short(value: Any, info: ValidationInfo) -> Any:
    most = limits_of(info).max_constraint_bytes
    if isinstance(value, str) and (len(value) > most or len(value.encode()) > most):
        raise FieldError(f"Invalid '{{param}}': it has more than {most} bytes.")
    return value


_JSON = WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "null"}]})
_SCHEMA = WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "boolean"}, {"type": "null"}]})
ObjectOrText = Annotated[dict[str, Any] | str | None, PlainValidator(_object_or_text), _JSON]
"""JSON as such or in a string."""
Schema = Annotated[dict[str, Any], BeforeValidator(_bounded)]
"""JSON schema, which the tokenizer service checks as it compiles it."""
Source = Annotated[str, BeforeValidator(_short)]
"""Schema, regular expression or grammar as a text."""
Text = Annotated[Source | None, BeforeValidator(_none_for_empty)]
"""The same, which may be left out or empty."""


class JsonSchemaFormat(RequestModel):
    """A schema with a name, as OpenAI has it."""

    name: str = Field(
        min_length=1, max_length=_MAX_NAME, pattern="^[a-zA-Z0-9_-]+$", description="Not shown to the model."
    )
    schema_: Schema = Field(alias="schema", description="What the answer must satisfy.")
    description: str | None = Field(None, max_length=65_536, description="Not shown to the model.")
    strict: bool | None = Field(None, description="The schema is enforced either way.")


class TagStructure(RequestModel):
    """A tag: its beginning, the schema of the JSON in it, its end."""

    begin: str = Field(min_length=1, max_length=1024, description="Text that the tag begins with.")
    schema_: Annotated[dict[str, Any] | bool | None, PlainValidator(_schema_or_not), _SCHEMA] = Field(
        None, alias="schema", description="Of the JSON between begin and end; absent: any text up to the end."
    )
    end: str = Field("", max_length=1024, description="Text that the tag ends with.")


class ResponseFormat(RequestModel):
    """OpenAI's way to ask for JSON, and vLLM's for tags."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"] = Field(
        description="What the answer is."
    )
    json_schema: Annotated[JsonSchemaFormat | None, at_most(MAX_FIELDS)] = Field(
        None, description="With json_schema."
    )
    structures: Annotated[list[TagStructure] | None, FailFast(), at_most(MAX_FIELDS)] = Field(
        None, description="With structural_tag."
    )
    triggers: Annotated[list[str] | None, FailFast(), at_most(MAX_FIELDS)] = Field(
        None, description="With structural_tag."
    )
    at_least_one: bool | None = Field(None, description="With structural_tag: the answer begins with a tag.")
    stop_after_first: bool | None = Field(
        None, description="With structural_tag: the answer ends with the first tag."
    )

    def check(self, limits: RequestLimits) -> None:
        tags = ("structures", "triggers", "at_least_one", "stop_after_first")
        needed = {"json_schema": ("json_schema",), "structural_tag": tags[:2]}.get(self.type, ())
        allowed = tags if self.type == "structural_tag" else needed
        for name in ("json_schema", *tags):
            given = getattr(self, name) is not None
            param = f"response_format.{name}"
            if given and name not in allowed:
                raise bad_request(f"'{param}' does not go with the type '{self.type}'.", param)
            if not given and name in needed:
                raise bad_request(
                    f"Missing required parameter: '{param}'.", param, "missing_required_parameter"
                )


class StructuredOutputs(RequestModel):
    """vLLM's way: exactly one kind."""

    json_: ObjectOrText = Field(None, alias="json", description="A JSON schema, as an object or as text.")
    regex: Text = Field(None, description="A regular expression that the whole answer matches.")
    choice: Annotated[list[str] | None, FailFast(), within("max_constraint_choices")] = Field(
        None, min_length=1, description="The answer is one of these texts."
    )
    grammar: Text = Field(None, description="A grammar in Lark's or GBNF's notation.")
    json_object: bool | None = Field(None, description="true: the answer is a JSON object.")
    structural_tag: ObjectOrText = Field(
        None, description="Tags, as in response_format, as an object or as text."
    )
    disable_fallback: bool | None = Field(None, description="There is none.")


class StructuredFields(RequestModel):
    """At most one of these may ask for something."""

    response_format: Annotated[ResponseFormat | None, at_most(MAX_FIELDS)] = Field(
        None, description="What the answer must be: text, JSON, or text with tags."
    )
    structured_outputs: Annotated[StructuredOutputs | None, at_most(MAX_FIELDS)] = Field(
        None, description="What the answer must be, as vLLM has it: exactly one kind."
    )
    guided_json: ObjectOrText = Field(None, description="structured_outputs.json by its older name.")
    guided_regex: Text = Field(None, description="structured_outputs.regex by its older name.")
    guided_choice: Annotated[list[str] | None, FailFast(), within("max_constraint_choices")] = Field(
        None, min_length=1, description="structured_outputs.choice by its older name."
    )
    guided_grammar: Text = Field(None, description="structured_outputs.grammar by its older name.")
    guided_json_object: bool | None = Field(
        None, description="structured_outputs.json_object by its older name."
    )

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        if self.response_format is not None:
            self.response_format.check(limits)
        if len(self._kinds()) > 1:
            raise bad_request(
                "'structured_outputs' may have only one of json, regex, choice, grammar, json_object and "
                "structural_tag.",
                "structured_outputs",
            )
        asking = self._asking()
        if len(asking) > 1:
            raise bad_request(f"'{asking[1]}' cannot be combined with '{asking[0]}'.", asking[1])
        for name, choices in (
            ("structured_outputs.choice", self.structured_outputs and self.structured_outputs.choice),
            ("guided_choice", self.guided_choice),
        ):
            if choices and not all(choices):
                raise bad_request(f"Invalid '{name}': choices must not be empty.", name)

    def _kinds(self) -> list[str]:
        outputs = self.structured_outputs
        kinds = ("json_", "regex", "choice", "grammar", "json_object", "structural_tag")
        # A false json_object is neutral.
        return (
            [] if outputs is None else [kind for kind in kinds if getattr(outputs, kind) not in (None, False)]
        )

    def _asking(self) -> list[str]:
        asking = []
        if self.response_format is not None and self.response_format.type != "text":
            asking.append("response_format")
        if self._kinds():
            asking.append("structured_outputs")
        guided = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object")
        return asking + [name for name in guided if getattr(self, name) not in (None, False)]
