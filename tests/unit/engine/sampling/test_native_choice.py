"""Greedy rows get their tokens from the CPU's kernels: the ones that are best among all logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from catenary_testing.native.products import Products, Way
from services.engine.device import Chooser
from services.engine.device.cpu import Quantization
from services.engine.device.cpu.native import Level
from services.engine.device.cpu.structures import WeightKind
from services.engine.model.decoder import DecoderModel
from services.engine.sampling import (
    RowParams,
    RowStatus,
    SampledToken,
    SamplingCalls,
    read_best,
)
from tests.support.decoder_models import save_family
from tests.support.native import Paged, open_native
from tests.support.native_kernels import LEVELS_HERE, library_of
from tests.support.sampling import exact_program, row, run


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family("llama", tmp_path_factory.mktemp("llama"), tie_word_embeddings=True)


def chooser_of(model: DecoderModel) -> Chooser:
    assert model.chooser is not None
    return model.chooser


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("quantization", [None, Quantization.INT8], ids=["bfloat16", "int8"])
def test_choices_are_the_best_logits(llama: Path, threads: int, quantization: Quantization | None) -> None:
    model = open_native(llama, "bfloat16", threads=threads, quantization=quantization)
    states = torch.randn(90, model.hidden_size, generator=torch.Generator().manual_seed(3)).bfloat16()
    # Where all are equal the first one is meant.
    states[1] = 0
    for rows in (1, 2, 5, 33, 90):
        tokens, scores = chooser_of(model).choose(states[:rows])
        logits = model.logits(states[:rows])
        assert torch.equal(scores, logits.amax(-1))
        assert torch.equal(tokens, (logits == scores[:, None]).int().argmax(-1))


def test_a_row_that_is_no_number_harms_no_other(llama: Path) -> None:
    model = open_native(llama, "float32")
    states = torch.randn(4, model.hidden_size, generator=torch.Generator().manual_seed(5))
    tokens, _ = chooser_of(model).choose(states)
    states[1, 3] = torch.nan
    states[2] = torch.inf
    after, scores = chooser_of(model).choose(states)
    assert after[[0, 3]].tolist() == tokens[[0, 3]].tolist()
    assert set(after.tolist()) <= set(range(model.vocab_size))
    broken = SampledToken(None, status=RowStatus.NOT_FINITE)
    first, last = (SampledToken(token) for token in tokens[[0, 3]].tolist())
    assert read_best(after, scores) == [first, broken, broken, last]


def test_a_row_that_rules_every_token_out_gets_none(tmp_path: Path) -> None:
    directory = save_family("llama", tmp_path, tie_word_embeddings=False)
    for file in directory.glob("*.safetensors"):
        weights = load_file(file)
        if "lm_head.weight" in weights:
            # Products of positive states overflow to the least of all numbers.
            weights["lm_head.weight"].fill_(-3e38)
            save_file(weights, file, {"format": "pt"})
    model = open_native(directory, "float32", threads=2)
    states = torch.zeros(3, model.hidden_size)
    states[1] = 10.0
    assert model.logits(states[1:2]).max() == -torch.inf
    tokens, scores = chooser_of(model).choose(states)
    assert tokens.tolist() == [0, 0, 0]
    assert scores.tolist() == [0.0, -torch.inf, 0.0]
    nothing = SampledToken(None, status=RowStatus.NOTHING_LEFT)
    assert read_best(tokens, scores) == [SampledToken(0), nothing, SampledToken(0)]


def test_one_row_that_is_masked_has_all_logits_looked_at() -> None:
    greedy = row(temperature=0)

    def of(*rows: RowParams, masked: bool = False) -> SamplingCalls:
        return exact_program(4, 40).sampling(list(rows), [0] * len(rows), masked=masked)

    assert of(greedy, greedy).greedy
    others: tuple[dict[str, Any], ...] = (
        {"masked_ids": {3}},
        {"logit_bias": ((3, 1.0),)},
        {"allowed_token_ids": (3, 4)},
        {"repetition_penalty": 1.1, "tokens": [3], "prompt_len": 1},
        {"bad_words": ((3,),)},
        {"top_logprobs": 0},
        {"temperature": 0.5},
    )
    for other in others:
        assert not of(greedy, row(**{"temperature": 0, **other}), greedy).greedy
    beam = row(temperature=0, top_logprobs=4)
    beam.beam = True
    assert not of(greedy, beam).greedy
    # A constraint is known later, and masks what the forward may choose already.
    assert not of(greedy, greedy, masked=True).greedy
    # What is masked beyond the vocabulary is no mask.
    assert of(greedy, row(temperature=0, masked_ids={40})).greedy


def test_a_masked_row_beside_greedy_ones_takes_its_best_token_that_is_left(llama: Path) -> None:
    model = open_native(llama, "bfloat16")
    states = torch.randn(3, model.hidden_size, generator=torch.Generator().manual_seed(8)).bfloat16()
    tokens, _ = chooser_of(model).choose(states)
    logits = model.logits(states)
    rows = [row(temperature=0), row(temperature=0, masked_ids={int(tokens[1])}), row(temperature=0)]
    found = [result.token_id for result in run(logits, rows)]
    assert found == [tokens[0], int(logits[1].topk(2).indices[1]), tokens[2]]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("quantization", [None, Quantization.INT8], ids=["bfloat16", "int8"])
def test_a_decode_in_one_go_finds_what_two_calls_find(
    llama: Path, threads: int, quantization: Quantization | None
) -> None:
    model = open_native(llama, "bfloat16", threads=threads, quantization=quantization)
    texts = [[(7 * row + at) % 90 + 3 for at in range(12 + row)] for row in range(9)]
    paged = Paged(model, texts)
    paged.prefill({row: range(10) for row in range(9)}, query=10, context=0)
    for count in (9, 1, 4):
        inputs = paged.decode_inputs(dict.fromkeys(range(count), 10))
        hidden = model.decode(*inputs)
        last_rows = torch.tensor([*range(20, 20 - count, -1), 3])
        # Rows that are padding may be asked for too: their hidden states are zero.
        for rows in (1, count, count + 1):
            # Of all but the first, tokens are found where the step before would have kept them.
            last = torch.full((24,), 77)
            last[last_rows[1:]] = inputs[0][1:]
            given = torch.cat((inputs[0][:1], torch.full((count,), -1)))
            tokens, logits = chooser_of(model).best_step((given, *inputs[1:]), rows, last_rows, last)()
            expected, scores = chooser_of(model).choose(hidden[:rows])
            assert torch.equal(tokens, expected)
            assert torch.equal(logits, scores)
            assert torch.equal(last[last_rows[:rows]], expected)
            assert last[21:].tolist() == [77] * 3


def test_steps_that_cannot_be_are_refused(llama: Path) -> None:
    model = open_native(llama)
    paged = Paged(model, [[5, 6, 7]])
    paged.prefill({0: range(2)}, query=2, context=0)
    inputs, last = paged.decode_inputs({0: 2}), torch.zeros(4, dtype=torch.int64)
    rows = torch.tensor([0, 3])
    for count in (0, 3):
        with pytest.raises(ValueError, match=f"the best of {count} rows are asked for, of a decode of 2"):
            chooser_of(model).best_step(inputs, count, rows, last)
    for place in (-1, 4):
        with pytest.raises(ValueError, match="not in the vocabulary"):
            chooser_of(model).best_step(inputs, 1, torch.tensor([0, place]), last)()
    last[0] = model.vocab_size
    inputs[0][0] = -1
    with pytest.raises(ValueError, match="not in the vocabulary"):
        chooser_of(model).best_step(inputs, 1, rows, last)()


def test_capped_scores_are_no_choice(tmp_path: Path) -> None:
    model = open_native(save_family("gemma2", tmp_path))
    assert model.chooser is None


@pytest.mark.parametrize("level", LEVELS_HERE)
@pytest.mark.parametrize("outputs", [1, 5, 33, 100])
def test_outputs_that_fill_panels_up_are_never_the_best(level: Level, outputs: int) -> None:
    products = Products(library_of(level), threads=1)
    weight = 1 + torch.rand(outputs, 24, generator=torch.Generator().manual_seed(outputs))
    x = -torch.ones(12, 24)
    layer = products.pack(WeightKind.FLOAT32, weight)
    whole = torch.zeros(12, outputs)
    products.multiply([layer], x, [whole])
    lanes = products.pack(WeightKind.FLOAT32, weight[:1]).scales.shape[0] // 2
    kept = torch.zeros(12, 3 * lanes)
    kept[:, :lanes] = -torch.inf
    products.multiply([layer], x, [kept], way=Way.BEST)
    scores, places = kept[:, :lanes].max(-1)
    tokens = kept[:, lanes : 2 * lanes].view(torch.int32).gather(1, places[:, None]).flatten()
    assert torch.equal(scores, whole.amax(-1))
    assert torch.equal(tokens.long(), whole.argmax(-1))
    assert not kept[:, 2 * lanes :].any()
