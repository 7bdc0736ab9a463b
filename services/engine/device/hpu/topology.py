"""Which card a process gets, and the CPUs near it. Source: docs/gaudi-facts.md 4.6 and 4.8."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, MutableMapping
from pathlib import Path

from catenary.telemetry import get_logger
from services.engine.device.base import DeviceError

log = get_logger(__name__)

_MODULES, _OWN = "HABANA_VISIBLE_MODULES", "HLS_MODULE_ID"
_QUERY = ("hl-smi", "-Q", "module_id,bus_id", "-f", "csv,noheader")
_QUERY_S = 20.0

BusIds = dict[int, str]
"""PCI address, such as 0000:97:00.0, by module id."""


def choose_module(local_rank: int, environment: MutableMapping[str, str] = os.environ) -> int | None:
    """Sets the module of this rank before the device is touched, and returns it.

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
    """Keeps this process on the CPUs near its card, as far as it may use them; returns those it chose.

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
