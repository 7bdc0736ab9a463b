"""`catenary plan`: the published figures, what it warns about, and refusals of one line."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from catenary_apps.cli.main import main
from catenary_apps.plan.config import PlanConfig
from tests.support.llama_config import LLAMA

LOGGED = (
    "--device-memory-gib=94.62",
    "--weights-gib=14.97",
    "--profile-gib=0.4921875",
    "--gpu-memory-utilization=0.5",
    "--graph-reserved-mem=0.4",
    "--max-num-seqs=4",
    "--max-model-len=2048",
    "--bucketing-strategy=linear",
    "--bucket-prefill-batch=min=1,step=32,max=4",
    "--bucket-prefill-query=min=128,step=128,max=1024",
    "--bucket-prefill-context=max=0",
    "--bucket-decode-batch=min=1,step=128,max=4",
    "--bucket-decode-blocks=min=128,step=128,max=2048",
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "llama-8b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


def planned(capsys: pytest.CaptureFixture[str], model: Path, *argv: str) -> dict[str, Any]:
    assert main(["plan", "--model", str(model), "--json", *argv]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def names(found: dict[str, Any]) -> list[str]:
    return [warning["name"] for warning in found["warnings"]]


def refusal(capsys: pytest.CaptureFixture[str], model: Path, *argv: str, expected: int = 2) -> str:
    try:
        code = main(["plan", "--model", str(model), *argv])
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    said = capsys.readouterr()
    assert code == expected
    assert said.out == ""
    assert said.err.startswith("catenary plan: ")
    assert len(said.err.splitlines()) == 1
    return said.err


def test_the_published_start_up_log(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, model, *LOGGED)
    assert round(found["free_gib"], 2) == 79.16
    assert round(found["usable_gib"], 2) == 39.58
    assert round(found["graph_gib"], 2) == 15.83
    assert round(found["kv_gib"], 2) == 23.75
    assert found["kv_blocks"] == 1519
    # The padding block is the 1,520th, in what the utilization leaves free.
    assert found["block_mib"] == 16
    assert found["padding_block_gib"] == pytest.approx(16 / 1024, abs=1e-4)
    assert found["margin_gib"] > found["padding_block_gib"]
    assert found["measured"] == ["device_memory_gib", "weights_gib", "profile_gib"]


def test_the_published_logs_24_prompt_and_48_decode_shapes(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned(capsys, model, *LOGGED)
    axes = found["axes"]
    assert len(axes["prefill_batch"]) * len(axes["prefill_query"]) == 24
    assert len(axes["decode_batch"]) * len(axes["decode_blocks"]) == 48
    without_context = [bucket for bucket in found["prompt_buckets"] if bucket[2] == 0]
    assert without_context == [[batch, 128 * at, 0] for batch in (1, 2, 4) for at in range(1, 9)]
    # What the log's two dimensions do not say: 4 sequences of 2,048 tokens have at most 64 blocks, and a long
    # sequence that lost its KV is computed again in chunks, after context.
    assert found["decode_buckets"] == [[1, 1, 16], [2, 1, 32], [4, 1, 64]]
    assert [bucket for bucket in found["prompt_buckets"] if bucket[2]] == [[1, 1024, 16]]
    assert "buckets" in names(found)


def test_example_b_follows_from_the_config_alone(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Published: weights 15.05 GiB, free 79.22, usable 71.30, graphs 7.13, KV 64.17, or 4,107 blocks."""
    reserved = ("--graph-reserved-mem", "0.1")
    found = planned(capsys, model, *reserved)
    assert round(found["weights_gib"], 2) == 15.05
    assert found["free_gib"] == pytest.approx(79.22, abs=0.025)
    assert found["usable_gib"] == pytest.approx(71.30, abs=0.025)
    assert round(found["graph_gib"], 2) == 7.13
    assert found["kv_gib"] == pytest.approx(64.17, abs=0.025)
    assert found["kv_blocks"] == 4107
    assert found["measured"] == []
    # The sequences that run do not change what fits.
    fewer = planned(capsys, model, "--max-num-seqs", "64", "--max-model-len", "4096", *reserved)
    assert fewer["kv_blocks"] == 4107
    # Decoding reads 15 GiB for a token; published: at most 153 a second.
    assert 150 < found["decode_tokens_per_second_bound"] < 153
    # 432 TFLOPS for two operations with each of the layers' 6.98 billion parameters.
    assert 30_900 < found["prefill_tokens_per_second_bound"] < 31_000


def test_gaudi_3_and_what_is_given_instead(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    larger = planned(capsys, model, "--device", "gaudi3")
    assert larger["device_memory_gib"] == 126
    given = planned(capsys, model, "--free-gib", "50", "--graph-gib", "5", "--gpu-memory-utilization", "0.9")
    assert (given["free_gib"], given["usable_gib"], given["graph_gib"], given["kv_gib"]) == (50, 45, 5, 40)
    assert given["kv_blocks"] == 40 * 64
    custom = ("--device=custom", "--device-memory-gib=40", "--memory-tb-s=1", "--compute-tflops=100")
    small = planned(capsys, model, *custom)
    assert small["device_memory_gib"] == 40
    assert small["vllm_autocalc"] is None


def test_without_limits_it_is_a_setting_to_serve_with(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned(capsys, model)
    # Sequences may be as long as the model knows, and as many run as hold 4,096 tokens each: 32 blocks.
    assert (found["max_model_len"], found["max_num_seqs"], found["expected_len"]) == (131_072, 128, 4096)
    assert (found["largest_max_model_len"], found["largest_max_num_seqs"]) == (131_072, 4)
    assert 32 * 128 <= found["kv_blocks"] < 32 * 160
    short = planned(capsys, model, "--max-model-len", "4096")
    assert (short["max_num_seqs"], short["expected_len"]) == (128, 4096)
    assert planned(capsys, model, "--max-model-len", "20000")["max_num_seqs"] == 16
    asked = planned(capsys, model, "--expected-len", "1000")
    assert (asked["max_model_len"], asked["max_num_seqs"]) == (131_072, 256)
    assert planned(capsys, model, "--expected-len", "131072")["max_num_seqs"] == 4
    assert planned(capsys, model, "--max-num-seqs", "7")["expected_len"] is None
    beyond = planned(capsys, model, "--max-model-len", "140000", "--allow-long-max-model-len")
    assert beyond["max_model_len"] == 140_000
    assert beyond["recommended"]["variables"]["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] == "1"
    tight = planned(capsys, model, "--free-gib", "10")
    assert tight["max_model_len"] == tight["kv_tokens"] == tight["largest_max_model_len"] < 131_072
    assert "short-kv" in names(tight)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--tensor-parallel-size=16", {"few-kv-heads", "several-nodes", "vllm-timeouts", "not-served"}),
        ("--max-model-len=1000", {"length-off-blocks"}),
        ("--max-model-len=8192 --max-num-seqs=200", {"preemption", "decode-beyond-kv"}),
        ("--max-model-len=16384 --bucketing-strategy=linear", {"linear-long-context", "many-shapes"}),
        ("--probe-timeout-s=60", {"probe-timeout", "eager-prefills"}),
        ("--gpu-memory-utilization=1", {"context-beyond-margin"}),
        ("--graph-reserved-mem=0.001", {"graphs-beyond-reserve"}),
        ("--graph-reserved-mem=0.5 --max-model-len=512", {"reserve-too-large"}),
        ("--dtype=float16", {"forced-bfloat16"}),
        ("--dtype=fp8", {"fp8-range", "not-served"}),
        ("--dtype=int4", {"not-served"}),
        ("--kv-cache-dtype=fp8", {"not-served"}),
    ],
)
def test_known_traps_are_said(
    options: str, expected: set[str], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert expected <= set(names(planned(capsys, model, *options.split())))


def test_a_plan_without_traps_warns_of_nothing(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calm = (
        "--max-model-len=2048 --max-num-seqs=32 --max-num-batched-tokens=2048 --max-prefill-batch=1 "
        "--bucket-prefill-batch=max=1 --probe-timeout-s=3600 --graph-reserved-mem=0.05"
    )
    found = planned(capsys, model, *calm.split())
    assert set(names(found)) <= {"eager-prefills"}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "not-served"),
        ({"layer_types": ["linear_attention"] * 32}, "recurrent-layers"),
        ({"torch_dtype": "float32"}, "forced-bfloat16"),
        (
            {
                "model_type": "deepseek_v3",
                "kv_lora_rank": 512,
                "qk_nope_head_dim": 128,
                "qk_rope_head_dim": 64,
                "v_head_dim": 128,
            },
            "expanded-latent-kv",
        ),
    ],
)
def test_traps_of_a_checkpoint(
    change: dict[str, Any], name: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "config.json").write_text(json.dumps(LLAMA | change))
    assert name in names(planned(capsys, model))


def test_shares_of_cards_and_fewer_bits(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = planned(capsys, model)
    half = planned(capsys, model, "--tensor-parallel-size", "2")
    assert half["weights_gib"] == pytest.approx(whole["weights_gib"] / 2, rel=0.001)
    assert half["block_mib"] == 8
    # Beyond the KV heads, a card's block does not get smaller.
    assert planned(capsys, model, "--tensor-parallel-size", "16")["block_mib"] == 2
    assert planned(capsys, model, "--kv-cache-dtype", "fp8")["block_mib"] == 8
    eight, four = (planned(capsys, model, "--dtype", name)["weights_gib"] for name in ("fp8", "int4"))
    assert four < eight < whole["weights_gib"]


def test_what_would_fit_otherwise(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, model, "--max-model-len", "8192")
    choices = {
        (choice["tensor_parallel_size"], choice["weight_dtype"]): choice for choice in found["choices"]
    }
    assert set(choices) == {(cards, name) for cards in (1, 2, 4, 8) for name in ("bfloat16", "fp8", "int4")}
    own = choices[1, "bfloat16"]
    assert (own["kv_blocks"], own["max_num_seqs"]) == (found["kv_blocks"], found["largest_max_num_seqs"])
    for cards in (1, 2, 4):
        assert choices[2 * cards, "fp8"]["kv_blocks"] > choices[cards, "fp8"]["kv_blocks"]
        assert choices[cards, "int4"]["weights_gib"] < choices[cards, "fp8"]["weights_gib"]
    tight = planned(capsys, model, "--device-memory-gib", "12", "--dtype", "int4")
    fits = {(c["tensor_parallel_size"], c["weight_dtype"]): c["kv_blocks"] > 0 for c in tight["choices"]}
    assert not fits[1, "bfloat16"]
    assert fits[2, "bfloat16"]
    assert fits[1, "int4"]
    assert planned(capsys, model, "--free-gib", "50")["choices"] == []


def test_the_checkpoints_files_correct_what_the_config_says(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 1, "vocab_size": 1000}))
    expected = planned(capsys, model)["weights_gib"]
    size = 1_000_000 + int(expected / 1.006 * 2**30)
    with (model / "model.safetensors").open("wb") as file:
        file.truncate(size)
    assert planned(capsys, model)["weights_gib"] == pytest.approx(size * 1.006 / 2**30, rel=1e-3)


def test_recommended_settings_are_options_that_exist(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from services.engine.config import EngineConfig

    found = planned(capsys, model, *LOGGED)
    engine = found["recommended"]["engine"]
    EngineConfig(**{name.replace("-", "_"): value for name, value in engine.items()})
    assert engine["bucket-decode-blocks"] == "min=128,step=128,max=2048"
    variables = found["recommended"]["variables"]
    assert variables["VLLM_DECODE_BLOCK_BUCKET_MAX"] == "2048"
    assert variables["VLLM_PROMPT_QUERY_BUCKET_STEP"] == "128"
    assert variables["VLLM_BUCKETING_STRATEGY"] == "lin"
    # What was given is planned with and recommended; that less would do is said.
    assert variables["VLLM_GRAPH_RESERVED_MEM"] == engine["graph-reserved-mem"] == "0.4"
    assert "reserve-too-large" in names(planned(capsys, model, *LOGGED, "--max-model-len=512"))
    padded = planned(
        capsys,
        model,
        "--max-model-len=2048",
        "--bucketing-strategy=padding",
        "--bucketing-pad-max-tokens=256",
        "--bucket-decode-batch=pad_percent=10",
    )["recommended"]
    EngineConfig(**{name.replace("-", "_"): value for name, value in padded["engine"].items()})
    assert padded["engine"]["bucketing-pad-max-tokens"] == "256"
    assert padded["variables"]["VLLM_DECODE_BS_BUCKET_PAD_PERCENT"] == "10"


def test_the_table_has_everything_to_paste(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", str(model), "--max-model-len", "5000"]) == 0
    said = capsys.readouterr().out
    for part in (
        "llama-8b on 1 x gaudi2: 8.03 billion parameters",
        "blocks of 128 tokens, 16 MiB each",
        "python -m services.engine --model",
        "export VLLM_GRAPH_PROMPT_RATIO=0.3",
        "vllm serve",
        "warning (length-off-blocks): max-model-len 5000 is not a multiple",
        "vLLM's container would choose",
        "what would fit otherwise",
    ):
        assert part in said
    # Nothing is cut at a width where there is no terminal, and one is not several.
    (line,) = (line for line in said.splitlines() if line.startswith("warm-up of"))
    assert line.endswith("with a recipe cache")
    assert "captures keep" not in said
    assert "1 sequences" not in said


def test_a_terminal_has_its_own_width(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "70")
    assert main(["plan", "--model", str(model), "--max-model-len", "5000"]) == 0
    lines = capsys.readouterr().out.splitlines()
    pasted = [line for line in lines if line.startswith(("python -m", "vllm serve", "export", "Needs"))]
    assert any(len(line) > 70 for line in pasted), "commands are whole"
    assert all(len(line) <= 70 for line in lines if line not in pasted)


def test_one_sequence_is_no_plural(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", str(model), "--max-num-seqs", "1"]) == 0
    assert "1 sequence of up to 131072 tokens" in capsys.readouterr().out


def test_the_picture(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    svg, png = tmp_path / "m.svg", tmp_path / "m.png"
    blocks = planned(capsys, model, "--plot", str(svg))["kv_blocks"]
    text = "".join(ElementTree.fromstring(svg.read_text()).itertext())
    assert "weights 15.05 GiB" in text
    assert f"{blocks} blocks" in text
    first = svg.read_bytes()
    planned(capsys, model, "--plot", str(svg))
    assert svg.read_bytes() == first
    planned(capsys, model, "--plot", str(png))
    assert struct.unpack(">II", png.read_bytes()[16:24]) == (990, 264)


def test_a_picture_without_matplotlib_is_refused_in_one_line(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "--plot: matplotlib is missing: pip install '.[bench]'" in refusal(
        capsys, model, "--plot", str(tmp_path / "m.svg")
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--max-model-len=200000", "max-model-len 200000 exceeds the model's context of 131072 tokens"),
        ("--device-memory-gib=12", "raise tensor-parallel-size to 2, or keep weights in fewer bits"),
        ("--weights-gib=95", "of each card's 94.62 GiB"),
        (
            "--free-gib=4 --max-model-len=65536",
            "a sequence of max-model-len 65536 needs 8.00 GiB of KV",
        ),
        ("--tensor-parallel-size=5", "tensor-parallel-size 5 does not divide the 32 heads"),
        ("--device=custom", "device custom needs --device-memory-gib"),
        ("--device=custom --device-memory-gib=9", "device custom needs --memory-tb-s"),
        ("--free-gib=4 --weights-gib=3", "--free-gib takes the place of --weights-gib"),
        ("--graph-gib=4 --graph-reserved-mem=0.2", "--graph-gib takes the place of --graph-reserved-mem"),
        ("--expected-len=900 --max-model-len=800", "--expected-len 900 is more than --max-model-len 800"),
        ("--expected-len=900 --max-num-seqs=8", "--expected-len chooses --max-num-seqs: give one of them"),
        ("--free-gib=4 --graph-gib=9", "graph-gib 9 leaves nothing for KV of the usable 3.60 GiB"),
        ("--bucketing-strategy=file", "bucketing_strategy file and bucketing_file need each other"),
        ("--bucket-decode-batch=step=4", "bucketing_strategy exponential spaces its buckets by itself"),
        ("--max-num-seqs=100 --max-num-batched-tokens=50", "every running sequence gets a token in a step"),
        ("--plot=picture.gif", "must end with .svg or .png"),
        ("--gpu-memory-utilization=nan", "gpu-memory-utilization"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    options: str, words: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refusal(capsys, model, *options.split())


def test_a_model_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "does not exist" in refusal(capsys, tmp_path / "nothing")
    (tmp_path / "config.json").write_text('{"model_type": "x"}')
    assert "names no num_hidden_layers" in refusal(capsys, tmp_path, expected=1)


def test_a_plot_that_cannot_be_written(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", str(model), "--plot", str(model / "no" / "m.svg")]) == 2
    assert "cannot be written: there is no such directory" in capsys.readouterr().err


def test_no_torch_and_no_numpy_is_needed(model: Path) -> None:
    code = (
        "import sys\nfrom catenary_apps.cli.main import main\n"
        f"assert main(['plan', '--model', {str(model / 'config.json')!r}, '--json']) == 0\n"
        "assert not {'torch', 'transformers', 'numpy', 'grpc'} & set(sys.modules), 'too much is imported'"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"] == "llama-8b"


def test_the_defaults_that_were_taken_are_said(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", str(model)]) == 0
    device = PlanConfig.model_fields["device"].default
    assert f"By default: --device {device}, --tensor-parallel-size 1." in capsys.readouterr().out
    assert main(["plan", "--model", str(model), "--device", "gaudi3", "--tensor-parallel-size", "1"]) == 0
    assert "By default" not in capsys.readouterr().out
