"""The real model with packed weights predicts a text about as well as in bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.quantization import open_packed, quality, text_ids

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
