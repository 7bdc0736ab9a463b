"""Documents and pairs of one request: from a checked request to vectors and scores."""

from __future__ import annotations

from gateway.pooling.answers import (
    ApiVersion,
    BilledTokens,
    CohereRanking,
    Embedding,
    EmbeddingList,
    Ranked,
    RankedDocument,
    Ranking,
    RankingMeta,
    Score,
    ScoreList,
    usage_of,
)
from gateway.pooling.endpoint import PooledEndpoint
from gateway.pooling.scores import compare, scores_of, unpack
from gateway.pooling.service import PoolingService
from gateway.pooling.work import Pooled, Work, vector_width

__all__ = [
    "ApiVersion",
    "BilledTokens",
    "CohereRanking",
    "Embedding",
    "EmbeddingList",
    "Pooled",
    "PooledEndpoint",
    "PoolingService",
    "Ranked",
    "RankedDocument",
    "Ranking",
    "RankingMeta",
    "Score",
    "ScoreList",
    "Work",
    "compare",
    "scores_of",
    "unpack",
    "usage_of",
    "vector_width",
]
