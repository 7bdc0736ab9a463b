"""Whether a model can go beyond the context that it was trained for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_ROTARY: Final = ("rope_theta", "rope_parameters", "rotary_emb_base", "rotary_dim")
_CHANGING: Final = ("dynamic", "longrope", "su")


def why_not_longer(config: Mapping[str, Any]) -> str:
    """Why positions beyond the config's last one cannot be computed; "" if they can.

    Rotary embeddings of a fixed frequency have any position. Those whose frequencies follow the length would
    make a row depend on its neighbours and on KV that was cached under others; learned positions end.
    """
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    if not any(text.get(name) is not None for name in _ROTARY):
        return "its config names no rotary positions, which alone go on for ever"
    for name in ("rope_parameters", "rope_scaling"):
        settings = text.get(name)
        if not isinstance(settings, dict):
            continue
        for kind in (settings, *(value for value in settings.values() if isinstance(value, dict))):
            found = kind.get("rope_type", kind.get("type"))
            if found in _CHANGING:
                return f"its rotary positions are {found}: they change with the length"
    return ""
