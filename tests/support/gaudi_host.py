"""Fake hosts for `catenary doctor`: trees of /sys and /proc, and answers in place of hl-smi."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from catenary_apps.doctor.host import Host

GOOD_PACKAGES = {"habana-torch-plugin": "1.23.0.695", "torch": "2.9.0+hpu_1.23.0-695.git4b2a5bf"}
INTERNAL = tuple(range(21))
EXTERNAL = (21, 22, 23)


@dataclass
class FakeHost:
    """A host with `cards` Gaudi3 cards, set up as it should be; tests spoil what they like."""

    root: Path
    cards: int = 8
    driver: str = "1.23.0-6d1cb33"
    packages: Mapping[str, str] = field(default_factory=lambda: dict(GOOD_PACKAGES))
    python: tuple[int, int] = (3, 12)
    environment: dict[str, str] = field(default_factory=dict)
    locked_memory: int | None = None
    open_files: int | None = 1_048_576
    processes: Sequence[tuple[int, int, str]] = ()
    ports_down: Mapping[int, Sequence[int]] = field(default_factory=dict)
    no_smi: bool = False
    asked: list[Sequence[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.common()
        for index in range(self.cards):
            self.card(index)
        if self.cards:
            self.write("/sys/module/habanalabs/version", self.driver)
            for module in ("cn", "en", "ib"):
                self.write(f"/sys/module/habanalabs_{module}/version", self.driver)

    def host(self) -> Host:
        """As the checks see it."""
        return Host(
            root=self.root,
            run=self.run,
            package=self.packages.get,
            python=self.python,
            environment=self.environment,
            locked_memory=lambda: self.locked_memory,
            open_files=lambda: self.open_files,
        )

    def write(self, name: str, text: str) -> None:
        """Writes a file of the tree."""
        path = self.root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")

    def remove(self, name: str) -> None:
        """Removes a file or a link of the tree."""
        (self.root / name.lstrip("/")).unlink()

    def common(self) -> None:
        """Two nodes of two CPUs, well tuned."""
        for cpu in range(4):
            base = f"/sys/devices/system/cpu/cpu{cpu}"
            self.write(f"{base}/cpufreq/scaling_governor", "performance")
            for state, (name, off) in enumerate((("POLL", 0), ("C1", 0), ("C1E", 0), ("C6", 1))):
                self.write(f"{base}/cpuidle/state{state}/name", name)
                self.write(f"{base}/cpuidle/state{state}/disable", str(off))
        for node in (0, 1):
            self.write(f"/sys/devices/system/node/node{node}/cpulist", "0-1")
        self.write("/proc/sys/kernel/numa_balancing", "0")
        self.write("/proc/sys/kernel/osrelease", "6.8.0-45-generic")
        self.write("/proc/cmdline", "BOOT_IMAGE=/vmlinuz root=/dev/sda1 ro quiet iommu=pt")
        self.write("/sys/class/iommu/dmar0/name", "dmar0")
        self.meminfo(hugepages=48_640)
        self.write("/sys/fs/cgroup/memory.max", "max")
        self.write("/usr/bin/dockerd", "")
        self.write("/usr/bin/habana-container-runtime", "")
        runtimes = '{"habana": {"path": "/usr/bin/habana-container-runtime", "runtimeArgs": []}}'
        self.write("/etc/docker/daemon.json", '{"runtimes": ' + runtimes + "}")
        self.write("/opt/habanalabs/libfabric-1.22.0/lib/libfabric.so.1", "")

    def meminfo(self, *, hugepages: int, total_gib: int = 1024) -> None:
        """Writes /proc/meminfo."""
        self.write(
            "/proc/meminfo",
            f"MemTotal:       {total_gib * 2**20} kB\nMemAvailable:   {total_gib * 2**19} kB\n"
            f"HugePages_Total:   {hugepages}\nHugePages_Free:    {hugepages}\nHugepagesize:       2048 kB",
        )

    def bus_id(self, index: int) -> str:
        """The PCI address of a card."""
        return f"0000:{0x19 + 0x10 * index:02x}:00.0"

    def card(self, index: int) -> None:
        """A card with its driver."""
        bus = self.bus_id(index)
        device = f"/sys/bus/pci/devices/{bus}"
        self.write(f"{device}/vendor", "0x1da3")
        self.write(f"{device}/class", "0x120000")
        self.write(f"{device}/numa_node", str(index * 2 // max(1, self.cards)))
        self.write(f"{device}/pci_addr", bus)
        self.write(f"{device}/status", "Operational")
        accel = self.root / f"sys/class/accel/accel{index}"
        accel.mkdir(parents=True)
        (accel / "device").symlink_to(self.root / device.lstrip("/"))

    def run(self, command: Sequence[str]) -> str | None:
        """Answers as hl-smi does."""
        self.asked.append(tuple(command))
        if command[0] != "hl-smi" or self.no_smi:
            return None
        match list(command[1:]):
            case []:
                return self.table()
            case ["-Q", "bus_id,module_id", "-f", "csv,noheader"]:
                return "".join(f"{self.bus_id(i)}, {self.cards - 1 - i}\n" for i in range(self.cards))
            case ["-n", "link", "-i", bus]:
                down = next((self.ports_down[i] for i in self.ports_down if self.bus_id(i) == bus), ())
                ports = (*INTERNAL, *EXTERNAL)
                return "".join(f"port {port:2}:\t{'DOWN' if port in down else 'UP'}\n" for port in ports)
            case ["-n", "ports", "-i", _]:
                kinds = dict.fromkeys(INTERNAL, "internal") | dict.fromkeys(EXTERNAL, "external")
                return "".join(f"port {port}:\t{kind}\n" for port, kind in kinds.items())
        return None

    def table(self) -> str:
        """The table of hl-smi, as releases 1.20 and later print it."""
        lines = [
            "+-----------------------------------------------------------------------------+",
            "| HL-SMI Version:                              hl-1.23.0-fw-62.0.1.0           |",
            f"| Driver Version:                                     {self.driver:<24}|",
            f"| Nic Driver Version:                                 {self.driver:<24}|",
            "|-------------------------------+----------------------+----------------------+",
            "| AIP  Name        Persistence-M| Bus-Id        Disp.A | Volatile Uncor-Events|",
            "| Fan  Temp  Perf  Pwr:Usage/Cap|         Memory-Usage | AIP-Util  Compute M. |",
            "|===============================+======================+======================|",
        ]
        for index in range(self.cards):
            bus = self.bus_id(index)
            lines += [
                f"|   {index}  HL-325L             N/A  | {bus}     N/A |                   0  |",
                "| N/A   31C   N/A  226W /  900W  |   672MiB / 131072MiB |     0%            0% |",
                "|-------------------------------+----------------------+----------------------+",
            ]
        lines += [
            "| Compute Processes:                                               AIP Memory |",
            "|  AIP       PID   Type   Process name                             Usage      |",
            "|=============================================================================|",
        ]
        held = {index: (pid, name) for index, pid, name in self.processes}
        for index in range(self.cards):
            if index in held:
                pid, name = held[index]
                lines.append(f"|   {index}    {pid:>7}     C   {name:<35}   96134MiB  |")
            else:
                lines.append(
                    f"|   {index}        N/A   N/A    N/A                                      N/A        |"
                )
        return "\n".join(lines) + "\n"
