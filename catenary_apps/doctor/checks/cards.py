"""What hl-smi knows: cards, who holds them, and where they sit."""

from __future__ import annotations

from collections import Counter

from catenary_apps.doctor.result import Result, not_applicable, ok, problem, warning
from catenary_apps.doctor.survey import Survey


def check_smi(survey: Survey) -> Result:
    """hl-smi is there, and sees what the bus has."""
    name, smi = "hl-smi", survey.smi
    if not survey.cards:
        return not_applicable(name, "no card to ask about")
    if smi is None:
        return problem(
            name,
            "it is not there, or fails",
            "install habanalabs-firmware-tools of the driver's version; in a container, use the habana "
            "runtime, and try it as root",
        )
    if not smi.cards:
        return problem(
            name,
            "its table shows no card",
            "run hl-smi by hand and read what it says; the driver's and its own version must be the same",
        )
    if len(smi.cards) != len(survey.cards):
        return warning(
            name,
            f"it shows {len(smi.cards)} of {len(survey.cards)} cards",
            "in a container, HABANA_VISIBLE_DEVICES chooses; else see dmesg | grep habanalabs",
        )
    faulty = [f"{card.index}: {card.ecc_errors}" for card in smi.cards if card.ecc_errors]
    if faulty:
        return warning(
            name,
            f"uncorrected ECC errors on card {', '.join(faulty)}",
            "restart the engines of these cards; if the numbers rise, hl-smi --query-row-replacement and the "
            "vendor's support",
        )
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(card.name for card in smi.cards).items())
    return ok(name, f"{smi.tool or 'version unknown'}: {kinds}")


def check_owners(survey: Survey) -> Result:
    """A process takes a whole card: another on the same one ends with "Device acquire failed"."""
    name, smi = "card owners", survey.smi
    if smi is None or not smi.cards:
        return not_applicable(name, "hl-smi shows no card")
    if smi.processes:
        owners = ", ".join(f"{held.index}: {held.name} ({held.pid})" for held in smi.processes)
        return warning(
            name,
            f"held by processes: {owners}",
            "start engines on the others (HABANA_VISIBLE_MODULES), or end these first",
        )
    held = [
        str(card.index)
        for card in smi.cards
        if card.used_mib and card.total_mib and card.used_mib > card.total_mib // 10
    ]
    if held:
        return warning(
            name,
            f"card {', '.join(held)} is in use, by a process that hl-smi cannot see from here",
            "sudo hl-smi on the host, outside of containers, shows all processes",
        )
    return ok(name, "nobody holds a card")


def check_modules(survey: Survey) -> Result:
    """Module ids, which choose the card of a process."""
    name = "module ids"
    if not survey.cards:
        return not_applicable(name, "no card")
    modules = {card.bus_id: card.module_id for card in survey.cards}
    unknown = [bus for bus, module in modules.items() if module is None]
    if unknown:
        return warning(
            name,
            f"unknown for {', '.join(unknown)}",
            "hl-smi -Q bus_id,module_id -f csv tells them; engines choose a card by HABANA_VISIBLE_MODULES",
        )
    if len(set(modules.values())) < len(modules):
        return problem(
            name,
            "two cards have the same: " + _pairs(modules),
            "reset the cards (sudo hl-smi -r); if it stays so, reseat them or ask the vendor",
        )
    return ok(name, _pairs(modules))


def check_numa(survey: Survey) -> Result:
    """The NUMA node of each card, whose cores its engine is to run on."""
    name = "NUMA nodes of cards"
    if not survey.cards:
        return not_applicable(name, "no card")
    if len(survey.host.names("/sys/devices/system/node/node*")) < 2:
        return ok(name, "the machine has one node")
    unknown = [card.bus_id for card in survey.cards if card.numa_node is None or card.numa_node < 0]
    if unknown:
        return warning(
            name,
            f"unknown for {', '.join(unknown)}",
            "give the virtual machine the host's topology, or turn NUMA on in the BIOS; else bind engines by "
            "hand (numactl)",
        )
    nodes: dict[int, list[str]] = {}
    for card in survey.cards:
        label = card.bus_id if card.module_id is None else str(card.module_id)
        nodes.setdefault(card.numa_node or 0, []).append(label)
    return ok(
        name, "; ".join(f"node {node}: modules {', '.join(held)}" for node, held in sorted(nodes.items()))
    )


def _pairs(modules: dict[str, int | None]) -> str:
    ordered = sorted(modules.items(), key=lambda pair: (pair[1] or 0, pair[0]))
    return ", ".join(f"{module}: {bus}" for bus, module in ordered)
