"""What hl-smi prints, parsed."""

from __future__ import annotations

import re
from dataclasses import dataclass

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
    """Reads what there is of the table; rows that look otherwise are left out."""
    versions: dict[str, str] = {}
    cards: list[SmiCard] = []
    processes: list[SmiProcess] = []
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if found := _VERSION.search(line):
            versions[found["what"]] = found["version"]
        elif found := _CARD.search(line):
            cards.append(_card(found, lines[number + 1] if number + 1 < len(lines) else ""))
        elif found := _PROCESS.search(line):
            processes.append(SmiProcess(int(found["index"]), int(found["pid"]), found["name"]))
    return SmiTable(
        versions.get("HL-SMI"),
        versions.get("Driver"),
        tuple(cards),
        tuple(processes),
    )


def _card(found: re.Match[str], below: str) -> SmiCard:
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
    """Module ids by bus id, from `hl-smi -Q bus_id,module_id -f csv,noheader`."""
    modules: dict[str, int] = {}
    for line in text.splitlines():
        bus, _, module = (part.strip() for part in line.partition(","))
        if module.isdigit():
            modules[bus.lower()] = int(module)
    return modules


def parse_ports(text: str) -> dict[int, str]:
    """What `hl-smi -n link` (up, down) or `-n ports` (internal, external) says of each port."""
    return {int(found["port"]): found["state"].lower() for found in _PORT.finditer(text)}
