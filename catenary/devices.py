"""Which device `--device auto` stands for: the best that is there, found without torch, and not opened.

A card that is there is chosen even if it cannot be used: opening it then fails with the cause, where a CPU in
its place would only be slow, without a word.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

from catenary.gaudi import PLUGIN

_HABANA, _ACCELERATOR = "0x1da3", "0x1200"
# The driver's nodes; the second is that of Windows' subsystem for Linux.
_NVIDIA = ("dev/nvidiactl", "dev/nvidia0", "usr/lib/wsl/lib/libcuda.so.1")
# Values of CUDA_VISIBLE_DEVICES that hide every GPU.
_NO_GPU = ("", "-1", "none", "void")
# Why an HPU is not opened.
NO_PLUGIN = (
    f"the package {PLUGIN} is not installed for this Python: run in Habana's PyTorch image, "
    "or choose another device"
)


class ChosenDevice(str):
    """A device's name that nobody gave. `reason`: why it is this one, for one line."""

    reason: str

    def __new__(cls, name: str, reason: str) -> ChosenDevice:
        """Make one."""
        made = super().__new__(cls, name)
        made.reason = reason
        return made


def choose_device(
    root: Path = Path("/"),
    environment: Mapping[str, str] = os.environ,
    package: Callable[[str], str] = metadata.version,
) -> ChosenDevice:
    """hpu, cuda or cpu, by what is there."""
    cards = _gaudi_cards(root)
    if cards:
        return ChosenDevice("hpu", f"{cards} Gaudi card{'s' if cards > 1 else ''} on the PCI bus")
    try:
        return ChosenDevice("hpu", f"{PLUGIN} {package(PLUGIN)} is installed")
    except metadata.PackageNotFoundError:
        pass
    if any((root / node).exists() for node in _NVIDIA):
        if environment.get("CUDA_VISIBLE_DEVICES", "all").strip().lower() in _NO_GPU:
            return ChosenDevice("cpu", "CUDA_VISIBLE_DEVICES hides the NVIDIA GPU")
        return ChosenDevice("cuda", "there is an NVIDIA GPU")
    return ChosenDevice("cpu", "there is neither a Gaudi card nor an NVIDIA GPU")


def described(device: str) -> str | None:
    """One line about a device that was chosen, None about one that was given."""
    if not isinstance(device, ChosenDevice):
        return None
    return f"device {device}: {device.reason} (--device names another)"


def why_not_opened(device: str, package: Callable[[str], str] = metadata.version) -> str:
    """Why no engine could open this device, as far as that is known without trying; "" if it is not."""
    if device != "hpu":
        return ""
    try:
        package(PLUGIN)
    except metadata.PackageNotFoundError:
        return NO_PLUGIN
    return ""


def _gaudi_cards(root: Path) -> int:
    found = 0
    for device in (root / "sys/bus/pci/devices").glob("*"):
        try:
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
        except OSError:
            continue
        found += vendor == _HABANA and kind.startswith(_ACCELERATOR)
    return found
