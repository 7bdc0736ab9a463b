"""The CPUs of an engine's core, and the allocator that it is started with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from catenary.config import ConfigError
from catenary.cpus import EngineCpus, read_topology
from services.engine import app
from services.engine.config import EngineConfig
from services.engine.core.errors import StartError
from services.engine.core.process import bind_core
from services.engine.device.cpu import cpus_of
from services.engine.options import EngineOptions
from services.engine.servicer import preloaded

CPU = min(os.sched_getaffinity(0))


def core_options(**options: object) -> EngineOptions:
    return EngineConfig.model_validate(options)


def test_threads_without_a_binding() -> None:
    topology = read_topology()
    cores = min(topology.count, topology.limit)
    assert cpus_of(core_options()) == EngineCpus(cores)
    assert cpus_of(core_options(device_threads=3)) == EngineCpus(3)
    if cores > 1:
        assert cpus_of(core_options(cpu_reserve=1)) == EngineCpus(cores - 1)
    with pytest.raises(ValueError, match=r"cpu_bind, cpu_reserve: .* cannot be kept free"):
        cpus_of(core_options(cpu_reserve=1024))


def test_threads_of_a_list() -> None:
    assert cpus_of(core_options(cpu_bind=f"{CPU}")) == EngineCpus(1, (CPU,))
    with pytest.raises(ValueError, match="device_threads 2 is more than the 1 CPUs of cpu_bind"):
        cpus_of(core_options(cpu_bind=f"{CPU}", device_threads=2))


def test_core_keeps_to_its_cpus_before_it_loads_torch() -> None:
    code = (
        "import os, sys, threading\n"
        "from services.engine.config import EngineConfig\n"
        "from services.engine.core.process import bind_core\n"
        f"bind_core(EngineConfig(device='cpu', cpu_bind='{CPU}'))\n"
        "thread = threading.Thread(target=lambda: print(sorted(os.sched_getaffinity(0))))\n"
        "thread.start(); thread.join()\n"
        "print('torch' in sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split("\n")[:2] == [f"[{CPU}]", "False"]


def test_cpu_that_is_not_there() -> None:
    before = os.sched_getaffinity(0)
    try:
        with pytest.raises(StartError, match="cpu_bind 8191: CPU 8191 is not there or not allowed"):
            bind_core(core_options(cpu_bind="8191"))
        with pytest.raises(StartError, match="CPU 8191 is not there"):
            bind_core(core_options(cpu_bind=f"{CPU},8191"))
    finally:
        os.sched_setaffinity(0, before)


def test_other_devices_are_not_bound() -> None:
    before = os.sched_getaffinity(0)
    bind_core(core_options(device="sim", cpu_bind="8191"))
    assert os.sched_getaffinity(0) == before


def library(root: Path, name: str) -> Path:
    path = root / "usr/lib/x86_64-linux-gnu" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def test_allocator_that_is_installed(tmp_path: Path) -> None:
    assert preloaded("auto", {}, tmp_path) == {}
    with pytest.raises(ValueError, match=r"malloc jemalloc: no libjemalloc\.so\.\* in /usr/local/lib"):
        preloaded("jemalloc", {}, tmp_path)
    jemalloc = library(tmp_path, "libjemalloc.so.2")
    assert preloaded("auto", {}, tmp_path) == {"LD_PRELOAD": str(jemalloc)}
    library(tmp_path, "libtcmalloc_minimal.so.4.5.9")
    tcmalloc = library(tmp_path, "libtcmalloc_minimal.so.4")
    assert preloaded("auto", {}, tmp_path) == {"LD_PRELOAD": str(tcmalloc)}
    assert preloaded("jemalloc", {}, tmp_path) == {"LD_PRELOAD": str(jemalloc)}
    assert preloaded("system", {}, tmp_path) == {}


async def test_an_allocator_that_is_not_there_is_a_wrong_option(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(malloc: str, environment: object) -> dict[str, str]:
        raise ValueError(f"malloc {malloc}: no library")

    monkeypatch.setattr(app, "preloaded", missing)
    with pytest.raises(ConfigError, match=r"^--malloc jemalloc: no library$") as refused:
        app.EngineApp(EngineConfig(insecure=True, device="cpu", malloc="jemalloc"))
    assert refused.value.exit_code == 2


def test_allocator_beside_what_somebody_preloads(tmp_path: Path) -> None:
    tcmalloc = library(tmp_path, "libtcmalloc_minimal.so.4")
    chosen = {"LD_PRELOAD": "/lib/mine.so"}
    assert preloaded("auto", chosen, tmp_path) == {}
    assert preloaded("tcmalloc", chosen, tmp_path) == {"LD_PRELOAD": f"{tcmalloc}:/lib/mine.so"}
