"""Fixtures of all tests."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import structlog

import catenary.grpc_environment  # noqa: F401
from tests.support.fake_router import FakeRouter
from tests.support.secrets import TestSecrets
from tests.support.waiting import QUIET_THREAD

if TYPE_CHECKING:
    from tests.support.engines import ScriptedEngine
    from tests.support.fleet import Fleet

# No test asserts how fast something is: the machine may be busy.
hypothesis.settings.register_profile("catenary", deadline=None)
hypothesis.settings.load_profile("catenary")


def pytest_configure() -> None:
    """Plain tracebacks in logs: structlog's pretty ones can hold a loop up for longer than a lease."""
    renderer = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[_of_tests, *structlog.get_config()["processors"][:-1], renderer])


def pytest_collection_finish() -> None:
    """What thousands of collected tests and their modules hold stays: no later collection looks at it."""
    gc.collect()
    gc.freeze()


def _of_tests(_logger: object, _method: str, event: Any) -> Any:
    """Drops what a stack in a thread of its own logs: between two tests that would go to the terminal."""
    if threading.current_thread().name == QUIET_THREAD:
        raise structlog.DropEvent
    return event


@pytest.fixture
def kept_logging() -> Iterator[None]:
    """For tests of what sets up the logging of its process: as before, afterwards."""
    root, configured = logging.getLogger(), structlog.get_config()
    handlers, level = list(root.handlers), root.level
    yield
    structlog.configure(**configured)
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(scope="session", autouse=True)
def _state_home() -> Iterator[None]:
    """What gateways store by default goes into a directory of this run."""
    with tempfile.TemporaryDirectory(prefix="cat-state-") as directory, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", directory)
        yield


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The developer's own CATENARY_* variables change no test; the model cache stays."""
    for name in os.environ:
        if name.startswith("CATENARY_") and name != "CATENARY_CACHE":
            monkeypatch.delenv(name)


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A private directory with a path short enough for unix sockets."""
    directory = Path(tempfile.mkdtemp(prefix="cat-"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def secrets(run_dir: Path) -> TestSecrets:
    """Both roles' secrets, as files in `run_dir`."""
    return TestSecrets.write(run_dir)


@pytest.fixture
async def fake_router(secrets: TestSecrets, run_dir: Path) -> AsyncIterator[FakeRouter]:
    """A router that does what the test says."""
    router = FakeRouter.at(secrets, run_dir)
    await router.start()
    yield router
    await router.stop()


@pytest.fixture
async def start_engine(
    fake_router: FakeRouter, secrets: TestSecrets, run_dir: Path
) -> AsyncIterator[Callable[..., Awaitable[ScriptedEngine]]]:
    """Starts scripted engines in this process, attached to `fake_router` unless `routers` says otherwise."""
    from tests.support.engines import ScriptedEngine

    engines: list[ScriptedEngine] = []

    async def start(routers: list[str] | None = None, **options: Any) -> ScriptedEngine:
        options.setdefault("listen", (f"unix:{run_dir}/engine-{len(engines)}.sock",))
        engine = ScriptedEngine(routers or [fake_router.address], secrets, **options)
        engines.append(engine)
        await engine.start()
        return engine

    yield start
    for engine in engines:
        await engine.stop()


@pytest.fixture
async def start_fleet(secrets: TestSecrets, run_dir: Path) -> AsyncIterator[Callable[..., Awaitable[Fleet]]]:
    """Starts a real router with `engines` scripted engines; `router` holds options of the router."""
    from tests.support.fleet import Fleet

    fleets: list[Fleet] = []

    async def start(*, router: dict[str, Any] | None = None, **options: Any) -> Fleet:
        directory = run_dir / f"s{len(fleets)}"
        directory.mkdir()
        fleet = Fleet(directory, secrets, **(router or {}))
        fleets.append(fleet)
        await fleet.start(**options)
        return fleet

    yield start
    for fleet in fleets:
        await fleet.stop()


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Shows a measurement among the test's results."""

    def write(text: str) -> None:
        with capsys.disabled():
            sys.stdout.write(f"\n  {text}\n")

    return write
