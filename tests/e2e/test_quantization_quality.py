"""The real model with packed weights predicts a text about as well as in bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.encoder import EXACT, documents, nearness, open_way
from benchmarks.quantization import open_packed, quality, text_ids
from services.engine.model import prepare_model

pytestmark = pytest.mark.model

# By how much perplexity may rise, and how often the best token stays at least.
LIMITS = {"int8": (0.02, 0.9), "int4": (0.05, 0.85)}


def check(directory: Path, tokens: int | None) -> None:
    ids = text_ids(directory, tokens)
    wide = quality(open_packed(directory, "bfloat16"), ids)
    for way, (rise, agreement) in LIMITS.items():
        packed = quality(open_packed(directory, way), ids)
        assert packed.perplexity < wide.perplexity * (1 + rise)
        assert packed.agreement(wide) > agreement


def test_a_page_is_predicted_as_well(model_directory: Path) -> None:
    check(model_directory, 512)


@pytest.mark.long
def test_a_text_is_predicted_as_well(model_directory: Path) -> None:
    check(model_directory, None)


# The mean and the least cosine with the exact vectors, and how many documents keep their nearest one.
VECTORS = {"int8": (0.999, 0.998, 0.9), "int4": (0.96, 0.93, 0.7)}


def test_vectors_stay_where_they_were() -> None:
    directory = prepare_model("minilm")
    texts = documents(directory, 64)[:24]
    exact = open_way(directory, EXACT, 1).embed(texts)
    for way, (mean, least, same) in VECTORS.items():
        near = nearness(open_way(directory, way, 1).embed(texts), exact)
        assert near.mean > mean
        assert near.least > least
        assert near.same_nearest >= same
