"""Choose what runs a checkpoint: our decoder, or transformers' own module with our attention."""

from __future__ import annotations

from pathlib import Path

from catenary.telemetry import get_logger
from services.engine.device import Device
from services.engine.model.checks import ModelError
from services.engine.model.decoder import UnsupportedByDecoder, load_decoder
from services.engine.model.paged import PagedModel

log = get_logger(__name__)


def open_model(
    directory: Path,
    device: Device,
    *,
    dtype: str = "auto",
    max_model_len: int | None = None,
    backend: str = "auto",
    scores: bool = True,
) -> PagedModel:
    """Load a checked model directory onto the device.

    dtype: auto, float32, bfloat16 or float16. max_model_len None: the model's own. backend: `decoder` and
    `transformers` insist; `auto` is the decoder where it knows all that the config asks for. scores: whether
    `logits` will be asked; else our decoder has no head (the modules of transformers have theirs all the
    same). Raises ModelError with one readable line, or InsufficientMemory.
    """
    if backend != "transformers":
        try:
            return load_decoder(directory, device, dtype=dtype, max_model_len=max_model_len, scores=scores)
        except UnsupportedByDecoder as unsupported:
            if backend == "decoder":
                raise
            log.info("transformers runs this model: our decoder does not know", what=unsupported.what)
    if needed := device.kernels.needs_native:
        raise ModelError(f"{needed} is for models that our decoder runs, and transformers runs this one")
    # Only then: it imports all of transformers that runs models.
    from services.engine.model.transformers_backend import load_model  # noqa: PLC0415

    return load_model(directory, device, dtype=dtype, max_model_len=max_model_len)
