"""Run `catenary bench serve`: measure one load or a sweep, print it, and write its files."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from catenary.config import ConfigError
from catenary.runtime import StartRefused
from catenary.version import __version__
from catenary_apps.bench.options import BenchServeConfig, named_values
from catenary_apps.bench.prompts import PromptMaker, prompt_maker
from catenary_apps.bench.serve_table import show, show_sweep
from catenary_apps.bench.target import Point, Sweep, at_point, make_plan, make_target, parse_sweep
from catenary_apps.cli.output import check_file, file_in, refused, write_file
from catenary_apps.cli.pictures import require_matplotlib
from catenary_apps.load import (
    BenchError,
    Conversation,
    LoadInterrupted,
    LoadPlan,
    LoadResult,
    Progress,
    TokenizerText,
    as_json,
    run,
)


class LoadBar:
    """A bar on stderr that leaves nothing behind; none if it is not shown or stderr is no terminal."""

    def __init__(self, label: str, *, shown: bool) -> None:
        console = Console(stderr=True)
        self._label = label
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            # A thread that draws would take its time from the requests.
            auto_refresh=False,
            transient=True,
            disable=not (shown and console.is_terminal),
        )
        self._task = self._bars.add_task(label, total=None, note="")

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def tell(self, progress: Progress) -> None:
        """Show the progress."""
        note = f"{progress.running} running" + (f", {progress.failed} failed" if progress.failed else "")
        begun = "warm-up" if progress.warming_up else self._label
        self._bars.update(
            self._task,
            description="waiting for the server" if progress.waiting else begun,
            total=progress.total,
            completed=progress.done,
            note=note,
        )
        self._bars.refresh()


_NAME = "catenary bench serve"
# Characters a line where no terminal says how many there are.
_PIPE_WIDTH = 120
_UNTOLD = frozenset(("api_key", "header", "metadata", "log_level", "log_format"))


def run_serve(config: BenchServeConfig) -> int:
    """Run `catenary bench serve`: 1 if no request was answered, 2 with a line on stderr for wrong options.

    Raises KeyboardInterrupt after a Ctrl-C, once what was measured has been shown and written.
    """
    try:
        return _serve(config)
    except (StartRefused, ValueError) as error:
        return refused(_NAME, error)
    except BenchError as error:
        print(f"{_NAME}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{_NAME}: the output cannot be written: {error.strerror or error}", file=sys.stderr)
        return 1


def _serve(config: BenchServeConfig) -> int:
    target, sweep = make_target(config), parse_sweep(config)
    text = config.endpoint == "chat" or config.turns > 1
    prompts = prompt_maker(config, text=text, turns=config.turns)
    started = datetime.now(UTC)
    save = None if config.save is None else file_in(config.save, "serve", started)
    _check_outputs(config, save)
    metadata = named_values("--metadata", config.metadata)
    _many_files()
    points: list[Point] = []
    stopped: BenchError | KeyboardInterrupt | None = None
    for number, value in enumerate(sweep.values if sweep is not None else (None,)):
        try:
            conversations = _conversations(config, prompts, number)
            plan = make_plan(config, target, conversations, config.seed + number)
            if sweep is not None and value is not None:
                plan = at_point(plan, sweep, value)
            points.append(Point(value, plan, _measure(config, plan, prompts, _label(sweep, value))))
        except (BenchError, KeyboardInterrupt) as error:
            # What was measured up to here is worth something.
            stopped = error
            if isinstance(error, LoadInterrupted) and error.result is not None:
                points.append(Point(value, plan, error.result))
            break
    if points:
        document = result_document(config, sweep, points, started) | {"metadata": metadata}
        _tell(config, sweep, points, document, save)
    if stopped is not None:
        raise stopped
    return 0 if any(point.result.completed for point in points) else 1


def _conversations(config: BenchServeConfig, prompts: PromptMaker, number: int) -> list[Conversation]:
    """Return the conversations of a run, and a line if more were asked for than a file has."""
    wanted = config.num_prompts + config.warmup
    conversations = prompts.make(wanted, config.seed + number)
    if number == 0 and len(conversations) < wanted:
        found = f"{len(conversations)} conversations that fit, of {wanted} with the warm-up"
        print(f"{_NAME}: {config.dataset_path} has {found}", file=sys.stderr)
    return conversations


def _tell(
    config: BenchServeConfig,
    sweep: Sweep | None,
    points: Sequence[Point],
    document: dict[str, Any],
    save: Path | None,
) -> None:
    # Neither a full disk nor a pipe that nobody reads is to take the numbers of an hour with it.
    try:
        _show(config, sweep, points, document)
    finally:
        if save is not None:
            write_file(save, msgspec.json.format(msgspec.json.encode(document)), "--save")
            if save != config.save:
                print(f"{_NAME}: wrote {save}", file=sys.stderr)
    if config.plots is not None:
        from catenary_apps.bench.plots import draw

        draw(config.plots, sweep, points)


def _measure(config: BenchServeConfig, plan: LoadPlan, prompts: PromptMaker, label: str) -> LoadResult:
    count = prompts.source.count if isinstance(prompts.source, TokenizerText) else None
    with LoadBar(label, shown=config.progress) as bar:
        return run(plan, on_progress=bar.tell, count_text=count)


def _label(sweep: Sweep | None, value: float | None) -> str:
    return "requests" if sweep is None or value is None else f"{sweep.swept.value} {value:g}"


def _check_outputs(config: BenchServeConfig, save: Path | None) -> None:
    """Check before the run that its files can be written. Raises StartRefused."""
    if config.save_requests and save is None:
        raise ConfigError("--save-requests needs --save")
    if save is not None:
        check_file(save, "--save")
    if config.plots is None:
        return
    require_matplotlib("--plots")
    try:
        config.plots.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--plots {config.plots} cannot be written: {error.strerror}") from None


def _many_files() -> None:
    """Raise the limit of open files: each running request has a connection, and the usual limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def result_document(
    config: BenchServeConfig, sweep: Sweep | None, points: Sequence[Point], started: datetime
) -> dict[str, Any]:
    options = {
        name: os.fsencode(value).decode("utf-8", "replace") if isinstance(value, Path) else value
        for name, value in config.model_dump().items()
        if name not in _UNTOLD
    }
    runs = [
        {"value": point.value, "latency_from": _latency_from(point.plan), "seed": point.plan.seed}
        | as_json(point.result, with_records=config.save_requests)
        for point in points
    ]
    return {
        "schema": 1,
        "benchmark": "serve",
        "catenary": __version__,
        "started": started.isoformat(timespec="seconds"),
        "options": options,
        "swept": None if sweep is None else sweep.swept.value,
        "runs": runs,
    }


def _latency_from(plan: LoadPlan) -> str:
    return "schedule" if plan.arrivals.scheduled else "sending"


def _show(
    config: BenchServeConfig, sweep: Sweep | None, points: Sequence[Point], document: dict[str, Any]
) -> None:
    if config.format == "json":
        print(msgspec.json.encode(document).decode())
        return
    console = Console() if sys.stdout.isatty() else Console(width=_PIPE_WIDTH)
    if sweep is not None:
        show_sweep(sweep, [(point.value or 0.0, point.result) for point in points], console)
        return
    (point,) = points
    show(point.plan, point.result, console)
