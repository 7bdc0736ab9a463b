"""The options that choose an engine's buckets. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from catenary.config import ServiceConfig
from services.engine.bucketing import AXIS_OPTIONS, BucketAxes, PaddingOptions, long_name

_PADDING_OPTIONS = (
    "bucketing_pad_ratio",
    "bucketing_pad_max_rows",
    "bucketing_pad_max_tokens",
    "bucketing_pad_max_context",
    "bucketing_pad_max_blocks",
)


class BucketingOptions(ServiceConfig):
    """Strategy, file, padding and axes. Whoever plans or serves with buckets has these options."""

    headings: ClassVar[Mapping[str, str]] = {
        "bucketing_strategy": "Buckets",
    }

    bucketing_strategy: Literal["linear", "exponential", "padding", "file", "lin", "exp", "pad"] = Field(
        "exponential", description="How the static shapes of the forwards are spaced."
    )
    bucketing_file: Path | None = Field(
        None,
        description="Bucket file for bucketing_strategy file, one (batch, query, context_blocks) a line; "
        "catenary buckets --learn writes one.",
    )
    bucketing_pad_ratio: float = Field(
        0.25, ge=0, le=0.5, description="Strategy padding: largest share of padding in a bucket."
    )
    bucketing_pad_max_rows: int | None = Field(
        None, ge=1, description="Strategy padding: most padded rows. Absent: a quarter of the maximum."
    )
    bucketing_pad_max_tokens: int | None = Field(
        None,
        ge=1,
        description="Strategy padding: most padded tokens of a row. Absent: a quarter of "
        "max_num_batched_tokens.",
    )
    bucketing_pad_max_context: int | None = Field(
        None,
        ge=1,
        description="Strategy padding: most padded context blocks of a row. Absent: a full step's.",
    )
    bucketing_pad_max_blocks: int | None = Field(
        None,
        ge=1,
        description="Strategy padding: most padded blocks of a decode batch. Absent: a quarter of the "
        "maximum.",
    )
    bucket_prefill_batch: str | None = Field(
        None,
        max_length=128,
        description="Rows of prefill buckets: min=N,step=N,max=N,pad_max=N,pad_percent=N, any of these; what "
        "is absent is the strategy's. padding takes all (the last two, most padding in units and in percent, "
        "up to 50, replace the bucketing_pad options), linear the first three, exponential max.",
    )
    bucket_prefill_query: str | None = Field(
        None,
        max_length=128,
        description="Tokens of a row of prefill buckets, as bucket_prefill_batch. Longer prompts are "
        "computed in chunks of max. exponential takes min=1.",
    )
    bucket_prefill_context: str | None = Field(
        None,
        max_length=128,
        description="Context blocks of a row of prefill buckets, as bucket_prefill_batch.",
    )
    bucket_decode_batch: str | None = Field(
        None, max_length=128, description="Rows of decode buckets, as bucket_prefill_batch."
    )
    bucket_decode_blocks: str | None = Field(
        None, max_length=128, description="KV blocks of decode buckets, as bucket_prefill_batch."
    )

    def axes(self) -> BucketAxes:
        """The settings of the axes. Raises ValueError, one line that names the option."""
        return BucketAxes.parse({name: getattr(self, name) for name in AXIS_OPTIONS})

    def padding(self) -> PaddingOptions:
        """What is chosen about the strategy padding."""
        return PaddingOptions(
            ratio=self.bucketing_pad_ratio,
            max_rows=self.bucketing_pad_max_rows,
            max_tokens=self.bucketing_pad_max_tokens,
            max_context=self.bucketing_pad_max_context,
            max_blocks=self.bucketing_pad_max_blocks,
        )

    @model_validator(mode="after")
    def _bucketing_options_have_their_strategy(self) -> Self:
        if (self.bucketing_file is None) is (self.bucketing_strategy == "file"):
            raise ValueError("bucketing_strategy file and bucketing_file need each other")
        given = [name for name in _PADDING_OPTIONS if name in self.model_fields_set]
        if given and self.bucketing_strategy not in ("padding", "pad"):
            raise ValueError(f"{given[0]} needs bucketing_strategy padding, not {self.bucketing_strategy}")
        self.axes().check_strategy(long_name(self.bucketing_strategy))
        return self
