"""Directories that are no servable model are refused with one readable line, before weights are loaded."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from pydantic import ValidationError

from services.engine.core.errors import StartError
from services.engine.core.process import start_engine
from services.engine.model import ModelError, UnknownModelError, prepare_model, read_config, read_facts
from services.engine.model.prepare import main as prepare_main
from services.engine.model.sources import reason_of, resolve_source
from services.engine.options import EngineOptions
from tests.support.torch_engine import save_tiny_model, tiny_options


def refusal(options: EngineOptions) -> str:
    with pytest.raises(StartError) as caught:
        start_engine(options, lambda activity, fraction: None)
    text = str(caught.value)
    assert "\n" not in text
    assert text
    return text


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(config))


def remove(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def write(name: str, text: str) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        (directory / name).write_text(text)

    return damage


def cut(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def cut_to(size: int) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        path = directory / "model.safetensors"
        path.write_bytes(path.read_bytes()[:size])

    return damage


def pickle_only(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    torch.save({}, directory / "pytorch_model.bin")


def missing_shard(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "model-00001-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def missing_tensor(directory: Path) -> None:
    path = directory / "model.safetensors"
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = data[8 : 8 + length].replace(b"model.norm.weight", b"model.mron.weight")
    path.write_bytes(data[:8] + header + data[8 + length :])


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
}

DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (remove("config.json"), "has no config.json"),
    "config is not JSON": (write("config.json", "{"), "is not valid JSON"),
    "config is a list": (write("config.json", "[]"), "does not hold a JSON object"),
    "config is binary": (lambda d: (d / "config.json").write_bytes(b"\xff\xfe"), "is not valid JSON"),
    "config without a type": (write("config.json", "{}"), "names no model_type"),
    "no weights": (remove("model.safetensors"), "has no weights"),
    "weights cut short": (cut, "is cut short"),
    "weights cut in the header": (cut_to(200), "is cut short"),
    "weights empty": (cut_to(0), "is cut short"),
    "pickled weights": (pickle_only, "pickled weights only"),
    "a shard missing": (missing_shard, "has no model-00002-of-00002.safetensors"),
    "a tensor missing": (missing_tensor, "parameters without weights: norm.weight"),
    "weights of another shape": (lambda d: edit_config(d, hidden_size=60), "its config asks for"),
    "no heads": (lambda d: edit_config(d, num_attention_heads=0, head_dim=None), "num_attention_heads is 0"),
    "heads that do not divide": (lambda d: edit_config(d, num_key_value_heads=4), "is not accepted"),
    "more than any memory": (lambda d: edit_config(d, vocab_size=10**15), "vocab_size is 1000000000000000"),
    "quantized": (lambda d: edit_config(d, quantization_config={"bits": 4}), "quantized weights"),
    "unknown architecture": (
        lambda d: edit_config(d, architectures=["FooForCausalLM"], model_type="foo"),
        "architecture FooForCausalLM is not supported",
    ),
    "no paged attention": (
        lambda d: edit_config(d, architectures=["BloomForCausalLM"], model_type="bloom"),
        "architecture BloomForCausalLM is not supported",
    ),
    "recurrent state": (
        lambda d: edit_config(d, architectures=["MambaForCausalLM"], model_type="mamba"),
        "architecture MambaForCausalLM is not supported",
    ),
    "encoder-decoder": (
        lambda d: edit_config(d, architectures=["T5ForConditionalGeneration"], model_type="t5"),
        "architecture T5ForConditionalGeneration is not supported",
    ),
    "rope that depends on the batch": (
        lambda d: edit_config(d, rope_parameters=LONGROPE),
        "set max-model-len to 64 or less",
    ),
    "eos outside the vocabulary": (
        write("generation_config.json", '{"eos_token_id": [2, 999]}'),
        "eos_token_id",
    ),
    "a temperature that is none": (
        write("generation_config.json", '{"temperature": NaN}'),
        "temperature of nan",
    ),
    "a top_p that is none": (write("generation_config.json", '{"top_p": 1.5}'), "top_p of 1.5"),
    "a top_k that is none": (write("generation_config.json", '{"top_k": Infinity}'), "top_k of inf"),
    "a min_p that is none": (write("generation_config.json", '{"min_p": -0.1}'), "min_p of -0.1"),
    "a penalty that is none": (
        write("generation_config.json", '{"repetition_penalty": 0}'),
        "repetition_penalty of 0",
    ),
    "a top_k of another kind": (write("generation_config.json", '{"top_k": "50"}'), "top_k of '50'"),
    "generation config is not JSON": (write("generation_config.json", "nothing"), "is not valid JSON"),
}


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.advisory("CVE-2025-24357")
def test_a_damaged_directory_is_refused(name: str, tmp_path: Path) -> None:
    damage, text = DAMAGES[name]
    directory = save_tiny_model("llama", tmp_path)
    damage(directory)
    assert text in refusal(tiny_options(directory))


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (missing_tensor, "has no weights for model.norm.weight"),
        (lambda d: edit_config(d, hidden_size=60), "cannot be loaded"),
    ],
)
def test_transformers_refuses_weights_that_do_not_fit(
    damage: Callable[[Path], None], text: str, tmp_path: Path
) -> None:
    directory = save_tiny_model("llama", tmp_path)
    damage(directory)
    assert text in refusal(tiny_options(directory, model_backend="transformers"))


def test_sampling_defaults_come_from_the_generation_config(tmp_path: Path) -> None:
    directory = save_tiny_model("llama", tmp_path)
    values = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05, "min_p": 0.1}
    values |= {"typical_p": 0.5, "epsilon_cutoff": 0}
    (directory / "generation_config.json").write_text(json.dumps(values))
    ready = start_engine(tiny_options(directory), lambda activity, fraction: None).ready.model
    expected = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}
    assert ready.sampling_defaults == expected
    facts = read_facts(directory, read_config(directory))
    assert facts.ignored_sampling == ("typical_p",)


@pytest.mark.advisory("CVE-2025-66448")
def test_code_in_the_directory_is_never_run(tmp_path: Path) -> None:
    directory = save_tiny_model("llama", tmp_path)
    marker = tmp_path / "ran"
    (directory / "modeling_evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    edit_config(
        directory,
        architectures=["EvilForCausalLM"],
        auto_map={"AutoConfig": "modeling_evil.C", "AutoModelForCausalLM": "modeling_evil.EvilForCausalLM"},
    )
    assert "remote code is never run" in refusal(tiny_options(directory))
    # A known architecture is served by transformers' own code, whatever the directory brings.
    edit_config(directory, architectures=["LlamaForCausalLM"])
    start_engine(tiny_options(directory), lambda activity, fraction: None)
    assert not marker.exists()


def test_attention_that_would_be_wrong_is_refused(tmp_path: Path) -> None:
    """DeepSeek V3.2 tells each query which keys to look at: ignored, it would give wrong tokens."""
    config = transformers.DeepseekV32Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=2,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        index_topk=2,
        index_n_heads=2,
        index_head_dim=16,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
    )
    transformers.DeepseekV32ForCausalLM(config).save_pretrained(tmp_path)
    message = refusal(tiny_options(tmp_path))
    assert "architecture DeepseekV32ForCausalLM is not supported" in message
    assert "indexed_attention" in message


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"max_model_len": 1000}, "exceeds the model's context of 256"),
        ({"kv_cache_gib": 1e-6}, "lower max-model-len or raise kv-cache-gib"),
        ({"kv_cache_gib": 5e-5, "max_model_len": 256}, "a sequence of max-model-len 256 needs"),
        ({"kv_cache_gib": 1e5}, "exceeds the"),
        ({"max_num_batched_tokens": 4}, "max_num_batched_tokens"),
    ],
)
def test_options_that_cannot_be_met_are_refused(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    assert text in refusal(tiny_options(save_tiny_model("llama", tmp_path), **changes))


@pytest.mark.parametrize("option", ["dtype", "device", "bucketing_strategy"])
def test_words_that_no_option_has_are_refused_by_the_options_themselves(option: str, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=f"EngineOptions\n{option}\n"):
        tiny_options(tmp_path, **{option: "magic"})


def test_a_pool_for_every_sequence_is_not_exceeded(tmp_path: Path) -> None:
    directory = save_tiny_model("llama", tmp_path)
    options = tiny_options(directory, kv_cache_gib=0.05, max_model_len=100, max_num_seqs=3)
    ready = start_engine(options, lambda activity, fraction: None).ready
    assert ready.capacity.total_blocks == 3 * 13
    assert ready.model.max_model_len == 100


def test_a_length_that_nobody_asked_for_shrinks_to_the_memory(tmp_path: Path) -> None:
    directory = save_tiny_model("llama", tmp_path)
    ready = start_engine(tiny_options(directory, kv_cache_gib=5e-5), lambda activity, fraction: None).ready
    assert 2 <= ready.model.max_model_len < 256
    assert ready.capacity.total_blocks * 8 >= ready.model.max_model_len


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("/nowhere/model", "model directory /nowhere/model does not exist"),
        ("./nowhere", "does not exist"),
        ("~nobody-of-that-name/model", "there is no such user"),
        ("x" * 300, "File name too long"),
        ("/nowhere/model.gguf", "model file /nowhere/model.gguf does not exist"),
        ("some-org/some-model", "HF_HUB_OFFLINE"),
    ],
)
def test_a_name_that_leads_nowhere(
    model: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError) as caught:
        prepare_model(model, cache_dir=tmp_path)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    # 2: the command line is wrong; 1: the hub, or the model.
    code = 1 if model == "some-org/some-model" else 2
    assert prepare_main(["--model", model, "--cache-dir", str(tmp_path)]) == code
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        {"cache_dir": "~nobody-of-that-name/x"},
        {"record_lengths": "~nobody-of-that-name/x"},
        {"bucketing_strategy": "file", "bucketing_file": "~nobody-of-that-name/x"},
        {"role": "prefill", "kv_transfer_directory": "~nobody-of-that-name/x"},
    ],
    ids=lambda options: list(options)[-1],
)
def test_a_path_below_the_home_of_an_unknown_user_is_refused(options: dict[str, str], tmp_path: Path) -> None:
    directory = save_tiny_model("llama", tmp_path)
    refused = "^~nobody-of-that-name: there is no such user$"
    with pytest.raises(StartError, match=refused):
        start_engine(tiny_options(directory, **options), lambda activity, fraction: None)
    if "cache_dir" in options:
        with pytest.raises(StartError, match=refused):
            start_engine(tiny_options(directory, **options), lambda activity, fraction: None)


@pytest.mark.advisory("CVE-2026-7482")
def test_a_broken_gguf_file_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF" + b"\x00" * 64)
    with pytest.raises(ModelError, match="cannot be read: it is of version 0") as caught:
        prepare_model(str(file), cache_dir=tmp_path / "cache")
    assert "\n" not in str(caught.value)
    left = [path for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()]
    assert left == []


def test_two_processes_convert_a_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tiny.gguf"
    file.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 0))
    prepared = save_tiny_model("llama", tmp_path / "made")
    runs: list[list[str]] = []
    first_runs, may_end = threading.Event(), threading.Event()

    def convert(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        runs.append(command)
        first_runs.set()
        assert may_end.wait(20)
        shutil.copytree(prepared, command[-1], dirs_exist_ok=True)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr("services.engine.model.preparation.subprocess.run", convert)
    lines: list[str] = []

    def progress(line: str) -> None:
        lines.append(line)
        if line.startswith("waiting"):
            may_end.set()

    def prepare() -> Path:
        return prepare_model(str(file), cache_dir=tmp_path / "cache", progress=progress)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(prepare)
        assert first_runs.wait(20)
        second = pool.submit(prepare)
        assert first.result(20) == second.result(20)
    assert len(runs) == 1
    assert prepare() == first.result()
    assert any(line.startswith("waiting for another converter") for line in lines)


def test_a_converter_that_hangs_is_ended_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tiny.gguf"
    file.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 0))
    hang = (sys.executable, "-c", "import time; time.sleep(600)")
    monkeypatch.setattr("services.engine.model.preparation.module_command", lambda module: hang)
    message = r"tiny\.gguf cannot be converted: the converter was ended after 0\.2 s \(--convert-timeout-s\)$"
    with pytest.raises(ModelError, match=message):
        prepare_model(str(file), cache_dir=tmp_path / "cache", convert_s=0.2)
    assert [path for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()] == []


@pytest.mark.parametrize(
    ("model", "meant"),
    [
        ("smollm", "smollm2"),
        ("SmolLM2-135M-instruct", "smollm2"),
        ("minLM", "minilm"),
        ("./tinny", "tiny"),
        ("tiny2.gguf", "tiny.gguf"),
        ("./notes", None),
        ("./far/away", None),
    ],
)
def test_the_model_that_is_meant_is_named(
    model: str, meant: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").touch()
    (tmp_path / "tiny.gguf").touch()
    # No model.
    (tmp_path / "notes2").mkdir()
    with pytest.raises(UnknownModelError) as caught:
        resolve_source(model)
    assert (f"(did you mean {meant}?)" in str(caught.value)) == (meant is not None)
    assert ("did you mean" in str(caught.value)) == (meant is not None)


def test_the_hubs_own_words_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)

    def raised(text: str, cause: Exception | None) -> Exception:
        error = OSError(text)
        error.__cause__ = cause
        return error

    unreachable = raised("Got: ConnectError: [Errno -2] Name unknown", OSError(-2, "Name unknown"))
    assert reason_of(unreachable) == "the hub cannot be reached (Name unknown)"
    assert reason_of(raised("Got: slow", TimeoutError())) == "the hub did not answer in time"
    for status, text in ((401, "the hub has no such model"), (503, "the hub answered 503")):
        answered = RuntimeError("long words\nof the client")
        answered.response = SimpleNamespace(status_code=status)  # type: ignore[attr-defined]
        assert reason_of(raised("Got: Error", answered)).startswith(text)
    gated = type("GatedRepoError", (Exception,), {})("403 Client Error: many words")
    assert "HF_TOKEN" in reason_of(gated)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE" in reason_of(unreachable)


def test_a_directory_is_used_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = save_tiny_model("llama", tmp_path / "tiny")
    assert prepare_main(["--model", str(directory)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(directory)
