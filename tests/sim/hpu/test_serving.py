"""The engine serves on a simulated HPU as on the CPU, in all four modes, and compiles nothing meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.engine.device import ExecutionMode
from services.engine.device.hpu import HpuDevice
from tests.support.sim_device import EAGER, Host, Misdeeds
from tests.support.torch_engine import VOCAB, LocalCore, Output, save_tiny_model, tiny_options

# Half a minute in mode compile, and three times that on a machine that has other work.
pytestmark = pytest.mark.timeout(600)

MAX_LEN = 512
REQUESTS = 500
LIMITS: dict[str, Any] = {
    "max_model_len": MAX_LEN,
    "block_size": 128,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 512,
    "max_prefill_batch": 4,
    "kv_cache_gib": 0.02,
    "max_waiting": REQUESTS,
    "cache_dir": None,
}
CONTIGUOUS = {"enable_prefix_caching": False, "contiguous_kv": True, "max_block_moves": 4}
# Both ways to fetch KV, each in two modes. Dynamo takes seconds for a handful of shapes.
WAYS: dict[ExecutionMode, dict[str, Any]] = {
    ExecutionMode.EAGER: CONTIGUOUS,
    ExecutionMode.LAZY: {},
    ExecutionMode.GRAPH: CONTIGUOUS,
    ExecutionMode.COMPILE: {"max_prefill_batch": 1, "max_num_batched_tokens": 256, "max_num_seqs": 8},
}

Request = tuple[list[int], dict[str, Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("model"), max_position_embeddings=MAX_LEN)


def random_request(rng: random.Random, *, greedy: bool) -> Request:
    """Mostly short, sometimes as long as a sequence can be."""
    length = rng.randint(1, rng.choice((12, 12, 12, 30, 30, 90, 500)))
    prompt = [rng.randrange(3, VOCAB) for _ in range(length)]
    options: dict[str, Any] = {"max_tokens": rng.randint(1, min(8, MAX_LEN - length))}
    choices: list[tuple[str, Any]] = [
        ("presence_penalty", 0.5),
        ("repetition_penalty", 1.2),
        ("frequency_penalty", 0.3),
        ("logit_bias", [(5, 2.0), (9, -3.0)]),
        ("top_logprobs", 3),
        ("bad_words", [(7,), (11, 13)]),
    ]
    if not greedy:
        options |= {"temperature": rng.uniform(0.2, 2.0), "seed": rng.getrandbits(63)}
        choices += [("top_p", 0.8), ("top_k", 5), ("min_p", 0.05)]
    return prompt, options | dict(rng.sample(choices, rng.randrange(3)))


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """The first ones draw their tokens, and not all: a draw is what costs most on a simulated card."""
    rng = random.Random(17)
    found = [random_request(rng, greedy=index > 60 or index % 3 == 0) for index in range(REQUESTS)]
    # Prompts that begin alike, for the prefix cache.
    for index in range(0, REQUESTS, 25):
        prompt, options = found[index]
        found[index] = [*range(3, 123), *range(3, 63), *prompt[:300]], options
    return found


@pytest.fixture(scope="module")
def expected(model: Path, requests: list[Request]) -> list[Output]:
    return serve(LocalCore(tiny_options(model, **LIMITS)), requests)


def serve(core: LocalCore, requests: list[Request]) -> list[Output]:
    keys = [core.submit(prompt, **options) for prompt, options in requests]
    core.run(limit=20_000)
    return [core.outputs[key] for key in keys]


@pytest.fixture
def start(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., LocalCore]:
    host = Host(monkeypatch, tmp_path)

    def begin(mode: ExecutionMode, **options: Any) -> LocalCore:
        host.prepare(mode)
        values = {**LIMITS, "device": "sim", "enforce_eager": mode in EAGER, "warmup": "full", **options}
        return LocalCore(tiny_options(model, **{**values, "cache_dir": str(tmp_path)}))

    return begin


def compilations() -> int:
    from habana_frameworks.torch.hpu.metrics import metric_global

    return int(dict(metric_global("graph_compilation").stats())["TotalNumber"])


@pytest.mark.parametrize("mode", list(ExecutionMode), ids=lambda mode: mode.value)
def test_serves_as_the_cpu_and_compiles_nothing(
    mode: ExecutionMode,
    start: Callable[..., LocalCore],
    requests: list[Request],
    expected: list[Output],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = start(mode, **WAYS[mode])
    assert isinstance(core.engine.device, HpuDevice)
    assert core.engine.device.execution.mode is mode
    warm, before = compilations(), core.engine.device.execution.counters()
    misdeeds = Misdeeds(core.engine.device)
    misdeeds.watch(monkeypatch)
    outputs = serve(core, requests)
    # No step waits for the device but for the tokens of the one before, whose copy was begun then.
    assert misdeeds.counted() == {"waits": 0, "blocking_uploads": 0, "open_uploads": 0, "fallbacks": 0}
    assert misdeeds.found == []
    after = core.engine.device.execution.counters()
    assert compilations() == warm
    assert core.engine.graphs.first_seen == 0
    for (_, options), output, wanted in zip(requests, outputs, expected, strict=True):
        assert output.end is not None
        assert len(output.token_ids) == options["max_tokens"]
        if "temperature" not in options:
            assert output.token_ids == wanted.token_ids
    assert after["cpu_fallbacks"] == 0
    check_counters(mode, before, after)
    core.engine.close()


def check_counters(mode: ExecutionMode, before: dict[str, int], after: dict[str, int]) -> None:
    """Each mode does what is its own, and nothing of what is another's."""
    own = {
        ExecutionMode.EAGER: set(),
        ExecutionMode.LAZY: {"mark_steps"},
        ExecutionMode.GRAPH: {"mark_steps", "captures", "replays"},
        ExecutionMode.COMPILE: {"backend_compilations"},
    }[mode]
    assert set(after) == own | {"graph_compilations", "cpu_fallbacks"}
    for name in own & {"mark_steps", "replays"}:
        assert after[name] > before[name] > 0
    for name in own & {"captures", "backend_compilations"}:
        assert after[name] == before[name] > 0
