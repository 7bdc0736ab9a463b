"""Acquires the card, and says what to do where that fails.

Source: docs/gaudi-facts.md 4.3, 7.8, 7.9, 7.19: a process acquires a whole card, so a second one fails.
"""

from __future__ import annotations

import os

from services.engine.device.base import DeviceError
from services.engine.device.hpu.bridge import Bridge
from services.engine.device.hpu.driver import Driver


def acquire(bridge: Bridge, driver: Driver) -> str:
    """Takes the card for this process; returns its name. Raises DeviceError, one line."""
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
