"""The interface of a bucket strategy: values and settings of the axes, and the table of strategies.

A strategy is one file: a class that gives every axis a range, and the range, if no other strategy has it. The
option's values and help, `catenary buckets`, `catenary plan`, vLLM's variables and docs/gaudi.md read the
table.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Protocol, Self, TypeVar

from services.engine.bucketing.axes import AXES, OPTION_PREFIX, AxisOptions, BucketAxes, PaddingOptions
from services.engine.bucketing.bucket import BucketLimits

# The value of the option bucketing_strategy that no strategy generates: buckets are listed in a file.
FILE: Final = "file"
_MAX_VALUES: Final = 100_000


class AxisRange(Protocol):
    """One axis as a strategy generates it."""

    @property
    def maximum(self) -> int:
        """The value that the axis is meant to reach."""

    def values(self) -> list[int]:
        """Return the values, rising. The maximum may be missing: some rules drop it."""

    def adjusted(self, axis: str, options: AxisOptions, limits: BucketLimits) -> Self:
        """Return the range with an operator's settings, all of which the strategy takes.

        A maximum beyond what an engine can use ends there. Raises ValueError, one line, for a minimum that
        lies beyond it.
        """


@dataclass(frozen=True, slots=True)
class BucketRanges:
    """A strategy's axes: rows, tokens and context blocks per row; rows and blocks of a decode batch."""

    prefill_batch: AxisRange
    prefill_query: AxisRange
    prefill_context: AxisRange
    decode_batch: AxisRange
    decode_blocks: AxisRange


class BucketStrategy(ABC):
    """A rule that spaces the values of every axis, and the settings of axes that it takes.

    `summary` and `settings` are cells of the table of strategies in docs/gaudi.md; `settings` stands in the
    help of the options of axes, too. `register` sets `name` and `vllm_name`, empty if vLLM has no such
    strategy. `padded`: the options bucketing_pad_* matter.
    """

    name: ClassVar[str]
    vllm_name: ClassVar[str]
    summary: ClassVar[str]
    settings: ClassVar[str] = "none"
    padded: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def ranges(cls, limits: BucketLimits, padding: PaddingOptions) -> BucketRanges:
        """Return the range of each axis for an engine with these limits."""

    @classmethod
    def takes(cls, axis: str, setting: str, value: int) -> bool:
        """Return whether a setting of an axis, such as `max` of `decode_batch`, may have this value."""
        return False

    @classmethod
    def refusal(cls, axis: str, setting: str) -> str:
        """Return why a setting is not taken, one line that follows the option's name."""
        return f": {setting} needs bucketing_strategy {_either(takers(axis, setting))}, not {cls.name}"


STRATEGIES: Final[dict[str, type[BucketStrategy]]] = {}

_Strategy = TypeVar("_Strategy", bound=type[BucketStrategy])


def register(name: str, *, vllm_name: str = "") -> Callable[[_Strategy], _Strategy]:
    """Class decorator: make a strategy a value of the option bucketing_strategy, and vLLM's name for it."""

    def add(strategy: _Strategy) -> _Strategy:
        strategy.name, strategy.vllm_name = name, vllm_name
        STRATEGIES[name] = strategy
        return strategy

    return add


def vllm_names() -> dict[str, str]:
    """Return our names of strategies by vLLM's, of those that vLLM has."""
    return {strategy.vllm_name: name for name, strategy in STRATEGIES.items() if strategy.vllm_name}


def strategy_names() -> tuple[str, ...]:
    """Return the values of the option bucketing_strategy."""
    return (*STRATEGIES, FILE, *vllm_names())


def long_name(strategy: str) -> str:
    """Return our name of a strategy. Raises ValueError for an unknown one."""
    name = vllm_names().get(strategy, strategy)
    if name not in (*STRATEGIES, FILE):
        raise ValueError(f"unknown bucketing strategy {strategy!r}; known are {', '.join(strategy_names())}")
    return name


def takers(axis: str, setting: str, value: int = 2) -> list[str]:
    """Return the strategies that take a setting of an axis, by our names."""
    return [name for name, strategy in STRATEGIES.items() if strategy.takes(axis, setting, value)]


def check_axes(strategy: str, axes: BucketAxes) -> None:
    """Raise ValueError, one line, for a setting that the strategy, by our name, does not take."""
    for axis in AXES:
        options: AxisOptions = getattr(axes, axis)
        for setting in options.given:
            if strategy == FILE:
                others = _either(takers(axis, "step"))
                raise ValueError(f"{OPTION_PREFIX}{axis} needs bucketing_strategy {others}, not {FILE}")
            if not STRATEGIES[strategy].takes(axis, setting, getattr(options, setting)):
                reason = STRATEGIES[strategy].refusal(axis, setting)
                raise ValueError(f"{OPTION_PREFIX}{axis}{reason}")


def taken_axes(strategy: str, axes: BucketAxes) -> BucketAxes:
    """Return the settings that the strategy, by our name, takes."""

    def taken(axis: str, options: AxisOptions) -> AxisOptions:
        return AxisOptions(
            **{
                setting: value
                for setting in options.given
                if strategy != FILE
                and STRATEGIES[strategy].takes(axis, setting, value := getattr(options, setting))
            }
        )

    return BucketAxes(**{axis: taken(axis, getattr(axes, axis)) for axis in AXES})


def _either(names: list[str]) -> str:
    return " or ".join(names)


def fit_to_pool(minimum: int, step: int, maximum: int, *, pool: int) -> tuple[int, int]:
    """Minimum and maximum of decode blocks whose fetch is contiguous: none lies outside the pool."""
    maximum = min(maximum, pool)
    return (minimum if minimum <= maximum else max(1, maximum - step)), maximum


def most_of(axis: str, limits: BucketLimits) -> tuple[int, str]:
    """Return the largest value of an axis that an engine can use, and why."""
    match axis:
        case "prefill_batch":
            return limits.max_prefill_seqs, "no more prompts are computed together (max_prefill_batch)"
        case "prefill_query":
            most = min(limits.max_num_batched_tokens, limits.max_model_len)
            return most, "no chunk is longer (max_idle_batched_tokens, max_num_batched_tokens, max_model_len)"
        case "prefill_context":
            return limits.max_context_blocks, "a sequence has no more blocks (max_model_len, block_size)"
        case "decode_batch":
            return limits.max_num_seqs, "no more sequences run at once (max_num_seqs)"
        case _ if limits.contiguous:
            return limits.num_blocks, "the KV pool has no more blocks"
        case _:
            # Each batch's blocks end at what its rows can have, which the grid sees to.
            return sys.maxsize, "no batch has more blocks"


@dataclass(frozen=True, slots=True)
class SteppedRange:
    """The bounds and the step of an axis that takes an operator's `min`, `step` and `max`."""

    minimum: int
    step: int
    maximum: int

    def adjusted(self, axis: str, options: AxisOptions, limits: BucketLimits) -> Self:
        """Return the range with the operator's bounds and step, within what an engine can use."""
        if not options.given:
            return self
        most, reason = most_of(axis, limits)
        minimum = self.minimum if options.min is None else options.min
        step = self.step if options.step is None else options.step
        maximum = self.maximum if options.max is None else min(options.max, most)
        if axis == "decode_blocks" and limits.contiguous:
            minimum, maximum = fit_to_pool(minimum, step, maximum, pool=limits.num_blocks)
        if options.min is None:
            minimum = min(minimum, maximum)
        elif options.max is None and minimum > maximum:
            # Some strategies end an axis before the last value that can be needed.
            maximum = min(minimum, most)
        if minimum > maximum:
            raise ValueError(f"{OPTION_PREFIX}{axis}: min {minimum} exceeds {maximum}: {reason}; lower min")
        if maximum // step > _MAX_VALUES:
            raise ValueError(
                f"{OPTION_PREFIX}{axis}: step {step} makes more than {_MAX_VALUES} values up to {maximum}: "
                "raise step"
            )
        return replace(self, minimum=minimum, step=step, maximum=maximum)
