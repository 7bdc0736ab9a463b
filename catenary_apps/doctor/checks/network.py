"""The links between cards, and those to other servers."""

from __future__ import annotations

from catenary_apps.doctor.hlsmi import parse_ports
from catenary_apps.doctor.result import Result, not_applicable, ok, problem, warning
from catenary_apps.doctor.survey import Survey

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
    """The NIC ports of each card: the internal ones join the cards of a server."""
    name = "NIC ports"
    if len(survey.cards) < 2:
        return not_applicable(name, "links join two cards or more")
    if survey.smi is None:
        return _ports_of_driver(survey, name)
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
        return warning(name, "hl-smi shows no ports", "hl-smi -n link -i BUS_ID by hand says why")
    if down:
        return problem(
            name,
            "down: " + "; ".join(down),
            "engines on several cards would hang: sudo modprobe -r habanalabs && sudo modprobe -a "
            "habanalabs_en habanalabs_cn habanalabs_ib habanalabs; then the baseboard (dmesg)",
        )
    more = f"; {outside} external ones are down, which matters for several servers alone" if outside else ""
    return ok(name, f"{known - outside} up{more}")


def _ports_of_driver(survey: Survey, name: str) -> Result:
    """The RDMA devices of the driver, where hl-smi gives no answer."""
    states = {
        file: survey.host.text(file) or ""
        for file in survey.host.names("/sys/class/infiniband/hbl_*/ports/*/state")
    }
    if not states:
        return not_applicable(name, "neither hl-smi nor habanalabs_ib tells of ports")
    active = sum("ACTIVE" in state for state in states.values())
    if active < len(states):
        return warning(
            name,
            f"{active} of {len(states)} are active",
            "external ones without a cable are down; hl-smi -n link tells which",
        )
    return ok(name, f"{active} active")


def check_libfabric(survey: Survey) -> Result:
    """The library by which HCCL reaches other servers over the host's NICs."""
    name, host = "libfabric", survey.host
    if not survey.cards:
        return not_applicable(name, "no card")
    root = host.environment.get("LIBFABRIC_ROOT")
    patterns = (f"{root}/lib/libfabric.so*", *_LIBFABRIC) if root else _LIBFABRIC
    found = next((file for pattern in patterns for file in host.names(pattern)), None)
    if found is not None:
        return ok(name, found)
    return not_applicable(
        name, "not installed: only engines that span servers without Gaudi's own external ports need it"
    )
