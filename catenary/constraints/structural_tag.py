"""Free text with tags whose content is constrained."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from catenary.constraints.control_tokens import split_control
from catenary.constraints.json_schema import clean_schema
from catenary.constraints.kinds import ConstraintError, ConstraintLimits
from catenary.constraints.lark import lark_text

_META = frozenset("\\.+*?()|[]{}^$#&-~/")


def atoms(text: str, control: Mapping[str, int]) -> str:
    """Return a text as Lark, its control tokens by their ids."""
    return " ".join(map(atom, split_control(text, control)))


def atom(piece: str | int) -> str:
    """Return a text without control tokens, or one."""
    return f"<[{piece}]>" if isinstance(piece, int) else lark_text(piece)


def escaped(text: str) -> str:
    """Return a text as a regular expression."""
    return "".join(f"\\x{{{ord(char):x}}}" if char in _META or not char.isalnum() else char for char in text)


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
    """Raise ConstraintError for parameters that are too many, too long or make no sense."""
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
    """Yield the rule `name`, of the parameters in order and the structure's `end`, and the rules in it."""
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


TAG_GAP = r"[ \n]{1,2}"
"""Separators of two tags without other text between them; tags may also follow each other at once."""
_LIKE_JSON = ("{", '["', "[{", "[[")


class _Structure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    begin: str
    end: str = ""
    schema: dict[str, Any] | bool | None = None
    parameters: list[Parameter] | None = None


class _Tags(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    structures: list[_Structure]
    triggers: list[str]
    at_least_one: bool = False
    stop_after_first: bool = False
    # No text around the tags.
    only_tags: bool = False
    otherwise: dict[str, Any] | bool | None = None


def tags_to_lark(source: str, limits: ConstraintLimits, control: Mapping[str, int]) -> str:
    """Return the grammar of a CONSTRAINT_KIND_STRUCTURAL_TAG.

    Control tokens are not text: a trigger may begin with one, and `begin` and `end` may hold some.

    Raises:
        ConstraintError: it is malformed, a schema in it is, or it can never have a tag.
    """
    try:
        tags = msgspec.json.decode(source, type=_Tags)
    except msgspec.ValidationError:
        raise ConstraintError(
            "A structural tag has a field that is missing, unknown or of the wrong type."
        ) from None
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise ConstraintError("The structural tag is not valid JSON.") from None
    _check(tags, limits)
    if tags.only_tags and not tags.at_least_one:
        raise ConstraintError("A structural tag with only_tags needs at_least_one.")
    tags = msgspec.structs.replace(tags, triggers=first_to_fire(tags.triggers))
    return "\n".join(_rules(tags, limits, control))


def _check(tags: _Tags, limits: ConstraintLimits) -> None:
    if not tags.structures or not tags.triggers:
        raise ConstraintError("A structural tag needs structures and triggers.")
    if max(len(tags.structures), len(tags.triggers)) > limits.max_tags:
        raise ConstraintError(f"A structural tag has more than {limits.max_tags} structures or triggers.")
    if not all(tags.triggers):
        raise ConstraintError("A trigger of a structural tag must not be empty.")
    if max(max(len(tag.begin), len(tag.end)) for tag in tags.structures) > limits.max_tag_chars:
        raise ConstraintError(f"A tag's begin and end have at most {limits.max_tag_chars} characters.")
    for structure in tags.structures:
        if not structure.begin.startswith(tuple(tags.triggers)):
            raise ConstraintError("Each structure's begin must start with a trigger.")
        if structure.parameters is not None:
            if structure.schema is not None:
                raise ConstraintError("A structure has a schema or parameters, not both.")
            check_parameters(structure.parameters, limits)
        elif structure.schema is None and not structure.end:
            raise ConstraintError("A structure without a schema needs an end.")
    for trigger in tags.triggers:
        if not any(structure.begin.startswith(trigger) for structure in tags.structures):
            raise ConstraintError("Each trigger must begin a structure.")


def first_to_fire(triggers: Sequence[str]) -> list[str]:
    """Drop the triggers that begin with another one, which a text comes to first.

    Raises ConstraintError for one that holds another further in: no text could come to its beginning and then
    to a tag of it.
    """
    kept: list[str] = []
    for trigger in sorted(set(triggers), key=len):
        if trigger.startswith(tuple(kept)):
            continue
        if any(other in trigger for other in kept):
            raise ConstraintError(
                "A trigger of a structural tag must not hold another one, but at its beginning."
            )
        kept.append(trigger)
    return kept


def _rules(tags: _Tags, limits: ConstraintLimits, control: Mapping[str, int]) -> Iterator[str]:
    more = "" if tags.stop_after_first else "text"
    first = [f"{atoms(tag.begin, control)} body_{index}" for index, tag in enumerate(tags.structures)]
    if tags.otherwise is not None or tags.only_tags:
        yield from _tags_or_json(tags, first, limits)
    else:
        yield f"start: ({' | '.join(first)}) {more}" if tags.at_least_one else "start: text"
        if more or not tags.at_least_one:
            yield from _free_text(tags, control, more)
    for index, structure in enumerate(tags.structures):
        yield from _body(index, structure, limits, control)


def _tags_or_json(tags: _Tags, alternatives: Sequence[str], limits: ConstraintLimits) -> Iterator[str]:
    """Yield rules for tags alone, or one JSON value.

    Raises ConstraintError if a tag begins like JSON and a value may stand in its place: the longer lexeme of
    the tag would win over the brace.
    """
    if not tags.at_least_one and any(tag.begin.startswith(_LIKE_JSON) for tag in tags.structures):
        raise ConstraintError("A tag that begins like JSON cannot stand beside JSON of another schema.")
    yield "start: tags" if tags.at_least_one else "start: tags | value"
    yield "tags: tag" if tags.stop_after_first else "tags: tag (GAP? tag)*"
    yield f"tag: {' | '.join(alternatives)}"
    if not tags.stop_after_first:
        yield f"GAP: /{TAG_GAP}/"
    if not tags.at_least_one:
        yield f"value: %json {json.dumps(clean_schema(tags.otherwise, limits), ensure_ascii=False)}"


def _free_text(tags: _Tags, control: Mapping[str, int], more: str) -> Iterator[str]:
    """Yield the rule `text`: text up to a tag, to a control token or to the end. Behind a tag follows `more`.

    Control tokens part it, as text cannot spell them. One that begins a trigger is followed by its rest
    and a tag, or by text that does not begin like this.
    """
    heads, spelled = [], []
    openers: dict[int, list[int]] = {}
    for index, trigger in enumerate(tags.triggers):
        first, *rest = split_control(trigger, control)
        if any(isinstance(piece, int) for piece in rest):
            raise ConstraintError("A trigger may hold a control token of the model only at its beginning.")
        bodies = (
            f"{atoms(structure.begin[len(trigger) :], control)} body_{number}"
            for number, structure in enumerate(tags.structures)
            if structure.begin.startswith(trigger)
        )
        yield f"tagged_{index}: ({' | '.join(bodies)}) {more}"
        if isinstance(first, int):
            openers.setdefault(first, []).append(index)
        else:
            spelled.append(first)
            heads.append(f"head_{index} tagged_{index}")
            yield f"head_{index}[lazy]: ANY {lark_text(first)}"
    without = "".join(f" & ~/{_ANY}{escaped(trigger)}{_ANY}/" for trigger in spelled)
    yield f"ANY: /{_ANY}/"
    yield f"TEXT: /{_ANY}/{without}"
    others = sorted(set(control.values()) - set(openers))
    parted = "TEXT | TEXT control" if control else "TEXT"
    yield f"text: {' | '.join([*heads, parted])}"
    ways = [f"<[{_ranges(others)}]> text"] if others else []
    for opener, indexes in openers.items():
        rests = {
            index: "".join(map(str, [*split_control(tags.triggers[index], control)][1:])) for index in indexes
        }
        yield from _after(opener, rests, without)
        ways.append(f"<[{opener}]> after_{opener}")
    if control:
        yield f"control: {' | '.join(ways)}"


def _after(opener: int, rests: Mapping[int, str], without: str) -> Iterator[str]:
    """Yield rules of the text after the control token `opener`, which begins the triggers with these
    numbers and rests."""
    ways = [f"{lark_text(rest) if rest else ''} tagged_{index}" for index, rest in rests.items()]
    if all(rests.values()):
        unlike = "".join(f" & ~/{escaped(rest)}{_ANY}/" for rest in rests.values())
        yield f"OTHER_{opener}: /{_ANY}/{unlike}{without}"
        ways += [f"OTHER_{opener}", f"OTHER_{opener} control"]
    yield f"after_{opener}: {' | '.join(ways)}"


def _ranges(ids: Sequence[int]) -> str:
    """Return rising ids as Lark lists them: 1,3-5."""
    spans: list[list[int]] = []
    for number in ids:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def _body(
    index: int, structure: _Structure, limits: ConstraintLimits, control: Mapping[str, int]
) -> Iterator[str]:
    """Yield rules of the text between a structure's beginning and the end of its tag."""
    if structure.parameters is not None:
        yield from parameter_rules(f"body_{index}", structure.parameters, structure.end, limits, control)
        return
    if structure.schema is not None:
        schema = json.dumps(clean_schema(structure.schema, limits), ensure_ascii=False)
        yield f"body_{index}: %json {schema} {atoms(structure.end, control)}"
        return
    first, *others = split_control(structure.end, control)
    if isinstance(first, int):
        yield f"body_{index}: /{_ANY}/ {atoms(structure.end, control)}"
        return
    yield f"inside_{index}[lazy]: /{_ANY}/ {lark_text(first)}"
    yield f"body_{index}: inside_{index} {' '.join(map(atom, others))}"
