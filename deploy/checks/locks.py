"""Check without a network that the lock files still fit pyproject.toml.

Every requirement of an extra must be pinned by each lock file that claims the extra, inside its range and
with hashes, and a service's pins must be those of all.lock. Resolving anew is `make lock`.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^]]*\])?==([^\s;\\]+)")
# Which extras each lock file holds; the base dependencies are in all of them.
LOCKS = {
    "all": ("gateway", "router", "tokenizer", "engine", "cli", "bench", "dev"),
    "gateway": ("gateway",),
    "router": ("router",),
    "tokenizer": ("tokenizer",),
    "engine": ("engine",),
}


def read_pins(path: Path) -> tuple[dict[str, set[Version]], list[str]]:
    """Return the pinned versions by package, and what is wrong with the file itself."""
    pins: dict[str, set[Version]] = {}
    problems: list[str] = []
    blocks = re.split(r"\n(?=\S)", path.read_text(encoding="utf-8").strip())
    for block in blocks:
        if block.startswith("#"):
            continue
        match = PIN.match(block)
        if match is None:
            problems.append(f"{path.name}: not a pinned requirement: {block.splitlines()[0]}")
            continue
        if "--hash=sha256:" not in block:
            problems.append(f"{path.name}: {match[1]} has no hash")
        pins.setdefault(canonicalize_name(match[1]), set()).add(Version(match[2]))
    return pins, problems


def check_lock(name: str, extras: tuple[str, ...], project: dict[str, object]) -> list[str]:
    """Return what is wrong with requirements/NAME.lock, one line each."""
    pins, problems = read_pins(ROOT / "requirements" / f"{name}.lock")
    reference, _ = read_pins(ROOT / "requirements" / "all.lock")
    optional = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(line for extra in extras for line in optional[extra])]  # type: ignore[misc,index]
    for line in wanted:
        requirement = Requirement(line)
        versions = pins.get(canonicalize_name(requirement.name))
        if versions is None:
            problems.append(f"{name}.lock: {requirement} is not locked")
        elif not any(requirement.specifier.contains(version, prereleases=True) for version in versions):
            problems.append(f"{name}.lock: {requirement} is locked at {', '.join(map(str, versions))}")
    for package, versions in pins.items():
        if not versions <= reference.get(package, set()):
            problems.append(f"{name}.lock: {package} differs from all.lock")
    if "torch" in pins:
        problems.append(f"{name}.lock: torch must not be locked: its build depends on the device")
    return problems


def main() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    problems = [line for name, extras in LOCKS.items() for line in check_lock(name, extras, project)]
    pins, more = read_pins(ROOT / "requirements" / "xgrammar.lock")
    for line in project["optional-dependencies"]["xgrammar"]:
        requirement = Requirement(line)
        if not any(requirement.specifier.contains(one) for one in pins.get(requirement.name, ())):
            more.append(f"xgrammar.lock: {requirement} is not locked")
    return problems + more


if __name__ == "__main__":
    sys.exit("\n".join(main()) or 0)
