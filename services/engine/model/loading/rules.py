"""Which checkpoint tensors go where: data that a model's definition brings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

_WHOLE = ("whole",)


@dataclass(frozen=True, slots=True)
class Rule:
    """Maps tensor names to a parameter.

    source: the name, with `{layer}` and `{expert}` where the numbers are. target: the parameter, with
    `{layer}`; None for tensors that nobody needs. parts: what the tensor holds of the parameter, in its order
    along the parts' axis.
    """

    source: str
    target: str | None
    parts: tuple[str, ...] = _WHOLE
    pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        text = re.escape(self.source)
        for number in ("layer", "expert"):
            text = text.replace(rf"\{{{number}\}}", rf"(?P<{number}>\d+)")
        object.__setattr__(self, "pattern", re.compile(text))


@dataclass(frozen=True, slots=True)
class Match:
    """What a rule says about one tensor; `target` None: it is not needed."""

    target: str | None
    parts: tuple[str, ...]
    expert: int | None


def find(rules: Sequence[Rule], name: str) -> Match | None:
    """The first rule that knows the tensor, applied to it."""
    for rule in rules:
        found = rule.pattern.fullmatch(name)
        if found is None:
            continue
        numbers = found.groupdict()
        target = rule.target
        if target is not None and "layer" in numbers:
            target = target.replace("{layer}", str(int(numbers["layer"])))
        expert = int(numbers["expert"]) if "expert" in numbers else None
        return Match(target, rule.parts, expert)
    return None


def summary(names: Iterable[str]) -> str:
    """The first name in order, and how many more there are."""
    ordered = sorted(names)
    return ordered[0] if len(ordered) == 1 else f"{ordered[0]} and {len(ordered) - 1} more"
