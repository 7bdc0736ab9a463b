"""The life of a core process behind its link: start, loop, and what is said when either fails."""

from __future__ import annotations

import gc
import os

from catenary.telemetry import configure_logging, get_logger
from services.engine.core.choosing import start
from services.engine.core.cpus import bind_core
from services.engine.core.errors import StartError
from services.engine.link import (
    BlockingLink,
    CoreFailed,
    CoreProgress,
    LinkClosed,
    LinkError,
    StartCore,
    ToCore,
)
from services.engine.options import EngineOptions

log = get_logger(__name__)


def serve(link: BlockingLink, *, own_process: bool = True) -> int:
    """Runs a core until its servicer stops it or goes away. Returns the exit code: 1 after CoreFailed.

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
    engine, make_loop = start(options, progress)
    gc.collect()
    if own_process:
        # What was loaded lives to the end: the collector need not walk it at every full collection.
        gc.freeze()
    link.send(engine.ready)
    core = make_loop(link)
    try:
        for message in rest:
            core.handle(message)
        core.run()
    finally:
        engine.close()


def _reason(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"the package {error.name} is missing: install catenary with its engine and cpu extras"
    text = " ".join(str(error).split())
    # Our own errors are written for people; of any other the type is part of the message.
    known = type(error).__module__.startswith("services.") or isinstance(error, ValueError)
    return text if known and text else f"{type(error).__name__}: {text}"


def _say_failed(link: BlockingLink, reason: str) -> int:
    try:
        link.send(CoreFailed(reason))
    except LinkError:
        log.warning("the servicer did not hear why the core failed")
    return 1
