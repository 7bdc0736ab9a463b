"""The objects that embeddings, classes, scores and rankings are answered with."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType


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
    """What Cohere tells about a request."""

    api_version: ApiVersion
    tokens: BilledTokens


class CohereRanking(msgspec.Struct):
    """Documents, the best first, in Cohere's shape."""

    id: str
    model: str
    results: list[Ranked]
    meta: RankingMeta


def usage_of(prompt_tokens: int) -> PooledUsage:
    """The usage of texts of so many tokens."""
    return PooledUsage(prompt_tokens, prompt_tokens)
