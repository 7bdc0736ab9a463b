"""Our own decoder for the standard families, driven by the checkpoint's config."""

from __future__ import annotations

from services.engine.model.decoder.config import spec_from_config
from services.engine.model.decoder.decoder import Decoder, DecoderModel, NativeDecoderModel
from services.engine.model.decoder.load_decoder import CLASSES, load_decoder
from services.engine.model.decoder.spec import (
    DecoderSpec,
    ExpertSpec,
    LayerPlan,
    RopeSpec,
    Shard,
    UnsupportedByDecoder,
)

__all__ = [
    "CLASSES",
    "Decoder",
    "DecoderModel",
    "DecoderSpec",
    "ExpertSpec",
    "LayerPlan",
    "NativeDecoderModel",
    "RopeSpec",
    "Shard",
    "UnsupportedByDecoder",
    "load_decoder",
    "spec_from_config",
]
