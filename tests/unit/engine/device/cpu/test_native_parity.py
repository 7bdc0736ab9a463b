"""The native decoder of the CPU gives what transformers gives, family by family, whatever the batch is."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.engine.device.cpu import Quantization
from tests.support.decoder_models import (
    FAMILIES,
    TOLERANCE,
    expected_logits,
    prompt_logits,
    reference,
    save_family,
)
from tests.support.native import Paged, in_pieces, open_native
from tests.support.torch_engine import VOCAB


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Checkpoints by family, each written once."""
    return cache(lambda family: save_family(family, tmp_path_factory.mktemp(family)))


def text(length: int, step: int = 37) -> list[int]:
    return [3 + (index * step) % (VOCAB - 3) for index in range(length)]


TEXTS = [text(33), text(1, 5), text(11, 11), text(58, 13), text(16, 29)]


def in_float64(model: Any) -> Any:
    """transformers' own float32 is as far from it as ours."""
    # Transformers has no public way to ask.
    if model._can_set_experts_implementation():  # noqa: SLF001
        # The other one groups products, which torch has for no float64.
        model.set_experts_implementation("eager")
    return model.double()


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_in_one_piece_or_several_equal_transformers(family: str, checkpoint: Any) -> None:
    directory = checkpoint(family)
    model, truth = open_native(directory), in_float64(reference(family, directory))
    for tokens, logits in zip(TEXTS, in_pieces(model, TEXTS), strict=True):
        assert (logits - expected_logits(truth, tokens)).abs().max() < TOLERANCE
        assert torch.equal(prompt_logits(model, tokens), logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_near_to_the_truth_as_transformers(family: str, checkpoint: Any) -> None:
    directory = checkpoint(family)
    prompt = text(60)
    truth = expected_logits(reference(family, directory), prompt)
    theirs = expected_logits(reference(family, directory, "bfloat16"), prompt).float()
    ours = prompt_logits(open_native(directory, "bfloat16"), prompt)
    assert ours.dtype is torch.float32
    assert (ours - truth).abs().mean() < 1.2 * (theirs - truth).abs().mean()


KINDS = [
    ("float32", None),
    ("bfloat16", None),
    ("bfloat16", Quantization.INT8),
    ("float32", Quantization.INT4),
]


@pytest.mark.parametrize(("dtype", "quantization"), KINDS)
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
@pytest.mark.parametrize("threads", [3, *(pytest.param(more, marks=pytest.mark.long) for more in (2, 5, 8))])
def test_no_bit_depends_on_the_others_or_on_threads(
    threads: int, family: str, dtype: str, quantization: Quantization | None, checkpoint: Any
) -> None:
    directory = checkpoint(family)
    alone = open_native(directory, dtype, quantization=quantization)
    together = open_native(directory, dtype, quantization=quantization, threads=threads)
    # Enough rows for every way in which products are divided.
    texts = [*TEXTS, *(text(20 + row, 7 + row) for row in range(12))]
    for tokens, logits in zip(texts, in_pieces(together, texts), strict=True):
        assert torch.equal(in_pieces(alone, [tokens])[0], logits)


def test_experts_of_more_rows_than_are_computed_at_once(checkpoint: Any) -> None:
    model = open_native(checkpoint("mixtral"), threads=2)
    texts = [text(60, 3 + row) for row in range(20)]
    together = Paged(model, texts).prefill({row: range(60) for row in range(20)}, query=60, context=0)
    for row in (0, 17, 19):
        (alone,) = Paged(model, [texts[row]]).prefill({0: range(60)}, query=60, context=0)
        assert torch.equal(together[row], alone)


@pytest.mark.parametrize(("dtype", "quantization"), KINDS)
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
def test_states_that_are_wanted_are_those_of_the_whole_prefill(
    family: str, dtype: str, quantization: Quantization | None, checkpoint: Any
) -> None:
    model = open_native(checkpoint(family), dtype, quantization=quantization, threads=2)
    rows = {0: range(30), 3: range(50), 4: range(16)}
    rest = {0: range(30, 33), 3: range(50, 58)}
    whole = Paged(model, TEXTS)
    states = [whole.prefill(rows, query=51, context=0), whole.prefill(rest, query=9, context=7)]
    written = whole.written()
    few = Paged(model, TEXTS)
    # Nothing of the first row, in any order, and the first row of a chunk.
    for chunks, wanted, shape, expected in (
        (rows, [(2, 15), (1, 49), (1, 7)], (51, 0), states[0]),
        (rest, [], (9, 7), states[1]),
        (rest, [(1, 7), (0, 0)], (9, 7), states[1]),
    ):
        hidden, sound = few.select(chunks, wanted, query=shape[0], context=shape[1])
        assert hidden.shape == (len(wanted), model.hidden_size)
        for state, (row, at) in zip(hidden, wanted, strict=True):
            assert torch.equal(state, expected[row][at])
        assert sound.all()
    assert torch.equal(few.written(), written)


def poisoned(directory: Path, copy: Path, token: int) -> Path:
    """A copy of a checkpoint with a token whose embedding is no number."""
    shutil.copytree(directory, copy, dirs_exist_ok=True)
    name = "model.embed_tokens.weight"
    for path in copy.glob("*.safetensors"):
        tensors = load_file(path)
        if name in tensors:
            tensors[name][token] = torch.nan
            save_file(tensors, path, {"format": "pt"})
    return copy


@pytest.mark.parametrize(("dtype", "quantization"), KINDS)
def test_a_row_that_is_no_number_harms_no_other(
    dtype: str, quantization: Quantization | None, checkpoint: Any, tmp_path: Path
) -> None:
    directory, bad = checkpoint("llama"), 1
    expected = in_pieces(open_native(directory, dtype, quantization=quantization), TEXTS)
    model = open_native(poisoned(directory, tmp_path, bad), dtype, quantization=quantization)
    *sound, broken = in_pieces(model, [*TEXTS, [*text(20), bad, *text(9)]])
    for before, after in zip(expected, sound, strict=True):
        assert torch.equal(before, after)
    assert broken[:20].isfinite().all()
    assert broken[20:].isnan().all()
    rows = {0: range(30), 1: range(20)}
    paged = Paged(model, [[*text(20), bad, *text(9)], text(20)])
    (last, other), finite = paged.select(rows, [(0, 29), (1, 19)], query=30, context=0)
    assert last.isnan().all()
    assert other.isfinite().all()
    assert finite.tolist() == [False, True, True]
    # A row of which nothing is wanted.
    assert Paged(model, paged.texts).select(rows, [(1, 3)], query=30, context=0)[1].tolist() == [
        False,
        True,
        True,
    ]
