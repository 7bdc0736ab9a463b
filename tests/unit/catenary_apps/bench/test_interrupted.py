from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from catenary_apps.cli.main import main
from tests.support.bench_command import SMALL, bench_serve, origin_in_a_thread
from tests.support.sse_origin import Exchange, Origin, polite


@pytest.fixture
def origin() -> Iterator[Origin]:
    with origin_in_a_thread() as origin:
        yield origin


@pytest.fixture
def ctrl_c() -> Iterator[Callable[[], None]]:
    """What a terminal does; also where a shell has started this process with the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: os.kill(os.getpid(), signal.SIGINT)
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("sweep", [[], ["--sweep", "concurrency=1,2"]])
def test_ctrl_c_leaves_what_was_measured(
    origin: Origin,
    ctrl_c: Callable[[], None],
    sweep: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def answer(exchange: Exchange) -> None:
        if exchange.number < 3:
            await polite(exchange)
        elif exchange.number == 3:
            # Once: a second signal would reach what runs after the command.
            ctrl_c()

    origin.behaviour = answer
    file = tmp_path / "result.json"
    assert bench_serve(origin, "--save", str(file), *(sweep or ["--max-concurrency", "1"])) == 130
    (run,) = json.loads(file.read_text())["runs"]
    assert (run["completed"], run["failed"], run["unfinished"], run["interrupted"]) == (2, 0, 1, True)
    assert run["output_tokens"] == 8
    out = capsys.readouterr().out
    assert ("1, interrupted" if sweep else "ended by Ctrl-C after ") in out
    assert ("1 requests that were running are in no number" in out) == (not sweep)


def test_ctrl_c_before_anything_was_measured_says_nothing(
    origin: Origin, ctrl_c: Callable[[], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unpressed: list[Callable[[], None]] = []

    async def never(exchange: Exchange) -> None:
        # Once for each run of the command: a second signal would reach what runs after it.
        if unpressed:
            unpressed.pop()()

    origin.behaviour = never
    file = tmp_path / "result.json"
    for words in (["--warmup", "1"], ["--warmup", "0"]):
        unpressed.append(ctrl_c)
        assert bench_serve(origin, "--save", str(file), *words) == 130
    assert not file.exists()
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


@pytest.mark.parametrize("done", [0, 2])
@pytest.mark.usefixtures("kept_logging")
def test_ctrl_c_leaves_the_prompts_of_a_batch_that_were_done(
    done: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = SimpleNamespace(
        prompt_token_ids=[1] * 5, num_cached_tokens=1, outputs=[SimpleNamespace(token_ids=[2] * 4)]
    )

    class Interrupted(nullcontext[None]):
        def __init__(self, model: str, **options: object) -> None:
            super().__init__()

        def __enter__(self) -> Interrupted:  # type: ignore[override]
            return self

        def generate(self, prompts: list[object], sampling: object, on_output: Callable[..., None]) -> None:
            for _ in prompts[:done]:
                on_output(output)
            raise KeyboardInterrupt

    module = SimpleNamespace(LLM=Interrupted, SamplingParams=dict)
    monkeypatch.setitem(sys.modules, "catenary_apps.llm", module)
    assert main(["bench", "throughput", "--warmup", "0", "--json", *SMALL]) == 130
    out = capsys.readouterr().out
    if not done:
        assert out == ""
        return
    result = json.loads(out)
    assert (result["interrupted"], result["unfinished"], result["requests"]) == (True, 1, 2)
    assert (result["input_tokens"], result["cached_tokens"], result["output_tokens"]) == (10, 2, 8)
    assert main(["bench", "throughput", "--warmup", "0", *SMALL]) == 130
    said = "ended by Ctrl-C: 1 prompts that were not done are in no number\n2 prompts in"
    assert capsys.readouterr().out.startswith(said)
