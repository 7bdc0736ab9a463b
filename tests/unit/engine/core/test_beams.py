"""Beam search in a whole core: token for token what transformers' generate finds, in float32."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import transformers

from services.engine.domain import BeamOptions, FinishReason
from services.engine.link import AbortSequences
from tests.support.beams import check_beams, expected_beams
from tests.support.static_sampling import StaticCpu
from tests.support.torch_engine import VOCAB, LocalCore, save_tiny_model, tiny_options

OFTEN = list(range(0, VOCAB, 7))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("tiny"))


def prompt_of(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


# Prompt length, options, stop tokens, tokens at the most, and more of generate's options.
CASES: list[tuple[int, BeamOptions, list[int], int, dict[str, Any]]] = [
    (1, BeamOptions(2, results=2), [], 9, {}),
    (7, BeamOptions(4, results=4), [5, 9, 17], 20, {}),
    (8, BeamOptions(4, results=1), OFTEN, 30, {}),
    (8, BeamOptions(4, results=4), OFTEN, 30, {}),
    (9, BeamOptions(8, results=8), OFTEN, 25, {}),
    (30, BeamOptions(3, 0.0, results=3), OFTEN, 25, {}),
    (30, BeamOptions(3, 2.5, results=3), OFTEN, 40, {}),
    (30, BeamOptions(5, -1.0, results=2), OFTEN, 40, {}),
    (61, BeamOptions(5, 1.0, True, 5), OFTEN, 25, {}),
    (16, BeamOptions(4, 1.0, True, 4), [5, 9, 17], 17, {}),
    (12, BeamOptions(4, results=4), OFTEN, 25, {"min_new_tokens": 6}),
    (12, BeamOptions(4, results=4), OFTEN, 25, {"repetition_penalty": 1.3}),
    (12, BeamOptions(4, results=4), OFTEN, 25, {"bad_words_ids": [[11], [12, 13], [40]]}),
    (20, BeamOptions(6, results=6), OFTEN, 1, {}),
]


def options_of(given: dict[str, Any]) -> dict[str, Any]:
    """The engine's names of generate's options."""
    names = {"min_new_tokens": "min_tokens", "bad_words_ids": "bad_words"}
    values = {names.get(name, name): value for name, value in given.items()}
    if "bad_words" in values:
        values["bad_words"] = tuple(map(tuple, values["bad_words"]))
    return values


def submit(core: LocalCore, case: tuple[int, BeamOptions, list[int], int, dict[str, Any]]) -> int:
    length, options, stops, most, given = case
    return core.submit(
        prompt_of(length), max_tokens=most, stop_token_ids=stops, beams=options, **options_of(given)
    )


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[list[tuple[list[int], float]]]:
    loader: Any = transformers.AutoModelForCausalLM
    model = loader.from_pretrained(directory).eval()
    return [
        expected_beams(model, prompt_of(length), options, stops=stops, max_new_tokens=most, **given)
        for length, options, stops, most, given in CASES
    ]


def search_all(core: LocalCore) -> list[int]:
    """All searches at once, with sampled sequences among them."""
    keys: list[int] = []
    for number, case in enumerate(CASES):
        keys.append(submit(core, case))
        core.submit(prompt_of(20 + number), temperature=1.0, seed=number, max_tokens=12)
        core.step()
    core.run()
    return keys


def test_beams_are_those_of_transformers(directory: Path, expected: list[Any]) -> None:
    core = LocalCore(tiny_options(directory))
    for key, case, found in zip(search_all(core), CASES, expected, strict=True):
        check_beams(core, key, found, stops=case[2])
    assert core.engine.scheduler.load().used_blocks == 0
    assert len(core.work.beams) == 0


@pytest.mark.parametrize(
    "changes", [{"async_stepping": False, "enable_prefix_caching": False}, {"max_prefill_batch": 1}]
)
def test_neither_caching_nor_overlap_changes_them(
    directory: Path, expected: list[Any], changes: dict[str, Any]
) -> None:
    core = LocalCore(tiny_options(directory, **changes))
    for key, case, found in zip(search_all(core), CASES, expected, strict=True):
        check_beams(core, key, found, stops=case[2])


def test_static_shapes_find_the_same_and_nothing_is_new_after_warm_up(
    directory: Path, expected: list[Any]
) -> None:
    options = tiny_options(directory, warmup="full", bucketing_strategy="exponential")
    core = LocalCore(options, StaticCpu())
    for key, case, found in zip(search_all(core), CASES, expected, strict=True):
        check_beams(core, key, found, stops=case[2])
    assert core.engine.graphs.first_seen == 0


def test_searches_that_give_way_find_the_same(directory: Path, expected: list[Any]) -> None:
    # Blocks of two KiB each; one step at a time, so that any sequence may be preempted between two.
    options = {"kv_cache_gib": 36 * 2 / 2**20, "max_model_len": 104, "max_num_seqs": 20}
    core = LocalCore(tiny_options(directory, async_stepping=False, **options))
    scheduler: Any = core.engine.scheduler
    keys = [submit(core, case) for case in CASES]
    forced = 0
    for turn in range(2000):
        if not core.loop.work.busy:
            break
        core.turn()
        running = [one for one in scheduler.running.by_order if len(one.group.active) > 1]
        if turn % 9 == 8 and running:
            scheduler.planner.preempt(running[turn % len(running)])
            forced += 1
    for key, case, found in zip(keys, CASES, expected, strict=True):
        check_beams(core, key, found, stops=case[2])
    assert forced > 5
    scheduler.check()


def test_one_beam_is_greedy(directory: Path) -> None:
    core = LocalCore(tiny_options(directory))
    beam = core.submit(prompt_of(20), max_tokens=25, stop_token_ids=OFTEN, beams=BeamOptions(1))
    greedy = core.submit(prompt_of(20), max_tokens=25, stop_token_ids=OFTEN)
    core.run()
    end, other = core.outputs[beam].end, core.outputs[greedy].end
    assert end is not None
    assert other is not None
    assert end.hypotheses[0].token_ids == core.outputs[greedy].token_ids
    assert (end.reason, end.completion_tokens) == (other.reason, other.completion_tokens)


def test_log_probabilities_are_those_that_make_the_score(directory: Path) -> None:
    core = LocalCore(tiny_options(directory))
    options = BeamOptions(4, 0.7, results=4, top_logprobs=3)
    key = core.submit(prompt_of(20), max_tokens=12, stop_token_ids=OFTEN, beams=options, prompt_logprobs=1)
    core.run()
    end = core.outputs[key].end
    assert end is not None
    for one in end.hypotheses:
        assert one.sampled is not None
        assert one.score == pytest.approx(sum(one.sampled) / len(one.token_ids) ** 0.7, rel=1e-5)
        assert one.top_counts == [3] * len(one.token_ids)
        assert one.top_ids is not None
        assert one.top_logprobs is not None
        assert len(one.top_ids) == len(one.top_logprobs) == 3 * len(one.token_ids)
        assert one.sampled[0] <= one.top_logprobs[0] + 1e-6
    # The hypotheses' tokens scored as a prompt.
    best = end.hypotheses[0]
    again = core.submit(prompt_of(20) + best.token_ids, max_tokens=1, prompt_logprobs=0)
    core.run()
    scores = [value for value, _ in core.outputs[again].prompt][-len(best.token_ids) :]
    assert best.sampled == pytest.approx(scores, abs=1e-4)
    assert len(core.outputs[key].prompt) == 19


def test_beams_that_outgrow_the_pool_are_refused_by_name(directory: Path) -> None:
    core = LocalCore(tiny_options(directory, kv_cache_gib=0.0002, max_model_len=200))
    total = core.engine.ready.capacity.total_blocks
    alone, wide = (core.submit(prompt_of(5), beams=BeamOptions(width), max_tokens=190) for width in (1, 8))
    core.run()
    ends = [core.outputs[key].end for key in (alone, wide)]
    assert [end.error_param if end else "" for end in ends] == [None, "use_beam_search"]
    assert f"KV blocks of 8 tokens, and the engine has {total}" in str(ends[1] and ends[1].error_message)


def test_ends_of_all_kinds(directory: Path) -> None:
    core = LocalCore(tiny_options(directory, max_num_seqs=6))
    for options, text in (
        (BeamOptions(9), "max_beam_width"),
        (BeamOptions(7), "max_num_seqs"),
        (BeamOptions(2, results=3), "results"),
        (BeamOptions(2, float("nan")), "length_penalty"),
    ):
        refused = core.submit(prompt_of(5), beams=options)
        core.run()
        end = core.outputs[refused].end
        assert end is not None
        assert end.reason is FinishReason.ERROR
        assert text in str(end.error_message)
    aborted = core.submit(prompt_of(30), beams=BeamOptions(4), max_tokens=50)
    stuck = core.submit(prompt_of(9), beams=BeamOptions(2), allowed_token_ids=(5,), bad_words=((5,),))
    only = core.submit(
        prompt_of(9), beams=BeamOptions(2, results=2), allowed_token_ids=(5,), stop_token_ids=[5]
    )
    for _ in range(6):
        core.step()
    core.loop.handle(AbortSequences([aborted]))
    core.run()
    ends = [core.outputs[key].end for key in (aborted, stuck, only)]
    assert [end.reason if end else None for end in ends] == [
        FinishReason.ABORT,
        FinishReason.ERROR,
        FinishReason.STOP,
    ]
    last = ends[-1]
    assert last is not None
    # There is no other sequence that it could find.
    assert [one.token_ids for one in last.hypotheses] == [[5]]
    assert core.engine.scheduler.load().used_blocks == 0


def test_a_search_whose_numbers_break_ends_alone(directory: Path) -> None:
    core = LocalCore(tiny_options(directory, async_stepping=False))
    search = core.submit(prompt_of(30), beams=BeamOptions(4), max_tokens=20)
    other = core.submit(prompt_of(12), max_tokens=20)
    for _ in range(5):
        core.step()
    group = core.engine.scheduler.live[search].group
    assert group is not None
    block = group.active[1].block_table[-1]
    model: Any = core.engine.model
    for cache in model.caches:
        cache.key[block * 8 : block * 8 + 8] = float("nan")
    core.run()
    ends = [core.outputs[key].end for key in (search, other)]
    assert [end.reason if end else None for end in ends] == [FinishReason.ERROR, FinishReason.LENGTH]
    alone = core.submit(prompt_of(12), max_tokens=20, cache_salt="alone")
    core.run()
    assert core.outputs[alone].token_ids == core.outputs[other].token_ids
