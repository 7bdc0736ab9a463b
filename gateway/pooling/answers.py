"""Answers with vectors and scores: compared, ranked, and in the shapes of the API."""

from __future__ import annotations

import math
import struct
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import replace
from operator import mul
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from catenary.v1 import common_pb2
from gateway.errors import bad_request
from gateway.generation.chat import to_chat_input
from gateway.pooling.work import Pooled, Work
from gateway.schemas.base import RequestLimits, parse_request
from gateway.schemas.pooling import ChatDocument, PooledFields, TextFields
from gateway.text.models import Model


def compare(
    first: Sequence[str], second: Sequence[str], model: Model, fields: PooledFields, *, param: str
) -> Work:
    """Return the work of comparing first[i] with second[i]: vectors, or a model's judgement of each pair.

    A text that occurs more than once is computed once. Raises ApiError 400.

    Args:
        first: texts.
        second: as many.
        model: its name, tasks and traits.
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
    """Return the scores of the pairs from the result of `compare`'s work."""
    vectors = [unpack(vector) for vector in pooled.vectors]
    if pooled.work.task == common_pb2.MODEL_TASK_SCORE:
        return [numbers[0] for numbers in vectors]
    lengths = [math.sqrt(sum(map(mul, vector, vector))) for vector in vectors]
    return [_cosine(vectors, lengths, one, other) for one, other in pooled.work.compared]


def numbers_of(vector: bytes, *, base64: bool) -> tuple[float, ...] | str:
    """Return the numbers of a vector, or the base64 of their bytes."""
    return b64encode(vector).decode() if base64 else unpack(vector)


def unpack(vector: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(vector) // 4}f", vector)


def _cosine(vectors: Sequence[tuple[float, ...]], lengths: Sequence[float], one: int, other: int) -> float:
    """Return the cosine of two vectors; 0 for a vector of length 0, which has no direction."""
    if not (product := lengths[one] * lengths[other]):
        return 0.0
    cosine: float = sum(map(mul, vectors[one], vectors[other])) / product
    # Rounding may exceed 1.
    return max(-1.0, min(1.0, cosine))


_Texts = TypeVar("_Texts", bound=TextFields)
_Chat = TypeVar("_Chat", bound=ChatDocument)


def read_documents(
    body: dict[str, Any], limits: RequestLimits, texts: type[_Texts], chat: type[_Chat]
) -> _Texts | _Chat:
    """Read a body with `input` as `texts`, one with `messages` as `chat`. Raises ApiError 400."""
    if body.get("messages") is None:
        return parse_request(texts, body, limits)
    if body.get("input") is not None:
        raise bad_request("Only one of 'input' and 'messages' is allowed.", "messages")
    return parse_request(chat, body, limits)


def document_work(
    fields: PooledFields,
    model: Model,
    task: common_pb2.ModelTask.ValueType,
    dimensions: int | None = None,
) -> Work:
    """Return the work of a request that `read_documents` read.

    Raises ApiError 400.

    Args:
        fields: the request.
        model: its name, tasks and traits.
        task: the model's, or one of them.
        dimensions: of vectors, as of Work.
    """
    asked = Work(task, "input", dimensions=dimensions, truncate=fields.truncate_prompt_tokens, raw=fields.raw)
    if isinstance(fields, ChatDocument):
        if not model.traits.has_chat_template and fields.chat_template is None:
            raise bad_request(
                "This model has no chat template: use 'input', or have the server started with one.",
                "messages",
                "unsupported_value",
            )
        # No answer is wanted: its turn is begun only where that is asked for.
        begins = {"add_generation_prompt": bool(fields.add_generation_prompt)}
        chat = to_chat_input(fields.model_copy(update=begins), model.traits)
        return replace(asked, param="messages", chat=chat)
    if not isinstance(fields, TextFields):
        raise TypeError("a request of another route")
    return replace(
        asked,
        texts=[text for text in fields.input if isinstance(text, str)],
        ids=[ids for ids in fields.input if isinstance(ids, list)],
        add_special_tokens=fields.add_special_tokens is not False,
    )


class PooledUsage(msgspec.Struct):
    """Tokens of all texts."""

    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct):
    """A vector: its numbers, or in base64 their bytes as little-endian float32."""

    object: str
    index: int
    embedding: Sequence[float] | str


class EmbeddingList(msgspec.Struct):
    """Vectors, in the order of the input."""

    object: str
    model: str
    data: list[Embedding]
    usage: PooledUsage


class Classified(msgspec.Struct):
    """The likeliest class of a document, and a number for each class: its probability, or its logit."""

    index: int
    label: str | None
    probs: Sequence[float]
    num_classes: int


class ClassifiedList(msgspec.Struct):
    """Documents' classes, in the order of the input."""

    id: str
    object: str
    created: int
    model: str
    data: list[Classified]
    usage: PooledUsage


class PooledData(msgspec.Struct):
    """A model's numbers for a document, or in base64 their bytes as little-endian float32."""

    index: int
    object: str
    data: Sequence[float] | str


class PooledList(msgspec.Struct):
    """A model's numbers for documents, in the order of the input."""

    id: str
    object: str
    created: int
    model: str
    data: list[PooledData]
    usage: PooledUsage


class Score(msgspec.Struct):
    """How well a pair belongs together."""

    index: int
    object: str
    score: float


class ScoreList(msgspec.Struct):
    """Scores, in the order of the pairs."""

    id: str
    object: str
    created: int
    model: str
    data: list[Score]
    usage: PooledUsage


class RankedDocument(msgspec.Struct):
    """A document as it was given."""

    text: str


class Ranked(msgspec.Struct):
    """A document's place among the given ones, and its score."""

    index: int
    relevance_score: float
    document: RankedDocument | UnsetType = UNSET


class Ranking(msgspec.Struct):
    """Documents, the best first, in Jina's shape."""

    id: str
    model: str
    results: list[Ranked]
    usage: PooledUsage


class ApiVersion(msgspec.Struct):
    """The version of Cohere's API that the shape is of."""

    version: str


class BilledTokens(msgspec.Struct):
    """Tokens of all texts."""

    input_tokens: int


class RankingMeta(msgspec.Struct):
    """Details of a request as Cohere's API has them."""

    api_version: ApiVersion
    tokens: BilledTokens


class CohereRanking(msgspec.Struct):
    """Documents, the best first, in Cohere's shape."""

    id: str
    model: str
    results: list[Ranked]
    meta: RankingMeta


def usage_of(prompt_tokens: int) -> PooledUsage:
    return PooledUsage(prompt_tokens, prompt_tokens)
