"""A hello that is out of bounds, in each of its parts."""

from __future__ import annotations

from typing import Any

import pytest

from catenary.schema import MINIMUM_PEER_REVISION, SCHEMA_REVISION
from catenary.v1 import common_pb2, engine_pb2
from services.router.admission import Refused
from services.router.dispatch.membership import check_hello


def hello(**changes) -> engine_pb2.EngineHello:
    """A good hello with changes, of which `model_` and `capacity_` go into those."""
    model: dict[str, Any] = {
        "name": "m",
        "max_model_len": 64,
        "vocab_size": 100,
        "eos_token_ids": [1, 99],
        "dtype": "float32",
        "tokenizer_sha256": "0f" * 32,
    }
    capacity: dict[str, Any] = {"block_size": 16, "total_blocks": 64, "max_running": 3}
    fields: dict[str, Any] = {
        "schema_revision": SCHEMA_REVISION,
        "minimum_peer_revision": MINIMUM_PEER_REVISION,
        "instance_id": "i",
        "engine_name": "e",
        "version": "1",
        "device": "cpu",
        "state": engine_pb2.ENGINE_STATE_STARTING,
    }
    for name, value in changes.items():
        part, _, field = name.partition("__")
        {"model": model, "capacity": capacity}.get(part, fields)[field or part] = value
    return engine_pb2.EngineHello(
        model=common_pb2.ModelInfo(**model), capacity=engine_pb2.Capacity(**capacity), **fields
    )


def test_good_hellos_pass():
    check_hello(hello())
    check_hello(hello(version="", device="", model__dtype="", model__tokenizer_sha256=""))
    check_hello(hello(model__eos_token_ids=list(range(64)), capacity__max_waiting=1 << 20))
    check_hello(hello(model__eos_token_ids=[], model__vocab_size=1 << 24, model__max_model_len=1 << 24))


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"instance_id": ""}, "instance_id"),
        ({"instance_id": "x" * 257}, "instance_id"),
        ({"engine_name": "x" * 257}, "engine_name"),
        ({"model__name": ""}, "model"),
        ({"version": "x" * 65}, "version"),
        ({"device": "x" * 65}, "device"),
        ({"model__dtype": "x" * 65}, "dtype"),
        ({"model__tokenizer_sha256": "x" * 64}, "tokenizer_sha256"),
        ({"model__tokenizer_sha256": "0" * 65}, "tokenizer_sha256"),
        ({"model__tokenizer_sha256": "0" * 64 + "\n"}, "tokenizer_sha256"),
        ({"model__max_model_len": 0}, "max_model_len"),
        ({"model__max_model_len": (1 << 24) + 1}, "max_model_len"),
        ({"model__vocab_size": 0}, "vocab_size"),
        ({"model__vocab_size": (1 << 24) + 1}, "vocab_size"),
        ({"model__eos_token_ids": list(range(65))}, "eos_token_ids"),
        ({"model__eos_token_ids": [1] * 1_000_000}, "eos_token_ids"),
        ({"model__eos_token_ids": [3, 100]}, "eos_token_ids"),
        ({"capacity__block_size": 0}, "block_size"),
        ({"capacity__block_size": (1 << 16) + 1}, "block_size"),
        ({"capacity__total_blocks": 0}, "total_blocks"),
        ({"capacity__total_blocks": (1 << 31) + 1}, "total_blocks"),
        ({"capacity__max_running": 0}, "max_running"),
        ({"capacity__max_running": (1 << 20) + 1}, "max_running"),
        ({"capacity__max_waiting": (1 << 20) + 1}, "max_waiting"),
        ({"capacity__max_batched_tokens": (1 << 24) + 1}, "max_batched_tokens"),
        ({"state": 0}, "state"),
        ({"state": 77}, "state"),
        ({"state": -1}, "state"),
    ],
)
def test_a_hello_out_of_bounds_is_refused_and_the_part_named(changes, param):
    with pytest.raises(Refused) as caught:
        check_hello(hello(**changes))
    error = caught.value.error
    assert error.code == common_pb2.ERROR_CODE_INVALID_ARGUMENT
    assert error.param == param
    assert param in error.message
    assert len(error.message) < 200
