"""Numbers that no model can have are refused in one line that names the file and the field."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.engine.core.errors import StartError
from services.engine.core.process import start_engine
from services.engine.model import ModelError, prepare_model, read_config
from services.engine.model.prepare import main as prepare_main
from tests.support.torch_engine import save_tiny_model, tiny_options

KINDS = ("llama", "gemma3", "granite", "qwen3_moe")
BASE = "rope_parameters"

Models = Callable[[str], Path]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Directories of tiny models by kind, each made once."""
    made: dict[str, Path] = {}

    def find(kind: str) -> Path:
        if kind not in made:
            made[kind] = save_tiny_model(kind, tmp_path_factory.mktemp(kind))
            text = (made[kind] / "config.json").read_text()
            (made[kind] / "config.sound").write_text(text)
        return made[kind]

    return find


def with_config(directory: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    config = json.loads((directory / "config.sound").read_text())
    change(config)
    # NaN and Infinity are written as Python reads them.
    (directory / "config.json").write_text(json.dumps(config))
    return directory


REFUSED: tuple[tuple[str, Any, str], ...] = (
    ("num_hidden_layers", 10**6, "num_hidden_layers is 1000000, and must be a whole number from 1 to 10000"),
    ("num_hidden_layers", 1e30, "num_hidden_layers is 1e+30"),
    ("num_hidden_layers", 10**30, "num_hidden_layers is 1000000000000000000000000000000"),
    ("num_hidden_layers", 0, "num_hidden_layers is 0"),
    ("num_hidden_layers", 9999, "num_hidden_layers is 9999, and the weights are 20 tensors in all"),
    ("vocab_size", 2**63, "vocab_size is 9223372036854775808"),
    ("vocab_size", 2**30, "vocab_size is 1073741824, and the weights are"),
    ("vocab_size", "many", "vocab_size is 'many', and must be a whole number"),
    ("hidden_size", 2**23, "hidden_size is 8388608, and the weights are"),
    ("intermediate_size", -3, "intermediate_size is -3"),
    ("head_dim", -1, "head_dim is -1, and must be a whole number from 1"),
    ("head_dim", 8.0, "head_dim is 8.0"),
    ("num_attention_heads", True, "num_attention_heads is True"),
    ("num_key_value_heads", 10**400, "num_key_value_heads is 1000"),
    ("max_position_embeddings", -1, "max_position_embeddings is -1"),
    ("max_position_embeddings", [1, -1], "max_position_embeddings is -1"),
    ("rms_norm_eps", float("nan"), "rms_norm_eps is nan, and must be a number from 0 to 1"),
    ("rms_norm_eps", "1e-5", "rms_norm_eps is '1e-5'"),
    ("rope_theta", 0, "rope_theta is 0, and must be a number above 0"),
    ("rope_theta", float("inf"), "rope_theta is inf"),
    ("rope_scaling", {"type": "linear", "factor": -2.0}, "rope_scaling.factor is -2.0"),
    ("rope_scaling", {"type": "yarn", "factor": 2.0, "beta_fast": "x"}, "rope_scaling.beta_fast is 'x'"),
    (BASE, {"full_attention": {"rope_theta": -1}}, "rope_parameters.full_attention.rope_theta is -1"),
    ("text_config", {"num_hidden_layers": 10**9}, "text_config.num_hidden_layers is 1000000000"),
    ("pad_token_id", 2**40, "pad_token_id is 1099511627776"),
)


@pytest.mark.parametrize(("field", "value", "text"), REFUSED)
def test_a_preparation_refuses_a_number_that_no_model_has(
    field: str, value: Any, text: str, models: Models, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = with_config(models("llama"), lambda config: config.update({field: value}))
    capsys.readouterr()
    assert prepare_main(["--model", str(directory)]) == 1
    line = capsys.readouterr().err.strip()
    assert line.count("\n") == 0
    assert f"error: {directory / 'config.json'}: {text}" in line


def test_numbers_that_models_do_have_are_taken(models: Models) -> None:
    usual: dict[str, Any] = {
        "sliding_window": 0,
        "head_dim": None,
        "pad_token_id": -1,
        "max_position_embeddings": 10_485_760,
        "rope_theta": 1_000_000,
        "n_inner": None,
        "sliding_window_pattern": "LLLG",
        "num_experts": 0,
    }
    assert read_config(with_config(models("llama"), lambda config: config.update(usual)))["n_inner"] is None


@pytest.mark.parametrize(
    ("file", "content", "text"),
    [
        ("generation_config.json", {"temperature": 10**400}, "has a temperature of 1000"),
        ("generation_config.json", {"top_k": -(10**400)}, "has a top_k of -1000"),
        ("generation_config.json", {"eos_token_id": list(range(65))}, "names 65 eos_token_ids: 64 at most"),
        ("generation_config.json", {"eos_token_id": 10**30}, "eos_token_id outside its vocabulary"),
    ],
)
def test_other_files_are_refused_by_name(
    file: str, content: dict[str, Any], text: str, models: Models
) -> None:
    directory = with_config(models("llama"), lambda config: None)
    (directory / file).write_text(json.dumps(content))
    try:
        with pytest.raises(ModelError, match=re.escape(text)) as caught:
            prepare_model(str(directory))
        assert len(str(caught.value)) < 400
    finally:
        (directory / file).unlink()


EXTREMES = st.sampled_from(
    [
        *(-(2**63), -1, 0, 1, 3, 7, 2**16, 2**24, 2**31 - 1, 2**31, 2**63, 10**30, 10**400),
        *(0.5, 2.0, -0.5, 1e30, 5e-324, float("nan"), float("inf"), float("-inf")),
        *("", "8", "x" * 100, True, None, [], [1], [-1], {}, {"a": 1}),
    ]
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_value_in_any_field_is_refused_in_one_line_or_served(models: Models, data: st.DataObject) -> None:
    directory = models(data.draw(st.sampled_from(KINDS)))
    sound = json.loads((directory / "config.sound").read_text())
    ropes = sorted(sound.get(BASE) or ())
    fields = sorted(set(sound) - {"model_type"}) + [f"{BASE}.{name}" for name in ropes]
    fields += [f"{BASE}.factor", "rope_scaling", "sliding_window"]
    chosen = data.draw(st.lists(st.tuples(st.sampled_from(fields), EXTREMES), min_size=1, max_size=2))

    def change(config: dict[str, Any]) -> None:
        for name, value in chosen:
            place, dot, inner = name.partition(".")
            if dot and isinstance(config.get(place), dict):
                config[place][inner] = value
            else:
                config[place] = value

    with_config(directory, change)
    refusal: StartError | None = None
    try:
        ready = start_engine(tiny_options(directory), lambda activity, fraction: None).ready
    except StartError as error:
        refusal = error
    if refusal is None:
        assert ready.model.vocab_size == sound["vocab_size"]
    else:
        assert "\n" not in str(refusal)
        assert 0 < len(str(refusal)) < 1000
