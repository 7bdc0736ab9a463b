"""Loads a checkpoint of a family that our decoder knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

from services.engine.device import Device, DeviceError
from services.engine.model.checks import check_directory
from services.engine.model.decoder.config import spec_from_config
from services.engine.model.decoder.decoder import Decoder
from services.engine.model.decoder.families import FAMILIES
from services.engine.model.decoder.names import EMBEDDING, HEAD, rules_for
from services.engine.model.decoder.native import native_spec
from services.engine.model.decoder.native_model import NativeDecoderModel
from services.engine.model.decoder.paged_model import DecoderModel
from services.engine.model.decoder.spec import DecoderSpec
from services.engine.model.errors import ModelError
from services.engine.model.fit import check_weights_fit
from services.engine.model.hf_config import checkpoint_dtype, first_line, load_config, own_architecture
from services.engine.model.loading import Checkpoint, WeightLoader
from services.engine.model.tasks import has_class_head


def load_decoder(
    directory: Path, device: Device, *, dtype: str, max_model_len: int | None, scores: bool = True
) -> DecoderModel:
    """Loads the model of a Hugging Face directory in `dtype` (auto, float32, bfloat16, float16).

    `max_model_len` None means the model's own. scores: whether `logits` will be asked; only without them can
    the checkpoint be one with a head for classes. Raises UnsupportedByDecoder for what the decoder does not
    compute, before a weight is read, ModelError for what cannot be served at all, and InsufficientMemory if
    what torch would have to keep does not fit.
    """
    raw = check_directory(directory)
    if not scores and has_class_head(raw):
        # Below its head it is the model that generates.
        raw = raw | {"architectures": [own_architecture(raw["model_type"])]}
    config = _config(directory, raw, max_model_len)
    spec = replace(_spec(directory, config, raw), scores=scores)
    stored = checkpoint_dtype(config.dtype)
    with Checkpoint(directory) as checkpoint:
        spec = _really_tied(spec, checkpoint)
        try:
            chosen, own = device.native_dtype(dtype, stored), device.choose_dtype(dtype, stored)
            decoder, weights = _empty(spec, checkpoint, device, chosen)
            # It takes them layer by layer and keeps none: the model is never there as a whole twice.
            native = device.native_decoder(native_spec(decoder, chosen, weights.load))
        except DeviceError as error:
            raise ModelError(str(error)) from None
        if native is None and own is not chosen:
            check_weights_fit(directory, raw, dtype, device, native=False)
            chosen = own
            decoder, weights = _empty(spec, checkpoint, device, chosen)
        weights.load()
    decoder = decoder.to(device.torch_device).eval()
    if native is not None:
        return NativeDecoderModel(decoder, device, chosen, native)
    return DecoderModel(decoder, device, chosen)


def _empty(
    spec: DecoderSpec, checkpoint: Checkpoint, device: Device, dtype: torch.dtype
) -> tuple[Decoder, WeightLoader]:
    """A decoder without values, and what fills it."""
    try:
        decoder = Decoder(spec, device, dtype)
    except RuntimeError as error:
        raise ModelError(f"model {checkpoint.directory} cannot be loaded: {first_line(error)}") from None
    return decoder, WeightLoader(checkpoint, rules_for(spec), decoder.slots(), placed=device.flush)


def _config(directory: Path, raw: dict[str, Any], max_model_len: int | None) -> PreTrainedConfig:
    model_type = raw["model_type"]
    own = own_architecture(model_type)
    if model_type in FAMILIES and raw.get("architectures") == [own] and not raw.get("is_encoder_decoder"):
        return load_config(directory, CONFIG_MAPPING[model_type], str(own), max_model_len)
    # Only then: who asks transformers for a class of a model waits two seconds for what that imports.
    from services.engine.model.transformers_backend import load_model_config, model_class  # noqa: PLC0415

    return load_model_config(directory, raw, model_class(directory, raw), max_model_len)


def _spec(directory: Path, config: PreTrainedConfig, raw: Mapping[str, Any]) -> DecoderSpec:
    try:
        return spec_from_config(config, raw)
    except ModelError:
        raise
    except Exception as error:
        # Values that no model can have, such as a list where a number is meant.
        raise ModelError(f"{directory / 'config.json'} is not accepted: {first_line(error)}") from None


def _really_tied(spec: DecoderSpec, checkpoint: Checkpoint) -> DecoderSpec:
    """As transformers: a checkpoint with a head of its own, unlike the embedding, is not tied."""
    if not spec.tied or not {HEAD, EMBEDDING} <= set(checkpoint.names):
        return spec
    return replace(spec, tied=torch.equal(checkpoint.read(HEAD), checkpoint.read(EMBEDDING)))
