"""How well two texts belong together, from their vectors or from a model that judges pairs."""

from __future__ import annotations

import math
import struct
from base64 import b64encode
from collections.abc import Sequence
from operator import mul

from catenary.v1 import common_pb2
from gateway.errors import bad_request
from gateway.pooling.work import Pooled, Work
from gateway.schemas.pooling import PooledFields
from gateway.text.models import Model


def compare(
    first: Sequence[str], second: Sequence[str], model: Model, fields: PooledFields, *, param: str
) -> Work:
    """The work of comparing first[i] with second[i]: their vectors, or a model's judgement of each pair.

    A text that comes more than once is computed once. Raises ApiError 400.

    Args:
        first: texts.
        second: as many.
        model: what computes them.
        fields: of the request.
        param: the field of `second`, for errors.
    """
    truncate = fields.truncate_prompt_tokens
    if common_pb2.MODEL_TASK_SCORE in model.tasks:
        pairs = list(zip(first, second, strict=True))
        return Work(common_pb2.MODEL_TASK_SCORE, param, pairs=pairs, truncate=truncate, raw=fields.raw)
    if fields.raw:
        raise bad_request(
            "'use_activation' false has no meaning where scores are cosines of vectors.",
            "use_activation",
            "unsupported_value",
        )
    places = {text: place for place, text in enumerate(dict.fromkeys((*first, *second)))}
    compared = [(places[one], places[other]) for one, other in zip(first, second, strict=True)]
    return Work(common_pb2.MODEL_TASK_EMBED, param, texts=list(places), compared=compared, truncate=truncate)


def scores_of(pooled: Pooled) -> list[float]:
    """The scores of the pairs, from what came of `compare`'s work."""
    vectors = [unpack(vector) for vector in pooled.vectors]
    if pooled.work.task == common_pb2.MODEL_TASK_SCORE:
        return [numbers[0] for numbers in vectors]
    lengths = [math.sqrt(sum(map(mul, vector, vector))) for vector in vectors]
    return [_cosine(vectors, lengths, one, other) for one, other in pooled.work.compared]


def numbers_of(vector: bytes, *, base64: bool) -> tuple[float, ...] | str:
    """The numbers of a vector, or the base64 of their bytes."""
    return b64encode(vector).decode() if base64 else unpack(vector)


def unpack(vector: bytes) -> tuple[float, ...]:
    """The numbers of a vector."""
    return struct.unpack(f"<{len(vector) // 4}f", vector)


def _cosine(vectors: Sequence[tuple[float, ...]], lengths: Sequence[float], one: int, other: int) -> float:
    """0 for a vector of length 0, which has no direction."""
    if not (product := lengths[one] * lengths[other]):
        return 0.0
    cosine: float = sum(map(mul, vectors[one], vectors[other])) / product
    # Rounding may lead beyond 1.
    return max(-1.0, min(1.0, cosine))
