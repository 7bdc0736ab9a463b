"""What is said of a value that an option does not take: in plain words, with every limit, for all sources."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from catenary.config import ConfigError, ServiceConfig, check_variables, env_name, load, settings
from catenary_apps.bench.options import BenchServeConfig, BenchThroughputConfig
from catenary_apps.buckets.config import BucketsConfig
from catenary_apps.cli.chat import ChatConfig
from catenary_apps.doctor.run import DoctorConfig
from catenary_apps.plan.config import PlanConfig
from catenary_apps.top.run import TopConfig
from catenary_apps.up.config import UpConfig
from gateway.config import GatewayConfig
from services.engine.config import EngineConfig
from services.router.config import RouterConfig
from services.tokenizer.config import TokenizerConfig


class WordsConfig(ServiceConfig):
    """One option of each kind."""

    model_config = settings("CATENARY_WORDS_")

    port: int = Field(1, ge=0, le=65535, description="From, to.")
    count: int | None = Field(None, ge=1, description="At least.")
    below: int = Field(0, ge=0, lt=9, description="From, below.")
    share: float = Field(0.5, gt=0, le=1, description="Above, at most.")
    seconds: float | None = Field(None, gt=0, description="Above.")
    most: float = Field(0, le=2.5, description="At most.")
    seed: int = Field(0, description="Any.")
    warm: bool = Field(True, description="A switch.")
    device: Literal["auto", "cuda", "hpu"] = Field("auto", description="One of.")
    logged: Literal["off", "all"] = Field("all", description="YAML takes off for false.")
    name: str | None = Field(None, min_length=1, max_length=5, description="A text.")
    form: str = Field("1:2", pattern=r"^\d:\d$", examples=["1:2"], description="A text of a form.")
    file: Path | None = Field(None, description="A path.")
    names: tuple[str, ...] = Field((), max_length=2, description="A list.")
    needed: tuple[str, ...] = Field(("a",), min_length=1, description="A list that is not empty.")
    roles: tuple[Literal["prefill", "decode"], ...] = Field((), description="A list of words.")
    shares: tuple[Annotated[float, Field(ge=0, le=1)], ...] = Field((), description="A list of numbers.")
    lanes: tuple[int, int] = Field((1, 2), description="Just two.")
    api_key: tuple[str, ...] = Field((), max_length=1, description="Secrets.")


ROLES = "expected prefill or decode for each entry, not 'prefil'"
TWO = "expected a list of at most 2 entries, divided by commas"
FLAGS = [
    ("port", "eight", "expected a whole number from 0 to 65535"),
    ("port", "65536", "expected a whole number from 0 to 65535"),
    ("port", "-1", "expected a whole number from 0 to 65535"),
    ("port", "1.5", "expected a whole number from 0 to 65535"),
    ("port", "", "expected a whole number from 0 to 65535"),
    ("count", "0", "expected a whole number of at least 1"),
    ("below", "9", "expected a whole number from 0 to below 9"),
    ("share", "0", "expected a number above 0 and at most 1"),
    ("share", "half", "expected a number above 0 and at most 1"),
    ("share", "nan", "expected a finite number above 0 and at most 1"),
    ("seconds", "inf", "expected a finite number above 0"),
    ("most", "3", "expected a number of at most 2.5"),
    ("seed", "x", "expected a whole number"),
    ("warm", "perhaps", "expected true or false"),
    ("device", "cdua", "expected auto, cuda or hpu (did you mean cuda?)"),
    ("device", "CUDA", "expected auto, cuda or hpu (did you mean cuda?)"),
    ("device", "gpu", "expected auto, cuda or hpu (did you mean cuda?)"),
    ("device", "tpu", "expected auto, cuda or hpu"),
    ("name", "", "expected a text of 1 to 5 characters, not 0"),
    ("name", "longer", "expected a text of 1 to 5 characters, not 6"),
    ("form", "1", "expected a text such as 1:2"),
    ("names", "a,b,c", "expected a list of at most 2 entries, divided by commas, not 3"),
    ("needed", ",", "expected a list of at least 1 entry, divided by commas, not 0"),
    ("roles", "decode,prefil", f"{ROLES} (did you mean prefill?)"),
    ("shares", "0.5,2", "expected a number from 0 to 1 for each entry, not '2'"),
    ("lanes", "1,2,3", "expected 2 entries, divided by commas, not 3"),
    ("lanes", "1", "expected 2 entries, divided by commas, not 1"),
    ("lanes", "1,x", "expected a whole number for each entry, not 'x'"),
]


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as end:
        load(WordsConfig, argv, prog="words")
    assert end.value.code == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    return line.removeprefix("words: ").rstrip("\n")


@pytest.mark.parametrize(("name", "value", "expected"), FLAGS)
def test_a_flag(name: str, value: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, f"--{name}={value}") == f"--{name} {value!r}: {expected}"


@pytest.mark.parametrize(("name", "value", "expected"), FLAGS)
def test_a_variable(
    name: str,
    value: str,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    variable = f"CATENARY_WORDS_{name.upper()}"
    monkeypatch.setenv(variable, value)
    if not value:
        assert load(WordsConfig, [], prog="words") == WordsConfig()
        return
    assert refusal(capsys) == f"{variable} {value!r}: {expected}"
    with pytest.raises(ConfigError) as refused:
        check_variables(WordsConfig, {variable: value})
    assert str(refused.value) == f"{variable} {value!r}: {expected}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("port: eight", "port in F 'eight': expected a whole number from 0 to 65535"),
        ("port: 1.5", "port in F 1.5: expected a whole number from 0 to 65535"),
        ("port: true", "port in F True: expected a whole number from 0 to 65535"),
        ("port: [1]", "port in F [1]: expected a whole number from 0 to 65535"),
        ("port:", "port in F: expected a whole number from 0 to 65535"),
        ("share: yes", "share in F True: expected a number above 0 and at most 1"),
        ("warm: 7", "warm in F 7: expected true or false"),
        ("device: 3", "device in F 3: expected auto, cuda or hpu"),
        ("logged: off", "logged in F False: expected off or all (write it in quotes)"),
        ("name: 7", "name in F 7: expected a text of 1 to 5 characters (write it in quotes)"),
        ("file: 7", "file in F 7: expected a path"),
        ("names: 7", "names in F 7: expected a list of at most 2 entries, divided by commas"),
        ("names: [a, b, c]", f"names in F ['a', 'b', 'c']: {TWO}, not 3"),
        ("names: {a: 1}", "names in F {'a': 1}: expected a list of at most 2 entries, divided by commas"),
        ("lanes: [1]", "lanes in F [1]: expected 2 entries, divided by commas, not 1"),
        ("device: gpu", "device in F 'gpu': expected auto, cuda or hpu (did you mean cuda?)"),
    ],
)
def test_a_file(text: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "words.yaml"
    file.write_text(f"{text}\n")
    assert refusal(capsys, "--config", str(file)).replace(str(file), "F") == expected


def test_a_secret_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    expected = "--api-key: expected a list of at most 1 entry, divided by commas, not 2"
    assert refusal(capsys, "--api-key", "sk-one,sk-two") == expected


def test_a_number_of_too_many_digits_is_not_shown_whole(capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, "--seed", "9" * 5000)
    assert line.endswith("...: expected a whole number, of at most 4300 digits")
    assert len(line) < 200


PROGRAMS: tuple[type[ServiceConfig], ...] = (
    *(UpConfig, ChatConfig, PlanConfig, BucketsConfig, BenchServeConfig, BenchThroughputConfig, TopConfig),
    *(DoctorConfig, GatewayConfig, RouterConfig, TokenizerConfig, EngineConfig),
)
# How pydantic begins what it says.
FOREIGN = ("Input ", "String ", "Tuple ", "Value ", "Field ", "valid integer", "valid number", "items after")


def refused(cls: type[ServiceConfig], name: str, value: str) -> str:
    """What is said of the value, without the value; empty if it is taken."""
    try:
        check_variables(cls, {env_name(cls, name): value})
    except ConfigError as error:
        return str(error).replace(repr(value), "")
    return ""


@pytest.mark.parametrize("cls", PROGRAMS)
@given(value=st.one_of(st.text(st.characters(exclude_characters="\0"), max_size=20), st.just("9" * 4400)))
def test_no_option_of_any_program_is_refused_in_pydantics_words(cls: type[ServiceConfig], value: str) -> None:
    for name in cls.model_fields:
        text = refused(cls, name, value)
        assert not any(word in text for word in FOREIGN), text
        assert "\n" not in text
