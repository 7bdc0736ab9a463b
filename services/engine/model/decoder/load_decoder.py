"""Load a checkpoint of a family that our decoder knows, each tensor under its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

from services.engine.device import Device, DeviceError
from services.engine.model.checks import ModelError, check_directory
from services.engine.model.decoder.config import FAMILIES, spec_from_config
from services.engine.model.decoder.decoder import Decoder, DecoderModel, NativeDecoderModel, native_spec
from services.engine.model.decoder.spec import DecoderSpec
from services.engine.model.facts import has_class_head
from services.engine.model.hf_config import (
    check_weights_fit,
    checkpoint_dtype,
    first_line,
    load_config,
    own_architecture,
)
from services.engine.model.loading import Checkpoint, Rule, WeightLoader

_LAYER = "model.layers.{layer}."
_OURS = "layers.{layer}."


def _weight_and_bias(source: str, target: str, *parts: str) -> list[Rule]:
    return [
        Rule(f"{_LAYER}{source}.{kind}", f"{_OURS}{target}.{kind}", parts or ("whole",))
        for kind in ("weight", "bias")
    ]


def _weight(source: str, target: str) -> Rule:
    return Rule(f"{_LAYER}{source}.weight", f"{_OURS}{target}.weight")


_RULES = (
    Rule("model.embed_tokens.weight", "embedding.weight"),
    Rule("model.norm.weight", "norm.weight"),
    # Old checkpoints of llama carry what the config says anyway.
    Rule(f"{_LAYER}self_attn.rotary_emb.inv_freq", None),
    *_weight_and_bias("self_attn.q_proj", "attention.qkv", "q"),
    *_weight_and_bias("self_attn.k_proj", "attention.qkv", "k"),
    *_weight_and_bias("self_attn.v_proj", "attention.qkv", "v"),
    *_weight_and_bias("self_attn.qkv_proj", "attention.qkv", "q", "k", "v"),
    *_weight_and_bias("self_attn.o_proj", "attention.output"),
    _weight("self_attn.q_norm", "attention.query_norm"),
    _weight("self_attn.k_norm", "attention.key_norm"),
    *_weight_and_bias("mlp.gate_proj", "mlp.gate_up", "gate"),
    *_weight_and_bias("mlp.up_proj", "mlp.gate_up", "up"),
    *_weight_and_bias("mlp.gate_up_proj", "mlp.gate_up", "gate", "up"),
    *_weight_and_bias("mlp.down_proj", "mlp.down"),
    _weight("input_layernorm", "attention_norm"),
)

_NORMS = (_weight("post_attention_layernorm", "mlp_norm"),)
_SANDWICH_NORMS = (
    _weight("post_attention_layernorm", "attention_post_norm"),
    _weight("pre_feedforward_layernorm", "mlp_norm"),
    _weight("post_feedforward_layernorm", "mlp_post_norm"),
)


def _experts(block: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """One tensor for each expert, or all of them stacked."""
    one, gate_up, ours = f"{_LAYER}{block}.experts.{{expert}}.", f"{_OURS}mlp.experts.gate_up", f"{_OURS}mlp."
    return (
        _weight(f"{block}.gate", "mlp.router"),
        Rule(f"{one}{gate}.weight", gate_up, ("gate",)),
        Rule(f"{one}{up}.weight", gate_up, ("up",)),
        Rule(f"{one}{down}.weight", f"{ours}experts.down"),
        Rule(f"{_LAYER}{block}.experts.gate_up_proj", gate_up, ("gate", "up")),
        Rule(f"{_LAYER}{block}.experts.down_proj", f"{ours}experts.down"),
    )


_EXPERTS = (
    *_experts("mlp", "gate_proj", "up_proj", "down_proj"),
    *_experts("block_sparse_moe", "w1", "w3", "w2"),
)

HEAD = "lm_head.weight"
CLASSES = "score.weight"
EMBEDDING = "model.embed_tokens.weight"


def rules_for(spec: DecoderSpec) -> tuple[Rule, ...]:
    """The rules of a checkpoint; a head that is tied to the embedding, or never asked, is not read."""
    return (
        *_RULES,
        *(_SANDWICH_NORMS if spec.sandwich_norms else _NORMS),
        *(_EXPERTS if spec.experts is not None else ()),
        Rule(HEAD, "head.weight" if spec.scores and not spec.tied else None),
        # A head for classes stands on the states, see services/engine/model/pooling.
        *(() if spec.scores else (Rule(CLASSES, None),)),
    )


def load_decoder(
    directory: Path, device: Device, *, dtype: str, max_model_len: int | None, scores: bool = True
) -> DecoderModel:
    """Load the model of a Hugging Face directory in `dtype` (auto, float32, bfloat16, float16).

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
            chosen, own = (
                device.kernels.native_dtype(dtype, stored),
                device.kernels.choose_dtype(dtype, stored),
            )
            decoder, weights = _empty(spec, checkpoint, device, chosen)
            # It takes them layer by layer and keeps none: the model is never there as a whole twice.
            native = device.kernels.native_decoder(native_spec(decoder, chosen, weights.load))
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
    return decoder, WeightLoader(checkpoint, rules_for(spec), decoder.slots(), placed=device.execution.flush)


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
