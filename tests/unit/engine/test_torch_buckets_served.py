"""From what an engine records to the bucket file that the next one serves with."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from services.engine.bucketing import BucketLimits, format_buckets, read_bucket_file
from services.engine.bucketing.learning import (
    Budget,
    SequenceLengths,
    StepTimes,
    Workload,
    learn_for,
    read_recording,
)
from services.engine.core.errors import StartError
from tests.support.torch_engine import LocalCore, save_tiny_model, tiny_options

LENGTHS = [(3, 5), (30, 2), (9, 12), (45, 7), (17, 1), (60, 20)]
TIMES = StepTimes(
    block_size=8,
    prefill_base=1e-3,
    prefill_token=1e-5,
    prefill_flat_tokens=0,
    prefill_pair=1e-8,
    decode_base=1e-3,
    decode_row=1e-5,
    decode_row_beyond=0,
    decode_flat_rows=8,
    decode_block=1e-5,
)


def serve(core: LocalCore) -> list[list[int]]:
    keys = [core.submit(list(range(3, 3 + prompt)), max_tokens=output) for prompt, output in LENGTHS]
    core.run()
    core.engine.close()
    return [core.outputs[key].token_ids for key in keys]


def test_recorded_lengths_become_the_buckets_of_the_next_start(tmp_path: Path) -> None:
    directory = save_tiny_model("llama", tmp_path / "model")
    recorded = tmp_path / "lengths.jsonl"
    first = serve(LocalCore(tiny_options(directory, record_lengths=str(recorded))))
    recording = read_recording(recorded)
    assert Counter(recording.lengths) == Counter(SequenceLengths(*pair) for pair in LENGTHS)
    assert sum(timing.steps for timing in recording.timings) > 10

    limits = BucketLimits(
        block_size=8, max_model_len=256, max_num_seqs=8, max_num_batched_tokens=24, num_blocks=60
    )
    workload = Workload.of(recording.lengths, limits, TIMES, seed=1)
    learned = learn_for(workload, Budget(graphs=12))
    file = tmp_path / "buckets.txt"
    file.write_text(format_buckets(learned))
    core = LocalCore(tiny_options(directory, bucketing_strategy="file", bucketing_file=str(file)))
    assert set(read_bucket_file(file)) == set(learned)
    assert serve(core) == first


@pytest.mark.parametrize(
    "option",
    [{"record_lengths": "/nowhere/x"}, {"bucketing_strategy": "file", "bucketing_file": "/nowhere/x"}],
)
def test_a_file_that_cannot_be_used_stops_the_start(tmp_path: Path, option: dict[str, str]) -> None:
    directory = save_tiny_model("llama", tmp_path / "model")
    with pytest.raises(StartError, match="/nowhere/x"):
        LocalCore(tiny_options(directory, **option))
