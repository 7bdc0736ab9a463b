"""Which CPUs a process computes on: notation, the machine's shape, and who gets what."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary.cpus import (
    Binding,
    EngineCpus,
    Placement,
    Topology,
    format_cpus,
    parse_binding,
    parse_cpus,
    place,
    read_topology,
)

AUTO = Binding(auto=True)


def machine(*nodes: int, siblings: int = 1, limit: int | None = None) -> Topology:
    """So many cores on each node; the second CPU of a core comes after the first ones of all, as on Linux."""
    total = sum(nodes)
    cores = [tuple(core + total * thread for thread in range(siblings)) for core in range(total)]
    shaped = [tuple(cores[sum(nodes[:index]) :][:count]) for index, count in enumerate(nodes)]
    return Topology(tuple(shaped), limit or total * siblings)


@given(st.sets(st.integers(0, 8191), min_size=1))
def test_notation_is_read_as_it_is_written(cpus: set[int]) -> None:
    assert parse_cpus(format_cpus(cpus)) == tuple(sorted(cpus))


def test_notation() -> None:
    assert parse_cpus(" 0-3, 8,2 ") == (0, 1, 2, 3, 8)
    assert format_cpus((5, 0, 1, 2)) == "0-2,5"


@pytest.mark.parametrize(
    "text", ["", "a", "3-1", "1-", "-1", "1,,2", "8192", "0-99999", "1;2", "\u0661", "0x1"]
)
def test_what_is_no_set_of_cpus(text: str) -> None:
    with pytest.raises(ValueError, match="is no set of CPUs"):
        parse_cpus(text)


def test_binding() -> None:
    assert parse_binding(" AUTO ") == AUTO
    assert parse_binding("none") == Binding()
    assert parse_binding("0-1|2,3") == Binding(lists=((0, 1), (2, 3)))
    with pytest.raises(ValueError, match="gives one CPU to two engines"):
        parse_binding("0-2|2")
    with pytest.raises(ValueError):
        parse_binding("0|")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_topology_of_two_nodes_with_hyperthreads(tmp_path: Path) -> None:
    for cpu in range(8):
        write(
            tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list",
            f"{cpu % 4},{cpu % 4 + 4}\n",
        )
    write(tmp_path / "sys/devices/system/node/node0/cpulist", "0-1,4-5\n")
    write(tmp_path / "sys/devices/system/node/node1/cpulist", "2-3,6-7\n")
    write(tmp_path / "sys/devices/system/node/node2/cpulist", "\n")
    write(tmp_path / "sys/fs/cgroup/cpu.max", "max 100000\n")
    whole = read_topology(range(8), tmp_path)
    assert whole == Topology((((0, 4), (1, 5)), ((2, 6), (3, 7))), 8)
    assert (whole.count, whole.cpus) == (4, 8)
    # A container that may use three of them.
    assert read_topology({1, 5, 6}, tmp_path) == Topology((((1, 5),), ((6,),)), 3)
    write(tmp_path / "sys/fs/cgroup/cpu.max", "250000 100000\n")
    assert read_topology(range(8), tmp_path).limit == 2


def test_topology_where_the_kernel_says_nothing(tmp_path: Path) -> None:
    assert read_topology({0, 1}, tmp_path) == Topology((((0,), (1,)),), 2)


def test_few_cores_are_shared() -> None:
    assert place(machine(2), 1, AUTO) == Placement((EngineCpus(2),))
    assert place(machine(2, siblings=2), 1, AUTO) == Placement((EngineCpus(2),))
    assert place(machine(4), 2, AUTO) == Placement((EngineCpus(2),) * 2)
    assert place(machine(2), 4, AUTO) == Placement((EngineCpus(1),) * 4)


def test_services_are_kept_off_the_engine() -> None:
    assert place(machine(8), 1, AUTO) == Placement((EngineCpus(7, tuple(range(7))),), (7,))
    # With both threads of their core.
    assert place(machine(8, siblings=2), 1, AUTO) == Placement((EngineCpus(7, tuple(range(7))),), (7, 15))
    assert place(machine(24), 1, AUTO).services == (22, 23)
    assert place(machine(4), 1, AUTO, 1) == Placement((EngineCpus(3, (0, 1, 2)),), (3,))
    assert place(machine(8), 1, AUTO, 0) == Placement((EngineCpus(8),))
    assert place(machine(8), 1, Binding()) == Placement((EngineCpus(7),))


def test_engine_stays_in_one_node() -> None:
    both = place(machine(8, 8), 2, AUTO)
    assert both.engines == (EngineCpus(8, tuple(range(8))), EngineCpus(7, tuple(range(8, 15))))
    assert both.services == (15,)
    alone = place(machine(8, 8), 1, AUTO)
    assert alone == Placement((EngineCpus(8, tuple(range(8))),), tuple(range(8, 16)))
    three = place(machine(8, 8), 3, AUTO)
    assert [one.threads for one in three.engines] == [4, 7, 4]


def test_quota_binds_nobody() -> None:
    assert place(machine(32, limit=3), 1, AUTO) == Placement((EngineCpus(3),))


def test_lists() -> None:
    lists = parse_binding("0-1|4-5")
    assert place(machine(8), 2, lists) == Placement(
        (EngineCpus(2, (0, 1)), EngineCpus(2, (4, 5))), (2, 3, 6, 7)
    )
    assert place(machine(2), 1, parse_binding("0-1")) == Placement((EngineCpus(2, (0, 1)),))
    with pytest.raises(ValueError, match="2 lists of CPUs for 1 engines"):
        place(machine(8), 1, lists)
    with pytest.raises(ValueError, match="CPU 9 is not among those"):
        place(machine(8), 1, parse_binding("7,9-10"))


def test_too_many_kept_free() -> None:
    with pytest.raises(ValueError, match="4 of 4 cores cannot be kept free beside 2 engines"):
        place(machine(4), 2, AUTO, 2)


@given(
    st.lists(st.integers(1, 24), min_size=1, max_size=4),
    st.integers(1, 12),
    st.none() | st.integers(0, 4),
    st.integers(1, 2),
)
def test_laws_of_placement(nodes: list[int], engines: int, reserve: int | None, siblings: int) -> None:
    topology = machine(*nodes, siblings=siblings)
    try:
        placed = place(topology, engines, AUTO, reserve)
    except ValueError:
        assert reserve is not None
        return
    assert len(placed.engines) == engines
    assert all(one.threads >= 1 for one in placed.engines)
    bound = [one.cpus for one in placed.engines if one.cpus is not None]
    taken = [cpu for cpus in bound for cpu in cpus]
    # No two threads on one core, no engine over two nodes, no service on an engine's core.
    core_of = {cpu: core for node in topology.cores for core in node for cpu in core}
    assert len({core_of[cpu] for cpu in taken}) == len(taken)
    for cpus, engine in zip(bound, placed.engines, strict=False):
        assert len(cpus) == engine.threads
        assert any(set(cpus) <= {core[0] for core in node} for node in topology.cores)
    services = placed.services or ()
    assert not {core_of[cpu] for cpu in services} & {core_of[cpu] for cpu in taken}
    assert bool(services) == bool(bound)
