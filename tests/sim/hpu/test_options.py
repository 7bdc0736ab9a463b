"""What the options of an HPU change, seen on a simulated one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

from services.engine.config import EngineConfig
from services.engine.device import ExecutionMode, open_device
from services.engine.device.hpu import HpuSettings, StepLog, hpu_settings
from services.engine.device.hpu.execution import HpuExecution
from services.engine.graphs import Phase
from tests.support.sim_device import EAGER, Host
from tests.support.torch_engine import LocalCore, core_options, save_tiny_model, tiny_options

PROMPTS = [[5, 6, 7], list(range(3, 43)), [9] * 12]
LIMITS: dict[str, Any] = {
    "max_model_len": 64,
    "block_size": 32,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "max_prefill_batch": 1,
    "device": "sim",
    "warmup": "full",
}

Start = Callable[..., LocalCore]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    return answers(LocalCore(tiny_options(model, **{**LIMITS, "device": "cpu"})))


def answers(core: LocalCore) -> list[list[int]]:
    keys = [core.submit(prompt, max_tokens=5) for prompt in PROMPTS]
    core.run()
    core.engine.close()
    return [core.outputs[key].token_ids for key in keys]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Host:
    return Host(monkeypatch, tmp_path)


@pytest.fixture
def start(model: Path, host: Host, tmp_path: Path) -> Start:
    def begin(mode: ExecutionMode, **options: Any) -> LocalCore:
        host.prepare(mode)
        values = {**LIMITS, "cache_dir": str(tmp_path), "enforce_eager": mode in EAGER, **options}
        return LocalCore(tiny_options(model, **values))

    return begin


def test_layers_per_graph(start: Start, expected: list[list[int]]) -> None:
    flushes = {}
    for layers in (0, 1, 2):
        core = start(ExecutionMode.LAZY, layers_per_graph=layers)
        assert answers(core) == expected
        flushes[layers] = core.engine.device.execution.counters()["mark_steps"]
    # Two layers: two flushes more in each forward, or one.
    assert flushes[1] - flushes[0] == 2 * (flushes[2] - flushes[0]) > 0


def test_compiling_in_parts_or_as_a_whole(start: Start, expected: list[list[int]]) -> None:
    parts = start(ExecutionMode.COMPILE, max_num_seqs=1)
    device = parts.engine.device
    execution = device.execution
    assert isinstance(execution, HpuExecution)
    # The warm-up compiled without running: nothing of its garbage is left.
    buffers = execution.buffers.alive()
    assert len(buffers) > 4
    assert not any(bool(buffer.any()) for buffer in buffers)
    regions = device.execution.counters()["backend_compilations"]
    assert answers(parts) == expected
    whole = start(
        ExecutionMode.COMPILE,
        max_num_seqs=1,
        regional_compilation=False,
        compile_fullgraph=True,
        compile_only_warmup=False,
    )
    # The final norm had a region of its own for each number of tokens: 32 and 1.
    assert regions - whole.engine.device.execution.counters()["backend_compilations"] == 2
    assert answers(whole) == expected


@pytest.mark.parametrize("backend", ["decoder", "transformers"])
def test_weights_that_are_loaded_to_the_host_first(
    start: Start, backend: str, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = start(ExecutionMode.LAZY, weights_load_device="cpu", model_backend=backend)
    assert core.engine.device.memory.loading_device == torch.device("cpu")
    assert core.engine.model.backend == backend
    assert answers(core) == expected


def test_a_warm_up_beside_serving(start: Start, expected: list[list[int]]) -> None:
    core = start(ExecutionMode.GRAPH, warmup="background")
    background = core.engine.background
    assert background is not None
    before = background.done
    keys = [core.submit(prompt, max_tokens=5) for prompt in PROMPTS]
    core.run()
    assert [core.outputs[key].token_ids for key in keys] == expected
    while background.turn(busy=False):
        pass
    assert background.done == background.total > before
    warm = core.engine.device.execution.compilations()
    assert answers(core) == expected
    assert core.engine.device.execution.compilations() == warm


@pytest.mark.parametrize("mode", [ExecutionMode.GRAPH, ExecutionMode.COMPILE])
def test_no_warm_up(start: Start, mode: ExecutionMode, expected: list[list[int]]) -> None:
    core = start(mode, warmup="skip", async_stepping=False)
    assert len(core.engine.graphs.captured(Phase.DECODE)) == 1
    warm = core.engine.device.execution.compilations()
    assert answers(core) == expected
    assert core.engine.device.execution.compilations() > warm
    assert core.engine.graphs.first_seen > 0


def test_options_become_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hpu_settings(core_options()) == HpuSettings()
    given = core_options(
        layers_per_graph=4,
        weights_load_device="cpu",
        log_step_compilations="new",
        log_step_fallbacks="all",
        recipe_cache="/somewhere",
        recipe_cache_mib=5,
        recipe_cache_clear=True,
        gc_threshold_multiplier=2,
        numa_binding=False,
    )
    settings = hpu_settings(given)
    assert (settings.layers_per_graph, settings.weights_on_host, settings.numa_binding) == (4, True, False)
    assert (settings.log_compilations, settings.log_fallbacks) == (StepLog.NEW, StepLog.ALL)
    cache = settings.recipe_cache
    assert cache is not None
    assert (str(cache.directory), cache.max_mib, cache.clear) == ("/somewhere", 5, True)


def test_options_of_hpus_say_so_on_other_devices() -> None:
    with structlog.testing.capture_logs() as logs:
        open_device(core_options(layers_per_graph=4)).stream.close()
    assert logs == [
        {
            "event": "options that concern HPUs alone change nothing here",
            "log_level": "warning",
            "device": "cpu",
        }
    ]


@pytest.mark.parametrize(
    ("mode", "idle"),
    [
        (ExecutionMode.LAZY, ["regional_compilation", "compile_fullgraph", "compile_only_warmup"]),
        (ExecutionMode.COMPILE, ["layers_per_graph"]),
    ],
)
def test_options_of_other_modes_say_so(host: Host, mode: ExecutionMode, idle: list[str]) -> None:
    host.prepare(mode)
    options = core_options(
        device="sim",
        compile=mode is ExecutionMode.COMPILE,
        enforce_eager=mode in EAGER,
        layers_per_graph=4,
        regional_compilation=False,
        compile_fullgraph=True,
        compile_only_warmup=False,
    )
    with structlog.testing.capture_logs() as logs:
        open_device(options).stream.close()
    said = [line for line in logs if line["event"] == "options that change nothing in this execution mode"]
    assert [(line["options"], line["mode"]) for line in said] == [(idle, mode.value)]


@pytest.mark.parametrize("options", [{"recipe_cache_clear": True}, {"recipe_cache_mib": 5}])
def test_what_is_said_of_a_recipe_cache_needs_one(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))} needs recipe_cache"):
        EngineConfig(**options)
    assert EngineConfig(recipe_cache=tmp_path, **options).recipe_cache == tmp_path


def test_what_graphs_took_is_no_measure_for_other_graphs(start: Start, tmp_path: Path) -> None:
    others: list[dict[str, Any]] = [
        {},
        {"kernels": "sdpa=off"},
        {"max_capture_tokens": 16},
        {"contiguous_kv": True, "enable_prefix_caching": False},
    ]
    for count, options in enumerate(others, 1):
        start(ExecutionMode.GRAPH, **options).engine.close()
        assert len(list((tmp_path / "graphs").iterdir())) == count
    start(ExecutionMode.GRAPH).engine.close()
    assert len(list((tmp_path / "graphs").iterdir())) == len(others)
