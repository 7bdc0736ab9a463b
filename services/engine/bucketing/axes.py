"""What an operator may say about the axes of buckets, as text and as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Final

_MAX_VALUE: Final = 2**31 - 1
_MAX_PERCENT: Final = 50
_PADDING_ONLY: Final = ("pad_max", "pad_percent")


@dataclass(frozen=True, slots=True)
class AxisOptions:
    """Settings of one axis; None leaves a setting to the strategy. `pad_percent` is of 0 .. 50."""

    min: int | None = None
    step: int | None = None
    max: int | None = None
    pad_max: int | None = None
    pad_percent: int | None = None

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the settings that are set."""
        return tuple(part.name for part in fields(self) if getattr(self, part.name) is not None)


@dataclass(frozen=True, slots=True)
class BucketAxes:
    """Settings of all axes. Fields are named as those of `BucketRanges`, options have `bucket_` before it."""

    prefill_batch: AxisOptions = field(default_factory=AxisOptions)
    prefill_query: AxisOptions = field(default_factory=AxisOptions)
    prefill_context: AxisOptions = field(default_factory=AxisOptions)
    decode_batch: AxisOptions = field(default_factory=AxisOptions)
    decode_blocks: AxisOptions = field(default_factory=AxisOptions)

    @classmethod
    def parse(cls, texts: Mapping[str, str | None]) -> BucketAxes:
        """From option names and texts; None is an absent option. Raises ValueError that names the option."""
        return cls(
            **{
                name.removeprefix(OPTION_PREFIX): parse_axis(name, text)
                for name, text in texts.items()
                if text is not None
            }
        )

    def check_strategy(self, strategy: str) -> None:
        """Raises ValueError for a setting that the strategy, by its long name, does not take."""
        for axis in AXES:
            for setting in getattr(self, axis).given:
                if not takes(strategy, axis, setting, getattr(getattr(self, axis), setting)):
                    raise ValueError(_refusal(strategy, axis, setting))

    def taken_by(self, strategy: str) -> BucketAxes:
        """Those settings that the strategy takes."""
        return BucketAxes(
            **{
                axis: AxisOptions(
                    **{
                        setting: getattr(options, setting)
                        for setting in options.given
                        if takes(strategy, axis, setting, getattr(options, setting))
                    }
                )
                for axis, options in ((axis, getattr(self, axis)) for axis in AXES)
            }
        )


AXES: Final = tuple(part.name for part in fields(BucketAxes))
OPTION_PREFIX: Final = "bucket_"
AXIS_OPTIONS: Final = tuple(OPTION_PREFIX + axis for axis in AXES)


def takes(strategy: str, axis: str, setting: str, value: int) -> bool:
    """True if a strategy, by its long name, takes this setting of an axis.

    `exponential` follows the limits by itself. It takes a first prompt length of one token, for engines that
    go on where others have computed the prompt, and a bound on prefill rows.
    """
    if strategy == "exponential":
        return (axis, setting, value) == ("prefill_query", "min", 1) or (axis, setting) == (
            "prefill_batch",
            "max",
        )
    return strategy == "padding" or (strategy == "linear" and setting not in _PADDING_ONLY)


def parse_axis(name: str, text: str) -> AxisOptions:
    """Parses `min=128,step=128,max=1024,pad_max=256,pad_percent=25`, any of these in any order.

    Raises ValueError, one line that begins with the option's name.
    """
    known = [part.name for part in fields(AxisOptions)]
    values: dict[str, int] = {}
    for part in text.split(","):
        setting, equals, number = (word.strip() for word in part.partition("="))
        if setting not in known or not equals:
            raise ValueError(f"{name}: expected {'=N,'.join(known)}=N, any of these, not {part.strip()!r}")
        if setting in values:
            raise ValueError(f"{name}: {setting} is given twice")
        if not number.isascii() or not number.isdigit() or len(number) > len(str(_MAX_VALUE)):
            raise ValueError(f"{name}: {setting} must be a whole number, not {number[:20]!r}")
        values[setting] = int(number)
    least = {
        "min": 0 if name.endswith("context") else 1,
        "max": 0 if name.endswith("context") else 1,
        "step": 1,
    }
    for setting, value in values.items():
        top = _MAX_PERCENT if setting == "pad_percent" else _MAX_VALUE
        if not least.get(setting, 0) <= value <= top:
            raise ValueError(f"{name}: {setting} must be {least.get(setting, 0)} to {top}, not {value}")
    if values.get("min", 0) > values.get("max", _MAX_VALUE):
        raise ValueError(f"{name}: min {values['min']} exceeds max {values['max']}")
    return AxisOptions(**values)


def _refusal(strategy: str, axis: str, setting: str) -> str:
    option = f"{OPTION_PREFIX}{axis}"
    if strategy == "exponential":
        return (
            f"{option}: bucketing_strategy exponential spaces its buckets by itself and takes min=1 of "
            f"bucket_prefill_query and max of bucket_prefill_batch, not {setting}: leave it out, or choose "
            "linear or padding"
        )
    if strategy == "linear":
        return f"{option}: {setting} needs bucketing_strategy padding, not linear"
    return f"{option} needs bucketing_strategy linear or padding, not {strategy}"
