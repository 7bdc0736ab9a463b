"""Open a card: environment, bridge, module, memory of recipes, in the order that the bridge needs.

Source: docs/gaudi-facts.md 4.3, 7.8, 7.9, 7.19: a process acquires a whole card, so a second one fails.
"""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from catenary.directories import NoHomeError, expanded
from catenary.telemetry import get_logger
from services.engine.device.base import DeviceError, ExecutionMode
from services.engine.device.hpu.bridge import Bridge, installed, load_bridge, spawn_children
from services.engine.device.hpu.device import HpuDevice
from services.engine.device.hpu.fused import parse_switches, probe_kernels
from services.engine.device.hpu.settings import HpuSettings, RecipeCache, hpu_settings, properties_of

if TYPE_CHECKING:
    from services.engine.options import EngineOptions


@dataclass(frozen=True, slots=True)
class Driver:
    """The kernel driver's traces; `root` is the root of the file system."""

    root: Path = field(default=Path("/"))

    @property
    def loaded(self) -> bool:
        """Whether the kernel module is there."""
        return (self.root / "sys/module/habanalabs").is_dir()

    @property
    def version(self) -> str | None:
        """The module's version, None if it does not tell."""
        try:
            return (self.root / "sys/module/habanalabs/version").read_text().strip()
        except OSError:
            return None

    def devices(self) -> list[Path]:
        """Device files of the cards that are visible here."""
        return sorted((self.root / "dev/accel").glob("accel[0-9]*"))

    def holders(self) -> list[tuple[int, str]]:
        """Processes, by id and name, that have a card open: those whose descriptors this user may see."""
        found: list[tuple[int, str]] = []
        for process in (self.root / "proc").glob("[0-9]*"):
            if int(process.name) != os.getpid() and _holds_card(process):
                found.append((int(process.name), _name_of(process)))
        return sorted(found)


def _holds_card(process: Path) -> bool:
    try:
        links = [os.readlink(entry) for entry in (process / "fd").iterdir()]
    except OSError:
        return False
    return any(link.startswith("/dev/accel/accel") for link in links)


def _name_of(process: Path) -> str:
    try:
        return (process / "comm").read_text().strip()
    except OSError:
        return "unknown"


def acquire(bridge: Bridge, driver: Driver) -> str:
    """Take the card for this process; return its name. Raises DeviceError, one line."""
    if not bridge.hpu.is_available():
        raise DeviceError(_nothing_found(bridge, driver))
    try:
        bridge.hpu.current_device()
        return bridge.hpu.get_device_name()
    except RuntimeError as error:
        text = " ".join(str(error).split())
        if "acquire" in text.lower():
            raise DeviceError(_taken(text, driver)) from error
        raise DeviceError(
            f"the HPU cannot be opened ({text}): driver {driver.version or 'unknown'} and software "
            f"{bridge.version} must be of one release; `hl-smi` shows the cards"
        ) from error


def _nothing_found(bridge: Bridge, driver: Driver) -> str:
    if not driver.loaded:
        return (
            "there is no HPU: the driver habanalabs is not loaded; install it on the host "
            "(habanalabs-dkms), then `lsmod | grep habanalabs` and `hl-smi` must show it"
        )
    if not driver.devices():
        return (
            "there is no HPU here although the host has the driver: start the container with "
            "--runtime=habana and HABANA_VISIBLE_DEVICES=all, or pass /dev/accel on"
        )
    return (
        f"Habana software {bridge.version} sees none of the {len(driver.devices())} cards of driver "
        f"{driver.version or 'unknown'}: use the image of the driver's release, and check "
        "HABANA_VISIBLE_MODULES"
    )


def _taken(text: str, driver: Driver) -> str:
    module = os.environ.get("HLS_MODULE_ID")
    which = f"the HPU of module {module}" if module else "every visible HPU"
    holders = ", ".join(f"{pid} ({name})" for pid, name in driver.holders())
    opened = (
        f"processes that have one open: {holders}"
        if holders
        else "`hl-smi` lists processes that have it open (none: start the container with --runtime=habana)"
    )
    return (
        f"{which} is taken by another process, and none can be shared ({text.rstrip('.')}); {opened}: stop "
        "that process, or choose a free card with HABANA_VISIBLE_MODULES"
    )


log = get_logger(__name__)

_MODULES, _OWN = "HABANA_VISIBLE_MODULES", "HLS_MODULE_ID"
_QUERY = ("hl-smi", "-Q", "module_id,bus_id", "-f", "csv,noheader")
_QUERY_S = 20.0

BusIds = dict[int, str]
"""PCI address, such as 0000:97:00.0, by module id."""


def choose_module(local_rank: int, environment: MutableMapping[str, str] = os.environ) -> int | None:
    """Set the module of this rank before the device is touched, and return it.

    None: the driver takes the first free one. Raises DeviceError for a list that cannot be read or is short.
    """
    own = environment.get(_OWN)
    if own is not None:
        return _number(own, _OWN)
    listed = environment.get(_MODULES)
    if not listed or listed == "all":
        return None
    modules = [_number(text, _MODULES) for text in listed.split(",")]
    if local_rank >= len(modules):
        raise DeviceError(
            f"{_MODULES}={listed} names {len(modules)} modules and rank {local_rank} needs one more: list "
            "one module for each rank"
        )
    environment[_OWN] = str(modules[local_rank])
    return modules[local_rank]


def bus_ids() -> BusIds:
    """The cards by module id, from hl-smi: pyhlml knows no module ids. Empty where it is not there."""
    try:
        result = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_QUERY_S, check=True)
        rows = (line.split(",") for line in result.stdout.splitlines() if "," in line)
        return {int(module): bus_id.strip() for module, bus_id in rows}
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}


def near_cpus(bus_id: str, root: Path = Path("/")) -> set[int]:
    """CPUs of the card's NUMA node; empty if the kernel does not say."""
    path = root / "sys/bus/pci/devices" / bus_id.lower() / "local_cpulist"
    try:
        return parse_cpus(path.read_text())
    except (OSError, ValueError):
        return set()


def bind_near(module: int | None, find: Callable[[], BusIds] = bus_ids, root: Path = Path("/")) -> set[int]:
    """Keep this process on the CPUs near its card, as far as it may use them; return those it chose.

    Without knowing which card it is, and where several are, it stays where it is.
    """
    known = find()
    if module is None and len(known) == 1:
        (module,) = known
    bus_id = known.get(module) if module is not None else None
    near = near_cpus(bus_id, root) & os.sched_getaffinity(0) if bus_id is not None else set()
    if near:
        os.sched_setaffinity(0, near)
        log.info("runs on the CPUs near its card", module=module, bus_id=bus_id, cpus=len(near))
    return near


def parse_cpus(text: str) -> set[int]:
    """The kernel's notation of a set of CPUs, such as 0-3,8. Raises ValueError."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def _number(text: str, variable: str) -> int:
    if not text.strip().isdecimal():
        raise DeviceError(f"{variable} must be a list of module numbers such as 0,1, not {text!r}")
    return int(text)


_ORIGINAL: Final = gc.get_threshold()


def relax_collector(multiplier: int) -> None:
    """Multiply Python's own collection thresholds: walking the vendor's many objects makes pauses long."""
    gc.set_threshold(*(threshold * multiplier for threshold in _ORIGINAL))


VARIABLE = "PT_HPU_RECIPE_CACHE_CONFIG"

_MIB = 2**20
# Recipes of one small model. With less a start would compile, fail to write, and say nothing of it.
_LEAST_FREE = 64 * _MIB


def use_recipe_cache(
    cache: RecipeCache, version: str, rank: int, environment: MutableMapping[str, str] = os.environ
) -> Path:
    """Make the bridge keep recipes in a directory of this rank, and return it.

    Each release of the software gets its own: another's recipes are void. Called before the bridge is
    imported. Raises DeviceError if the directory cannot be found or written, or its disk is full.
    """
    try:
        directory = expanded(cache.directory) / version / f"rank{rank}"
    except NoHomeError as error:
        raise DeviceError(f"the recipe cache {cache.directory}: {error}") from None
    _check(directory, cache.directory)
    # <directory>,<delete on start>,<MiB at the most>
    environment[VARIABLE] = f"{directory},{'true' if cache.clear else 'false'},{cache.max_mib}"
    return directory


def check_given_cache(environment: MutableMapping[str, str] = os.environ) -> None:
    """Check the directory that the operator's own variable names, if there is one. Raises DeviceError."""
    name = environment.get(VARIABLE, "").split(",")[0].strip()
    if name:
        _check(Path(name), Path(name))


def _check(directory: Path, named: Path) -> None:
    if "," in str(directory):
        raise DeviceError(
            f"recipe cache {named} has a comma in its name, which separates the bridge's fields"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(_MIB))
            file.flush()
        free = shutil.disk_usage(directory).free
    except OSError as error:
        raise DeviceError(
            f"recipe cache {named} cannot be written ({error.strerror}): make it writable for this user, "
            "free space there, or name another directory with --recipe-cache"
        ) from None
    if free < _LEAST_FREE:
        raise DeviceError(
            f"the disk of recipe cache {named} is full: {free // _MIB} MiB are free and recipes need at "
            f"least {_LEAST_FREE // _MIB}: free space, or name another directory with --recipe-cache"
        )


def open_hpu(mode: ExecutionMode, settings: HpuSettings, *, local_rank: int = 0) -> HpuDevice:
    """Acquire the card of this rank. Raises DeviceError, one line that says what to do."""
    switches = parse_switches(settings.kernels)
    found = installed()
    if settings.recipe_cache is not None and found is not None:
        use_recipe_cache(settings.recipe_cache, found.software, local_rank)
    else:
        check_given_cache()
    module = choose_module(local_rank)
    bridge = load_bridge(mode)
    name = acquire(bridge, Driver(Path("/")))
    properties = properties_of(name)
    spawn_children()
    relax_collector(settings.gc_threshold_multiplier)
    if settings.numa_binding:
        bind_near(module)
    log.info("HPU acquired", card=name, software=bridge.version, mode=mode.value, module=module)
    fused = probe_kernels(properties, bridge.version, switches)
    return HpuDevice(bridge, properties, mode, settings, fused)


def open_device(options: EngineOptions, mode: ExecutionMode) -> HpuDevice:
    """Acquire the card of an engine. Raises DeviceError."""
    return open_hpu(mode, hpu_settings(options))
