"""Constraints of an answer: from the parameters of a request to the constraint for an engine."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from catenary.schema_notes import without_notes
from catenary.v1 import common_pb2, tokenizer_pb2
from catenary.v1.common_pb2 import (
    CONSTRAINT_KIND_GBNF,
    CONSTRAINT_KIND_GRAMMAR,
    CONSTRAINT_KIND_REGEX,
    CONSTRAINT_KIND_STRUCTURAL_TAG,
    ConstraintKind,
)
from gateway.errors import bad_request
from gateway.parsing.tags import TaggedFormat, tag_for, tagged_for, value_begin
from gateway.parsing.toolset import parameter_types, to_json
from gateway.schemas.base import RequestLimits
from gateway.schemas.structured import ResponseFormat, StructuredFields, StructuredOutputs, TagStructure
from gateway.text.pool import TokenizerPool


@dataclass(frozen=True, slots=True)
class Wanted:
    """Constraint. `kind` and `source` as in `catenary.v1.Constraint`; `param`: the field of the request, for
    errors; `part`: a part that comes from another field, checked first; `closed`: objects that list their
    properties and do not mention others have no others."""

    kind: ConstraintKind.ValueType
    source: str
    param: str
    part: Wanted | None = None
    closed: bool = True

    @classmethod
    def schema(cls, value: Any, param: str) -> Wanted:
        """Make one of a JSON schema or its text, without annotations, so that wording makes no difference."""
        if isinstance(value, str):
            try:
                value = msgspec.json.decode(value)
            except (msgspec.MsgspecError, ValueError, RecursionError):
                # The tokenizer service, which compiles it, answers with the reason.
                return cls(common_pb2.CONSTRAINT_KIND_JSON_SCHEMA, value, param)
        return cls.json(common_pb2.CONSTRAINT_KIND_JSON_SCHEMA, without_notes(value), param)

    @classmethod
    def json(cls, kind: ConstraintKind.ValueType, value: Any, param: str) -> Wanted:
        return cls(kind, msgspec.json.encode(value).decode(), param)

    def opened(self) -> Wanted:
        """Return the same with objects as the specification has them: with any other properties."""
        return replace(self, part=None if self.part is None else self.part.opened(), closed=False)

    async def check(self, model: str, pool: TokenizerPool, limits: RequestLimits, tenant: str) -> None:
        """Compile it for `model`. Raises ApiError: 400 if it cannot be honoured."""
        if self.part is not None:
            await self.part.check(model, pool, limits, tenant)
        size = len(self.source.encode())
        if size > limits.max_constraint_bytes:
            raise bad_request(
                f"Invalid '{self.param}': it has {size} bytes; at most {limits.max_constraint_bytes} are "
                "allowed.",
                self.param,
            )
        await pool.check_constraint(
            tokenizer_pb2.CheckConstraintRequest(
                model=model, constraint=self.message(), param=self.param, tenant=tenant
            )
        )

    def message(self, after: str | None = None) -> common_pb2.Constraint:
        """Return the engine's message. `after`: text behind which it holds; None: from the first token on."""
        return common_pb2.Constraint(
            kind=self.kind, source=self.source, after=after, closed_objects=self.closed
        )


# Of the whole schema; whatever else it says, values alone do not show.
_ROOT = frozenset(
    {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"}
)
_SAYS_NOTHING = frozenset({"title", "description", "default", "examples", "example", "deprecated"})
_DEFINITIONS = ("$defs", "definitions")
_KEY = re.compile(r"[\w.-]{1,64}")


def tagged_parameters(schema: Mapping[str, Any], form: TaggedFormat) -> list[dict[str, Any]] | None:
    """Return the parameters as a structural tag has them, in the order of the schema's `properties`.

    Arguments written by it, and read with the schema's types, satisfy the schema. None if the schema demands
    more than texts can be held to."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return None
    if schema.keys() - _ROOT - _SAYS_NOTHING or schema.get("type", "object") != "object":
        return None
    if not properties.keys() >= {name for name in required if isinstance(name, str)}:
        return None
    made = []
    for name, part in properties.items():
        value = _value(name, part, schema, form) if _KEY.fullmatch(name) else None
        if value is None:
            return None
        tags = {"begin": value_begin(form, name), "end": form.value_end}
        made.append({**tags, **value, "optional": name not in required})
    return made


def _value(name: str, part: Any, root: Mapping[str, Any], form: TaggedFormat) -> dict[str, Any] | None:
    types = parameter_types(root, name)
    if not isinstance(part, dict):
        return {"without": list(form.without)} if part is True else None
    if types and "string" not in types:
        # It is read as the JSON that it is.
        return {"schema": {key: root[key] for key in _DEFINITIONS if key in root} | part}
    if _any_text(part):
        return {"without": list(form.without)}
    values = part["enum"] if "enum" in part else [part["const"]] if "const" in part else None
    if not isinstance(values, list) or part.keys() - _SAYS_NOTHING - {"type", "enum", "const"}:
        return None
    texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
    for text, value in zip(texts, values, strict=True):
        read = json.loads(to_json(text, types))
        same = type(read) is type(value) and read == value
        if not (text and same) or any(mark in text for mark in form.without):
            return None
    return {"texts": texts}


def _any_text(part: Any) -> bool:
    """Return whether any text is a value of a schema: text is one of several types, all unrestricted."""
    if not isinstance(part, dict):
        return part is True
    says = part.keys() - _SAYS_NOTHING
    for key in ("anyOf", "oneOf"):
        if says == {key} and isinstance(part[key], list):
            return all(map(_any_text, part[key]))
    return says <= {"type"}


_ANY_OBJECT = {"type": "object"}
# Behind blank lines and comments, the first rule of a grammar in GBNF.
_GBNF = re.compile(r"(?:\s|#[^\n]*(?:\n|$))*[A-Za-z][A-Za-z0-9_-]*[ \t]*::=")


def wanted_of(fields: StructuredFields) -> Wanted | None:
    """Return the constraint that a request asks for; it was checked to ask for at most one."""
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
    """Convert a tag as vLLM has it, which repeats its type."""
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
    """Return a client's notation by its grammar's first rule: GBNF writes `name ::=`, as Lark never does."""
    return CONSTRAINT_KIND_GRAMMAR if _GBNF.match(source) is None else CONSTRAINT_KIND_GBNF


def choice_grammar(choices: list[str]) -> str:
    """Return Lark's grammar of exactly these texts, written as JSON strings; DEL alone is different there."""
    quoted = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(choices))
    return "start: " + quoted.replace("\x7f", "\\u007f")


_OBJECT = {"type": "object"}
_NOTHING = {"type": "object", "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class CallableFunction:
    """Function that a model may call. `parameters`: schema of its arguments; None: it takes none."""

    name: str
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema of the arguments, which are an object in any case; without annotations."""
        if self.parameters is None:
            return dict(_NOTHING)
        schema: dict[str, Any] = without_notes(dict(self.parameters))
        return _OBJECT | schema


def wanted_calls(
    functions: Sequence[CallableFunction],
    parser: str,
    *,
    required: bool,
    single: bool,
    otherwise: Wanted | None = None,
    param: str = "tools",
) -> Wanted | None:
    """Return the constraint of an answer with these tools; None: any text.

    Args:
        functions: those that may be called.
        parser: name of the tool parser, in whose format calls are written. Where that holds no JSON, or for
            the empty name, required calls are an array of objects with `name` and `parameters`.
        required: the answer is one call or several, and arguments satisfy their schemas. Else only those of
            strict functions do, and there may be no call.
        single: at most one call, with nothing behind it.
        otherwise: valid constraint of an answer without calls, unused where a call is required; None: any
            text.
        param: the field that the functions came in.

    Raises:
        ApiError: no call is required, and in a format that holds no JSON, a function is strict or the answer
            without calls is constrained; or it is, in a format whose calls are nothing but JSON.
    """
    strict = [function for function in functions if function.strict]
    if not required and not strict and otherwise is None:
        return None
    calls = own_calls(functions, parser, required=required)
    if required:
        if calls is None:
            grammar = _array_grammar(functions, single=single)
            return Wanted(CONSTRAINT_KIND_GRAMMAR, grammar, param, part=otherwise)
        return _tags(calls, required=True, single=single, otherwise=otherwise, param=param)
    # A call that reads like JSON cannot be told from JSON.
    is_json = otherwise is not None and any(call["begin"].startswith("{") for _, call in calls or ())
    if calls is not None and not is_json:
        return _tags(calls, required=False, single=single, otherwise=otherwise, param=param)
    if otherwise is not None:
        raise bad_request(
            f"'{otherwise.param}' cannot be combined with tools in this model's tool format.", otherwise.param
        )
    raise bad_request(
        "Strict functions are not supported with this model's tool format, unless 'tool_choice' requires a "
        "call.",
        param,
        "unsupported_parameter",
    )


def own_calls(
    functions: Sequence[CallableFunction], parser: str, *, required: bool
) -> list[tuple[str, dict[str, Any]]] | None:
    """Return each function's call in a parser's format: its trigger, and its structure of a structural tag.

    None if one cannot be written so that its arguments satisfy the schema, as they must if the function is
    strict or the call `required`. Else the call holds whatever its format allows."""
    calls = [_own_call(function, parser, exact=required or function.strict) for function in functions]
    found = [call for call in calls if call is not None]
    return found if len(found) == len(calls) else None


def _own_call(function: CallableFunction, parser: str, *, exact: bool) -> tuple[str, dict[str, Any]] | None:
    if (tag := tag_for(parser, function.name)) is not None:
        schema = function.schema if exact else _OBJECT
        return tag.trigger, {"begin": tag.begin, "schema": schema, "end": tag.end}
    if (form := tagged_for(parser, function.name)) is None:
        return None
    around = {"begin": form.begin, "end": form.end}
    if not exact:
        return form.trigger, around
    parameters = tagged_parameters(function.schema, form)
    return None if parameters is None else (form.trigger, {**around, "parameters": parameters})


def _tags(
    calls: Sequence[tuple[str, dict[str, Any]]],
    *,
    required: bool,
    single: bool,
    otherwise: Wanted | None,
    param: str,
) -> Wanted:
    value: dict[str, Any] = {}
    if required:
        # Behind a required call stands another one, or nothing.
        value = {"only_tags": True}
    elif otherwise is not None:
        value = {"otherwise": msgspec.Raw(otherwise.source.encode())}
    wanted = Wanted.json(
        CONSTRAINT_KIND_STRUCTURAL_TAG,
        {
            "triggers": list(dict.fromkeys(trigger for trigger, _ in calls)),
            "structures": [call for _, call in calls],
            "at_least_one": required,
            "stop_after_first": single,
            **value,
        },
        param,
    )
    return dataclasses.replace(wanted, part=otherwise)


def _array_grammar(functions: Sequence[CallableFunction], *, single: bool) -> str:
    """Return Lark's grammar of an array of calls. Each schema is separate, so that its references hold."""
    calls = " | ".join(f"call_{index}" for index in range(len(functions)))
    more = "" if single else '(", " call)*'
    lines = [f'start: "[" call {more} "]"', f"call: {calls}"]
    for index, function in enumerate(functions):
        begin = json.dumps(f'{{"name": {json.dumps(function.name)}, "parameters": ')
        lines.append(f'call_{index}: {begin} %json {json.dumps(function.schema, ensure_ascii=False)} "}}"')
    return "\n".join(lines)
