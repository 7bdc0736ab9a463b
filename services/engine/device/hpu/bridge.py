"""The only place that imports Habana's bridge, and what of it is used here, typed.

Source: docs/gaudi-facts.md section 4, and the bridge's own sources, HabanaAI/gaudi-pytorch-bridge.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from catenary.devices import NO_PLUGIN
from services.engine.device.base import DeviceError
from services.engine.device.hpu.environment import prepare_environment
from services.engine.device.hpu.versions import check_versions, installed
from services.engine.device.modes import ExecutionMode


class Event(Protocol):
    """Marks a point of a stream."""

    def record(self) -> None:
        """Puts the mark behind all work that the current stream holds."""

    def synchronize(self) -> None:
        """Waits until the device has passed the mark."""

    def query(self) -> bool:
        """Whether the device has passed the mark."""


class HpuModule(Protocol):
    """`habana_frameworks.torch.hpu`, which is `torch.hpu` too. Memory in bytes."""

    Event: Callable[[], Event]

    def is_available(self) -> bool:
        """Whether there is a card; never raises."""

    def device_count(self) -> int:
        """Cards that this process may choose from."""

    def current_device(self) -> int:
        """Acquires the card if that was not done yet."""

    def get_device_name(self) -> str:
        """GAUDI2 or GAUDI3."""

    def synchronize(self) -> None:
        """Waits for all queues."""

    def mem_get_info(self) -> tuple[int, int]:
        """Free and total."""

    def memory_allocated(self) -> int:
        """In use."""

    def max_memory_allocated(self) -> int:
        """Most that was in use since the last reset."""

    def reset_peak_memory_stats(self) -> None:
        """Forgets that maximum."""


class Metric(Protocol):
    """A counter of the bridge."""

    def stats(self) -> Sequence[tuple[str, Any]]:
        """Names with their values, TotalNumber first where there is one."""


class MetricsModule(Protocol):
    """`habana_frameworks.torch.hpu.metrics`."""

    def metric_global(self, name: str) -> Metric:
        """Since the start of the process."""

    def metric_localcontext(self, name: str) -> AbstractContextManager[Metric]:
        """Of what happens inside."""


@dataclass(frozen=True, slots=True)
class Bridge:
    """The loaded bridge. `wrap_in_hpu_graph` and its module are there for the mode GRAPH alone."""

    version: str
    hpu: HpuModule
    metrics: MetricsModule
    mark_step: Callable[[], None]
    wrap_in_hpu_graph: Callable[..., Any] | None
    setting: Callable[[str, Any], AbstractContextManager[Any]] | None
    graphs: Any = None

    def total(self, metric: str) -> int:
        """TotalNumber of a metric since the start of the process."""
        return int(dict(self.metrics.metric_global(metric).stats())["TotalNumber"])


def load_bridge(mode: ExecutionMode) -> Bridge:
    """Prepares the environment, imports the bridge for this mode and checks its version.

    The mode of a process cannot change later. Raises DeviceError, one line, if something is missing.
    """
    found = installed()
    if found is None:
        raise DeviceError(NO_PLUGIN)
    check_versions(found)
    prepare_environment(mode)
    root, core = _import("habana_frameworks.torch"), _import("habana_frameworks.torch.core")
    metrics = _import("habana_frameworks.torch.hpu.metrics")
    return Bridge(
        version=found.software,
        hpu=root.hpu,
        metrics=metrics,
        mark_step=core.mark_step,
        wrap_in_hpu_graph=root.hpu.wrap_in_hpu_graph if mode is ExecutionMode.GRAPH else None,
        setting=_settings(),
        graphs=_import("habana_frameworks.torch.hpu.graphs") if mode is ExecutionMode.GRAPH else None,
    )


def _settings() -> Callable[[str, Any], AbstractContextManager[Any]] | None:
    """`env_setting(name, value)`: changes a setting of the bridge for a while; None where it has none."""
    try:
        module: Any = importlib.import_module("habana_frameworks.torch.internal.bridge_config")
    except ImportError:
        return None
    found: Callable[[str, Any], AbstractContextManager[Any]] | None = getattr(module, "env_setting", None)
    return found


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        # A library of the driver that is not there, or of another release, shows as any of the first three.
        # The bridge's own checks, such as for the torch that it was built with, raise AssertionError.
        reason = " ".join(str(error).split())
        raise DeviceError(
            f"Habana's bridge cannot be loaded ({reason}): the image and the host's driver must be of one "
            f"release; torch here is {torch.__version__}"
        ) from None
