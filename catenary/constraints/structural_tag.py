"""Free text with tags whose content is constrained."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from catenary.constraints.control_tokens import split_control
from catenary.constraints.json_schema import clean_schema
from catenary.constraints.kinds import ConstraintError, ConstraintLimits

_ANY = "(?s:.*)"
_META = frozenset("\\.+*?()|[]{}^$#&-~/")


class _Structure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    begin: str
    end: str = ""
    schema: dict[str, Any] | bool | None = None


class _Tags(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    structures: list[_Structure]
    triggers: list[str]
    at_least_one: bool = False
    stop_after_first: bool = False


def tags_to_lark(source: str, limits: ConstraintLimits, control: Mapping[str, int]) -> str:
    """The grammar of a CONSTRAINT_KIND_STRUCTURAL_TAG.

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
    return "\n".join(_rules(tags, limits, control))


def _check(tags: _Tags, limits: ConstraintLimits) -> None:
    if not tags.structures or not tags.triggers:
        raise ConstraintError("A structural tag needs structures and triggers.")
    if max(len(tags.structures), len(tags.triggers)) > limits.max_alternatives:
        raise ConstraintError(
            f"A structural tag has more than {limits.max_alternatives} structures or triggers."
        )
    if not all(tags.triggers):
        raise ConstraintError("A trigger of a structural tag must not be empty.")
    for structure in tags.structures:
        if not structure.begin.startswith(tuple(tags.triggers)):
            raise ConstraintError("Each structure's begin must start with a trigger.")
        if structure.schema is None and not structure.end:
            raise ConstraintError("A structure without a schema needs an end.")
    for trigger in tags.triggers:
        if not any(structure.begin.startswith(trigger) for structure in tags.structures):
            raise ConstraintError("Each trigger must begin a structure.")


def _rules(tags: _Tags, limits: ConstraintLimits, control: Mapping[str, int]) -> Iterator[str]:
    rest = "" if tags.stop_after_first else " tagged* TAIL"
    if tags.at_least_one:
        yield f"start: tag{rest}"
        first = (f"{_atoms(tag.begin, control)} body_{index}" for index, tag in enumerate(tags.structures))
        yield f"tag: {' | '.join(first)}"
    elif tags.stop_after_first:
        yield "start: tagged | TAIL"
    else:
        yield "start: tagged* TAIL"
    if not (tags.at_least_one and tags.stop_after_first):
        yield from _free_text(tags, control)
    for index, structure in enumerate(tags.structures):
        yield from _body(index, structure, limits, control)


def _free_text(tags: _Tags, control: Mapping[str, int]) -> Iterator[str]:
    """`tagged`: text up to the first trigger, and a tag that it begins; `TAIL`: text without a trigger."""
    spelled: list[str] = []
    yield f"tagged: {' | '.join(f'after_{index}' for index in range(len(tags.triggers)))}"
    for index, trigger in enumerate(tags.triggers):
        pieces = list(split_control(trigger, control))
        bodies = " | ".join(
            f"{_atoms(structure.begin[len(trigger) :], control)} body_{number}"
            for number, structure in enumerate(tags.structures)
            if structure.begin.startswith(trigger)
        )
        if isinstance(pieces[0], int):
            yield f"after_{index}: TEXT? {_atoms(trigger, control)} ({bodies})"
            continue
        if len(pieces) > 1:
            raise ConstraintError("A trigger may hold a control token of the model only at its beginning.")
        spelled.append(trigger)
        yield f"head_{index}[lazy]: ANY {_quoted(trigger)}"
        yield f"after_{index}: head_{index} ({bodies})"
    yield f"ANY: /{_ANY}/"
    without = "".join(f" & ~/{_ANY}{_escaped(trigger)}{_ANY}/" for trigger in spelled)
    yield f"TAIL: /{_ANY}/{without}"
    yield f"TEXT: /(?s:.+)/{without}"


def _body(
    index: int, structure: _Structure, limits: ConstraintLimits, control: Mapping[str, int]
) -> Iterator[str]:
    """What stands between a structure's beginning and the end of its tag."""
    if structure.schema is not None:
        schema = json.dumps(clean_schema(structure.schema, limits), ensure_ascii=False)
        yield f"body_{index}: %json {schema} {_atoms(structure.end, control)}"
        return
    first, *others = split_control(structure.end, control)
    if isinstance(first, int):
        yield f"body_{index}: INSIDE? {_atoms(structure.end, control)}"
        yield "INSIDE: /(?s:.+)/"
        return
    yield f"inside_{index}[lazy]: /{_ANY}/ {_quoted(first)}"
    yield f"body_{index}: inside_{index} {' '.join(map(_atom, others))}"


def _atoms(text: str, control: Mapping[str, int]) -> str:
    """A text as Lark, its control tokens by their ids."""
    return " ".join(map(_atom, split_control(text, control)))


def _atom(piece: str | int) -> str:
    return f"<[{piece}]>" if isinstance(piece, int) else _quoted(piece)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    return "".join(f"\\x{{{ord(char):x}}}" if char in _META or not char.isalnum() else char for char in text)
