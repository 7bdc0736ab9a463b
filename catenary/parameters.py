"""The values that a sequence's parameters may have: one declaration for HTTP, gRPC and Python."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from catenary.nearest import near
from catenary.sequence_limits import MAX_TOP_LOGPROBS

_INT32: Final = 2**31 - 1
_INT64: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers from `low` to `high`. above: without `low`. whole: integers alone.

    Its text follows "must be".
    """

    low: float
    high: float = math.inf
    above: bool = False
    whole: bool = False

    def __contains__(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return False
        least = self.low < value if self.above else self.low <= value
        return least and value <= self.high and math.isfinite(value)

    def __str__(self) -> str:
        kind = "an integer" if self.whole else "a number"
        low = f"above {self.low:g}" if self.above else f"of at least {_text(self.low)}"
        if self.high in (math.inf, _INT32, _INT64):
            return f"a finite number {low}" if not self.whole else f"{kind} {low}"
        return f"{kind} {low.removeprefix('of ')} and at most {_text(self.high)}"


TEMPERATURE: Final = Numbers(0)
TOP_P: Final = Numbers(0, 1, above=True)
TOP_K: Final = Numbers(-1, _INT32, whole=True)
MIN_P: Final = Numbers(0, 1)
PENALTY: Final = Numbers(-2, 2)
# Beyond these a logit may leave the range of float32.
REPETITION: Final = Numbers(0.01, 100)
BIAS: Final = Numbers(-100, 100)
SEED: Final = Numbers(-_INT64 - 1, _INT64, whole=True)
TOKENS: Final = Numbers(0, _INT32, whole=True)
ALTERNATIVES: Final = Numbers(0, MAX_TOP_LOGPROBS, whole=True)
LENGTH_PENALTY: Final = Numbers(-10, 10)

PARAMETERS: Final = {
    "temperature": TEMPERATURE,
    "top_p": TOP_P,
    "top_k": TOP_K,
    "min_p": MIN_P,
    "presence_penalty": PENALTY,
    "frequency_penalty": PENALTY,
    "repetition_penalty": REPETITION,
    "seed": SEED,
    "max_tokens": Numbers(1, _INT32, whole=True),
    "min_tokens": TOKENS,
    "top_logprobs": ALTERNATIVES,
    "prompt_logprobs": ALTERNATIVES,
    "priority": Numbers(-_INT32, _INT32, whole=True),
}


class UnknownNameError(TypeError, ValueError):
    """An option has a name that is not known. TypeError, as Python raises for a function's arguments."""


def check_names(given: Iterable[str], known: Iterable[str], *, kind: str) -> None:
    """Raise UnknownNameError for the first of `given` that is not among `known`: what it is near to."""
    names = sorted(known)
    for name in given:
        if name not in names:
            raise UnknownNameError(f"there is no {kind} {name!r}{near(name, names)}")


def check_number(name: str, value: Any, allowed: Numbers) -> None:
    """Raise ValueError, which names the parameter and the numbers that are allowed."""
    if value not in allowed:
        raise ValueError(f"{name} must be {allowed}, not {value!r}")


def _text(bound: float) -> str:
    return str(int(bound)) if bound == int(bound) else f"{bound:g}"
