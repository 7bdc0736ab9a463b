"""Memory of the host: huge pages, the IOMMU, how much there is and may be used."""

from __future__ import annotations

import re

from catenary.cgroups import memory_limits
from catenary_apps.doctor.result import Result, not_applicable, ok, warning
from catenary_apps.doctor.survey import Survey
from catenary_apps.doctor.versions import minor, shown

_GIB = 2**30
# Per card, from the vendor's examples for servers with eight: 95000 MiB of huge pages, 409 GiB of memory.
_HUGEPAGE_MIB = 95_000 / 8
_MEMORY_GIB = 409 / 8
_OPEN_FILES = 65_536
# From this kernel on, a translating IOMMU breaks or slows the cards' transfers.
_IOMMU_KERNEL = (6, 8)
_PASSES = ("iommu=pt", "iommu.passthrough=1", "intel_iommu=off", "amd_iommu=off", "iommu=off")


def check_hugepages(survey: Survey) -> Result:
    """Huge pages for the buffers of the cards' drivers and collectives."""
    name, cards = "huge pages", len(survey.cards)
    if not cards:
        return not_applicable(name, "no card needs them")
    facts = _meminfo(survey)
    size_kib, total = facts.get("Hugepagesize", 0), facts.get("HugePages_Total", 0)
    wanted = round(cards * _HUGEPAGE_MIB * 1024 / (size_kib or 2048))
    if total:
        free = facts.get("HugePages_Free", 0)
        return ok(name, f"{total} of {size_kib // 1024} MiB, {free} free")
    return warning(
        name,
        "none",
        f"sudo sysctl -w vm.nr_hugepages={wanted}, and the same in /etc/sysctl.d (the vendor's examples give "
        "95000 MiB to eight cards)",
    )


def check_iommu(survey: Survey) -> Result:
    """With newer kernels the IOMMU has to pass the cards through."""
    name, host = "IOMMU", survey.host
    if not survey.cards:
        return not_applicable(name, "no card")
    if not host.names("/sys/class/iommu/*"):
        return ok(name, "off")
    words = (host.text("/proc/cmdline") or "").split()
    passing = [word for word in words if word in _PASSES]
    if passing:
        return ok(name, f"{passing[0]} on the kernel's command line")
    kernel = minor(host.text("/proc/sys/kernel/osrelease") or "")
    if kernel is not None and kernel < _IOMMU_KERNEL:
        return ok(name, f"on, with kernel {shown(kernel)}")
    return warning(
        name,
        f"on and translating, with kernel {shown(kernel) if kernel else 'unknown'}",
        "add iommu=pt to GRUB_CMDLINE_LINUX_DEFAULT in /etc/default/grub, sudo update-grub, reboot",
    )


def check_memory(survey: Survey) -> Result:
    """Memory that weights pass through, and that prepared recipes and KV on the host take."""
    name, host = "memory", survey.host
    total = _meminfo(survey).get("MemTotal")
    if total is None:
        return not_applicable(name, "/proc/meminfo cannot be read")
    bytes_there = total * 1024
    usable = min([bytes_there, *(group.limit for group in memory_limits(host.root))])
    limited = usable < bytes_there
    found = f"{usable / _GIB:.0f} GiB" + (" by the container's limit" if limited else "")
    wanted = len(survey.cards) * _MEMORY_GIB
    if usable / _GIB < wanted:
        cards = len(survey.cards)
        return warning(
            name,
            f"{found} for {cards} card{'s' if cards > 1 else ''}",
            f"the vendor's examples have about {wanted:.0f} GiB: large models may not load; "
            + ("raise the limit" if limited else "use fewer cards or smaller models"),
        )
    return ok(name, found)


def check_limits(survey: Survey) -> Result:
    """What a process may lock and open, and the shared memory that ranks of an engine talk through."""
    name, host = "limits", survey.host
    locked, files = host.locked_memory(), host.open_files()
    problems: list[str] = []
    advice: list[str] = []
    if survey.cards and locked is not None:
        problems.append(f"{locked // 1024} KiB of locked memory")
        advice.append("ulimit -l unlimited (Docker: --ulimit memlock=-1)")
    if files is not None and files < _OPEN_FILES:
        problems.append(f"{files} open files")
        advice.append(f"ulimit -n {_OPEN_FILES} (Docker: --ulimit nofile={_OPEN_FILES})")
    if problems:
        return warning(name, ", ".join(problems), "; ".join(advice))
    shown_lock = "unlimited" if locked is None else f"{locked // 1024} KiB"
    return ok(name, f"locked memory {shown_lock}, open files {'unlimited' if files is None else files}")


def _meminfo(survey: Survey) -> dict[str, int]:
    """Numbers of /proc/meminfo; those with a unit in KiB."""
    text = survey.host.text("/proc/meminfo") or ""
    return {found[1]: int(found[2]) for found in re.finditer(r"^(\S+):\s+(\d+)", text, re.MULTILINE)}
