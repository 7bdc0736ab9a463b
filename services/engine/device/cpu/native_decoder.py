"""The native decoder of a CPU: weights packed once, then one call for all layers of a forward."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import partial

import torch

from services.engine.device.cpu.native import Library
from services.engine.device.cpu.packing import Packer, weight_kind
from services.engine.device.cpu.settings import Quantization
from services.engine.device.cpu.structures import (
    ACTIVATION_KINDS,
    CACHE_KINDS,
    FAULTS,
    OUT_OF_MEMORY,
    Architecture,
    Experts,
    Following,
    Layer,
    Linear,
    Pages,
    Rope,
    WeightKind,
    decode_arguments,
    point_to,
    prefill_arguments,
    whole_numbers,
)
from services.engine.device.cpu.threads import Team
from services.engine.device.native import NativeExperts, NativeLayer, NativeLinear, NativeSpec


def pack(packer: Packer, spec: NativeSpec, quantization: Quantization | None) -> Architecture:
    """Take all weights of a model; they live as long as the packer."""
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


# As the attention's kernels have them.
_HEAD_DIMS = range(8, 257, 8)


def why_not_native(spec: NativeSpec) -> str | None:
    """Return the feature of a model that the native decoder lacks; None if it computes all."""
    if reason := why_not_dtype(spec.dtype):
        return reason
    if spec.head_dim not in _HEAD_DIMS:
        return f"heads of {spec.head_dim} dimensions are not native: multiples of 8 up to 256 are"
    return None


def why_not_dtype(dtype: torch.dtype) -> str | None:
    """Return why the kernels do not compute in a type; None if they do."""
    if dtype in CACHE_KINDS:
        return None
    return f"{str(dtype).removeprefix('torch.')} is not native: float32 and bfloat16 are"


class CpuNativeDecoder:
    """Implements `NativeDecoder`. One forward at a time, by the team's threads and the caller's."""

    def __init__(
        self, library: Library, team: Team, spec: NativeSpec, quantization: Quantization | None
    ) -> None:
        """Pack the spec's weights, layer by layer."""
        self._dtype = spec.dtype
        self._vocab, self._hidden = spec.vocab_size, spec.hidden_size
        # Lives as long as its threads are needed.
        self._team = team
        # Before weights are taken: where the library lacks one of them, torch still can compute.
        function = library.function
        make = function("catenary_decoder_new", c_void_p, ctypes.POINTER(Architecture), c_void_p)
        self._free = function("catenary_decoder_free", None, c_void_p)
        self._attach = function("catenary_decoder_attach", c_int32, c_void_p, c_void_p, c_int64, c_int64)
        self._clear = function("catenary_decoder_clear", c_int32, c_void_p, c_void_p, c_int64)
        self._prefill = function("catenary_decoder_prefill", c_int32, c_void_p, c_void_p, c_void_p)
        choice = [c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_void_p]
        self._select = function("catenary_decoder_select", c_int32, *choice)
        self._decode = function("catenary_decoder_decode", c_int32, c_void_p, c_void_p, c_void_p)
        pick = [c_void_p, c_void_p, c_int64, c_void_p, c_void_p]
        self._choose = function("catenary_decoder_choose", c_int32, *pick)
        self._decode_best = function("catenary_decoder_decode_best", c_int32, *([c_void_p] * 4))
        self._logits = function("catenary_decoder_logits", c_int32, c_void_p, c_void_p, c_int64, c_void_p)
        with ThreadPoolExecutor(team.size) as pool:
            packer = Packer(library, pool)
            architecture = pack(packer, spec, quantization)
        self._packer = packer
        self._scores = bool(architecture.head.outputs)
        # Dividing and capping may make two scores one.
        self._chooses = self._scores and spec.logits_divisor == 1.0 and not spec.logits_softcap
        self._handle = make(ctypes.byref(architecture), team.handle)
        if not self._handle:
            raise MemoryError("no memory for the native decoder")

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._free(self._handle)

    def weight_bytes(self) -> int:
        return self._packer.bytes

    def attach(self, caches: Sequence[tuple[torch.Tensor, torch.Tensor]], block_size: int) -> None:
        pages = (Pages * len(caches))(*(Pages(key.data_ptr(), value.data_ptr()) for key, value in caches))
        blocks = caches[0][0].shape[0] // block_size - 1
        # Forwards write to them as long as they are attached.
        self.caches = tuple(caches)
        _check(self._attach(self._handle, pages, block_size, blocks))

    def clear_blocks(self, blocks: torch.Tensor) -> None:
        held = whole_numbers("blocks", blocks, blocks.numel())
        _check(self._clear(self._handle, held.data_ptr(), held.numel()))

    def prefill(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        context_blocks: torch.Tensor,
        context_lens: torch.Tensor,
    ) -> torch.Tensor:
        arguments, held = prefill_arguments(tokens, positions, slots, context_blocks, context_lens)
        return self._forward(self._prefill, arguments, held, tokens.shape[0])

    def select(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        context_blocks: torch.Tensor,
        context_lens: torch.Tensor,
        wanted: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        arguments, held = prefill_arguments(tokens, positions, slots, context_blocks, context_lens)
        count = wanted.numel()
        places = whole_numbers("wanted", wanted, count)
        hidden = torch.empty((count, self._hidden), dtype=self._dtype)
        sound = torch.empty(tokens.shape[0], dtype=torch.bool)
        results = (hidden.data_ptr(), sound.data_ptr())
        _check(self._select(self._handle, ctypes.byref(arguments), places.data_ptr(), count, *results))
        # The tensors that the arguments point into must live until here.
        del held
        return hidden, sound

    def decode(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        blocks: torch.Tensor,
        rows: torch.Tensor,
        starts: torch.Tensor,
    ) -> torch.Tensor:
        arguments, held = decode_arguments(tokens, positions, slots, blocks, rows, starts)
        return self._forward(self._decode, arguments, held, tokens.shape[0])

    def best_step(
        self, inputs: Sequence[torch.Tensor], rows: int, last_rows: torch.Tensor, last_tokens: torch.Tensor
    ) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        arguments, held = decode_arguments(*inputs)
        count = arguments.rows
        if not 1 <= rows <= count:
            raise ValueError(f"the best of {rows} rows are asked for, of a decode of {count}")
        hidden = torch.empty((count, self._hidden), dtype=self._dtype)
        tokens, scores = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.float32)
        following = Following(rows, last_tokens.shape[0], scores=scores.data_ptr())
        held += point_to(
            following,
            last_rows=(last_rows, count),
            last_tokens=(last_tokens, following.places),
            tokens=(tokens, rows),
        )
        pointers = ctypes.byref(arguments), ctypes.byref(following), hidden.data_ptr()
        call = partial(self._decode_best, self._handle, *pointers)
        return _BestStep(call, (tokens, scores), (*held, hidden))

    def _forward(
        self, call: Callable[..., int], arguments: ctypes.Structure, held: list[torch.Tensor], count: int
    ) -> torch.Tensor:
        """`held`: the tensors that the arguments point into, which must live until the call returns."""
        hidden = torch.empty((count, self._hidden), dtype=self._dtype)
        _check(call(self._handle, ctypes.byref(arguments), hidden.data_ptr()))
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self._scores:
            raise ValueError("this model was loaded without its head")
        hidden = hidden.to(self._dtype).contiguous()
        count = hidden.shape[0]
        scores = torch.empty((count, self._vocab), dtype=torch.float32)
        _check(self._logits(self._handle, hidden.data_ptr(), count, scores.data_ptr()))
        return scores

    @property
    def chooser(self) -> CpuNativeDecoder | None:
        return self if self._chooses else None

    def choose(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = hidden.to(self._dtype).contiguous()
        count = hidden.shape[0]
        tokens = torch.empty(count, dtype=torch.int64)
        scores = torch.empty(count, dtype=torch.float32)
        pointers = (hidden.data_ptr(), count, tokens.data_ptr(), scores.data_ptr())
        _check(self._choose(self._handle, *pointers))
        return tokens, scores


@dataclass(frozen=True, slots=True)
class _BestStep:
    """A prepared call. `held`: the tensors that it points into, except that of its result."""

    call: Callable[[], int]
    result: tuple[torch.Tensor, torch.Tensor]
    held: Sequence[torch.Tensor]

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor]:
        _check(self.call())
        return self.result


def _check(fault: int) -> None:
    if fault == OUT_OF_MEMORY:
        raise MemoryError("no memory for a native forward")
    if fault:
        raise ValueError(f"a forward is not computed: {FAULTS[fault]}")
