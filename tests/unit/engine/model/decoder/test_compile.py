"""Layers of a kind share one compiled artifact, whole: nothing in them depends on which layer they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.decoder_models import open_decoder, prompt_logits, save_family

PROMPT = list(range(3, 40))
KINDS = {
    "llama": ({}, 1),
    "mixtral": ({}, 1),
    # A layer in two looks back a few positions only.
    "gemma2": ({}, 2),
    # One in three has a plain MLP.
    "qwen3_moe": ({"mlp_only_layers": [3]}, 2),
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("family", KINDS)
def test_one_artifact_serves_all_layers_of_a_kind(family: str, tmp_path: Path) -> None:
    config, kinds = KINDS[family]
    model = open_decoder(save_family(family, tmp_path, num_hidden_layers=6, **config))
    expected = prompt_logits(model, PROMPT)
    compiled: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    for layer in model.decoder.layers:
        layer.compile(backend=backend, fullgraph=True, dynamic=False)
    assert torch.allclose(prompt_logits(model, PROMPT), expected, atol=1e-4)
    assert len(compiled) == kinds
    prompt_logits(model, PROMPT)
    assert len(compiled) == kinds
