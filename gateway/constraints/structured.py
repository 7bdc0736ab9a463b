"""The constraints of response_format, structured_outputs and the older guided parameters."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from catenary.schema_notes import without_notes
from catenary.v1.common_pb2 import (
    CONSTRAINT_KIND_GBNF,
    CONSTRAINT_KIND_GRAMMAR,
    CONSTRAINT_KIND_REGEX,
    CONSTRAINT_KIND_STRUCTURAL_TAG,
    ConstraintKind,
)
from gateway.constraints.wanted import Wanted
from gateway.errors import bad_request
from gateway.schemas.structured import ResponseFormat, StructuredFields, StructuredOutputs, TagStructure

_ANY_OBJECT = {"type": "object"}
# Behind blank lines and comments, the first rule of a grammar in GBNF.
_GBNF = re.compile(r"(?:\s|#[^\n]*(?:\n|$))*[A-Za-z][A-Za-z0-9_-]*[ \t]*::=")


def wanted_of(fields: StructuredFields) -> Wanted | None:
    """What a request asks for, which has been checked to be at most one thing."""
    if fields.response_format is not None and fields.response_format.type != "text":
        return _of_format(fields.response_format)
    outputs = fields.structured_outputs
    if outputs is not None and (wanted := _of_outputs(outputs)) is not None:
        return wanted
    return _of_kinds(
        "guided_",
        json_=fields.guided_json,
        regex=fields.guided_regex,
        choice=fields.guided_choice,
        grammar=fields.guided_grammar,
        json_object=fields.guided_json_object,
    )


def _of_format(format_: ResponseFormat) -> Wanted:
    if format_.json_schema is not None:
        schema = format_.json_schema.schema_
        return Wanted.schema(schema, "response_format.json_schema.schema")
    if format_.type == "json_object":
        return Wanted.schema(_ANY_OBJECT, "response_format")
    tags: dict[str, Any] = {
        "triggers": format_.triggers,
        "structures": [_structure(structure) for structure in format_.structures or ()],
        "at_least_one": bool(format_.at_least_one),
        "stop_after_first": bool(format_.stop_after_first),
    }
    return Wanted.json(CONSTRAINT_KIND_STRUCTURAL_TAG, tags, "response_format")


def _structure(structure: TagStructure) -> dict[str, Any]:
    body = {} if structure.schema_ is None else {"schema": without_notes(structure.schema_)}
    return {"begin": structure.begin, **body, "end": structure.end}


def _of_outputs(outputs: StructuredOutputs) -> Wanted | None:
    if outputs.structural_tag is not None:
        return _of_tag(outputs.structural_tag, "structured_outputs.structural_tag")
    return _of_kinds(
        "structured_outputs.",
        json_=outputs.json_,
        regex=outputs.regex,
        choice=outputs.choice,
        grammar=outputs.grammar,
        json_object=outputs.json_object,
    )


def _of_tag(tag: dict[str, Any] | str, param: str) -> Wanted:
    """A tag as vLLM has it, which says its type once more."""
    if isinstance(tag, str):
        try:
            tag = msgspec.json.decode(tag, type=dict[str, Any])
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise bad_request(f"Invalid '{param}': it is not a JSON object.", param) from None
    if tag.get("type", "structural_tag") != "structural_tag":
        raise bad_request(f"Invalid '{param}.type': must be 'structural_tag'.", f"{param}.type")
    fields = {name: value for name, value in tag.items() if name != "type"}
    if isinstance(structures := tag.get("structures"), list):
        fields["structures"] = [_without_notes(structure) for structure in structures]
    return Wanted.json(CONSTRAINT_KIND_STRUCTURAL_TAG, fields, param)


def _without_notes(structure: Any) -> Any:
    if not isinstance(structure, dict) or "schema" not in structure:
        return structure
    return structure | {"schema": without_notes(structure["schema"])}


def _of_kinds(
    prefix: str,
    *,
    json_: dict[str, Any] | str | None,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
    json_object: bool | None,
) -> Wanted | None:
    if json_ is not None:
        return Wanted.schema(json_, prefix + "json")
    if regex is not None:
        return Wanted(CONSTRAINT_KIND_REGEX, regex, prefix + "regex")
    if choice is not None:
        return Wanted(CONSTRAINT_KIND_GRAMMAR, choice_grammar(choice), prefix + "choice")
    if grammar is not None:
        return Wanted(grammar_kind(grammar), grammar, prefix + "grammar")
    if json_object:
        return Wanted.schema(_ANY_OBJECT, prefix + "json_object")
    return None


def grammar_kind(source: str) -> ConstraintKind.ValueType:
    """The notation of a client's grammar, which its first rule shows: GBNF writes `name ::=`, as Lark never
    does."""
    return CONSTRAINT_KIND_GRAMMAR if _GBNF.match(source) is None else CONSTRAINT_KIND_GBNF


def choice_grammar(choices: list[str]) -> str:
    """Lark's grammar of exactly these texts, written as JSON strings; DEL alone is different there."""
    quoted = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(choices))
    return "start: " + quoted.replace("\x7f", "\\u007f")
