"""Lengths of a workload's sequences: read from a file, or drawn like chat traffic."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from services.engine.bucketing import Bucket

_MAX_FILE_BYTES: Final = 256 << 20
_MAX_TOKENS: Final = 10_000_000


@dataclass(frozen=True, slots=True)
class SequenceLengths:
    """Tokens of one sequence's prompt and of its output, both at least 1."""

    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class StepTiming:
    """`steps` steps with these two buckets took `seconds` together. A phase without rows has no bucket."""

    prefill: Bucket | None
    decode: Bucket | None
    steps: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Recording:
    """Lengths and step times that an engine recorded, in order."""

    lengths: tuple[SequenceLengths, ...]
    timings: tuple[StepTiming, ...]


def read_recording(path: Path) -> Recording:
    """Read JSON lines: {"prompt_tokens": n, "output_tokens": m}, and step timings if there are any.

    Raises ValueError, one line that names the file and the line, for anything else, and for a file without
    lengths.
    """
    lengths: list[SequenceLengths] = []
    timings: list[StepTiming] = []
    try:
        size = path.stat().st_size
        if size > _MAX_FILE_BYTES:
            raise ValueError(f"length file {path} has {size} bytes, more than {_MAX_FILE_BYTES}")
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    _read_line(line, f"length file {path}, line {number}", lengths, timings)
    except OSError as error:
        raise ValueError(f"length file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"length file {path} is not text in UTF-8") from None
    if not lengths:
        raise ValueError(f"length file {path} holds no lengths")
    return Recording(tuple(lengths), tuple(timings))


def chat_lengths(seed: int, count: int) -> list[SequenceLengths]:
    """Return lengths like those of chat traffic: lognormal, half of the prompts over 300 tokens, of the
    outputs 180.

    The tails are long: about one prompt in 40 has more than 2,000 tokens.
    """
    draw = random.Random(seed)

    def lognormal(median: float, sigma: float) -> int:
        return max(1, round(draw.lognormvariate(math.log(median), sigma)))

    return [SequenceLengths(lognormal(300, 1.0), lognormal(180, 0.8)) for _ in range(count)]


def clipped(lengths: Sequence[SequenceLengths], max_model_len: int) -> list[SequenceLengths]:
    """Return the lengths as a model of this length would serve them: outputs end at it, long prompts are
    refused."""
    return [
        SequenceLengths(item.prompt_tokens, min(item.output_tokens, max_model_len - item.prompt_tokens))
        for item in lengths
        if item.prompt_tokens < max_model_len
    ]


def _read_line(line: str, where: str, lengths: list[SequenceLengths], timings: list[StepTiming]) -> None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError(f"{where}: not JSON") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where}: not a JSON object")
    if "steps" in value:
        timings.append(_timing(value, where))
    else:
        numbers = [_count(value.get(name), name, where) for name in ("prompt_tokens", "output_tokens")]
        lengths.append(SequenceLengths(*numbers))


def _timing(value: dict[str, Any], where: str) -> StepTiming:
    seconds = value.get("seconds")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
        raise ValueError(f"{where}: seconds must be a number of at least 0")
    buckets: list[Bucket | None] = []
    for name in ("prefill", "decode"):
        shape = value.get(name)
        if shape is None:
            buckets.append(None)
        elif isinstance(shape, list) and len(shape) == 3 and all(type(part) is int for part in shape):
            buckets.append(Bucket(*shape))
        else:
            raise ValueError(f"{where}: {name} must be [batch, query, context_blocks]")
    return StepTiming(buckets[0], buckets[1], _count(value["steps"], "steps", where), float(seconds))


def _count(value: Any, name: str, where: str) -> int:
    if type(value) is not int or not 1 <= value <= _MAX_TOKENS:
        raise ValueError(f"{where}: {name} must be an int between 1 and {_MAX_TOKENS}")
    return value
