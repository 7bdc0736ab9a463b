"""How the host's cores run: an engine's host side is one busy thread between steps of the cards."""

from __future__ import annotations

import re
from collections import Counter

from catenary_apps.doctor.result import Result, not_applicable, ok, warning
from catenary_apps.doctor.survey import Survey

_CPU = "/sys/devices/system/cpu"
_DEEP = re.compile(r"C(?P<depth>\d+)")
# From here on a core takes a hundred microseconds or more to wake up.
_DEEPEST_GOOD = 1


def check_governor(survey: Survey) -> Result:
    """Frequency scaling: a core that is slow to speed up delays each step."""
    name, host = "CPU governor", survey.host
    texts = [host.text(file) for file in host.names(f"{_CPU}/cpu[0-9]*/cpufreq/scaling_governor")]
    governors = Counter(text for text in texts if text)
    if not governors:
        return not_applicable(name, "the kernel scales no frequencies here, as on most virtual machines")
    if set(governors) == {"performance"}:
        return ok(name, f"performance on {governors['performance']} CPUs")
    found = ", ".join(f"{governor} on {count}" for governor, count in governors.most_common())
    return warning(
        name,
        f"{found} CPUs",
        "echo performance | sudo tee /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor",
    )


def check_idle_states(survey: Survey) -> Result:
    """Deep idle states, C6 above all: waking from one costs more than preparing a step."""
    name, host = "C-states", survey.host
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
        return not_applicable(name, "the kernel manages no idle states here, as on most virtual machines")
    if not enabled:
        return ok(name, "none deeper than C1 is on")
    found = ", ".join(f"{state} on {count} CPUs" for state, count in sorted(enabled.items()))
    return warning(
        name,
        f"{found} enabled",
        "sudo cpupower idle-set -D 10; for good: intel_idle.max_cstate=1 on the kernel's command line, or "
        "the BIOS",
    )


def check_numa_balancing(survey: Survey) -> Result:
    """The kernel moving pages between nodes, which stalls the threads that use them."""
    name, host = "NUMA balancing", survey.host
    value = host.text("/proc/sys/kernel/numa_balancing")
    if value is None:
        return not_applicable(name, "the kernel has none")
    if value == "0":
        return ok(name, "off")
    if len(host.names("/sys/devices/system/node/node*")) < 2:
        return ok(name, "on, on a machine with one node")
    return warning(
        name,
        "on: the kernel moves pages between nodes while engines use them",
        "echo 0 | sudo tee /proc/sys/kernel/numa_balancing; for good: kernel.numa_balancing = 0 in "
        "/etc/sysctl.d",
    )
