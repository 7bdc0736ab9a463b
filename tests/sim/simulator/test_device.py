"""`habana_frameworks.torch.hpu` on the simulated card: device, memory, streams (gaudi-facts.md 4.3, 4.6)."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec

import pytest
import torch

from services.engine.device import sim
from tests.sim.conftest import NewCard


@pytest.mark.parametrize("device", ["gaudi2", "gaudi3"])
def test_a_card_says_what_it_is(new_card: NewCard, device: str) -> None:
    import habana_frameworks.torch.hpu as hpu
    from habana_frameworks.torch.utils.experimental import _get_device_type, synDeviceType

    new_card(device=device, version="1.23.0")
    assert torch.hpu is hpu  # type: ignore[attr-defined]
    assert hpu.is_available()
    assert hpu.device_count() == 8
    assert hpu.current_device() == 0
    hpu.set_device(3)
    assert hpu.current_device() == 0, "which card it is was settled when it was acquired"
    assert hpu.get_device_name() == device.upper()
    assert hpu.get_device_capability() == "1.23.0"
    assert _get_device_type() is getattr(synDeviceType, f"synDevice{device.capitalize()}")
    assert metadata.version("habana-torch-plugin") == "1.23.0"


def test_without_a_driver_there_is_no_card(new_card: NewCard) -> None:
    import habana_frameworks.torch.hpu as hpu

    new_card(driver=False)
    assert (hpu.is_available(), hpu.device_count()) == (False, 0)
    with pytest.raises(RuntimeError, match="Device acquire failed"):
        hpu.current_device()


def test_memory_is_finite_and_views_take_none(new_card: NewCard) -> None:
    import habana_frameworks.torch.hpu as hpu

    new_card(hbm_gib=1 / 1024)
    x = torch.empty(500_000, dtype=torch.int8, device="hpu")
    assert hpu.mem_get_info() == (2**20 - 500_000, 2**20)
    view = x[:10].view(2, 5).t().detach()
    assert hpu.memory_allocated() == 500_000
    with pytest.raises(RuntimeError, match=r"Allocation failed for size::600000 .*: out of memory"):
        torch.empty(600_000, dtype=torch.int8, device="hpu")
    del x
    gc.collect()
    assert hpu.memory_allocated() == 500_000, "the view holds its storage"
    del view
    gc.collect()
    assert hpu.memory_allocated() == 0
    assert hpu.max_memory_allocated() == 500_000
    assert hpu.memory_reserved() == 2**20
    hpu.reset_peak_memory_stats()
    assert hpu.max_memory_allocated() == 0


def test_results_of_products_are_counted_once(new_card: NewCard) -> None:
    import habana_frameworks.torch.hpu as hpu

    new_card()
    with torch.inference_mode():
        x, weight = torch.ones(2, 4, 8, device="hpu"), torch.ones(16, 8, device="hpu")
        before = hpu.memory_allocated()
        hpu.reset_peak_memory_stats()
        y = torch.nn.functional.linear(x, weight)
    assert hpu.memory_allocated() == hpu.max_memory_allocated() == before + y.nbytes


def test_memory_stats_have_the_vendors_names(new_card: NewCard) -> None:
    import habana_frameworks.torch.hpu as hpu

    new_card(hbm_gib=1)
    x = torch.zeros(256, device="hpu")
    del x
    y = torch.zeros(128, device="hpu")
    assert hpu.memory_stats() == {
        "Limit": 2**30,
        "InUse": y.nbytes,
        "MaxInUse": 1024,
        "NumAllocs": 2,
        "NumFrees": 1,
        "ActiveAllocs": 1,
        "MaxAllocSize": 1024,
        "TotalSystemAllocs": 2,
        "TotalSystemFrees": 1,
        "TotalActiveAllocs": 1,
    }


def test_streams_and_events_are_like_cudas(new_card: NewCard) -> None:
    import habana_frameworks.torch.hpu as hpu

    new_card()
    side = hpu.Stream()
    with hpu.stream(side):
        x = torch.ones(2, device="hpu") * 2
    event = side.record_event()
    hpu.current_stream().wait_stream(side)
    event.wait(hpu.default_stream())
    side.synchronize()
    assert event.query()
    assert x.tolist() == [2, 2]
    with pytest.raises(RuntimeError, match="not recorded"):
        hpu.Event().synchronize()


CODE = (
    "from services.engine.device import sim\n"
    "sim.install()\n"
    "import habana_frameworks.torch.hpu as hpu\n"
    "assert hpu.is_available()\n"
    "hpu.current_device()"
)


def test_another_process_cannot_have_the_card(new_card: NewCard) -> None:
    """A process acquires all of one card, so a second one fails that may take no other module."""
    settings = new_card().settings
    torch.ones(1, device="hpu")
    environment = os.environ | {
        "CATENARY_SIM": f"lock_directory={settings.lock_directory}",
        "HLS_MODULE_ID": "0",
    }
    run = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True)
    assert "Device acquire failed" in run.stderr.splitlines()[-1]


def test_the_driver_takes_the_first_visible_card_that_is_free(new_card: NewCard) -> None:
    settings = new_card().settings
    torch.ones(1, device="hpu")
    held: list[sim.Card] = []
    for modules, free in (("0", False), ("0,1", True), ("0,1", False), ("0,1,2", True)):
        other = sim.Card(settings, {"HABANA_VISIBLE_MODULES": modules})
        if free:
            other.touch()
            held.append(other)
        else:
            with pytest.raises(RuntimeError, match=f"module id {modules}"):
                other.touch()
    for card in held:
        card.release()


@pytest.mark.parametrize(
    ("environment", "count"),
    [
        ({}, 8),
        ({"HABANA_VISIBLE_MODULES": "2,3"}, 2),
        ({"HABANA_VISIBLE_MODULES": "2,3", "HLS_MODULE_ID": "3"}, 1),
        ({"HABANA_VISIBLE_MODULES": "2,9"}, 0),
        ({"HLS_MODULE_ID": "x"}, 0),
    ],
)
def test_visible_modules_are_those_of_the_environment(
    new_card: NewCard, environment: dict[str, str], count: int
) -> None:
    import habana_frameworks.torch.hpu as hpu

    settings = new_card().settings
    sim.reset(settings, environment)
    assert hpu.device_count() == count
    if not count:
        with pytest.raises(RuntimeError, match="Device acquire failed"):
            hpu.current_device()


def test_transformers_finds_the_package_and_stays_usable(new_card: NewCard) -> None:
    """It looks for the package by spec, then changes torch.gather and others for this device."""
    from transformers.utils import is_torch_hpu_available

    new_card()
    for name in ("habana_frameworks", "habana_frameworks.torch", "habana_frameworks.torch.hpu"):
        assert find_spec(name) is not None
    assert is_torch_hpu_available() in (True, False)
    x, index = torch.arange(6, device="hpu").view(2, 3), torch.tensor([[2], [0]], device="hpu")
    assert torch.gather(x, 1, index).tolist() == [[2], [3]]


def test_constants_are_folded_nowhere(new_card: NewCard) -> None:
    """gaudi-facts.md 4.7: both calls exist for FP8; a model stays as it is."""
    import habana_frameworks.torch.core as htcore

    new_card()
    linear = torch.nn.Linear(2, 2)
    htcore.hpu_inference_set_env()
    htcore.hpu_initialize(linear, mark_only_scales_as_const=True)
    assert linear.weight.device.type == "cpu"


@pytest.mark.parametrize(
    "text",
    [
        *("colour=red", "hbm_gib=much", "hbm_gib=nan", "hbm_gib=0", "device=gaudi9", "driver=2"),
        *("modules=x", "modules=0", "version=new", "version=1"),
    ],
)
def test_settings_that_make_no_sense_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="CATENARY_SIM"):
        sim.SimSettings.read({"CATENARY_SIM": text})


def test_settings_are_read_from_one_variable() -> None:
    text = "device=gaudi2,hbm_gib=0.5,version=1.23.0,modules=2,driver=0,unsupported=aten.sort+aten.topk"
    found = sim.SimSettings.read({"CATENARY_SIM": text})
    assert (found.device, found.hbm_bytes, found.version_tuple) == ("gaudi2", 2**29, (1, 23, 0))
    assert (found.modules, found.driver, found.recipe_s) == (2, False, 0.2)
    assert found.unsupported == {"aten.sort", "aten.topk"}
