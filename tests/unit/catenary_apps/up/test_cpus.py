"""Which CPUs `catenary up` gives its engines, and a child that keeps to its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from catenary.cpus import EngineCpus, Placement, Topology
from catenary.runtime import StartRefused
from catenary_apps.up.child import wrapped
from catenary_apps.up.config import UpConfig
from catenary_apps.up.resources import cpus_of, described

EIGHT = Topology((tuple((cpu,) for cpu in range(8)),), 8)
BOUND = Placement((EngineCpus(7, tuple(range(7))),), (7,))


def test_engines_on_a_cpu_are_placed() -> None:
    assert cpus_of(UpConfig(), EIGHT, {}) == BOUND
    assert described(BOUND) == "CPUs: engines 0-6; services 7"
    assert cpus_of(UpConfig(device="hpu"), EIGHT, {}) is None
    assert cpus_of(UpConfig(device="sim"), EIGHT, {}) == Placement((EngineCpus(7),))
    both = cpus_of(UpConfig(engines=2, cpu_bind="0-3|4-7"), EIGHT, {})
    assert both == Placement((EngineCpus(4, (0, 1, 2, 3)), EngineCpus(4, (4, 5, 6, 7))))
    assert described(both) == "CPUs: engines 0-3 | 4-7; services all"


@pytest.mark.parametrize("name", ["CATENARY_ENGINE_CPU_BIND", "CATENARY_ENGINE_DEVICE_THREADS"])
def test_what_was_said_to_the_engines_is_left_to_them(name: str) -> None:
    placed = cpus_of(UpConfig(), EIGHT, {name: "3"})
    assert placed is not None
    assert described(placed) == ""
    assert cpus_of(UpConfig(cpu_bind="0-6"), EIGHT, {name: "3"}) == BOUND


def test_placement_that_cannot_be() -> None:
    with pytest.raises(StartRefused, match="--cpu-bind, --cpu-reserve: 2 lists of CPUs for 1 engines"):
        cpus_of(UpConfig(cpu_bind="0|1"), EIGHT, {})
    with pytest.raises(ValueError, match="no set of CPUs"):
        UpConfig(cpu_bind="some")


def test_child_keeps_to_its_cpus() -> None:
    show = (sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))")
    mine = sorted(os.sched_getaffinity(0))
    for asked, kept in (((), mine), (mine[:1], mine[:1]), ((8191,), mine)):
        result = subprocess.run(wrapped(show, asked), capture_output=True, text=True, check=True)
        assert result.stdout.strip() == str(kept)
