"""Whatever a random model wants to say, a constrained sequence says what its constraint allows."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from catenary.constraints import ConstraintKind
from services.engine.device import Device
from services.engine.domain import BeamOptions, ConstraintOptions
from tests.support.constrained import (
    SCHEMA,
    ended,
    regex,
    save_constrained_model,
    schema,
    settle_compile,
    text_of,
)
from tests.support.static_sampling import StaticCpu
from tests.support.tiny_tokenizer import EOS_ID, byte_ids
from tests.support.torch_engine import LocalCore, tiny_options

WAIT_S = 60.0
NAMES = "(anna|otto|eve)( [a-z]{1,4}){2}"
GRAMMAR = 'start: item ("," item){2}\nitem: /[0-9]{1,3}/ | "<" item ">"\n'


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_constrained_model(tmp_path_factory.mktemp("constrained"))


@pytest.fixture(scope="module")
def core(directory: Path) -> LocalCore:
    return LocalCore(tiny_options(directory))


SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 5.0, "top_p": 0.9},
    {"temperature": 2.0, "top_k": 3},
    {"temperature": 1.0, "min_p": 0.2, "repetition_penalty": 1.3},
    {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"temperature": 3.0, "logit_bias": ((EOS_ID, 50.0), (300, 20.0))},
    {"temperature": 1.0, "bad_words": ((byte_ids("a")[0],), tuple(byte_ids("ot")))},
    {"temperature": 1.0, "top_logprobs": 3},
    {"temperature": 4.0, "ignore_eos": True},
    {"temperature": 4.0, "ignore_eos": True, "stop_token_ids": [1]},
    {"temperature": 4.0, "min_tokens": 60, "ignore_eos": False},
    {"temperature": 4.0, "min_tokens": 60, "stop_token_ids": [1, 7]},
]


@pytest.mark.parametrize("sampling", SAMPLING)
def test_the_output_is_always_in_the_language(core: LocalCore, sampling: dict[str, Any]) -> None:
    keys: dict[int, ConstraintOptions] = {}
    grammar = ConstraintOptions(ConstraintKind.GRAMMAR, GRAMMAR)
    for seed in range(4):
        for constraint in (regex(NAMES), schema(SCHEMA), grammar):
            options = {"ignore_eos": False, "max_tokens": 200, "seed": seed, **sampling}
            keys[core.submit(byte_ids(f"p{seed}"), constraint=constraint, **options)] = constraint
    core.run(4000)
    for key, constraint in keys.items():
        output = core.outputs[key]
        if ended(output) == "length":
            # White space between two tokens of JSON is bounded, but it may be much.
            assert constraint.kind is ConstraintKind.JSON_SCHEMA
            continue
        assert ended(output) == "stop"
        text = text_of(core, output)
        if constraint.kind is ConstraintKind.JSON_SCHEMA:
            jsonschema.validate(json.loads(text), SCHEMA)
            assert "\\u" not in text
        elif constraint.kind is ConstraintKind.REGEX:
            assert re.fullmatch(NAMES, text)
        else:
            assert text.count(",") == 2
            assert re.fullmatch(r"[0-9<>,]+", text)
        if sampling.get("top_logprobs"):
            assert len(output.logprobs) == len(output.token_ids)
    core.engine.scheduler.check()


def test_log_probabilities_are_the_models_own(core: LocalCore) -> None:
    prompt = byte_ids("x")
    key = core.submit(prompt, constraint=regex("[0-9]{8}"), top_logprobs=2)
    core.run()
    found = core.outputs[key]
    free = core.submit(prompt, max_tokens=1, top_logprobs=2)
    core.run()
    assert list(found.tops[0]) == list(core.outputs[free].tops[0])
    assert found.logprobs[0] < min(found.tops[0].values())


def test_neighbours_do_not_notice(directory: Path) -> None:
    rng = random.Random(5)
    sorts: list[dict[str, Any]] = [{}, {"temperature": 1.0, "top_p": 0.9}, {"presence_penalty": 1.0}]
    prompts = [[rng.randrange(300, 500) for _ in range(rng.randint(1, 40))] for _ in range(6)]
    results = []
    # Without hits, so that forwards have the same shapes, whose sums are added up alike.
    core = LocalCore(tiny_options(directory, enable_prefix_caching=False))
    for constraint in (None, regex("[a-z ]*")):
        keys = []
        for index, prompt in enumerate(prompts):
            core.submit(prompt, constraint=constraint, temperature=1.0, seed=index)
            settle_compile(core)
            keys.append(core.submit(prompt, top_logprobs=1, **sorts[index % 3]))
            core.turn()
        core.run()
        results.append([(core.outputs[key].token_ids, core.outputs[key].logprobs) for key in keys])
    assert results[0] == results[1]


def test_steps_overlap_or_not_with_the_same_result(directory: Path) -> None:
    results = []
    for overlap in (True, False):
        core = LocalCore(tiny_options(directory, async_stepping=overlap))
        keys = [
            core.submit(byte_ids(f"p{seed}"), constraint=c, max_tokens=60, seed=seed, temperature=1.0)
            for seed in range(4)
            for c in (schema(SCHEMA), regex(NAMES))
        ]
        core.run()
        results.append([core.outputs[key].token_ids for key in keys])
    assert results[0] == results[1]


@pytest.mark.parametrize(
    "constraint", [regex(NAMES), schema(SCHEMA), regex(NAMES, "</think>"), regex(NAMES, "e")]
)
def test_a_resumed_sequence_goes_on_alike(core: LocalCore, constraint: ConstraintOptions) -> None:
    prompt = byte_ids("resume me")
    options: dict[str, Any] = {
        "constraint": constraint,
        "temperature": 1.0,
        "max_tokens": 30,
        "ignore_eos": False,
        # The marker as one token is what the model would say next to nothing else.
        "logit_bias": ((4, 3.0),),
    }
    key = core.submit(prompt, **options)
    core.run()
    whole = core.outputs[key]
    for cut in range(0, len(whole.token_ids) - 1, 5):
        again = core.submit([*prompt, *whole.token_ids[:cut]], prompt_len=len(prompt), **options)
        core.run()
        assert whole.token_ids[:cut] + core.outputs[again].token_ids == whole.token_ids
        assert ended(core.outputs[again]) == ended(whole)


@pytest.mark.parametrize("compiled", [False, True])
def test_samples_of_a_shared_prompt_are_those_of_their_own(directory: Path, compiled: bool) -> None:
    core = LocalCore(tiny_options(directory))
    prompt = byte_ids("a prompt of several blocks and chunks, which is computed once")
    options: dict[str, Any] = {"constraint": regex(NAMES), "temperature": 1.0, "max_tokens": 30}
    if compiled:
        core.submit(byte_ids("z"), **options)
        core.run()
    # Nobody's blocks are the others': another salt.
    alone = [core.submit(prompt, seed=seed, cache_salt=f"s{seed}", **options) for seed in range(4)]
    core.run()
    first = core.submit(prompt, seed=0, **options)
    others = [core.submit(prompt, seed=seed, same_prompt_as=first, **options) for seed in range(1, 4)]
    core.run()
    together = [core.outputs[key].token_ids for key in (first, *others)]
    assert together == [core.outputs[key].token_ids for key in alone]
    ends = [core.outputs[key].end for key in others]
    assert all(end is not None and end.cached_tokens > 0 for end in ends)


@pytest.mark.parametrize("device", [None, StaticCpu()], ids=["dynamic", "static"])
def test_beams_and_constraints_in_one_step(directory: Path, device: Device | None) -> None:
    results = []
    for beside in (False, True):
        core = LocalCore(tiny_options(directory), device)
        search = core.submit(byte_ids("b"), beams=BeamOptions(3, results=3), max_tokens=12)
        if beside:
            keys = [core.submit(byte_ids("c"), constraint=regex(NAMES), seed=seed) for seed in range(3)]
        core.run()
        end = core.outputs[search].end
        assert end is not None
        results.append([found.token_ids for found in end.hypotheses])
    assert all(re.fullmatch(NAMES, text_of(core, core.outputs[key])) for key in keys)
    assert results[0] == results[1]
    assert len(results[0]) == 3


def test_emitted_tokens_that_do_not_fit_are_refused(core: LocalCore) -> None:
    prompt = byte_ids("x")
    key = core.submit([*prompt, *byte_ids("zz")], prompt_len=1, constraint=regex("[0-9]+"))
    core.run()
    assert ended(core.outputs[key]) == "error:constraint"


def test_preempted_sequences_go_on(directory: Path) -> None:
    roomy = LocalCore(tiny_options(directory))
    tight = LocalCore(tiny_options(directory, max_model_len=96, kv_cache_gib=16 / 2**20))
    scheduler: Any = tight.engine.scheduler
    preempted: list[object] = []
    preempt = scheduler.planner.preempt

    def noted(victim: object) -> object:
        preempted.append(victim)
        return preempt(victim)

    scheduler.planner.preempt = noted
    results = []
    for core in (roomy, tight):
        keys = [
            core.submit(
                byte_ids(f"p{seed}"),
                constraint=regex("[a-z ]{70}x"),
                seed=seed,
                temperature=1.0,
                max_tokens=80,
            )
            for seed in range(8)
        ]
        core.run()
        assert all(ended(core.outputs[key]) == "stop" for key in keys)
        results.append([core.outputs[key].token_ids for key in keys])
    assert preempted
    assert results[0] == results[1]


def test_the_constraint_begins_behind_its_marker(core: LocalCore) -> None:
    compiler = core.engine.grammars.compiler
    assert compiler is not None
    bias = ((byte_ids("e")[0], 6.0), (4, 4.0))
    options: dict[str, Any] = {"temperature": 1.0, "max_tokens": 60, "logit_bias": bias}
    keys = {
        core.submit(byte_ids("m"), constraint=regex("[0-9]{3}", marker), seed=seed, **options): marker
        for seed in range(10)
        for marker in ("</think>", "e", "ee")
    }
    core.run()
    found = 0
    for key, marker in keys.items():
        output = core.outputs[key]
        text = b"".join(map(compiler.vocabulary.text, output.token_ids))
        _, seen, rest = text.partition(marker.encode())
        if ended(output) == "stop":
            assert re.fullmatch(rb"[0-9]{3}<\|im_end\|>", rest)
            found += 1
        else:
            assert not seen or re.fullmatch(rb"[0-9]{0,3}", rest)
    assert found > 10


def test_what_ends_the_text_is_let_through_at_its_end_alone(core: LocalCore) -> None:
    cases: list[tuple[dict[str, Any], int | None]] = [
        ({"ignore_eos": False, "min_tokens": 20}, EOS_ID),
        ({"ignore_eos": True}, EOS_ID),
        ({"ignore_eos": True, "stop_token_ids": [1]}, None),
        # An end that a ban forbids: the text is complete all the same.
        ({"ignore_eos": True, "bad_words": ((EOS_ID,),)}, None),
    ]
    for options, last in cases:
        for constraint in (regex("yes|no"), regex("ab{0,1}c")):
            key = core.submit(byte_ids("q"), constraint=constraint, max_tokens=30, **options)
            core.run()
            output = core.outputs[key]
            assert ended(output) == "stop"
            assert output.end is not None
            if last is not None:
                assert (output.token_ids[-1], output.end.stop_token_id) == (last, last)
    # One stop id among the text's own, below min_tokens.
    key = core.submit(
        byte_ids("q"), constraint=regex("ab{6}c"), min_tokens=30, stop_token_ids=byte_ids("b"), max_tokens=40
    )
    core.run()
    assert text_of(core, core.outputs[key]) == "abbbbbbc"


def test_where_nothing_can_follow_the_sequence_fails_alone(core: LocalCore) -> None:
    allowed = tuple(byte_ids("xyz"))
    stuck = core.submit(byte_ids("q"), constraint=regex("[0-9]{4}"), allowed_token_ids=allowed)
    fine = core.submit(byte_ids("q"), constraint=regex("[x-z]{4}"), allowed_token_ids=allowed)
    core.run()
    assert ended(core.outputs[stuck]) == "error:constraint"
    # The end is not among the allowed ids, and the text needs none.
    assert ended(core.outputs[fine]) == "stop"
    assert re.fullmatch("[x-z]{4}", text_of(core, core.outputs[fine]))


def test_no_stop_id_of_a_request_cuts_a_constrained_text(core: LocalCore) -> None:
    """Not one that spells a part of it, nor the model's own in a text that spells its name."""
    texts = ["a<|im_end|>b", "<|im_end|>", "banana"]
    options: list[dict[str, Any]] = [
        {},
        {"stop_token_ids": byte_ids("an")},
        {"ignore_eos": True, "stop_token_ids": byte_ids("<")},
        {"logit_bias": ((EOS_ID, 60.0),)},
    ]
    keys = {
        core.submit(
            byte_ids("q"), constraint=schema({"const": text}), max_tokens=60, temperature=1.0, **one
        ): json.dumps(text)
        for text in texts
        for one in options
    }
    core.run(2000)
    for key, text in keys.items():
        assert (ended(core.outputs[key]), text_of(core, core.outputs[key])) == ("stop", text)


def test_thoughts_are_not_ended_by_what_ends_an_answer(core: LocalCore) -> None:
    options: dict[str, Any] = {"constraint": regex("[0-9]{2}", "</think>"), "max_tokens": 40}
    liked = ((EOS_ID, 80.0),)
    key = core.submit(
        byte_ids("t"), ignore_eos=False, logit_bias=liked, stop_token_ids=byte_ids("e"), **options
    )
    thinks = core.submit(byte_ids("t"), ignore_eos=False, logit_bias=((4, 80.0), *liked), **options)
    core.run()
    assert ended(core.outputs[key]) in ("length", "stop")
    assert EOS_ID not in core.outputs[key].token_ids[:-1]
    assert ended(core.outputs[thinks]) == "stop"
    assert re.fullmatch("</think>[0-9]{2}", text_of(core, core.outputs[thinks]))
