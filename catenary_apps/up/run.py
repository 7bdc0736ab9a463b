"""Run `catenary up`: check options and places, prepare the models, then start the deployment."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from catenary import directories
from catenary.config import EMPTY_KEY, ConfigError, check_variables
from catenary.cpus import read_topology
from catenary.devices import DEVICES, why_not_opened
from catenary.devices import described as described_device
from catenary.memory import MemoryWatch
from catenary.runtime import StartRefused, module_command, run
from catenary_apps.cli.runtime_directory import RuntimeDirectory
from catenary_apps.up.child import wrapped
from catenary_apps.up.config import UpConfig, has_service_variables, service_classes
from catenary_apps.up.models import (
    ReadyModel,
    WantedModel,
    aliases_of,
    check_length,
    check_sources,
    quantizations_of,
    served_task,
    tasks_of,
    wanted_models,
)
from catenary_apps.up.plan import GATEWAY_KEYS, MODULE_ENV, MODULES_ENV, SCRIPT_ENV, Places, without_secrets
from catenary_apps.up.reporter import Reporter, make_reporter
from catenary_apps.up.resources import PortClaims, cpus_of, described, tokenizers_of
from catenary_apps.up.supervisor import LINE_LIMIT, describe_exit, lines_of
from services.engine.vllm_variables import load_moved


def cache_directory(configured: Path | None) -> Path:
    """Return the directory of prepared models and logs. Raises StartRefused."""
    try:
        return directories.cache_directory() if configured is None else directories.expanded(configured)
    except directories.NoHomeError as error:
        raise ConfigError(f"{error}, or give --cache-dir") from None


def require_writable(directory: Path, option: str) -> None:
    """Make a directory and see that files can be written in it. Raises StartRefused that names the option."""
    try:
        directory = directories.expanded(directory)
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except directories.NoHomeError as error:
        raise ConfigError(f"--{option}: {error}") from None
    except OSError as error:
        raise ConfigError(f"--{option}: {directory} cannot be written: {error.strerror}") from None


# Begins the last line of a process that could not prepare the model.
REFUSAL_PREFIX = "error: "
# Of a line that is shown: libraries write warnings of any length, and a person reads a line of a terminal.
_SHOWN_CHARS = 1000


def served_name(model: str, configured: str | None) -> str:
    """Return the name that requests use: the configured one, or the engine's default for a prepared model."""
    if configured:
        return configured
    from services.engine.model import resolve_source

    return resolve_source(model).name


async def prepare_model(model: str, cache: Path, report: Callable[[str], None], *, convert_s: float) -> Path:
    """Return the directory of the model, converted (in at most `convert_s` seconds) or fetched if need be.

    Runs in a process of its own, since it may import torch. Raises StartRefused with the reason that the
    process gave in its last line. Long lines are shown cut off.
    """
    program, *module = module_command("services.engine.model.prepare")
    # Its package imports it, which runpy warns about.
    quiet = ("-W", "ignore::RuntimeWarning:runpy")
    options = ("--model", model, "--cache-dir", str(cache), "--convert-timeout-s", str(convert_s))
    memory = MemoryWatch()
    process = await asyncio.create_subprocess_exec(
        *wrapped((program, *quiet, *module, *options)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=LINE_LIMIT,
        # Ctrl-C is for `catenary up`; children of the process are killed with its group.
        start_new_session=True,
        env=without_secrets(os.environ) | {"PYTHONUNBUFFERED": "1"},
    )
    stdout, stderr = process.stdout, process.stderr
    if stdout is None or stderr is None:
        raise RuntimeError("the process was started without pipes")
    last_line = refusal = ""

    async def follow() -> None:
        nonlocal last_line, refusal
        async for text in lines_of(stderr):
            line = text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
            if line.startswith(REFUSAL_PREFIX):
                # Told once, with the exception below.
                refusal = line.removeprefix(REFUSAL_PREFIX)
            elif line:
                last_line = line
                report(line)

    try:
        output, _ = await asyncio.gather(stdout.read(), follow())
        code = await process.wait()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    lines = output.decode(errors="replace").split("\n")
    directory = next((line.strip() for line in reversed(lines) if line.strip()), "")
    if code or not directory:
        # Its last activity is no reason: it may have been killed during it.
        end = describe_exit(code, memory=memory)
        doing = f" while: {last_line}" if last_line else ""
        if refusal and code == ConfigError.exit_code:
            raise ConfigError(f"--model: {refusal}")
        raise StartRefused(refusal or f"the model {model} could not be prepared: the process {end}{doing}")
    return Path(directory)


# Engines that take any length are asked by this.
LONG_ENV = "CATENARY_ENGINE_ALLOW_LONG_MAX_MODEL_LEN"
# Options of engines for work that is done here before they start: their variables count here.
DONE_FOR_ENGINES = ("convert_timeout_s",)

T = TypeVar("T")


def run_up(argv: Sequence[str]) -> int:
    """Run `catenary up` until it is stopped."""
    # The engines inherit the variables of both kinds and read them themselves.
    config, warnings = load_moved(
        UpConfig, argv, prog="catenary up", beside="CATENARY_ENGINE_", taken=DONE_FOR_ENGINES
    )
    run(lambda stop: up(config, stop, warnings))


async def up(config: UpConfig, stop: asyncio.Event, warnings: Sequence[str] = ()) -> int:
    """Check, prepare, start, supervise, drain. Raises StartRefused for what keeps it from starting."""
    started = time.monotonic()
    wanted = wanted_models(config)
    ports = check_places(config)
    check_services(os.environ)
    modules = modules_of(config, os.environ)
    topology = read_topology()
    cpus = cpus_of(config, topology, os.environ)
    check_engines(config, wanted, os.environ)
    check_sources(wanted)
    cache = cache_directory(config.cache_dir)
    check_directories(config, cache)
    reporter = make_reporter()
    if line := described_device(config.device):
        reporter.line(line)
    for line in warnings:
        reporter.line(f"warning: {line}")
    try:
        models = await unless_stopped(prepare(config, wanted, cache, reporter), stop)
        if models is None:
            reporter.line("stopped before anything was served")
            return 0
        # Not before: a wrong option or model is to be refused without waiting for gRPC to load.
        from catenary_apps.up.deployment import Deployment

        if cpus is not None and (line := described(cpus)):
            reporter.line(line)
        places = Places(models, ports, cpus=cpus, tokenizers=tokenizers_of(config, topology), modules=modules)
        runtime = RuntimeDirectory.create()
        names = ", ".join(model.name for model in models)
        try:
            runtime.describe(f"port {ports[0]}, {names}, since {time.strftime('%H:%M:%S')}")
            await Deployment(config, runtime, places, reporter, cache, started).run(stop)
        finally:
            runtime.remove()
    finally:
        reporter.close()
    return 0


def check_services(environment: Mapping[str, str]) -> None:
    """Look at the variables that are options of one service, before a model is prepared for them.

    Raises ConfigError for one that no service would start with.
    """
    # Loading the classes takes seconds.
    if has_service_variables(environment):
        for cls in service_classes():
            check_variables(cls, environment)


def check_engines(config: UpConfig, wanted: Sequence[WantedModel], environment: Mapping[str, str]) -> None:
    """Look at what engines would refuse only after a model is prepared: the device, and the context's length.

    Raises StartRefused.
    """
    if SCRIPT_ENV in environment:
        return
    if reason := why_not_opened(config.device):
        raise ConfigError(f"--device {config.device}: {reason}")
    # With several models, the length is for those that generate, which are known once all are prepared.
    if config.max_model_len is not None and len(wanted) == 1 and LONG_ENV not in environment:
        task = config.task[0].rpartition("=")[2] if config.task else "auto"
        check_length(wanted[0].source, task, config.max_model_len)


def check_places(config: UpConfig) -> tuple[int, ...]:
    """Return the gateways' ports, after a look at every port and file. Raises StartRefused."""
    for name in GATEWAY_KEYS:
        if name in os.environ and not os.environ[name].strip():
            raise ConfigError(f"{name}: {EMPTY_KEY}")
    for option in ("api_key_file", "chat_template", "ssl_certfile", "ssl_keyfile"):
        file: Path | None = getattr(config, option)
        if file is not None and not file.is_file():
            raise ConfigError(f"--{option.replace('_', '-')}: {file} is not a file")
    if config.api_key_file is not None:
        # What the gateways would refuse once a model is prepared. It loads them.
        from gateway import read_keys

        read_keys((), config.api_key_file)
    if (config.ssl_certfile is None) != (config.ssl_keyfile is None):
        raise ConfigError("HTTPS needs both --ssl-certfile and --ssl-keyfile")
    if len(config.engine_roles) not in (0, config.engines):
        raise ConfigError(
            f"--engine-roles names {len(config.engine_roles)} engines, and --engines says {config.engines}"
        )
    claims = PortClaims()
    ports = claims.claim_range(config.host, config.port, config.gateways, "port")
    for option, first, count in (
        ("router-port", config.router_port, config.routers),
        ("tokenizer-port", config.first_tokenizer_port, len(config.model)),
    ):
        if first:
            claims.claim_range("127.0.0.1", first, count, option)
    return ports


def modules_of(config: UpConfig, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return a Gaudi card's module for each of several engines, none if each may take any free one.

    Raises StartRefused if there are more engines than cards for them.
    """
    engines = config.engines * len(config.model)
    if engines == 1 or not DEVICES[config.device].gaudi:
        return ()
    if one := environment.get(MODULE_ENV):
        raise ConfigError(
            f"{MODULE_ENV}={one} is one card for {engines} engines: list them in {MODULES_ENV} instead"
        )
    listed = environment.get(MODULES_ENV, "")
    if listed in ("", "all"):
        return ()
    modules = tuple(dict.fromkeys(part.strip() for part in listed.split(",")))
    if len(modules) < engines:
        raise ConfigError(f"{MODULES_ENV}={listed} has fewer cards than the {engines} engines need")
    return modules


def check_directories(config: UpConfig, cache: Path) -> None:
    """Look whether logs, and models where a cache is asked for, can be written. Raises StartRefused."""
    if config.cache_dir is not None and not cache.is_dir():
        # One that is there may be read-only, if it holds the model.
        require_writable(cache, "cache-dir")
    if config.log_dir is None:
        require_writable(cache / "logs", "cache-dir")
    else:
        require_writable(config.log_dir, "log-dir")


async def prepare(
    config: UpConfig, wanted: Sequence[WantedModel], cache: Path, reporter: Reporter
) -> tuple[ReadyModel, ...]:
    """Prepare the models, reporting progress. Raises StartRefused."""
    directories: list[Path] = []
    for model in wanted:
        reporter.activity("model", f"preparing {model.source}")
        directories.append(
            await prepare_model(
                model.source,
                cache,
                lambda line: reporter.activity("model", line),
                convert_s=config.convert_timeout_s,
            )
        )
        reporter.done("model", f"prepared {model.source}")
    names = tuple(served_name(model.source, model.name) for model in wanted)
    aliases_of(config, names)
    return tuple(
        ReadyModel(directory, name, task, served_task(directory, task), quantization)
        for directory, name, task, quantization in zip(
            directories, names, tasks_of(config, names), quantizations_of(config, names), strict=True
        )
    )


async def unless_stopped(work: Coroutine[Any, Any, T], stop: asyncio.Event) -> T | None:
    """Return the result of `work`, or None if `stop` was set first."""
    task = asyncio.create_task(work)
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        # Work that the same signal has ended has no failure to tell.
        return task.result() if task.done() and not stop.is_set() else None
    finally:
        task.cancel()
        stopped.cancel()
        await asyncio.wait((task, stopped))
