"""Documents in the router: what it refuses before an engine sees it, and what an engine may answer."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from catenary.columns import MalformedStep, StepRow, take_message
from catenary.v1 import common_pb2
from services.router.admission import Refused
from services.router.dispatch.membership import check_hello
from tests.support.dispatcher import World
from tests.unit.router.dispatch.test_hello import hello

EMBED, SCORE, GENERATE, CLASSIFY = (
    common_pb2.MODEL_TASK_EMBED,
    common_pb2.MODEL_TASK_SCORE,
    common_pb2.MODEL_TASK_GENERATE,
    common_pb2.MODEL_TASK_CLASSIFY,
)
LABELS = ["bad", "so-so", "good"]
STOP = common_pb2.FINISH_REASON_STOP
WIDTH = 4


def world_of(*tasks: int) -> tuple[World, Any]:
    world = World()
    link = world.attach()
    link.engine.model.tasks.extend(tasks)
    link.engine.model.embedding_width = WIDTH if EMBED in tasks else 0
    link.engine.model.labels.extend(LABELS if CLASSIFY in tasks else [])
    return world, link


def document(task: Any = EMBED, **fields: Any) -> common_pb2.SequenceSpec:
    pooling = {name: fields.pop(name) for name in ("dimensions", "second_start") if name in fields}
    return common_pb2.SequenceSpec(
        model="m", token_ids=[1, 2, 3], pooling=common_pb2.Pooling(task=task, **pooling), **fields
    )


def ended(handle: int, vector: bytes | None, reason: Any = STOP, tokens: tuple[int, ...] = ()) -> Any:
    end = common_pb2.SequenceEnd(row=0, reason=reason, vector=vector)
    return common_pb2.StepOutput(handles=[handle], token_counts=[len(tokens)], token_ids=tokens, ends=[end])


def vector(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


@pytest.mark.parametrize(
    ("tasks", "spec", "param"),
    [
        ((EMBED,), common_pb2.SequenceSpec(model="m", token_ids=[1]), "model"),
        ((GENERATE,), document(), "model"),
        ((), document(), "model"),
        ((EMBED,), document(SCORE), "model"),
        ((EMBED,), document(GENERATE), "task"),
        ((EMBED,), document(99), "task"),
        ((EMBED,), document(dimensions=0), "dimensions"),
        ((EMBED,), document(dimensions=WIDTH + 1), "dimensions"),
        ((SCORE,), document(SCORE, dimensions=1), "dimensions"),
        ((CLASSIFY,), document(CLASSIFY, dimensions=1), "dimensions"),
        ((CLASSIFY,), document(SCORE), "model"),
        ((EMBED,), document(CLASSIFY), "model"),
        ((SCORE,), document(SCORE, second_start=0), "second_start"),
        ((SCORE,), document(SCORE, second_start=3), "second_start"),
        ((EMBED,), document(sampling=common_pb2.SamplingParams(seed=1)), "sampling"),
        ((EMBED,), document(stopping=common_pb2.StoppingParams(max_tokens=1)), "stopping"),
        ((EMBED,), document(response=common_pb2.ResponseOptions(top_logprobs=1)), "response"),
        ((EMBED,), document(beam_search=common_pb2.BeamSearch(width=1)), "beam_search"),
    ],
)
def test_what_is_refused(tasks: tuple[int, ...], spec: common_pb2.SequenceSpec, param: str) -> None:
    world, _ = world_of(*tasks)
    with pytest.raises(Refused) as caught:
        world.dispatcher.submit(1, spec, world.sink)
    assert caught.value.error.param == param
    assert (world.admission.live_sequences, world.admission.live_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("spec", "answer"),
    [
        (document(), vector(1, 0, 0, 0)),
        (document(dimensions=2), vector(0, 1)),
        (document(SCORE, second_start=1), vector(0.25)),
        (document(CLASSIFY), vector(0.25, 0.5, 0.25)),
        (document(CLASSIFY, second_start=1), vector(0, 1, 0)),
    ],
)
def test_a_vector_reaches_its_reader(spec: common_pb2.SequenceSpec, answer: bytes) -> None:
    world, link = world_of(EMBED, SCORE, CLASSIFY)
    world.dispatcher.submit(1, spec, world.sink)
    (handle,) = link.sequences
    assert not spec.HasField("sampling")
    world.dispatcher.on_step(link, ended(handle, answer))
    end: Any = world.sink.over[1]
    assert (end.reason, end.vector, end.usage.prompt_tokens) == (STOP, answer, 3)
    assert world.admission.live_sequences == 0


@pytest.mark.parametrize(
    "step",
    [
        {"vector": None},
        {"vector": b""},
        {"vector": vector(1, 0, 0)},
        {"vector": vector(1, 0, 0, 0, 0)},
        {"vector": vector(1, 0, 0, float("nan"))},
        {"vector": vector(float("inf"), 0, 0, 0)},
        {"vector": vector(1, 0, 0, 0), "reason": common_pb2.FINISH_REASON_LENGTH},
        {"vector": vector(1, 0, 0, 0), "tokens": (5,)},
    ],
)
def test_an_engine_that_breaks_the_contract_is_given_up(step: dict[str, Any]) -> None:
    world, link = world_of(EMBED)
    world.dispatcher.submit(1, document(), world.sink)
    (handle,) = link.sequences
    with pytest.raises(MalformedStep):
        world.dispatcher.on_step(link, ended(handle, **step))


def test_as_many_probabilities_as_classes() -> None:
    world, link = world_of(CLASSIFY)
    world.dispatcher.submit(1, document(CLASSIFY), world.sink)
    (handle,) = link.sequences
    with pytest.raises(MalformedStep, match="another width"):
        world.dispatcher.on_step(link, ended(handle, vector(0.5, 0.5)))


def test_a_vector_that_nobody_asked_for_is_taken_off() -> None:
    world, link = world_of(GENERATE)
    world.dispatcher.submit(1, common_pb2.SequenceSpec(model="m", token_ids=[1]), world.sink)
    (handle,) = link.sequences
    world.dispatcher.on_step(link, ended(handle, vector(1.0)))
    assert not world.sink.over[1].HasField("vector")


def test_messages_of_vectors_stay_small() -> None:
    big = bytes(4 * 65_536)
    rows = {
        handle: StepRow(handle, end=common_pb2.SequenceEnd(reason=STOP, vector=big)) for handle in range(9)
    }
    sizes = []
    while rows:
        sizes.append(len(take_message(rows).SerializeToString()))
    assert len(sizes) == 3
    assert max(sizes) < 2 << 20


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"model__tasks": [0]}, "tasks"),
        ({"model__tasks": [77]}, "tasks"),
        ({"model__tasks": [1] * 9}, "tasks"),
        ({"model__tasks": [EMBED]}, "embedding_width"),
        ({"model__tasks": [GENERATE], "model__embedding_width": 4}, "embedding_width"),
        ({"model__tasks": [EMBED], "model__embedding_width": 1 << 17}, "embedding_width"),
        (
            {"model__tasks": [EMBED], "model__embedding_width": 4, "model__embedding_dimensions": [5]},
            "embedding_dimensions",
        ),
        ({"model__tasks": [CLASSIFY]}, "labels"),
        ({"model__tasks": [GENERATE], "model__labels": LABELS}, "labels"),
        ({"model__tasks": [CLASSIFY], "model__labels": ["x"] * 1025}, "labels"),
        ({"model__tasks": [CLASSIFY], "model__labels": ["x" * 129]}, "labels"),
    ],
)
def test_hellos_of_pooled_models(changes: dict[str, Any], param: str) -> None:
    check_hello(hello(model__tasks=[EMBED], model__embedding_width=4, model__embedding_dimensions=[1, 4]))
    with pytest.raises(Refused) as caught:
        check_hello(hello(**changes))
    assert caught.value.error.param == param


def test_engines_of_one_name_serve_one_purpose() -> None:
    world, link = world_of(EMBED)
    other = common_pb2.ModelInfo()
    other.CopyFrom(link.engine.model)
    assert world.fleet.conflict(other, "another") is None
    other.embedding_width = 8
    assert "other tasks" in str(world.fleet.conflict(other, "another"))
    other.CopyFrom(link.engine.model)
    other.labels.append("x")
    assert "other tasks" in str(world.fleet.conflict(other, "another"))
