"""The weights of a decoder as the native kernels take them, packed layer by layer."""

from __future__ import annotations

from services.engine.device.cpu.packing import Packer, weight_kind
from services.engine.device.cpu.settings import Quantization
from services.engine.device.cpu.structures import (
    ACTIVATION_KINDS,
    CACHE_KINDS,
    Architecture,
    Experts,
    Layer,
    Linear,
    Rope,
    WeightKind,
)
from services.engine.device.native import NativeExperts, NativeLayer, NativeLinear, NativeSpec


def pack(packer: Packer, spec: NativeSpec, quantization: Quantization | None) -> Architecture:
    """Takes all weights of a model; they live as long as the packer."""
    linear = weight_kind(spec.dtype, quantization)
    ropes = [
        Rope(packer.keep(rope.frequencies.float()), rope.frequencies.shape[0], rope.factor)
        for rope in spec.ropes
    ]
    # First, while little else is there: it may be as large as many layers.
    embedding, head = _vocabulary(packer, spec, quantization)
    layers = []
    for layer in spec.layers():
        layers.append(_layer(packer, layer, linear, weight_kind(spec.dtype, None)))
        del layer
        packer.give_back()
    return Architecture(
        CACHE_KINDS[spec.dtype],
        ACTIVATION_KINDS[spec.activation],
        spec.vocab_size,
        spec.hidden_size,
        spec.intermediate_size,
        spec.heads,
        spec.kv_heads,
        spec.head_dim,
        len(layers),
        len(ropes),
        spec.norm_eps,
        spec.scale,
        spec.attention_softcap or 0.0,
        spec.logits_softcap or 0.0,
        spec.embedding_multiplier,
        spec.residual_multiplier,
        spec.logits_divisor,
        embedding,
        packer.keep(spec.norm().float()),
        head,
        (Layer * len(layers))(*layers),
        (Rope * len(ropes))(*ropes),
    )


def _vocabulary(
    packer: Packer, spec: NativeSpec, quantization: Quantization | None
) -> tuple[int | None, Linear]:
    """The embedding's address and the head. None: rows of the embedding are read from the head's panels."""
    # int4 there costs more of the quality than all layers together.
    kind = weight_kind(spec.dtype, quantization and Quantization.INT8)
    table = spec.embedding()
    if spec.tied and quantization is None:
        return None, packer.linear(NativeLinear(table), kind)
    if spec.tied:
        return packer.keep(table), packer.linear(NativeLinear(table), kind)
    head = Linear() if spec.head is None else packer.linear(spec.head(), kind)
    return packer.keep(table), head


def _layer(packer: Packer, layer: NativeLayer, kind: WeightKind, exact: WeightKind) -> Layer:
    """`exact`: of routers of experts, since a small error there changes the chosen experts."""
    mlp, experts, gate_up, down = layer.mlp, None, Linear(), Linear()
    if isinstance(mlp, NativeExperts):
        experts = packer.hold(_experts(packer, mlp, kind, exact))
    else:
        gate_up, down = packer.linear(mlp.gate_up, kind), packer.linear(mlp.down, kind)
    return Layer(
        packer.linear(layer.qkv, kind),
        packer.linear(layer.output, kind),
        gate_up,
        down,
        packer.keep(layer.attention_norm),
        packer.keep(layer.attention_post_norm),
        packer.keep(layer.mlp_norm),
        packer.keep(layer.mlp_post_norm),
        packer.keep(layer.query_norm),
        packer.keep(layer.key_norm),
        layer.rope,
        layer.window or 0,
        experts,
    )


def _experts(packer: Packer, experts: NativeExperts, kind: WeightKind, exact: WeightKind) -> Experts:
    count = experts.router.shape[0]
    return Experts(
        packer.linear(NativeLinear(experts.router), exact),
        packer.stacked(experts.gate_up, kind, gated=True),
        packer.stacked(experts.down, kind),
        count,
        experts.per_token,
        experts.normalize,
        experts.rounded and exact is WeightKind.BFLOAT16,
    )
