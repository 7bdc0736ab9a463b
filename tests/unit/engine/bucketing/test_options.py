"""The engine's bucketing options belong to their strategies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from services.engine.config import EngineConfig


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"bucketing_strategy": "file"}, "need each other"),
        ({"bucketing_file": Path("b.txt")}, "need each other"),
        ({"bucketing_pad_ratio": 0.1}, "bucketing_pad_ratio needs bucketing_strategy padding"),
        ({"bucketing_pad_max_blocks": 9}, "bucketing_pad_max_blocks needs bucketing_strategy padding"),
        ({"bucketing_strategy": "pad", "bucketing_pad_ratio": 0.6}, "less than or equal to 0.5"),
        ({"bucketing_strategy": "magic"}, "bucketing_strategy"),
    ],
)
def test_options_without_their_strategy_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        EngineConfig(**options)


def test_options_with_their_strategy_are_taken() -> None:
    assert EngineConfig(bucketing_strategy="pad", bucketing_pad_max_rows=3).bucketing_pad_max_rows == 3
    assert EngineConfig(bucketing_strategy="file", bucketing_file=Path("b")).bucketing_file == Path("b")
