"""Structured logs on stderr: one line per event, with the request and trace that it belongs to.

A log line never holds a prompt, a completion, a key or a secret. Callers pass ids and counts.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from catenary.telemetry.context import current_trace_id, request_id


def configure_logging(*, level: str, fmt: str, service: str) -> None:
    """Set up structlog and the standard library's logging for this process.

    Args:
        level: debug, info, warning or error.
        fmt: "text" for people, "json" for collectors.
        service: the value of `service` in each line.

    Raises:
        ValueError: level or fmt is none of these.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"log level {level!r} is not one of debug, info, warning, error")
    if fmt not in ("text", "json"):
        raise ValueError(f"log format {fmt!r} is not one of text, json")
    shared: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _add_context(service),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.processors.StackInfoRenderer(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_renderers(fmt),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)


def log_as_the_program_does() -> None:
    """Log to `logging`, as a library in another program, and leave its set-up alone.

    Does nothing where structlog is set up already.
    """
    if structlog.is_configured():
        return
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["event"]),
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """Return a logger with key-value events: `log.info("engine attached", engine=..., epoch=...)`."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger


def _renderers(fmt: str) -> list[Processor]:
    if fmt == "json":
        # Without local variables, which hold prompts and keys.
        tracebacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        return [structlog.processors.ExceptionRenderer(tracebacks), structlog.processors.JSONRenderer()]
    # Quoted strings: a value that holds a line break must not be able to forge a second line.
    return [
        structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(),
            repr_native_str=True,
            exception_formatter=structlog.dev.plain_traceback,
        )
    ]


def _add_context(service: str) -> Processor:
    def add(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        values: dict[str, Any] = {"service": service}
        if (current := request_id()) is not None:
            values["request_id"] = current
        if (trace := current_trace_id()) is not None:
            values["trace_id"] = trace
        for key, value in values.items():
            event.setdefault(key, value)
        return event

    return add
