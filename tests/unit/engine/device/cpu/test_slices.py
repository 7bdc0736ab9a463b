"""The slices that an engine's threads ask the scheduler for."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from services.engine.config import EngineConfig
from services.engine.device.cpu import CpuDevice, CpuSettings, cpu_settings
from services.engine.device.cpu import threads as cpu_threads
from services.engine.device.cpu.native import open_library
from services.engine.device.cpu.threads import Team, ask_for_slices

# Of sched_getattr.
_NUMBER = {"x86_64": 315}.get(platform.machine(), 275)
# Linux before 6.12 has no slices of a thread's own, and tells 0.
_KNOWN = tuple(map(int, platform.release().split("-")[0].split(".")[:2])) >= (6, 12)


def slice_of(thread: int) -> int:
    """Nanoseconds."""
    found = (ctypes.c_uint64 * 6)()
    assert ctypes.CDLL(None).syscall(_NUMBER, thread, found, ctypes.sizeof(found), 0) == 0
    return found[3]


def threads() -> set[int]:
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


def test_a_thread_asks_for_itself_alone() -> None:
    before, nice = slice_of(0), os.getpriority(os.PRIO_PROCESS, 0)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(ask_for_slices, 300).result()
        asked = pool.submit(slice_of, 0).result()
        assert pool.submit(os.getpriority, os.PRIO_PROCESS, 0).result() == nice
    assert asked == (300_000 if _KNOWN else before)
    assert slice_of(0) == before


@pytest.mark.parametrize("microseconds", [0, 200])
def test_the_threads_of_forwards_have_them_and_no_others(microseconds: int) -> None:
    library, before, usual = open_library(), threads(), slice_of(0)
    device = CpuDevice(3, settings=CpuSettings(slice_us=microseconds))
    team = device.stream.submit(partial(Team, library, 3)).result()
    found = {slice_of(thread) for thread in threads() - before}
    assert found == {200_000 if microseconds and _KNOWN else usual}
    assert slice_of(0) == usual
    del team
    device.stream.close()


def test_another_policy_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: int) -> int:
        return os.SCHED_FIFO

    monkeypatch.setattr(os, "sched_getscheduler", refuse)
    assert not ask_for_slices(100)


def test_a_sandbox_that_tells_nothing_keeps_nobody_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(_thread: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_getscheduler", forbid)
    assert not ask_for_slices(100)


@pytest.mark.parametrize("number", [None, 1_000_000])
def test_a_system_that_does_not_know_the_call(monkeypatch: pytest.MonkeyPatch, number: int | None) -> None:
    numbers = {} if number is None else {platform.machine(): number}
    monkeypatch.setattr(cpu_threads, "_NUMBERS", numbers)
    assert not ask_for_slices(100)


def test_the_option_reaches_the_device() -> None:
    def asked(**options: object) -> int:
        config: Callable[..., EngineConfig] = EngineConfig.model_validate
        return cpu_settings(config(options)).slice_us

    assert asked() == 100
    assert asked(cpu_slice_us=0) == 0
