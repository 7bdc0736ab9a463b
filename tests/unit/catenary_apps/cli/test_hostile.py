"""Input that nobody should give, and signals that come at any time: one line, an exit code, no waiting."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import catenary_apps.buckets.run
from catenary_apps.cli.main import main
from catenary_apps.doctor.host import Host
from catenary_apps.plan.run import run_plan

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
}


def refused(capsys: pytest.CaptureFixture[str], *words: str, code: int = 1) -> str:
    assert run_plan([*words, "--json"]) == code
    out, line = capsys.readouterr()
    assert out == ""
    assert line.count("\n") == 1
    return line.removeprefix("catenary plan: ").strip()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_attention_heads": 10**30}, "num_attention_heads is 1000000000000000000"),
        (
            {"num_local_experts": 8, "num_hidden_layers": 10**10},
            "num_hidden_layers is 10000000000, and must be a whole number from 1 to 10000",
        ),
        ({"hidden_size": 64.0}, "hidden_size is 64.0, and must be a whole number"),
        ({"num_key_value_heads": "12"}, "num_key_value_heads is '12', and must be"),
        ({"max_position_embeddings": -1}, "max_position_embeddings is -1, and must be"),
        ({"intermediate_size": [128] * 99}, "has intermediate_size [128, 128,"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"num_key_value_heads": 3}, "has 3 KV heads that do not divide its 4 heads"),
        ({"num_local_experts": 8, "num_experts_per_tok": 9}, "num_experts_per_tok 9, which must be"),
    ],
)
def test_plan_refuses_sizes_that_no_model_has(
    change: dict[str, Any], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | change))
    assert reason in refused(capsys, "--model", str(tmp_path))


def test_null_is_an_absent_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"head_dim": None, "num_experts": 0}))
    assert run_plan(["--model", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["block_mib"] == round(2 * 2 * 2 * 16 * 128 * 2 / 2**20, 4)


def test_name_of_a_directory_stays_in_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "a\nb\x1b[31m"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    words = ("--model", str(directory), "--tensor-parallel-size", "3")
    assert "heads of a?b?[31m" in refused(capsys, *words, code=2)


def test_config_that_is_a_pipe_or_a_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    os.mkfifo(config)
    assert refused(capsys, "--model", str(tmp_path)) == f"{config} is not a file"
    config.unlink()
    config.symlink_to("/dev/zero")
    assert refused(capsys, "--model", str(tmp_path)) == f"{config} is not a file"


def test_config_of_any_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(2**40)
    assert "is larger than 268435456 bytes" in refused(capsys, "--model", str(tmp_path))


def test_free_memory_below_a_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    line = refused(capsys, "--model", str(tmp_path), "--free-gib", "1e-300", code=2)
    assert line == "free-gib 1e-300 is less than a KV block: give what the card has free"


def test_doctor_does_not_wait_for_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "meminfo")
    assert Host(root=tmp_path).text("/meminfo") == ""


def test_dry_run_of_a_script_makes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipes = tmp_path / "recipes"
    assert main(["gaudi-start", "-w", "model", "-c", str(recipes), "--dry-run"]) == 0
    assert f"CATENARY_ENGINE_RECIPE_CACHE={recipes}" in capsys.readouterr().out
    assert not recipes.exists()


def test_value_of_a_switch_is_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vllm-serve", "model", "--enable-prefix-caching", "false", "--dry-run"]) == 2
    out, line = capsys.readouterr()
    assert out == ""
    assert "unexpected argument 'false': the model is 'model' already" in line


def test_interrupted_command_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(catenary_apps.buckets.run, "run_buckets", interrupted)
    assert main(["buckets"]) == 130
    assert capsys.readouterr() == ("", "")


def test_terminated_profile_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def terminated(*_: object) -> None:
        assert os.listdir(tmp_path)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setenv("CATENARY_CLIENT_SECRET", "secret-of-clients")
    monkeypatch.setattr("catenary_apps.profile.fetch.fetch", terminated)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as caught:
            main(["profile", "--engine", "127.0.0.1:9", "--output", str(tmp_path / "trace.json")])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caught.value.code == 143
    assert list(tmp_path.iterdir()) == []
