"""Steps overlap: the next is planned and launched while the device computes one, and nobody can tell."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from services.engine.device.cpu import CpuDevice
from services.engine.domain import FinishReason
from services.engine.link import AbortSequences, StopCore
from services.engine.runner import PlanError
from tests.support.torch_engine import VOCAB, LocalCore, Output, save_tiny_model, tiny_options

WAIT_S = 30.0


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("tiny"))


def workload(core: LocalCore) -> list[int]:
    """Sequences of all sorts that start at different times: prompts of one and of many chunks."""
    rng = random.Random(11)
    sorts: list[dict[str, Any]] = [
        {},
        {"top_logprobs": 3},
        {"temperature": 0.9, "top_p": 0.9, "seed": 4, "top_logprobs": 0},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
        {"temperature": 1.2, "top_k": 7, "seed": 9, "repetition_penalty": 0.8},
        {"bad_words": ((5, 9), (11,)), "logit_bias": ((17, 4.0), (19, 4.0))},
        {"max_tokens": 1},
        {"min_tokens": 6, "stop_token_ids": list(range(0, VOCAB, 3))},
        {"temperature": 0.7, "stop_token_ids": list(range(0, VOCAB, 9)), "max_tokens": 30},
    ]
    keys: list[int] = []
    for turn in range(2):
        for options in sorts:
            prompt = [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 60))]
            keys.append(core.submit(prompt, **{"max_tokens": 10 + 3 * turn, **options}))
            core.step()
    core.run()
    return keys


def results(core: LocalCore, keys: list[int]) -> list[tuple[Any, ...]]:
    def reason(output: Output) -> tuple[Any, ...]:
        assert output.end is not None
        return output.end.reason, output.end.stop_token_id, output.end.completion_tokens

    outputs = [core.outputs[key] for key in keys]
    return [(output.token_ids, output.logprobs, output.tops, reason(output)) for output in outputs]


def test_overlapping_steps_give_what_single_steps_give(directory: Path) -> None:
    single = LocalCore(tiny_options(directory, async_stepping=False))
    overlapping = LocalCore(tiny_options(directory))
    expected = results(single, workload(single))
    got = results(overlapping, workload(overlapping))
    for (tokens, logprobs, tops, end), other in zip(expected, got, strict=True):
        assert (tokens, end) == (other[0], other[3])
        assert logprobs == pytest.approx(other[1], abs=1e-5)
        assert [list(top) for top in tops] == [list(top) for top in other[2]]
    assert {end[0] for *_, end in got} == {FinishReason.STOP, FinishReason.LENGTH}


def test_no_step_makes_more_than_one_copy_to_the_host(directory: Path) -> None:
    core = LocalCore(tiny_options(directory))
    before = core.engine.device.stream.host_copies
    workload(core)
    core.submit([9] * 60, prompt_logprobs=2)
    core.run()
    steps = core.link.sent[-1].load.steps
    assert steps > 40
    # Steps that find their tokens on the host make none.
    assert 0 < core.engine.device.stream.host_copies - before < steps == core.engine.runner.launches


def test_a_token_that_is_not_known_yet_stays_on_the_device(directory: Path) -> None:
    core = LocalCore(tiny_options(directory))
    plans: list[Any] = []
    launch = core.engine.runner.launch

    def noting(plan: Any, *, masked: bool) -> Any:
        plans.append(plan)
        return launch(plan, masked=masked)

    core.engine.runner.launch = noting  # type: ignore[assignment, method-assign]
    key = core.submit([5, 6, 7], max_tokens=6)
    core.run()
    rows = [row for plan in plans for row in plan.decodes]
    assert [row.token for row in rows] == [None] * 5
    phases: Any = core.engine.runner.phases
    # The row of the sequence holds its last token. The last but one was fed from there.
    assert int(phases.last_tokens[0]) == core.outputs[key].token_ids[-1]


def test_a_plan_overlaps_the_forward_before_it(directory: Path, tmp_path: Path) -> None:
    trace = tmp_path / "steps.json"
    core = LocalCore(tiny_options(directory, trace_steps=str(trace)))
    begun = [threading.Event() for _ in range(20)]
    planned = [threading.Event() for _ in range(20)]
    work: Any = core.work
    executor: Any = core.engine.runner.executor
    forward, plan, launch = executor.forward, core.engine.scheduler.plan, core.engine.runner.launch
    span, forwards, turns = core.engine.tracer.span, iter(range(1, 20)), iter(range(1, 20))

    def slow(inputs: Any) -> Any:
        step = next(forwards)
        begun[step].set()
        result = forward(inputs)
        assert planned[step + 1].wait(WAIT_S)
        return result

    def beside_a_forward(name: str, step: int | None = None, **args: Any) -> Any:
        if name == "plan":
            assert step is not None
            assert step == 1 or not work.busy or begun[step - 1].wait(WAIT_S)
        return span(name, step, **args)

    def planned_one() -> Any:
        step, found = next(turns), plan()
        if found is None:
            planned[step].set()
        return found

    def launched(*arguments: Any, **options: Any) -> Any:
        step = launch(*arguments, **options)
        planned[step.number].set()
        return step

    executor.forward = slow
    core.engine.tracer.span = beside_a_forward  # type: ignore[method-assign]
    core.engine.scheduler.plan = planned_one  # type: ignore[method-assign]
    core.engine.runner.launch = launched  # type: ignore[method-assign]
    core.submit([5, 6, 7], max_tokens=8)
    core.run()
    core.engine.close()
    events = json.loads(trace.read_text())
    # Those of the start's warm-up belong to no step.
    steps = [event for event in events if event["ph"] == "X" and "step" in event["args"]]
    spans = {(event["name"], event["args"]["step"]): event for event in steps}
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    for step in range(1, 8):
        running, following = spans["forward", step], spans["plan", step + 1]
        assert running["ts"] < following["ts"]
        assert following["ts"] + following["dur"] < running["ts"] + running["dur"]
        assert running["tid"] != following["tid"]
        assert threads[running["tid"]].startswith("device")
    names = {name for name, _ in spans}
    loop_spans, device_spans = {"plan", "prepare", "wait", "commit"}, {"step", "forward", "sample", "copy"}
    assert names == loop_spans | device_spans | {"prefill", "decode", "head", "clear"}


@pytest.mark.parametrize("stage", range(7))
def test_an_abort_while_a_step_is_in_flight_leaves_the_others_alone(directory: Path, stage: int) -> None:
    core = LocalCore(tiny_options(directory))
    prompts = [[7, 7, 9], [30] * 60, [5, 11, 80, 3]]
    before = [core.submit(prompt) for prompt in prompts]
    core.run()
    after = [core.submit(prompt) for prompt in prompts]
    for _ in range(stage):
        core.turn()
    core.loop.handle(AbortSequences([after[1]]))
    # Its blocks and its row go out again at once.
    late = core.submit([30] * 60)
    core.run()
    for old, new in ((0, after[0]), (2, after[2]), (1, late)):
        assert core.outputs[before[old]].token_ids == core.outputs[new].token_ids
    end = core.outputs[after[1]].end
    assert end is not None
    assert end.reason is FinishReason.ABORT
    assert core.outputs[after[1]].token_ids == core.outputs[before[1]].token_ids[: end.completion_tokens]
    core.engine.scheduler.check()
    assert core.engine.scheduler.load().used_blocks == 0


def test_a_failed_step_is_dropped_from_the_one_in_flight(directory: Path) -> None:
    core = LocalCore(tiny_options(directory))
    prompts = [[7, 7, 9], [5, 11, 80, 3]]
    before = [core.submit(prompt) for prompt in prompts]
    core.run()
    first = core.submit(prompts[0])
    core.step()
    core.step()
    # The step in flight has gone through its forward: the next one fails, not that.
    core.engine.device.stream.submit(lambda: None).result()
    executor: Any = core.engine.runner.executor
    forward = executor.forward
    begun, may_fail = threading.Event(), threading.Event()

    def failing(inputs: Any) -> Any:
        executor.forward = forward
        begun.set()
        assert may_fail.wait(WAIT_S)
        raise RuntimeError("the device is unhappy")

    executor.forward = failing
    # A step with the first sequence alone fails; the one behind it has both.
    core.turn()
    assert begun.wait(WAIT_S)
    second = core.submit(prompts[1])
    may_fail.set()
    core.run()
    end = core.outputs[first].end
    assert end is not None
    assert end.reason is FinishReason.ERROR
    assert core.outputs[second].token_ids == core.outputs[before[1]].token_ids
    assert len([1 for message in core.link.sent for row in message.columns.ends if row.error_code]) == 1
    core.engine.scheduler.check()


def test_a_third_step_waits_for_the_first(directory: Path) -> None:
    core = LocalCore(tiny_options(directory))
    runner, scheduler = core.engine.runner, core.engine.scheduler
    core.submit([5, 6, 7])
    first = runner.launch(_plan(scheduler))
    second = runner.launch(_plan(scheduler))
    with pytest.raises(PlanError, match="two steps are in flight"):
        runner.launch(second.plan)
    assert first.result().sampled
    assert second.result().sampled


def _plan(scheduler: Any) -> Any:
    plan = scheduler.plan()
    assert plan is not None
    return plan


def test_the_stream_computes_with_the_threads_of_the_options() -> None:
    device = CpuDevice(3)
    assert device.stream.submit(torch.get_num_threads).result() == 3
    device.stream.close()
    CpuDevice(1).stream.close()


def test_a_stop_waits_for_the_step_in_flight(directory: Path) -> None:
    core = LocalCore(tiny_options(directory))
    phases: Any = core.engine.runner.phases
    prefill = phases.prefill_sampled
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def slow(*tensors: torch.Tensor) -> Any:
        begun.set()
        assert may_end.wait(WAIT_S)
        ended.set()
        return prefill(*tensors)

    phases.prefill_sampled = slow
    core.submit([5, 6, 7])
    core.turn()
    core.loop.handle(StopCore())
    core.loop.run()
    assert begun.wait(WAIT_S)
    assert not ended.is_set()
    may_end.set()
    core.engine.close()
    assert ended.is_set()
