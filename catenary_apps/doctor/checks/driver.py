"""Cards on the bus, and the driver."""

from __future__ import annotations

from catenary_apps.doctor.result import Result, not_applicable, ok, problem, warning
from catenary_apps.doctor.survey import VENDOR, Survey

_MODULES = "habanalabs_en habanalabs_cn habanalabs_ib habanalabs"
_OPERATIONAL = "operational"


def check_cards(survey: Survey) -> Result:
    """Gaudi cards on the PCI bus."""
    name, count = "cards", len(survey.cards)
    if count:
        return ok(name, f"{count} Gaudi card{'s' if count > 1 else ''} on the PCI bus")
    if survey.host.names("/sys/class/accel/accel*"):
        return warning(
            name,
            "no Gaudi card on the PCI bus, but /sys/class/accel has devices: of another vendor, perhaps",
            "in a container, see that its /sys is the host's, or give --root",
        )
    return not_applicable(
        name,
        f"no Gaudi card on the PCI bus (vendor {VENDOR:#06x}): engines run here with --device cpu, and "
        "checks that are about cards do not apply",
    )


def check_driver(survey: Survey) -> Result:
    """The kernel module, with those of the network beside it."""
    name, host = "driver", survey.host
    if not survey.cards:
        return not_applicable(name, "no card to drive")
    if not host.exists("/sys/module/habanalabs"):
        return problem(
            name,
            "the kernel module habanalabs is not loaded",
            "sudo modprobe habanalabs; if there is none, install the driver (habanalabs-dkms, or the "
            "vendor's habanalabs-installer.sh), and see dmesg for why it does not load",
        )
    missing = [card.bus_id for card in survey.cards if card.accel is None]
    if missing:
        return problem(
            name,
            f"loaded, but has not taken {', '.join(missing)}",
            "see dmesg | grep habanalabs; then sudo modprobe -r habanalabs && sudo modprobe habanalabs",
        )
    version = survey.driver or "of an unknown version"
    if len(survey.cards) > 1 and not host.exists("/sys/module/habanalabs_cn"):
        return warning(
            name,
            f"habanalabs {version}, without habanalabs_cn: the links between cards are down",
            f"sudo modprobe -a {_MODULES}",
        )
    return ok(name, f"habanalabs {version}")


def check_status(survey: Survey) -> Result:
    """What the driver says about each card."""
    name = "card status"
    told = [(card.accel, card.status) for card in survey.cards if card.accel and card.status]
    if not told:
        return not_applicable(name, "the driver tells nothing")
    bad = [f"{accel}: {status}" for accel, status in told if status.casefold() != _OPERATIONAL]
    if bad:
        return problem(
            name,
            "; ".join(bad),
            "wait if it is in reset or creation, else sudo hl-smi -r -i BUS_ID; if that does not help, "
            "turn the machine off and on",
        )
    return ok(name, f"{len(told)} operational")
