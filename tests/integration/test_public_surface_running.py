"""OpenAPI, metrics, tables and exit codes of a running stack are as tests/data/surface has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import surface


async def test_running_surfaces_are_as_stored(run_dir: Path) -> None:
    found = await surface.running(run_dir)
    assert set(found) == {"openapi", "metrics", "state", "services"}
    found["metrics"] = surface.seen_alike(surface.stored("metrics"), found["metrics"])
    differences = [surface.difference(name, value) for name, value in found.items()]
    if any(differences):
        pytest.fail("\n\n".join(filter(None, differences)), pytrace=False)
