"""Our decoder gives what transformers gives, family by family, with every feature of the family at work."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch

from services.engine.options import EngineOptions
from services.engine.scheduler import StepPlan
from tests.support.decoder_models import (
    BLOCK,
    FAMILIES,
    TOLERANCE,
    altered,
    assert_greedy,
    expected_logits,
    open_decoder,
    prompt_logits,
    reference,
    save_family,
)
from tests.support.torch_engine import VOCAB, LocalCore, tiny_options

CASES = [(family, feature) for family, tiny in FAMILIES.items() for feature in tiny.without]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Checkpoints by family, each written once."""
    return cache(lambda family: save_family(family, tmp_path_factory.mktemp(family)))


def tokens(count: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(count)]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, checkpoint: Any) -> None:
    directory = checkpoint(family)
    assert len(list(directory.glob("*.safetensors"))) > 1
    model = open_decoder(directory)
    assert model.backend == "decoder"
    prompt = tokens(60)
    expected = expected_logits(reference(family, directory), prompt)
    assert (prompt_logits(model, prompt) - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize(("family", "feature"), CASES)
def test_each_feature_is_live(family: str, feature: str, checkpoint: Any) -> None:
    model = open_decoder(checkpoint(family))
    prompt = tokens(60)
    without = altered(model, FAMILIES[family].without[feature])
    assert (prompt_logits(model, prompt) - prompt_logits(without, prompt)).abs().max() > 100 * TOLERANCE


ENGINES = [
    *((family, "auto") for family in FAMILIES),
    # Where the native kernels are not.
    *((family, "torch") for family in ("llama", "qwen3", "phi3", "gemma2")),
]


@pytest.mark.parametrize(("family", "kernels"), ENGINES)
def test_greedy_tokens_through_the_engine(
    family: str, kernels: str, checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, a batch of unlike lengths, preemption, then a prompt whose beginning is cached."""
    directory = checkpoint(family)
    options = tiny_options(directory, max_model_len=112, model_backend="decoder", cpu_kernels=kernels)
    per_block = open_decoder(directory).kv_bytes_per_token() * BLOCK
    core = LocalCore(_limited(options, blocks=26, per_block=per_block))
    assert core.engine.model.backend == "decoder"
    plans: list[StepPlan] = []
    plan = core.engine.scheduler.plan

    def noted() -> StepPlan | None:
        made = plan()
        if made is not None:
            plans.append(made)
        return made

    monkeypatch.setattr(core.engine.scheduler, "plan", noted)
    prompts = [tokens(count, seed=count) for count in (70, 45, 33, 9, 1)]
    keys = [core.submit(prompt, max_tokens=24, top_logprobs=0) for prompt in prompts]
    core.run()
    prompts.append(prompts[0][:40] + tokens(12, seed=5))
    keys.append(core.submit(prompts[-1], max_tokens=8, top_logprobs=0))
    core.run()
    assert any(chunk.start for made in plans for chunk in made.prefills)
    assert any(made.preempted for made in plans)
    assert plans[-1].decodes[0].sequence.num_cached_tokens >= BLOCK
    assert max(len(made.decodes) for made in plans) > 2
    model = reference(family, directory)
    for key, prompt in zip(keys, prompts, strict=True):
        assert len(core.outputs[key].token_ids) in (8, 24)
        assert_greedy(model, prompt, core.outputs[key])


def _limited(options: EngineOptions, *, blocks: int, per_block: int) -> EngineOptions:
    return options.model_copy(update={"kv_cache_gib": blocks * per_block / 2**30})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma2", "granite"])
def test_half_precision_is_as_near_to_the_truth_as_transformers(
    family: str, dtype: str, checkpoint: Any
) -> None:
    directory = checkpoint(family)
    prompt = tokens(60)
    truth = expected_logits(reference(family, directory), prompt)
    theirs = expected_logits(reference(family, directory, dtype), prompt).float()
    ours = prompt_logits(open_decoder(directory, dtype), prompt)
    assert ours.dtype is getattr(torch, dtype)
    assert (ours.float() - truth).abs().mean() < 1.5 * (theirs - truth).abs().mean()
