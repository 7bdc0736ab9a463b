"""Our decoder where a device computes all layers by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from services.engine.device import (
    Device,
    NativeDecoder,
    NativeExperts,
    NativeLayer,
    NativeLinear,
    NativeMlp,
    NativeRope,
    NativeSpec,
)
from services.engine.model.attention import LayerCache
from services.engine.model.decoder.decoder import Decoder, DecoderModel
from services.engine.model.decoder.layers import DecoderLayer, ExpertMlp, GatedMlp, RmsNorm, ShardedLinear
from services.engine.model.decoder.spec import ExpertSpec, LayerPlan


def native_spec(decoder: Decoder, dtype: torch.dtype, load: Callable[[str], None]) -> NativeSpec:
    """What a decoder is. Its weights move to whoever asks for them.

    load: fills the parameters of a prefix; it is called for each before they are given.
    """
    spec = decoder.spec

    def embedding() -> torch.Tensor:
        load("embedding.")
        return _taken(decoder.embedding.weight)

    def head() -> NativeLinear:
        load("head.")
        return NativeLinear(_taken(decoder.head.weight))

    def norm() -> torch.Tensor:
        load("norm.")
        return decoder.norm.wide_weight()

    return NativeSpec(
        dtype=dtype,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        layer_count=len(spec.layers),
        norm_eps=spec.norm_eps,
        activation=spec.activation,
        scale=spec.scale,
        attention_softcap=spec.attention_softcap,
        logits_softcap=spec.logits_softcap,
        embedding_multiplier=decoder.multiplier,
        residual_multiplier=spec.residual_multiplier,
        logits_divisor=spec.logits_divisor,
        ropes=tuple(
            NativeRope(torch.tensor(rope.frequencies, dtype=torch.float32), rope.factor)
            for rope in spec.ropes
        ),
        embedding=embedding,
        norm=norm,
        layers=lambda: _layers(decoder, load),
        head=head if spec.scores and not spec.tied else None,
        tied=spec.scores and spec.tied,
    )


def _layers(decoder: Decoder, load: Callable[[str], None]) -> Iterator[NativeLayer]:
    for index, (layer, plan) in enumerate(zip(decoder.layers, decoder.spec.layers, strict=True)):
        load(f"layers.{index}.")
        if not isinstance(layer, DecoderLayer):
            raise TypeError(f"{type(layer).__name__} is no decoder layer")
        yield _layer(layer, plan, decoder.spec.experts)


def _layer(layer: DecoderLayer, plan: LayerPlan, experts: ExpertSpec | None) -> NativeLayer:
    attention = layer.attention
    return NativeLayer(
        qkv=_linear(attention.qkv),
        output=_linear(attention.output),
        mlp=_mlp(layer.mlp, experts),
        attention_norm=layer.attention_norm.wide_weight(),
        mlp_norm=layer.mlp_norm.wide_weight(),
        attention_post_norm=_norm(layer.attention_post_norm),
        mlp_post_norm=_norm(layer.mlp_post_norm),
        query_norm=_norm(attention.query_norm),
        key_norm=_norm(attention.key_norm),
        rope=plan.rope,
        window=plan.window,
    )


def _mlp(mlp: GatedMlp | ExpertMlp, spec: ExpertSpec | None) -> NativeMlp | NativeExperts:
    if isinstance(mlp, GatedMlp):
        return NativeMlp(_linear(mlp.gate_up, gated=True), _linear(mlp.down))
    if spec is None:
        raise TypeError("experts of a spec without any")
    return NativeExperts(
        router=_taken(mlp.router.weight),
        gate_up=_taken(mlp.experts.gate_up),
        down=_taken(mlp.experts.down),
        per_token=spec.per_token,
        normalize=spec.normalize,
        rounded=spec.rounded,
    )


def _norm(norm: RmsNorm | None) -> torch.Tensor | None:
    return None if norm is None else norm.wide_weight()


def _linear(linear: ShardedLinear, *, gated: bool = False) -> NativeLinear:
    bias = None if linear.bias is None else linear.bias.data
    return NativeLinear(_taken(linear.weight), bias, gated)


def _taken(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The values of a parameter, which is empty from now on."""
    values = parameter.data
    parameter.data = values.new_empty((0, 0))
    return values


class NativeDecoderModel(DecoderModel):
    """A decoder whose modules say what it is like; `native` computes it, with the weights that it took."""

    def __init__(self, decoder: Decoder, device: Device, dtype: torch.dtype, native: NativeDecoder) -> None:
        super().__init__(decoder, device, dtype)
        self.native = native
        self.chooser = native.chooser
        self.select = native.select
        self.skips_padding = True

    def weight_bytes(self) -> int:
        return self.native.weight_bytes() + super().weight_bytes()

    def _attach(self, caches: Sequence[LayerCache]) -> None:
        self.native.attach([(cache.key, cache.value) for cache in caches], self.block_size)

    @torch.inference_mode()
    def clear_blocks(self, blocks: torch.Tensor) -> None:
        self.native.clear_blocks(blocks)

    @torch.inference_mode()
    def prefill(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        context_blocks: torch.Tensor,
        context_lens: torch.Tensor,
    ) -> torch.Tensor:
        return self.native.prefill(tokens, positions, slots, context_blocks, context_lens)

    @torch.inference_mode()
    def decode(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        blocks: torch.Tensor,
        rows: torch.Tensor,
        starts: torch.Tensor,
    ) -> torch.Tensor:
        return self.native.decode(tokens, positions, slots, blocks, rows, starts)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.native.logits(hidden)
