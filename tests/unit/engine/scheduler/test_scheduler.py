from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from services.engine.bucketing import BucketLimits, build_plan
from services.engine.domain import CoreErrorCode, FinishReason, SamplingOptions
from services.engine.kv import BlockPool
from services.engine.link import SubmitSequence
from services.engine.scheduler import (
    Advanced,
    Finished,
    IllegalTransition,
    QueueFull,
    Scheduler,
    SchedulerConfig,
    SchedulerError,
    SchedulerLoad,
    Sequence,
    SequenceParams,
    SequenceRefused,
    SequenceStatus,
    StepPlan,
    sequence_from,
)
from tests.support.repository import ROOT

BLOCK = 4


def scheduler(
    blocks: int = 64,
    *,
    model_len: int = 64,
    seqs: int = 4,
    waiting: int = 4,
    tokens: int = 16,
    prefills: int = 1,
) -> Scheduler:
    config = SchedulerConfig(model_len, seqs, waiting, tokens, prefills)
    buckets = build_plan("exponential", BucketLimits(BLOCK, model_len, seqs, tokens, blocks, prefills))
    return Scheduler(config, BlockPool(blocks, BLOCK), buckets)


def sequence(key: int, length: int, params: SequenceParams | None = None, generated: int = 0) -> Sequence:
    tokens = list(range(100, 100 + length + generated))
    return Sequence(key, tokens, length, params or SequenceParams(max_tokens=20))


def step(under_test: Scheduler, token: int = 1) -> tuple[StepPlan, list[Any]]:
    plan = under_test.plan()
    assert plan is not None
    return plan, under_test.commit(plan, {s.key: token for s in plan.sampling()})


def chunks(plan: StepPlan) -> list[tuple[int, int, int, bool]]:
    return [(c.sequence.key, c.start, c.length, c.samples) for c in plan.prefills]


def decoding(plan: StepPlan) -> list[int]:
    return [row.sequence.key for row in plan.decodes]


def test_a_prompt_is_chunked_under_the_budget_and_then_decodes() -> None:
    engine = scheduler()
    one = sequence(1, 21)
    engine.add(one)
    assert engine.load() == SchedulerLoad(0, 1, 0, 21)
    plan, outcomes = step(engine)
    assert (chunks(plan), outcomes) == ([(1, 0, 16, False)], [])
    assert engine.load() == SchedulerLoad(1, 0, 6, 5)
    plan, outcomes = step(engine, token=9)
    assert chunks(plan) == [(1, 16, 5, True)]
    assert plan.bucket_prefill is not None
    assert plan.bucket_prefill.covers(1, 5, 4)
    assert outcomes == [Advanced(one, 9)]
    plan, _ = step(engine)
    assert decoding(plan) == [1]
    assert plan.decodes[0].position == 21
    assert one.num_generated_tokens == 2


def test_chunks_run_beside_decodes_and_end_on_block_boundaries() -> None:
    engine = scheduler()
    engine.add(sequence(1, 4))
    step(engine)
    engine.add(sequence(2, 40))
    starts = []
    while True:
        plan, _ = step(engine)
        assert 1 in decoding(plan)
        if not plan.prefills:
            break
        assert plan.num_tokens <= 16
        starts.append(plan.prefills[0].start)
    assert starts == [0, 12, 24, 36]


def test_several_prompts_share_a_forward_if_allowed() -> None:
    engine = scheduler(prefills=3)
    for key in (1, 2, 3, 4):
        engine.add(sequence(key, 4))
    plan, _ = step(engine)
    assert [c.sequence.key for c in plan.prefills] == [1, 2, 3]
    plan, _ = step(engine)
    assert ([c.sequence.key for c in plan.prefills], decoding(plan)) == ([4], [1, 2, 3])


def test_running_sequences_are_limited() -> None:
    engine = scheduler(seqs=2, prefills=4)
    for key in (1, 2, 3):
        engine.add(sequence(key, 4, SequenceParams(max_tokens=2)))
    plan, _ = step(engine)
    assert [c.sequence.key for c in plan.prefills] == [1, 2]
    plan, outcomes = step(engine)
    assert decoding(plan) == [1, 2]
    assert all(isinstance(outcome, Finished) for outcome in outcomes)
    plan, _ = step(engine)
    assert [c.sequence.key for c in plan.prefills] == [3]


def test_the_newest_gives_way_and_keeps_its_tokens() -> None:
    engine = scheduler(blocks=6, model_len=24)
    old, new = sequence(1, 7, SequenceParams(max_tokens=16)), sequence(2, 7, SequenceParams(max_tokens=16))
    engine.add(old)
    engine.add(new)
    seen = list[Sequence]()
    outcomes = list[Any]()
    while engine.has_work:
        plan = engine.plan()
        assert plan is not None
        for victim in plan.preempted:
            assert (victim, victim.status, victim.block_table) == (new, SequenceStatus.PREEMPTED, [])
            assert engine.load().waiting == 1
            assert engine.load().pending_prefill_tokens == len(victim.token_ids)
            seen.append(victim)
        outcomes += engine.commit(plan, {s.key: 1000 + s.num_generated_tokens for s in plan.sampling()})
    assert seen == [new]
    assert new.token_ids[7:] == old.token_ids[7:] == list(range(1000, 1016))
    assert len(outcomes) == 32
    engine.check()


def test_stop_ids_and_min_tokens() -> None:
    engine = scheduler()
    one = sequence(1, 3, SequenceParams(max_tokens=9, min_tokens=2, stop_ids=frozenset({5})))
    engine.add(one)
    plan, outcomes = step(engine, token=5)
    assert plan.prefills[0].mask_stops
    assert outcomes == [Advanced(one, 5)]
    plan, outcomes = step(engine, token=5)
    assert plan.decodes[0].mask_stops
    assert outcomes == [Advanced(one, 5)]
    plan, outcomes = step(engine, token=5)
    assert not plan.decodes[0].mask_stops
    assert outcomes == [Finished(one, 5, FinishReason.STOP, stop_token_id=5)]
    assert engine.load() == SchedulerLoad(0, 0, 0, 0)


def test_a_constrained_sequence_is_ended_by_its_constraint_alone() -> None:
    engine = scheduler()
    one = sequence(1, 3, SequenceParams(max_tokens=3, stop_ids=frozenset({5})))
    one.constrained = True
    engine.add(one)
    assert [step(engine, token=5)[1] for _ in range(2)] == [[Advanced(one, 5)]] * 2
    assert step(engine, token=5)[1] == [Finished(one, 5, FinishReason.LENGTH)]


def test_the_context_ends_a_sequence() -> None:
    engine = scheduler(model_len=10)
    one = sequence(1, 8, SequenceParams(max_tokens=50))
    engine.add(one)
    assert step(engine)[1] == [Advanced(one, 1)]
    assert step(engine)[1] == [Finished(one, 1, FinishReason.LENGTH)]
    assert len(one.token_ids) == 10


def test_an_earlier_life_counts_towards_max_tokens() -> None:
    engine = scheduler()
    one = sequence(1, 4, SequenceParams(max_tokens=3), generated=2)
    engine.add(one)
    plan, outcomes = step(engine)
    assert chunks(plan) == [(1, 0, 6, True)]
    assert outcomes == [Finished(one, 1, FinishReason.LENGTH)]


def test_abort_and_failure_between_plan_and_commit() -> None:
    engine = scheduler(prefills=2)
    for key in (1, 2, 3):
        engine.add(sequence(key, 4))
    step(engine)
    plan = engine.plan()
    assert plan is not None
    assert engine.abort(1)
    assert not engine.abort(1)
    failed = engine.end(2, FinishReason.ERROR)
    assert failed is not None
    assert (failed.reason, failed.token_id) == (FinishReason.ERROR, None)
    outcomes: list[Any] = engine.commit(plan, {3: 8})
    assert [outcome.sequence.key for outcome in outcomes] == [3]
    assert engine.abort(3)
    engine.check()
    assert engine.load() == SchedulerLoad(0, 0, 0, 0)
    assert engine.plan() is None


def test_a_full_queue_names_its_limit() -> None:
    engine = scheduler(seqs=1, waiting=1)
    engine.add(sequence(1, 4))
    engine.add(sequence(2, 4))
    with pytest.raises(QueueFull, match=r"max_waiting=1") as caught:
        engine.add(sequence(3, 4))
    assert (caught.value.limit, caught.value.value) == ("max_waiting", 1)
    assert engine.abort(2)
    engine.add(sequence(3, 4))


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (Sequence(1, [], 0, SequenceParams(max_tokens=1)), CoreErrorCode.INVALID_ARGUMENT),
        (Sequence(1, [1], 2, SequenceParams(max_tokens=1)), CoreErrorCode.INVALID_ARGUMENT),
        (Sequence(1, [1], 1, SequenceParams(max_tokens=0)), CoreErrorCode.INVALID_ARGUMENT),
        (Sequence(1, [1, 2], 1, SequenceParams(max_tokens=1)), CoreErrorCode.INVALID_ARGUMENT),
        (Sequence(1, [1] * 64, 64, SequenceParams(max_tokens=1)), CoreErrorCode.CONTEXT_LENGTH_EXCEEDED),
        (Sequence(1, [1] * 4, 4, SequenceParams(max_tokens=38)), CoreErrorCode.CONTEXT_LENGTH_EXCEEDED),
    ],
)
def test_what_can_never_run_is_refused(bad: Sequence, code: CoreErrorCode) -> None:
    engine = scheduler(blocks=10)
    with pytest.raises(SequenceRefused) as caught:
        engine.add(bad)
    assert caught.value.code is code
    assert not engine.has_work


def test_a_sequence_that_just_fits_the_pool_runs_to_its_end() -> None:
    engine = scheduler(blocks=10)
    one = sequence(1, 4, SequenceParams(max_tokens=37))
    engine.add(one)
    while engine.has_work:
        step(engine)
    assert one.num_generated_tokens == 37


def test_defects_are_reported() -> None:
    engine = scheduler()
    engine.add(sequence(1, 4))
    with pytest.raises(SchedulerError, match="already live"):
        engine.add(sequence(1, 4))
    plan = engine.plan()
    assert plan is not None
    with pytest.raises(SchedulerError, match="no token was sampled"):
        engine.commit(plan, {})
    with pytest.raises(SchedulerError, match="not the earliest"):
        engine.commit(plan, {1: 1})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0),
        ("max_prefill_seqs", 0),
        ("max_model_len", 1),
        ("max_waiting", -1),
        ("max_num_batched_tokens", 31),
        ("priority_ageing_steps", 0),
        ("max_block_moves", 0),
        ("max_idle_batched_tokens", 511),
    ],
)
def test_senseless_limits_are_named(option: str, value: int) -> None:
    limits: dict[str, Any] = {"max_model_len": 64, option: value}
    with pytest.raises(ValueError, match=option):
        SchedulerConfig(**limits)


@pytest.mark.parametrize(
    ("limits", "complaint"),
    [
        (BucketLimits(8, 64, 4, 16, 64), "blocks of 8 tokens"),
        (BucketLimits(BLOCK, 32, 4, 16, 64), "no prefill bucket"),
    ],
)
def test_buckets_that_do_not_reach_the_limits_are_refused(limits: BucketLimits, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Scheduler(SchedulerConfig(64, 4, 4, 16), BlockPool(64, BLOCK), build_plan("exponential", limits))


def test_a_status_only_changes_along_the_transitions() -> None:
    one = sequence(1, 4)
    with pytest.raises(IllegalTransition, match="cannot go from waiting to preempted"):
        one.preempt()
    one.run([3])
    assert one.preempt() == [3]
    assert one.num_preemptions == 1
    one.run([5])
    assert one.finish() == [5]
    assert one.finished
    with pytest.raises(IllegalTransition):
        one.run([])


@pytest.mark.parametrize(("ignore_eos", "stop_ids"), [(False, {2, 9}), (True, {9})])
def test_a_submit_becomes_a_sequence(ignore_eos: bool, stop_ids: set[int]) -> None:
    sampling = SamplingOptions(temperature=0.5, top_k=40, seed=11, bad_words=((1, 2),))
    submit = SubmitSequence(
        key=5,
        token_ids=[1, 2, 3],
        prompt_len=2,
        sampling=sampling,
        max_tokens=7,
        min_tokens=1,
        stop_token_ids=[9],
        ignore_eos=ignore_eos,
        priority=-2,
        cache_salt="ä",
    )
    made = sequence_from(submit, [2])
    assert (made.key, made.token_ids, made.prompt_len, made.num_generated_tokens) == (5, [1, 2, 3], 2, 1)
    assert made.params == SequenceParams(7, 1, frozenset(stop_ids), sampling, -2)
    assert made.cache_salt == "ä".encode()
    assert made.token_ids is not submit.token_ids


def test_the_pure_packages_import_neither_torch_nor_grpc() -> None:
    code = (
        "import sys, services.engine.scheduler, services.engine.bucketing, services.engine.kv\n"
        "import services.engine.link\n"
        "print(sorted({'torch', 'grpc', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    root = ROOT
    found = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    assert (found.stdout, found.stderr) == ("[]\n", "")
