"""`catenary plan` holds itself to what it recommends, over cards, models and lengths."""

from __future__ import annotations

import json
import shlex
import struct
from pathlib import Path
from typing import Any

import pytest

from catenary.config import load
from catenary_apps.cli.main import main
from catenary_apps.plan.advice import recommend
from catenary_apps.plan.config import PlanConfig
from catenary_apps.plan.planning import make_plan
from services.engine.memory import WeightScheme, read_shape, stored_scheme
from services.engine.model import ModelError
from services.engine.model.gguf_file import read_gguf_config
from tests.support.llama_config import LLAMA

R1: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
QWEN = LLAMA | {
    "model_type": "qwen3",
    "num_hidden_layers": 64,
    "hidden_size": 5120,
    "num_attention_heads": 64,
    "intermediate_size": 25600,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "head_dim": 128,
}
SMALL = LLAMA | {"num_hidden_layers": 12, "max_position_embeddings": 1024}
MODELS = {"llama-8b": LLAMA, "deepseek-r1": R1, "qwen3-32b": QWEN, "small": SMALL}
# Settings of the printed command that are options of plan as well.
NOT_OPTIONS = ("device", "recipe-cache", "enable-prefix-caching")


@pytest.fixture
def models(tmp_path: Path) -> Path:
    for name, config in MODELS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    return tmp_path


def planned(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["plan", "--json", *argv]) == 0, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["plan", *argv]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 2) -> str:
    assert main(["plan", *argv]) == code
    return capsys.readouterr().err


CASES = [
    (model, f"--device={device} {options}")
    for model, device, options in (
        ("llama-8b", "gaudi2", ""),
        ("llama-8b", "gaudi3", "--max-model-len=8192"),
        ("llama-8b", "gaudi2", "--max-model-len=100000 --max-num-seqs=200"),
        ("llama-8b", "gaudi2", "--free-gib=3"),
        ("llama-8b", "gaudi2", "--free-gib=1 --contiguous-kv=true"),
        ("llama-8b", "gaudi2", "--free-gib=50 --graph-gib=7"),
        ("llama-8b", "gaudi2", "--device-memory-gib=16.5"),
        ("llama-8b", "gaudi2", "--max-model-len=4096 --bucketing-strategy=padding --bucketing-pad-ratio=0.1"),
        ("llama-8b", "gaudi2", "--max-model-len=2048 --bucketing-strategy=linear --kv-cache-gib=12.5"),
        ("llama-8b", "gaudi2", "--gpu-memory-utilization=0.8123456789 --contiguous-kv=true"),
        ("llama-8b", "gaudi3", "--tensor-parallel-size=4 --dtype=fp8 --kv-cache-dtype=fp8"),
        ("qwen3-32b", "gaudi2", ""),
        ("qwen3-32b", "gaudi2", "--max-model-len=32768"),
        ("qwen3-32b", "gaudi3", "--expected-len=512"),
        ("small", "gaudi2", ""),
        ("small", "gaudi3", "--expected-len=100 --max-capture-tokens=2048"),
        ("deepseek-r1", "gaudi2", "--tensor-parallel-size=8 --max-model-len=16384 --dtype=fp8"),
        ("deepseek-r1", "gaudi3", "--tensor-parallel-size=8"),
        ("deepseek-r1", "gaudi3", "--tensor-parallel-size=8 --dtype=int4 --max-model-len=32768"),
    )
]
# What says what the plan is for, and is no setting of the engine.
SUBJECT = ("device-", "free-gib", "weights-gib", "tensor-", "dtype", "kv-cache-dtype", "device=")
FIGURES = (
    "kv_blocks",
    "kv_gib",
    "graph_gib",
    "usable_gib",
    "profile_gib",
    "max_model_len",
    "max_num_seqs",
    "largest_max_num_seqs",
    "prompt_buckets",
    "decode_buckets",
    "graphs",
    "warmup",
    "vllm_autocalc",
    "recommended",
)


@pytest.mark.parametrize(("model", "options"), CASES)
def test_a_plan_with_what_is_recommended_is_the_same_plan(
    model: str, options: str, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = f"--model={models / model}"
    words = options.split()
    first = planned(capsys, source, *words)
    subject = [word for word in words if word.removeprefix("--").startswith(SUBJECT)]
    # The command of an engine that is not served yet is not printed; its settings are vLLM's.
    settings = recommend(make_plan(_config([source, *words]))).engine
    assert first["recommended"]["engine"] in (None, dict(settings))
    assert (first["recommended"]["engine"] is None) is bool(first["not_served"])
    again = [f"--{name}={value}" for name, value in settings.items() if name not in (*NOT_OPTIONS, "model")]
    second = planned(capsys, source, *subject, *again)
    assert {name: second[name] for name in FIGURES} == {name: first[name] for name in FIGURES}


def _config(words: list[str]) -> PlanConfig:
    return load(PlanConfig, words, prog="plan")


def test_vllms_lines_are_the_same_plan_as_well(
    models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = f"--model={models / 'llama-8b'}"
    first = planned(capsys, source, "--max-model-len=8192")
    for name, value in first["recommended"]["variables"].items():
        monkeypatch.setenv(name, value)
    options = first["recommended"]["vllm"]
    second = planned(
        capsys, source, *(f"--{name}={value}" for name, value in options.items() if name != "dtype")
    )
    same = [name for name in FIGURES if name != "recommended"]
    assert {name: second[name] for name in same} == {name: first[name] for name in same}
    assert second["variables"]["graph_reserved_mem"] == "VLLM_GRAPH_RESERVED_MEM"


def test_advice_that_is_followed_is_accepted(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = f"--model={models / 'deepseek-r1'}"
    for options, advice, followed in (
        (
            "--device=gaudi3",
            "raise tensor-parallel-size to 8, or keep weights in fewer bits "
            "(--dtype int4 and tensor-parallel-size 4)",
            ("--tensor-parallel-size=8", "--tensor-parallel-size=4 --dtype=int4"),
        ),
        (
            "--device=gaudi3 --tensor-parallel-size=8 --dtype=bfloat16",
            "keep weights in fewer bits (--dtype fp8)",
            ("--dtype=fp8",),
        ),
    ):
        said = refused(capsys, source, *options.split())
        assert said.endswith(f"{advice}\n")
        for change in followed:
            planned(capsys, source, *options.split(), *change.split())
    # 16 cards would be two nodes: no advice.
    said = refused(capsys, source, "--device=custom", *CUSTOM, "--device-memory-gib=40")
    assert "neither the 8 cards of a node nor fewer bits hold it: choose a smaller model" in said
    said = refused(capsys, source, "--device=gaudi2", "--tensor-parallel-size=8", "--max-model-len=100000")
    assert "enough for 22" in said


CUSTOM = ("--memory-tb-s=1", "--compute-tflops=100")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--tensor-parallel-size=2", "an engine on 2 cards"),
        ("--dtype=fp8", "weights in fp8"),
        ("--kv-cache-dtype=fp8", "KV in fp8"),
    ],
)
def test_no_command_is_printed_for_what_is_not_served(
    options: str, reason: str, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = ("--model", str(models / "llama-8b"))
    lines = shown(capsys, *source, *options.split()).splitlines()
    assert lines[1] == f"Catenary cannot serve this yet ({reason}): figures and lines for vLLM only."
    assert not [line for line in lines if line.startswith(("python -m", "Settings for Catenary"))]
    assert [line for line in lines if line.startswith("vllm serve")]
    found = planned(capsys, *source, *options.split())
    assert (found["not_served"], found["recommended"]["engine"]) == ([reason], None)
    assert planned(capsys, *source)["not_served"] == []


@pytest.mark.parametrize(
    ("packed", "scheme"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "awq", "bits": 4, "version": "gemm"}, "int4"),
        ({"quant_method": "awq", "w_bit": 4}, "int4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "int4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
        ({"quant_method": "mxfp4"}, "int4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "int4"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "bfloat16"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
            },
            "fp8",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "int-quantized",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "int"}}},
            },
            "int8",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}},
            },
            "int4",
        ),
        ({"quant_method": "quark"}, "bfloat16"),
        ({"quant_method": "gptq", "bits": True}, "bfloat16"),
        ({"config_groups": [1], "quant_method": 5}, "bfloat16"),
        ("text", "bfloat16"),
    ],
)
def test_a_checkpoint_is_planned_as_it_is_packed(
    packed: Any, scheme: str, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = models / "llama-8b"
    plain = planned(capsys, f"--model={folder}")
    for key in ("quantization_config", "compression_config"):
        (folder / "config.json").write_text(json.dumps(LLAMA | {key: packed}))
        found = planned(capsys, f"--model={folder}")
        assert found["weight_dtype"] == scheme
        assert found["recommended"]["engine"] is None
        assert "quantized-checkpoint" in [warning["name"] for warning in found["warnings"]]
        assert "quantization" not in found["recommended"]["vllm"]
        assert (found["weights_gib"] < plain["weights_gib"]) is (scheme != "bfloat16")
    named = planned(capsys, f"--model={folder}", "--dtype=bfloat16")
    assert named["weights_gib"] == plain["weights_gib"]


def test_a_packing_beside_the_config_counts(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = models / "llama-8b"
    (folder / "quantize_config.json").write_text('{"bits": 4, "group_size": 128}')
    assert planned(capsys, f"--model={folder}")["weight_dtype"] == "int4"
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    assert planned(capsys, f"--model={folder}")["weight_dtype"] == "fp8"
    (folder / "hf_quant_config.json").write_text("{")
    assert "not valid JSON" in refused(capsys, f"--model={folder}", code=1)


def test_packed_files_correct_the_count() -> None:
    shape = read_shape(LLAMA | {"quantization_config": {"quant_method": "gptq", "bits": 3}}, "m")
    assert stored_scheme(shape) is WeightScheme.INT4
    assert shape.quantization is not None
    assert (shape.quantization.method, shape.quantization.bits) == ("gptq", 3)


@pytest.mark.parametrize(
    ("variables", "options", "name", "value", "origin"),
    [
        ({"VLLM_GRAPH_RESERVED_MEM": "0.4"}, "", "graph_reserved_mem", 0.4, "VLLM_GRAPH_RESERVED_MEM"),
        (
            {"CATENARY_ENGINE_GRAPH_RESERVED_MEM": "0.3", "VLLM_GRAPH_RESERVED_MEM": "0.4"},
            "",
            "graph_reserved_mem",
            0.3,
            "CATENARY_ENGINE_GRAPH_RESERVED_MEM",
        ),
        ({"VLLM_GRAPH_RESERVED_MEM": "0.4"}, "--graph-reserved-mem=0.2", "graph_reserved_mem", 0.2, None),
        ({"CATENARY_PLAN_GRAPH_RESERVED_MEM": "0.25"}, "", "graph_reserved_mem", 0.25, None),
        ({"CATENARY_ENGINE_MAX_NUM_SEQS": "17"}, "", "max_num_seqs", 17, "CATENARY_ENGINE_MAX_NUM_SEQS"),
        ({"CATENARY_ENGINE_BLOCK_SIZE": "64"}, "", "block_size", 64, "CATENARY_ENGINE_BLOCK_SIZE"),
        ({"CATENARY_ENGINE_KV_CACHE_GIB": "8"}, "", "kv_gib", 8, "CATENARY_ENGINE_KV_CACHE_GIB"),
        # Another program's device is no card.
        ({"CATENARY_ENGINE_DEVICE": "sim"}, "", "device", "gaudi2", None),
    ],
)
def test_variables_of_the_engine_and_of_vllm_count(
    variables: dict[str, str],
    options: str,
    name: str,
    value: object,
    origin: str | None,
    models: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable, text in variables.items():
        monkeypatch.setenv(variable, text)
    source = ("--model", str(models / "llama-8b"), *options.split())
    found = planned(capsys, *source)
    assert found[name] == value
    assert list(found["variables"].values()) == ([] if origin is None else [origin])
    said = [line for line in shown(capsys, *source).splitlines() if ": from " in line]
    assert [line.rpartition(" ")[2] for line in said] == ([] if origin is None else [origin])


def test_a_bad_variable_is_refused_by_its_name(
    models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_GRAPH_RESERVED_MEM", "much")
    with pytest.raises(SystemExit):
        main(["plan", "--model", str(models / "llama-8b")])
    assert capsys.readouterr().err.startswith("catenary plan: VLLM_GRAPH_RESERVED_MEM 'much'")


def test_a_pasted_command_is_quoted(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = models / "a model; of mine"
    (models / "small").rename(folder)
    said = shown(capsys, f"--model={folder}").splitlines()
    for start in ("python -m services.engine", "vllm serve"):
        (line,) = (line for line in said if line.startswith(start))
        assert str(folder) in shlex.split(line)


def _gguf(path: Path, values: dict[str, Any], tensors: tuple[str, ...] = ()) -> Path:
    """A GGUF file with this metadata, by the format's description."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    def packed(value: Any) -> bytes:
        if isinstance(value, str):
            return struct.pack("<I", 8) + text(value)
        if isinstance(value, list):
            kind, form = (8, "") if isinstance(value[0], str) else (5, "<i")
            items = [text(item) if kind == 8 else struct.pack(form, item) for item in value]
            return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(items)
        return struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)

    body = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values))
    body += b"".join(text(key) + packed(value) for key, value in values.items())
    body += b"".join(text(name) + struct.pack("<IQQIQ", 2, 8, 8, 0, 0) for name in tensors)
    path.write_bytes(body)
    return path


LLAMA_GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "tokenizer.ggml.scores": [0] * 5000,
    "tokenizer.ggml.tokens": ["a", "b", "c"] * 1000,
    "llama.block_count": 32,
    "llama.context_length": 131_072,
    "llama.embedding_length": 4096,
    "llama.feed_forward_length": 14_336,
    "llama.attention.head_count": 32,
    "llama.attention.head_count_kv": 8,
    "llama.rope.freq_base": 500_000.0,
    "llama.vocab_size": 128_256,
}


def test_a_gguf_file_is_planned_from_its_metadata(
    tmp_path: Path, models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CATENARY_CACHE", str(tmp_path / "cache"))
    file = _gguf(tmp_path / "llama-8b.Q4_K_M.gguf", LLAMA_GGUF, ("output.weight", "token_embd.weight"))
    # Weights of another model beside it are not the file's.
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    found = planned(capsys, f"--model={file}")
    config = planned(capsys, f"--model={models / 'llama-8b'}")
    assert found["weights_gib"] == config["weights_gib"]
    assert found["kv_blocks"] == config["kv_blocks"]
    assert found["model"] == "llama-8b.Q4_K_M"
    assert not (tmp_path / "cache").exists(), "nothing is converted"


def test_sizes_in_the_metadata_of_several_families(tmp_path: Path) -> None:
    def config(family: str, *tensors: str, **values: Any) -> dict[str, Any]:
        renamed = {key.replace("llama.", f"{family}."): value for key, value in LLAMA_GGUF.items()}
        own = {f"{family}.{key.replace('__', '.')}": value for key, value in values.items()}
        return read_gguf_config(
            _gguf(tmp_path / "m.gguf", renamed | own | {"general.architecture": family}, tensors)
        )

    tied = read_shape(config("qwen2"), "m")
    assert (tied.model_type, tied.tied, tied.query_bias, tied.output_bias) == ("qwen2", True, True, False)
    assert not read_shape(config("qwen3", "output.weight", attention__key_length=128), "m").tied
    experts = read_shape(
        config("qwen3moe", expert_count=128, expert_used_count=8, expert_feed_forward_length=768), "m"
    )
    assert (experts.model_type, experts.experts, experts.experts_chosen) == ("qwen3_moe", 128, 8)
    assert experts.expert_inner == 768
    by_layer = read_shape(config("llama", attention__head_count_kv=[8] * 31 + [4]), "m")
    assert by_layer.kv_heads == 8
    assert config("llama", vocab_size=7)["vocab_size"] == 7
    unsaid = dict(LLAMA_GGUF)
    del unsaid["llama.vocab_size"]
    assert read_gguf_config(_gguf(tmp_path / "v.gguf", unsaid))["vocab_size"] == 3000
    latent = read_shape(
        config(
            "deepseek2",
            attention__kv_lora_rank=512,
            attention__q_lora_rank=1536,
            attention__key_length_mla=192,
            attention__value_length_mla=128,
            rope__dimension_count=64,
        ),
        "m",
    ).latent
    assert latent is not None
    assert (latent.query_rank, latent.kv_rank, latent.plain_dim, latent.rotary_dim, latent.value_dim) == (
        1536,
        512,
        128,
        64,
        128,
    )
    assert read_shape(config("mamba", ssm__state_size=16), "m").recurrent


def test_files_that_are_no_gguf_are_refused_in_one_line(tmp_path: Path) -> None:
    whole = _gguf(tmp_path / "m.gguf", LLAMA_GGUF, ("output.weight",)).read_bytes()
    broken = [whole[:length] for length in range(0, len(whole) - 40, 977)]
    broken += [b"GGML" + whole[4:], b"GGUF" + struct.pack("<I", 9) + whole[8:], b"x" * 4000]
    broken += [whole[:8] + b"\xff" * 16 + whole[24:], whole[:24] + b"\xff" * 8 + whole[32:]]
    for data in broken:
        file = tmp_path / "b.gguf"
        file.write_bytes(data)
        with pytest.raises(ModelError, match=r"^GGUF file .* cannot be read: "):
            read_gguf_config(file)


def test_a_config_under_any_name_is_the_one_that_was_named(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = models / "llama-8b" / "qwen3-32b.json"
    other.write_text(json.dumps(QWEN))
    assert planned(capsys, f"--model={other}")["model"] == "qwen3-32b"
    assert planned(capsys, f"--model={models / 'llama-8b' / 'config.json'}")["model"] == "llama-8b"
