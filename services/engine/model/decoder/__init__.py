"""Our own decoder for the standard families, driven by the checkpoint's config."""

from __future__ import annotations

from services.engine.model.decoder.config import spec_from_config
from services.engine.model.decoder.decoder import Decoder
from services.engine.model.decoder.errors import UnsupportedByDecoder
from services.engine.model.decoder.names import CLASSES
from services.engine.model.decoder.native_model import NativeDecoderModel
from services.engine.model.decoder.opening import load_decoder
from services.engine.model.decoder.paged_model import DecoderModel
from services.engine.model.decoder.shard import Shard
from services.engine.model.decoder.spec import DecoderSpec, ExpertSpec, LayerPlan, RopeSpec

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
