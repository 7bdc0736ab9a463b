"""The core's loop: one message a step, faults end only whom they concern, nothing is left when idle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.engine.core.errors import CoreFailure
from services.engine.domain import CoreErrorCode, FinishReason
from services.engine.link import AbortSequences, StopCore
from tests.support.torch_engine import VOCAB, LocalCore, save_tiny_model, tiny_options


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def core(directory: Path) -> LocalCore:
    return LocalCore(tiny_options(directory))


def assert_idle(core: LocalCore) -> None:
    load = core.engine.scheduler.load()
    assert (load.running, load.waiting, load.used_blocks, load.pending_prefill_tokens) == (0, 0, 0, 0)
    core.engine.scheduler.check()
    assert core.step() is None


def test_the_ready_message_tells_the_model(core: LocalCore) -> None:
    ready = core.engine.ready
    assert ready.model.max_model_len == 256
    assert ready.model.vocab_size == VOCAB
    assert ready.model.eos_token_ids == [2]
    assert ready.model.dtype == "float32"
    assert ready.capacity.max_batched_tokens == 24


@pytest.mark.parametrize(("overlaps", "pending"), [(False, 26), (True, 2)])
def test_every_step_is_one_message_with_its_load(directory: Path, overlaps: bool, pending: int) -> None:
    core = LocalCore(tiny_options(directory, async_stepping=overlaps))
    key = core.submit([5] * 50, max_tokens=3)
    steps = [core.step() for _ in range(5)]
    # 50 tokens in chunks of 24, then two decodes.
    assert [step.load.steps for step in steps if step] == [1, 2, 3, 4, 5]
    assert [len(step.columns.token_ids) for step in steps if step] == [0, 0, 1, 1, 1]
    first, last = steps[0], steps[-1]
    assert first is not None
    assert last is not None
    # The next chunk is planned already, or not.
    assert first.load.pending_prefill_tokens == pending
    assert last.load.generated_tokens == 3
    end = core.outputs[key].end
    assert end is not None
    assert (end.reason, end.prompt_tokens, end.completion_tokens) == (FinishReason.LENGTH, 50, 3)
    assert_idle(core)


def test_stop_tokens_min_tokens_and_ignore_eos(core: LocalCore) -> None:
    free = core.submit([9, 8, 7], max_tokens=12)
    core.run()
    tokens = core.outputs[free].token_ids
    stop = tokens[4]
    first = tokens.index(stop)
    stopped = core.submit([9, 8, 7], max_tokens=12, stop_token_ids=[stop])
    held = core.submit([9, 8, 7], max_tokens=12, stop_token_ids=[stop], min_tokens=first + 1)
    core.run()
    end = core.outputs[stopped].end
    assert end is not None
    assert (end.reason, end.stop_token_id) == (FinishReason.STOP, stop)
    assert core.outputs[stopped].token_ids == tokens[: first + 1]
    assert core.outputs[held].token_ids[:first] == tokens[:first]
    assert core.outputs[held].token_ids[first] != stop
    assert_idle(core)


def test_an_abort_ends_a_sequence_at_any_stage(core: LocalCore) -> None:
    waiting = core.submit([4] * 10)
    core.loop.handle(AbortSequences([waiting, 999]))
    core.step()
    prefilling = core.submit([4] * 60)
    core.step()
    core.loop.handle(AbortSequences([prefilling]))
    core.step()
    decoding = core.submit([4] * 10)
    for _ in range(3):
        core.step()
    core.loop.handle(AbortSequences([decoding, decoding]))
    core.step()
    core.loop.handle(AbortSequences([decoding]))
    assert_idle(core)
    for key, generated in ((waiting, 0), (prefilling, 0), (decoding, 3)):
        end = core.outputs[key].end
        assert end is not None
        assert (end.reason, end.completion_tokens) == (FinishReason.ABORT, generated)


@pytest.mark.advisory("CVE-2026-44223")
def test_what_cannot_run_is_refused_and_the_rest_goes_on(directory: Path) -> None:
    core = LocalCore(tiny_options(directory, max_num_seqs=2, max_waiting=0))
    good = [core.submit([3, 4, 5]), core.submit([6])]
    refused = {
        core.submit([3]): CoreErrorCode.OVERLOADED,
        core.submit([VOCAB]): CoreErrorCode.INVALID_ARGUMENT,
        core.submit([-1]): CoreErrorCode.INVALID_ARGUMENT,
        core.submit([]): CoreErrorCode.INVALID_ARGUMENT,
        core.submit([3] * 256): CoreErrorCode.CONTEXT_LENGTH_EXCEEDED,
    }
    core.run()
    for key, code in refused.items():
        end = core.outputs[key].end
        assert end is not None
        assert (end.reason, end.error_code) == (FinishReason.ERROR, code)
        assert end.error_message
    assert all(len(core.outputs[key].token_ids) == 16 for key in good)
    assert_idle(core)


def poison(core: LocalCore, call: int) -> None:
    """Makes the model's `call`-th decode from now give NaN in its first row, and write it to the KV."""
    calls = iter(range(1000))
    phases: Any = core.engine.runner.phases
    decode = phases.decode

    def poisoned(*tensors: torch.Tensor) -> None:
        decode(*tensors)
        if next(calls) == call:
            slot, row = tensors[2][0], tensors[7][0]
            phases.hidden[row] = torch.nan
            for cache in core.engine.model.caches:
                cache.key[slot] = torch.nan
                cache.value[slot] = torch.nan

    phases.decode = poisoned
    # It would find the tokens without showing the hidden states.
    phases.chooser = None


def test_a_result_that_is_not_a_number_ends_that_sequence_alone(core: LocalCore) -> None:
    prompts = [[7, 7, 9], [5, 11, 80, 3], [30] * 20]
    before = [core.submit(prompt) for prompt in prompts]
    core.run()
    poison(core, 4)
    after = [core.submit(prompt) for prompt in prompts]
    core.run()
    ends = [core.outputs[key].end for key in after]
    assert [end.reason for end in ends if end] == [
        FinishReason.ERROR,
        FinishReason.LENGTH,
        FinishReason.LENGTH,
    ]
    for old, new in zip(before[1:], after[1:], strict=True):
        assert core.outputs[old].token_ids == core.outputs[new].token_ids
    # What it left in its blocks does not reach their next owners.
    again = [core.submit(prompt) for prompt in prompts]
    core.run()
    for old, new in zip(before, again, strict=True):
        assert core.outputs[old].token_ids == core.outputs[new].token_ids
    assert_idle(core)


BAD = 101


def breaking_core(kind: str, directory: Path) -> LocalCore:
    """Its forwards compute NaN from the token BAD on, like an overflow. Not for tied embeddings."""
    file = save_tiny_model(kind, directory) / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][BAD] = torch.nan
    save_file(weights, file, metadata={"format": "pt"})
    return LocalCore(tiny_options(directory))


def planned(core: LocalCore) -> list[int]:
    """Keys of the sequences whose prompts the step in flight computes."""
    step = core.work.in_flight
    return [chunk.sequence.key for chunk in step.plan.prefills] if step else []


@pytest.mark.parametrize("kind", ["qwen2", "mistral"])
@pytest.mark.parametrize("ending", ["abort", "preempt"])
def test_a_prompt_that_ends_half_computed_leaves_no_nan_behind(
    tmp_path: Path, kind: str, ending: str
) -> None:
    core = breaking_core(kind, tmp_path)
    prompts = [[7, 7, 9], [5, 11, 80, 3], [30] * 27, [31] * 70]
    before = [core.submit(prompt) for prompt in prompts]
    core.run()
    neighbour = core.submit(prompts[3])
    core.step()
    broken = core.submit([4] * 3 + [BAD] * 60)
    core.step()
    # Its first chunk has to be in flight: what it does to the KV is not known yet.
    while broken not in planned(core):
        core.step()
    assert core.outputs[broken].end is None
    if ending == "preempt":
        scheduler: Any = core.engine.scheduler
        scheduler.planner.preempt(scheduler.live[broken])
    assert not core.outputs[broken].token_ids
    core.loop.handle(AbortSequences([broken]))
    again = [core.submit(prompt) for prompt in prompts]
    core.run()
    for old, new in zip([*before, before[3]], [*again, neighbour], strict=True):
        assert core.outputs[old].token_ids == core.outputs[new].token_ids
    assert_idle(core)


def test_nan_does_not_spread_through_padding(tmp_path: Path) -> None:
    core = breaking_core("qwen2", tmp_path)
    prompts = [[30] * 6, [31] * 70]
    before = [core.submit(prompt) for prompt in prompts]
    core.run()
    # The second chunk of the broken prompt has 3 tokens in a bucket of 8 and shares it with the neighbour,
    # whose context is all padding. Later chunks of the last prompt have padded context too.
    broken = core.submit([4] * 20 + [BAD] * 7)
    again = [core.submit(prompt) for prompt in prompts]
    core.run()
    end = core.outputs[broken].end
    assert end is not None
    assert end.reason is FinishReason.ERROR
    for old, new in zip(before, again, strict=True):
        assert core.outputs[old].token_ids == core.outputs[new].token_ids
    assert_idle(core)


def fail_times(core: LocalCore, count: int) -> None:
    executor: Any = core.engine.runner.executor
    forward = executor.forward
    left = [count]

    def failing(inputs: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise RuntimeError("the device is unhappy")
        return forward(inputs)

    executor.forward = failing


def test_a_failed_step_ends_its_sequences_and_the_core_goes_on(core: LocalCore) -> None:
    first = core.submit([5, 6])
    fail_times(core, 1)
    core.run()
    end = core.outputs[first].end
    assert end is not None
    assert (end.reason, end.error_code) == (FinishReason.ERROR, CoreErrorCode.INTERNAL)
    assert "unhappy" not in (end.error_message or "")
    second = core.submit([5, 6])
    core.run()
    assert len(core.outputs[second].token_ids) == 16
    assert_idle(core)


def test_steps_that_go_on_failing_end_the_core(core: LocalCore) -> None:
    fail_times(core, 3)
    core.submit([5, 6])
    core.step()
    core.submit([5, 6])
    core.step()
    core.submit([5, 6])
    with pytest.raises(CoreFailure, match="3 steps failed in a row"):
        core.step()


def test_stop_ends_the_loop(core: LocalCore) -> None:
    core.link.inbox.append(StopCore())
    core.loop.run()
    core.loop.handle(StopCore())
    core.loop.run()


def test_shapes_are_those_of_buckets(directory: Path) -> None:
    # A prefix hit would give the second round other steps.
    core = LocalCore(tiny_options(directory, enable_prefix_caching=False))
    for length in (1, 2, 3, 9, 30, 31, 60):
        core.submit([6] * length)
    core.run()
    seen = core.engine.device.execution.shapes.first_seen
    for length in (1, 2, 3, 9, 30, 31, 60):
        core.submit([6] * length)
    core.run()
    assert core.engine.device.execution.shapes.first_seen == seen
