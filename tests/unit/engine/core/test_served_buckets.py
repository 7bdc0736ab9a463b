"""A torch core records what it serves; buckets learned from that serve it again, with the same tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from services.engine.bucketing import (
    BucketLimits,
    covers_every_step,
    format_buckets,
    plan_of,
    read_bucket_file,
)
from services.engine.core.errors import StartError
from services.engine.core.process import start_engine
from services.engine.learning import Budget, Workload, fitted_times, learn_for, read_recording
from tests.support.torch_engine import VOCAB, LocalCore, save_tiny_model, tiny_options

LIMITS = BucketLimits(8, 128, 4, 24, 64, max_prefill_seqs=2)


def serve(directory: Path, **options: object) -> tuple[LocalCore, list[list[int]]]:
    core = LocalCore(
        tiny_options(directory, max_model_len=128, max_num_seqs=4, max_prefill_batch=2, **options)
    )
    draw = random.Random(3)
    keys = []
    for _ in range(24):
        prompt = [draw.randrange(3, VOCAB) for _ in range(draw.randint(1, 60))]
        keys.append(core.submit(prompt, max_tokens=draw.randint(1, 20)))
        core.step()
    core.run()
    core.engine.close()
    return core, [core.outputs[key].token_ids for key in keys]


def test_what_is_recorded_is_learned_and_served(tmp_path: Path) -> None:
    directory, record = save_tiny_model("llama", tmp_path / "model"), tmp_path / "lengths.jsonl"
    core, tokens = serve(directory, record_lengths=str(record))
    found = read_recording(record)
    assert sorted(item.output_tokens for item in found.lengths) == sorted(len(t) for t in tokens)
    assert sum(t.steps for t in found.timings) == core.link.sent[-1].load.steps
    assert all(t.seconds > 0 for t in found.timings)
    times = fitted_times(found.timings, block_size=8)
    workload = Workload.of(found.lengths, LIMITS, times, seed=1)
    file = tmp_path / "learned.txt"
    file.write_text(format_buckets(learn_for(workload, Budget(graphs=24))))
    plan = plan_of(read_bucket_file(file), LIMITS)
    assert covers_every_step(plan, LIMITS)
    again, same = serve(directory, bucketing_strategy="file", bucketing_file=str(file), warmup="full")
    assert same == tokens
    graphs = again.link.sent[-1].load.graphs
    assert graphs.first_seen == 0


def test_what_cannot_be_read_or_written_refuses_the_start(tmp_path: Path) -> None:
    directory, file = save_tiny_model("llama", tmp_path / "model"), tmp_path / "buckets.txt"
    file.write_text("(1, 8, 0)\n(1, eight, 0)\n")
    for options, reason in (
        ({"bucketing_strategy": "file", "bucketing_file": str(file)}, "line 2: query must be an int"),
        ({"bucketing_strategy": "file", "bucketing_file": "/nowhere"}, "bucket file /nowhere cannot be read"),
        ({"record_lengths": str(tmp_path)}, "cannot be written: Is a directory"),
    ):
        with pytest.raises(StartError, match=reason) as refused:
            start_engine(tiny_options(directory, **options), lambda activity, fraction: None)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("strategy", ["padding", "file", "linear"])
def test_strategies_do_not_show(strategy: str, tmp_path: Path) -> None:
    directory, file = save_tiny_model("llama", tmp_path / "model"), tmp_path / "buckets.txt"
    file.write_text("([1, 2], [8, 12], [0, 3])\n([1, 3], 1, [3, 9, 40])\n(9, 9, 9)\n")
    _, expected = serve(directory, bucketing_strategy="exponential")
    options: dict[str, dict[str, Any]] = {
        "file": {"bucketing_file": str(file)},
        "padding": {"bucketing_pad_max_blocks": 9},
        "linear": {"bucket_prefill_query": "min=3,step=5,max=11", "bucket_decode_batch": "max=2"},
    }
    _, tokens = serve(directory, bucketing_strategy=strategy, **options[strategy])
    assert tokens == expected
