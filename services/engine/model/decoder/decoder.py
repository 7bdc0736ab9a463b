"""The decoder and its two models for the runner: computed by its modules, or by the device as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.nn.functional import embedding, linear

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
from services.engine.model.decoder.layers import (
    BatchInputs,
    DecoderLayer,
    ExpertMlp,
    GatedMlp,
    RmsNorm,
    Rotary,
    ShardedLinear,
)
from services.engine.model.decoder.spec import ALONE, DecoderSpec, ExpertSpec, LayerPlan, Shard
from services.engine.model.loading import Part, Slot
from services.engine.model.paged import DecodeInputs, LayerCache, PagedModel, PrefillInputs


class VocabTable(nn.Module):
    """A row for each token, [vocab, hidden]: an embedding, a head, or both. Every rank has all of it."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def placements(self) -> Mapping[str, tuple[Part, ...]]:
        """The checkpoint tensors that each parameter is made of."""
        return {"weight": (Part.whole(tuple(self.weight.shape)),)}


class Decoder(nn.Module):
    """Built without values, in `dtype` on `device`: `slots` says what has to be filled."""

    def __init__(self, spec: DecoderSpec, device: Device, dtype: torch.dtype, shard: Shard = ALONE) -> None:
        super().__init__()
        self.spec = spec
        self._dtype = dtype
        with _Defaults(device.memory.loading_device, dtype):
            self.embedding = VocabTable(spec.vocab_size, spec.hidden_size)
            layers = [DecoderLayer(spec, plan, shard, device.kernels) for plan in spec.layers]
            self.norm = RmsNorm(
                spec.hidden_size,
                spec.norm_eps,
                device.kernels,
                unit_offset=spec.unit_offset_norm,
                residual_multiplier=spec.residual_multiplier,
            )
            own_head = spec.scores and not spec.tied
            self.head = VocabTable(spec.vocab_size, spec.hidden_size) if own_head else self.embedding
        self.layers = nn.ModuleList(layers)
        self.attentions = tuple(layer.attention for layer in layers)
        self.rotaries = nn.ModuleList(Rotary(rope, device.memory.loading_device) for rope in spec.ropes)
        self.close: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = self._close
        self._device = device
        multiplier = torch.tensor(spec.embedding_multiplier)
        self.multiplier = float(multiplier.to(dtype) if spec.embedding_rounded else multiplier)

    def slots(self) -> dict[str, Slot]:
        """Every parameter, by name, with the checkpoint tensors that it is made of."""
        slots: dict[str, Slot] = {}
        for prefix, module in self.named_modules():
            for name, parts in getattr(module, "placements", dict)().items():
                experts = int(getattr(module, "experts", 0))
                slots[f"{prefix}.{name}"] = Slot(getattr(module, name), parts, experts)
        return slots

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, inputs: BatchInputs) -> torch.Tensor:
        """tokens, positions int64 [T] -> hidden states [T, hidden], the final norm applied."""
        residual = embedding(tokens, self.embedding.weight)
        if self.multiplier != 1.0:
            residual = residual * self.multiplier
        waves = [rotary(positions, self._dtype) for rotary in self.rotaries]
        # Nothing is to be added before the first layer; so it is one like the others.
        delta = torch.zeros_like(residual)
        for index, (layer, plan) in enumerate(zip(self.layers, self.spec.layers, strict=True)):
            delta, residual = layer(delta, residual, *waves[plan.rope], inputs)
            self._device.execution.layer_done(index)
        return self.close(delta, residual)

    def _close(self, delta: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The normed sum of both, [T, hidden]."""
        hidden: torch.Tensor = self.norm.fused(delta, residual)[0]
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden] -> [R, vocab]. Raises ValueError if the model has no head."""
        if not self.spec.scores:
            raise ValueError("this model was loaded without its head")
        scores = linear(hidden, self.head.weight)
        if self.spec.logits_divisor != 1.0:
            scores = scores / self.spec.logits_divisor
        cap = self.spec.logits_softcap
        return scores if cap is None else torch.tanh(scores / cap) * cap


class _Defaults:
    """Makes modules in a dtype on a device: parameters are created as they stay, never moved or cast."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype

    def __enter__(self) -> None:
        self._before = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)
        self._device.__enter__()

    def __exit__(self, *error: object) -> None:
        self._device.__exit__(*error)
        torch.set_default_dtype(self._before)


class DecoderModel(PagedModel):
    """A loaded `Decoder` with paged KV, computed by its modules."""

    backend = "decoder"

    def __init__(self, decoder: Decoder, device: Device, dtype: torch.dtype) -> None:
        super().__init__(device)
        self.dtype = dtype
        self.vocab_size = decoder.spec.vocab_size
        self.hidden_size = decoder.spec.hidden_size
        self.decoder = decoder
        self._body: Callable[..., torch.Tensor] = decoder.forward
        self._head: Callable[..., torch.Tensor] = decoder.logits
        self.layers = tuple(attention.layer_spec() for attention in decoder.attentions)

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return (self.decoder,)

    def weight_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.decoder.parameters())

    def compile_parts(self, *, norms_and_head: bool) -> None:
        compiled, decoder = self.device.execution.compile, self.decoder
        for layer in decoder.layers:
            layer.forward = compiled(layer.forward)
        if norms_and_head:
            decoder.close = compiled(decoder.close)
            self._head = compiled(self._head)

    def compile_whole(self) -> None:
        self._body = self.device.execution.compile(self._body)
        self._head = self.device.execution.compile(self._head)

    def _attach(self, caches: Sequence[LayerCache]) -> None:
        for attention, cache in zip(self.decoder.attentions, caches, strict=True):
            attention.cache = cache

    def _forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, inputs: PrefillInputs | DecodeInputs
    ) -> torch.Tensor:
        return self._body(tokens, positions, inputs)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(hidden)


def native_spec(decoder: Decoder, dtype: torch.dtype, load: Callable[[str], None]) -> NativeSpec:
    """Describe a decoder for a device. Its weights move to the caller that asks for them.

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
