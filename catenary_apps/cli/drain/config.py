"""The options of `catenary drain`."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from catenary.config import settings
from catenary_apps.cli.router_options import RouterOptions


class DrainConfig(RouterOptions):
    """Which engine is to end, and how long it may take."""

    model_config = settings(prefix="CATENARY_DRAIN_")

    positional: ClassVar[str] = "engine"

    engine: str = Field(
        min_length=1,
        max_length=256,
        description="Engine: its name (all engines of that name) or its instance id, as catenary fleet shows "
        "them. It may stand without --engine.",
    )
    deadline: float | None = Field(
        None,
        ge=0,
        le=86_400,
        description="Seconds that running sequences get to end; what is left then goes on with another "
        "engine. Absent: the engine's own drain-s.",
    )
