"""The host and its cards as the checks see them: files below a root, commands, packages, hl-smi's tables."""

from __future__ import annotations

import importlib.metadata
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

MAX_FILE_BYTES = 1 << 20

Runner = Callable[[Sequence[str]], str | None]
"""Runs a command; its output, or None if it is not there, fails or takes too long."""


def command_runner(timeout_s: float) -> Runner:
    """Run commands of this machine."""

    def run(command: Sequence[str]) -> str | None:
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=timeout_s,
                check=False,
                # Some of the vendor's tools write logs below the home directory, which may be read-only.
                env={"HABANA_LOGS": "/tmp/habana_logs", **os.environ},
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None

    return run


def installed_version(package: str) -> str | None:
    """Return the version of a package of this Python, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def locked_memory_limit() -> int | None:
    """Return bytes that this process may lock; None: any number."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def open_files_limit() -> int | None:
    """Return files that this process may open, at its hard limit; None: any number."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if hard == resource.RLIM_INFINITY else hard


def _open_at_once(path: str, flags: int) -> int:
    # A pipe in a place of a file would wait for its writer for ever.
    return os.open(path, flags | os.O_NONBLOCK)


@dataclass(frozen=True)
class Host:
    """The files and commands that the checks read.

    Tests give a tree of their own, and answers of commands.
    """

    root: Path = Path("/")
    run: Runner = field(default_factory=lambda: command_runner(20.0))
    package: Callable[[str], str | None] = installed_version
    python: tuple[int, int] = (sys.version_info[0], sys.version_info[1])
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    locked_memory: Callable[[], int | None] = locked_memory_limit
    open_files: Callable[[], int | None] = open_files_limit

    def path(self, name: str) -> Path:
        """Return a path below the root, from an absolute one."""
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str | None:
        """Return a file's text without the space around it; None if it cannot be read."""
        try:
            with open(self.path(name), "rb", opener=_open_at_once) as file:
                return file.read(MAX_FILE_BYTES).decode("utf-8", "replace").strip()
        except OSError:
            return None

    def number(self, name: str) -> int | None:
        """Return a file's number, decimal or with its prefix; None if it holds none."""
        try:
            return int(self.text(name) or "", 0)
        except ValueError:
            return None

    def exists(self, name: str) -> bool:
        """Return whether there is such a file or directory."""
        return self.path(name).exists()

    def names(self, pattern: str) -> list[str]:
        """Return absolute names that match a pattern such as /sys/class/accel/accel*, in order."""
        found = sorted(self.root.glob(pattern.lstrip("/")), key=lambda path: (len(path.name), path.name))
        return ["/" + path.relative_to(self.root).as_posix() for path in found]


_VERSION = re.compile(r"\|\s*(?P<what>HL-SMI|Driver|Nic Driver) Version:\s+(?P<version>\S+)")
_CARD = re.compile(
    r"\|\s*(?P<index>\d+)\s+(?P<name>HL-\S+)\s.*\|\s*(?P<bus>[0-9a-fA-F]{4}:[0-9a-fA-F:.]+)\s.*\|\s*(?P<ecc>\d+|N/A)"
)
_USE = re.compile(r"(?P<used>\d+)\s*MiB\s*/\s*(?P<total>\d+)\s*MiB", re.IGNORECASE)
_TEMPERATURE = re.compile(r"\|\s*\S+\s+(?P<celsius>\d+)C\s")
_PROCESS = re.compile(r"\|\s*(?P<index>\d+)\s+(?P<pid>\d+)\s+(?P<type>\S+)\s+(?P<name>\S+)")
_PORT = re.compile(r"port\s+(?P<port>\d+):\s*(?P<state>\S+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class SmiCard:
    """One card's rows of the table. Memory in MiB; None: not shown."""

    index: int
    name: str
    bus_id: str
    ecc_errors: int | None = None
    celsius: int | None = None
    used_mib: int | None = None
    total_mib: int | None = None


@dataclass(frozen=True, slots=True)
class SmiProcess:
    """A process that holds a card."""

    index: int
    pid: int
    name: str


@dataclass(frozen=True, slots=True)
class SmiTable:
    """The table that hl-smi prints without options."""

    tool: str | None
    driver: str | None
    cards: tuple[SmiCard, ...]
    processes: tuple[SmiProcess, ...]


def parse_table(text: str) -> SmiTable:
    """Read what there is of the table; rows that look otherwise are left out."""
    versions: dict[str, str] = {}
    cards: list[SmiCard] = []
    processes: list[SmiProcess] = []
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if found := _VERSION.search(line):
            versions[found["what"]] = found["version"]
        elif found := _CARD.search(line):
            cards.append(_smi_card(found, lines[number + 1] if number + 1 < len(lines) else ""))
        elif found := _PROCESS.search(line):
            processes.append(SmiProcess(int(found["index"]), int(found["pid"]), found["name"]))
    return SmiTable(
        versions.get("HL-SMI"),
        versions.get("Driver"),
        tuple(cards),
        tuple(processes),
    )


def _smi_card(found: re.Match[str], below: str) -> SmiCard:
    use, temperature = _USE.search(below), _TEMPERATURE.search(below)
    return SmiCard(
        index=int(found["index"]),
        name=found["name"],
        bus_id=found["bus"].lower(),
        ecc_errors=int(found["ecc"]) if found["ecc"].isdigit() else None,
        celsius=int(temperature["celsius"]) if temperature else None,
        used_mib=int(use["used"]) if use else None,
        total_mib=int(use["total"]) if use else None,
    )


def parse_modules(text: str) -> dict[str, int]:
    """Return module ids by bus id, from `hl-smi -Q bus_id,module_id -f csv,noheader`."""
    modules: dict[str, int] = {}
    for line in text.splitlines():
        bus, _, module = (part.strip() for part in line.partition(","))
        if module.isdigit():
            modules[bus.lower()] = int(module)
    return modules


def parse_ports(text: str) -> dict[int, str]:
    """Return each port's state as `hl-smi -n link` (up, down) or `-n ports` (internal, external) has it."""
    return {int(found["port"]): found["state"].lower() for found in _PORT.finditer(text)}


# Habana Labs on the PCI bus, and the class of processing accelerators.
VENDOR = 0x1DA3
_ACCELERATORS = 0x12


@dataclass(frozen=True, slots=True)
class Card:
    """A Gaudi card. `accel` is its name in /sys/class/accel, None without a driver; None: not known."""

    bus_id: str
    numa_node: int | None
    accel: str | None
    status: str | None
    module_id: int | None


@dataclass(frozen=True, slots=True)
class Survey:
    """A host and its cards, in the order of their addresses. `smi` is None if hl-smi gives no answer."""

    host: Host
    cards: tuple[Card, ...]
    smi: SmiTable | None
    driver: str | None

    @property
    def busy(self) -> bool:
        """Whether a process holds a card, as far as hl-smi can see."""
        return bool(self.smi and self.smi.processes)


def survey(host: Host) -> Survey:
    """Look at the PCI bus, the driver and hl-smi, which is asked only where there is a card."""
    addresses = [
        name.rpartition("/")[2] for name in host.names("/sys/bus/pci/devices/*") if _is_card(host, name)
    ]
    accels = {_address(host, name): name for name in host.names("/sys/class/accel/accel*")}
    smi_text = host.run(("hl-smi",)) if addresses else None
    smi = parse_table(smi_text) if smi_text is not None else None
    query = ("hl-smi", "-Q", "bus_id,module_id", "-f", "csv,noheader")
    modules = parse_modules(host.run(query) or "") if smi is not None else {}
    cards = tuple(_card(host, address, accels.get(address), modules) for address in addresses)
    driver = host.text("/sys/module/habanalabs/version") or (smi.driver if smi else None)
    return Survey(host, cards, smi, driver)


def _is_card(host: Host, name: str) -> bool:
    device_class = host.number(f"{name}/class")
    accelerator = device_class is None or device_class >> 16 == _ACCELERATORS
    return host.number(f"{name}/vendor") == VENDOR and accelerator


def _address(host: Host, accel: str) -> str:
    written = host.text(f"{accel}/device/pci_addr")
    return (written or host.path(f"{accel}/device").resolve().name).lower()


def _card(host: Host, address: str, accel: str | None, modules: dict[str, int]) -> Card:
    module = host.number(f"{accel}/device/module_id") if accel else None
    return Card(
        bus_id=address,
        numa_node=host.number(f"/sys/bus/pci/devices/{address}/numa_node"),
        accel=accel.rpartition("/")[2] if accel else None,
        status=host.text(f"{accel}/device/status") if accel else None,
        module_id=modules.get(address.lower(), module),
    )
