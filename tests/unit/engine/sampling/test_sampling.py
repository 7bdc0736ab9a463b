"""Laws of sampling: a row that never depends on its neighbours, shapes that never depend on values."""

from __future__ import annotations

import math
import random
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from services.engine.device import Kernels
from services.engine.device.cpu import CpuDevice
from services.engine.sampling import RowParams, RowStatus, SampledToken
from tests.support.sampling import CPU, exact_program, exact_stages, row, run

# Large enough for two levels of chunks, and a multiple of neither size.
VOCAB = 8300
LAST_TOKENS = [17, 4, 30]


# Decides nothing by values, like a device that the host would have to wait for.
STATIC = CpuDevice(1)
STATIC.kernels.rows_to_redo = partial(Kernels.rows_to_redo, STATIC.kernels)  # type: ignore[method-assign]


def mixed_rows() -> list[RowParams]:
    """One row of every kind."""
    return [
        row(temperature=0.0),
        row(temperature=0.7, top_p=0.9, seed=1),
        row(temperature=1.3, seed=2, top_logprobs=4),
        row(top_k=40, seed=3, top_logprobs=0),
        row(top_k=300, top_p=0.99, seed=4),
        row(top_k=12, keep_top_k_duplicates=False, seed=4),
        row(top_p=0.999, temperature=2.0, seed=5, top_logprobs=20),
        row(min_p=0.05, temperature=4.0, seed=15),
        row(temperature=0.5, seed=6, masked_ids=frozenset({1, 2, 3})),
        row(
            temperature=0.0, tokens=[5, 6, 5, 7], prompt_len=2, repetition_penalty=1.4, frequency_penalty=0.5
        ),
        row(tokens=[8] * 70 + list(range(100)), presence_penalty=-1.5, pending_row=0),
        row(temperature=0.0, tokens=[4, 9], bad_words=((11,), (4, 9, 12), (9, 17, 13)), pending_row=0),
        row(logit_bias=((3, 5.5), (4, -100.0)), allowed_token_ids=(3, 4, 5, 6), top_p=0.8),
        row(temperature=0.0, tokens=[3], repetition_penalty=2.0, logit_bias=((30, 90.0),), pending_row=2),
    ]


def mixed_logits(count: int) -> torch.Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(1)) * 3


@pytest.mark.parametrize("device", [CPU, STATIC], ids=["cpu", "static"])
def test_a_row_does_not_depend_on_its_neighbours_or_on_padding(device: CpuDevice) -> None:
    rows = mixed_rows()
    logits = mixed_logits(len(rows))

    def ask(at: list[int], padding: int = 0, value: float = math.nan) -> list[SampledToken]:
        padded = torch.cat((logits[at], torch.full((padding, VOCAB), value)))
        return run(padded, [rows[i] for i in at], last_tokens=LAST_TOKENS, device=device)

    everyone = list(range(len(rows)))
    together = ask(everyone)
    for index in everyone:
        assert ask([index]) == [together[index]]
        assert ask([index], padding=3) == [together[index]]
    order = everyone[:]
    random.Random(3).shuffle(order)
    assert ask(order, padding=2, value=0.0) == [together[index] for index in order]
    assert ask(everyone + everyone) == together + together
    assert ask(everyone[::2], padding=1) == together[::2]


def test_a_row_is_the_same_alone_however_many_threads_share_it() -> None:
    logits = torch.randn(3, 150_001, generator=torch.Generator().manual_seed(8)) * 2
    rows = [row(seed=1), row(seed=2, top_p=0.9), row(seed=3, top_p=0.999, temperature=2.0)]
    together = run(logits, rows)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        for index in range(3):
            assert run(logits[index : index + 1], rows[index : index + 1]) == [together[index]]
        assert run(logits, rows) == together
    finally:
        torch.set_num_threads(threads)


def test_both_kinds_of_devices_sample_alike() -> None:
    rows = mixed_rows()
    logits = mixed_logits(len(rows))
    static = run(logits, rows, last_tokens=LAST_TOKENS, device=STATIC)
    assert run(logits, rows, last_tokens=LAST_TOKENS, device=CPU) == static


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_fails_alone(bad: float) -> None:
    rows = mixed_rows()
    logits = mixed_logits(len(rows))
    expected = run(logits.clone(), rows, last_tokens=LAST_TOKENS)
    for index in range(len(rows)):
        broken = logits.clone()
        broken[index, 17] = bad
        results = run(broken, rows, last_tokens=LAST_TOKENS)
        assert results[index] == SampledToken(None, status=RowStatus.NOT_FINITE)
        assert results[:index] + results[index + 1 :] == expected[:index] + expected[index + 1 :]


def test_a_draw_depends_on_seed_and_position() -> None:
    logits = torch.zeros(1, 5000)
    first = run(logits, [row(seed=1, position=1)])
    assert first == run(logits, [row(seed=1, position=1)])
    others = {
        run(logits, [row(seed=seed, position=position)])[0].token_id
        for seed in (1, 2, -3)
        for position in (1, 2, 100_000)
    }
    assert len(others) == 9


BEST: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"top_k": 1},
    {"top_p": 1e-9},
    {"min_p": 1.0},
    {"temperature": 1e-45},
    {"temperature": 1e-5},
]


@pytest.mark.parametrize("options", BEST, ids=str)
def test_the_best_token_where_only_it_is_left(options: dict[str, Any]) -> None:
    logits = torch.randn(1, 3000, generator=torch.Generator().manual_seed(2)).bfloat16()
    assert run(logits, [row(**options)])[0].token_id == int(logits.argmax())


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.3}, {"top_k": 1}], ids=str)
def test_masked_ids_are_not_sampled_and_logprobs_do_not_show_it(options: dict[str, Any]) -> None:
    logits = torch.tensor([[5.0, 1.0, 0.0]])
    masked = row(masked_ids=frozenset({0, 999}), top_logprobs=2, tokens=[1], presence_penalty=0.5, **options)
    result = run(logits, [masked])[0]
    expected = torch.log_softmax(logits[0], 0)
    assert result.token_id in (1, 2)
    assert result.logprob == pytest.approx(float(expected[result.token_id]))
    assert [token for token, _ in result.top] == [0, 1]
    assert result.top[0][1] == pytest.approx(float(expected[0]))


def test_tokens_that_the_model_rules_out_are_no_failure() -> None:
    logits = torch.full((1, 50), -math.inf)
    logits[0, 7] = 1.0
    assert run(logits, [row(top_p=0.5)])[0].token_id == 7
    assert run(logits, [row(top_k=3, min_p=0.1)], device=STATIC)[0].token_id == 7


def test_a_row_without_any_token_left_says_so() -> None:
    rows = [
        row(allowed_token_ids=(3, 4), bad_words=((3,),), masked_ids={4}),
        row(temperature=0.0, allowed_token_ids=(3,), bad_words=((17, 3),), tokens=[1], pending_row=0),
        row(temperature=0.0, allowed_token_ids=(3,), bad_words=((17, 3),), tokens=[1], pending_row=1),
    ]
    results = run(torch.zeros(3, 9), rows, last_tokens=LAST_TOKENS)
    assert [result.status for result in results[:2]] == [RowStatus.NOTHING_LEFT] * 2
    assert results[2].token_id == 3


class Recorder(TorchDispatchMode):
    """Notes shapes, and refuses what waits for the device or has a shape that depends on values."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[str, tuple[int, ...]]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in self.WAITS or (
            name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        ):
            raise AssertionError(f"{name} waits for the device")
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.shapes.add((name, tuple(out.shape)))
        return out


def random_row(rng: random.Random) -> RowParams:
    tokens = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 300))]
    options: dict[str, Any] = rng.choice(
        [
            {"temperature": 0.0},
            {},
            {"top_p": rng.choice([0.5, 0.9999])},
            {"top_k": rng.choice([1, 20, 500])},
            {"min_p": 0.1, "temperature": 3.0},
        ]
    )
    if rng.random() < 0.3:
        options["frequency_penalty"] = 0.5
    if rng.random() < 0.3:
        options["logit_bias"] = tuple((token, 1.0) for token in set(tokens[:20]))
    if rng.random() < 0.3:
        options["top_logprobs"] = rng.randint(0, 20)
    pending = rng.choice([None, 0, 1])
    return row(tokens=tokens, prompt_len=rng.randint(0, len(tokens)), pending_row=pending, **options)


def test_no_pass_waits_and_shapes_are_few() -> None:
    rng = random.Random(5)
    program = exact_program(4, VOCAB, STATIC)
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for turn in range(140):
        rows = [random_row(rng) for _ in range(rng.randint(1, 4))]
        made = program.sampling(rows, [3] * len(rows))
        logits = torch.randn(4, VOCAB) * rng.choice([0.01, 1.0, 5.0])
        with Recorder() as recorder:
            stages = exact_stages(logits, LAST_TOKENS, STATIC)
            for call in (*made.scores, *made.tokens):
                stages.run(call)
            stages.packed()
        if turn >= 125:
            assert recorder.shapes <= seen
        seen |= recorder.shapes
    sizes = {size for _, shape in seen for size in shape}
    # The vocabulary and its chunks, alternatives and packed columns; all else is a power of two.
    chunks, columns = (VOCAB - 1) // 64, VOCAB // 16
    of_vocabulary = {VOCAB, 4 * VOCAB, chunks, chunks + 1, VOCAB - 64 * chunks, columns, 16 * columns}
    of_vocabulary |= {64 * chunks, VOCAB - 16 * columns, 256 * 16 + VOCAB - 16 * columns}
    # Edited rows have a spare one behind them, and so have the penalties and pending tokens of rows.
    of_vocabulary |= {5 * VOCAB}
    constant = of_vocabulary | {20, 41, 43, 3, 5}
    assert all(size in constant or size & (size - 1) == 0 for size in sizes), sizes


def test_parameters_that_do_not_fit_the_logits_are_refused() -> None:
    program = exact_program(1, 10)
    with pytest.raises(ValueError, match="2 rows of parameters for 1 rows of logits"):
        program.sampling([row(), row()], [0, 0])
    made, stages = program.sampling([row()], [0]), exact_stages(torch.zeros(3, 10))
    stages.run(made.scores[0])
    assert stages.raw.shape == (1, 10)
