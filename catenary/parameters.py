"""Parameters of a sequence and their ranges: one declaration for HTTP, gRPC, the engine and Python.

A number of the sampler is a row of SAMPLING and a field of `SamplingNumbers`. By its name the gateway, the
servicer, the core, `Client` and the defaults of a model's generation_config.json fill `SamplingParams`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypedDict

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


@dataclass(frozen=True, slots=True)
class SamplingNumber:
    """A number of `SamplingParams` in the proto, `SamplingOptions` of the core and the body of a request.

    neutral: values that change nothing, the default first. `model_default`: generation_config.json may name
    another default. `draws`: it changes draws alone, so a beam search has no use for it. `told`: the range in
    an engine's refusal, after "must be"; empty: the range's own text.
    """

    numbers: Numbers
    neutral: tuple[float, ...]
    model_default: bool = False
    draws: bool = False
    told: str = ""

    @property
    def default(self) -> float:
        """The value where neither the request nor the model names one."""
        return self.neutral[0]

    def check_sent(self, name: str, value: float) -> None:
        """Raise ValueError for a number, rounded to float32, that is out of range."""
        # The nearest float32 to the lower bound may be below it.
        lowest = not self.numbers.above and value == _float32(self.numbers.low)
        if value not in self.numbers and not lowest:
            raise ValueError(f"{name} must be {self.told or self.numbers}.")


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

_PENALTY_TOLD: Final = "between -2 and 2"

SAMPLING: Final[Mapping[str, SamplingNumber]] = {
    "temperature": SamplingNumber(TEMPERATURE, (1.0, 0.0), model_default=True, draws=True),
    "top_p": SamplingNumber(TOP_P, (1.0,), model_default=True, draws=True, told="above 0 and at most 1"),
    "top_k": SamplingNumber(
        TOP_K, (0, -1), model_default=True, draws=True, told="at least 1, or 0 or -1 for off"
    ),
    "min_p": SamplingNumber(MIN_P, (0.0,), model_default=True, draws=True, told="between 0 and 1"),
    "presence_penalty": SamplingNumber(PENALTY, (0.0,), told=_PENALTY_TOLD),
    "frequency_penalty": SamplingNumber(PENALTY, (0.0,), told=_PENALTY_TOLD),
    "repetition_penalty": SamplingNumber(REPETITION, (1.0,), model_default=True, told="between 0.01 and 100"),
}


class SamplingNumbers(TypedDict, total=False):
    """The numbers of SAMPLING as options of a call; None takes the model's own default."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None


PARAMETERS: Final = {
    **{name: one.numbers for name, one in SAMPLING.items()},
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


def _float32(number: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", number))[0]
    return rounded


def _text(bound: float) -> str:
    return str(int(bound)) if bound == int(bound) else f"{bound:g}"
