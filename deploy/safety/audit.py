"""Compares the locked requirements with the published vulnerabilities: `make audit`.

pip-audit asks PyPI's service, and OSV's where that knows none of the packages. What it finds is printed,
beside the reason where deploy/safety/explained.toml has one. The exit status is always 0: a finding is
news about others' code and must not stop a change to ours. Where no service can be reached, that is said, and
nothing was audited.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
EXPLAINED = Path(__file__).with_name("explained.toml")
LOCKS = ("all", "xgrammar", "models")
SERVICES = ("pypi", "osv")
_TIMEOUT_S = 240


def read_explained(path: Path) -> dict[str, str]:
    """Return the reasons by id. Raises ValueError for an entry that lacks something."""
    reasons: dict[str, str] = {}
    for entry in tomllib.loads(path.read_text(encoding="utf-8")).get("explained", []):
        if not all(entry.get(key) for key in ("id", "package", "reason")):
            raise ValueError(f"{path.name}: an entry needs id, package and reason: {entry}")
        reasons[entry["id"]] = entry["reason"]
    return reasons


def report(document: Mapping[str, Any], reasons: Mapping[str, str]) -> list[str] | None:
    """Return the lines that say what pip-audit's JSON holds; None where it audited nothing at all."""
    packages = document["dependencies"]
    unknown = [one["name"] for one in packages if "skip_reason" in one]
    audited = len(packages) - len(unknown)
    if not audited:
        return None
    lines, explained = [], set()
    for package in packages:
        for finding in package.get("vulns", ()):
            ids = [finding["id"], *finding.get("aliases", ())]
            known = next((one for one in ids if one in reasons), None)
            explained.add(known)
            fixed = ", ".join(finding.get("fix_versions", ())) or "no version yet"
            reason = f"explained: {reasons[known]}" if known else "NOT EXPLAINED"
            lines.append(
                f"{package['name']} {package['version']}: {', '.join(ids)}; mended in {fixed}; {reason}"
            )
    found = len(lines)
    lines += [f"explained.toml: {one} is found no more: remove it" for one in reasons if one not in explained]
    if unknown:
        lines.append(f"not audited, since the service does not know them: {', '.join(sorted(unknown))}")
    return [f"{audited} packages audited, {found} findings", *lines]


def run_pip_audit(service: str, files: Sequence[Path]) -> dict[str, Any] | None:
    """Return the JSON of pip-audit, None where it got none from the service."""
    command = [sys.executable, "-m", "pip_audit", "--vulnerability-service", service, "--format", "json"]
    command += ["--no-deps", "--disable-pip", "--progress-spinner", "off", "--timeout", "10"]
    for file in files:
        command += ["--requirement", str(file)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
        return dict(json.loads(result.stdout))
    except (subprocess.TimeoutExpired, json.JSONDecodeError):
        return None


def main() -> int:
    """Audit, and say what came of it."""
    reasons = read_explained(EXPLAINED)
    with tempfile.TemporaryDirectory() as directory:
        # torch is in no lock file, since its build depends on the device.
        torch = Path(directory, "torch.txt")
        torch.write_text(f"torch=={metadata.version('torch').split('+')[0]}\n", encoding="utf-8")
        files = [*(ROOT / "requirements" / f"{name}.lock" for name in LOCKS), torch]
        for service in SERVICES:
            document = run_pip_audit(service, files)
            lines = report(document, reasons) if document is not None else None
            if lines is not None:
                print(f"make audit: by {service}: " + "\n  ".join(lines))
                return 0
    print("make audit: no vulnerability service is reachable: nothing was audited")
    return 0


if __name__ == "__main__":
    sys.exit(main())
