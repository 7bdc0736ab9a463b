"""An engine on the simulated HPU, for traps that show in what it serves: see test_traps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from services.engine.core.errors import StartError
from services.engine.device import ExecutionMode, sim
from services.engine.graphs import Phase
from services.engine.model.decoder.layers import Rotary
from tests.support.sim_device import EAGER, Host, Misdeeds
from tests.support.torch_engine import VOCAB, LocalCore, Output, save_tiny_model, tiny_options

# One prefill and one decode bucket: what is shown needs no more.
_SIZES: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "max_model_len": 64,
    "block_size": 16,
    "bucketing_strategy": "linear",
    "bucket_prefill_batch": "min=1,step=1,max=1",
    "bucket_prefill_query": "min=32,step=32,max=32",
    "bucket_prefill_context": "min=0,step=4,max=4",
    "bucket_decode_batch": "min=4,step=4,max=4",
    "bucket_decode_blocks": "min=16,step=16,max=16",
}


def serve(core: LocalCore) -> list[Output]:
    """Requests of all kinds, more than fit at once."""
    dice = random.Random(3)
    keys = []
    for number in range(8):
        prompt = [dice.randrange(3, VOCAB) for _ in range(dice.randrange(3, 28))]
        sampling: dict[str, Any] = {}
        if number % 2:
            sampling = {"temperature": 0.9, "top_p": 0.8, "top_k": 20, "seed": 2**40 + number}
        if number % 3 == 0:
            sampling |= {"top_logprobs": 2, "prompt_logprobs": 2, "frequency_penalty": 0.4}
        keys.append(core.submit(prompt, max_tokens=8, **sampling))
    core.run()
    return [core.outputs[key] for key in keys]


class Served:
    """What the CPU and the simulated HPU gave, and the card's counters before and after serving."""

    def __init__(self, directory: Path) -> None:
        save_tiny_model("llama", directory)
        self.expected = serve(LocalCore(tiny_options(directory, **_SIZES)))
        core = LocalCore(tiny_options(directory, device="sim", **_SIZES))
        counters = sim.card().counters
        self.warm = (counters.compilations, counters.captures)
        self.outputs = serve(core)
        self.after = (counters.compilations, counters.captures)
        self.fallbacks = dict(counters.fallback_ops)
        self.replays = counters.replays


@contextmanager
def graphs_on_sim(directory: Path, **settings: Any) -> Iterator[None]:
    """Inside, engines with the device sim have a new card and execute as graphs."""
    with pytest.MonkeyPatch.context() as patched:
        for name in ("HLS_MODULE_ID", "HABANA_VISIBLE_MODULES"):
            patched.setenv(name, "")
            patched.delenv(name)
        patched.setenv("PT_HPU_LAZY_MODE", "1")
        settings["lock_directory"] = directory
        patched.setenv("CATENARY_SIM", ",".join(f"{name}={value}" for name, value in settings.items()))
        yield
        sim.card().release()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("served")
    with graphs_on_sim(directory):
        yield Served(directory)


def test_tokens_are_those_of_the_cpu(served: Served) -> None:
    assert [out.token_ids for out in served.outputs] == [out.token_ids for out in served.expected]


def test_scores_of_prompts_and_tokens_are_those_of_the_cpu(served: Served) -> None:
    for out, expected in zip(served.outputs, served.expected, strict=True):
        assert out.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        assert [score for score, _ in out.prompt] == pytest.approx(
            [score for score, _ in expected.prompt], abs=1e-4
        )
    assert any(out.prompt for out in served.expected)


def test_nothing_is_compiled_or_captured_after_warm_up_and_nothing_falls_back(served: Served) -> None:
    assert served.after == served.warm
    assert served.replays > 50
    assert served.fallbacks == {}


def test_memory_for_graphs_is_set_aside_before_the_kv(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    with graphs_on_sim(tmp_path, hbm_gib=0.1):
        options = {**_SIZES, "kv_cache_gib": None, "graph_reserved_mem": 0.4}
        core = LocalCore(tiny_options(tmp_path, device="sim", **options))
        phases = (Phase.PREFILL, Phase.DECODE, Phase.HEAD, Phase.GREEDY, Phase.FILTER, Phase.RESULT)
        captured = [len(core.engine.graphs.captured(phase)) for phase in phases]
    assert captured == [1, 1, 3, 3, 2, 2]


@pytest.mark.parametrize("mode", list(ExecutionMode), ids=lambda mode: mode.value)
def test_no_step_waits_or_changes_what_it_is_given(
    mode: ExecutionMode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the tokens of the step before, whose copy was begun then."""
    save_tiny_model("llama", tmp_path)
    Host(monkeypatch, tmp_path).prepare(mode)
    core = LocalCore(tiny_options(tmp_path, device="sim", enforce_eager=mode in EAGER, **_SIZES))
    misdeeds = Misdeeds(core.engine.device)
    misdeeds.watch(monkeypatch)
    serve(core)
    core.engine.close()
    assert misdeeds.counted() == {"waits": 0, "blocking_uploads": 0, "open_uploads": 0, "fallbacks": 0}
    assert misdeeds.found == []


def test_a_model_that_makes_tables_in_a_warm_up_that_only_compiles_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tables of positions would be garbage for the life of the engine."""
    save_tiny_model("llama", tmp_path)
    compute = Rotary.forward

    def forward(self: Any, positions: torch.Tensor, dtype: torch.dtype) -> Any:
        # For each call, since what the activations' measuring made is sound.
        made = compute(self, positions, dtype)
        self.__dict__.setdefault("tables", []).append(made)
        return made

    monkeypatch.setattr(Rotary, "forward", forward)
    Host(monkeypatch, tmp_path).prepare(ExecutionMode.COMPILE)
    options = tiny_options(tmp_path, device="sim", enforce_eager=False, **_SIZES)
    with pytest.raises(StartError, match=r"keeps .*tables.* of the warm-up.*--compile-only-warmup false"):
        LocalCore(options)
