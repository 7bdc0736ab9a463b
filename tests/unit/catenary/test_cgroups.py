"""Limits of control groups, read from trees of files as systemd, Docker and Kubernetes leave them."""

from __future__ import annotations

import resource
import signal
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from catenary.cgroups import count_oom_kills, cpu_limit, memory_limits
from catenary.cpus import read_topology
from catenary.memory import MemoryWatch
from services.engine.device import memory

MIB = 1 << 20
NONE_IN_VERSION_1 = "9223372036854771712"
V2 = "25 20 0:22 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw\n"
SERVICE = "0::/system.slice/catenary.service\n"
GROUP = "sys/fs/cgroup/system.slice/catenary.service"


def tree(root: Path, cgroup: str, mounts: str, files: Mapping[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": cgroup, "proc/self/mountinfo": mounts, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_service_of_systemd_is_limited_by_its_group_and_its_slice(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        SERVICE,
        V2,
        {
            f"{GROUP}/memory.max": f"{900 * MIB}\n",
            f"{GROUP}/memory.high": "max\n",
            f"{GROUP}/memory.current": f"{500 * MIB}\n",
            f"{GROUP}/memory.stat": f"anon 1\ninactive_file {200 * MIB}\nactive_file 5\n",
            f"{GROUP}/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/system.slice/memory.high": f"{700 * MIB}\n",
            "sys/fs/cgroup/system.slice/memory.current": f"{650 * MIB}\n",
            "sys/fs/cgroup/system.slice/cpu.max": "50000 100000\n",
        },
    )
    own, above = memory_limits(root)
    assert (own.limit, own.used, own.left) == (900 * MIB, 300 * MIB, 600 * MIB)
    assert (above.limit, above.left, above.file.name) == (700 * MIB, 50 * MIB, "memory.high")
    assert cpu_limit(root) == 0.5
    assert read_topology(range(8), root).limit == 1
    figures = memory.host_memory(root)
    assert (figures.total, figures.free) == (700 * MIB, 50 * MIB)


def test_a_container_of_version_2_has_its_limits_at_the_mount(tmp_path: Path) -> None:
    for name, cgroup in {"own namespace": "0::/\n", "a group outside": "0::/../../other\n"}.items():
        root = tree(tmp_path / name, cgroup, V2, {"sys/fs/cgroup/memory.max": f"{64 * MIB}\n"})
        assert [limit.left for limit in memory_limits(root)] == [64 * MIB]


def test_a_container_of_version_1_mounts_its_own_group(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        "11:memory:/docker/ab12\n4:cpu,cpuacct:/docker/ab12\n0::/docker/ab12\n",
        "40 30 0:9 /docker/ab12 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
        "41 30 0:8 /docker/ab12 /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n",
        {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{512 * MIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{512 * MIB}\n",
            "sys/fs/cgroup/memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {100 * MIB}\n",
            "sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "250000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
    )
    (limit,) = memory_limits(root)
    assert (limit.limit, limit.left) == (512 * MIB, 100 * MIB)
    assert cpu_limit(root) == 2.5
    assert read_topology(range(8), root).limit == 2
    assert count_oom_kills(root) == 3


def test_groups_of_version_1_that_set_no_limit_limit_nothing(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        "4:memory:/a/b\n1:cpu:/\n0::/\n",
        "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
        "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
        {
            "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": NONE_IN_VERSION_1,
            "sys/fs/cgroup/memory/memory.limit_in_bytes": NONE_IN_VERSION_1,
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert (memory_limits(root), cpu_limit(root)) == ((), None)
    assert memory.host_memory(root).total == psutil.virtual_memory().total
    # One above it does.
    (root / "sys/fs/cgroup/memory/a/memory.limit_in_bytes").write_text("1000\n")
    assert [limit.limit for limit in memory_limits(root)] == [1000]


def test_a_mount_at_a_path_with_a_blank(tmp_path: Path) -> None:
    mounts = V2.replace("/sys/fs/cgroup", r"/a\040b")
    root = tree(tmp_path, "0::/x\n", mounts, {"a b/x/memory.max": "10\n", "a b/memory.max": "broken\n"})
    assert [limit.limit for limit in memory_limits(root)] == [10]


def test_no_limits_where_the_kernel_says_nothing(tmp_path: Path) -> None:
    assert (memory_limits(tmp_path), cpu_limit(tmp_path), count_oom_kills(tmp_path)) == ((), None, None)


def test_memory_of_a_machine_without_meminfo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    total = memory.host_memory(tmp_path).total

    def missing() -> None:
        raise KeyError(b"MemTotal:")

    monkeypatch.setattr(psutil, "virtual_memory", missing)
    figures = memory.host_memory(tmp_path)
    # The system's call leaves out what the kernel keeps for itself, as the file does.
    assert figures.total == pytest.approx(total, rel=0.05)
    assert 0 < figures.free <= figures.total


def test_an_address_space_that_is_limited_counts_as_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    taken = psutil.Process().memory_info().vms
    monkeypatch.setattr(resource, "getrlimit", lambda _: (taken + 300 * MIB, resource.RLIM_INFINITY))
    figures = memory.host_memory(tmp_path)
    assert figures.free == pytest.approx(300 * MIB, abs=64 * MIB)


def limited(root: Path) -> Path:
    return tree(
        root,
        SERVICE,
        V2,
        {
            f"{GROUP}/memory.max": f"{900 * MIB}\n",
            f"{GROUP}/memory.events": "low 0\nmax 7\noom 0\noom_kill 1\n",
            "proc/vmstat": "oom_kill 9\n",
        },
    )


def test_a_kill_for_memory_names_the_limit_and_its_file(tmp_path: Path) -> None:
    watch = MemoryWatch(limited(tmp_path))
    assert watch.explain(-signal.SIGKILL) == ""
    (tmp_path / GROUP / "memory.events").write_text("max 9\noom 1\noom_kill 2\n")
    file = tmp_path / GROUP / "memory.max"
    assert watch.explain(-signal.SIGKILL) == f": probably the memory limit of 900 MiB was reached ({file})"
    # Told once.
    assert watch.explain(-signal.SIGKILL) == ""


def test_a_kill_where_no_group_limits_is_the_machines(tmp_path: Path) -> None:
    vmstat = tmp_path / "proc/vmstat"
    tree(tmp_path, "", "", {"proc/vmstat": "oom_kill 0\n"})
    watch = MemoryWatch(tmp_path)
    vmstat.write_text("oom_kill 1\n")
    assert watch.explain(-signal.SIGKILL) == ": probably the machine's memory ran out"


def test_a_limit_of_address_space_is_named_where_a_process_died_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    watch = MemoryWatch(tmp_path)
    assert [watch.explain(status) for status in (1, -signal.SIGABRT, -signal.SIGKILL)] == [""] * 3
    monkeypatch.setattr(resource, "getrlimit", lambda _: (700 * MIB, resource.RLIM_INFINITY))
    for status in (1, -signal.SIGABRT, -signal.SIGSEGV):
        assert "address space ran out, which is limited to 700 MiB (ulimit -v)" in watch.explain(status)
    assert [watch.explain(status) for status in (0, -signal.SIGTERM)] == ["", ""]
