"""An engine's options as they follow from vLLM's variables alone."""

from __future__ import annotations

import os

import pytest

from services.engine.config import EngineConfig
from services.engine.vllm_variables import load_moved

PREFIXES = ("VLLM_", "PT_HPU_", "CATENARY_ENGINE_", "QUANT_")


class Moved:
    """Loads EngineConfig as `python -m services.engine` does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys
        self.warnings: tuple[str, ...] = ()

    def load(self, *flags: str, **environment: str) -> EngineConfig:
        """The options of an engine with these flags in this environment."""
        for name in os.environ:
            if name.startswith(PREFIXES):
                self._monkeypatch.delenv(name)
        for name, value in environment.items():
            self._monkeypatch.setenv(name, value)
        config, self.warnings = load_moved(EngineConfig, flags, prog="engine")
        return config

    def refusal(self, *flags: str, **environment: str) -> str:
        """The one line with which the engine refuses to start."""
        with pytest.raises(SystemExit) as ended:
            self.load(*flags, **environment)
        assert ended.value.code == 2
        error = self._capsys.readouterr().err
        assert error.startswith("engine: ")
        assert error.count("\n") == 1
        return error.removeprefix("engine: ").rstrip("\n")


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Moved:
    """Loads options from vLLM's variables."""
    return Moved(monkeypatch, capsys)
