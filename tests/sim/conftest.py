"""The simulated HPU. Its tests run in a process of their own: torch knows the device for good afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.engine.device import sim

NewCard = Callable[..., sim.Card]


@pytest.fixture
def new_card(tmp_path: Path) -> Iterator[NewCard]:
    """Makes a card, as a new process would find it: settings by name, `lazy`, `wide_integers`."""
    # Tests import the fake package before they make their card.
    sim.install()

    def make(*, lazy: bool = False, wide_integers: bool | None = None, **settings: Any) -> sim.Card:
        environment = {"PT_HPU_LAZY_MODE": "1" if lazy else "0"}
        if wide_integers is not None:
            environment["PT_ENABLE_INT64_SUPPORT"] = "1" if wide_integers else "0"
        return sim.reset(sim.SimSettings(lock_directory=tmp_path, **settings), environment)

    yield make
    sim.card().release()
