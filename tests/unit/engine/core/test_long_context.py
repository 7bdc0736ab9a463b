"""Sequences beyond the context that a model was trained for, where an option allows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.engine.core.errors import StartError
from services.engine.core.process import start_engine
from services.engine.model.facts import why_not_longer
from tests.support.moved import Moved, moved
from tests.support.torch_engine import save_tiny_model, tiny_options

__all__ = ["moved"]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"rope_theta": 1e4}, ""),
        ({"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}}, ""),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 4.0}}, ""),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "are dynamic"),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, "are longrope"),
        ({"n_positions": 1024}, "no rotary positions"),
        ({"rope_theta": None, "text_config": 3}, "no rotary positions"),
    ],
)
def test_which_models_can_go_on(config: dict[str, Any], reason: str) -> None:
    assert reason in why_not_longer(config)
    assert bool(reason) is bool(why_not_longer(config))


def test_model_goes_beyond_its_context_where_that_is_allowed(tmp_path: Path, moved: Moved) -> None:
    allowed = moved.load(VLLM_ALLOW_LONG_MAX_MODEL_LEN="1").allow_long_max_model_len
    assert allowed is True
    directory = save_tiny_model("llama", tmp_path)
    options = tiny_options(directory, max_model_len=300)
    with pytest.raises(StartError, match=r"max-model-len 300 exceeds the model's context of 256 tokens$"):
        start_engine(options, lambda activity, fraction: None)
    options = tiny_options(directory, max_model_len=300, allow_long_max_model_len=allowed)
    engine = start_engine(options, lambda activity, fraction: None)
    try:
        assert engine.ready.model.max_model_len == 300
    finally:
        engine.close()
