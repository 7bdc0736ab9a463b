"""The demo model on a simulated HPU, in each mode, as on the CPU: float32 on both."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.engine.device import ExecutionMode
from services.engine.model import prepare_model
from tests.support.sim_device import EAGER, Host
from tests.support.torch_engine import LocalCore, tiny_options

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

REQUESTS = 20
# Few shapes: each costs a pass through 30 layers, operation by operation.
LIMITS: dict[str, Any] = {
    "max_model_len": 64,
    "block_size": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_prefill_batch": 4,
    "bucketing_strategy": "file",
    "kv_cache_gib": 0.3,
}
BUCKETS = "(4, 16, 0)\n(1, 64, 1)\n(4, 1, 4)\n"


@pytest.fixture(scope="module")
def model() -> Path:
    return prepare_model("smollm2")


@pytest.fixture(scope="module")
def buckets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("buckets") / "buckets.txt"
    path.write_text(BUCKETS)
    return path


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(1000, 40_000) for _ in range(rng.randint(3, 14))] for _ in range(REQUESTS)]


@pytest.fixture(scope="module")
def expected(model: Path, buckets: Path, prompts: list[list[int]]) -> list[list[int]]:
    return answers(LocalCore(tiny_options(model, **LIMITS, bucketing_file=str(buckets))), prompts)


def answers(core: LocalCore, prompts: list[list[int]]) -> list[list[int]]:
    keys = [core.submit(prompt, max_tokens=3) for prompt in prompts]
    core.run()
    core.engine.close()
    return [core.outputs[key].token_ids for key in keys]


@pytest.fixture
def serve(
    model: Path, buckets: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[ExecutionMode], LocalCore]:
    host = Host(monkeypatch, tmp_path)

    def start(mode: ExecutionMode) -> LocalCore:
        host.prepare(mode)
        options = {**LIMITS, "device": "sim", "enforce_eager": mode in EAGER, "warmup": "full"}
        return LocalCore(tiny_options(model, **options, cache_dir=str(tmp_path), bucketing_file=str(buckets)))

    return start


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, marks=[] if mode.captures else pytest.mark.long, id=mode.value)
        for mode in ExecutionMode
    ],
)
def test_the_demo_model_answers_as_on_the_cpu(
    mode: ExecutionMode,
    serve: Callable[[ExecutionMode], LocalCore],
    prompts: list[list[int]],
    expected: list[list[int]],
) -> None:
    core = serve(mode)
    warm = core.engine.device.execution.compilations()
    assert answers(core, prompts) == expected
    assert core.engine.device.execution.compilations() == warm > 0
    assert core.engine.graphs.first_seen == 0
