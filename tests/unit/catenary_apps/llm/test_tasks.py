"""What an offline LLM asks of the gateway's pooling service: tasks, which are not answered over HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from catenary.v1 import common_pb2
from catenary_apps.llm.endpoint import LIMITS, DocumentTask, PairTask
from gateway.pooling.service import PooledEndpoint, PooledTask


@pytest.mark.parametrize("kind", [DocumentTask, PairTask])
def test_a_task_writes_no_json_and_leaves_nothing_unimplemented(kind: type[PooledTask[Any]]) -> None:
    """The answers of `LLM` are objects: only the tasks of HTTP routes write JSON."""
    assert issubclass(kind, PooledTask)
    assert not issubclass(kind, PooledEndpoint)
    assert not hasattr(kind, "write")
    assert not kind.__abstractmethods__
    assert PooledEndpoint.__abstractmethods__ == {"parse", "work", "write"}


def test_tasks_read_their_requests() -> None:
    task = DocumentTask((common_pb2.MODEL_TASK_EMBED,))
    assert task.parse({"model": "m", "prompt": [1, 2], "dimensions": 3}, LIMITS).prompt == [1, 2]
    assert PairTask().parse({"model": "m", "first": ["a"], "second": ["b"]}, LIMITS).second == ["b"]
