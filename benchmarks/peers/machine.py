"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import psutil


def machine() -> dict[str, Any]:
    """The machine's name, processor, cores, memory and load, and the commit of this working tree."""
    return {
        "host": platform.node(),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "load_before": [round(load, 2) for load in os.getloadavg()],
        "commit": _commit(),
    }


def same_kind(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Whether figures of two machines may be compared: the processor and the number of cores are alike."""
    return all(first.get(key) == second.get(key) for key in ("cpu", "cores"))


def cpu_model() -> str:
    """Name of the processor, with family, model and stepping, since virtual machines call many alike."""
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    numbers = "/".join(fields.get(name, "?") for name in ("cpu family", "model", "stepping"))
    return f"{fields.get('model name', platform.machine())} ({numbers})"


def _commit() -> str:
    root = Path(__file__).resolve().parents[2]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
