"""What stands in a structure whose values have tags of their own, one for each parameter."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from catenary.constraints.control_tokens import split_control
from catenary.constraints.json_schema import clean_schema
from catenary.constraints.kinds import ConstraintError, ConstraintLimits
from catenary.constraints.lark import lark_text
from catenary.constraints.tag_texts import atom, atoms, escaped

_ANY = "(?s:.*)"


class Parameter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A value between `begin` and `end`: JSON of `schema`, one of `texts`, or else any text that has none of
    the texts `without` in it."""

    begin: str
    end: str
    schema: dict[str, Any] | bool | None = None
    texts: list[str] | None = None
    without: list[str] = []
    optional: bool = False


def check_parameters(parameters: Sequence[Parameter], limits: ConstraintLimits) -> None:
    """Raises ConstraintError for parameters that are too many, too long or make no sense."""
    if len(parameters) > limits.max_properties:
        raise ConstraintError(f"A structure has more than {limits.max_properties} parameters.")
    for parameter in parameters:
        if not (parameter.begin and parameter.end):
            raise ConstraintError("A parameter needs a begin and an end.")
        texts = parameter.texts or []
        if len(texts) > limits.max_alternatives:
            raise ConstraintError(f"A parameter has more than {limits.max_alternatives} texts.")
        if parameter.texts is not None and (parameter.schema is not None or not all(texts or [""])):
            raise ConstraintError("A parameter has a schema or texts, not both, and no empty ones.")
        if max(map(len, (parameter.begin, parameter.end, *parameter.without))) > limits.max_tag_chars:
            raise ConstraintError(f"A tag's begin and end have at most {limits.max_tag_chars} characters.")
        if not all(parameter.without):
            raise ConstraintError("What a parameter is without must not be empty.")


def parameter_rules(
    name: str,
    parameters: Sequence[Parameter],
    end: str,
    limits: ConstraintLimits,
    control: Mapping[str, int],
) -> Iterator[str]:
    """The rule `name` of the parameters in their order and of the structure's `end`, and what it needs."""
    parts = [f"{name}_{index}{'?' if one.optional else ''}" for index, one in enumerate(parameters)]
    yield f"{name}: {' '.join(parts)} {atoms(end, control)}"
    for index, parameter in enumerate(parameters):
        yield from _value(f"{name}_{index}", parameter, limits, control)


def _value(
    name: str, parameter: Parameter, limits: ConstraintLimits, control: Mapping[str, int]
) -> Iterator[str]:
    begin, end = atoms(parameter.begin, control), atoms(parameter.end, control)
    if parameter.schema is not None:
        schema = json.dumps(clean_schema(parameter.schema, limits), ensure_ascii=False)
        yield f"{name}: {begin} %json {schema} {end}"
        return
    if parameter.texts is not None:
        texts = " | ".join(lark_text(text) for text in parameter.texts)
        yield f"{name}: {begin} ({texts}) {end}"
        return
    marks = "|".join(map(escaped, parameter.without))
    without = f" & ~/{_ANY}({marks}){_ANY}/" if marks else ""
    plain = f"PLAIN_{name.upper()}"
    yield f"{plain}: /{_ANY}/{without}"
    first, *others = split_control(parameter.end, control)
    if isinstance(first, int):
        yield f"{name}: {begin} {plain} {end}"
        return
    if any(isinstance(piece, int) for piece in others):
        raise ConstraintError("The end of a parameter may hold a control token only at its beginning.")
    yield f"{name}_inside[lazy]: {plain} {lark_text(first)}"
    yield f"{name}: {begin} {name}_inside {' '.join(map(atom, others))}"
