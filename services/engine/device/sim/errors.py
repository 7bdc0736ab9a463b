"""What a card says when something is not possible. The texts' first words are the vendor's."""

from __future__ import annotations


class SimError(RuntimeError):
    """The vendor's errors are RuntimeErrors."""


def out_of_memory(wanted: int, free: int) -> SimError:
    """HBM is full (facts 4.3: there is one pool, and the process owns it all)."""
    return SimError(
        f"Allocation failed for size::{wanted} ({wanted / 2**20:.2f})MB: out of memory, {free} bytes are free"
    )


def acquire_failed(module: int) -> SimError:
    """Another process has the module (facts 7.8)."""
    return SimError(f"synStatus=8 [Device not found] Device acquire failed. module id {module}")


def host_read_in_capture(name: str) -> SimError:
    """Facts 4.2: no host reads while a graph is captured."""
    return SimError(f"{name} reads a device tensor on the host inside of an HPU graph capture")


def dynamic_in_capture(name: str) -> SimError:
    """Facts 4.2: static shapes only."""
    return SimError(f"{name} has a shape that depends on data inside of an HPU graph capture")


def fallback_in_capture(name: str) -> SimError:
    """Facts 4.2: no CPU operations while a graph is captured."""
    return SimError(f"{name} falls back to the CPU inside of an HPU graph capture")


def mixed_devices(name: str) -> SimError:
    """Only 0-dim CPU tensors may be mixed in."""
    return SimError(
        f"{name}: Expected all tensors to be on the same device, but found at least two devices, "
        "hpu:0 and cpu!"
    )
