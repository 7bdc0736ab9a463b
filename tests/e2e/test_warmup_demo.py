"""The demo model after a full warm-up: no request meets a shape that it did not see."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from services.engine.domain import FinishReason
from tests.support.torch_engine import LocalCore, core_options

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

LENGTH = 128


@pytest.mark.long
def test_20_requests_meet_no_new_shape(model_directory: Path, tmp_path: Path) -> None:
    core = LocalCore(
        core_options(
            model=str(model_directory),
            cache_dir=str(tmp_path),
            dtype="float32",
            max_model_len=LENGTH,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            max_prefill_batch=2,
            kv_cache_gib=0.25,
            warmup="full",
        )
    )
    seen = core.engine.device.execution.shapes.first_seen
    chance = random.Random(11)
    for _ in range(20):
        length = chance.randint(1, LENGTH - 1)
        core.submit(
            [chance.randrange(3, 40_000) for _ in range(length)],
            max_tokens=min(LENGTH - length, chance.randint(1, 8)),
        )
    core.run()
    ends = [output.end for output in core.outputs.values()]
    assert all(end is not None and end.reason is FinishReason.LENGTH for end in ends)
    assert core.engine.graphs.first_seen == 0
    assert core.engine.device.execution.shapes.first_seen == seen
