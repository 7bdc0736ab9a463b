"""A simulated HPU for a test: its environment, its card, and an engine core on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from services.engine.device import Device, ExecutionMode, sim
from services.engine.device.base import Forward
from services.engine.device.hpu import HpuSettings

LAZY = (ExecutionMode.LAZY, ExecutionMode.GRAPH)
EAGER = (ExecutionMode.LAZY, ExecutionMode.EAGER)
_COSTLY = ("waits", "blocking_uploads", "open_uploads", "fallbacks")


@dataclass(slots=True)
class Misdeeds:
    """What forwards do that a card makes pay for, and the card's counters of a time."""

    device: Device
    found: list[str] = field(default_factory=list)
    _before: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._before = self._counters()

    def counted(self) -> dict[str, int]:
        """What the card counted since this was made."""
        return {name: count - self._before[name] for name, count in self._counters().items()}

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        """Looks at each forward from now on: at its recipe in lazy mode, and at its arguments."""
        patch.setattr(
            self.device.execution, "run_eagerly", partial(self._run, self.device.execution.run_eagerly)
        )

    def _counters(self) -> dict[str, int]:
        counters = sim.card().counters
        return {name: getattr(counters, name) for name in _COSTLY}

    def _run(self, run: Forward, forward: Forward, tensors: Sequence[torch.Tensor]) -> Any:
        def looked_at(*given: Any) -> Any:
            if sim.card().collected:
                self.found.append("a forward began in an open recipe")
            before = [tensor.raw.clone() for tensor in given]
            result = forward(*given)
            if not all(torch.equal(tensor.raw, old) for tensor, old in zip(given, before, strict=True)):
                self.found.append("a forward changed its arguments")
            return result

        result = run(looked_at, tensors)
        if sim.card().collected:
            self.found.append("a forward left its recipe open")
        return result


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
        return sim.open_sim(mode, hpu)

    def other_process(self, **settings: Any) -> sim.Card:
        """A card object as another process of this host would have it."""
        return sim.Card(sim.SimSettings(lock_directory=self._directory, **settings), {})
