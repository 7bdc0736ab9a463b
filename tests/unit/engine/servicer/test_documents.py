"""Admission of documents in the engine's servicer."""

from __future__ import annotations

from typing import Any

import pytest

from catenary.v1 import common_pb2
from services.engine.domain import PoolingOptions
from services.engine.link import CapacityFacts, ModelFacts
from services.engine.servicer import Admission, SequenceLimits
from services.engine.servicer.admission import Inadmissible

EMBED, SCORE = common_pb2.MODEL_TASK_EMBED, common_pb2.MODEL_TASK_SCORE
CAPACITY = CapacityFacts(block_size=1, total_blocks=64, max_running=4, max_waiting=4, max_batched_tokens=64)


def admission(task: str = "embed", **facts: Any) -> Admission:
    width = 8 if task == "embed" else 0
    model = ModelFacts(
        max_model_len=10,
        vocab_size=100,
        eos_token_ids=[],
        dtype="float32",
        tokenizer_sha256="",
        task=task,
        embedding_width=width,
        **facts,
    )
    return Admission("m", model, CAPACITY, SequenceLimits(4, 3, 2, 3))


def spec(task: Any = EMBED, ids: tuple[int, ...] = (1, 2, 3), **fields: Any) -> common_pb2.SequenceSpec:
    pooling = {name: fields.pop(name) for name in ("dimensions", "second_start", "raw") if name in fields}
    return common_pb2.SequenceSpec(
        model="m", token_ids=ids, pooling=common_pb2.Pooling(task=task, **pooling), **fields
    )


@pytest.mark.parametrize(
    ("task", "wanted", "param"),
    [
        ("generate", spec(), "model"),
        ("score", spec(), "model"),
        ("classify", spec(SCORE), "model"),
        ("embed", spec(SCORE), "model"),
        ("embed", common_pb2.SequenceSpec(model="m", token_ids=[1]), "model"),
        ("embed", spec(ids=()), "input"),
        ("embed", spec(ids=(1,) * 11), "input"),
        ("embed", spec(ids=(100,)), "input"),
        ("embed", spec(prompt_len=2), "prompt_len"),
        ("embed", spec(dimensions=9), "dimensions"),
        ("embed", spec(dimensions=3), "dimensions"),
        ("score", spec(SCORE, second_start=3), "second_start"),
        ("embed", spec(sampling=common_pb2.SamplingParams(seed=1)), "sampling"),
        ("embed", spec(constraint=common_pb2.Constraint(source="x")), "constraint"),
    ],
)
def test_what_is_refused(task: str, wanted: common_pb2.SequenceSpec, param: str) -> None:
    with pytest.raises(Inadmissible) as caught:
        admission(task).resolve(wanted, 1)
    assert caught.value.error.param == param


def test_what_is_taken() -> None:
    whole = admission().resolve(spec(priority=3, dimensions=8), 5)
    assert (whole.key, whole.token_ids, whole.prompt_len, whole.priority) == (5, [1, 2, 3], 3, 3)
    assert whole.pooling == PoolingOptions()
    listed = admission(embedding_dimensions=[2, 4]).resolve(spec(dimensions=4), 1)
    assert listed.pooling == PoolingOptions(dimensions=4)
    anything = admission(any_dimensions=True).resolve(spec(dimensions=5), 1)
    assert anything.pooling == PoolingOptions(dimensions=5)
    pair = admission("score").resolve(spec(SCORE, second_start=2), 1)
    assert pair.pooling == PoolingOptions(second_start=2)
    raw = admission("classify").resolve(spec(common_pb2.MODEL_TASK_CLASSIFY, raw=True), 1)
    assert raw.pooling == PoolingOptions(raw=True)
    # Not a token more has to fit.
    assert len(admission().resolve(spec(ids=(1,) * 10), 1).token_ids) == 10
