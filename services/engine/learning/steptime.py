"""How long a step takes by its buckets: estimated from the model and the device, or fitted to timings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

import numpy as np
import numpy.typing as npt

from services.engine.bucketing import Bucket
from services.engine.learning.lengths import StepTiming

_Features = Callable[[float], list[npt.NDArray[np.float64]]]

_MIN_SHAPES: Final = 4
_MAX_KNEES: Final = 24
# Bytes that a sampled row moves for each entry of the vocabulary: its float32 logits, written once and read
# three times.
_BYTES_PER_LOGIT: Final = 16


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of each phase of a step, everything padded as its bucket says.

    prefill: base + token * max(0, tokens - flat_tokens) + pair * pairs, where tokens is batch * query and
    pairs counts each token with every slot that it looks at, masked or not.
    decode: base + row * rows + row_beyond * max(0, rows - flat_rows) + block * blocks: flat in the rows while
    reading the weights takes longer than computing with them.
    """

    block_size: int
    prefill_base: float
    prefill_token: float
    prefill_flat_tokens: float
    prefill_pair: float
    decode_base: float
    decode_row: float
    decode_row_beyond: float
    decode_flat_rows: float
    decode_block: float

    def prefill(self, bucket: Bucket) -> float:
        """Return seconds of a prefill forward."""
        tokens = bucket.batch * bucket.query
        pairs = tokens * (bucket.context_blocks * self.block_size + bucket.query)
        return (
            self.prefill_base
            + self.prefill_token * max(0.0, tokens - self.prefill_flat_tokens)
            + self.prefill_pair * pairs
        )

    def decode(self, bucket: Bucket) -> float:
        """Return seconds of a decode forward."""
        return (
            self.decode_base
            + self.decode_row * bucket.batch
            + self.decode_row_beyond * max(0.0, bucket.batch - self.decode_flat_rows)
            + self.decode_block * bucket.context_blocks
        )


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Bytes that a forward reads and operations that it computes.

    `parameters` are those that every token passes, in `parameter_bytes` each; `kv_bytes_per_token` is over
    all layers; `attention_width` is layers * heads * head size.
    """

    parameters: float
    parameter_bytes: float
    kv_bytes_per_token: float
    attention_width: float
    vocab_size: int


def estimated_times(
    cost: ModelCost, *, block_size: int, bytes_per_second: float, flops_per_second: float, launch_s: float
) -> StepTimes:
    """Return the roofline of a device: a forward takes as long as the slower of reading and computing.

    A token costs two operations for each parameter and four for each attended slot and unit of attention
    width; a block of KV is read once a decode step; a row's logits are read by the sampler. `launch_s` is
    what a forward takes at the least, before anything is read.
    """
    read = cost.parameters * cost.parameter_bytes / bytes_per_second
    compute = 2 * cost.parameters / flops_per_second
    return StepTimes(
        block_size=block_size,
        prefill_base=launch_s + read,
        prefill_token=compute,
        prefill_flat_tokens=read / compute,
        prefill_pair=4 * cost.attention_width / flops_per_second,
        decode_base=launch_s + read,
        decode_row=cost.vocab_size * _BYTES_PER_LOGIT / bytes_per_second,
        decode_row_beyond=compute,
        decode_flat_rows=read / compute,
        decode_block=block_size * cost.kv_bytes_per_token / bytes_per_second,
    )


def fitted_times(timings: Sequence[StepTiming], *, block_size: int) -> StepTimes:
    """Least squares over measured steps, weighted by their number, no coefficient below zero.

    Decode is fitted to the steps without prefill, and prefill to what the others take beyond their decode.
    The ends of the flat parts are the best of the observed sizes. Raises ValueError if a phase was measured
    in too few shapes.
    """
    decode_only = [t for t in timings if t.prefill is None and t.decode is not None]
    with_prefill = [t for t in timings if t.prefill is not None]
    for phase, found in (("decode", decode_only), ("prefill", with_prefill)):
        shapes = {t.decode if phase == "decode" else t.prefill for t in found}
        if len(shapes) < _MIN_SHAPES:
            raise ValueError(
                f"step times of {len(shapes)} {phase} buckets are too few to fit: {_MIN_SHAPES} are needed"
            )
    (base, row, beyond, block), flat = _fit_decode(decode_only)
    partial = StepTimes(block_size, 0, 0, 0, 0, base, row, beyond, flat, block)
    (first, token, pair), flat_tokens = _fit_prefill(with_prefill, partial)
    return StepTimes(block_size, first, token, flat_tokens, pair, base, row, beyond, flat, block)


def _fit_decode(timings: Sequence[StepTiming]) -> tuple[list[float], float]:
    buckets = [t.decode for t in timings if t.decode is not None]
    rows = np.array([bucket.batch for bucket in buckets], dtype=np.float64)
    blocks = np.array([bucket.context_blocks for bucket in buckets], dtype=np.float64)
    seconds = np.array([t.seconds / t.steps for t in timings])

    def features(flat: float) -> list[npt.NDArray[np.float64]]:
        return [np.ones_like(rows), rows, np.maximum(0, rows - flat), blocks]

    return _best_knee(rows, features, seconds, timings)


def _fit_prefill(timings: Sequence[StepTiming], times: StepTimes) -> tuple[list[float], float]:
    buckets = [t.prefill for t in timings if t.prefill is not None]
    tokens = np.array([bucket.batch * bucket.query for bucket in buckets], dtype=np.float64)
    reach = np.array(
        [bucket.context_blocks * times.block_size + bucket.query for bucket in buckets], dtype=np.float64
    )
    seconds = np.array(
        [t.seconds / t.steps - (times.decode(t.decode) if t.decode is not None else 0.0) for t in timings]
    )

    def features(flat: float) -> list[npt.NDArray[np.float64]]:
        return [np.ones_like(tokens), np.maximum(0, tokens - flat), tokens * reach]

    return _best_knee(tokens, features, seconds, timings)


def _best_knee(
    sizes: npt.NDArray[np.float64],
    features: _Features,
    seconds: npt.NDArray[np.float64],
    timings: Sequence[StepTiming],
) -> tuple[list[float], float]:
    """Return the coefficients and the end of the flat part with the least squared error."""
    weight = np.sqrt(np.array([t.steps for t in timings], dtype=np.float64))
    knees = np.unique(np.concatenate([[0.0], np.quantile(sizes, np.linspace(0, 1, _MAX_KNEES))]))
    best: tuple[float, list[float], float] | None = None
    for knee in knees:
        columns = np.stack(features(float(knee)), axis=1) * weight[:, None]
        error, solution = _non_negative(columns, seconds * weight)
        if best is None or error < best[0]:
            best = error, solution, float(knee)
    if best is None:
        raise ValueError("there are no step times to fit")
    return best[1], best[2]


def _non_negative(
    columns: npt.NDArray[np.float64], target: npt.NDArray[np.float64]
) -> tuple[float, list[float]]:
    """Least squares without negative coefficients: with so few columns, the best of all their subsets."""
    count = columns.shape[1]
    best_error, best = float(target @ target), [0.0] * count
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            part = columns[:, chosen]
            scale = np.linalg.norm(part, axis=0)
            if not scale.all():
                continue
            solution = np.linalg.lstsq(part / scale, target, rcond=None)[0] / scale
            if (solution < 0).any():
                continue
            rest = part @ solution - target
            error = float(rest @ rest)
            # More columns have to earn their place, or rounding would choose among equals.
            if error < best_error * (1 - 1e-9):
                best_error, best = error, [0.0] * count
                for index, value in zip(chosen, solution, strict=True):
                    best[index] = float(value)
    return best_error, best
