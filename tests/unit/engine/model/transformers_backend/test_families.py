"""Families that run as transformers' own modules with our attention give what transformers alone gives."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from services.engine.device.cpu import CpuDevice
from services.engine.model.paged import PagedModel
from services.engine.model.transformers_backend import load_model
from tests.support.torch_engine import LocalCore, Output, tiny_options
from tests.support.torch_families import DIRECT, FAMILIES, VOCAB, Family, reference, save_family

TOLERANCE = 1e-4
BLOCK = 8
NO_CONTEXT = torch.zeros((1, 0), dtype=torch.int64)


def prompts() -> list[list[int]]:
    """Prompts of several chunks and of one token; two share their first blocks."""
    rng = random.Random(3)
    batch = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (41, 1, 30, 13, 58)]
    batch[4][:24] = batch[0][:24]
    return batch


def logits_of(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        out: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return out.float()


def paged_logits(model: PagedModel, tokens: list[int]) -> torch.Tensor:
    """Logits of all tokens: two prompt chunks, the second after padded context, and one decode."""
    model.allocate_kv(12, BLOCK)
    ids, positions = torch.tensor(tokens), torch.arange(len(tokens))
    table = torch.tensor([7, 2, 9, 0, 5, 11])
    slots = table[positions // BLOCK] * BLOCK + positions % BLOCK
    last = len(tokens) - 1
    first = model.prefill(ids[:11], positions[:11], slots[:11], NO_CONTEXT, torch.tensor([0]))
    context = torch.tensor([[7, 2, 12, 12]])
    second = model.prefill(ids[11:last], positions[11:last], slots[11:last], context, torch.tensor([11]))
    owned = last // BLOCK + 1
    blocks = torch.cat((table[:owned], torch.tensor([12, 12])))
    rows = torch.tensor([0] * owned + [2, 2])
    starts = torch.cat((torch.arange(owned) * BLOCK, torch.zeros(2, dtype=torch.int64)))
    # The second row is padding.
    pair = torch.tensor([tokens[last], 0]), torch.tensor([last, 0]), torch.tensor([int(slots[last]), 96])
    third = model.decode(*pair, blocks, rows, starts)[:1]
    return model.logits(torch.cat((first, second, third))).float()


def run_engine(
    directory: Path, per_token: int, batch: list[list[int]]
) -> tuple[LocalCore, list[Output], int]:
    """All prompts together, arriving one by one, with too few blocks for all of them to the end."""
    core = LocalCore(
        tiny_options(
            directory, kv_cache_gib=19 * BLOCK * per_token / 2**30, block_size=BLOCK, max_model_len=96
        )
    )
    preempted = 0
    plan = core.engine.scheduler.plan

    def counting() -> Any:
        nonlocal preempted
        made = plan()
        preempted += len(made.preempted) if made else 0
        return made

    scheduler: Any = core.engine.scheduler
    scheduler.plan = counting
    keys = []
    for prompt in batch:
        keys.append(core.submit(prompt, max_tokens=24, top_logprobs=3))
        core.step()
    core.run()
    return core, [core.outputs[key] for key in keys], preempted


def assert_greedy(model: Any, prompt: list[int], output: Output) -> None:
    """If the reference's best token after every prefix is ours, its greedy decoding is ours."""
    assert len(output.token_ids) == 24
    logits = logits_of(model, prompt + output.token_ids)
    expected = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    for position, token in enumerate(output.token_ids):
        row = expected[position]
        assert int(row.argmax()) == token
        assert output.logprobs[position] == pytest.approx(float(row[token]), abs=TOLERANCE)
        for other, value in output.tops[position].items():
            assert value == pytest.approx(float(row[other]), abs=TOLERANCE)


@pytest.mark.parametrize("name", FAMILIES)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    directory = save_family(family, tmp_path)
    alone, batch = reference(family, directory), prompts()
    model = check_logits(family, directory, alone, batch[0])
    core, outputs, preempted = run_engine(directory, model.kv_bytes_per_token(), batch)
    served: Any = core.engine.model
    assert served.backend == "transformers"
    assert preempted > 0
    assert [output.end.cached_tokens > 0 for output in outputs if output.end] == [False] * 4 + [True]
    for prompt, output in zip(batch, outputs, strict=True):
        assert_greedy(alone, prompt, output)
    assert core.engine.scheduler.load().used_blocks == 0


@pytest.mark.parametrize("name", DIRECT)
def test_families_of_our_decoder_run_here_as_well(name: str, tmp_path: Path) -> None:
    family = DIRECT[name]
    directory = save_family(family, tmp_path)
    check_logits(family, directory, reference(family, directory), prompts()[0])


def check_logits(family: Family, directory: Path, alone: Any, prompt: list[int]) -> PagedModel:
    """Compares all logits of a prompt, then checks that each of the family's features moves them."""
    model = load_model(directory, CpuDevice(1), dtype="float32", max_model_len=None)
    assert model.backend == "transformers"
    expected = logits_of(alone, prompt)
    torch.testing.assert_close(paged_logits(model, prompt), expected, atol=TOLERANCE, rtol=0)
    assert model.vocab_size == VOCAB
    for feature in family.off:
        changed = logits_of(reference(family, directory, feature), prompt)
        assert float((changed - expected).abs().max()) > 100 * TOLERANCE, f"{feature} is not live"
    return model
