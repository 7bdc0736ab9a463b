"""The devices of an engine, one row each, and the choice of `--device auto`, without torch.

`auto` is the first device of this file that is there. A card that is there is chosen even if it cannot be
used: opening it then fails with the cause, where a CPU in its place would only be slow, without a word.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from catenary.gaudi import PLUGIN

_HABANA, _ACCELERATOR = "0x1da3", "0x1200"
# The driver's nodes; the second is that of Windows' subsystem for Linux.
_NVIDIA = ("dev/nvidiactl", "dev/nvidia0", "usr/lib/wsl/lib/libcuda.so.1")
# Values of CUDA_VISIBLE_DEVICES that hide every GPU.
_NO_GPU = ("", "-1", "none", "void")
# Reason why an HPU is not opened.
NO_PLUGIN = (
    f"the package {PLUGIN} is not installed for this Python: run in Habana's PyTorch image, "
    "or choose another device"
)


@dataclass(frozen=True, slots=True)
class Host:
    """The machine as detection reads it: its files, variables and installed packages."""

    root: Path
    environment: Mapping[str, str]
    package: Callable[[str], str]


Detector = Callable[[Host], str | None]


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """A value of the option `device`.

    module: module of the engine with `open_device(options, mode)`. extra: extra of this package that installs
    its requirements. records: options of recorded graphs apply to it. on_host: it computes on the host's
    cores, so options of threads apply. gaudi: it follows Gaudi's variables, modes and modules. detect: return
    the reason why `auto` is this device, None if it is not there.
    """

    name: str
    module: str
    extra: str
    records: bool
    on_host: bool
    gaudi: bool
    detect: Detector


DEVICES: dict[str, DeviceKind] = {}


def register(
    name: str, *, extra: str, records: bool = False, on_host: bool = False, gaudi: bool = False
) -> Callable[[Detector], Detector]:
    """Register a device by the function that detects it; `services.engine.device.NAME` opens it."""

    def add(detect: Detector) -> Detector:
        module = f"services.engine.device.{name}"
        DEVICES[name] = DeviceKind(name, module, extra, records, on_host, gaudi, detect)
        return detect

    return add


@register("hpu", extra="hpu", records=True, gaudi=True)
def _hpu(host: Host) -> str | None:
    if cards := _gaudi_cards(host.root):
        return f"{cards} Gaudi card{'s' if cards > 1 else ''} on the PCI bus"
    try:
        return f"{PLUGIN} {host.package(PLUGIN)} is installed"
    except metadata.PackageNotFoundError:
        return None


@register("cuda", extra="cuda", records=True)
def _cuda(host: Host) -> str | None:
    there = _has_nvidia(host) and not _hides_nvidia(host)
    return "there is an NVIDIA GPU" if there else None


@register("cpu", extra="cpu", on_host=True)
def _cpu(host: Host) -> str | None:
    if _has_nvidia(host):
        return "CUDA_VISIBLE_DEVICES hides the NVIDIA GPU"
    return "there is neither a Gaudi card nor an NVIDIA GPU"


@register("sim", extra="cpu", records=True, on_host=True, gaudi=True)
def _sim(_host: Host) -> str | None:
    # An HPU simulated on the CPU is chosen by name alone.
    return None


if TYPE_CHECKING:
    DeviceChoice = str
else:
    DeviceChoice = Literal[("auto", *sorted(DEVICES))]


def devices_that(fact: Callable[[DeviceKind], bool]) -> tuple[str, ...]:
    """Return the names of devices for which a fact holds, in alphabetical order."""
    return tuple(sorted(name for name, kind in DEVICES.items() if fact(kind)))


class ChosenDevice(str):
    """A device's name that the operator did not give. `reason`: why it is this one, for one line."""

    reason: str

    def __new__(cls, name: str, reason: str) -> ChosenDevice:
        made = super().__new__(cls, name)
        made.reason = reason
        return made


def choose_device(
    root: Path = Path("/"),
    environment: Mapping[str, str] = os.environ,
    package: Callable[[str], str] = metadata.version,
) -> ChosenDevice:
    """Return the first registered device that is there."""
    host = Host(root, environment, package)
    for name, kind in DEVICES.items():
        if reason := kind.detect(host):
            return ChosenDevice(name, reason)
    raise LookupError("no device is registered for every machine")


def described(device: str) -> str | None:
    """Return one line about a device that was chosen, None about one that was given."""
    if not isinstance(device, ChosenDevice):
        return None
    return f"device {device}: {device.reason} (--device names another)"


def why_not_opened(device: str, package: Callable[[str], str] = metadata.version) -> str:
    """Return why no engine could open this device, as far as that is known without trying; else ""."""
    if device != "hpu":
        return ""
    try:
        package(PLUGIN)
    except metadata.PackageNotFoundError:
        return NO_PLUGIN
    return ""


def _has_nvidia(host: Host) -> bool:
    return any((host.root / node).exists() for node in _NVIDIA)


def _hides_nvidia(host: Host) -> bool:
    return host.environment.get("CUDA_VISIBLE_DEVICES", "all").strip().lower() in _NO_GPU


def _gaudi_cards(root: Path) -> int:
    found = 0
    for device in (root / "sys/bus/pci/devices").glob("*"):
        try:
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
        except OSError:
            continue
        found += vendor == _HABANA and kind.startswith(_ACCELERATOR)
    return found
