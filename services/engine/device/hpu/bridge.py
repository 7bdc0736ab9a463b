"""Habana's bridge: the environment it needs, its releases, and what of it is used here, typed.

Source: docs/gaudi-facts.md 4.1, 4.6 and 4.7.

Source: the vendor's support matrices (torch 2.7 with 1.22, 2.9 with 1.23, 2.10 with 1.24), and gaudi-facts.md
section 6 for torch 2.11 with 1.24.1.

Source: docs/gaudi-facts.md section 4, and the bridge's own sources, HabanaAI/gaudi-pytorch-bridge.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import re
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Protocol

import torch
from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from catenary.devices import NO_PLUGIN
from catenary.gaudi import PLUGIN, RELEASES, too_old
from catenary.telemetry import get_logger
from services.engine.device.base import DeviceError, ExecutionMode

_LAZY = "PT_HPU_LAZY_MODE"

# Values that the operator's own win over.
_DEFAULTS = {
    # Weights are not kept a second time on the host: faster loading, and quantized ones need it.
    "PT_HPU_WEIGHT_SHARING": "0",
    "EXPERIMENTAL_WEIGHT_SHARING": "0",
    # Shapes are static here; refining dynamic ones would only cost compilations.
    "PT_HPU_ENABLE_REFINE_DYNAMIC_SHAPES": "0",
    "FUSER_ENABLE_MULTI_THREADED_INVOCATIONS": "1",
    # How often recipes came from the cache.
    "PT_HPU_ENABLE_CACHE_METRICS": "1",
}
# Collectives inside of a captured graph.
_LAZY_DEFAULTS = {"PT_HPU_ENABLE_LAZY_COLLECTIVES": "true"}


def prepare_environment(mode: ExecutionMode, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that the execution mode needs.

    Raises DeviceError if the operator's lazy mode contradicts it.
    """
    lazy = "1" if mode in (ExecutionMode.LAZY, ExecutionMode.GRAPH) else "0"
    given = environment.get(_LAZY)
    if given is not None and given != lazy:
        raise DeviceError(f"{_LAZY}={given} does not go with execution mode {mode.value}: unset it")
    environment[_LAZY] = lazy
    for name, value in (_DEFAULTS | (_LAZY_DEFAULTS if lazy == "1" else {})).items():
        environment.setdefault(name, value)


def spawn_children() -> None:
    """Make multiprocessing start children anew: a forked one inherits the driver's state and never ends."""
    multiprocessing.set_start_method("spawn", force=True)


log = get_logger(__name__)

_TORCH = {version: release.torches for version, release in RELEASES.items()}
# A vendor's build of torch names the software it was built for: 2.9.0+hpu_1.23.0-695.
_BUILT_FOR = re.compile(r"\+hpu[_.](\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class Installed:
    """The installed versions: the plugin's, torch's, and the torch that the plugin's metadata asks for."""

    software: str
    torch: str
    required_torch: str | None = None


def installed() -> Installed | None:
    """The installed versions; None without the plugin."""
    try:
        plugin = metadata.distribution(PLUGIN)
    except metadata.PackageNotFoundError:
        return None
    return Installed(plugin.version, torch.__version__, _required_torch(plugin.requires or []))


def check_versions(found: Installed) -> None:
    """Raise DeviceError if software and torch do not go together, or the software is too old to be known."""
    software, own = _version(found.software, PLUGIN), _version(found.torch, "torch")
    release, torch_release = (software.major, software.minor), (own.major, own.minor)
    known = ", ".join(_text(each) for each in _TORCH)
    refusal = too_old(found.software)
    if refusal is not None:
        raise DeviceError(refusal)
    built_for = _BUILT_FOR.search(found.torch)
    if built_for is not None and tuple(map(int, built_for.groups())) != release:
        raise DeviceError(
            f"torch {found.torch} was built for another release than {PLUGIN} {found.software}: "
            "use the two of one Habana image"
        )
    if found.required_torch is not None:
        if not Requirement(f"torch{found.required_torch}").specifier.contains(own.public, prereleases=True):
            raise DeviceError(
                f"{PLUGIN} {found.software} needs torch{found.required_torch}, not torch {found.torch}: "
                "use the two of one Habana image"
            )
        return
    if release not in _TORCH:
        log.warning("Habana software newer than those that were tested", version=found.software, tested=known)
        return
    if torch_release not in _TORCH[release]:
        wanted = " or ".join(_text(each) for each in _TORCH[release])
        raise DeviceError(
            f"Habana software {found.software} goes with torch {wanted}, not torch {found.torch}: "
            "use Habana's own torch, which pip must not replace"
        )


def _version(text: str, name: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        # The vendor's local parts are not always valid: 2.9.0+hpu_1.23.0-695.git7f3ac21.
        pass
    try:
        return Version(text.partition("+")[0])
    except InvalidVersion:
        raise DeviceError(f"{name} has the version {text!r}, which cannot be read: reinstall it") from None


def _required_torch(requirements: list[str]) -> str | None:
    for text in requirements:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.name == "torch" and requirement.specifier and requirement.marker is None:
            return str(requirement.specifier)
    return None


def _text(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"


class Event(Protocol):
    """Marks a point of a stream."""

    def record(self) -> None:
        """Put the mark behind all work that the current stream holds."""

    def synchronize(self) -> None:
        """Wait until the device has passed the mark."""

    def query(self) -> bool:
        """Return whether the device has passed the mark."""


class HpuModule(Protocol):
    """`habana_frameworks.torch.hpu`, which is `torch.hpu` too. Memory in bytes."""

    Event: Callable[[], Event]

    def is_available(self) -> bool:
        """Return whether there is a card; never raises."""

    def device_count(self) -> int:
        """Return the cards that this process may choose from."""

    def current_device(self) -> int:
        """Acquire the card if that was not done yet."""

    def get_device_name(self) -> str:
        """GAUDI2 or GAUDI3."""

    def synchronize(self) -> None:
        """Wait for all queues."""

    def mem_get_info(self) -> tuple[int, int]:
        """Free and total."""

    def memory_allocated(self) -> int:
        """In use."""

    def max_memory_allocated(self) -> int:
        """Most that was in use since the last reset."""

    def reset_peak_memory_stats(self) -> None:
        """Forget that maximum."""


class Metric(Protocol):
    """A counter of the bridge."""

    def stats(self) -> Sequence[tuple[str, Any]]:
        """Return the names with their values, TotalNumber first where there is one."""


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
    """Prepare the environment, import the bridge for this mode and check its version.

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
