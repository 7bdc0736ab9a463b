"""Structures of the native decoder's C interface (native/*.h), and tensors as it takes them."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from typing import Any

import torch


class WeightKind(IntEnum):
    """The number format of a packed weight."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT4 = 3


# Of caches, embeddings and hidden states.
CACHE_KINDS = {torch.float32: 0, torch.bfloat16: 1}
# By the names of ACTIVATIONS.
ACTIVATION_KINDS = {"silu": 1, "gelu_pytorch_tanh": 2, "gelu": 3}

# What `Fault` says of a batch.
FAULTS = {
    1: "a token is not in the vocabulary",
    2: "a position does not follow its context",
    3: "a slot does not fit its position",
    4: "a row's blocks are not all listed, or one does not exist",
    6: "a wanted token is none of the batch",
}
OUT_OF_MEMORY = 5


class Linear(ctypes.Structure):
    """`Linear` of kernels.h."""

    _fields_ = [
        ("kind", c_int32),
        ("outputs", c_int32),
        ("inputs", c_int32),
        ("gated", c_int32),
        ("panels", c_void_p),
        ("scales", c_void_p),
        ("sums", c_void_p),
        ("bias", c_void_p),
    ]


class Operand(ctypes.Structure):
    """`Operand` of kernels.h."""

    _fields_ = [("data", c_void_p), ("stride", c_int64), ("scales", c_void_p)]


class Experts(ctypes.Structure):
    """`Experts` of experts.h."""

    _fields_ = [
        ("router", Linear),
        ("gate_up", ctypes.POINTER(Linear)),
        ("down", ctypes.POINTER(Linear)),
        ("count", c_int32),
        ("per_token", c_int32),
        ("normalize", c_int32),
        ("rounded", c_int32),
    ]


class Layer(ctypes.Structure):
    """`Layer` of decoder.h."""

    _fields_ = [
        ("qkv", Linear),
        ("output", Linear),
        ("gate_up", Linear),
        ("down", Linear),
        ("attention_norm", c_void_p),
        ("attention_post_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("mlp_post_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("rope", c_int32),
        ("window", c_int32),
        ("experts", ctypes.POINTER(Experts)),
    ]


class Rope(ctypes.Structure):
    """`Rope` of decoder.h."""

    _fields_ = [("frequencies", c_void_p), ("half", c_int32), ("factor", c_float)]


class Architecture(ctypes.Structure):
    """`Architecture` of decoder.h."""

    _fields_ = [
        ("kind", c_int32),
        ("activation", c_int32),
        ("vocab", c_int32),
        ("hidden", c_int32),
        ("intermediate", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("layer_count", c_int32),
        ("rope_count", c_int32),
        ("norm_eps", c_float),
        ("scale", c_float),
        ("attention_softcap", c_float),
        ("logits_softcap", c_float),
        ("embedding_multiplier", c_float),
        ("residual_multiplier", c_float),
        ("logits_divisor", c_float),
        ("embedding", c_void_p),
        ("norm", c_void_p),
        ("head", Linear),
        ("layers", ctypes.POINTER(Layer)),
        ("ropes", ctypes.POINTER(Rope)),
    ]


class Pages(ctypes.Structure):
    """`Pages` of decoder.h."""

    _fields_ = [("key", c_void_p), ("value", c_void_p)]


class PrefillArguments(ctypes.Structure):
    """`PrefillArguments` of batch.h."""

    _fields_ = [
        ("rows", c_int64),
        ("query", c_int64),
        ("context", c_int64),
        ("tokens", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("context_blocks", c_void_p),
        ("context_lens", c_void_p),
    ]


class Following(ctypes.Structure):
    """`Following` of decoder.h."""

    _fields_ = [
        ("rows", c_int64),
        ("places", c_int64),
        ("last_rows", c_void_p),
        ("last_tokens", c_void_p),
        ("tokens", c_void_p),
        ("scores", c_void_p),
    ]


class DecodeArguments(ctypes.Structure):
    """`DecodeArguments` of batch.h."""

    _fields_ = [
        ("rows", c_int64),
        ("entries", c_int64),
        ("tokens", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("blocks", c_void_p),
        ("owners", c_void_p),
        ("starts", c_void_p),
    ]


def decode_arguments(
    tokens: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    blocks: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
) -> tuple[DecodeArguments, list[torch.Tensor]]:
    """Return arguments of a decode, and the tensors that they point into, to be kept during the call."""
    count, entries = tokens.shape[0], rows.shape[0]
    arguments = DecodeArguments(count, entries)
    listed = {"blocks": (blocks, entries)} if blocks.shape[0] else {}
    held = point_to(
        arguments,
        tokens=(tokens, count),
        positions=(positions, count),
        slots=(slots, count),
        owners=(rows, entries),
        starts=(starts, entries),
        **listed,
    )
    return arguments, held


def prefill_arguments(
    tokens: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    context_blocks: torch.Tensor,
    context_lens: torch.Tensor,
) -> tuple[PrefillArguments, list[torch.Tensor]]:
    """Return the arguments of a prefill, and the tensors that they point to."""
    batch, context = context_blocks.shape
    count = tokens.shape[0]
    arguments = PrefillArguments(batch, count // batch, context)
    held = point_to(
        arguments,
        tokens=(tokens, count),
        positions=(positions, count),
        slots=(slots, count),
        context_blocks=(context_blocks, batch * context),
        context_lens=(context_lens, batch),
    )
    return arguments, held


def point_to(arguments: Any, **tensors: tuple[torch.Tensor, int]) -> list[torch.Tensor]:
    """Set addresses of int64 tensors of so many numbers; return tensors to be kept during the call."""
    held = []
    for name, (tensor, count) in tensors.items():
        whole = whole_numbers(name, tensor, count)
        setattr(arguments, name, whole.data_ptr())
        held.append(whole)
    return held


def whole_numbers(name: str, tensor: torch.Tensor, count: int) -> torch.Tensor:
    """The tensor as the library reads it. Raises ValueError if it does not have so many numbers of int64."""
    if tensor.dtype is not torch.int64 or tensor.numel() != count:
        raise ValueError(f"{name} has {tensor.numel()} numbers of {tensor.dtype}, not {count} of int64")
    return tensor.contiguous()
