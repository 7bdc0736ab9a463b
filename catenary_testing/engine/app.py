"""The engine's servicer over a scripted core, for tests of everything above the model."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from catenary.config import ConfigError
from catenary.schema import SCHEMA_REVISION
from catenary_testing.engine.core import ScriptedCore
from catenary_testing.engine.faults import Faults
from catenary_testing.engine.script import Script, ScriptError, load_script
from services.engine.app import CoreDouble, EngineApp
from services.engine.config import EngineConfig

_NAME = "scripted"


class ScriptedEngineConfig(EngineConfig):
    """Options of `python -m catenary_testing.engine`: those of an engine, and the script."""

    headings: ClassVar = {**EngineConfig.headings, "script": "Tests"}

    script: str = Field(
        "default",
        description="The script that is replayed: a YAML or JSON file, or the word default.",
    )


class ScriptedEngineApp(EngineApp):
    """An engine that replays a script instead of running a model. `faults` can be set while it runs.

    Made inside the running loop. Raises ConfigError for a script that cannot be read.
    """

    def __init__(self, config: EngineConfig, script: Script | None = None) -> None:
        if script is None:
            script = _load(config.script) if isinstance(config, ScriptedEngineConfig) else Script()
        self.faults = faults = Faults.from_script(script.faults)
        claimed = script.faults.schema_revision
        double = CoreDouble(
            name=_NAME,
            device=_NAME,
            factory=lambda restart: ScriptedCore(
                script, faults, restart=restart, profile_max_events=config.profile_max_events
            ),
            schema_revision=SCHEMA_REVISION if claimed is None else claimed,
        )
        super().__init__(config, double=double)
        faults.drop_streams = lambda: self.frontend.routers.close("the script dropped the stream")


def _load(source: str) -> Script:
    try:
        return load_script(source)
    except ScriptError as exc:
        raise ConfigError(f"--script: {exc}") from None
