"""`catenary profile`: asks, writes, sums up."""

from __future__ import annotations

import asyncio
import gzip
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from catenary.config import ConfigError
from catenary.runtime import StartRefused
from catenary_apps.cli.output import load_options, refused
from catenary_apps.profile.config import ProfileConfig

_NAME = "catenary profile"
_INTERRUPTED = 130
_TERMINATED = 143


def run_profile(argv: Sequence[str]) -> int:
    """Run `catenary profile`: 1 with one line on stderr if the engine gives none, 2 for wrong options."""
    config = load_options(ProfileConfig, argv, prog=_NAME)
    # Not before: a wrong option is to be refused without waiting for gRPC to load.
    from catenary_apps.profile.fetch import ProfileError

    try:
        return _profile(config)
    except StartRefused as error:
        return refused(_NAME, error)
    except ProfileError as error:
        print(f"{_NAME}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED


def run_profile_command(argv: Sequence[str]) -> int:
    """Run `run_profile` in the main thread: SIGTERM, like Ctrl-C, leaves nothing half written."""
    signal.signal(signal.SIGTERM, _terminate)
    return run_profile(argv)


def _terminate(number: int, frame: object) -> None:
    raise SystemExit(_TERMINATED)


def _profile(config: ProfileConfig) -> int:
    import msgspec
    from rich.console import Console

    from catenary_apps.profile.fetch import fetch, find_engine
    from catenary_apps.profile.summary import as_json, show, summarise

    target = find_engine(config)
    partial = _claim(config.output)
    try:
        with Console(stderr=True).status(
            f"{config.steps} steps of {target.address}, for {config.seconds:g} s at most"
        ):
            fetched = asyncio.run(fetch(config, target))
        _write(partial, config.output, fetched.trace)
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
    events = msgspec.json.decode(fetched.trace)["traceEvents"]
    summary = summarise(events, steps=fetched.steps, dropped_events=fetched.dropped_events)
    if config.format == "json":
        print(as_json(summary, str(config.output)))
        return 0
    show(summary, Console())
    if fetched.steps < config.steps:
        print(f"the time was over after {fetched.steps} of {config.steps} steps")
    print(f"wrote {config.output}: open it in https://ui.perfetto.dev or chrome://tracing")
    return 0


def _claim(output: Path) -> Path:
    """Return a new file beside the output, for the bytes. Raises ConfigError if it cannot be written."""
    partial = output.parent / f".{output.name}.partial"
    if output.is_dir():
        raise ConfigError(f"--output {output} cannot be written: it is a directory")
    try:
        partial.write_bytes(b"")
    except OSError as error:
        raise ConfigError(f"--output {output} cannot be written: {error.strerror}") from None
    return partial


def _write(partial: Path, output: Path, trace: bytes) -> None:
    try:
        partial.write_bytes(gzip.compress(trace, mtime=0) if output.suffix == ".gz" else trace)
        partial.replace(output)
    except OSError as error:
        raise StartRefused(f"--output {output} cannot be written: {error.strerror}") from None
