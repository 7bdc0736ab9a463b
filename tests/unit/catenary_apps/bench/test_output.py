from __future__ import annotations

import io
import json
import os
import sys
from array import array
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from catenary_apps.bench import plots, serve
from catenary_apps.bench.options import BenchServeConfig
from catenary_apps.bench.serve_table import show
from catenary_apps.cli.main import main
from catenary_apps.load import Conversation, LoadPlan, LoadResult, Target, Turn
from catenary_apps.load.results import Course, evaluate
from catenary_apps.load.statistics import Record

HOSTILE = "[/red] [link=x] $\\frac \x1b[2J"


def _plan() -> LoadPlan:
    return LoadPlan(target=Target(), conversations=[Conversation((Turn("a", 1),))])


def _result() -> LoadResult:
    record = Record(
        conversation=0,
        turn=0,
        due_s=0.0,
        sent_s=0.0,
        ended_s=1.0,
        moments=array("d", [0.5]),
        prompt_tokens=None,
        cached_tokens=None,
        output_tokens=None,
        asked_tokens=1,
        failure="error_event",
        detail="[/bold]",
    )
    return evaluate(_plan(), HOSTILE, [record], Course(1.0, 0.1))


def test_a_servers_words_are_no_markup_and_no_commands_of_a_terminal() -> None:
    out = io.StringIO()
    show(_plan(), _result(), Console(file=out, width=200, force_terminal=False))
    assert "[/red] [link=x] $\\frac \N{REPLACEMENT CHARACTER}[2J" in out.getvalue()
    assert "error_event: [/bold]" in out.getvalue()
    for figure in (plots.latencies(_result()), plots.throughput(_result())):
        figure.savefig(io.BytesIO())


class _Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def test_an_output_that_takes_nothing_does_not_take_the_file_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    monkeypatch.setattr(serve, "run", lambda *_, **__: _result())
    monkeypatch.setattr(sys, "stdout", _Full())
    assert main(["bench", "serve", "--no-progress", "--save", str(file)]) == 1
    assert json.loads(file.read_text())["runs"][0]["failed"] == 1
    assert capsys.readouterr().err == (
        "catenary bench serve: the output cannot be written: No space left on device\n"
    )


def test_a_path_of_other_bytes_than_characters_is_written_as_well_as_can_be() -> None:
    config = BenchServeConfig(dataset_path=Path(os.fsdecode(b"/tmp/\xff")))
    document = serve.result_document(config, None, [], datetime.now(UTC))
    assert (
        json.loads(msgspec.json.encode(document))["options"]["dataset_path"]
        == "/tmp/\N{REPLACEMENT CHARACTER}"
    )
