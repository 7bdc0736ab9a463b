"""Constrained sequences beside the steps: waiting for a grammar, refused, aborted, failing."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from catenary.constraints import ConstraintKind
from services.engine.domain import ConstraintOptions, CoreErrorCode, FinishReason
from services.engine.link import AbortSequences
from tests.support.constrained import ended, regex, save_constrained_model, schema, settle_compile, text_of
from tests.support.tiny_tokenizer import byte_ids
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


@pytest.mark.parametrize(
    "constraint",
    [
        regex("["),
        regex("(?<=a)b"),
        schema({"type": "stsring"}),
        ConstraintOptions(ConstraintKind.GRAMMAR, "rout: 'x'"),
        ConstraintOptions(ConstraintKind.STRUCTURAL_TAG, "{}"),
    ],
)
def test_a_bad_constraint_is_refused_alone(core: LocalCore, constraint: ConstraintOptions) -> None:
    bad = core.submit(byte_ids("q"), constraint=constraint)
    good = core.submit(byte_ids("q"))
    core.run()
    end = core.outputs[bad].end
    assert end is not None
    assert (end.error_code, end.error_param) == (CoreErrorCode.INVALID_ARGUMENT, "constraint")
    assert ended(core.outputs[good]) == "length"


class Held:
    """A backend that compiles when it is told to."""

    def __init__(self, core: LocalCore) -> None:
        compiler: Any = core.engine.grammars.compiler
        self.go = threading.Event()
        self._compile = compiler.backend.compile
        compiler.backend.compile = self.compile

    def compile(self, options: ConstraintOptions) -> Any:
        assert self.go.wait(WAIT_S)
        return self._compile(options)


def settle(core: LocalCore) -> None:
    """Turns until nothing waits or runs."""
    deadline = time.monotonic() + WAIT_S
    while core.loop.work.busy:
        assert time.monotonic() < deadline
        core.turn()


def test_a_sequence_waits_for_its_constraint_and_holds_up_nobody(directory: Path) -> None:
    core = LocalCore(tiny_options(directory, grammar_queue=3))
    held = Held(core)
    waiting = [core.submit(byte_ids("w"), constraint=regex(source)) for source in ("a{3}", "a{3}", "b{3}")]
    over = core.submit(byte_ids("w"), constraint=regex("c{3}"))
    other = core.submit(byte_ids("w"), max_tokens=5)
    while core.outputs[other].end is None:
        report = core.turn()
        assert report is None or report.load.waiting == 3
    end = core.outputs[over].end
    assert end is not None
    assert end.error_code is CoreErrorCode.OVERLOADED
    assert "grammar_queue" in str(end.error_message)
    core.loop.handle(AbortSequences([waiting[0]]))
    core.turn()
    assert ended(core.outputs[waiting[0]]) == "abort"
    held.go.set()
    settle(core)
    assert [text_of(core, core.outputs[key]) for key in waiting] == ["", "aaa", "bbb"]
    load = core.link.sent[-1].load
    assert (load.waiting, load.running, load.used_blocks) == (0, 0, 0)
    assert load.constraints.compiled == 2
    assert load.constraints.reused >= 1
    assert load.constraints.compile_seconds > 0
    assert load.constraints.mask_seconds > 0


def test_who_waits_too_long_is_refused(directory: Path) -> None:
    core = LocalCore(tiny_options(directory, grammar_timeout_s=0.05))
    held = Held(core)
    key = core.submit(byte_ids("w"), constraint=regex("a{3}"))
    settle(core)
    held.go.set()
    assert ended(core.outputs[key]) == "error:constraint"
    end = core.outputs[key].end
    assert end is not None
    assert "grammar_timeout_s" in str(end.error_message)


@pytest.mark.advisory("GHSA-hf3c-wxg2-49q9")
def test_the_last_compiled_constraints_are_kept(directory: Path) -> None:
    core = LocalCore(tiny_options(directory, grammar_cache=2))
    for source in ("a{3}", "b{3}", "a{3}", "c{3}", "b{3}", "a{3}"):
        core.submit(byte_ids("w"), constraint=regex(source))
        settle(core)
    assert core.link.sent[-1].load.constraints.compiled == 5


@pytest.mark.parametrize("stage", range(7))
def test_an_abort_in_flight_leaves_the_others_alone(core: LocalCore, stage: int) -> None:
    options: dict[str, Any] = {"constraint": regex(NAMES), "temperature": 1.0}
    keys = [core.submit(byte_ids(f"p{seed}"), seed=seed, **options) for seed in range(3)]
    core.run()
    again = [core.submit(byte_ids(f"p{seed}"), seed=seed, **options) for seed in range(3)]
    for _ in range(stage):
        core.turn()
    core.loop.handle(AbortSequences([again[1]]))
    core.run()
    assert ended(core.outputs[again[1]]) == "abort"
    for index in (0, 2):
        assert core.outputs[again[index]].token_ids == core.outputs[keys[index]].token_ids
    assert core.engine.scheduler.load().used_blocks == 0


@pytest.mark.parametrize("way", ["fill", "accept"])
def test_a_matcher_that_fails_ends_its_sequence_alone(core: LocalCore, way: str) -> None:
    options: dict[str, Any] = {"constraint": regex(NAMES), "temperature": 1.0}
    expected = core.submit(byte_ids("n"), **options)
    core.run()
    broken = core.submit(byte_ids("b"), **options)
    beside = core.submit(byte_ids("n"), **options)
    for _ in range(4):
        core.turn()
    work: Any = core.work
    restriction = work.constrained.restrictions[broken]
    if way == "fill":
        # A token that may not follow: the matcher is in its error state from now on.
        restriction.matcher.accept([byte_ids("!")[0]])
    else:
        restriction.matcher.accept = lambda token_ids: False
    core.run()
    end = core.outputs[broken].end
    assert end is not None
    assert (end.reason, end.error_code) == (FinishReason.ERROR, CoreErrorCode.INVALID_ARGUMENT)
    assert end.error_param == "constraint"
    assert core.outputs[beside].token_ids == core.outputs[expected].token_ids
    assert not work.constrained.restrictions


def test_masks_are_filled_while_the_device_computes(directory: Path, tmp_path: Path) -> None:
    trace = tmp_path / "steps.json"
    core = LocalCore(tiny_options(directory, trace_steps=str(trace)))
    model: Any = core.engine.model
    constrained: Any = core.work.constrained
    restrict = constrained.restrict
    begun, filled = threading.Semaphore(0), threading.Semaphore(0)

    def slow(forward: Any) -> Any:
        def run(*inputs: Any) -> Any:
            begun.release()
            assert filled.acquire(timeout=WAIT_S)
            return forward(*inputs)

        return run

    def beside_a_forward(step: Any) -> None:
        assert step.awaits_masks
        assert begun.acquire(timeout=WAIT_S)
        sample, masks = step.sample, []

        def noted(found: Any) -> Any:
            masks.append(found)
            return sample(found)

        step.sample = noted
        restrict(step)
        assert masks[0] is not None
        filled.release()

    core.submit(byte_ids("q"), constraint=regex("[a-z]{40}"), max_tokens=8)
    settle_compile(core)
    # A prompt whose end is all that is wanted goes through `select` where the model has one.
    prompts = "prefill" if model.select is None else "select"
    setattr(model, prompts, slow(getattr(model, prompts)))
    model.decode = slow(model.decode)
    constrained.restrict = beside_a_forward
    core.run()
    core.engine.close()
    events = json.loads(trace.read_text())
    spans = {
        (event["name"], event["args"]["step"]): event
        for event in events
        if event["ph"] == "X" and "step" in event["args"]
    }
    for step in range(1, 8):
        running, masks = spans["forward", step], spans["masks", step]
        assert running["ts"] < masks["ts"]
        assert masks["ts"] + masks["dur"] < running["ts"] + running["dur"]
        assert running["tid"] != masks["tid"]
        assert spans["tail", step]["ts"] > running["ts"] + running["dur"]


def test_a_model_without_a_tokenizer_takes_no_constraints(tmp_path: Path) -> None:
    save_constrained_model(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": 3}}')
    core = LocalCore(tiny_options(tmp_path))
    key = core.submit(byte_ids("q"), constraint=regex("a"))
    free = core.submit(byte_ids("q"))
    core.run()
    assert ended(core.outputs[key]) == "error:constraint"
    assert ended(core.outputs[free]) == "length"
