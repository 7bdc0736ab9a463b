"""The rules of the simulated card, each with its row of facts/gaudi.md."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from importlib import metadata

import pytest
import torch

from services.engine.device import sim
from tests.sim.conftest import NewCard


def _compilations() -> int:
    from habana_frameworks.torch.hpu.metrics import metric_global

    return int(dict(metric_global("graph_compilation").stats())["TotalNumber"])


def test_tensors_report_the_device_and_results_are_real(new_card: NewCard) -> None:
    new_card()
    linear, x = torch.nn.Linear(8, 8), torch.randn(4, 8)
    with torch.no_grad():
        expected = linear(x)
    with torch.inference_mode():
        result = linear.to("hpu")(x.to("hpu"))
        assert (str(result.device), result.is_cpu) == ("hpu:0", False)
        assert torch.equal(result.cpu(), expected)


@pytest.mark.parametrize("read", [lambda x: x.sum().item(), lambda x: x.tolist(), lambda x: x.cpu()])
def test_host_reads_are_seen(new_card: NewCard, read: object) -> None:
    card = new_card()
    x = torch.ones(3, device="hpu")
    before = card.counters.host_reads
    assert callable(read)
    read(x)
    assert card.counters.host_reads == before + 1


def test_a_host_tensor_among_the_devices_is_refused_and_a_number_is_not(new_card: NewCard) -> None:
    new_card()
    x = torch.ones(3, device="hpu")
    assert (x + torch.tensor(2.0)).tolist() == [3, 3, 3]
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3)


def test_int64_is_int32_unless_the_bridge_is_told(new_card: NewCard) -> None:
    new_card()
    assert (torch.tensor([2**31 - 1]).to("hpu") + 1).tolist() == [-(2**31)]
    new_card(wide_integers=True)
    assert (torch.tensor([2**31 - 1]).to("hpu") + 1).tolist() == [2**31]


def test_float64_is_refused(new_card: NewCard) -> None:
    new_card()
    with pytest.raises(RuntimeError, match="float64"):
        torch.ones(3, device="hpu").to(torch.float64)


def test_eager_mode_compiles_each_operation_once_for_each_shape(new_card: NewCard) -> None:
    new_card()
    x, y = torch.ones(3, device="hpu"), torch.ones(4, device="hpu")
    before = _compilations()
    for _ in range(3):
        x + x
        y + y
    assert _compilations() == before + 2


def test_lazy_mode_compiles_what_lies_between_two_marks(new_card: NewCard) -> None:
    import habana_frameworks.torch.core as htcore

    new_card(lazy=True)
    x = torch.ones(3, device="hpu")
    htcore.mark_step()
    before = _compilations()
    for _ in range(3):
        (x + 1) * 2
        htcore.mark_step()
    assert _compilations() == before + 1
    (x + 1) * 3
    assert _compilations() == before + 1, "nothing runs before the mark"
    htcore.mark_step()
    assert _compilations() == before + 2


def test_memory_is_finite_and_views_take_none(new_card: NewCard) -> None:
    import habana_frameworks.torch.hpu as hpu

    new_card(hbm_gib=1 / 1024)
    x = torch.empty(500_000, dtype=torch.int8, device="hpu")
    free, total = hpu.mem_get_info()
    assert (free, total) == (2**20 - 500_000, 2**20)
    view = x[:10]
    assert hpu.mem_get_info()[0] == free
    with pytest.raises(RuntimeError, match="out of memory"):
        torch.empty(600_000, dtype=torch.int8, device="hpu")
    del x
    gc.collect()
    assert hpu.mem_get_info()[0] == free, "the view holds its storage"
    del view
    gc.collect()
    assert hpu.mem_get_info()[0] == total
    assert hpu.max_memory_allocated() == 500_000


def test_what_has_no_kernel_runs_on_the_host_and_is_counted(new_card: NewCard) -> None:
    from habana_frameworks.torch.hpu.metrics import metric_localcontext

    new_card(unsupported=frozenset({"aten.sort"}))
    with metric_localcontext("cpu_fallback") as metric:
        torch.ones(3, device="hpu").sort()
    assert dict(metric.stats()) == {"TotalNumber": 1, "FallbackOps": {"aten.sort": 1}}


def test_a_copy_that_does_not_wait_brings_rubbish_until_its_event(new_card: NewCard) -> None:
    new_card()
    copy = torch.ones(3, device="hpu").to("cpu", non_blocking=True)
    event = torch.hpu.Event()  # type: ignore[attr-defined]
    event.record()
    assert copy.isnan().all()
    event.synchronize()
    assert copy.tolist() == [1, 1, 1]


def test_another_process_cannot_have_the_card(new_card: NewCard) -> None:
    card = new_card()
    torch.ones(1, device="hpu")
    code = (
        "from services.engine.device import sim\n"
        "sim.install()\n"
        "import habana_frameworks.torch.hpu as hpu\n"
        "assert hpu.is_available()\n"
        "hpu.current_device()"
    )
    environment = os.environ | {"CATENARY_SIM": f"lock_directory={card.settings.lock_directory}"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "Device acquire failed" in run.stderr.splitlines()[-1]


def test_versions_are_those_of_the_settings(new_card: NewCard) -> None:
    new_card(version="1.23.0")
    assert metadata.version("habana-torch-plugin") == "1.23.0"
    assert sim.card().settings.version_tuple == (1, 23, 0)


@pytest.mark.parametrize("text", ["colour=red", "hbm_gib=much", "device=gaudi9"])
def test_settings_that_make_no_sense_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="CATENARY_SIM"):
        sim.SimSettings.read({"CATENARY_SIM": text})
