"""Checks of the host around the cards: packages and their versions, cores, memory, limits, containers."""

from __future__ import annotations

import json
import re
from collections import Counter

from catenary.cgroups import memory_limits
from catenary.gaudi import PLUGIN, PYTHONS, RELEASES, Version, supported, take_image, too_old
from catenary_apps.doctor.host import Survey
from catenary_apps.doctor.result import Result, not_applicable, ok, problem, warning

_NUMBERS = re.compile(r"(\d+)\.(\d+)")


def minor(text: str) -> Version | None:
    """Return major and minor number of a version such as hl-1.22.1-fw-61.4.2.1 or 2.9.0+hpu_1.23.0."""
    found = _NUMBERS.search(text)
    return (int(found[1]), int(found[2])) if found else None


def shown(version: Version) -> str:
    """Return a version as text."""
    return f"{version[0]}.{version[1]}"


def known_releases() -> str:
    """Return the releases of the table, oldest first."""
    return ", ".join(shown(version) for version in RELEASES)


def check_packages(survey: Survey) -> Result:
    """Check habana-torch-plugin and torch in the Python that runs this."""
    plugin, torch = survey.host.package(PLUGIN), survey.host.package("torch")
    if plugin is None:
        where = "engines for these cards run" if survey.cards else "an engine for Gaudi would run"
        return not_applicable(f"no {PLUGIN} in this Python: {where} in the image for hpu (docs/gaudi.md)")
    if torch is None:
        return problem(
            f"{PLUGIN} {plugin} without torch",
            "install the vendor's torch of the same release, or use its image",
        )
    if too_old(plugin) is not None:
        found = f"{PLUGIN} {plugin}, torch {torch}: engines run on {supported()}"
        return problem(found, take_image())
    release = RELEASES.get(minor(plugin) or (0, 0))
    if release is None:
        return warning(
            f"{PLUGIN} {plugin} is none of the known releases {known_releases()}",
            "use the image of one of those",
        )
    if minor(torch) not in release.torches:
        wanted = " or ".join(shown(version) for version in release.torches)
        return problem(
            f"torch {torch} does not belong to {PLUGIN} {plugin}, which comes with {wanted}",
            "another torch was installed over the vendor's: make the environment anew, with no package that "
            "brings a torch of its own",
        )
    return ok(f"{PLUGIN} {plugin}, torch {torch}")


def check_python(survey: Survey) -> Result:
    """Check that engines run on this Python."""
    python = survey.host.python
    if python not in PYTHONS:
        wanted = " or ".join(shown(version) for version in PYTHONS)
        return problem(
            f"{shown(python)}; engines run on Python {wanted}",
            f"{take_image()}: those for Ubuntu 24.04 have Python 3.12, those for Red Hat 9 have 3.11",
        )
    plugin = survey.host.package(PLUGIN)
    release = RELEASES.get(minor(plugin) or (0, 0)) if plugin else None
    if release is not None and python not in release.pythons:
        wanted = " or ".join(shown(version) for version in release.pythons)
        return problem(f"{shown(python)}, for which {PLUGIN} {plugin} is not made", f"use Python {wanted}")
    return ok(shown(python))


def check_compatibility(survey: Survey) -> Result:
    """Check that driver and software are of one release: others fail in odd ways."""
    host = survey.host
    driver = minor(survey.driver or "")
    if driver is None:
        return warning(
            "the driver's version is unknown", "hl-smi shows it; it must be the release of the software"
        )
    plugin = host.package(PLUGIN)
    software = minor(plugin) if plugin else None
    if software is None:
        if driver < min(RELEASES):
            return problem(f"the driver {shown(driver)} is too old", f"{take_image()} ({known_releases()})")
        if driver not in RELEASES:
            return warning(
                f"the driver {shown(driver)} is none of the known releases {known_releases()}",
                "install the driver of one of those, and take the image of the same release",
            )
        return ok(f"driver {shown(driver)}: take the Gaudi image of {shown(driver)}")
    if driver < software:
        return problem(
            f"the driver {shown(driver)} is older than the software {shown(software)}",
            f"install the driver {shown(software)} on the host, or take the image of {shown(driver)}",
        )
    if driver > software:
        return warning(
            f"the driver {shown(driver)} is newer than the software {shown(software)}",
            f"the vendor supports equal releases: take the image of {shown(driver)}",
        )
    return ok(f"both {shown(driver)}")


_CPU = "/sys/devices/system/cpu"
_DEEP = re.compile(r"C(?P<depth>\d+)")
# From here on a core takes a hundred microseconds or more to wake up.
_DEEPEST_GOOD = 1


def check_governor(survey: Survey) -> Result:
    """Check frequency scaling: a core that is slow to speed up delays each step."""
    host = survey.host
    texts = [host.text(file) for file in host.names(f"{_CPU}/cpu[0-9]*/cpufreq/scaling_governor")]
    governors = Counter(text for text in texts if text)
    if not governors:
        return not_applicable("the kernel scales no frequencies here, as on most virtual machines")
    if set(governors) == {"performance"}:
        return ok(f"performance on {governors['performance']} CPUs")
    found = ", ".join(f"{governor} on {count}" for governor, count in governors.most_common())
    return warning(
        f"{found} CPUs", "echo performance | sudo tee /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"
    )


def check_idle_states(survey: Survey) -> Result:
    """Check for deep idle states, C6 above all: waking from one costs more than preparing a step."""
    host = survey.host
    enabled: Counter[str] = Counter()
    names = host.names(f"{_CPU}/cpu[0-9]*/cpuidle/state*/name")
    for file in names:
        state = host.text(file) or ""
        depth = _DEEP.match(state)
        if depth is None or int(depth["depth"]) <= _DEEPEST_GOOD:
            continue
        if host.text(file.removesuffix("name") + "disable") == "0":
            enabled[state] += 1
    if not names:
        return not_applicable("the kernel manages no idle states here, as on most virtual machines")
    if not enabled:
        return ok("none deeper than C1 is on")
    found = ", ".join(f"{state} on {count} CPUs" for state, count in sorted(enabled.items()))
    return warning(
        f"{found} enabled",
        "sudo cpupower idle-set -D 10; for good: intel_idle.max_cstate=1 on the kernel's command line, or "
        "the BIOS",
    )


def check_numa_balancing(survey: Survey) -> Result:
    """Check whether the kernel moves pages between nodes, which stalls the threads that use them."""
    host = survey.host
    value = host.text("/proc/sys/kernel/numa_balancing")
    if value is None:
        return not_applicable("the kernel has none")
    if value == "0":
        return ok("off")
    if len(host.names("/sys/devices/system/node/node*")) < 2:
        return ok("on, on a machine with one node")
    return warning(
        "on: the kernel moves pages between nodes while engines use them",
        "echo 0 | sudo tee /proc/sys/kernel/numa_balancing; for good: kernel.numa_balancing = 0 in "
        "/etc/sysctl.d",
    )


_GIB = 2**30
# Per card, from the vendor's examples for servers with eight: 95000 MiB of huge pages, 409 GiB of memory.
_HUGEPAGE_MIB = 95_000 / 8
_MEMORY_GIB = 409 / 8
_OPEN_FILES = 65_536
# From this kernel on, a translating IOMMU breaks or slows the cards' transfers.
_IOMMU_KERNEL = (6, 8)
_PASSES = ("iommu=pt", "iommu.passthrough=1", "intel_iommu=off", "amd_iommu=off", "iommu=off")


def check_hugepages(survey: Survey) -> Result:
    """Check the huge pages for the buffers of the cards' drivers and collectives."""
    cards = len(survey.cards)
    facts = _meminfo(survey)
    size_kib, total = facts.get("Hugepagesize", 0), facts.get("HugePages_Total", 0)
    wanted = round(cards * _HUGEPAGE_MIB * 1024 / (size_kib or 2048))
    if total:
        free = facts.get("HugePages_Free", 0)
        return ok(f"{total} of {size_kib // 1024} MiB, {free} free")
    return warning(
        "none",
        f"sudo sysctl -w vm.nr_hugepages={wanted}, and the same in /etc/sysctl.d (the vendor's examples give "
        "95000 MiB to eight cards)",
    )


def check_iommu(survey: Survey) -> Result:
    """Check that the IOMMU passes the cards through, as newer kernels need it."""
    host = survey.host
    if not host.names("/sys/class/iommu/*"):
        return ok("off")
    words = (host.text("/proc/cmdline") or "").split()
    passing = [word for word in words if word in _PASSES]
    if passing:
        return ok(f"{passing[0]} on the kernel's command line")
    kernel = minor(host.text("/proc/sys/kernel/osrelease") or "")
    if kernel is not None and kernel < _IOMMU_KERNEL:
        return ok(f"on, with kernel {shown(kernel)}")
    return warning(
        f"on and translating, with kernel {shown(kernel) if kernel else 'unknown'}",
        "add iommu=pt to GRUB_CMDLINE_LINUX_DEFAULT in /etc/default/grub, sudo update-grub, reboot",
    )


def check_memory(survey: Survey) -> Result:
    """Check the memory, which weights pass through, and which prepared recipes and KV on the host take."""
    host = survey.host
    total = _meminfo(survey).get("MemTotal")
    if total is None:
        return not_applicable("/proc/meminfo cannot be read")
    bytes_there = total * 1024
    usable = min([bytes_there, *(group.limit for group in memory_limits(host.root))])
    limited = usable < bytes_there
    found = f"{usable / _GIB:.0f} GiB" + (" by the container's limit" if limited else "")
    wanted = len(survey.cards) * _MEMORY_GIB
    if usable / _GIB < wanted:
        cards = len(survey.cards)
        return warning(
            f"{found} for {cards} card{'s' if cards > 1 else ''}",
            f"the vendor's examples have about {wanted:.0f} GiB: large models may not load; "
            + ("raise the limit" if limited else "use fewer cards or smaller models"),
        )
    return ok(found)


def check_limits(survey: Survey) -> Result:
    """Check limits of locked memory and open files, and the shared memory that ranks of an engine use."""
    host = survey.host
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
        return warning(", ".join(problems), "; ".join(advice))
    shown_lock = "unlimited" if locked is None else f"{locked // 1024} KiB"
    return ok(f"locked memory {shown_lock}, open files {'unlimited' if files is None else files}")


def _meminfo(survey: Survey) -> dict[str, int]:
    """Return numbers of /proc/meminfo; those with a unit in KiB."""
    text = survey.host.text("/proc/meminfo") or ""
    return {found[1]: int(found[2]) for found in re.finditer(r"^(\S+):\s+(\d+)", text, re.MULTILINE)}


_DOCKER = ("/usr/bin/dockerd", "/usr/local/bin/dockerd", "/usr/sbin/dockerd", "/snap/bin/docker")
_RUNTIME = ("/usr/bin/habana-container-runtime", "/usr/local/bin/habana-container-runtime")
_INSTALL = (
    "install habanalabs-container-runtime, then add the runtime habana to /etc/docker/daemon.json "
    "(docs/gaudi.md) and restart docker"
)


def check_runtime(survey: Survey) -> Result:
    """Check that Docker has the habana runtime."""
    host = survey.host
    if host.exists("/.dockerenv") or host.exists("/run/.containerenv"):
        visible = host.environment.get("HABANA_VISIBLE_DEVICES")
        if visible:
            return ok(f"in a container with HABANA_VISIBLE_DEVICES={visible}")
        return warning(
            "in a container without HABANA_VISIBLE_DEVICES",
            "start it with the runtime habana and -e HABANA_VISIBLE_DEVICES=all",
        )
    if not any(host.exists(program) for program in _DOCKER):
        return not_applicable("no Docker here")
    try:
        runtimes = json.loads(host.text("/etc/docker/daemon.json") or "{}").get("runtimes", {})
    except (ValueError, AttributeError):
        return warning("/etc/docker/daemon.json is not valid JSON", "mend it: docker does not start with it")
    if "habana" in runtimes:
        program = runtimes["habana"].get("path", "habana-container-runtime")
        if program.startswith("/") and not host.exists(program):
            return warning(f"the runtime habana is {program}, which is not there", _INSTALL)
        return ok(f"docker has the runtime habana ({program})")
    found = "docker does not know the runtime habana"
    if any(host.exists(program) for program in _RUNTIME):
        found += ", though it is installed"
    return warning(found, _INSTALL)
