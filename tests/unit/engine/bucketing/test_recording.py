"""What an engine records, how it is read, and step times fitted to it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from services.engine.bucketing import Bucket, Recorder
from services.engine.learning import (
    ModelCost,
    SequenceLengths,
    StepTimes,
    StepTiming,
    chat_lengths,
    estimated_times,
    fitted_times,
    read_recording,
)

TIMES = StepTimes(
    block_size=32,
    prefill_base=0.004,
    prefill_token=2e-5,
    prefill_flat_tokens=0.0,
    prefill_pair=3e-9,
    decode_base=0.003,
    decode_row=1e-5,
    decode_row_beyond=4e-5,
    decode_flat_rows=16.0,
    decode_block=2e-6,
)


def test_lengths_and_steps_are_appended_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text('{"prompt_tokens": 9, "output_tokens": 1}\n')
    recorder = Recorder(path, buffered=2)
    recorder.sequence(10, 0)
    recorder.step(None, Bucket(2, 1, 4), 0.25)
    recorder.step(None, Bucket(2, 1, 4), 0.5)
    recorder.step(Bucket(1, 32, 0), None, 0.125)
    recorder.sequence(11, 5)
    assert len(path.read_text().splitlines()) == 1
    recorder.sequence(12, 6)
    recorder.sequence(13, 7)
    recorder.flush()
    found = read_recording(path)
    assert found.lengths == tuple(SequenceLengths(*pair) for pair in ((9, 1), (11, 5), (12, 6), (13, 7)))
    assert found.timings == (
        StepTiming(None, Bucket(2, 1, 4), 2, 0.75),
        StepTiming(Bucket(1, 32, 0), None, 1, 0.125),
    )


def test_the_file_stays_within_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    recorder = Recorder(path, max_bytes=500, buffered=3)
    for count in range(1, 100):
        recorder.sequence(count, count)
        recorder.step(None, Bucket(count, 1, count), 0.1)
    recorder.flush()
    assert recorder.full
    assert path.stat().st_size <= 500
    assert len(read_recording(path).lengths) >= 3
    before = path.read_bytes()
    again = Recorder(path, max_bytes=path.stat().st_size)
    again.sequence(5, 5)
    again.flush()
    assert again.full
    assert path.read_bytes() == before


def test_many_shapes_are_written_before_they_pile_up(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    recorder = Recorder(path)
    for blocks in range(3000):
        recorder.step(None, Bucket(1, 1, blocks), 0.1)
    assert len(path.read_text().splitlines()) >= 2000


def test_a_disk_that_fails_stops_the_recording_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    recorder = Recorder(folder / "lengths.jsonl")
    (folder / "lengths.jsonl").unlink()
    folder.rmdir()
    recorder.sequence(5, 5)
    recorder.flush()
    assert recorder.full
    with pytest.raises(ValueError, match=r"cannot be written: Is a directory"):
        Recorder(tmp_path)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("nonsense", "not JSON"),
        ("[1, 2]", "not a JSON object"),
        ("{}", "prompt_tokens must be an int between"),
        ('{"prompt_tokens": 3}', "output_tokens must be an int between"),
        ('{"prompt_tokens": 0, "output_tokens": 3}', "prompt_tokens must be an int between"),
        ('{"prompt_tokens": true, "output_tokens": 3}', "prompt_tokens must be an int between"),
        ('{"prompt_tokens": 1e3, "output_tokens": 3}', "prompt_tokens must be an int between"),
        ('{"steps": 1, "seconds": -1}', "seconds must be a number"),
        ('{"steps": 1, "seconds": 1, "decode": [1, 2]}', "decode must be"),
        ('{"steps": 0, "seconds": 1}', "steps must be an int between"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_nonsense_is_refused_with_its_line(line: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text(json.dumps({"prompt_tokens": 3, "output_tokens": 4}) + "\n\n" + line + "\n")
    with pytest.raises(ValueError, match=reason) as caught:
        read_recording(path)
    assert f"{path}, line 3: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_without_lengths_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    for content, reason in ((b"", "holds no lengths"), (b"\xff\xfe\x00", "not text")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=reason):
            read_recording(path)
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        read_recording(tmp_path / "none")


def test_chat_lengths_depend_on_the_seed_alone() -> None:
    assert chat_lengths(3, 50) == chat_lengths(3, 50) != chat_lengths(4, 50)
    lengths = sorted(item.prompt_tokens for item in chat_lengths(1, 2001))
    assert 250 < lengths[1000] < 350
    assert lengths[-1] > 3000


def timings(times: StepTimes) -> list[StepTiming]:
    found = []
    draw = random.Random(1)
    for batch in (1, 2, 4, 8, 16, 24, 32, 48, 64):
        for blocks in (64, 200, 640):
            bucket, steps = Bucket(batch, 1, blocks), draw.randint(1, 9)
            found.append(StepTiming(None, bucket, steps, steps * times.decode(bucket)))
    for query in (32, 64, 200, 512, 1024):
        for context in (0, 5, 40):
            chunk, beside = Bucket(1, query, context), Bucket(8, 1, 64)
            found.append(StepTiming(chunk, beside, 2, 2 * (times.prefill(chunk) + times.decode(beside))))
    return found


def test_fitted_step_times_are_those_that_made_the_measurements() -> None:
    fitted = fitted_times(timings(TIMES), block_size=32)
    for batch in range(1, 65, 7):
        bucket = Bucket(batch, 1, 300)
        assert fitted.decode(bucket) == pytest.approx(TIMES.decode(bucket), rel=0.02)
    for query in (50, 700):
        chunk = Bucket(2, query, 10)
        assert fitted.prefill(chunk) == pytest.approx(TIMES.prefill(chunk), rel=0.02)
    assert fitted.decode_block == pytest.approx(TIMES.decode_block, rel=0.01)


def test_no_fitted_coefficient_is_negative() -> None:
    shrinking = [
        StepTiming(None, Bucket(batch, 1, 64 * batch), 1, 1.0 / batch) for batch in (1, 2, 4, 8, 16)
    ] + [StepTiming(Bucket(1, query, 0), None, 1, 10.0 / query) for query in (16, 32, 64, 128)]
    fitted = fitted_times(shrinking, block_size=32)
    for name in (
        "prefill_base",
        "prefill_token",
        "prefill_pair",
        "decode_base",
        "decode_row",
        "decode_block",
    ):
        assert getattr(fitted, name) >= 0


def test_too_few_measurements_are_refused() -> None:
    few = [timing for timing in timings(TIMES) if timing.prefill is None][:3]
    with pytest.raises(ValueError, match="step times of 3 decode buckets are too few"):
        fitted_times(few, block_size=32)
    with pytest.raises(ValueError, match="step times of 0 prefill buckets are too few"):
        fitted_times([t for t in timings(TIMES) if t.prefill is None], block_size=32)


def test_estimated_times_are_flat_in_rows_until_computing_takes_longer() -> None:
    cost = ModelCost(
        parameters=1e9, parameter_bytes=2, kv_bytes_per_token=10_000, attention_width=4096, vocab_size=1
    )
    times = estimated_times(cost, block_size=16, bytes_per_second=1e12, flops_per_second=2e14, launch_s=0.0)
    assert times.decode_flat_rows == pytest.approx(200)
    assert times.decode(Bucket(150, 1, 0)) == pytest.approx(times.decode(Bucket(1, 1, 0)), rel=1e-3)
    assert times.decode(Bucket(400, 1, 0)) == pytest.approx(2 * times.decode(Bucket(1, 1, 0)), rel=1e-3)
    assert times.decode(Bucket(1, 1, 100)) - times.decode(Bucket(1, 1, 0)) == pytest.approx(100 * 1.6e-7)
    assert times.prefill(Bucket(1, 100, 0)) == pytest.approx(0.002, rel=0.01)
