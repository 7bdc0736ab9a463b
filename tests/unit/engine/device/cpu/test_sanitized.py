"""The tests of the native kernels again, with gcc's address sanitizer: no byte out of bounds is touched."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from services.engine.device.cpu.native import find_compiler
from tests.support.repository import ROOT

TESTS = (
    "device/cpu/test_native_attention.py",
    "device/cpu/test_native_elements.py",
    "device/cpu/test_products.py",
    "sampling/test_native_choice.py",
    "device/cpu/test_native_decoder.py",
    "device/cpu/test_native_linears.py",
    "device/cpu/test_native_parity.py",
)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.advisory("CVE-2026-73558")
def test_kernels_stay_within_their_memory(tmp_path: Path) -> None:
    compiler = tmp_path / "sanitizing"
    found = find_compiler()
    words = shlex.join(found)
    compiler.write_text(f'#!/bin/sh\nexec {words} "$@" -O1 -g1 -fsanitize=address -fno-omit-frame-pointer\n')
    compiler.chmod(0o755)
    question = [*found, "-print-file-name=libasan.so"]
    runtime = subprocess.run(question, capture_output=True, text=True, check=True).stdout.strip()
    environment = os.environ | {"CXX": str(compiler), "CATENARY_CACHE": str(tmp_path / "cache")}
    # Python keeps what it has until it ends.
    sanitized = environment | {"LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0"}
    pytest_command = ["pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not long"]
    run("services.engine.device.cpu.native", environment=environment)
    run(*pytest_command, *(str(ROOT / "tests/unit/engine" / name) for name in TESTS), environment=sanitized)


def run(*module: str, environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", *module]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
