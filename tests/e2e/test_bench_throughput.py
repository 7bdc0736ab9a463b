"""`catenary bench throughput` with the real small model."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest

from catenary_apps.cli.main import main

ENGINE = {"dtype": "float32", "kv-cache-gib": "0.25", "max-model-len": "256", "max-num-seqs": "4"}
SMALL = {"num-prompts": "6", "input-len": "uniform:8:24", "output-len": "ratio:8:0.5", "progress": "false"}

pytestmark = pytest.mark.usefixtures("kept_logging")


def _words(options: dict[str, str]) -> list[str]:
    return [f"--{name}={value}" for name, value in options.items()]


def test_a_batch_is_measured(
    model_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "batch.json"
    words = ["--model", str(model_directory), "--json", "--save", str(file), *_words(SMALL)]
    try:
        assert main(["bench", "throughput", *words, "--", *_words(ENGINE)]) == 0
    finally:
        gc.unfreeze()
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads(file.read_text())
    assert (result["benchmark"], result["requests"]) == ("throughput", 6)
    assert 6 * 8 <= result["input_tokens"] <= 6 * 24
    assert 6 * 4 <= result["output_tokens"] <= 6 * 12
    tokens = result["input_tokens"] + result["output_tokens"]
    assert result["total_throughput"] == pytest.approx(tokens / result["duration_s"])
    assert result["engine_options"]["max_num_seqs"] == "4"
