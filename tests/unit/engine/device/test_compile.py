"""`--compile` for real: inductor's code in a cache, started again, damaged, and started once more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.engine.device import DeviceError, ExecutionMode
from services.engine.device.cpu import CpuDevice
from tests.support.repository import ROOT
from tests.support.torch_engine import save_tiny_model


def start(model: Path, cache: Path, *more: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.warmup", "--once", "--model", str(model)]
    command += ["--cache-dir", str(cache), "--dtype", "float32", "--threads", "1"]
    command += ["--max-model-len", "32", "--max-num-seqs", "1", "--max-num-batched-tokens", "32", *more]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
    figures: dict[str, Any] = json.loads(output.stdout.splitlines()[-1])
    return figures


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_second_start_takes_compiled_code_from_the_cache_and_survives_its_damage(tmp_path: Path) -> None:
    model, cache = save_tiny_model("llama", tmp_path / "model", num_hidden_layers=3), tmp_path / "cache"
    eager = start(model, cache, "--no-compile")
    first = start(model, cache)
    second = start(model, cache)
    assert eager["compilations"] == 0
    # One for each bucket: all layers run the same code.
    assert first["compilations"] == second["compilations"] == first["buckets"]
    assert first["first_seen"] == second["first_seen"] == 0
    assert second["warm_up_s"] < first["warm_up_s"] / 3
    code = [path for path in (cache / "compiled").rglob("*") if path.suffix == ".so"]
    assert code
    for number, path in enumerate(code):
        path.write_bytes(path.read_bytes()[:100] if number % 2 else os.urandom(path.stat().st_size))
    damaged = start(model, cache)
    assert damaged["compilations"] == first["compilations"]
    for figures in (first, second, damaged):
        assert figures["tokens"] == eager["tokens"]


def test_without_a_compiler_the_start_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(DeviceError, match=r"compile needs a C\+\+ compiler, and there is none"):
        CpuDevice(1, ExecutionMode.COMPILE)
