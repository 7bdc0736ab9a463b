from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from catenary_apps.cli.main import main
from catenary_apps.doctor.hccl import BandwidthOptions, check_bandwidth
from catenary_apps.doctor.host import command_runner, parse_modules, parse_ports, parse_table, survey
from catenary_apps.doctor.host_checks import minor
from catenary_apps.doctor.result import Result, Status, not_applicable, ok, show
from catenary_apps.doctor.run import DoctorConfig, examine
from tests.support.gaudi_host import FakeHost

OK, WARNING, PROBLEM, NOT_APPLICABLE = Status.OK, Status.WARNING, Status.PROBLEM, Status.NOT_APPLICABLE
NO_TEST = DoctorConfig(bandwidth_test=False)


def results(fake: FakeHost) -> dict[str, Result]:
    found = examine(NO_TEST, fake.host())
    assert len({result.check for result in found}) == len(found)
    for result in found:
        assert "\n" not in result.found + result.advice
        assert bool(result.advice) is (result.status in (WARNING, PROBLEM))
    return {result.check: result for result in found}


def test_a_good_gaudi3_host_has_nothing_to_mend(tmp_path: Path) -> None:
    found = results(FakeHost(tmp_path))
    assert {result.status for result in found.values()} == {OK}
    assert found["cards"].found == "8 Gaudi cards on the PCI bus"
    assert found["driver"].found == "habanalabs 1.23.0-6d1cb33"
    assert found["hl-smi"].found == "hl-1.23.0-fw-62.0.1.0: 8 HL-325L"
    assert found["module ids"].found.startswith("0: 0000:89:00.0, 1: 0000:79:00.0")
    assert found["NUMA nodes of cards"].found == "node 0: modules 7, 6, 5, 4; node 1: modules 3, 2, 1, 0"
    assert found["driver and software"].found == "both 1.23"
    assert found["NIC ports"].found == "192 up"


def test_a_host_without_a_card_says_so_and_asks_no_tool(tmp_path: Path) -> None:
    fake = FakeHost(tmp_path, cards=0, packages={}, python=(3, 11))
    found = results(fake)
    assert not {result.status for result in found.values()} & {WARNING, PROBLEM}
    assert found["cards"].status is NOT_APPLICABLE
    assert "no Gaudi card on the PCI bus" in found["cards"].found
    assert "--device cpu" in found["cards"].found
    assert fake.asked == []


def test_a_badly_tuned_host_is_told_what_to_do(tmp_path: Path) -> None:
    fake = FakeHost(tmp_path, locked_memory=65536 * 1024, open_files=1024)
    for cpu in range(4):
        fake.write(f"/sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor", "powersave")
        fake.write(f"/sys/devices/system/cpu/cpu{cpu}/cpuidle/state3/disable", "0")
    fake.write("/proc/sys/kernel/numa_balancing", "1")
    fake.write("/proc/cmdline", "BOOT_IMAGE=/vmlinuz ro quiet")
    fake.meminfo(hugepages=0, total_gib=256)
    fake.write("/etc/docker/daemon.json", "{}")
    found = results(fake)
    wrong = {name for name, result in found.items() if result.status is WARNING}
    assert wrong == {
        "CPU governor",
        "C-states",
        "NUMA balancing",
        "IOMMU",
        "huge pages",
        "memory",
        "limits",
        "container runtime",
    }
    assert "powersave on 4 CPUs" in found["CPU governor"].found
    assert "scaling_governor" in found["CPU governor"].advice
    assert found["C-states"].found == "C6 on 4 CPUs enabled"
    assert "cpupower idle-set" in found["C-states"].advice
    assert "nr_hugepages=47500" in found["huge pages"].advice
    assert "iommu=pt" in found["IOMMU"].advice
    assert "though it is installed" in found["container runtime"].found
    assert found["limits"].found == "65536 KiB of locked memory, 1024 open files"


def no_driver(fake: FakeHost) -> None:
    for module in ("habanalabs", "habanalabs_cn", "habanalabs_en", "habanalabs_ib"):
        fake.remove(f"/sys/module/{module}/version")
        (fake.root / f"sys/module/{module}").rmdir()
    fake.no_smi = True


def broken_card(fake: FakeHost) -> None:
    fake.write("/sys/bus/pci/devices/0000:29:00.0/status", "Malfunction")


def no_network_driver(fake: FakeHost) -> None:
    fake.remove("/sys/module/habanalabs_cn/version")
    (fake.root / "sys/module/habanalabs_cn").rmdir()


def lost_card(fake: FakeHost) -> None:
    fake.remove("/sys/class/accel/accel3/device")
    (fake.root / "sys/class/accel/accel3").rmdir()


def limited_container(fake: FakeHost) -> None:
    fake.write("/sys/fs/cgroup/memory.max", str(64 * 2**30))


def plain_container(fake: FakeHost) -> None:
    fake.write("/.dockerenv", "")


def habana_container(fake: FakeHost) -> None:
    fake.write("/.dockerenv", "")
    fake.environment["HABANA_VISIBLE_DEVICES"] = "all"


def bad_daemon(fake: FakeHost) -> None:
    fake.write("/etc/docker/daemon.json", '{"runtimes": ')


def strange_numa(fake: FakeHost) -> None:
    fake.write("/sys/bus/pci/devices/0000:19:00.0/numa_node", "-1")


@pytest.mark.parametrize(
    ("spoil", "check", "status", "text"),
    [
        (no_driver, "driver", PROBLEM, "modprobe habanalabs"),
        (no_driver, "hl-smi", PROBLEM, "not there"),
        (broken_card, "card status", PROBLEM, "accel1: Malfunction"),
        (no_network_driver, "driver", WARNING, "without habanalabs_cn"),
        (lost_card, "driver", PROBLEM, "has not taken 0000:49:00.0"),
        (limited_container, "memory", WARNING, "64 GiB by the container's limit for 8 cards"),
        (plain_container, "container runtime", WARNING, "HABANA_VISIBLE_DEVICES=all"),
        (habana_container, "container runtime", OK, "HABANA_VISIBLE_DEVICES=all"),
        (bad_daemon, "container runtime", WARNING, "not valid JSON"),
        (strange_numa, "NUMA nodes of cards", WARNING, "unknown for 0000:19:00.0"),
    ],
)
def test_one_fault_each(
    tmp_path: Path, spoil: Callable[[FakeHost], None], check: str, status: Status, text: str
) -> None:
    fake = FakeHost(tmp_path)
    spoil(fake)
    result = results(fake)[check]
    assert result.status is status
    assert text in f"{result.found} {result.advice}"


@pytest.mark.parametrize(
    ("driver", "plugin", "torch", "python", "check", "status", "text"),
    [
        ("1.22.1-a", "1.23.0.695", "2.9.0", (3, 12), "driver and software", PROBLEM, "image of 1.22"),
        ("1.24.0-a", "1.23.0.695", "2.9.0", (3, 12), "driver and software", WARNING, "image of 1.24"),
        ("1.24.0-a", "1.24.0.100", "2.10.0", (3, 12), "driver and software", OK, "both 1.24"),
        ("1.24.0-a", None, None, (3, 12), "driver and software", OK, "take the Gaudi image of 1.24"),
        ("1.19.0-a", None, None, (3, 12), "driver and software", PROBLEM, "1.22, 1.23, 1.24"),
        ("1.31.0-a", None, None, (3, 12), "driver and software", WARNING, "1.22, 1.23, 1.24"),
        ("1.24.0-a", "1.24.0.100", "2.13.0", (3, 12), "packages", PROBLEM, "comes with 2.10 or 2.11"),
        ("1.24.0-a", "1.24.0.100", None, (3, 12), "packages", PROBLEM, "without torch"),
        ("1.21.0-a", "1.21.0.555", "2.6.0", (3, 12), "packages", PROBLEM, "1.22, 1.23 or 1.24 with Python"),
        ("1.21.3-a", "1.21.3.57", "2.6.0", (3, 10), "packages", PROBLEM, "pytorch-installer-2.10.0"),
        ("1.31.0-a", "1.31.0.555", "2.16.0", (3, 12), "packages", WARNING, "none of the known releases"),
        ("1.24.0-a", None, "2.13.0", (3, 12), "packages", NOT_APPLICABLE, "image for hpu"),
        ("1.23.0-a", "1.23.0.695", "2.9.0", (3, 10), "Python", PROBLEM, "3.11 or 3.12"),
        ("1.23.0-a", "1.23.0.695", "2.9.0", (3, 10), "Python", PROBLEM, "Ubuntu 24.04 have Python 3.12"),
    ],
)
def test_versions_that_do_not_fit(
    tmp_path: Path,
    driver: str,
    plugin: str | None,
    torch: str | None,
    python: tuple[int, int],
    check: str,
    status: Status,
    text: str,
) -> None:
    packages = {"habana-torch-plugin": plugin, "torch": torch}
    given = {name: version for name, version in packages.items() if version is not None}
    result = results(FakeHost(tmp_path, driver=driver, packages=given, python=python))[check]
    assert result.status is status
    assert text in f"{result.found} {result.advice}"


def test_ports_that_are_down_inside_are_a_problem_and_outside_a_remark(tmp_path: Path) -> None:
    outside = results(FakeHost(tmp_path / "a", ports_down={2: (21, 23)}))["NIC ports"]
    assert outside.status is OK
    assert outside.found == "190 up; 2 external ones are down, which matters for several servers alone"
    inside = results(FakeHost(tmp_path / "b", ports_down={2: (4, 7, 23)}))["NIC ports"]
    assert inside.status is PROBLEM
    assert inside.found == "down: 0000:39:00.0: 4, 7"
    one = results(FakeHost(tmp_path / "c", cards=1))["NIC ports"]
    assert one.status is NOT_APPLICABLE


def test_without_hl_smi_the_driver_tells_of_ports_and_modules(tmp_path: Path) -> None:
    fake = FakeHost(tmp_path, cards=2, no_smi=True)
    for index in (0, 1):
        fake.write(f"/sys/bus/pci/devices/{fake.bus_id(index)}/module_id", str(index))
        fake.write(f"/sys/class/infiniband/hbl_{index}/ports/1/state", "4: ACTIVE" if index else "1: DOWN")
    found = results(fake)
    assert found["module ids"].found == "0: 0000:19:00.0, 1: 0000:29:00.0"
    assert found["NIC ports"].found == "1 of 2 are active"
    assert found["card owners"].status is NOT_APPLICABLE


def test_owners_of_cards_are_named(tmp_path: Path) -> None:
    fake = FakeHost(tmp_path, processes=[(3, 4711, "python3"), (5, 99, "vllm")])
    owners = results(fake)["card owners"]
    assert owners.status is WARNING
    assert owners.found == "held by processes: 3: python3 (4711), 5: vllm (99)"


# A table of an older release: other column heads, Mib, and a version text of its own.
OLD_TABLE = """\
+-----------------------------------------------------------------------------+
| HL-SMI Version:                    hl-1.6.0-fw-36.3.2.0-1-gda631d8          |
| Driver Version:                                      1.6.0-3c06a7c          |
|-------------------------------+----------------------+----------------------+
|   0  HL-205              N/A  | 0000:19:00.0     N/A |                   2  |
| N/A   35C   N/A   100W / 350W |  32454Mib / 32768Mib |    63%           N/A |
|-------------------------------+----------------------+----------------------+
|   1  HL-205              N/A  | 0000:B3:00.0     N/A |                 N/A  |
"""


def test_tables_of_hl_smi_are_read_as_far_as_they_go() -> None:
    table = parse_table(OLD_TABLE)
    assert (table.tool, table.driver) == ("hl-1.6.0-fw-36.3.2.0-1-gda631d8", "1.6.0-3c06a7c")
    first, second = table.cards
    assert (first.ecc_errors, first.celsius, first.used_mib, first.total_mib) == (2, 35, 32454, 32768)
    assert (second.bus_id, second.ecc_errors, second.used_mib) == ("0000:b3:00.0", None, None)
    assert parse_table("no such device\n").cards == ()
    assert parse_modules("0000:19:00.0, 3\nbus_id, module_id\n\n") == {"0000:19:00.0": 3}
    assert parse_ports("port  0:  UP\nport 10: DOWN\nnothing\n") == {0: "up", 10: "down"}


@pytest.mark.parametrize(
    ("text", "version"),
    [("hl-1.22.1-fw-61.4.2.1", (1, 22)), ("2.10.0+hpu_1.24.0", (2, 10)), ("unknown", None)],
)
def test_versions_are_read_from_what_tools_call_them(text: str, version: tuple[int, int] | None) -> None:
    assert minor(text) == version


RANK = """
import json, os, sys
print("banner of the vendor")
print("x" * 200_000, file=sys.stderr)
rank = int(os.environ["RANK"])
assert os.environ["HLS_MODULE_ID"] == str(rank) and os.environ["WORLD_SIZE"] == "8"
{last}
"""


@pytest.mark.parametrize(
    ("last", "status", "text"),
    [
        ("print(json.dumps({'seconds': 0.001}))", OK, "469.8 GB/s each, 89% of what the links carry"),
        ("print(json.dumps({'seconds': 0.1}))", WARNING, "of 525 that the links carry"),
        ("sys.exit('Device acquire failed' if rank == 2 else 0)", PROBLEM, "module 2: Device acquire failed"),
        ("print('done')", PROBLEM, "without a result"),
        ("import time; time.sleep(60)", PROBLEM, "not done in 1 s"),
    ],
)
def test_the_bandwidth_of_all_cards(tmp_path: Path, last: str, status: Status, text: str) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK.format(last=last))
    seconds = 1.0 if "sleep" in last else 60.0
    options = BandwidthOptions(256, seconds, (sys.executable, "-S", str(script)))
    result = check_bandwidth(survey(FakeHost(tmp_path / "host").host()), options, bridge=True)
    assert result.status is status
    assert text in result.found


def test_the_bandwidth_is_not_measured_where_it_cannot_be(tmp_path: Path) -> None:
    def why(fake: FakeHost, *, bridge: bool = True) -> str:
        options = BandwidthOptions(command=("/nonexistent",))
        result = check_bandwidth(survey(fake.host()), options, bridge=bridge)
        assert result.status is NOT_APPLICABLE
        return result.found

    assert "two cards" in why(FakeHost(tmp_path / "a", cards=1))
    assert "habana_frameworks" in why(FakeHost(tmp_path / "b"), bridge=False)
    assert "hold cards" in why(FakeHost(tmp_path / "c", processes=[(0, 7, "x")]))
    assert "module ids" in why(FakeHost(tmp_path / "d", no_smi=True))


def test_commands_that_are_missing_fail_or_hang_give_no_answer() -> None:
    run = command_runner(0.2)
    assert run(("/nonexistent/hl-smi",)) is None
    assert run(("sh", "-c", "echo half; exit 3")) is None
    assert run(("sleep", "60")) is None
    assert run(("echo", "yes")) == "yes\n"


def test_the_command_prints_json_and_exits_with_1_for_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeHost(tmp_path)
    flags = ["doctor", "--root", str(tmp_path), "--bandwidth-test", "false"]
    # The real machine has no hl-smi to see these cards with.
    assert main([*flags, "--json"]) == 1
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    by_name = {check["check"]: check for check in document["checks"]}
    assert by_name["hl-smi"]["status"] == "problem"
    assert by_name["cards"]["found"] == "8 Gaudi cards on the PCI bus"
    assert document["summary"]["problem"] >= 1
    assert main(flags) == 1
    text = capsys.readouterr().out
    assert "PROBLEM  hl-smi" in text
    assert "-> install habanalabs-firmware-tools" in text
    assert fake.asked == []


def test_this_machine_gets_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--root", "/nonexistent"]) == 2
    assert "--root" in capsys.readouterr().err
    assert main(["doctor", "--json", "--bandwidth-test", "false"]) in (0, 1)
    assert json.loads(capsys.readouterr().out)["checks"]


def test_checks_that_do_not_apply_are_shown_on_request() -> None:
    found = {"cards": not_applicable("none"), "memory": ok("24 GiB"), "driver": not_applicable("no card")}
    results = [replace(result, check=name) for name, result in found.items()]
    texts = []
    for hidden in (True, False):
        shown = StringIO()
        show(results, Console(file=shown, width=200), hidden=hidden)
        texts.append(shown.getvalue())
    assert [len(text.splitlines()) for text in texts] == [3, 4]
    assert "cards" in texts[0]
    assert "driver" not in texts[0]
    assert "1 check not shown" in texts[0]
    assert "--all" in texts[0]
