"""Engines that are kept for one sequence each: nothing new comes to them until it has what it needs."""

from __future__ import annotations

from collections.abc import Callable

from services.router.fleet import Engine


class KeptEngines:
    """Keeps them from everybody else: here by `Engine.kept_for`, and from other routers by the engines, which
    `tell` tells that they are wanted empty, or no longer. Else they would never empty."""

    def __init__(self, tell: Callable[[Engine, bool], None]) -> None:
        self._tell = tell

    def keep(self, engine: Engine, owner: object) -> None:
        """From here on it is given nothing but `owner`."""
        engine.kept_for = owner
        self._tell(engine, True)

    def give_back(self, engine: Engine) -> None:
        """Everybody may have it again."""
        engine.kept_for = None
        self._tell(engine, False)
