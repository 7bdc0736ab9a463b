"""The properties of the simulated card, and its errors. Their texts' first words are the vendor's."""

from __future__ import annotations

import math
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

VARIABLE: Final = "CATENARY_SIM"

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class SimSettings:
    """Read from `CATENARY_SIM`, as in "device=gaudi2,hbm_gib=2,version=1.23.0".

    device: gaudi2 or gaudi3. version: of the simulated software. modules: cards of the host. unsupported:
    operations that run on the host, as "aten.sort", joined by "+". missing: optional kernels that are not
    there, joined by "+". driver: whether there is one. recipe_s: virtual seconds that every compilation
    takes, in addition to what grows with its size.
    """

    device: str = "gaudi3"
    # An engine fills what it finds, and it is memory of this machine.
    hbm_gib: float = 2.0
    version: str = "1.24.0"
    modules: int = 8
    driver: bool = True
    unsupported: frozenset[str] = field(default_factory=frozenset)
    missing: frozenset[str] = field(default_factory=frozenset)
    recipe_s: float = 0.2
    lock_directory: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))

    @property
    def hbm_bytes(self) -> int:
        """Memory of the card."""
        return int(self.hbm_gib * _GIB)

    @property
    def version_tuple(self) -> tuple[int, ...]:
        """The version as numbers."""
        return tuple(int(part) for part in self.version.split("."))

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None) -> SimSettings:
        """Raise ValueError, one line, for an unknown name or a value of the wrong kind."""
        text = (os.environ if environment is None else environment).get(VARIABLE, "")
        known = {entry.name for entry in fields(cls)}
        values: dict[str, Any] = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            if name not in known:
                raise ValueError(f"{VARIABLE} knows no {name!r}; known are {', '.join(sorted(known))}")
            values[name] = _parse(name, value)
        found = cls(**values)
        if found.device not in ("gaudi2", "gaudi3"):
            raise ValueError(f"{VARIABLE}: device must be gaudi2 or gaudi3, not {found.device!r}")
        return found


def _release(value: str) -> str:
    if not re.fullmatch(r"\d+(\.\d+)+", value):
        raise ValueError
    return value


def _positive(value: str) -> float:
    number = float(value)
    if not 0 < number < math.inf:
        raise ValueError
    return number


def _cards(value: str) -> int:
    if int(value) < 1:
        raise ValueError
    return int(value)


def _parse(name: str, value: str) -> Any:
    try:
        match name:
            case "hbm_gib" | "recipe_s":
                return _positive(value)
            case "modules":
                return _cards(value)
            case "version":
                return _release(value)
            case "driver":
                return {"0": False, "1": True}[value]
            case "unsupported" | "missing":
                return frozenset(filter(None, value.split("+")))
            case "lock_directory":
                return Path(value)
            case _:
                return value
    except (ValueError, KeyError):
        raise ValueError(f"{VARIABLE}: {name} cannot be {value!r}") from None


class SimError(RuntimeError):
    """The vendor's errors are RuntimeErrors."""


def out_of_memory(wanted: int, free: int) -> SimError:
    """HBM is full (gaudi-facts.md 4.3: there is one pool, and the process owns it all)."""
    return SimError(
        f"Allocation failed for size::{wanted} ({wanted / 2**20:.2f})MB: out of memory, {free} bytes are free"
    )


def acquire_failed(why: str) -> SimError:
    """Another process has the module, or there is none (gaudi-facts.md 4.3 and 7.8)."""
    return SimError(f"synStatus=8 [Device not found] Device acquire failed. {why}")


def host_read_in_capture(name: str) -> SimError:
    """gaudi-facts.md 4.2: no host reads while a graph is captured."""
    return SimError(f"{name} reads a device tensor on the host inside of an HPU graph capture")


def dynamic_in_capture(name: str) -> SimError:
    """gaudi-facts.md 4.2: static shapes only."""
    return SimError(f"{name} has a shape that depends on data inside of an HPU graph capture")


def host_copy_in_capture() -> SimError:
    """gaudi-facts.md 4.2: values that the host holds are no part of a graph, which would repeat them."""
    return SimError("a copy from the host inside of an HPU graph capture")


def fallback_in_capture(name: str) -> SimError:
    """gaudi-facts.md 4.2: no CPU operations while a graph is captured."""
    return SimError(f"cpu fallback is not supported during hpu graph capturing: {name}")


def view_update_in_capture(name: str) -> SimError:
    """gaudi-facts.md 4.2: what is older than the capture cannot be updated through a view of it."""
    return SimError(f"{name} updates a view in place, which is not supported during hpu graph capturing")


def changed_while_read() -> SimError:
    """A copy to the device that does not wait reads the host's memory later."""
    return SimError("host memory changed before a non-blocking copy to the device had read it")


def mixed_devices(name: str) -> SimError:
    """Only 0-dim CPU tensors may be mixed in."""
    return SimError(
        f"{name}: Expected all tensors to be on the same device, but found at least two devices, "
        "hpu:0 and cpu!"
    )
