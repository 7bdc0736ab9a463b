"""Life of a core process behind its link: find the model, start its engine, run the loop, report failure."""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from catenary.cpus import format_cpus, parse_binding
from catenary.directories import NoHomeError, expanded
from catenary.frames import LinkClosed, LinkError
from catenary.telemetry import configure_logging, get_logger
from services.engine.core.errors import StartError
from services.engine.core.loop import CoreLoop, Engine
from services.engine.link import (
    BlockingLink,
    CoreFailed,
    CoreProgress,
    StartCore,
    ToCore,
)
from services.engine.model import ModelError, Task, check_directory, find_task, prepare_model
from services.engine.options import EngineOptions

if TYPE_CHECKING:
    from services.engine.device import Device

log = get_logger(__name__)


def bind_core(options: EngineOptions) -> None:
    """Keep this process, and every thread that it will start, on the CPUs of the options.

    Before anything is loaded, so that memory comes from the NUMA node of these CPUs. Raises StartError for
    CPUs that are not there or not allowed.
    """
    lists = parse_binding(options.cpu_bind).lists
    if options.device != "cpu":
        if lists or options.cpu_reserve is not None:
            log.warning("cpu_bind and cpu_reserve concern CPUs alone", device=options.device)
        return
    if not lists:
        return
    wanted = set(lists[0])
    try:
        os.sched_setaffinity(0, wanted)
    except OSError:
        bound: set[int] = set()
    else:
        bound = os.sched_getaffinity(0)
    if missing := wanted - bound:
        raise StartError(
            f"cpu_bind {options.cpu_bind}: CPU {format_cpus(missing)} is not there or not allowed"
        )


Progress = Callable[[str, float | None], None]


def start_engine(options: EngineOptions, progress: Progress, device: Device | None = None) -> Engine:
    """Find the model and load it, onto the device of the options unless one is given. Raises StartError."""
    progress("loading torch and the model's files", 0.05)
    directory, task = _find_model(options, progress)
    # Loaded here and not above: torch takes seconds, and its absence has to be reported over the link.
    startup: Any = importlib.import_module("services.engine.core.startup")
    engine: Engine = startup.open_engine(options, directory, task, progress, device)
    return engine


def _find_model(options: EngineOptions, progress: Progress) -> tuple[Path, Task]:
    try:
        cache = expanded(options.cache_dir) if options.cache_dir else None
        directory = prepare_model(
            options.model,
            cache_dir=cache,
            progress=lambda line: progress(line, None),
            convert_s=options.convert_timeout_s,
        )
        return directory, find_task(directory, check_directory(directory), options.task)
    except (ModelError, NoHomeError) as error:
        raise StartError(" ".join(str(error).split())) from error


def serve(link: BlockingLink, *, own_process: bool = True) -> int:
    """Run a core until its servicer stops it or goes away. Return the exit code: 1 after CoreFailed.

    own_process: there is nothing else in this process: set its logging up by the options, and keep what was
    loaded out of the collector's sight.
    """
    try:
        options, rest = _receive_start(link)
        if own_process:
            configure_logging(level=options.log_level, fmt=options.log_format, service="engine-core")
        _run(link, options, rest, own_process=own_process)
    except LinkClosed:
        return 0
    except StartError as error:
        log.debug("the engine core does not start", exc_info=True)
        return _say_failed(link, str(error))
    except Exception as error:
        log.exception("the engine core fails")
        return _say_failed(link, _reason(error))
    return 0


def _receive_start(link: BlockingLink) -> tuple[EngineOptions, list[ToCore]]:
    first, *rest = link.poll(None)
    if not isinstance(first, StartCore):
        raise ValueError(f"the servicer's first message is {type(first).__name__}, not StartCore")
    options = EngineOptions.decode(first.config_json)
    return options, rest


def _run(link: BlockingLink, options: EngineOptions, rest: list[ToCore], *, own_process: bool) -> None:
    def progress(activity: str, fraction: float | None) -> None:
        link.send(CoreProgress(activity, fraction))

    # Read by OpenMP when torch is loaded. Its threads spin between parallel regions otherwise, and on a
    # machine that they share with the other services each waits for one that is not running: ten times
    # slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    bind_core(options)
    progress("importing torch", 0.02)
    engine = start_engine(options, progress)
    gc.collect()
    if own_process:
        # Loaded objects live to the end: the collector need not walk it at every full collection.
        gc.freeze()
    link.send(engine.ready)
    loop = CoreLoop(link, engine)
    try:
        for message in rest:
            loop.handle(message)
        loop.run()
    finally:
        engine.close()


def _reason(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"the package {error.name} is missing: install catenary with its engine and cpu extras"
    text = " ".join(str(error).split())
    # Our own errors are written for people; of any other the type is part of the message.
    known = type(error).__module__.startswith(("services.", "catenary.")) or isinstance(error, ValueError)
    return text if known and text else f"{type(error).__name__}: {text}"


def _say_failed(link: BlockingLink, reason: str) -> int:
    try:
        link.send(CoreFailed(reason))
    except LinkError:
        log.warning("the servicer did not hear why the core failed")
    return 1
