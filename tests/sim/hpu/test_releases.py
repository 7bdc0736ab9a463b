"""The engine serves on a simulated HPU with no more of torch than each supported release has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.repository import ROOT
from tests.support.torch_engine import LocalCore, save_tiny_model, tiny_options
from tests.support.torch_releases import PROMPT

# Release, mode, PT_HPU_LAZY_MODE. One of each release is enough between releases.
WAYS = [
    ("2.7", "graph", "1"),
    pytest.param("2.7", "compile", "0", marks=pytest.mark.long),
    pytest.param("2.9", "graph", "1", marks=pytest.mark.long),
    pytest.param("2.9", "compile", "0", marks=pytest.mark.long),
    pytest.param("2.10", "compile", "0", marks=pytest.mark.long),
    pytest.param("2.11", "compile", "0", marks=pytest.mark.long),
]


@pytest.fixture(scope="module", params=["llama", pytest.param("qwen3_moe", marks=pytest.mark.long)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(request.param, tmp_path_factory.mktemp("model"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("release", "mode", "lazy"), WAYS)
def test_serves_with_the_names_of_a_release(
    release: str, mode: str, lazy: str, model: Path, tmp_path: Path
) -> None:
    core = LocalCore(tiny_options(model, max_model_len=64))
    key = core.submit(PROMPT, max_tokens=4)
    core.run()
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.torch_releases", release, str(model), mode],
        cwd=ROOT,
        env={**os.environ, "PT_HPU_LAZY_MODE": lazy, "CATENARY_SIM": f"lock_directory={tmp_path}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split() == [str(token) for token in core.outputs[key].token_ids]
