"""Models from ModelScope and from mirrors, fetched from a hub on loopback."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.engine.model import ModelError, find_config, prepare_model, resolve_source, sources
from services.engine.model.sources import SourceKind
from tests.support.hub import Hub, serving, tiny_files
from tests.support.service_process import clean_environment

MODEL = "modelscope:group/some-name.1"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    for name in ("VLLM_USE_MODELSCOPE", "MODELSCOPE_API_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "scope"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(sources, "_RETRY_S", 0.0)
    with serving(Hub(tiny_files())) as served:
        monkeypatch.setenv("MODELSCOPE_DOMAIN", served.url)
        yield served


def refusal(model: str = MODEL, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        prepare_model(model, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def listing(*entries: Any) -> Any:
    return {"Code": 200, "Data": {"Files": list(entries)}}


def test_model_is_fetched_from_modelscope(hub: Hub, tmp_path: Path) -> None:
    said: list[str] = []
    directory = prepare_model(MODEL, progress=said.append)
    assert directory == tmp_path / "scope" / "models" / "group" / "some-name.1"
    assert {path.name for path in directory.iterdir()} == {"config.json", "model.safetensors"}
    assert "fetching group/some-name.1 from ModelScope: config.json (1 of 2)" in said
    asked = len(hub.requests)
    assert prepare_model(MODEL) == directory
    assert len(hub.requests) == asked
    assert not [path for path in directory.parent.iterdir() if "partial" in path.name]


def test_config_alone_is_fetched(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CATENARY_CACHE", str(tmp_path / "ours"))
    config, name, directory = find_config(MODEL, progress=lambda _: None)
    assert directory is not None
    assert (config["model_type"], name) == ("llama", "group/some-name.1")
    assert [path.name for path in directory.iterdir()] == ["config.json"]
    # It is not taken for the model, whose own config is used once it is there.
    assert find_config(MODEL, progress=lambda _: None)[2] == directory != prepare_model(MODEL)
    assert find_config(MODEL, progress=lambda _: None)[2] == prepare_model(MODEL)


def test_modelscope_cache_names_the_directory(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MODELSCOPE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert prepare_model(MODEL, cache_dir=tmp_path / "ours").is_relative_to(tmp_path / "ours" / "modelscope")
    # What ModelScope's own library has fetched before is used as it is; it writes dots as underscores.
    theirs = tmp_path / "theirs" / "models" / "group" / "some-name___1"
    theirs.mkdir(parents=True)
    for name, data in tiny_files().items():
        (theirs / name).write_bytes(data)
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "theirs"))
    asked = len(hub.requests)
    assert prepare_model(MODEL) == theirs
    assert len(hub.requests) == asked


def test_vllm_use_modelscope_makes_ids_those_of_modelscope(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_MODELSCOPE", raising=False)
    assert resolve_source("group/name").kind is SourceKind.HUB
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    source = resolve_source("group/name")
    assert (source.kind, source.hub_id, source.name) == (SourceKind.MODELSCOPE, "group/name", "group/name")
    with pytest.raises(ModelError, match="GROUP/NAME"):
        resolve_source("no-group")


@pytest.mark.parametrize(
    "bad", ["modelscope:name", "modelscope:../name", "modelscope:a/b/c", "modelscope:a/.b"]
)
def test_what_is_no_id_is_refused(bad: str, hub: Hub) -> None:
    assert "no id of ModelScope" in refusal(bad)
    assert not hub.requests


@pytest.mark.parametrize(
    "path", ["../config.json", "/etc/config.json", "a/../../config.json", "..\\config.json"]
)
def test_file_that_lies_elsewhere_refuses_the_model(path: str, hub: Hub, tmp_path: Path) -> None:
    hub.listing = listing(hub.entry("config.json", Path=path))
    assert "lies elsewhere" in refusal()
    assert not list(tmp_path.rglob("config.json"))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"Size": 3}, "sent 4 bytes or more of config.json, listed with 3"),
        ({"Size": 10_000}, "listed with 10000"),
        ({"Size": 1 << 60}, "GiB are free"),
        ({"Size": -1}, "expected form"),
        ({"Size": "12"}, "expected form"),
        ({"Path": 7}, "expected form"),
        ({"Sha256": "00"}, "another SHA-256"),
    ],
)
def test_file_that_is_not_what_was_listed(changes: dict[str, Any], text: str, hub: Hub) -> None:
    hub.listing = listing(hub.entry("config.json", **changes))
    assert text in refusal()


@pytest.mark.parametrize("data", [[], {}, {"Data": {"Files": 3}}, {"Data": {"Files": [3]}}, "x" * (17 << 20)])
def test_list_that_is_none(data: Any, hub: Hub) -> None:
    hub.listing = data
    assert "list of the files" in refusal()


def test_passing_failures_are_tried_again_and_others_are_not(hub: Hub) -> None:
    hub.failures = [503, 500]
    prepare_model(MODEL)
    hub.files["extra.json"] = b"{}"
    hub.failures = [404]
    assert "HTTP status 404" in refusal("modelscope:group/other")
    hub.failures = [500] * 3
    assert "HTTP status 500" in refusal("modelscope:group/third")
    assert not hub.failures


def test_interrupted_fetch_goes_on(hub: Hub) -> None:
    hub.listing = listing(hub.entry("config.json"), hub.entry("model.safetensors"))
    weights = hub.files.pop("model.safetensors")
    assert "HTTP status 404" in refusal()
    hub.files["model.safetensors"] = weights
    directory = prepare_model(MODEL)
    asked = [target.rsplit("=", 1)[-1] for target, _ in hub.requests if "FilePath" in target]
    assert asked == ["config.json", "model.safetensors", "model.safetensors"]
    assert (directory / "model.safetensors").read_bytes() == weights


def test_token_is_sent_to_modelscope_alone(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "secret-token")
    with serving(Hub(tiny_files())) as storage:
        hub.elsewhere = storage.url
        prepare_model(MODEL)
        assert all("secret-token" in headers.get("cookie", "") for _, headers in hub.requests)
        assert storage.requests
        assert not any("secret-token" in str(headers) for _, headers in storage.requests)


def test_unreachable_hub_is_one_line(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELSCOPE_DOMAIN", "http://127.0.0.1:1")
    assert "cannot be fetched from http://127.0.0.1:1" in refusal()
    for domain in ("ftp://127.0.0.1", "http://[::1", ":::"):
        monkeypatch.setenv("MODELSCOPE_DOMAIN", domain)
        assert "host name or an http(s) URL" in refusal()


def test_offline_looks_into_the_cache_only(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "hub access is off" in refusal()
    assert not hub.requests
    monkeypatch.delenv("HF_HUB_OFFLINE")
    directory = prepare_model(MODEL)
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")
    assert prepare_model(MODEL) == directory


def test_hf_endpoint_names_a_mirror(hub: Hub, tmp_path: Path) -> None:
    # The library reads its variables when it is imported, so in a process of its own.
    done = subprocess.run(
        [sys.executable, "-m", "services.engine.model.prepare", "--model", "group/name"],
        env=clean_environment() | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    directory = Path(done.stdout.strip())
    assert directory.is_relative_to(tmp_path)
    assert (directory / "config.json").read_bytes() == hub.files["config.json"]
    assert "/group/name/resolve/" in "".join(hub.paths())
