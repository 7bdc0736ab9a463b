"""The server and the run, as the options of `catenary bench serve` say."""

from __future__ import annotations

import math
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import msgspec

from catenary.config import ConfigError
from catenary_apps.bench.options import BenchServeConfig, named_values
from catenary_apps.load import (
    MIN_RATE,
    Arrivals,
    Conversation,
    Endpoint,
    LoadPlan,
    LoadResult,
    Ramp,
    RampShape,
    Target,
    parse_objectives,
)

_MAX_POINTS = 64


class Swept(Enum):
    """The settings that a sweep changes from run to run."""

    RATE = "rate"
    CONCURRENCY = "concurrency"


@dataclass(frozen=True, slots=True)
class Sweep:
    """One run for each value."""

    swept: Swept
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """One run: what was swept and its value, None without a sweep."""

    value: float | None
    plan: LoadPlan
    result: LoadResult


def make_plan(
    config: BenchServeConfig, target: Target, conversations: Sequence[Conversation], seed: int
) -> LoadPlan:
    """Raise StartRefused, one line."""
    try:
        return LoadPlan(
            target=target,
            conversations=conversations,
            arrivals=_arrivals(config),
            max_concurrency=config.max_concurrency,
            duration_s=config.duration_s,
            ready_timeout_s=config.ready_timeout_s,
            warmup=config.warmup,
            think_time_s=config.think_time_s,
            strict_lengths=config.strict_lengths,
            objectives=parse_objectives(config.goodput),
            percentiles=config.percentiles,
            seed=seed,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def at_point(plan: LoadPlan, sweep: Sweep, value: float) -> LoadPlan:
    """Return the plan of one run of a sweep, whose requests have ids of their own."""
    prefix = plan.target.request_id_prefix
    if prefix is not None:
        plan = replace(plan, target=replace(plan.target, request_id_prefix=f"{prefix}{value:g}-"))
    if sweep.swept is Swept.RATE:
        return replace(plan, arrivals=replace(plan.arrivals, rate=value))
    return replace(plan, max_concurrency=int(value))


def make_target(config: BenchServeConfig) -> Target:
    """Raise StartRefused, one line."""
    extra: dict[str, Any] = {}
    if config.temperature is not None:
        extra["temperature"] = config.temperature
    if config.ignore_eos:
        extra["ignore_eos"] = True
    try:
        return Target(
            base_url=config.base_url,
            endpoint=Endpoint(config.endpoint),
            model=config.model,
            api_key=config.api_key,
            headers=named_values("--header", config.header),
            extra_body=extra | _extra_body(config.extra_body),
            timeout_s=config.timeout_s,
            tls=_tls(config),
            request_id_prefix=config.request_id_prefix,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def parse_sweep(config: BenchServeConfig) -> Sweep | None:
    """Raise StartRefused, one line."""
    if config.sweep is None:
        return None
    name, _, text = config.sweep.partition("=")
    try:
        swept, values = Swept(name.strip()), tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--sweep {config.sweep[:50]!r}: rate=1,2,4 or concurrency=1,8,32") from None
    if not all(MIN_RATE <= value <= 1e6 for value in values) or len(values) > _MAX_POINTS:
        raise ConfigError(f"--sweep: up to {_MAX_POINTS} values from {MIN_RATE:g} to 1000000")
    if swept is Swept.CONCURRENCY and not all(value.is_integer() for value in values):
        raise ConfigError("--sweep: concurrencies are whole numbers")
    if swept is Swept.RATE and (config.request_rate is not None or config.ramp_up is not None):
        raise ConfigError("--sweep rate takes the place of --request-rate and --ramp-up")
    if swept is Swept.CONCURRENCY and config.max_concurrency is not None:
        raise ConfigError("--sweep concurrency takes the place of --max-concurrency")
    return Sweep(swept, values)


def _arrivals(config: BenchServeConfig) -> Arrivals:
    first, last = config.ramp_up_from, config.ramp_up_to
    ramp = None
    if config.ramp_up is not None:
        if first is None or last is None:
            raise ConfigError("--ramp-up needs --ramp-up-from and --ramp-up-to")
        ramp = Ramp(RampShape(config.ramp_up), first, last)
    elif first is not None or last is not None:
        raise ConfigError("--ramp-up-from and --ramp-up-to need --ramp-up linear or exponential")
    scheduled = config.request_rate is not None or ramp is not None or (config.sweep or "").startswith("rate")
    if config.burstiness != 1 and not scheduled:
        raise ConfigError("--burstiness needs --request-rate or --ramp-up")
    return Arrivals(math.inf if config.request_rate is None else config.request_rate, config.burstiness, ramp)


def _extra_body(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise ConfigError("--extra-body is not a JSON object") from None


def _tls(config: BenchServeConfig) -> ssl.SSLContext | None:
    if config.insecure and config.ca_file is not None:
        raise ConfigError("--insecure accepts any certificate: --ca-file has no say")
    if config.insecure:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context
    if config.ca_file is None:
        return None
    try:
        return ssl.create_default_context(cafile=config.ca_file)
    except OSError as error:
        reason = error.strerror or "holds no certificate"
        raise ConfigError(f"--ca-file: {config.ca_file}: {reason}") from None
