"""What an HPU device is made of, part by part."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from services.engine.device import DeviceError, ExecutionMode
from services.engine.device.hpu import HpuDevice, HpuSettings, RecipeCache, StepLog, execution, open_card
from services.engine.device.hpu.bridge import spawn_children
from services.engine.device.hpu.device import EventCopy, PinnedMemory
from services.engine.device.hpu.fused import FusedKernels
from services.engine.device.hpu.kernels import HpuKernels
from services.engine.device.sim.compile_only import HostCopies
from tests.support.sim_device import Host


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Host:
    return Host(monkeypatch, tmp_path)


class Log:
    """Keeps what is said."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def info(self, text: str, **values: Any) -> None:
        self.lines.append((text, values))

    warning = info


@pytest.mark.parametrize(
    ("requested", "checkpoint", "chosen", "said"),
    [
        ("auto", torch.bfloat16, torch.bfloat16, ""),
        ("auto", None, torch.bfloat16, ""),
        ("auto", torch.float16, torch.bfloat16, "a checkpoint in float16 runs in bfloat16 on an HPU"),
        ("auto", torch.float32, torch.bfloat16, "a checkpoint in float32 runs in bfloat16 on an HPU"),
        (
            "float16",
            torch.float16,
            torch.bfloat16,
            "an HPU computes in bfloat16 what was asked for in float16",
        ),
        ("float32", torch.bfloat16, torch.float32, "float32 was asked for"),
        ("bfloat16", torch.float32, torch.bfloat16, ""),
    ],
)
def test_dtypes(
    requested: str,
    checkpoint: torch.dtype | None,
    chosen: torch.dtype,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = Log()
    monkeypatch.setattr("services.engine.device.hpu.kernels.log", log)
    kernels = HpuKernels(FusedKernels(), HpuSettings())
    assert {kernels.choose_dtype(requested, checkpoint) for _ in range(2)} == {chosen}
    assert [text.startswith(said) for text, _ in log.lines] == ([True] if said else [])


def test_a_dtype_that_nobody_knows() -> None:
    with pytest.raises(DeviceError, match="dtype 'int3' is unknown; choose auto, float32"):
        HpuKernels(FusedKernels(), HpuSettings()).choose_dtype("int3", None)


def test_the_module_of_a_rank() -> None:
    given = {"HABANA_VISIBLE_MODULES": "4,6"}
    assert open_card.choose_module(1, given) == 6
    assert given["HLS_MODULE_ID"] == "6"
    assert open_card.choose_module(0, {"HLS_MODULE_ID": "3", "HABANA_VISIBLE_MODULES": "1"}) == 3
    assert open_card.choose_module(0, {}) is None
    assert open_card.choose_module(0, {"HABANA_VISIBLE_MODULES": "all"}) is None
    with pytest.raises(DeviceError, match="names 2 modules and rank 2 needs one more"):
        open_card.choose_module(2, {"HABANA_VISIBLE_MODULES": "4,6"})


def test_binding_to_the_cpus_near_a_card(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    first = min(allowed)
    folder = tmp_path / "sys/bus/pci/devices/0000:97:00.0"
    folder.mkdir(parents=True)
    (folder / "local_cpulist").write_text(f"{first},{first + 4096}-{first + 4099}\n")
    try:
        cards = {2: "0000:97:00.0", 5: "0000:E1:00.0"}
        # Which card it is is not known: it stays.
        assert open_card.bind_near(None, lambda: cards, tmp_path) == set()
        assert open_card.bind_near(5, lambda: cards, tmp_path) == set()
        assert os.sched_getaffinity(0) == allowed
        assert open_card.bind_near(2, lambda: cards, tmp_path) == {first}
        assert os.sched_getaffinity(0) == {first}
    finally:
        os.sched_setaffinity(0, allowed)
    # One card alone is the one.
    one = {2: "0000:97:00.0"}
    assert open_card.bind_near(None, lambda: one, tmp_path) == {first}
    os.sched_setaffinity(0, allowed)
    assert open_card.parse_cpus("0-2,8,10-11\n") == {0, 1, 2, 8, 10, 11}


def test_cards_by_hl_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "hl-smi"
    tool.write_text("#!/bin/sh\n[ \"$*\" = '-Q module_id,bus_id -f csv,noheader' ] || exit 1\n")
    with tool.open("a") as file:
        file.write("echo '3, 0000:97:00.0'\necho '1, 0000:17:00.0'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert open_card.bus_ids() == {3: "0000:97:00.0", 1: "0000:17:00.0"}
    tool.write_text("#!/bin/sh\nexit 3\n")
    assert open_card.bus_ids() == {}


def test_collection_thresholds_are_multiplied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    before = gc.get_threshold()
    monkeypatch.setattr(open_card, "_ORIGINAL", (700, 10, 10))
    try:
        for _ in range(2):
            open_card.relax_collector(16)
            assert gc.get_threshold() == (11_200, 160, 160)
    finally:
        gc.set_threshold(*before)


def test_children_are_spawned() -> None:
    import multiprocessing

    spawn_children()
    assert multiprocessing.get_start_method() == "spawn"


def test_steps_that_compile_or_fall_back_are_logged(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()
    monkeypatch.setattr(execution, "log", log)
    settings = HpuSettings(log_compilations=StepLog.NEW, log_fallbacks=StepLog.ALL)
    device = host.open(hpu=settings, unsupported="aten.sin")
    x = device.memory.to_device(torch.ones(3))
    with device.execution.step(1):
        torch.sin(x)
    with device.execution.step(2):
        torch.sin(x)
    with device.execution.step(3):
        x + x
    compilations = [values["step"] for text, values in log.lines if text == "graph compilations of a step"]
    fallbacks = [(v["step"], v["count"], v["ops"]) for text, v in log.lines if text.startswith("CPU fall")]
    assert compilations == [1, 3]
    assert fallbacks == [(1, 1, {"aten::sin": 1}), (2, 1, {"aten::sin": 1}), (3, 0, {})]
    assert device.execution.counters()["cpu_fallbacks"] == 2


def test_a_copy_to_the_host_is_void_until_it_is_waited_for(host: Host) -> None:
    device = host.open()
    x = device.memory.to_device(torch.arange(4))
    copy = device.stream.begin_to_host(x + 1)
    assert copy.wait().tolist() == [1, 2, 3, 4]
    assert copy.wait().tolist() == [1, 2, 3, 4]
    assert device.stream.host_copies == 1
    assert device.stream.to_host(x).tolist() == [0, 1, 2, 3]


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each buffer that was pinned."""
    sizes: list[int] = []
    pin = HostCopies.pin

    def counted(copies: HostCopies, tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return pin(copies, tensor)

    monkeypatch.setattr(HostCopies, "pin", counted)
    return sizes


def test_copies_to_the_host_go_to_pinned_memory_that_is_used_again(host: Host, pinned: list[int]) -> None:
    device = host.open()
    assert isinstance(device, HpuDevice)
    results = []
    for number in range(6):
        x = device.memory.to_device(torch.full((3, 5), number))
        # Two on their way at once; what the first brought stays when its memory is used again.
        first, second = device.stream.begin_to_host(x), device.stream.begin_to_host(x.t() > 2)
        results += [first.wait(), second.wait()]
    assert [result.flatten().tolist()[0] for result in results[::2]] == list(range(6))
    assert [bool(result.all()) for result in results[1::2]] == [False] * 3 + [True] * 3
    assert {result.shape for result in results[1::2]} == {(5, 3)}
    assert pinned == [128, 64]
    assert device.stream.begin_to_host(torch.zeros(0, device=device.torch_device)).wait().tolist() == []


def test_memory_of_copies_that_are_dropped_unread_is_used_again(host: Host, pinned: list[int]) -> None:
    device = host.open()
    x = device.memory.to_device(torch.arange(4))
    for _ in range(20):
        device.stream.begin_to_host(x)
    kept = device.stream.begin_to_host(x + 1)
    device.stream.begin_to_host(x + 2)
    assert kept.wait().tolist() == [1, 2, 3, 4]
    assert pinned == [64, 64]


class Mark:
    """An event that passes when it is told to."""

    def __init__(self) -> None:
        self.passed = False

    def record(self) -> None:
        return

    def synchronize(self) -> None:
        self.passed = True

    def query(self) -> bool:
        return self.passed


def test_memory_that_the_card_may_write_to_is_not_lent_again(host: Host) -> None:
    host.open()
    pool, marks = PinnedMemory(), [Mark(), Mark()]
    addresses = []
    for mark in marks:
        memory = pool.take(100)
        assert memory is not None
        addresses.append(memory.data_ptr())
        EventCopy(memory[:100], mark, pool, memory)

    def lent() -> list[int]:
        taken = [memory for _ in range(5) if (memory := pool.take(100)) is not None]
        for memory in taken:
            pool.give(memory)
        return [memory.data_ptr() for memory in taken]

    gc.collect()
    assert not set(addresses) & set(lent())
    marks[0].passed = True
    assert set(addresses) & set(lent()) == {addresses[0]}
    marks[1].passed = True
    assert addresses[1] in lent()


def test_where_memory_cannot_be_pinned_each_copy_is_waited_for(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = host.open()

    def refuse(copies: HostCopies, tensor: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no allocator")

    monkeypatch.setattr(HostCopies, "pin", refuse)
    x = device.memory.to_device(torch.arange(4))
    assert device.stream.begin_to_host(x + 1).wait().tolist() == [1, 2, 3, 4]
    monkeypatch.setattr(HostCopies, "pin", lambda copies, tensor: tensor.clone())
    other = host.open()
    assert other.stream.begin_to_host(other.memory.to_device(torch.arange(3))).wait().tolist() == [0, 1, 2]


def test_memory_of_a_piece_of_work(host: Host) -> None:
    device = host.open(ExecutionMode.LAZY, hbm_gib=1)
    kept: list[torch.Tensor] = []

    def work() -> None:
        kept.append(device.memory.zeros((2**18,), torch.float32))
        torch.zeros(2**19, dtype=torch.float32, device=device.torch_device)

    use = device.memory.measure(work)
    assert (use.kept, use.peak) == (2**20, 3 * 2**20)
    with pytest.raises(RuntimeError) as caught:
        device.memory.zeros((2**29,), torch.float32)
    assert device.memory.out_of_memory(caught.value)
    assert not device.memory.out_of_memory(RuntimeError("a shape that does not fit"))
    for text in (
        "[Rank:0] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::234881024 (224)MB",
        "FATAL ERROR :: MODULE:SYNHELPER workspace Allocation of size ::14493510400 failed!",
    ):
        assert device.memory.out_of_memory(RuntimeError(text))


def test_recipes_are_kept_for_the_next_process(host: Host, tmp_path: Path) -> None:
    cache = RecipeCache(tmp_path / "recipes", max_mib=100)
    compilations = []
    for clear in (False, False, True):
        settings = HpuSettings(recipe_cache=RecipeCache(cache.directory, 100, clear))
        device = host.open(hpu=settings)
        before = device.execution.compilations()
        torch.ones(5, device=device.torch_device) + 1
        compilations.append(device.execution.compilations() - before)
        os.environ.pop("PT_HPU_RECIPE_CACHE_CONFIG")
    assert compilations[0] > 0
    assert compilations == [compilations[0], 0, compilations[0]]
    assert (cache.directory / "1.24.0" / "rank0").is_dir()
