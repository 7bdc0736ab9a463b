"""HPU graphs of the simulator: keys, replays, and what goes wrong (gaudi-facts.md 4.2)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from services.engine.device.sim import Card


class Layer(nn.Module):
    """Writes its cache in place, as attention does, and counts the times that its Python ran."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.cache = torch.zeros(6, 4, device="hpu")
        self.runs = 0

    def forward(self, x: torch.Tensor, slots: torch.Tensor, factor: Any = 1) -> torch.Tensor:
        self.runs += 1
        y = self.linear(x)
        self.cache.index_copy_(0, slots, y)
        total = torch.zeros(x.shape[0], 4, device=x.device)
        total.add_(y)
        return nn.functional.silu(total) * factor

    def expected(self, x: torch.Tensor, factor: Any = 1) -> torch.Tensor:
        y = nn.functional.linear(x, self.linear.weight.cpu(), self.linear.bias.cpu())
        return nn.functional.silu(y) * factor


def on_hpu(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(value.to("hpu") for value in values)


def slots(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers).to("hpu")


@pytest.fixture
def lazy(new_card: Any) -> Card:
    card: Card = new_card(lazy=True)
    return card


def wrapped(**options: Any) -> Layer:
    import habana_frameworks.torch as ht

    module = Layer().to("hpu")
    assert ht.hpu.wrap_in_hpu_graph(module, **options) is module
    return module


@pytest.mark.parametrize("cached", [True, False])
@torch.inference_mode()
def test_replays_compute_with_new_inputs_and_run_no_python(lazy: Card, cached: bool) -> None:
    module = wrapped(disable_tensor_cache=not cached)
    for row in range(3):
        x = torch.randn(2, 3)
        (given,) = on_hpu(x)
        out = module(given, slots(row, 5), cache_tensors_list=[module.cache])
        torch.testing.assert_close(out.cpu(), module.expected(x))
        torch.testing.assert_close(
            module.cache.cpu()[[row, 5]],
            nn.functional.linear(x, module.linear.weight.cpu(), module.linear.bias.cpu()),
        )
    assert module.runs == 1
    assert (lazy.counters.captures, lazy.counters.replays) == (1, 2)


@torch.inference_mode()
def test_a_replay_overwrites_what_the_last_one_returned(lazy: Card) -> None:
    module = wrapped()
    first = module(*on_hpu(torch.ones(2, 3)), slots(0, 1))
    kept = first.clone()
    second = module(*on_hpu(torch.zeros(2, 3)), slots(0, 1))
    assert second is first
    assert not torch.equal(kept.cpu(), first.cpu())


@torch.inference_mode()
def test_a_cast_that_names_the_device_is_replayed(lazy: Card) -> None:
    import habana_frameworks.torch as ht

    class Cast(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.to(device=x.device, dtype=torch.bfloat16) * 2

    module = ht.hpu.wrap_in_hpu_graph(Cast())
    assert [module(*on_hpu(torch.full((2,), value))).tolist() for value in (1.0, 3.0)] == [[2, 2], [6, 6]]


@torch.inference_mode()
def test_numbers_are_keys_by_value_and_each_takes_memory(lazy: Card) -> None:
    module: Any = wrapped()
    x, where = on_hpu(torch.ones(2, 3))[0], slots(0, 1)
    module(x, where, 0)
    used = lazy.hbm.in_use
    for number in range(1, 5):
        module(x, where, number)
    assert lazy.counters.captures == 5
    assert lazy.hbm.in_use - used >= 4 * 2**20
    module.clear_cache()
    assert lazy.hbm.in_use < used


@torch.inference_mode()
def test_shape_and_view_are_in_the_key_and_dtype_is_not(lazy: Card) -> None:
    module = wrapped()
    x = torch.ones(2, 3).to("hpu")
    module(x, slots(0, 1))
    out = module(x.bfloat16(), slots(0, 1))
    assert lazy.counters.captures == 1
    assert out.dtype is torch.float32
    module(torch.ones(3, 3).to("hpu"), slots(0, 1, 2))
    module(torch.ones(3, 2).to("hpu").t(), slots(0, 1))
    assert lazy.counters.captures == 3


@torch.inference_mode()
def test_reserved_arguments(lazy: Card) -> None:
    module = wrapped(max_graphs=1)
    x, where = torch.ones(2, 3).to("hpu"), slots(0, 1)
    first = module(x, where)
    stale = first.cpu()
    assert module(x * 0, where, warmup_mode=True) is first
    assert torch.equal(first.cpu(), stale)
    module(x, where, bypass_hpu_graphs=True)
    module(torch.ones(1, 3).to("hpu"), slots(0))
    assert (module.runs, lazy.counters.captures, lazy.counters.replays) == (3, 1, 0)


@torch.inference_mode()
def test_host_code_in_a_capture_is_an_error_and_leaves_no_graph(lazy: Card) -> None:
    import habana_frameworks.torch as ht

    x = torch.ones(4, device="hpu")
    for body, message in (
        (lambda y: y.sum().item(), "reads a device tensor on the host"),
        (lambda y: y.cpu(), "reads a device tensor on the host"),
        (lambda y: y[y > 0], "shape that depends on data"),
        (lambda y: y.nonzero(), "shape that depends on data"),
        (lambda y: y + torch.ones(4).to("hpu"), "a copy from the host inside"),
        (lambda y: y.copy_(torch.ones(4)), "a copy from the host inside"),
    ):
        wrapped_body = ht.hpu.wrap_in_hpu_graph_func(body)
        with pytest.raises(RuntimeError, match=message):
            wrapped_body(x)
        assert not lazy.recorders
    assert lazy.counters.captures == 0


@torch.inference_mode()
def test_without_tensor_cache_less_memory_stays_and_parts_of_captured_tensors_are_lost(lazy: Card) -> None:
    import habana_frameworks.torch as ht

    def body(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for _ in range(20):
            y = y * 1.5
        return y + 0, y[:1]

    used = []
    x = torch.ones(1000, 1000, device="hpu")
    for disabled in (False, True):
        before = lazy.hbm.in_use
        function = ht.hpu.wrap_in_hpu_graph_func(body, disable_tensor_cache=disabled)
        whole, part = function(x)
        used.append(lazy.hbm.in_use - before)
        assert not whole.isnan().any().item()
        assert part.isnan().all().item() is disabled
        del whole, part
    assert used[1] < used[0] / 2


@torch.inference_mode()
def test_graphs_of_many_tokens_take_more_than_those_of_few(lazy: Card) -> None:
    import habana_frameworks.torch as ht

    linear = nn.Linear(64, 1024).to("hpu")
    taken = []
    for tokens in (8, 8192):
        x = torch.ones(tokens, 64, device="hpu")
        function = ht.hpu.wrap_in_hpu_graph_func(linear.forward, disable_tensor_cache=True)
        out = function(x)
        taken.append(lazy.hbm.in_use)
        del function
        taken[-1] -= lazy.hbm.in_use
        del out
    assert taken[0] < 1.01 * 2**20
    assert taken[1] == pytest.approx(2**20 + tokens * 1024 * 4 / 20, rel=0.01)


@torch.inference_mode()
def test_without_tensor_cache_a_written_buffer_must_be_named(lazy: Card) -> None:
    module = wrapped(disable_tensor_cache=True)
    module(torch.ones(2, 3).to("hpu"), slots(0, 1))
    assert module.cache.cpu().isnan().all()


@torch.inference_mode()
def test_equal_layers_between_mark_steps_are_one_recipe(lazy: Card) -> None:
    import habana_frameworks.torch as ht
    import habana_frameworks.torch.core as htcore

    def body(y: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            y = torch.sin(y) + 1
            htcore.mark_step()
        return y

    x = torch.ones(3).to("hpu")
    before = lazy.counters.compilations
    ht.hpu.wrap_in_hpu_graph_func(body)(x)
    assert lazy.counters.compilations == before + 1


def test_graphs_are_there_in_lazy_mode_alone(new_card: Any) -> None:
    import habana_frameworks.torch as ht

    new_card(lazy=False)
    assert not hasattr(ht.hpu, "wrap_in_hpu_graph")
    with pytest.raises(ImportError):
        from habana_frameworks.torch.hpu.graphs import HPUGraph
    new_card(lazy=True)
    from habana_frameworks.torch.hpu.graphs import HPUGraph

    assert ht.hpu.HPUGraph is HPUGraph


@torch.inference_mode()
def test_capture_and_replay_by_hand(lazy: Card) -> None:
    import habana_frameworks.torch as ht

    x = torch.ones(3).to("hpu")
    captured = ht.hpu.HPUGraph()
    with ht.hpu.graph(captured):
        y = x * 2
    x.copy_(torch.full((3,), 5.0))
    captured.replay()
    assert y.tolist() == [10.0] * 3
    captured.replayV2([x], [torch.zeros(3).to("hpu")])
    assert y.tolist() == [0.0] * 3
    with pytest.raises(RuntimeError, match="one capture at a time"):
        captured.capture_begin()
    captured.reset()
    with pytest.raises(RuntimeError, match="holds no capture"):
        captured.replay()


@torch.inference_mode()
def test_a_capture_that_does_not_fit_raises(new_card: Any) -> None:
    import habana_frameworks.torch as ht

    card = new_card(lazy=True, hbm_gib=0.01)
    x = torch.ones(100).to("hpu")
    double = ht.hpu.wrap_in_hpu_graph_func(lambda y, number: y * number)
    with pytest.raises(RuntimeError, match="out of memory"):
        list(map(double, [x] * 20, range(20)))
    assert not card.recorders


@pytest.mark.parametrize("cached", [True, False])
@torch.inference_mode()
def test_graphed_callables(lazy: Card, cached: bool) -> None:
    import habana_frameworks.torch as ht

    linear = nn.Linear(3, 2).to("hpu")
    weight, bias = linear.weight.cpu(), linear.bias.cpu()
    samples = ((torch.ones(1, 3).to("hpu"),), (torch.ones(2).to("hpu"),))
    graphed, double = ht.hpu.make_graphed_callables(
        (linear, lambda x: x * 2), samples, disable_tensor_cache=not cached
    )
    for _ in range(2):
        x = torch.randn(1, 3)
        torch.testing.assert_close(graphed(x.to("hpu")).cpu(), nn.functional.linear(x, weight, bias))
        assert double(torch.full((2,), 4.0).to("hpu")).tolist() == [8.0, 8.0]
    with pytest.raises(RuntimeError, match="must be a tuple of Tensors"):
        ht.hpu.make_graphed_callables(linear, (3,))


@pytest.mark.parametrize("tensor_cache", [True, False])
@torch.inference_mode()
def test_an_input_is_not_updated_through_a_view(lazy: Card, tensor_cache: bool) -> None:
    """The inputs are older than the capture too. As a whole they can be updated."""
    import habana_frameworks.torch as ht

    def through_a_view(x: torch.Tensor) -> torch.Tensor:
        x[:1].add_(1)
        return x * 2

    def as_a_whole(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 2

    wrap = ht.hpu.wrap_in_hpu_graph_func
    with pytest.raises(RuntimeError, match="updates a view in place"):
        wrap(through_a_view, disable_tensor_cache=not tensor_cache)(*on_hpu(torch.ones(2)))
    x = on_hpu(torch.ones(2))[0]
    assert wrap(as_a_whole, disable_tensor_cache=not tensor_cache)(x).tolist() == [4, 4]
    assert x.tolist() == [2, 2]
