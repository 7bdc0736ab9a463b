"""What Gaudi users reported (docs/gaudi-facts.md section 7) and this engine must not do, on its HPU code.

The numbers in names are those of the section.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from services.engine.core.process import start_engine
from services.engine.device import ExecutionMode, sim
from services.engine.domain import CoreErrorCode, FinishReason
from services.engine.graphs import Phase
from tests.support.sim_cores import SIZES, SimCores, answer, whole, work_of
from tests.support.sim_device import Host
from tests.support.torch_engine import VOCAB, LocalCore, save_tiny_model

# One bucket a phase, for what needs no more.
FEW: dict[str, Any] = {
    "max_model_len": 64,
    "bucket_prefill_batch": "min=1,step=1,max=1",
    "bucket_prefill_query": "min=32,step=32,max=32",
    "bucket_prefill_context": "min=0,step=4,max=4",
    "bucket_decode_blocks": "min=16,step=16,max=16",
}
STRATEGIES = ("linear", "exponential", "padding")
AXES = tuple(name for name in SIZES if name.startswith("bucket_"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # The head is a matrix of its own: a token's embedding is nothing but its input.
    return save_tiny_model(
        "llama",
        tmp_path_factory.mktemp("model"),
        max_position_embeddings=131_072,
        tie_word_embeddings=False,
    )


@pytest.fixture(scope="module")
def cores(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimCores]:
    directory = tmp_path_factory.mktemp("host")
    with pytest.MonkeyPatch.context() as patch:
        yield SimCores(Host(patch, directory), model, directory)
        sim.card().release()


def prompts_of(count: int, longest: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def serve(core: LocalCore, prompts: list[list[int]], max_tokens: int = 8, **options: Any) -> list[list[int]]:
    keys = [core.submit(prompt, max_tokens=max_tokens, **options) for prompt in prompts]
    core.run()
    return [whole(core.outputs[key]).token_ids for key in keys]


def test_1_a_second_start_compiles_nothing_that_the_first_has_kept(
    cores: SimCores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The option sets it for the bridge, and other tests of this process have no cache.
    monkeypatch.setenv("PT_HPU_RECIPE_CACHE_CONFIG", "")
    monkeypatch.delenv("PT_HPU_RECIPE_CACHE_CONFIG")
    taken = []
    for _ in range(2):
        core = cores.start(ExecutionMode.LAZY, recipe_cache=str(tmp_path / "recipes"), **FEW)
        counters = sim.card().counters
        taken.append((counters.compilations, counters.compile_seconds))
        assert len(answer(core, [4] * 40, 8)) == 8
        core.engine.close()
    (cold, cold_seconds), (cached, cached_seconds) = taken
    assert cold > 20
    assert cached == 0
    assert cached_seconds < cold_seconds / 5


def test_3_a_context_of_124k_is_served_with_limits_of_its_own(cores: SimCores) -> None:
    length = 126_976
    options: dict[str, Any] = dict.fromkeys(AXES) | {
        "max_model_len": length,
        "block_size": 128,
        "max_num_seqs": 2,
        "bucketing_strategy": "exponential",
        "kv_cache_gib": 0.05,
        "enable_prefix_caching": False,
        "warmup": "skip",
    }
    core = cores.start(ExecutionMode.EAGER, **options)
    ready = core.engine.ready
    assert ready.model.max_model_len == length
    assert ready.capacity.total_blocks * 128 >= length
    buckets = core.engine.scheduler.planner.buckets
    last = -(-(length - 1) // 128)
    assert buckets.prefill_bucket(1, 32, last) is not None
    assert buckets.decode_bucket(1, last) is not None
    # The longest prompts are what their limit allows, and no more.
    key = core.submit([5] * length, max_tokens=1)
    core.run()
    end = core.outputs[key].end
    assert end is not None
    assert end.error_code is CoreErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert len(answer(core, [5] * 40, 3)) == 3


def poison(core: LocalCore, key: int) -> None:
    """KV of one running sequence is not a number, as after a forward that overflowed."""
    model: Any = core.engine.model
    scheduler: Any = core.engine.scheduler
    size = core.engine.ready.capacity.block_size
    blocks = scheduler.live[key].block_table
    slots = torch.tensor([block * size + slot for block in blocks for slot in range(size)]).to("hpu")
    for cache in model.caches:
        for part in (cache.key, cache.value):
            part[slots] = torch.full((len(slots), *part.shape[1:]), torch.nan).to("hpu")


def test_4_nan_ends_its_sequence_alone_and_no_token_0_is_answered(cores: SimCores) -> None:
    prompts = prompts_of(3, 40, seed=5)
    expected = serve(cores.cpu(), prompts, max_tokens=20)
    core = cores.start()
    keys = [core.submit(prompt, max_tokens=20) for prompt in prompts]
    while not all(core.outputs[key].token_ids for key in keys):
        core.step()
    poison(core, keys[1])
    core.run()
    end = core.outputs[keys[1]].end
    assert end is not None
    assert end.reason is FinishReason.ERROR
    assert end.error_message == "The model's output for this sequence is not a number."
    assert core.outputs[keys[1]].token_ids == expected[1][: end.completion_tokens]
    for index in (0, 2):
        assert whole(core.outputs[keys[index]]).token_ids == expected[index]
    # Its blocks go to others, and its prompt is computed again.
    assert serve(core, prompts, max_tokens=20) == expected
    assert core.engine.graphs.first_seen == 0


def test_5_padding_is_invisible_in_bfloat16_whatever_its_tokens_are(cores: SimCores) -> None:
    prompts = [[5], *prompts_of(5, 48, seed=7)]
    core = cores.start(dtype="auto")
    model: Any = core.engine.model
    assert model.dtype is torch.bfloat16
    # Token 0, which padding may consist of, is in no prompt and no answer.
    without: dict[str, Any] = {"logit_bias": [(0, -100.0)]}
    alone = [serve(core, [prompt], **without) for prompt in prompts]
    # Together, prompts share forwards and have other padding.
    assert serve(core, prompts, **without) == [tokens for (tokens,) in alone]
    # In the largest bucket that there is, among empty rows, and with a token 0 that would be heard of.
    padded = cores.start(dtype="auto", enable_prefix_caching=False, **FEW)
    model = padded.engine.model
    model.decoder.embedding.weight[0].fill_(1e4)
    assert [serve(padded, [prompt], **without) for prompt in prompts[:3]] == alone[:3]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_11_22_31_every_step_of_odd_limits_has_a_bucket(cores: SimCores, strategy: str) -> None:
    options: dict[str, Any] = dict.fromkeys(AXES) | {
        "max_model_len": 77,
        "block_size": 24,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 37,
        "bucketing_strategy": strategy,
    }
    core = cores.start(ExecutionMode.EAGER, **options)
    warm = work_of(core)
    prompts = [*prompts_of(6, 72, seed=11), [9] * 76]
    expected = cores.cpu(**options)
    for batch, tokens in ((prompts, 1), (prompts[:6], 5)):
        assert serve(core, batch, tokens) == serve(expected, batch, tokens)
    assert work_of(core) == warm


def test_15_a_request_whose_shapes_compile_ends_well(cores: SimCores) -> None:
    core = cores.start(warmup="skip", **FEW)
    before, seconds = work_of(core), sim.card().counters.compile_seconds
    prompt = [7, 8, 9]
    assert answer(core, prompt, 6) == answer(cores.cpu(**FEW), prompt, 6)
    cold = work_of(core)
    assert cold["compilations"] > before["compilations"]
    assert cold["first_seen"] > 0
    assert sim.card().counters.compile_seconds > seconds
    assert len(answer(core, prompt, 6)) == 6
    assert work_of(core) == cold


def test_20_the_second_answer_is_the_same_with_and_without_prefix_caching(cores: SimCores) -> None:
    prompts = [[*range(3, 73), 5, 9], [*range(3, 73), 11], [*range(3, 73), 5, 9]]
    answers = []
    for caching in (True, False):
        core = cores.start(enable_prefix_caching=caching)
        warm = work_of(core)
        answers.append([answer(core, prompt, 12) for prompt in prompts])
        cached = [output.end.cached_tokens for output in core.outputs.values() if output.end]
        assert cached == ([0, 64, 64] if caching else [0, 0, 0])
        assert work_of(core) == warm
    assert answers[0] == answers[1]
    assert answers[0][0] == answers[0][2]


def test_21_a_slice_of_the_cache_and_steps_in_flight_answer_as_fetching_by_id(cores: SimCores) -> None:
    # Prompts of several chunks, whose context lies where moves have left it.
    prompts = [[*prompt, *range(10, 40)] for prompt in prompts_of(7, 50, seed=13)]
    options: dict[str, Any] = {"enable_prefix_caching": False, "bucket_decode_blocks": None}
    found, moves = [], []
    for contiguous, overlaps in ((False, False), (True, True)):
        core = cores.start(
            ExecutionMode.LAZY,
            **options,
            contiguous_kv=contiguous,
            async_stepping=overlaps,
            max_block_moves=2,
        )
        warm, model = work_of(core), cast(Any, core.engine.model)
        copy = model.copy_blocks
        moved: list[int] = []
        moves.append(moved)

        def spy(*blocks: torch.Tensor, copy: Any = copy, moved: list[int] = moved) -> None:
            moved.append(len(blocks[0]))
            copy(*blocks)

        model.copy_blocks = spy
        found.append(serve(core, prompts))
        assert work_of(core) == warm
    assert found[0] == found[1]
    assert not moves[0]
    assert moves[1]


def test_25_a_warm_up_tells_its_progress_shape_by_shape(cores: SimCores) -> None:
    told: list[tuple[str, float | None]] = []
    cores.prepare(ExecutionMode.EAGER)
    options = cores.options(device="sim", enforce_eager=True, **FEW)
    start_engine(options, lambda activity, share: told.append((activity, share)))
    warming = [(text, share or 0.0) for text, share in told if text.startswith("warming up, ")]
    total = len(warming) - 1
    assert total > 5
    texts = [f"warming up, {done} of {total} shapes" for done in range(total + 1)]
    assert [text for text, _ in warming] == texts
    shares = [share for _, share in warming]
    assert shares == sorted(set(shares))


def test_24_35_graphs_keep_to_their_reserve_and_the_next_start_reserves_what_they_took(
    cores: SimCores, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        **FEW,
        "kv_cache_gib": None,
        "graph_reserved_mem": 0.4,
        "gpu_memory_utilization": 0.9,
        "cache_dir": str(tmp_path),
    }
    blocks = []
    for _ in range(2):
        core = cores.start(hbm_gib=0.12, **options)
        hbm = sim.card().hbm
        blocks.append(core.engine.ready.capacity.total_blocks)
        captured = sum(len(core.engine.graphs.captured(phase)) for phase in Phase)
        assert captured > 5
        # Graphs, weights and KV together leave what the utilization promised.
        assert hbm.free > 0.1 * hbm.limit * 0.9
        warm = work_of(core)
        assert len(answer(core, [4] * 40, 8)) == 8
        assert work_of(core) == warm
    assert blocks[1] > blocks[0]
