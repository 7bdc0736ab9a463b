"""`catenary buckets`: figures, files, and refusals of one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from catenary.config import load
from catenary_apps.buckets.compare import compare
from catenary_apps.buckets.config import BucketsConfig
from catenary_apps.buckets.report import draw
from catenary_apps.cli.main import main
from catenary_apps.cli.model_sizes import sizes_of
from services.engine.bucketing import STRATEGIES, BucketLimits, Recorder, build_plan, covers_every_step
from services.engine.learning import chat_lengths
from services.engine.memory import read_shape
from tests.support.llama_config import LLAMA

SIZES: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 1024,
    "vocab_size": 49_152,
    "dtype": "bfloat16",
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "some-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SIZES))
    return str(folder)


def run(model: str, *argv: str) -> int:
    return main(["buckets", "--model", model, "--sequences", "60", "--max-num-seqs", "8", *argv])


def test_json_as_a_process(model: str) -> None:
    command = [sys.executable, "-m", "catenary_apps.cli.main", "buckets", "--model", model, "--json"]
    done = subprocess.run(
        [*command, "--synthetic", "3", "--sequences", "80"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found["strategies"]) == {*STRATEGIES, "learned"}
    for entry in found["strategies"].values():
        assert isinstance(entry["graphs"], int)
        assert entry["graphs"] == entry["prefill_graphs"] + entry["decode_graphs"]
        assert all(entry[name] >= 0 for name in ("decode_padding", "query_padding"))
        assert entry["step_time"] > 0
        assert entry["covered"] is True
    assert found["limits"]["max_model_len"] == 1024
    learned, exponential = (found["strategies"][name] for name in ("learned", "exponential"))
    assert learned["graphs"] <= exponential["graphs"]
    assert learned["step_time"] < exponential["step_time"]


def test_the_table_names_every_strategy(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model, "--strategies", "exp,pad", "--max-model-len", "500") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "some-model: up to 500 tokens" in lines[0]
    assert [line.split()[0] for line in lines if line.startswith(("exponential", "padding"))] == [
        "exponential",
        "padding",
    ]


def test_lengths_and_step_times_of_an_engine_are_used(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, learned = tmp_path / "lengths.jsonl", tmp_path / "learned.txt"
    recorder = Recorder(file)
    for item in chat_lengths(1, 60):
        recorder.sequence(item.prompt_tokens, item.output_tokens)
    limits = BucketLimits(128, 1024, 8, 512, 64, max_prefill_seqs=4)
    plan = build_plan("exponential", limits)
    for bucket in plan.decode:
        recorder.step(None, bucket, 0.002 + 1e-5 * bucket.context_blocks)
    for bucket in plan.prefill:
        recorder.step(bucket, None, 0.003 + 1e-5 * bucket.batch * bucket.query)
    recorder.flush()
    assert run(model, "--lengths", str(file), "--learn", str(learned), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step_times"] == "measured"
    assert found["sequences"] == 30
    written = build_plan("file", limits, file=learned)
    assert not written.omitted
    assert covers_every_step(written, limits)
    strategies = ["--strategies", "file,learned", "--bucketing-file", str(learned), "--json"]
    assert run(model, "--lengths", str(file), *strategies, "--step-times", "estimated") == 0
    again = json.loads(capsys.readouterr().out)
    assert again["step_times"] == "estimated"
    assert again["strategies"]["file"]["graphs"] == found["strategies"]["learned"]["graphs"]
    price = ["--compiled", str(learned), "--new-graph-price", "5"]
    assert run(model, "--lengths", str(file), *price, "--learn", str(tmp_path / "again.txt")) == 0
    kept = build_plan("file", limits, file=tmp_path / "again.txt")
    assert {*kept.prefill, *kept.decode} <= {*written.prefill, *written.decode}


def test_buckets_beyond_the_limits_are_listed(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "buckets.txt"
    file.write_text("(range(9, 20), 1, 500)\n(1, 512, 3)\n")
    assert run(model, "--strategies", "file", "--bucketing-file", str(file)) == 0
    assert "left out: (9, 1, 500), (10, 1, 500)" in (out := capsys.readouterr().out)
    assert "and 6 more" in out


def test_plots_are_an_svg_and_a_png(model: str, tmp_path: Path) -> None:
    svg, png = tmp_path / "plot.svg", tmp_path / "plot.png"
    assert run(model, "--strategies", "exp,learned", "--plot", str(svg)) == 0
    texts = [text.strip() for text in ElementTree.fromstring(svg.read_text()).itertext()]
    titles = [text.partition(":")[0] for text in texts if " graphs, padding rows " in text]
    assert titles == ["exponential", "learned"]
    assert run(model, "--strategies", "exp", "--plot", str(png)) == 0
    assert png.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_a_plot_marks_each_step_and_each_bucket_once(model: str) -> None:
    config = load(BucketsConfig, ["--model", model, "--strategies", "exp,learned"], prog="catenary buckets")
    comparison = compare(config, lambda line: None)
    axes: list[Any] = draw(comparison).axes
    assert len(axes) == 2
    shapes = [shape for one in comparison.verdicts.values() for shape, _ in one.assessment.trace.decode]
    blocks, rows = max(one.context_blocks for one in shapes), max(one.batch for one in shapes)
    for axis, verdict in zip(axes, comparison.verdicts.values(), strict=True):
        steps = verdict.assessment.trace.decode
        assert axis.collections[0].get_array().sum() == sum(steps.values())
        assert (axis.get_xlim(), axis.get_ylim()) == ((-0.5, blocks + 0.5), (-0.5, rows + 0.5))
        shown = [b for b in verdict.plan.decode if b.context_blocks <= blocks and b.batch <= rows]
        assert [tuple(map(int, mark)) for mark in axis.lines[0].get_xydata()] == [
            (b.context_blocks, b.batch) for b in shown
        ]


def test_a_plot_without_matplotlib_is_refused_before_anything_is_compared(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(model, "--plot", str(tmp_path / "plot.svg")) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("catenary buckets: --plot: matplotlib is missing: pip install '.[bench]'")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (
            ["--strategies", "best"],
            f"there is no 'best': expected {', '.join(STRATEGIES)}, file or",
        ),
        (["--strategies", "file"], "need each other"),
        (["--plot", "x.gif"], "must end with .svg or .png"),
        (["--lengths", "a", "--synthetic", "1"], "exclude each other"),
        (["--max-graphs", "9", "--graph-budget-gib", "1"], "exclude each other"),
        (["--max-graphs", "1"], "--max-graphs '1'"),
        (["--kv-cache-gib", "1e300"], "--kv-cache-gib '1e300'"),
        (["--kv-blocks", "9" * 20], "--kv-blocks"),
        (["--graph-budget-gib", "1e300"], "--graph-budget-gib '1e300'"),
        (["--compute-tflops", "1e-320"], "--compute-tflops"),
        (["--launch-ms", "1e308"], "--launch-ms"),
        (["--max-num-batched-tokens", "9" * 14], "--max-num-batched-tokens"),
        (["--step-times", "measured"], "need a length file"),
        (["--strategies", "exp", "--learn", "x"], "need the strategy learned"),
        (["--max-num-batched-tokens", "4"], "must be at least max_num_seqs"),
    ],
)
def test_bad_options_are_one_line(
    argv: list[str], reason: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(model, *argv)
    assert stopped.value.code == 2
    err = capsys.readouterr().err
    assert reason in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--lengths", "/nowhere.jsonl"], "length file /nowhere.jsonl cannot be read"),
        (["--strategies", "file", "--bucketing-file", "/nowhere.txt"], "bucket file /nowhere.txt cannot be"),
        (["--compiled", "/nowhere.txt"], "bucket file /nowhere.txt cannot be read"),
        (["--max-model-len", "5000"], "exceeds the model's context of 1024"),
        (["--kv-blocks", "3"], "3 KV blocks of 128 tokens do not hold a sequence of 1024"),
        (["--learn", "/nowhere/learned.txt"], "--learn /nowhere/learned.txt cannot be written"),
        (["--graph-budget-gib", "0.01"], "a graph of each phase needs"),
        (["--model", "/nowhere"], "model directory /nowhere does not exist"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    argv: list[str], reason: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(model, *argv) == 2
    *progress, last = capsys.readouterr().err.splitlines()
    assert reason in last
    assert last.startswith("catenary buckets: ")
    assert all(line.startswith("catenary buckets: learning from") for line in progress)


def test_an_8b_model_has_what_a_card_leaves_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    few = ("--strategies", "exp", "--sequences", "20", "--json")
    assert main(["buckets", "--model", str(tmp_path), *few]) == 0
    limits = json.loads(capsys.readouterr().out)["limits"]
    assert (limits["max_model_len"], limits["block_size"]) == (131_072, 128)
    # 94.62 GiB less 15.05 of weights, 0.9 of that, 0.9 of that: 64.2 GiB in blocks of 16 MiB.
    assert limits["num_blocks"] == pytest.approx(4125, abs=20)
    assert main(["buckets", "--model", str(tmp_path), "--device", "gaudi3", *few]) == 0
    assert json.loads(capsys.readouterr().out)["limits"]["num_blocks"] > 5500
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 400}))
    assert main(["buckets", "--model", str(tmp_path), *few]) == 2
    said = capsys.readouterr().err
    assert said.endswith("of each card's 94.62 GiB: give kv-cache-gib or kv-blocks\n")


def test_what_it_is_at_is_said_beside_the_result(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model, "--strategies", "exp,learned", "--json") == 0
    said = capsys.readouterr()
    json.loads(said.out)
    assert said.err.splitlines() == [
        "catenary buckets: learning from 60 sequences; of all strategies this one takes longest",
        "catenary buckets: judging strategy exponential by 60 sequences (1 of 2)",
        "catenary buckets: judging strategy learned by 60 sequences (2 of 2)",
    ]


def test_too_few_lengths_or_step_times_are_refused(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lengths.jsonl"
    file.write_text('{"prompt_tokens": 3, "output_tokens": 4}\n')
    assert run(model, "--lengths", str(file)) == 2
    assert "holds one length" in capsys.readouterr().err
    file.write_text('{"prompt_tokens": 3, "output_tokens": 4}\n' * 9)
    assert run(model, "--lengths", str(file), "--step-times", "measured") == 2
    assert "too few to fit" in capsys.readouterr().err
    file.write_text('{"prompt_tokens": 5000, "output_tokens": 4}\n' * 9)
    assert run(model, "--lengths", str(file)) == 2
    assert "would refuse every sequence" in capsys.readouterr().err


def test_sizes_of_a_config() -> None:
    sizes = sizes_of(read_shape(SIZES, "some"))
    assert sizes.kv_bytes_per_token == 2 * 30 * 3 * 64 * 2 == 23_040
    assert 130e6 < sizes.parameters < 140e6
    latent = SIZES | {"kv_lora_rank": 8, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 24}
    assert sizes_of(read_shape(latent, "some")).kv_bytes_per_token == 30 * 9 * (32 + 16 + 24) * 2
    old = {"n_layer": 2, "n_embd": 48, "n_head": 4, "vocab_size": 99, "n_positions": 64, "dtype": "float32"}
    assert sizes_of(read_shape(old, "old")).kv_bytes_per_token == 2 * 2 * 48 * 4
    assert sizes_of(read_shape(old, "old")).max_position == 64
    with pytest.raises(ValueError, match="the config of odd names no num_hidden_layers"):
        read_shape({"hidden_size": 3}, "odd")
