"""What is known about a host's cards before anything is judged: gathered once, for all checks."""

from __future__ import annotations

from dataclasses import dataclass

from catenary_apps.doctor.hlsmi import SmiTable, parse_modules, parse_table
from catenary_apps.doctor.host import Host

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
    """Looks at the PCI bus, the driver and hl-smi, which is asked only where there is a card."""
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
