"""Which releases of Habana's software go with which torch.

Source: the vendor's support matrices (torch 2.7 with 1.22, 2.9 with 1.23, 2.10 with 1.24), and gaudi-facts.md
section 6 for torch 2.11 with 1.24.1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata

import torch
from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from catenary.gaudi import PLUGIN, RELEASES, too_old
from catenary.telemetry import get_logger
from services.engine.device.base import DeviceError

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
    """Raises DeviceError if software and torch do not go together, or the software is too old to be known."""
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
