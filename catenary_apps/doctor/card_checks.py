"""Checks of the cards: their driver, hl-smi, who holds them, where they sit, and the links between them."""

from __future__ import annotations

from collections import Counter

from catenary_apps.doctor.host import VENDOR, Survey, parse_ports
from catenary_apps.doctor.result import Result, not_applicable, ok, problem, warning

_MODULES = "habanalabs_en habanalabs_cn habanalabs_ib habanalabs"
_OPERATIONAL = "operational"


def check_cards(survey: Survey) -> Result:
    """Find Gaudi cards on the PCI bus."""
    count = len(survey.cards)
    if count:
        return ok(f"{count} Gaudi card{'s' if count > 1 else ''} on the PCI bus")
    if survey.host.names("/sys/class/accel/accel*"):
        return warning(
            "no Gaudi card on the PCI bus, but /sys/class/accel has devices: of another vendor, perhaps",
            "in a container, see that its /sys is the host's, or give --root",
        )
    return not_applicable(
        f"no Gaudi card on the PCI bus (vendor {VENDOR:#06x}): engines run here with --device cpu, and "
        "checks that are about cards do not apply"
    )


def check_driver(survey: Survey) -> Result:
    """Check the kernel module, and those of the network between the cards."""
    host = survey.host
    if not host.exists("/sys/module/habanalabs"):
        return problem(
            "the kernel module habanalabs is not loaded",
            "sudo modprobe habanalabs; if there is none, install the driver (habanalabs-dkms, or the "
            "vendor's habanalabs-installer.sh), and see dmesg for why it does not load",
        )
    missing = [card.bus_id for card in survey.cards if card.accel is None]
    if missing:
        return problem(
            f"loaded, but has not taken {', '.join(missing)}",
            "see dmesg | grep habanalabs; then sudo modprobe -r habanalabs && sudo modprobe habanalabs",
        )
    version = survey.driver or "of an unknown version"
    if len(survey.cards) > 1 and not host.exists("/sys/module/habanalabs_cn"):
        return warning(
            f"habanalabs {version}, without habanalabs_cn: the links between cards are down",
            f"sudo modprobe -a {_MODULES}",
        )
    return ok(f"habanalabs {version}")


def check_status(survey: Survey) -> Result:
    """Check the driver's state of each card."""
    told = [(card.accel, card.status) for card in survey.cards if card.accel and card.status]
    if not told:
        return not_applicable("the driver tells nothing")
    bad = [f"{accel}: {status}" for accel, status in told if status.casefold() != _OPERATIONAL]
    if bad:
        return problem(
            "; ".join(bad),
            "wait if it is in reset or creation, else sudo hl-smi -r -i BUS_ID; if that does not help, "
            "turn the machine off and on",
        )
    return ok(f"{len(told)} operational")


def check_smi(survey: Survey) -> Result:
    """Check that hl-smi works, and shows the cards that are on the bus."""
    smi = survey.smi
    if smi is None:
        return problem(
            "it is not there, or fails",
            "install habanalabs-firmware-tools of the driver's version; in a container, use the habana "
            "runtime, and try it as root",
        )
    if not smi.cards:
        return problem(
            "its table shows no card",
            "run hl-smi by hand and read what it says; the driver's and its own version must be the same",
        )
    if len(smi.cards) != len(survey.cards):
        return warning(
            f"it shows {len(smi.cards)} of {len(survey.cards)} cards",
            "in a container, HABANA_VISIBLE_DEVICES chooses; else see dmesg | grep habanalabs",
        )
    faulty = [f"{card.index}: {card.ecc_errors}" for card in smi.cards if card.ecc_errors]
    if faulty:
        return warning(
            f"uncorrected ECC errors on card {', '.join(faulty)}",
            "restart the engines of these cards; if the numbers rise, hl-smi --query-row-replacement and the "
            "vendor's support",
        )
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(card.name for card in smi.cards).items())
    return ok(f"{smi.tool or 'version unknown'}: {kinds}")


def check_owners(survey: Survey) -> Result:
    """Check that a card is free: another process on the same one ends with "Device acquire failed"."""
    smi = survey.smi
    if smi is None or not smi.cards:
        return not_applicable("hl-smi shows no card")
    if smi.processes:
        owners = ", ".join(f"{held.index}: {held.name} ({held.pid})" for held in smi.processes)
        return warning(
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
            f"card {', '.join(held)} is in use, by a process that hl-smi cannot see from here",
            "sudo hl-smi on the host, outside of containers, shows all processes",
        )
    return ok("nobody holds a card")


def check_modules(survey: Survey) -> Result:
    """Check the module ids, by which a process chooses its card."""
    modules = {card.bus_id: card.module_id for card in survey.cards}
    unknown = [bus for bus, module in modules.items() if module is None]
    if unknown:
        return warning(
            f"unknown for {', '.join(unknown)}",
            "hl-smi -Q bus_id,module_id -f csv tells them; engines choose a card by HABANA_VISIBLE_MODULES",
        )
    if len(set(modules.values())) < len(modules):
        return problem(
            "two cards have the same: " + _pairs(modules),
            "reset the cards (sudo hl-smi -r); if it stays so, reseat them or ask the vendor",
        )
    return ok(_pairs(modules))


def check_numa(survey: Survey) -> Result:
    """Find the NUMA node of each card, on whose cores its engine is to run."""
    if len(survey.host.names("/sys/devices/system/node/node*")) < 2:
        return ok("the machine has one node")
    unknown = [card.bus_id for card in survey.cards if card.numa_node is None or card.numa_node < 0]
    if unknown:
        return warning(
            f"unknown for {', '.join(unknown)}",
            "give the virtual machine the host's topology, or turn NUMA on in the BIOS; else bind engines by "
            "hand (numactl)",
        )
    nodes: dict[int, list[str]] = {}
    for card in survey.cards:
        label = card.bus_id if card.module_id is None else str(card.module_id)
        nodes.setdefault(card.numa_node or 0, []).append(label)
    return ok("; ".join(f"node {node}: modules {', '.join(held)}" for node, held in sorted(nodes.items())))


def _pairs(modules: dict[str, int | None]) -> str:
    ordered = sorted(modules.items(), key=lambda pair: (pair[1] or 0, pair[0]))
    return ", ".join(f"{module}: {bus}" for bus, module in ordered)


_UP = "up"
_LIBFABRIC = (
    "/opt/habanalabs/libfabric*/lib/libfabric.so*",
    "/opt/libfabric*/lib/libfabric.so*",
    "/opt/amazon/efa/lib*/libfabric.so*",
    "/usr/lib/*/libfabric.so*",
    "/usr/lib64/libfabric.so*",
    "/usr/local/lib/libfabric.so*",
)


def check_ports(survey: Survey) -> Result:
    """Check the NIC ports of each card; the internal ones join the cards of a server."""
    if len(survey.cards) < 2:
        return not_applicable("links join two cards or more")
    if survey.smi is None:
        return _ports_of_driver(survey)
    down: list[str] = []
    outside = 0
    known = 0
    for card in survey.cards:
        states = parse_ports(survey.host.run(("hl-smi", "-n", "link", "-i", card.bus_id)) or "")
        kinds = parse_ports(survey.host.run(("hl-smi", "-n", "ports", "-i", card.bus_id)) or "")
        known += len(states)
        external = {port for port, kind in kinds.items() if kind == "external"}
        failed = sorted(port for port, state in states.items() if state != _UP)
        outside += len(external.intersection(failed))
        inside = [str(port) for port in failed if port not in external]
        if inside:
            down.append(f"{card.bus_id}: {', '.join(inside)}")
    if not known:
        return warning("hl-smi shows no ports", "hl-smi -n link -i BUS_ID by hand says why")
    if down:
        return problem(
            "down: " + "; ".join(down),
            "engines on several cards would hang: sudo modprobe -r habanalabs && sudo modprobe -a "
            "habanalabs_en habanalabs_cn habanalabs_ib habanalabs; then the baseboard (dmesg)",
        )
    more = f"; {outside} external ones are down, which matters for several servers alone" if outside else ""
    return ok(f"{known - outside} up{more}")


def _ports_of_driver(survey: Survey) -> Result:
    """Check the driver's RDMA devices, where hl-smi gives no answer."""
    states = {
        file: survey.host.text(file) or ""
        for file in survey.host.names("/sys/class/infiniband/hbl_*/ports/*/state")
    }
    if not states:
        return not_applicable("neither hl-smi nor habanalabs_ib tells of ports")
    active = sum("ACTIVE" in state for state in states.values())
    if active < len(states):
        return warning(
            f"{active} of {len(states)} are active",
            "external ones without a cable are down; hl-smi -n link tells which",
        )
    return ok(f"{active} active")


def check_libfabric(survey: Survey) -> Result:
    """Find the library by which HCCL reaches other servers over the host's NICs."""
    host = survey.host
    root = host.environment.get("LIBFABRIC_ROOT")
    patterns = (f"{root}/lib/libfabric.so*", *_LIBFABRIC) if root else _LIBFABRIC
    found = next((file for pattern in patterns for file in host.names(pattern)), None)
    if found is not None:
        return ok(found)
    return not_applicable(
        "not installed: only engines that span servers without Gaudi's own external ports need it"
    )
