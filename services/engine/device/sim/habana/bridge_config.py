"""`habana_frameworks.torch.internal.bridge_config`: temporary settings (gaudi-facts.md 2.2)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from services.engine.device.sim.card import card

_COMPILE_ONLY = "PT_COMPILE_ONLY_MODE"


@contextmanager
def env_setting(name: str, value: bool) -> Iterator[None]:
    """Inside, a setting has this value. Raises KeyError for one that the software does not know."""
    if name != _COMPILE_ONLY:
        raise KeyError(name)
    with card().compile_only() if value else nullcontext():
        yield
