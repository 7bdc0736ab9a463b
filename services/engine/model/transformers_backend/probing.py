"""A dummy forward at start: it learns a model's layers and refuses what would be served wrongly."""

from __future__ import annotations

from typing import Any

import torch

from services.engine.device import Device
from services.engine.model.errors import ModelError
from services.engine.model.transformers_backend.attention import Probe, UnsupportedAttention
from services.engine.model.transformers_backend.static_shapes import DynamicShape, refuse_dynamic_shapes

_TOKENS = 4


def unsupported(model: Any, reason: str) -> ModelError:
    """The error for an architecture that cannot be served."""
    return ModelError(f"architecture {type(model).__name__} is not supported: {reason}")


def probe_tokens(device: Device) -> tuple[torch.Tensor, torch.Tensor]:
    """A few tokens and their positions, on the device."""
    tokens = torch.zeros(_TOKENS, dtype=torch.int64, device=device.torch_device)
    return tokens, torch.arange(_TOKENS, device=device.torch_device)


@torch.inference_mode()
def probe_model(model: Any, device: Device) -> tuple[Probe, torch.Tensor]:
    """Runs the whole model on `probe_tokens`. Returns what its layers are, and its logits.

    Raises ModelError for attention that is not implemented, is not paged or hides its window, and for shapes
    that depend on data.
    """
    probe = Probe(device)
    tokens, positions = probe_tokens(device)
    try:
        with refuse_dynamic_shapes():
            output = model(
                input_ids=tokens.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                paged=probe,
            )
    except UnsupportedAttention as error:
        raise unsupported(model, f"it needs {error}") from None
    except DynamicShape as error:
        raise unsupported(model, f"the shapes of its tensors depend on data ({error})") from None
    logits: torch.Tensor = output.logits[0]
    config = model.config.get_text_config()
    found, count = len(probe.layers), config.num_hidden_layers
    if found != count or logits.shape[0] != _TOKENS:
        raise unsupported(model, f"{found} of its {count} layers have attention that can be paged")
    hidden = _hidden_window(probe, config)
    if hidden is not None:
        raise unsupported(model, f"layer {hidden} hides its sliding window")
    return probe, logits


def _hidden_window(probe: Probe, config: Any) -> int | None:
    """A layer whose window the config names and the attention is not told: it is put into a mask there."""
    windows = [probe.layers[index].window for index in sorted(probe.layers)]
    types = getattr(config, "layer_types", None)
    if types is None:
        # A class that does not know the key leaves it as it is, unused.
        known = hasattr(type(config), "sliding_window")
        used = known and config.sliding_window and getattr(config, "use_sliding_window", True)
        return 0 if used and not any(windows) else None
    pairs = zip(types, windows, strict=True)
    return next(
        (
            index
            for index, (kind, window) in enumerate(pairs)
            if kind == "sliding_attention" and window is None
        ),
        None,
    )
