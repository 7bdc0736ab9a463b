"""In which dtype a checkpoint runs. Source: docs/gaudi-facts.md 4.3: float16 and float32 become bfloat16."""

from __future__ import annotations

import torch

from catenary.telemetry import get_logger
from services.engine.device.base import DTYPES, DeviceError

log = get_logger(__name__)


class DtypeChoice:
    """Chooses, and logs once for each change."""

    def __init__(self) -> None:
        self._said = False

    def choose(self, requested: str, checkpoint: torch.dtype | None) -> torch.dtype:
        """bfloat16 but for an explicit float32. Raises DeviceError for an unknown dtype."""
        if requested != "auto" and requested not in DTYPES:
            raise DeviceError(f"dtype {requested!r} is unknown; choose auto, {', '.join(DTYPES)}")
        if requested == "float32":
            self._say("float32 was asked for: an HPU is several times as fast in bfloat16")
            return torch.float32
        if requested == "float16":
            self._say("an HPU computes in bfloat16 what was asked for in float16")
        elif requested == "auto" and checkpoint not in (None, torch.bfloat16):
            name = str(checkpoint).removeprefix("torch.")
            self._say(f"a checkpoint in {name} runs in bfloat16 on an HPU: dtype float32 keeps its precision")
        return torch.bfloat16

    def _say(self, text: str) -> None:
        if not self._said:
            self._said = True
            log.warning(text)
