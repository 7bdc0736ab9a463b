from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from catenary.runtime import StartRefused
from catenary_apps.cli.main import main
from catenary_apps.cli.runtime_directory import RuntimeDirectory
from catenary_apps.profile.config import ProfileConfig
from catenary_apps.profile.fetch import find_engine
from catenary_apps.profile.summary import as_json, lines, show, summarise

HOLDER = (
    "import time\n"
    "from pathlib import Path\n"
    "from catenary_apps.cli.runtime_directory import RuntimeDirectory\n"
    "kept = RuntimeDirectory.create()\n"
    "for name in ('engine-0', 'engine-1'):\n"
    "    Path(kept.socket(name).removeprefix('unix:')).touch()\n"
    "print(kept.path, flush=True)\ntime.sleep(600)"
)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


class Runs:
    """Directories of `catenary up`, held by processes of their own."""

    def __init__(self, temporary: Path) -> None:
        self._environment = os.environ | {"TMPDIR": str(temporary)}
        self._holders: list[subprocess.Popen[str]] = []

    def start(self) -> RuntimeDirectory:
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True, env=self._environment
        )
        self._holders.append(holder)
        assert holder.stdout is not None
        return RuntimeDirectory(Path(holder.stdout.readline().strip()))

    def kill(self) -> None:
        for holder in self._holders:
            holder.kill()
            holder.wait(10)
        self._holders.clear()


@pytest.fixture
def runs(temporary: Path) -> Iterator[Runs]:
    made = Runs(temporary)
    yield made
    made.kill()


def test_the_engine_of_the_one_running_up_is_found_with_its_secret(runs: Runs) -> None:
    run = runs.start()
    secret = run.client_secret.read_text().strip()
    for engine, name in ((None, "engine-0"), ("engine-1", "engine-1"), (run.socket("engine-1"), "engine-1")):
        target = find_engine(ProfileConfig(engine=engine))
        assert (target.address, target.secret, target.tls) == (run.socket(name), secret, None)
    assert secret not in repr(target)
    with pytest.raises(StartRefused, match="with an engine-7: give --engine"):
        find_engine(ProfileConfig(engine="engine-7"))
    second = runs.start()
    with pytest.raises(StartRefused, match="more than one") as refused:
        find_engine(ProfileConfig())
    assert run.socket("engine-0") in str(refused.value)
    assert second.socket("engine-0") in str(refused.value)
    runs.kill()
    with pytest.raises(StartRefused, match="no catenary up of yours"):
        find_engine(ProfileConfig())


def test_an_address_is_taken_as_it_is_with_the_given_secret(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CATENARY_CLIENT_SECRET", "from-environment")
    target = find_engine(ProfileConfig(engine="10.0.0.7:7100"))
    assert (target.address, target.secret) == ("10.0.0.7:7100", "from-environment")
    file = temporary / "secret"
    file.write_text("from-file\n")
    config = ProfileConfig(engine="10.0.0.7:7100", client_secret_file=file, tls_ca=temporary / "ca.pem")
    target = find_engine(config)
    assert target.secret == "from-file"
    assert target.tls is not None
    with pytest.raises(StartRefused, match="--engine nonsense"):
        find_engine(ProfileConfig(engine="nonsense"))


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--steps", "0"], "--steps"),
        (["--seconds", "-1"], "--seconds"),
        (["--engine", ""], "--engine"),
        (["--output", "/nonexistent/t.json", "--engine", "127.0.0.1:1"], "--output /nonexistent/t.json"),
        (["--output", "/", "--engine", "127.0.0.1:1"], "--output / cannot be written"),
    ],
)
def test_bad_options_are_one_line_and_code_2(
    argv: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: Any = main(["profile", *argv])
    except SystemExit as error:
        code = error.code
    assert code == 2
    err = capsys.readouterr().err
    assert text in err
    assert err.count("\n") == 1


def span(name: str, begin: float, end: float, thread: int = 1, category: str = "step", **args: Any) -> Any:
    shown = {"step": 1, **args}
    times = {"ts": begin * 1000, "dur": (end - begin) * 1000}
    return {"name": name, "cat": category, "ph": "X", **times, "pid": 1, "tid": thread, "args": shown}


WORK = {"tokens": 3, "padding_tokens": 1, "blocks": 6, "padding_blocks": 2, "bucket": "batch 4"}
EVENTS = [
    {"name": "thread_name", "ph": "M", "ts": 0, "pid": 1, "tid": 1, "args": {"name": "MainThread"}},
    span("commit", 90, 100),
    span("plan", 0, 10),
    span("wait", 20, 90),
    span("prepare", 10, 20),
    span("step", 20, 80, 2, compilations=1),
    span("forward", 20, 60, 2),
    span("decode (compiled)", 20, 50, 2, "compile", **WORK),
    span("decode", 50, 60, 2, "device", **WORK),
    span("sample", 60, 75, 2),
    span("head", 60, 65, 2, "device"),
    span("copy", 75, 80, 2),
    span("plan", 100, 200, step=2),
    span("aten::mm", 20, 30, 3, "cpu_op"),
    {"name": "sequences", "ph": "C", "ts": 1.0, "pid": 1, "tid": 1, "args": {"running": 1}},
]
EVENTS[-2]["args"] = {}


def test_a_summary_nests_spans_and_counts_padding_and_compilations() -> None:
    found = summarise(EVENTS, steps=2, dropped_events=0)
    assert [(span.path[-1], len(span.path)) for span in found.spans] == [
        ("plan", 1),
        ("prepare", 1),
        ("wait", 1),
        ("commit", 1),
        ("step", 1),
        ("forward", 2),
        ("decode (compiled)", 3),
        ("decode", 3),
        ("sample", 2),
        ("head", 3),
        ("copy", 2),
    ]
    plan = found.spans[0]
    assert (plan.count, plan.total_ms, plan.longest_ms) == (2, 110.0, 100.0)
    assert found.seconds == 0.2
    assert found.share(plan.total_ms) == pytest.approx(0.55)
    assert found.steps_per_second == pytest.approx(10.0)
    assert (found.padding("tokens"), found.padding("blocks")) == (0.25, 0.25)
    assert found.compiled_steps == (1,)
    (bucket,) = found.buckets
    assert (bucket.phase, bucket.count, bucket.total_ms) == ("decode", 2, 40.0)
    assert found.device_events == 1
    document = json.loads(as_json(found, "t.json"))
    assert document["spans"][6]["path"] == "step/forward/decode (compiled)"
    assert document["buckets"][0]["padding_blocks"] == 4


def test_the_tables_and_lines_say_what_matters() -> None:
    console = Console(width=110, file=None, record=True, quiet=False)
    with console.capture() as capture:
        show(summarise(EVENTS, steps=2, dropped_events=9), console)
    text = capture.get()
    assert "decode: batch 4" in text
    assert "steps with compilations: 1 (1)" in text
    assert "9 events had no room" in text
    assert "padding: 25.0% of the tokens, 25.0% of the context blocks" in text


def test_nothing_recorded_is_no_error() -> None:
    empty = summarise([], steps=0, dropped_events=0)
    assert list(lines(empty)) == [
        "0 steps in 0.00 s: 0.0 steps per second",
        "steps with compilations: none",
    ]
    assert empty.padding("tokens") is None
