"""The constraint of tools: calls that must be made, and arguments that must satisfy their schemas."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from catenary.schema_notes import without_notes
from catenary.v1.common_pb2 import CONSTRAINT_KIND_GRAMMAR, CONSTRAINT_KIND_STRUCTURAL_TAG
from gateway.constraints.tagged import tagged_parameters
from gateway.constraints.wanted import Wanted
from gateway.errors import bad_request
from gateway.parsing.tags import tag_for, tagged_for

_OBJECT = {"type": "object"}
_NOTHING = {"type": "object", "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class CallableFunction:
    """A function that a model may call. `parameters`: schema of its arguments; None: it takes none."""

    name: str
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """Of the arguments, which are an object in any case; without annotations."""
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
    """What an answer with these tools is constrained to; None: any text.

    Args:
        functions: those that may be called.
        parser: name of the tool parser, in whose format calls are written. Where that holds no JSON, or for
            the empty name, required calls are an array of objects with `name` and `parameters`.
        required: the answer is one call or several, and arguments satisfy their schemas. Else only those of
            strict functions do, and there may be no call.
        single: at most one call, with nothing behind it.
        otherwise: what an answer without calls must be; None: any text. It must be a valid constraint, but
            says nothing where a call is required.
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
    """Each function's call in a parser's format: its trigger, and its structure of a structural tag.

    None: one cannot be written so that its arguments satisfy the schema, as they must if the function is
    strict or the call `required`. Else the call holds what its format allows."""
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
    """Lark's grammar of an array of calls. Each schema stands by itself, so that its references hold."""
    calls = " | ".join(f"call_{index}" for index in range(len(functions)))
    more = "" if single else '(", " call)*'
    lines = [f'start: "[" call {more} "]"', f"call: {calls}"]
    for index, function in enumerate(functions):
        begin = json.dumps(f'{{"name": {json.dumps(function.name)}, "parameters": ')
        lines.append(f'call_{index}: {begin} %json {json.dumps(function.schema, ensure_ascii=False)} "}}"')
    return "\n".join(lines)
