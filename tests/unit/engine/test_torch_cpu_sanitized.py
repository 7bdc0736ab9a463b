"""The tests of the native kernels again, with gcc's address sanitizer: no byte out of bounds is touched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.engine.device.cpu.native import find_compiler

HERE = Path(__file__).parent


@pytest.mark.long
@pytest.mark.timeout(900)
def test_kernels_stay_within_their_memory(tmp_path: Path) -> None:
    compiler = tmp_path / "sanitizing"
    found = find_compiler()
    compiler.write_text(f'#!/bin/sh\nexec {found} -fsanitize=address -fno-omit-frame-pointer -g1 "$@"\n')
    compiler.chmod(0o755)
    runtime = subprocess.run(
        [str(found), "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    )
    tests = sorted(str(path) for path in HERE.glob("test_torch_cpu_*.py") if path != Path(__file__))
    environment = {
        **os.environ,
        "CXX": str(compiler),
        "CATENARY_CACHE": str(tmp_path / "cache"),
        "LD_PRELOAD": runtime.stdout.strip(),
        # Python keeps what it has until it ends.
        "ASAN_OPTIONS": "detect_leaks=0",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-m",
        "not model",
        *tests,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=880)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
