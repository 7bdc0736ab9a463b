"""What a step costs to the learner: its time, and a little for padding that the time does not show."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from services.engine.bucketing.bucket import Bucket
from services.engine.bucketing.learning.steptime import StepTimes


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Costs in seconds. `seconds` is the time of all steps without padding."""

    times: StepTimes
    seconds: float
    token: float
    row: float
    block: float

    def prefill(self, bucket: Bucket) -> float:
        """Cost of a prefill forward."""
        return self.times.prefill(bucket) + self.token * bucket.batch * bucket.query

    def decode(self, bucket: Bucket) -> float:
        """Cost of a decode forward."""
        return self.times.decode(bucket) + self.row * bucket.batch + self.block * bucket.context_blocks


def priced(
    times: StepTimes, prefill: Counter[Bucket], decode: Counter[Bucket], padding_price: float
) -> StepCosts:
    """The costs for these counts of real shapes.

    A phase that pads all its tokens, rows or blocks by 100 % costs `padding_price` of its time more than its
    padding takes.
    """
    prefill_s = sum(times.prefill(bucket) * count for bucket, count in prefill.items())
    decode_s = sum(times.decode(bucket) * count for bucket, count in decode.items())
    tokens = sum(bucket.batch * bucket.query * count for bucket, count in prefill.items())
    rows = sum(bucket.batch * count for bucket, count in decode.items())
    blocks = sum(bucket.context_blocks * count for bucket, count in decode.items())
    return StepCosts(
        times,
        prefill_s + decode_s,
        token=padding_price * prefill_s / max(1, tokens),
        row=padding_price * decode_s / max(1, rows),
        block=padding_price * decode_s / max(1, blocks),
    )
