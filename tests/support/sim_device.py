"""A simulated HPU for a test: its environment, its card, and an engine core on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from services.engine.device import Device, ExecutionMode, HpuSettings, open_device, sim

LAZY = (ExecutionMode.LAZY, ExecutionMode.GRAPH)
EAGER = (ExecutionMode.LAZY, ExecutionMode.EAGER)


class Host:
    """A host with simulated cards. What it changes of the environment the test's end takes back."""

    def __init__(self, patch: pytest.MonkeyPatch, directory: Path) -> None:
        self._patch = patch
        self._directory = directory
        for name in ("HLS_MODULE_ID", "HABANA_VISIBLE_MODULES", "PT_HPU_RECIPE_CACHE_CONFIG"):
            # Set first, so that the end takes back what an engine sets.
            patch.setenv(name, "")
            patch.delenv(name)

    def prepare(self, mode: ExecutionMode, **settings: Any) -> None:
        """Makes the next card one with these settings, for a process of this mode."""
        values = {"lock_directory": self._directory, **settings}
        text = ",".join(f"{name}={value}" for name, value in values.items())
        self._patch.setenv("CATENARY_SIM", text)
        self._patch.setenv("PT_HPU_LAZY_MODE", "1" if mode in LAZY else "0")
        torch._dynamo.reset()

    def open(
        self, mode: ExecutionMode = ExecutionMode.EAGER, hpu: HpuSettings | None = None, **settings: Any
    ) -> Device:
        """The device, on a new card with these settings."""
        self.prepare(mode, **settings)
        return open_device("sim", mode=mode, hpu=hpu)

    def other_process(self, **settings: Any) -> sim.Card:
        """A card object as another process of this host would have it."""
        return sim.Card(sim.SimSettings(lock_directory=self._directory, **settings), {})
