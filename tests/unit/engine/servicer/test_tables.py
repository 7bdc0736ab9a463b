"""The servicer's pure parts: the sequence table, the step buffer, progress, the lease."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary.columns import MAX_STEP_WEIGHT, StepRow
from catenary.outbox import Steps
from catenary.schema import SCHEMA_REVISION
from catenary.v1 import common_pb2, engine_pb2
from services.engine.domain import CoreErrorCode, FinishReason
from services.engine.link import (
    ConstraintLoad,
    CoreLoad,
    CoreStep,
    EndRow,
    GraphLoad,
    PhaseLoad,
    StepColumns,
    TransferLoad,
)
from services.engine.servicer import EngineCollector, EngineFrontend, SequenceLimits
from services.engine.servicer.attachment import Lease, LeaseRefused
from services.engine.servicer.contract import rows_of
from services.engine.servicer.frontend import ProgressWatch
from services.engine.servicer.routers import LOAD_DUE, RouterOutbox
from services.engine.servicer.sequences import LiveSequence, SequenceTable


def _enter(table: SequenceTable, link: int, handle: int) -> LiveSequence:
    sequence = LiveSequence(table.new_key(), link, handle, "r", 3, 0)
    table.add(sequence)
    return sequence


def test_the_same_handle_on_two_links_is_two_sequences() -> None:
    table = SequenceTable(8)
    first, second = _enter(table, 1, 5), _enter(table, 2, 5)
    assert first.key != second.key
    assert table.find(1, 5) is first
    table.end(first)
    assert table.ended(1, 5)
    assert not table.ended(2, 5)
    assert table.known(2, 5)


def test_ended_handles_are_remembered_up_to_a_limit() -> None:
    table = SequenceTable(3)
    for handle in range(5):
        table.end(_enter(table, 1, handle))
    assert [handle for handle in range(5) if table.ended(1, handle)] == [2, 3, 4]


def test_a_lost_link_leaves_its_sequences_to_be_aborted_once() -> None:
    table = SequenceTable(8)
    first, other = _enter(table, 1, 1), _enter(table, 2, 1)
    aborting = _enter(table, 1, 2)
    aborting.aborting = True
    table.end(_enter(table, 1, 3))
    assert table.leave(1) == [first.key]
    assert len(table) == 3
    assert not any(table.known(1, handle) for handle in (1, 2, 3))
    table.end(first)
    assert table.take_all() == [other]
    assert len(table) == 0


def _steps() -> Steps[common_pb2.StepOutput]:
    return Steps(lambda step: step)


_COLUMNS = StepColumns(
    keys=[10, 11, 12],
    token_counts=[1, 0, 2],
    token_ids=[7, 8, 9],
    logprob_rows=[2],
    sampled=[-0.5, -1.0],
    top_counts=[1, 2],
    top_ids=[8, 9, 4],
    top_logprobs=[-0.5, -1.0, -2.0],
    ends=[
        EndRow(1, FinishReason.ERROR, 3, 0, 5, error_code=CoreErrorCode.OVERLOADED, error_message="Full."),
        EndRow(2, FinishReason.STOP, 3, 1, 2, stop_token_id=9),
    ],
)


def test_columns_split_into_rows() -> None:
    rows = {row.handle: row for row in rows_of(_COLUMNS)}
    assert rows[10].token_ids == [7]
    assert rows[10].logprobs is None
    assert rows[10].end is None
    error = rows[11].end
    assert error is not None
    assert error.error.code == common_pb2.ERROR_CODE_OVERLOADED
    assert error.error.retryable
    stopped = rows[12]
    assert stopped.logprobs is not None
    assert (stopped.logprobs.top_counts, stopped.logprobs.top_ids) == ([1, 2], [8, 9, 4])
    assert stopped.end is not None
    assert (stopped.end.reason, stopped.end.stop_token_id) == (common_pb2.FINISH_REASON_STOP, 9)
    assert stopped.end.usage.cached_tokens == 1


def test_rows_build_one_message_with_their_ends_in_place() -> None:
    buffer = _steps()
    for row in rows_of(_COLUMNS):
        buffer.add(row)
    step = buffer.pop()
    assert list(step.handles) == [10, 11, 12]
    assert list(step.token_counts) == [1, 0, 2]
    assert list(step.token_ids) == [7, 8, 9]
    assert list(step.logprobs.rows) == [2]
    assert [end.row for end in step.ends] == [1, 2]
    assert not buffer


def test_what_is_first_of_its_sequence_goes_before_the_rest_and_alone() -> None:
    box = RouterOutbox(1, max_answers=4)
    box.steps.add(StepRow(1, [10]))
    box.steps.add(StepRow(2, [20]), first=True)
    box.steps.add(StepRow(2, [21]))
    box.request_load()
    (first,) = box.take()
    assert (list(first.step.handles), list(first.step.token_ids)) == ([2], [20, 21])
    assert not box.empty
    # What follows is no first row any more, whatever else waits.
    box.steps.add(StepRow(2, [22]))
    box.steps.add(StepRow(1, [11]))
    rest, load = box.take()
    assert (list(rest.step.handles), list(rest.step.token_ids), load) == ([1, 2], [10, 11, 22], LOAD_DUE)
    assert box.empty


def test_what_is_first_of_its_sequence_holds_nothing_up_for_long() -> None:
    box = RouterOutbox(1, max_answers=1)
    box.steps.add(StepRow(1, [10]))
    box.refuse(9, common_pb2.Error(code=common_pb2.ERROR_CODE_OVERLOADED))
    box.request_load()
    taken = []
    for handle in (2, 3, 4):
        box.steps.add(StepRow(handle, [handle]), first=True)
        messages = box.take()
        kinds = [message.WhichOneof("payload") for message in messages]
        taken.append((kinds, [handle for message in messages for handle in message.step.handles]))
    assert taken == [
        (["step"], [2]),
        (["step", "step", "refusal", "load"], [3, 1]),
        (["step"], [4]),
    ]


def test_rows_that_are_too_much_for_one_message_make_several() -> None:
    buffer = _steps()
    for handle in range(5):
        buffer.add(StepRow(handle, [7] * (MAX_STEP_WEIGHT // 2 - 1)))
    found = []
    while buffer:
        found.append(list(buffer.pop().handles))
    assert found == [[0, 1], [2, 3], [4]]


@given(
    st.lists(
        st.dictionaries(st.integers(1, 4), st.lists(st.integers(0, 99), max_size=3), max_size=4), max_size=12
    ),
    st.sets(st.integers(0, 12)),
)
def test_merged_steps_hold_the_same_tokens_in_order(
    steps: list[dict[int, list[int]]], reads: set[int]
) -> None:
    buffer, want, got = _steps(), dict[int, list[int]](), dict[int, list[int]]()

    def read() -> None:
        step, offset = buffer.pop(), 0
        assert sum(step.token_counts) == len(step.token_ids)
        for handle, count in zip(step.handles, step.token_counts, strict=True):
            got.setdefault(handle, []).extend(step.token_ids[offset : offset + count])
            offset += count

    for number, step in enumerate(steps):
        columns = StepColumns(
            keys=list(step),
            token_counts=[len(tokens) for tokens in step.values()],
            token_ids=[token for tokens in step.values() for token in tokens],
        )
        for handle, tokens in step.items():
            want.setdefault(handle, []).extend(tokens)
        for row in rows_of(columns):
            buffer.add(row)
        if number in reads:
            read()
    read()
    assert got == want


def test_a_stall_counts_from_work_or_the_last_step() -> None:
    watch = ProgressWatch(10)
    assert not watch.stalled(1000)
    watch.on_work(1000)
    watch.on_work(1009)
    assert not watch.stalled(1010)
    assert watch.stalled(1010.1)
    watch.on_step(1011, more=True)
    assert not watch.stalled(1021)
    watch.on_step(1021, more=False)
    assert not watch.stalled(5000)
    watch.on_work(5000)
    watch.reset()
    assert not watch.stalled(9000)


def _attached(**fields: Any) -> engine_pb2.Attached:
    terms: dict[str, Any] = {
        "schema_revision": SCHEMA_REVISION,
        "lease_epoch": 4,
        "lease_ms": 9000,
        "report_interval_ms": 3000,
    }
    return engine_pb2.Attached(**{**terms, **fields})


def test_a_lease_runs_out_after_silence() -> None:
    lease = Lease(_attached(), now=100, orphan_timeout_s=60)
    assert (lease.epoch, lease.interval_s, lease.limit_s) == (4, 3, 9)
    assert lease.left_s(108) == 1
    lease.heard(108)
    assert lease.left_s(117) == 0
    assert Lease(_attached(), now=0, orphan_timeout_s=2).limit_s == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"schema_revision": 0},
        {"lease_epoch": 0},
        {"lease_ms": 0},
        {"report_interval_ms": 0},
        {"lease_ms": 3000},
    ],
)
def test_impossible_terms_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(LeaseRefused):
        Lease(_attached(**fields), now=0, orphan_timeout_s=60)


def test_metrics_come_from_the_frontend_with_state_and_phase_as_the_only_labels() -> None:
    frontend = EngineFrontend(
        stall_limit_s=1, limits=SequenceLimits(), remembered_handles=1, on_state=lambda _: None
    )
    metrics = {metric.name: metric for metric in EngineCollector(frontend).collect()}
    assert metrics["catenary_engine_running_sequences"].samples[0].value == 0
    assert metrics["catenary_engine_steps"].samples[0].name == "catenary_engine_steps_total"
    states = {sample.labels["state"]: sample.value for sample in metrics["catenary_engine_state"].samples}
    assert states == {"starting": 1, "serving": 0, "stalled": 0, "draining": 0, "not_serving": 0}
    labels = {label for m in metrics.values() for sample in m.samples for label in sample.labels}
    assert labels == {"state", "phase", "result", "direction"}


def test_metrics_tell_first_seen_shapes_padding_and_constraints() -> None:
    frontend = EngineFrontend(
        stall_limit_s=1, limits=SequenceLimits(), remembered_handles=1, on_state=lambda _: None
    )
    figures = GraphLoad(5, 2, prefill=PhaseLoad(100, 28, 4, 3), decode=PhaseLoad(10, 6, 40, 24))
    constraints = ConstraintLoad(4, 9, 1, masks=7, compile_seconds=0.5, mask_seconds=0.25)
    frontend.core_stepped(CoreStep(StepColumns(), CoreLoad(graphs=figures, constraints=constraints)))
    samples = {
        (
            sample.name.removeprefix("catenary_engine_"),
            sample.labels.get("phase") or sample.labels.get("result"),
        ): sample.value
        for metric in EngineCollector(frontend).collect()
        for sample in metric.samples
    }
    assert samples["captured_buckets", None] == 5
    assert samples["first_seen_shapes_total", None] == 2
    assert samples["tokens_total", "prefill"] == 100
    assert samples["padding_tokens_total", "prefill"] == 28
    assert samples["padding_tokens_total", "decode"] == 6
    assert samples["blocks_total", "decode"] == 40
    assert samples["padding_blocks_total", "decode"] == 24

    counts = [samples["constraints_total", name] for name in ("compiled", "reused", "refused")]
    assert counts == [4, 9, 1]
    assert samples["masked_steps_total", None] == 7
    assert samples["constraint_compile_seconds_total", None] == 0.5
    assert samples["mask_seconds_total", None] == 0.25


async def test_an_engine_is_not_idle_while_its_kv_is_to_be_fetched() -> None:
    frontend = EngineFrontend(
        stall_limit_s=1, limits=SequenceLimits(), remembered_handles=1, on_state=lambda _: None
    )
    frontend.core_stepped(CoreStep(StepColumns(), CoreLoad(transfers=TransferLoad(made=1, offers=1))))
    frontend.drain()
    idle = asyncio.create_task(frontend.idle())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not idle.done()
    frontend.core_stepped(CoreStep(StepColumns(), CoreLoad(transfers=TransferLoad(made=1, fetched=1))))
    await idle


def test_all_counters_go_on_over_cores_that_die_and_gauges_do_not() -> None:
    frontend = EngineFrontend(
        stall_limit_s=1, limits=SequenceLimits(), remembered_handles=1, on_state=lambda _: None
    )
    for count in (1, 2):
        frontend.core_lost()
        assert (frontend.load().used_blocks, frontend.graphs.captured, frontend.transfers.blocks) == (0, 0, 0)
        load = CoreLoad(
            used_blocks=4,
            steps=10 * count,
            graphs=GraphLoad(5, 2 * count, device={"replays": count}),
            constraints=ConstraintLoad(compiled=count, mask_seconds=0.5),
            transfers=TransferLoad(made=count, blocks=3, faults={"gone": count}),
        )
        frontend.core_stepped(CoreStep(StepColumns(), load))
    assert (frontend.load().steps, frontend.load().used_blocks) == (30, 4)
    assert (frontend.graphs.captured, frontend.graphs.first_seen, frontend.graphs.device) == (
        5,
        6,
        {"replays": 3},
    )
    assert (frontend.constraints.compiled, frontend.constraints.mask_seconds) == (3, 1.0)
    assert (frontend.transfers.made, frontend.transfers.blocks, frontend.transfers.faults) == (
        3,
        3,
        {"gone": 3},
    )


def test_prompts_are_counted_over_cores_that_die_and_under_both_names() -> None:
    frontend = EngineFrontend(
        stall_limit_s=1, limits=SequenceLimits(), remembered_handles=1, on_state=lambda _: None
    )
    frontend.core_stepped(
        CoreStep(StepColumns(), CoreLoad(prompt_tokens=90, cached_prompt_tokens=64, preemptions=2))
    )
    frontend.core_lost()
    frontend.core_stepped(CoreStep(StepColumns(), CoreLoad(prompt_tokens=10, cached_prompt_tokens=1)))
    load = frontend.load()
    assert (load.prompt_tokens, load.cached_prompt_tokens, load.preemptions) == (100, 65, 2)
    values = {sample.name: sample.value for m in EngineCollector(frontend).collect() for sample in m.samples}
    for ours, alias, value in (
        ("prompt_tokens", "prefix_cache_queries", 100),
        ("cached_prompt_tokens", "prefix_cache_hits", 65),
        ("preemptions", "num_preemptions", 2),
    ):
        assert values[f"catenary_engine_{ours}_total"] == values[f"vllm:{alias}_total"] == value
