"""Paged models: inputs and masks of a forward, caches, attention over them, the interface of a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from services.engine.device import HIDDEN, NO_FEATURES, AttentionFeatures, Chooser, Device, Kernels

Window = int | None
"""How many positions a layer looks back, the current one included; None: all of them."""


@dataclass(frozen=True, slots=True)
class PrefillInputs:
    """A prefill bucket of `batch` rows. slots [B * Q] where each token's KV goes; context_blocks [B, C] ids.

    masks: per window, bool [B, 1, Q, C * block_size + Q], or None where plain causal attention is meant.
    distances: float32 of the masks' shape, positions between query and key; only layers with ALiBi need it.
    lengths: int64 [B], how many of a row's tokens are its own; a device may then skip the others.
    """

    batch: int
    block_size: int
    slots: torch.Tensor
    context_blocks: torch.Tensor
    masks: Mapping[Window, torch.Tensor | None]
    distances: torch.Tensor | None = None
    lengths: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """A decode bucket. slots [B]; blocks [J] ids, or [0] for the first J; rows [J] their owners, B: none.

    biases: per window, float32 [J, block_size].
    distances: float32 [J, block_size], positions between query and key; only layers with ALiBi need it.
    """

    slots: torch.Tensor
    blocks: torch.Tensor
    rows: torch.Tensor
    biases: Mapping[Window, torch.Tensor]
    distances: torch.Tensor | None = None


def prefill_masks(
    windows: Iterable[Window], context_lens: torch.Tensor, query: int, context_tokens: int
) -> dict[Window, torch.Tensor | None]:
    """Return masks of a prefill bucket. context_lens [B]: cached tokens before each row's first query."""
    device = context_lens.device
    offsets = torch.arange(query, device=device)
    causal = offsets.unsqueeze(1) >= offsets.unsqueeze(0)
    cached = torch.arange(context_tokens, device=device)
    batch = context_lens.shape[0]
    # Context slots at and after the row's length belong to nobody.
    known = (cached.unsqueeze(0) < context_lens.unsqueeze(1)).view(batch, 1, 1, context_tokens)
    masks: dict[Window, torch.Tensor | None] = {}
    for window in windows:
        if window is None and context_tokens == 0:
            masks[None] = None
            continue
        current, past = causal, known.expand(batch, 1, query, context_tokens)
        if window is not None:
            current = causal & (offsets.unsqueeze(1) - offsets.unsqueeze(0) < window)
            positions = (context_lens.unsqueeze(1) + offsets).view(batch, 1, query, 1)
            past = past & (positions - cached < window)
        masks[window] = torch.cat((past, current.expand(batch, 1, query, query)), dim=-1)
    return masks


def decode_biases(
    windows: Iterable[Window],
    positions: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    block_size: int,
) -> dict[Window, torch.Tensor]:
    """Return biases of a decode bucket. positions [B] of new tokens; starts [J] of the blocks' first."""
    owner, keys = _decode_positions(positions, rows, starts, block_size)
    biases: dict[Window, torch.Tensor] = {}
    for window in windows:
        seen = keys <= owner
        if window is not None:
            seen = seen & (owner - keys < window)
        biases[window] = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, HIDDEN)
    return biases


def prefill_distances(context_lens: torch.Tensor, query: int, context_tokens: int) -> torch.Tensor:
    """How far each key lies behind each query of a prefill bucket: float32 [B, 1, Q, context_tokens + Q]."""
    device = context_lens.device
    offsets = torch.arange(query, device=device)
    positions = context_lens.unsqueeze(1) + offsets
    cached = torch.arange(context_tokens, device=device).expand(context_lens.shape[0], context_tokens)
    keys = torch.cat((cached, positions), dim=1)
    return (positions.unsqueeze(2) - keys.unsqueeze(1)).unsqueeze(1).float()


def decode_distances(
    positions: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, block_size: int
) -> torch.Tensor:
    """How far each key lies behind its row's new token in a decode bucket: float32 [J, block_size]."""
    owner, keys = _decode_positions(positions, rows, starts, block_size)
    return (owner - keys).float()


def _decode_positions(
    positions: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The new token's position [J, 1] and the keys' [J, block_size], for each block."""
    # Padding has row B: any position will do, since its result is dropped.
    owner = positions.index_select(0, rows.clamp_max(positions.shape[0] - 1)).unsqueeze(1)
    return owner, starts.unsqueeze(1) + torch.arange(block_size, device=starts.device)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Shape of one layer's KV. `window`: how many positions it looks back, None for all of them."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window: Window


@dataclass(slots=True)
class LayerCache:
    """A layer's KV, and the kernels that read it: key [slots, kv_heads, key_dim], value [..., value_dim]."""

    kernels: Kernels
    key: torch.Tensor
    value: torch.Tensor

    @classmethod
    def allocate(cls, device: Device, spec: LayerSpec, slots: int, dtype: torch.dtype) -> LayerCache:
        """Allocate caches of `slots` tokens, zeroed."""
        key = device.memory.zeros((slots, spec.kv_heads, spec.key_dim), dtype)
        return cls(device.kernels, key, device.memory.zeros((slots, spec.kv_heads, spec.value_dim), dtype))

    def clear_blocks(self, blocks: torch.Tensor, block_size: int) -> None:
        """Zero blocks. blocks int64 [N] on the device; an id may come more than once."""
        slots = _slots(blocks, block_size)
        for tensor in (self.key, self.value):
            tensor.index_fill_(0, slots, 0)

    def copy_blocks(
        self, sources: torch.Tensor, targets: torch.Tensor, tokens: torch.Tensor, block_size: int
    ) -> None:
        """Copy the first tokens of blocks, int64 [N] each, and zero the other slots of the targets.

        All sources are read before a target is written.
        """
        read, written = _slots(sources, block_size), _slots(targets, block_size)
        within = torch.arange(block_size, device=tokens.device)
        beyond = (within >= tokens.unsqueeze(-1)).view(-1, 1, 1)
        for tensor in (self.key, self.value):
            tensor.index_copy_(0, written, tensor.index_select(0, read).masked_fill(beyond, 0))

    def read_blocks(self, blocks: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of blocks, int64 [N]: [N, block_size * kv_heads * dim] each."""
        slots = _slots(blocks, block_size)
        count = blocks.shape[0]
        return self.key.index_select(0, slots).view(count, -1), self.value.index_select(0, slots).view(
            count, -1
        )

    def write_blocks(
        self, blocks: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block_size: int
    ) -> None:
        """Overwrite blocks, int64 [N] on the device, with what `read_blocks` gave."""
        slots = _slots(blocks, block_size)
        for tensor, new in ((self.key, keys), (self.value, values)):
            tensor.index_copy_(0, slots, new.reshape(slots.shape[0], *tensor.shape[1:]))


def _slots(blocks: torch.Tensor, block_size: int) -> torch.Tensor:
    """The slots of blocks, int64 [N * block_size].

    Caches are not written through a view by blocks: an HPU graph cannot update a view in place.
    """
    within = torch.arange(block_size, device=blocks.device)
    return (blocks.unsqueeze(-1) * block_size + within).flatten()


def attend(
    layer: LayerCache,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    inputs: PrefillInputs | DecodeInputs,
    *,
    window: Window,
    scale: float,
    features: AttentionFeatures = NO_FEATURES,
) -> torch.Tensor:
    """query [T, heads, d], key [T, kv_heads, d], value [T, kv_heads, dv] -> [T, heads, dv].

    T is the rows times tokens per row of the bucket. dv may be less than d. `window` is one of those that
    the inputs' masks were made for. Key and value are written into the layer's cache.
    """
    if isinstance(inputs, PrefillInputs):
        return _prefill(layer, query, key, value, inputs, window, scale, features)
    _write(layer, key, value, inputs.slots)
    bias = inputs.biases[window].unsqueeze(1)
    if features.alibi is not None:
        bias = bias - _required(inputs.distances).unsqueeze(1) * features.alibi.float().unsqueeze(1)
    return layer.kernels.attend_decode(
        query, layer.key, layer.value, inputs.blocks, inputs.rows, bias, scale, features
    )


def _prefill(
    layer: LayerCache,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    inputs: PrefillInputs,
    window: Window,
    scale: float,
    features: AttentionFeatures,
) -> torch.Tensor:
    written_key, written_value = key, value
    query, key, value = (_split_rows(tensor, inputs.batch) for tensor in (query, key, value))
    if inputs.context_blocks.shape[1]:
        key = torch.cat((_context(layer.key, inputs), key), dim=2)
        value = torch.cat((_context(layer.value, inputs), value), dim=2)
    # After the context was read: padding tokens of a row that went wrong write NaN into the padding block,
    # which is part of its neighbours' context.
    _write(layer, written_key, written_value, inputs.slots)
    mask = inputs.masks[window]
    if features.alibi is not None:
        mask = _alibi_bias(mask, _required(inputs.distances), features.alibi)
    out = layer.kernels.attend_prefill(query, key, value, mask, scale, features, inputs.lengths)
    return out.transpose(1, 2).reshape(-1, out.shape[1], out.shape[3])


def _write(layer: LayerCache, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    layer.key.index_copy_(0, slots, key)
    layer.value.index_copy_(0, slots, value)


def _split_rows(tensor: torch.Tensor, batch: int) -> torch.Tensor:
    """[B * Q, heads, d] -> [B, heads, Q, d]."""
    tokens, heads, dim = tensor.shape
    return tensor.reshape(batch, tokens // batch, heads, dim).transpose(1, 2)


def _context(cache: torch.Tensor, inputs: PrefillInputs) -> torch.Tensor:
    """Cached tokens of each row by block id, never by range: [B, kv_heads, C * block_size, d]."""
    kv_heads, dim = cache.shape[1], cache.shape[2]
    paged = cache.view(-1, inputs.block_size, kv_heads, dim)
    gathered = paged.index_select(0, inputs.context_blocks.flatten())
    return gathered.view(inputs.batch, -1, kv_heads, dim).transpose(1, 2)


def _alibi_bias(mask: torch.Tensor | None, distances: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
    """mask bool or None, distances [B, 1, Q, K], slopes [heads] -> float32 [B, heads, Q, K]."""
    # Without context the keys are the queries: those at a negative distance are still to come.
    visible = distances >= 0 if mask is None else mask
    bias = -distances * slopes.float().view(1, -1, 1, 1)
    return bias.masked_fill_(~visible, HIDDEN)


def _required(distances: torch.Tensor | None) -> torch.Tensor:
    if distances is None:
        raise ValueError("attention with ALiBi needs the distances between queries and keys")
    return distances


Select = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""A prefill of which some hidden states are wanted, as `NativeDecoder.select`."""


class PagedModel(ABC):
    """A causal language model on one device.

    The forwards give hidden states and `logits` scores those that are wanted: prompt log probabilities,
    embeddings and plain sampling share one forward, and its shape does not depend on which rows sample.

    backend: which implementation serves, `decoder` or `transformers`. dtype: of weights, KV and hidden
    states. layers: one entry for each attention layer, in the model's order. Subclasses set these. chooser:
    where there is one, it has the best tokens for less than `logits` cost.
    """

    backend: str
    dtype: torch.dtype
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    chooser: Chooser | None = None

    def __init__(self, device: Device) -> None:
        self.device = device
        # 0 until `allocate_kv`.
        self.block_size = 0
        self.caches: tuple[LayerCache, ...] = ()
        self._windows: list[int | None] = []
        # Slots from here on take the writes of padding.
        self._padding_start = 0
        self.skips_padding = False
        """Whether tokens of padding cost nothing."""
        self.select: Select | None = None
        """Forward for few wanted hidden states, if the model has one that computes less."""

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """Modules of torch that compute."""
        return ()

    @abstractmethod
    def weight_bytes(self) -> int:
        """Return the bytes that the weights take on the device; tied ones count once."""

    @abstractmethod
    def compile_parts(self, *, norms_and_head: bool) -> None:
        """Send each layer, or also the final norm and the head, through `Execution.compile`.

        Layers of the same kind share what is compiled.
        """

    @abstractmethod
    def compile_whole(self) -> None:
        """Send the forward through `Execution.compile` as one piece, and the head as another."""

    def kv_bytes_per_token(self) -> int:
        """Return the bytes that one token's KV takes in all layers."""
        size = self.dtype.itemsize
        return sum(layer.kv_heads * (layer.key_dim + layer.value_dim) * size for layer in self.layers)

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Allocate the caches, zeroed: `num_blocks` blocks and one more for padding, with id num_blocks."""
        self.block_size = block_size
        self._windows = sorted({layer.window for layer in self.layers}, key=lambda window: window or 0)
        self._padding_start = num_blocks * block_size
        slots = self._padding_start + block_size
        self.caches = tuple(LayerCache.allocate(self.device, spec, slots, self.dtype) for spec in self.layers)
        self._attach(self.caches)

    @abstractmethod
    def _attach(self, caches: Sequence[LayerCache]) -> None:
        """Give each layer its cache; `caches` has the order of `layers`."""

    @torch.inference_mode()
    def clear_blocks(self, blocks: torch.Tensor) -> None:
        """Zero blocks in all layers. blocks int64 [N] on the device; an id may come more than once."""
        for cache in self.caches:
            cache.clear_blocks(blocks, self.block_size)

    @torch.inference_mode()
    def copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor, tokens: torch.Tensor) -> None:
        """Copy the first tokens of blocks in all layers, and zero the other slots of the targets.

        sources, targets, tokens int64 [N] each on the device. All sources are read before a target is
        written. Targets are distinct, but for padding, which copies one block to itself.
        """
        for cache in self.caches:
            cache.copy_blocks(sources, targets, tokens, self.block_size)

    @torch.inference_mode()
    def read_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """All that blocks hold. blocks int64 [N] on the device.

        Returns [N, block_size * numbers of a token's KV]: a block's layers in order, keys before values.
        """
        parts = [part for cache in self.caches for part in cache.read_blocks(blocks, self.block_size)]
        return torch.cat(parts, dim=1)

    @torch.inference_mode()
    def write_blocks(self, blocks: torch.Tensor, data: torch.Tensor) -> None:
        """Overwrite blocks, int64 [N] on the device, with what `read_blocks` gives of a model like this.

        Of a block that comes more than once, which may be the padding block alone, either may win.
        """
        parts = iter(torch.split(data, self._part_widths, dim=1))
        for cache in self.caches:
            cache.write_blocks(blocks, next(parts), next(parts), self.block_size)

    @property
    def _part_widths(self) -> list[int]:
        """Numbers of a block's keys and values, layer by layer."""
        tokens = self.block_size
        return [
            tokens * layer.kv_heads * dim for layer in self.layers for dim in (layer.key_dim, layer.value_dim)
        ]

    @torch.inference_mode()
    def prefill(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        context_blocks: torch.Tensor,
        context_lens: torch.Tensor,
    ) -> torch.Tensor:
        """A prefill bucket of B rows with Q tokens each, after C blocks of cached context.

        tokens, positions, slots int64 [B * Q]: ids, positions in their sequence, and where each one's KV is
        written; context_blocks [B, C] block ids; context_lens [B] how many of their tokens are the row's
        own.
        Returns hidden states [B * Q, hidden_size], the final norm applied.
        """
        batch, context = context_blocks.shape
        masks = prefill_masks(
            self._windows, context_lens, tokens.shape[0] // batch, context * self.block_size
        )
        # Of use to a device only where a mask does not say it already.
        lengths = None if context else (slots < self._padding_start).view(batch, -1).sum(1)
        inputs = PrefillInputs(batch, self.block_size, slots, context_blocks, masks, lengths=lengths)
        return self._forward(tokens, positions, inputs)

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
        """A decode bucket of B rows whose sequences hold J blocks together, the new tokens' included.

        tokens, positions, slots int64 [B]; blocks [J] ids, or [0] for the first J blocks as one slice; rows
        [J] the row that owns each block, B for padding; starts [J] the position of each block's first token.
        Returns hidden states [B, hidden_size], the final norm applied.
        """
        biases = decode_biases(self._windows, positions, rows, starts, self.block_size)
        return self._forward(tokens, positions, DecodeInputs(slots, blocks, rows, biases))

    @abstractmethod
    def _forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, inputs: PrefillInputs | DecodeInputs
    ) -> torch.Tensor:
        """Hidden states [T, hidden_size] of tokens [T] at positions [T], the final norm applied."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden_size] -> logits [R, vocab_size], scaled and capped as the architecture does."""
