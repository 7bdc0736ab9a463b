"""`habana_frameworks.torch.hpex.kernels` (gaudi-facts.md 4.5)."""

from __future__ import annotations

from typing import Any, Final

from services.engine.device.sim.card import card
from services.engine.device.sim.hpex import attention, rotary

RotaryPosEmbeddingMode = rotary.RotaryPosEmbeddingMode
_OPS: Final = {"FusedSDPA": "sdpa_recomp_fwd", "apply_rotary_pos_emb": "rotary_pos_embedding"}


def __getattr__(name: str) -> Any:
    settings = card().settings
    if name not in _OPS or _OPS[name] in settings.missing or name in settings.missing:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "apply_rotary_pos_emb":
        return rotary.apply_rotary_pos_emb
    return attention.FusedSDPA if settings.version_tuple < (1, 23) else attention.FusedSDPAWithWindow
