"""What a card says when something is not possible. The texts' first words are the vendor's."""

from __future__ import annotations


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
