"""Caches on a file system that is mounted noexec: no code is made for them, and a line says why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.engine.core.errors import StartError
from services.engine.core.startup import open_code_cache
from services.engine.device import ExecutionMode
from services.engine.device.cpu import CpuDevice
from services.engine.device.cpu.native import LEVELS, BuildError, build
from services.engine.device.cpu.native.building import seal
from tests.support.small_disk import SmallDisk

PORTABLE = LEVELS[-1]
MountDisk = Callable[..., SmallDisk]
# Says which it is, and writes a word to each output file.
COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo compiler; exit 0; fi
for last; do :; done
echo made >"$last"
echo "$last" >>"{log}"
"""
MENDED = (
    r"is on a file system that is mounted noexec, .*: choose another directory with --cache-dir or .*_CACHE"
)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the only compiler has written."""
    compiler, log = tmp_path / "cxx", tmp_path / "log"
    compiler.write_text(COMPILER.format(log=log))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("CATENARY_CACHE", str(tmp_path / "machine"))
    monkeypatch.setattr("services.engine.device.cpu.native.building.BUILT", tmp_path / "none")
    return log


def test_kernels_are_not_built_where_they_cannot_be_loaded(small_disk: MountDisk, log: Path) -> None:
    disk = small_disk(1 << 22, "noexec")
    with pytest.raises(BuildError, match=MENDED):
        build(PORTABLE, disk.path / "native")
    assert not log.exists()
    assert list(disk.path.iterdir()) == []


def test_kernels_that_can_be_loaded_are_taken_before_those_that_cannot(
    small_disk: MountDisk, log: Path, tmp_path: Path
) -> None:
    disk = small_disk(1 << 22, "noexec")
    made = build(PORTABLE, tmp_path / "machine" / "native")
    (disk.path / "native").mkdir(0o700)
    copy = disk.path / "native" / made.name
    copy.write_bytes(b"made\n")
    seal(copy, made.name)
    assert build(PORTABLE, disk.path / "native") == made


def test_an_engine_that_compiles_is_refused_a_cache_from_which_no_code_is_loaded(
    small_disk: MountDisk, tmp_path: Path
) -> None:
    disk = small_disk(1 << 22, "noexec")
    (tmp_path / "config.json").write_text("{}")
    model: Any = SimpleNamespace(dtype="bfloat16", compile_parts=lambda norms_and_head: None)
    device = CpuDevice(1, ExecutionMode.COMPILE)
    try:
        with pytest.raises(StartError, match=f"^compile: {disk.path} {MENDED}$"):
            open_code_cache(cast("Any", SimpleNamespace(block_size=32)), device, model, tmp_path, disk.path)
    finally:
        device.stream.close()
    assert list(disk.path.iterdir()) == []
