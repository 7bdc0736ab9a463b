"""What the simulated card refuses, spoils, or does on the host. gaudi-facts.md 3.5, 4.3, 4.7 and 9."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.sim.conftest import NewCard

Read = Callable[[torch.Tensor], Any]


def fallbacks() -> dict[str, int]:
    from habana_frameworks.torch.hpu.metrics import metric_global

    found: dict[str, int] = dict(metric_global("cpu_fallback").stats())["FallbackOps"]
    return found


def test_tensors_report_the_device_and_results_are_real(new_card: NewCard) -> None:
    new_card()
    linear, x = torch.nn.Linear(8, 8), torch.randn(4, 8)
    with torch.no_grad():
        expected = linear(x)
    with torch.inference_mode():
        result = linear.to("hpu")(x.to("hpu"))
        assert (str(result.device), result.is_cpu) == ("hpu:0", False)
        assert torch.equal(result.cpu(), expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2, 3, device="hpu"),
        lambda: torch.full((2, 3), 7.0, device="hpu"),
        lambda: torch.tensor([[1, 2], [3, 4]], device="hpu"),
        lambda: torch.arange(1, 9, 2, device="hpu"),
        lambda: torch.eye(3, device="hpu"),
        lambda: torch.linspace(0, 1, 5, device="hpu"),
        lambda: torch.as_tensor([1.0, 2.0], device="hpu"),
        lambda: torch.zeros(0, 4, device="hpu"),
        lambda: torch.ones(2, device="hpu").new_zeros(3),
    ],
)
def test_tensors_are_made_on_the_device(new_card: NewCard, make: Callable[[], torch.Tensor]) -> None:
    card = new_card()
    made = make()
    assert made.device.type == "hpu"
    assert card.hbm.in_use >= made.nbytes


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: torch.empty(3).copy_(x),
        lambda x: bool(x.sum() > 0),
        lambda x: int(x[0]),
        lambda x: torch.equal(x, x),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.masked_select(x, x > 0),
        lambda x: torch.unique(x),
        lambda x: torch.repeat_interleave(x.to(torch.int32).to(torch.int64)),
    ],
)
@pytest.mark.parametrize("inference", [True, False])
def test_host_reads_are_seen(new_card: NewCard, read: Read, inference: bool) -> None:
    card = new_card()
    with torch.inference_mode(inference):
        x = torch.ones(3, device="hpu")
        before = card.counters.host_reads, card.counters.waits
        read(x)
    assert (card.counters.host_reads, card.counters.waits) == (before[0] + 1, before[1] + 1)


def test_a_copy_that_does_not_wait_is_no_wait(new_card: NewCard) -> None:
    card = new_card()
    x = torch.ones(3, device="hpu")
    x.to("cpu", non_blocking=True)
    torch.empty(3).pin_memory("hpu").copy_(x, non_blocking=True)
    assert (card.counters.host_reads, card.counters.waits) == (2, 0)


@pytest.mark.parametrize(
    ("send", "waited"),
    [
        (lambda x: torch.ones(3).to("hpu"), 1),
        (lambda x: torch.tensor([1, 2], device="hpu"), 1),
        (lambda x: torch.tensor(2.0, device="hpu"), 1),
        (lambda x: x.copy_(torch.ones(3)), 1),
        (lambda x: torch.ones(3).to("hpu", non_blocking=True), 0),
        (lambda x: x.copy_(torch.ones(3), non_blocking=True), 0),
    ],
)
@pytest.mark.parametrize("inference", [True, False])
def test_copies_from_the_host_that_wait_are_seen(
    new_card: NewCard, send: Read, waited: int, inference: bool
) -> None:
    card = new_card()
    with torch.inference_mode(inference):
        x = torch.zeros(3, device="hpu")
        assert card.counters.blocking_uploads == 0
        send(x)
        send(x)
    assert card.counters.blocking_uploads == 2 * waited


def test_tensors_made_on_the_device_are_no_copies_from_the_host(new_card: NewCard) -> None:
    card = new_card()
    torch.zeros(3, device="hpu").add_(torch.arange(3, device="hpu")).fill_(2.0)
    assert card.counters.blocking_uploads == 0


def test_a_copy_from_the_host_into_an_open_recipe_is_seen(new_card: NewCard) -> None:
    from habana_frameworks.torch.core import mark_step

    card = new_card(lazy=True)
    x = torch.zeros(3, device="hpu") + 1
    assert card.collected > 0
    torch.ones(3).to("hpu", non_blocking=True)
    assert card.counters.open_uploads == 1
    x.copy_(torch.ones(3))
    assert card.counters.open_uploads == 2
    mark_step()
    assert card.collected == 0
    torch.ones(3).to("hpu")
    assert card.counters.open_uploads == 2


@pytest.mark.parametrize(
    ("dim", "reduce", "own", "count"),
    [
        (0, "amax", True, 0),
        (0, "prod", True, 1),
        (0, "amax", False, 1),
        (0, "amin", True, 1),
        (1, "amax", True, 1),
    ],
)
def test_one_form_of_index_reduce_has_a_kernel(
    new_card: NewCard, dim: int, reduce: str, own: bool, count: int
) -> None:
    new_card()
    x, index = torch.ones(2, 2, device="hpu"), torch.tensor([0, 1]).to("hpu")
    x.index_reduce(dim, index, x, reduce, include_self=own)
    x.index_reduce_(dim, index, x.clone(), reduce, include_self=own)
    assert sum(fallbacks().values()) == 2 * count


def test_a_tensor_of_the_device_is_no_array(new_card: NewCard) -> None:
    new_card()
    with pytest.raises((TypeError, RuntimeError)):
        torch.ones(3, device="hpu").numpy()


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x + torch.ones(3),
        lambda x: torch.ones(3) * x,
        lambda x: x.index_select(0, torch.tensor([0])),
        lambda x: x[torch.tensor([0, 1])],
        lambda x: torch.cat((x, torch.ones(3))),
        lambda x: torch.where(torch.ones(3, dtype=torch.bool), x, x),
        lambda x: x.add_(torch.ones(3)),
    ],
)
def test_a_host_tensor_among_the_devices_is_refused(new_card: NewCard, mix: Read) -> None:
    new_card()
    with pytest.raises(RuntimeError, match="same device"):
        mix(torch.ones(3, device="hpu"))


def test_a_0_dim_host_tensor_is_a_number(new_card: NewCard) -> None:
    new_card()
    assert (torch.ones(3, device="hpu") + torch.tensor(2.0)).tolist() == [3, 3, 3]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor([2**31 - 1]).to("hpu") + 1,
        lambda: torch.tensor([2**31]).to("hpu"),
        lambda: torch.full((1,), 2**31, device="hpu"),
        lambda: torch.tensor([2**30]).to("hpu").mul_(2),
    ],
)
def test_int64_is_int32_in_silence(new_card: NewCard, make: Callable[[], torch.Tensor]) -> None:
    """gaudi-facts.md 4.7: unless PT_ENABLE_INT64_SUPPORT is set, as it is by default outside lazy mode."""
    for lazy, wide, expected in (
        (True, None, -(2**31)),
        (True, True, 2**31),
        (False, None, 2**31),
        (False, False, -(2**31)),
    ):
        new_card(lazy=lazy, wide_integers=wide)
        assert make().tolist() == [expected]


def test_integers_that_fit_stay(new_card: NewCard) -> None:
    new_card(lazy=True)
    x = torch.tensor([2**31 - 1, -(2**31)]).to("hpu")
    assert x.flip(0).clone().tolist() == [-(2**31), 2**31 - 1]


def test_float64_has_the_values_of_float32_and_computes_on_the_host(new_card: NewCard) -> None:
    """The bridge's copies cast; no kernel takes float64, and what has no kernel runs on the host."""
    new_card()
    x = torch.tensor([0.1], dtype=torch.float64).to("hpu")
    assert fallbacks() == {}
    assert x.cpu().item() == torch.tensor(0.1).double().item()
    y = x + x
    assert y.dtype is torch.float64
    assert fallbacks() == {"aten::add.Tensor": 1}


def test_what_has_no_kernel_runs_on_the_host_and_is_counted(new_card: NewCard) -> None:
    """gaudi-facts.md 4.4: FallbackOps by the bridge's name. Waiting for the host ends a lazy recipe."""
    from habana_frameworks.torch.hpu.metrics import metric_localcontext

    card = new_card(lazy=True, unsupported=frozenset({"aten.sort"}))
    x = torch.ones(3, device="hpu")
    with metric_localcontext("cpu_fallback") as metric:
        x.sort()
        x.histc(2)
    expected = {"aten::sort": 1, "aten::histc": 1}
    assert dict(metric.stats()) == {"TotalNumber": 2, "FallbackOps": expected}
    assert card.counters.compilations > 0


def test_an_operation_of_ours_has_no_kernel_there(new_card: NewCard) -> None:
    new_card()
    torch.library.define("catenary_test::twice", "(Tensor x) -> Tensor")
    torch.library.impl("catenary_test::twice", "CPU", lambda x: x * 2)
    assert torch.ops.catenary_test.twice(torch.ones(1, device="hpu")).tolist() == [2]
    assert fallbacks() == {"catenary_test::twice": 1}


@pytest.mark.parametrize(
    ("compute", "name"),
    [
        (lambda x: torch.ops.aten.gather(x, 0, torch.zeros_like(x)), "aten::gather"),
        (lambda x: x.topk(1), "aten::topk"),
        (lambda x: x.flip(0), "aten::flip"),
        (lambda x: x.scatter(0, torch.zeros_like(x), x), "aten::scatter.src"),
    ],
)
def test_some_kernels_take_no_int64(new_card: NewCard, compute: Read, name: str) -> None:
    """Where int64 is int32 there is nothing that they do not take."""
    new_card()
    compute(torch.arange(3, device="hpu"))
    assert fallbacks() == {name: 1}
    new_card(lazy=True)
    compute(torch.arange(3, device="hpu"))
    assert fallbacks() == {}


def test_sums_of_int64_are_gaudi2s(new_card: NewCard) -> None:
    for device, count in (("gaudi2", {}), ("gaudi3", {"aten::sum": 1})):
        new_card(device=device)
        torch.arange(3, device="hpu").sum()
        assert fallbacks() == count


def test_empty_tensors_hold_rubbish(new_card: NewCard) -> None:
    new_card()
    x = torch.ones(3, device="hpu")
    for made in (torch.empty(3, device="hpu"), torch.empty_like(x), x.new_empty(3)):
        assert made.isnan().all().item()
    assert torch.empty(3, dtype=torch.int64, device="hpu").min().item() > 2**30


def test_a_copy_that_does_not_wait_brings_rubbish_until_its_event(new_card: NewCard) -> None:
    """gaudi-facts.md 3.5: the copy of the sampled tokens is waited for once, by its event."""
    new_card()
    copy = torch.empty(3).pin_memory("hpu")
    copy.copy_(torch.ones(3, device="hpu"), non_blocking=True)
    event = torch.hpu.Event()  # type: ignore[attr-defined]
    event.record()
    later = torch.ones(3, device="hpu").to("cpu", non_blocking=True)
    assert copy.isnan().all()
    event.synchronize()
    assert copy.tolist() == [1, 1, 1]
    assert later.isnan().all()
    assert event.query()
    torch.hpu.synchronize()  # type: ignore[attr-defined]
    assert later.tolist() == [1, 1, 1]


def test_an_event_says_nothing_of_a_copy_to_memory_that_is_not_pinned(new_card: NewCard) -> None:
    """BRG: it lands in a buffer of the bridge, whose content moves on after the event."""
    new_card()
    copy = torch.ones(3, device="hpu").to("cpu", non_blocking=True)
    assert not copy.is_pinned("hpu")
    event = torch.hpu.Event()  # type: ignore[attr-defined]
    event.record()
    event.synchronize()
    assert copy.isnan().all()
    torch.hpu.synchronize()  # type: ignore[attr-defined]
    assert copy.tolist() == [1, 1, 1]


def test_host_memory_may_change_only_after_the_device_has_read_it(new_card: NewCard) -> None:
    new_card()
    host = torch.ones(3)
    device = host.to("hpu", non_blocking=True)
    torch.hpu.synchronize()  # type: ignore[attr-defined]
    host.fill_(2)
    assert device.tolist() == [1, 1, 1]
    device.copy_(host, non_blocking=True)
    host.fill_(3)
    with pytest.raises(RuntimeError, match="host memory changed"):
        torch.hpu.synchronize()  # type: ignore[attr-defined]
    host.fill_(4)
    device.copy_(host)
    host.fill_(5)
    assert device.tolist() == [4, 4, 4], "a copy that waits has read it"
