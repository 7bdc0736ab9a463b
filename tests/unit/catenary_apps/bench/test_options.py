"""Options of `catenary bench serve` that switch something of a run's surroundings: waiting, names, files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from catenary.config import flag_name
from catenary_apps.bench.options import NAMES, BenchServeConfig
from catenary_apps.cli.main import main
from tests.support.bench_command import SMALL, bench_serve, origin_in_a_thread
from tests.support.repository import ROOT
from tests.support.sse_origin import Origin

DOCS = ROOT / "docs" / "benchmarking.md"


@pytest.fixture
def origin() -> Iterator[Origin]:
    with origin_in_a_thread() as origin:
        yield origin


def test_names_of_vllm_lead_to_options_that_are_there() -> None:
    ours = {flag_name(name) for name in BenchServeConfig.model_fields} | {"--no-progress"}
    for theirs, here in NAMES.items():
        assert theirs not in ours
        assert set(re.findall(r"--[a-z-]+", here)) <= ours, here


def test_the_documentation_names_what_vllm_calls_otherwise() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert [name for name in NAMES if f"`{name}`" not in text] == []


def test_requests_have_ids_and_runs_what_is_said_of_them(origin: Origin, tmp_path: Path) -> None:
    words = [
        "--request-id-prefix",
        "night-",
        "--metadata",
        "label=a b,tp=2",
        "--save-requests",
        "--turns",
        "2",
    ]
    assert bench_serve(origin, *words, "--save", str(tmp_path), "--request-rate", "inf") == 0
    sent = [exchange.headers["x-request-id"] for exchange in origin.exchanges]
    measured = sorted(f"night-{number}-{turn}" for number in range(3) for turn in range(2))
    assert sent[:2] == ["night-warm-up-0-0", "night-warm-up-0-1"]
    assert sorted(sent[2:]) == measured
    (file,) = tmp_path.iterdir()
    assert re.fullmatch(r"serve-\d{8}-\d{6}\.json", file.name)
    written = json.loads(file.read_text())
    assert written["metadata"] == {"label": "a b", "tp": "2"}
    assert written["options"]["request_rate"] is None
    assert sorted(one["request_id"] for one in written["runs"][0]["requests"]) == measured


def test_runs_of_a_sweep_have_ids_of_their_own(origin: Origin) -> None:
    assert bench_serve(origin, "--request-id-prefix", "x", "--sweep", "concurrency=1,2", "--warmup", "0") == 0
    sent = {exchange.headers["x-request-id"] for exchange in origin.exchanges}
    assert sent == {f"x{value}-{number}-0" for value in (1, 2) for number in range(3)}


def test_without_a_prefix_no_id_is_sent(origin: Origin) -> None:
    assert bench_serve(origin) == 0
    assert all("x-request-id" not in exchange.headers for exchange in origin.exchanges)


def test_a_server_that_starts_is_waited_for(origin: Origin, capsys: pytest.CaptureFixture[str]) -> None:
    origin.models = [[], [], ["late"]]
    assert bench_serve(origin) == 1
    assert (
        "lists no model that generates (if it is starting, wait: --ready-timeout-s)"
        in capsys.readouterr().err
    )
    assert bench_serve(origin, "--ready-timeout-s", "60") == 0
    assert {body["model"] for body in origin.bodies} == {"late"}


def test_waiting_has_an_end(origin: Origin, capsys: pytest.CaptureFixture[str]) -> None:
    wait = ["--ready-timeout-s", "0.05"]
    assert bench_serve(origin, *wait, "--model", "other") == 1
    assert f"after 0.05 s: {origin.address} does not list the model other" in capsys.readouterr().err
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:1", *SMALL, *wait]) == 1
    assert "after 0.05 s: no answer from http://127.0.0.1:1" in capsys.readouterr().err
    assert origin.exchanges == []


@pytest.mark.parametrize("status", [401, 404])
def test_what_does_not_pass_is_not_waited_for(
    origin: Origin, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    origin.models = status
    assert bench_serve(origin, "--ready-timeout-s", "60") == 1
    assert f"answers {status} to GET /v1/models" in capsys.readouterr().err
    # A server without that route may serve a model that has a name.
    assert bench_serve(origin, "--ready-timeout-s", "60", "--model", "m") == (1 if status == 401 else 0)
