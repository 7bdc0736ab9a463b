"""Distributions of lengths in tokens, written as a user writes them."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from enum import Enum

MAX_LENGTH = 1 << 20
_FORMS = "N, uniform:LOW:HIGH, ratio:N:R (N * (1 - R) to N * (1 + R)), normal:MEAN:STD or lognormal:MEAN:STD"


class LengthKind(Enum):
    """The shape of a distribution."""

    FIXED = "fixed"
    UNIFORM = "uniform"
    NORMAL = "normal"
    LOGNORMAL = "lognormal"


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution over 1 .. MAX_LENGTH. `first` and `second` are: the length (twice); the lowest and the
    highest; mean and standard deviation of the length itself, before it is rounded and cut to the bounds."""

    kind: LengthKind
    first: float
    second: float

    def draw(self, generator: random.Random) -> int:
        """One length."""
        match self.kind:
            case LengthKind.FIXED:
                return int(self.first)
            case LengthKind.UNIFORM:
                return generator.randint(int(self.first), int(self.second))
            case LengthKind.NORMAL:
                value = generator.gauss(self.first, self.second)
            case LengthKind.LOGNORMAL:
                spread = math.log1p((self.second / self.first) ** 2)
                value = generator.lognormvariate(math.log(self.first) - spread / 2, math.sqrt(spread))
        return round(min(max(value, 1), MAX_LENGTH))


def parse_lengths(text: str) -> Lengths:
    """Read a distribution: `128`, `uniform:64:256`, `ratio:128:0.5`, `normal:128:32`, `lognormal:128:64`.

    Raises ValueError, one line.
    """
    kind, *parts = text.strip().split(":")
    if not parts:
        kind, parts = "fixed", [kind, kind]
    try:
        first, second = (float(part) for part in parts)
    except ValueError:
        raise ValueError(f"{text[:50]!r} is not a length: {_FORMS}") from None
    if not 1 <= first <= MAX_LENGTH:
        raise ValueError(f"{text[:50]!r}: a length is 1 to {MAX_LENGTH}")
    match kind:
        case "fixed" | "uniform":
            if not (first.is_integer() and second.is_integer()):
                raise ValueError(f"{text[:50]!r}: a length is a whole number")
            if not first <= second <= MAX_LENGTH:
                raise ValueError(f"{text[:50]!r}: LOW to HIGH, at most {MAX_LENGTH}")
            return Lengths(LengthKind(kind), first, second)
        case "ratio":
            if not 0 <= second < 1:
                raise ValueError(f"{text[:50]!r}: a ratio is 0 up to, but not, 1")
            low, high = max(1, math.floor(first * (1 - second))), math.ceil(first * (1 + second))
            return Lengths(LengthKind.UNIFORM, low, min(high, MAX_LENGTH))
        case "normal" | "lognormal":
            if not 0 <= second <= MAX_LENGTH:
                raise ValueError(f"{text[:50]!r}: a standard deviation is 0 to {MAX_LENGTH}")
            return Lengths(LengthKind(kind), first, second)
        case _:
            raise ValueError(f"{text[:50]!r} is not a length: {_FORMS}")
