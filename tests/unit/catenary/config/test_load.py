from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel, Field, ValidationError

from catenary.config import (
    ConfigError,
    Expert,
    Given,
    ServiceConfig,
    check_variables,
    load,
    option_of,
    options_markdown,
    settings,
    unknown_variables,
)
from catenary.config.parser import option_groups


class ExampleConfig(ServiceConfig):
    """An example."""

    model_config = settings(prefix="CATENARY_EXAMPLE_")

    listen: tuple[str, ...] = Field(("127.0.0.1:1",), description="Addresses.")
    max_model_len: int = Field(64, gt=0, description="Longest sequence; 100% of it.")
    warm: bool = Field(True, description="Warm up.")
    model_dir: Path | None = Field(None, description="Directory | of the model.")
    api_key: tuple[str, ...] = Field((), max_length=1, description="Keys.")
    api_key_file: Path | None = Field(None, description="File of keys.")
    pool: float | None = Field(None, gt=0, description="Size of a pool.")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ExampleConfig.model_fields, "config"):
        monkeypatch.delenv(f"CATENARY_EXAMPLE_{name.upper()}", raising=False)


class NamedConfig(ServiceConfig):
    """A configuration with names."""

    model_config = settings("CATENARY_NAMED_")

    name: str | None = Field(None, min_length=1, description="A name.")
    note: str | None = Field(None, description="A note.")


def run(*argv: str) -> ExampleConfig:
    return load(ExampleConfig, argv, prog="example")


def one_line(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        run(*argv)
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("example: ")
    return error


def test_defaults() -> None:
    config = run()
    assert (config.listen, config.max_model_len, config.warm) == (("127.0.0.1:1",), 64, True)
    assert (config.log_level, config.log_format) == ("info", "text")


def test_flags_win_over_environment_over_yaml_over_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "example.yaml"
    file.write_text("max-model-len: 1\nlog_level: debug\nlisten: [a:1, b:2]\nwarm: false\n")
    assert run("--config", str(file)).max_model_len == 1
    monkeypatch.setenv("CATENARY_EXAMPLE_MAX_MODEL_LEN", "2")
    monkeypatch.setenv("CATENARY_EXAMPLE_CONFIG", str(file))
    config = run()
    assert (config.max_model_len, config.log_level, config.listen) == (2, "debug", ("a:1", "b:2"))
    assert config.warm is False
    assert run("--max-model-len", "3").max_model_len == 3


def test_lists_are_comma_separated_and_may_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("--listen", "a:1, b:2", "--listen=c:3").listen == ("a:1", "b:2", "c:3")
    monkeypatch.setenv("CATENARY_EXAMPLE_LISTEN", "d:4,e:5")
    assert run().listen == ("d:4", "e:5")


@pytest.mark.parametrize(
    ("flags", "value"),
    [(("--warm",), True), (("--warm=false",), False), (("--no-warm",), False), (("--warm", "no"), False)],
)
def test_booleans(flags: tuple[str, ...], value: bool) -> None:
    assert run(*flags).warm is value


def test_an_empty_variable_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CATENARY_EXAMPLE_MAX_MODEL_LEN", "")
    monkeypatch.setenv("CATENARY_EXAMPLE_CONFIG", "")
    assert run().max_model_len == 64
    assert run("--model-dir", "").model_dir is None


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (("--max-model-len", "0"), ("--max-model-len", "'0'", "expected a whole number above 0")),
        (("--max-model-len", "many"), ("--max-model-len", "'many'", "whole number")),
        (("--max-model-len",), ("--max-model-len", "needs a value: --max-model-len INT")),
        (("--pool", "inf"), ("--pool", "'inf'", "finite")),
        (("--pool", "1e999"), ("--pool", "finite")),
        (("--pool", "nan"), ("--pool", "finite")),
        (("--max-model-lens", "3"), ("unknown option --max-model-lens", "did you mean --max-model-len")),
        (("--max", "3"), ("unknown option --max",)),
        (("serve",), ("unexpected argument",)),
        (("--warm=perhaps",), ("--warm", "true or false")),
        (("--log-level", "loud"), ("--log-level", "expected debug, info, warning or error")),
        (("--config", "/nowhere.yaml"), ("/nowhere.yaml", "No such file")),
        (("--config", "/"), ("--config /", "directory")),
    ],
)
def test_a_bad_flag_is_one_line(
    argv: tuple[str, ...], parts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    error = one_line(capsys, *argv)
    for part in parts:
        assert part in error


def test_a_bad_variable_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CATENARY_EXAMPLE_MAX_MODEL_LEN", "-4")
    assert "CATENARY_EXAMPLE_MAX_MODEL_LEN '-4'" in one_line(capsys)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("max_model_lem: 3\n", "unknown option 'max_model_lem' (did you mean 'max_model_len'?)"),
        ("max_model_len: [\n", "not valid YAML at line"),
        ("- 1\n", "expected a mapping"),
        ("max_model_len: {a: 1}\n", "max_model_len in "),
        ("max_model_len: !!python/object/apply:os.system ['true']\n", "not valid YAML"),
        ("listen: 7\n", "listen in "),
    ],
)
def test_a_bad_file_is_one_line(
    text: str, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    assert part in one_line(capsys, "--config", str(file))


def test_an_empty_file_is_no_options(tmp_path: Path) -> None:
    file = tmp_path / "empty.yaml"
    file.write_text("")
    assert run("--config", str(file)).max_model_len == 64


def test_errors_do_not_show_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "sk-one" not in one_line(capsys, "--api-key", "sk-one,sk-two")
    assert "sk-one" not in one_line(capsys, "--apikey=sk-one")
    monkeypatch.setenv("CATENARY_EXAMPLE_API_KEY", "sk-one,sk-two")
    assert "sk-one" not in one_line(capsys)


@pytest.mark.parametrize("keys", ["", " ", ",", "sk-one,", ",sk-one", "sk-one,,sk-two"])
def test_a_list_of_secrets_has_no_empty_entry(
    keys: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = one_line(capsys, f"--api-key={keys}")
    assert error.startswith("example: --api-key: has an empty entry")
    file = tmp_path / "example.yaml"
    file.write_text(f"api_key: '{keys}'\n")
    assert "empty entry" in one_line(capsys, "--config", str(file))
    monkeypatch.setenv("CATENARY_EXAMPLE_API_KEY", keys)
    assert "CATENARY_EXAMPLE_API_KEY: has an empty entry" in one_line(capsys)
    monkeypatch.delenv("CATENARY_EXAMPLE_API_KEY")
    with pytest.raises(ValidationError):
        ExampleConfig(api_key=tuple(keys.split(",")))


@pytest.mark.parametrize("name", ["", " ", "\t"])
def test_a_file_of_secrets_has_a_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--api-key-file" in one_line(capsys, "--api-key-file", name)
    assert "names no file" in one_line(capsys, f"--api-key-file={name}")
    monkeypatch.setenv("CATENARY_EXAMPLE_API_KEY_FILE", name)
    assert "CATENARY_EXAMPLE_API_KEY_FILE" in one_line(capsys)
    with pytest.raises(ConfigError, match=r"CATENARY_EXAMPLE_API_KEY_FILE.*names no file"):
        check_variables(ExampleConfig, {"CATENARY_EXAMPLE_API_KEY_FILE": name})


@pytest.mark.parametrize(
    "line", ["api_key_file: ''", "api_key_file:", "api_key_file: []", "api_key:", "api_key: []"]
)
def test_no_value_in_a_file_of_options_means_no_keys(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "example.yaml"
    file.write_text(f"{line}\n")
    error = one_line(capsys, "--config", str(file))
    assert error.startswith(f"example: {line.partition(':')[0]} in {file}")
    assert "leave the option out" in error


def test_keys_are_stripped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CATENARY_EXAMPLE_API_KEY", " sk-two ")
    assert run().api_key == ("sk-two",)
    assert run("--api-key", " sk-one ").api_key == ("sk-one",)


def test_an_empty_text_is_absence_but_where_a_least_length_is_declared(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CATENARY_NAMED_NAME", "")
    assert load(NamedConfig, ["--note", ""], prog="named") == NamedConfig(name=None, note=None)
    with pytest.raises(SystemExit):
        load(NamedConfig, ["--name", ""], prog="named")
    assert capsys.readouterr().err.startswith("named: --name '': ")


def test_help_names_every_option_with_default_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        run("--help")
    assert exit_.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for flag in ("--log-level", "--listen", "--max-model-len", "--warm", "--model-dir", "--config"):
        assert flag in text
    assert "100% of it. [default: 64] [env CATENARY_EXAMPLE_MAX_MODEL_LEN]" in text


def test_a_configuration_built_directly_reads_the_environment_and_is_frozen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CATENARY_EXAMPLE_MAX_MODEL_LEN", "5")
    config = ExampleConfig(warm=False)
    assert (config.max_model_len, config.warm) == (5, False)
    with pytest.raises(ValidationError):
        config.warm = True


class PartOptions(BaseModel):
    headings: ClassVar[Mapping[str, str]] = {"width": Expert("Sizes"), "name": "Names"}

    width: int = Field(1, description="Width.")
    name: str = Field("a", description="Name.")


class GroupedConfig(PartOptions, ServiceConfig):
    model_config = settings("CATENARY_GROUPED_")

    place: str = Field("b", description="Place.")


def test_a_group_of_options_ends_with_the_class_that_declares_it() -> None:
    assert option_groups(GroupedConfig) == {
        "Options": ["place"],
        "Logs": ["log_level", "log_format"],
        "Sizes": ["width"],
        "Names": ["name"],
    }


def test_expert_options_are_documented_apart() -> None:
    lines = options_markdown({"Grouped": GroupedConfig}).splitlines()
    assert [line for line in lines if line.startswith("#")] == [
        "## Grouped",
        "### Options",
        "### Logs",
        "### Names",
        "### Expert options",
        "#### Sizes",
    ]
    assert lines[-1].startswith("| `--width` | `CATENARY_GROUPED_WIDTH` | `INT` | `1` | Width. |")


def test_the_documentation_has_a_section_per_class() -> None:
    text = options_markdown({"Example": ExampleConfig, "Base": ServiceConfig})
    assert [line for line in text.splitlines() if line.startswith("## ")] == ["## Example", "## Base"]
    assert (
        "| `--max-model-len` | `CATENARY_EXAMPLE_MAX_MODEL_LEN` | `INT` | `64` "
        "| Longest sequence; 100% of it. |" in text
    )
    assert "Directory \\| of the model." in text
    rows = [line.replace("\\|", "") for line in text.splitlines() if line.startswith("|")]
    assert {row.count("|") for row in rows} == {6}


def test_unknown_variables_are_named_with_the_nearest_known_one() -> None:
    environment = {
        "CATENARY_ENGINE_MAX_NUM_SEQ": "secret",
        "CATENARY_ENGINE_MAX_NUM_SEQS": "8",
        "CATENARY_ENGINE_CONFIG": "file",
        "CATENARY_ENGINE_OLD": "",
        "CATENARY_CACHE": "/cache",
        "CATENARY_ROUTER_ANYTHING": "another program's",
        "CATENARY_ENGIN_MODEL": "m",
        "OTHER": "y",
    }
    assert unknown_variables(environment, ["CATENARY_ENGINE_"]) == (
        "CATENARY_ENGINE_MAX_NUM_SEQ is not a variable that anything reads "
        "(did you mean CATENARY_ENGINE_MAX_NUM_SEQS?)",
        "CATENARY_ENGIN_MODEL is not a variable that anything reads (did you mean CATENARY_ENGINE_MODEL?)",
    )


def test_fallback_counts_where_nothing_was_given(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []

    def fallback(own: Mapping[str, Any]) -> Mapping[str, Given]:
        seen.append(dict(own))
        return {"max_model_len": Given("7", "FOREIGN"), "pool": Given("bad", "FOREIGN_POOL")}

    monkeypatch.setenv("CATENARY_EXAMPLE_POOL", "2")
    config = load(ExampleConfig, ["--warm", "false"], prog="example", fallback=fallback)
    assert (config.max_model_len, config.pool, config.warm) == (7, 2.0, False)
    assert seen == [{"pool": "2", "warm": "false"}]
    monkeypatch.delenv("CATENARY_EXAMPLE_POOL")
    with pytest.raises(SystemExit):
        load(ExampleConfig, [], prog="example", fallback=fallback)
    assert capsys.readouterr().err.startswith("example: FOREIGN_POOL 'bad': ")


def test_an_option_of_another_program_keeps_its_bounds_and_its_help() -> None:
    class Declaring(ServiceConfig):
        model_config = settings(prefix="T_DECLARING_")
        rows: int = Field(4, ge=1, le=9, description="Rows of a table.")

    class Taking(ServiceConfig):
        model_config = settings(prefix="T_TAKING_")
        rows: int | None = option_of(Declaring, "rows", default=None)

    assert (Declaring().rows, Taking().rows) == (4, None)
    assert Taking.model_fields["rows"].description == "Rows of a table."
    with pytest.raises(ValidationError, match="less than or equal to 9"):
        Taking(rows=10)
