"""`catenary up`: all services on one machine, under one supervisor."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from catenary.cli.up.config import UpConfig
from catenary.cli.up.layout import cache_directory, require_writable
from catenary.cli.up.model import prepare_model, served_name
from catenary.cli.up.plan import Places
from catenary.cli.up.ports import PortClaims
from catenary.cli.up.reporter import Reporter, make_reporter
from catenary.cli.up.runtime import RuntimeDirectory
from catenary.config import load
from catenary.runtime import StartRefused, run


def run_up(argv: Sequence[str]) -> int:
    """Run `catenary up` until it is stopped."""
    config = load(UpConfig, argv, prog="catenary up")
    run(lambda stop: up(config, stop))


async def up(config: UpConfig, stop: asyncio.Event) -> int:
    """Check, prepare, start, supervise, drain. Raises StartRefused for what keeps it from starting."""
    started = time.monotonic()
    ports = check_places(config)
    cache = cache_directory(config.cache_dir)
    check_directories(config, cache)
    reporter = make_reporter()
    try:
        model_dir = await unless_stopped(prepare(config, cache, reporter), stop)
        if model_dir is None:
            return 0
        # Not before: a wrong option or model is to be refused without waiting for gRPC to load.
        from catenary.cli.up.deployment import Deployment

        name = served_name(config.model, config.served_model_name)
        places = Places(model_dir, name, ports, cores=len(os.sched_getaffinity(0)))
        runtime = RuntimeDirectory.create()
        try:
            await Deployment(config, runtime, places, reporter, cache, started).run(stop)
        finally:
            runtime.remove()
    finally:
        reporter.close()
    return 0


def check_places(config: UpConfig) -> tuple[int, ...]:
    """Return the gateways' ports, after a look at every port and file. Raises StartRefused."""
    for option in ("api_key_file", "chat_template", "ssl_certfile", "ssl_keyfile"):
        file: Path | None = getattr(config, option)
        if file is not None and not file.is_file():
            raise StartRefused(f"--{option.replace('_', '-')}: {file} is not a file")
    if (config.ssl_certfile is None) != (config.ssl_keyfile is None):
        raise StartRefused("HTTPS needs both --ssl-certfile and --ssl-keyfile")
    claims = PortClaims()
    ports = claims.claim_range(config.host, config.port, config.gateways, "port")
    for option in ("router_port", "tokenizer_port"):
        if port := getattr(config, option):
            claims.claim("127.0.0.1", port, option.replace("_", "-"))
    return ports


def check_directories(config: UpConfig, cache: Path) -> None:
    """Look whether logs, and models where a cache is asked for, can be written. Raises StartRefused."""
    if config.cache_dir is not None and not cache.is_dir():
        # One that is there may be read-only, if it holds the model.
        require_writable(cache, "cache-dir")
    if config.log_dir is None:
        require_writable(cache / "logs", "cache-dir")
    else:
        require_writable(config.log_dir.expanduser(), "log-dir")


async def prepare(config: UpConfig, cache: Path, reporter: Reporter) -> Path:
    """Return the directory of the model, showing what is done to it."""
    reporter.activity("model", f"preparing {config.model}")
    directory = await prepare_model(config.model, cache, lambda line: reporter.activity("model", line))
    reporter.done("model", f"prepared {config.model}")
    return directory


async def unless_stopped(work: Coroutine[Any, Any, Path], stop: asyncio.Event) -> Path | None:
    """Return the result of `work`, or None if `stop` was set first."""
    task = asyncio.create_task(work)
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        stopped.cancel()
        await asyncio.wait((task, stopped))
