"""When the simulated card compiles, eager and lazy, and what that costs. gaudi-facts.md 3.5, 4.1 and 7.1."""

from __future__ import annotations

import logging

import pytest
import torch

from services.engine.device import sim
from services.engine.device.sim.card import compile_seconds
from tests.sim.conftest import NewCard


def compilations() -> int:
    from habana_frameworks.torch.hpu.metrics import metric_global

    return int(dict(metric_global("graph_compilation").stats())["TotalNumber"])


def test_eager_mode_compiles_each_operation_once_for_each_shape(new_card: NewCard) -> None:
    new_card()
    x, y = torch.ones(3, device="hpu"), torch.ones(4, device="hpu")
    before = compilations()
    for _ in range(3):
        x + x
        y + y
    assert compilations() == before + 2


@pytest.mark.parametrize("numbers", [(1.5, 2.5), (1, 1.0), (1, True)])
def test_a_number_is_part_of_the_recipe_by_value_and_type(
    new_card: NewCard, numbers: tuple[float, float]
) -> None:
    new_card()
    x = torch.ones(3, device="hpu")
    before = compilations()
    for number in numbers * 2:
        x * number
    assert compilations() == before + 2


def test_nan_is_one_number(new_card: NewCard) -> None:
    new_card()
    x = torch.ones(3, device="hpu")
    before = compilations()
    for _ in range(2):
        x * float("nan")
    assert compilations() == before + 1


def test_a_0_dim_tensor_of_the_host_is_no_part_of_the_recipe_by_value(new_card: NewCard) -> None:
    new_card()
    x = torch.ones(3, device="hpu")
    before = compilations()
    for number in (1.5, 2.5):
        x * torch.tensor(number)
    assert compilations() == before + 1


def test_views_compile_nothing(new_card: NewCard) -> None:
    new_card()
    x = torch.ones(4, 6, device="hpu")
    before = compilations()
    x.view(6, 4).t()[1:3].unsqueeze(0)
    assert compilations() == before


def test_lazy_mode_compiles_what_lies_between_two_marks(new_card: NewCard) -> None:
    import habana_frameworks.torch.core as htcore

    new_card(lazy=True)
    x = torch.ones(3, device="hpu")
    htcore.mark_step()
    before = compilations()
    for _ in range(3):
        (x + 1) * 2
        htcore.mark_step()
    assert compilations() == before + 1
    (x + 1) * 3
    assert compilations() == before + 1, "nothing runs before the mark"
    htcore.mark_step()
    assert compilations() == before + 2


def test_a_lazy_recipe_says_which_result_an_operation_reads(new_card: NewCard) -> None:
    import habana_frameworks.torch.core as htcore

    new_card(lazy=True)
    x = torch.ones(3, device="hpu")
    htcore.mark_step()
    before = compilations()
    y = x + x
    y * y
    htcore.mark_step()
    y = x + x
    x * x
    htcore.mark_step()
    assert compilations() == before + 2
    # Another tensor in the place of x is the same recipe.
    z = torch.ones(3, device="hpu")
    htcore.mark_step()
    between = compilations()
    y = z + z
    y * y
    htcore.mark_step()
    assert compilations() == between


@pytest.mark.parametrize("sync", ["read", "event", "synchronize"])
def test_lazy_mode_flushes_for_whoever_waits(new_card: NewCard, sync: str) -> None:
    import habana_frameworks.torch as htorch

    new_card(lazy=True)
    x = torch.ones(3, device="hpu") + 1
    assert compilations() == 0
    if sync == "read":
        x.tolist()
    elif sync == "event":
        htorch.hpu.Event().record()
    else:
        htorch.hpu.synchronize()
    assert compilations() == 1


def test_mark_step_outside_of_lazy_mode_does_nothing_and_says_so_once(
    new_card: NewCard, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import habana_frameworks.torch.core as htcore
    from habana_frameworks.torch.utils.internal import is_lazy

    new_card()
    logging.getLogger().handlers.clear()
    monkeypatch.setattr(htcore, "_warned", False)
    for _ in range(2):
        htcore.mark_step(sync=True)
    assert capsys.readouterr().out.count("mark_step does nothing outside of lazy mode") == 1
    assert not is_lazy()
    new_card(lazy=True)
    assert is_lazy()


def test_a_recipe_costs_by_its_operations_and_sizes() -> None:
    small = compile_seconds(1, 10, recipe_s=0.2, cached=False)
    assert small < compile_seconds(2, 10, recipe_s=0.2, cached=False)
    assert small < compile_seconds(1, 20, recipe_s=0.2, cached=False)
    assert compile_seconds(1, 10, recipe_s=0.2, cached=True) == pytest.approx(small / 10)
    # gaudi-facts.md 7.1: a prompt bucket of a large model takes 20 to 40 s.
    layers, weights, tokens, width = 32, 8 * 10**9, 2048, 4096
    bucket = compile_seconds(layers * 47, weights + layers * 47 * tokens * width, recipe_s=0.2, cached=False)
    assert 20 < bucket < 40


@pytest.mark.parametrize("compiled", [False, True])
def test_a_large_shape_takes_longer_to_compile(new_card: NewCard, compiled: bool) -> None:
    card = new_card()
    small, large = torch.zeros(8, device="hpu"), torch.zeros(1_000_000, device="hpu")
    negative = torch.compile(torch.neg, backend="hpu_backend", dynamic=False) if compiled else torch.neg

    def cost(x: torch.Tensor) -> float:
        before = card.counters.compile_seconds
        negative(x)
        return card.counters.compile_seconds - before

    assert cost(small) < cost(large)


def test_reset_is_a_new_process(new_card: NewCard) -> None:
    first = new_card()
    x = torch.ones(3, device="hpu")
    assert sim.card() is first
    second = new_card()
    assert (second.hbm.in_use, second.counters.compilations) == (0, 0)
    assert (x + x).tolist() == [2, 2, 2]
