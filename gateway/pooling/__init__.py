"""Documents and pairs of one request: from a checked request to vectors and scores."""

from __future__ import annotations

from gateway.pooling.answers import (
    ApiVersion,
    BilledTokens,
    Classified,
    ClassifiedList,
    CohereRanking,
    Embedding,
    EmbeddingList,
    PooledData,
    PooledList,
    Ranked,
    RankedDocument,
    Ranking,
    RankingMeta,
    Score,
    ScoreList,
    usage_of,
)
from gateway.pooling.documents import document_work, read_documents
from gateway.pooling.endpoint import PooledEndpoint, PooledTask
from gateway.pooling.scores import compare, numbers_of, scores_of, unpack
from gateway.pooling.service import PoolingService
from gateway.pooling.work import Pooled, Work, vector_width

__all__ = [
    "ApiVersion",
    "BilledTokens",
    "Classified",
    "ClassifiedList",
    "CohereRanking",
    "Embedding",
    "EmbeddingList",
    "Pooled",
    "PooledData",
    "PooledEndpoint",
    "PooledList",
    "PooledTask",
    "PoolingService",
    "Ranked",
    "RankedDocument",
    "Ranking",
    "RankingMeta",
    "Score",
    "ScoreList",
    "Work",
    "compare",
    "document_work",
    "numbers_of",
    "read_documents",
    "scores_of",
    "unpack",
    "usage_of",
    "vector_width",
]
