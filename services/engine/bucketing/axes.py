"""Settings of buckets that an operator makes: of each axis, as text and as numbers, and of padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Final

_MAX_VALUE: Final = 2**31 - 1
_MAX_PERCENT: Final = 50
# Of a bucket: at 0.5 values are about the powers of two.
MAX_PADDING_RATIO: Final = 0.5


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
class PaddingOptions:
    """Settings of the `padding` strategy for all axes.

    `ratio` bounds the padding's share of a bucket, between 0 and 0.5. The caps bound it absolutely, in rows,
    tokens of a row, context blocks of a row and blocks of a decode batch; None is the default: a quarter of
    the maximum, for context blocks those of a full step.
    """

    ratio: float = 0.25
    max_rows: int | None = None
    max_tokens: int | None = None
    max_context: int | None = None
    max_blocks: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.ratio <= MAX_PADDING_RATIO:
            raise ValueError(f"the padding ratio must be between 0 and {MAX_PADDING_RATIO}, not {self.ratio}")
        for name in ("max_rows", "max_tokens", "max_context", "max_blocks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"the padding cap {name} must be at least 1, not {value}")


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
        """Return the axes from option names and texts; None is an absent option.

        Raises ValueError that names the option.
        """
        return cls(
            **{
                name.removeprefix(OPTION_PREFIX): parse_axis(name, text)
                for name, text in texts.items()
                if text is not None
            }
        )


AXES: Final = tuple(part.name for part in fields(BucketAxes))
OPTION_PREFIX: Final = "bucket_"
AXIS_OPTIONS: Final = tuple(OPTION_PREFIX + axis for axis in AXES)


def parse_axis(name: str, text: str) -> AxisOptions:
    """Parse `min=128,step=128,max=1024,pad_max=256,pad_percent=25`, any of these in any order.

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
