"""From a checkpoint's config to the spec of our decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from services.engine.device import ACTIVATIONS
from services.engine.model.decoder.errors import UnsupportedByDecoder
from services.engine.model.decoder.families import FAMILIES, Family, Windows
from services.engine.model.decoder.keys import check_keys, check_rope_keys
from services.engine.model.decoder.spec import DecoderSpec, ExpertSpec, LayerPlan, RopeSpec

_SLIDING = "sliding_attention"
# Grouped products want rows of whole 16 bytes.
_EXPERT_ALIGNMENT = 8


def spec_from_config(config: PreTrainedConfig, raw: Mapping[str, Any]) -> DecoderSpec:
    """Reads the parsed config of a checkpoint; `raw` is its config.json.

    Raises UnsupportedByDecoder, naming what is not known, for other families and for keys and values whose
    effect is not implemented; ValueError and the like for values that make no model.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise UnsupportedByDecoder(config.model_type, "this model type")
    check_keys(raw, config, family)
    values: Any = config
    heads, kv_heads = values.num_attention_heads, values.num_key_value_heads
    if heads % kv_heads:
        raise ValueError(f"{heads} attention heads are no multiple of {kv_heads} key heads")
    head_dim = getattr(values, "head_dim", None) or values.hidden_size // heads
    rope_kinds = _rope_kinds(values, family)
    bias = bool(getattr(values, "attention_bias", False))
    mlp_bias = bool(getattr(values, "mlp_bias", False))
    gemma = bool(family.flags.get("embedding_rounded"))
    flags = {"qkv_bias": bias, "output_bias": bias, "mlp_bias": mlp_bias, **family.flags}
    return DecoderSpec(
        family=config.model_type,
        vocab_size=values.vocab_size,
        hidden_size=values.hidden_size,
        intermediate_size=values.intermediate_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=values.rms_norm_eps,
        activation=_activation(values, family),
        scale=_scale(values, head_dim),
        layers=tuple(_layer(values, family, rope_kinds, index) for index in range(values.num_hidden_layers)),
        ropes=tuple(_rope(values, family, kind) for kind in rope_kinds),
        tied=bool(values.tie_word_embeddings),
        attention_softcap=getattr(values, "attn_logit_softcapping", None),
        logits_softcap=getattr(values, "final_logit_softcapping", None),
        embedding_multiplier=values.hidden_size**0.5 if gemma else _number(values, "embedding_multiplier"),
        residual_multiplier=_number(values, "residual_multiplier"),
        logits_divisor=_number(values, "logits_scaling"),
        experts=_experts(values),
        **flags,
    )


def _number(values: Any, key: str) -> float:
    return float(getattr(values, key, 1.0))


def _activation(values: Any, family: Family) -> str:
    name = str(getattr(values, family.activation))
    if name not in ACTIVATIONS:
        raise UnsupportedByDecoder(values.model_type, f"{family.activation} = {name}")
    return name


def _scale(values: Any, head_dim: int) -> float:
    """What scores are multiplied by before the softmax."""
    multiplier = getattr(values, "attention_multiplier", None)
    if multiplier is not None:
        return float(multiplier)
    scalar = getattr(values, "query_pre_attn_scalar", None)
    return float((scalar if scalar is not None else head_dim) ** -0.5)


def _experts(values: Any) -> ExpertSpec | None:
    count = getattr(values, "num_experts", 0)
    if not count:
        return None
    mixtral = values.model_type == "mixtral"
    size = values.intermediate_size if mixtral else values.moe_intermediate_size
    if size % _EXPERT_ALIGNMENT or values.hidden_size % _EXPERT_ALIGNMENT:
        raise UnsupportedByDecoder(
            values.model_type,
            f"experts of {values.hidden_size} x {size}, which are not multiples of {_EXPERT_ALIGNMENT},",
        )
    if not 1 <= values.num_experts_per_tok <= count:
        raise ValueError(f"a token cannot have {values.num_experts_per_tok} of {count} experts")
    return ExpertSpec(
        count=count,
        per_token=values.num_experts_per_tok,
        intermediate_size=size,
        normalize=mixtral or bool(values.norm_topk_prob),
        rounded=not mixtral,
    )


def _layer(values: Any, family: Family, rope_kinds: tuple[str | None, ...], index: int) -> LayerPlan:
    kind = values.layer_types[index] if family.windows is Windows.BY_LAYER_TYPE else None
    windowed = family.windows is Windows.ALL or kind == _SLIDING
    step = getattr(values, "decoder_sparse_step", 1)
    dense = index in (getattr(values, "mlp_only_layers", None) or ()) or (index + 1) % step != 0
    return LayerPlan(
        window=values.sliding_window if windowed else None,
        rope=rope_kinds.index(kind) if family.rope_by_layer_type else 0,
        experts=bool(getattr(values, "num_experts", 0)) and not dense,
    )


def _rope_kinds(values: Any, family: Family) -> tuple[str | None, ...]:
    """The layer types that have a rotary embedding of their own; (None,) if all layers share one."""
    return tuple(sorted(set(values.layer_types))) if family.rope_by_layer_type else (None,)


def _rope(values: Any, family: Family, layer_type: str | None) -> RopeSpec:
    """Frequencies as transformers computes them at its start, for the original context where that matters.

    `dynamic` is then the default one: it changes beyond max_position_embeddings, and no sequence gets there.
    """
    parameters = values.rope_parameters if layer_type is None else values.rope_parameters[layer_type]
    check_rope_keys(parameters, values, family)
    kind = parameters["rope_type"]
    if kind == "default":
        head_dim = getattr(values, "head_dim", None) or values.hidden_size // values.num_attention_heads
        rotated = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
        return RopeSpec(tuple((1.0 / parameters["rope_theta"] ** exponents).tolist()), 1.0)
    if kind not in ("linear", "dynamic", "yarn", "longrope", "llama3"):
        raise UnsupportedByDecoder(values.model_type, f"rope type {kind}")
    compute: Any = ROPE_INIT_FUNCTIONS[kind]
    frequencies, factor = compute(values, torch.device("cpu"), layer_type=layer_type)
    return RopeSpec(tuple(frequencies.tolist()), float(factor))
