"""`habana_frameworks.torch.hpu`, which is `torch.hpu` too (gaudi-facts.md 4.3)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from services.engine.device.sim.card import card
from services.engine.device.sim.habana import graphs
from services.engine.device.sim.settings import SimError


def is_available() -> bool:
    """Return whether there is a card. Never raises, and takes none."""
    return device_count() > 0


def device_count() -> int:
    """Return the cards that this process may take: 0 without a driver."""
    return card().device_count()


def current_device() -> int:
    """Acquire the card. A process has one, which it calls 0."""
    card().touch()
    return 0


def set_device(device: Any) -> None:
    """Has no effect beyond acquiring: which card it is follows from HLS_MODULE_ID."""
    card().touch()


def get_device_name(device: Any = None) -> str:
    """GAUDI2 or GAUDI3."""
    card().touch()
    return card().settings.device.upper()


def get_device_capability(device: Any = None) -> str:
    """The software's version."""
    return card().settings.version


def is_initialized() -> bool:
    """torch asks this of a device module."""
    return True


def _is_in_bad_fork() -> bool:
    return False


def manual_seed_all(seed: int) -> None:
    """torch seeds all devices together; no random numbers are drawn on this one."""


def synchronize(device: Any = None) -> None:
    """Wait for all queues. In lazy mode what was collected goes first."""
    card().flush()
    card().synchronize()


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """(Limit - InUse, Limit) in bytes."""
    card().touch()
    hbm = card().hbm
    return hbm.free, hbm.limit


def memory_allocated(device: Any = None) -> int:
    """InUse."""
    return card().hbm.in_use


def max_memory_allocated(device: Any = None) -> int:
    """MaxInUse."""
    return card().hbm.most_in_use


def memory_reserved(device: Any = None) -> int:
    """Limit: the process owns all of the card's memory."""
    return card().hbm.limit


def reset_peak_memory_stats(device: Any = None) -> None:
    """MaxInUse becomes InUse."""
    card().hbm.reset_peak()


def memory_stats(device: Any = None) -> dict[str, int]:
    """All figures by the vendor's names."""
    hbm = card().hbm
    return {
        "Limit": hbm.limit,
        "InUse": hbm.in_use,
        "MaxInUse": hbm.most_in_use,
        "NumAllocs": hbm.allocations,
        "NumFrees": hbm.frees,
        "ActiveAllocs": hbm.allocations - hbm.frees,
        "MaxAllocSize": hbm.largest,
        "TotalSystemAllocs": hbm.allocations,
        "TotalSystemFrees": hbm.frees,
        "TotalActiveAllocs": hbm.allocations - hbm.frees,
    }


class Event:
    """Marks a point of the device's work."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._copies: int | None = None

    def record(self, stream: Any = None) -> None:
        """After what was given to the device so far; lazy mode gives it what was collected."""
        card().flush()
        self._copies = card().copies.begun

    def synchronize(self) -> None:
        """Wait for that point. Raises SimError if there is none."""
        if self._copies is None:
            raise SimError("an event that was not recorded cannot be waited for")
        card().synchronize(self._copies)

    def wait(self, stream: Any = None) -> None:
        """Make a stream wait; the host goes on."""

    def query(self) -> bool:
        """True once the point is passed: the simulated device has done all that it was given."""
        if self._copies is not None:
            card().synchronize(self._copies)
        return True


class Stream:
    """A queue of the device. The simulator runs all work in the order in which it is given."""

    def synchronize(self) -> None:
        """Wait for the queue."""
        synchronize()

    def wait_stream(self, stream: Stream) -> None:
        """Order this queue after another; they are ordered anyway."""

    def record_event(self, event: Event | None = None) -> Event:
        """An event at the queue's present end."""
        event = event or Event()
        event.record(self)
        return event


_default = Stream()


def default_stream(device: Any = None) -> Stream:
    """The queue that is used unless another is chosen."""
    return _default


def current_stream(device: Any = None) -> Stream:
    """The queue that is used now."""
    return _default


@contextmanager
def stream(chosen: Stream) -> Iterator[None]:
    """Inside, work goes to this queue."""
    yield


def __getattr__(name: str) -> Any:
    # The bridge offers its graphs in lazy mode alone.
    if name in graphs.NAMES:
        return getattr(graphs, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
