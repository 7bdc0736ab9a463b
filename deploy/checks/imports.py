"""Check that the services that must not need torch or transformers import without them.

Each is imported, with all its modules, in a process of its own in which neither torch nor transformers can
be found.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The packages of a process, and those of their subpackages that belong to another process of the service.
PROCESSES = {
    "gateway": ("gateway",),
    "router": ("services.router",),
    "tokenizer": ("services.tokenizer",),
    "engine servicer": ("services.engine.servicer", "services.engine.link", "services.engine.config"),
    "scripted engine": ("catenary_testing.engine", "services.engine.__main__"),
    "pure cores": ("services.engine.kv", "services.engine.scheduler", "services.engine.bucketing"),
    "clients": ("catenary",),
}
PROBE = """
import importlib, importlib.abc, pkgutil, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise ImportError(f"{name} must not be imported here")

sys.meta_path.insert(0, Blocker())
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    for found in pkgutil.walk_packages(getattr(module, "__path__", []), name + "."):
        importlib.import_module(found.name)
"""


def main() -> list[str]:
    problems: list[str] = []
    for process, names in PROCESSES.items():
        done = subprocess.run(
            [sys.executable, "-c", PROBE, *names],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if done.returncode:
            problems.append(f"{process}: {done.stderr.strip().splitlines()[-1]}")
    return problems


if __name__ == "__main__":
    sys.exit("\n".join(main()) or 0)
