"""A decoder's sizes by its config.json, and the bytes of weights that each card holds. Reads no weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

# Families whose config names no tie_word_embeddings when the head is the embedding.
_TIED: Final = frozenset(
    {"gemma", "gemma2", "gemma3_text", "gpt2", "gpt_bigcode", "opt", "starcoder2", "cohere", "cohere2"}
)
_UNGATED: Final = frozenset({"gpt2", "gpt_bigcode", "opt", "starcoder2", "phi", "gpt_neox", "gptj", "falcon"})
_QUERY_BIAS: Final = frozenset({"qwen2", "qwen2_moe", "gpt_oss"})
_HEAD_NORMS: Final = frozenset({"qwen3", "qwen3_moe", "gemma3_text"})
_ROUTER_BIAS: Final = frozenset({"deepseek_v3", "glm4_moe", "gpt_oss", "ernie4_5_moe"})
# Where a checkpoint says how its weights are packed, and under which names the bits of a weight.
_PACKINGS: Final = ("quantization_config", "compression_config", "quantization")
_BITS: Final = ("bits", "weight_bits", "w_bit", "num_bits")
# Methods and algorithms whose names say it.
_NAMED_BITS: Final = {"mxfp4": 4, "nvfp4": 4, "w4a": 4, "mxfp8": 8, "fp8": 8, "int8": 8, "int4": 4}
# No model comes near these: larger numbers are mistakes, and loops run over the parts.
_MOST: Final = 2**40
_MOST_PARTS: Final = 65_536
_FOUR_NORMS: Final = frozenset({"gemma2", "gemma3_text", "glm4"})


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Ranks of attention over compressed keys and values; `query_rank` None: queries are not compressed."""

    query_rank: int | None
    kv_rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a checkpoint packs its linear layers. `bits` of a weight, None if the config does not say;
    `floating`: they are floating point numbers, as FP8 is."""

    method: str
    bits: int | None
    floating: bool


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder. `inner` is a dense MLP's width, `expert_inner` one expert's.

    `max_position` None: the config names no limit. `dense_layers`: those without experts. `recurrent`: some
    layers keep a state that is not in KV blocks. `quantization`: the checkpoint's own, if it has one.
    """

    name: str
    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    max_position: int | None
    float32: bool
    float16: bool
    tied: bool
    gated: bool
    query_bias: bool
    output_bias: bool
    head_norms: bool
    norms_each: int
    experts: int
    experts_chosen: int
    expert_inner: int
    shared_inner: int
    shared_gate: bool
    router_bias: bool
    dense_layers: int
    latent: LatentAttention | None
    recurrent: bool
    quantization: Quantization | None

    @property
    def quantized(self) -> bool:
        """True if the checkpoint's weights are."""
        return self.quantization is not None

    @property
    def kv_values_per_token(self) -> int:
        """Key and value elements of one token over all layers."""
        return self.layers * self.kv_values_of(self.kv_heads, self.heads)

    def kv_values_of(self, kv_heads: int, heads: int) -> int:
        """Key and value elements of one token in one layer with so many heads. Latent KV is kept expanded."""
        if self.latent is not None:
            return heads * (self.latent.plain_dim + self.latent.rotary_dim + self.latent.value_dim)
        return 2 * kv_heads * self.head_dim


def read_shape(config: Mapping[str, Any], name: str) -> ModelShape:
    """The sizes in a parsed config. Raises ValueError, one line, for one without them or with nonsense.

    An absent size, null, and 0 of something optional (as experts) are the same.
    """
    inside = config.get("text_config")
    text: Mapping[str, Any] = inside if isinstance(inside, dict) else config
    number = _Numbers(text, name)
    kind = str(text.get("model_type") or config.get("model_type") or "")
    layers, hidden = number("num_hidden_layers", "n_layer", most=_MOST_PARTS), number("hidden_size", "n_embd")
    heads = number("num_attention_heads", "n_head", most=_MOST_PARTS)
    kv_heads = number(
        "num_key_value_heads", default=1 if text.get("multi_query") else heads, most=_MOST_PARTS
    )
    if heads % kv_heads:
        raise ValueError(f"the config of {name} has {kv_heads} KV heads that do not divide its {heads} heads")
    inner = number("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
    experts = number("num_local_experts", "num_experts", "n_routed_experts", default=0, most=_MOST_PARTS)
    expert_inner = number("moe_intermediate_size", default=inner)
    dtype = str(
        text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    )
    bias = bool(text.get("attention_bias"))
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", kind in _TIED))
    all_biased = kind in _UNGATED and text.get("use_bias", True) is not False
    return ModelShape(
        name=name,
        model_type=kind,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=number("head_dim", default=max(1, hidden // heads)),
        inner=inner,
        vocab=number("vocab_size"),
        max_position=number("max_position_embeddings", "n_positions", default=0) or None,
        float32=dtype.endswith("float32"),
        float16=dtype.endswith("float16") and not dtype.endswith("bfloat16"),
        tied=bool(tied),
        gated=kind not in _UNGATED,
        query_bias=bias or kind in _QUERY_BIAS or all_biased or bool(text.get("qkv_bias")),
        output_bias=(bias and kind not in ("qwen3", "qwen3_moe")) or all_biased or kind == "gpt_oss",
        head_norms=kind in _HEAD_NORMS,
        norms_each=4 if kind in _FOUR_NORMS else 2,
        experts=experts,
        experts_chosen=number("num_experts_per_tok", default=1, most=experts) if experts else 0,
        expert_inner=expert_inner,
        shared_inner=number("shared_expert_intermediate_size", default=0)
        or number("n_shared_experts", default=0) * expert_inner,
        shared_gate="shared_expert_intermediate_size" in text,
        router_bias=kind in _ROUTER_BIAS,
        dense_layers=_dense_layers(text, layers) if experts else layers,
        latent=_latent(number) if "kv_lora_rank" in text else None,
        recurrent=_is_recurrent(text),
        quantization=_quantization(config, text),
    )


class _Numbers:
    """The integers of a config. `name`: the model's, for errors."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self._config = config
        self._name = name

    def __call__(self, *names: str, default: int | None = None, most: int = _MOST) -> int:
        """The one under the first of `names` that is there, from 1 to `most`, or
        `default`. Raises ValueError."""
        for key in names:
            value = self._config.get(key)
            if value is None or (value == 0 and default is not None):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
                raise ValueError(
                    f"the config of {self._name} has {key} {_short(value)}, which must be an integer, "
                    f"1 to {most}"
                )
            return value
        if default is None:
            raise ValueError(f"the config of {self._name} names no {names[0]}")
        return default


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _latent(number: _Numbers) -> LatentAttention:
    return LatentAttention(
        query_rank=number("q_lora_rank", default=0) or None,
        kv_rank=number("kv_lora_rank"),
        plain_dim=number("qk_nope_head_dim"),
        rotary_dim=number("qk_rope_head_dim"),
        value_dim=number("v_head_dim"),
    )


def _quantization(config: Mapping[str, Any], text: Mapping[str, Any]) -> Quantization | None:
    """Return the config's entry on packed weights, or that of its text part."""
    packed = next((part[key] for part in (config, text) for key in _PACKINGS if part.get(key)), None)
    if packed is None:
        return None
    block: Mapping[str, Any] = packed if isinstance(packed, dict) else {}
    method = str(block.get("quant_method") or block.get("quant_algo") or "unknown")[:40]
    weights = _first_group(block) or block
    given = [weights.get(key) for key in _BITS]
    bits = next((value for value in given if type(value) is int and 1 <= value <= 16), None)
    words = " ".join(str(block.get(key) or "") for key in ("quant_method", "quant_algo", "format")).lower()
    if bits is None:
        bits = next((count for name, count in _NAMED_BITS.items() if name in words), None)
    if bits is None:
        bits = 4 if block.get("load_in_4bit") else 8 if block.get("load_in_8bit") else None
    kind = str(weights.get("type") or "")
    return Quantization(method, bits, kind.startswith("float") or "fp" in words or "float" in words)


def _first_group(block: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """How compressed-tensors packs the weights of its first group of layers."""
    groups = block.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            return weights
    return None


def _dense_layers(text: Mapping[str, Any], layers: int) -> int:
    first = text.get("first_k_dense_replace")
    if isinstance(first, int):
        return min(first, layers)
    step, alone = text.get("decoder_sparse_step"), text.get("mlp_only_layers")
    step = step if isinstance(step, int) and step > 0 else 1
    listed = {index for index in alone if isinstance(index, int)} if isinstance(alone, list) else set()
    return sum(index in listed or (index + 1) % step != 0 for index in range(layers))


def _is_recurrent(text: Mapping[str, Any]) -> bool:
    kinds = text.get("layer_types")
    named = kinds if isinstance(kinds, list) else []
    return any("linear" in str(kind) or "mamba" in str(kind) for kind in named) or any(
        key.startswith(("mamba_", "ssm_", "linear_num_")) for key in text
    )


# INT4 keeps a 16 bit scale and a 4 bit zero point for each group of so many weights.
_GROUP: Final = 128
_GROUP_BITS: Final = 16 + 4


class WeightScheme(Enum):
    """How the weights of linear layers are kept. Embedding, head, router and norms stay in 16 or 32 bits."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"

    def linear_bytes(self, parameters: int) -> int:
        """Return the bytes of linear layers with so many weights, scales included."""
        match self:
            case WeightScheme.FLOAT32:
                return 4 * parameters
            case WeightScheme.FP8 | WeightScheme.INT8:
                return parameters
            case WeightScheme.INT4:
                return -(-parameters * (4 * _GROUP + _GROUP_BITS) // (8 * _GROUP))
            case _:
                return 2 * parameters

    @property
    def other_size(self) -> int:
        """Bytes of an element of everything else."""
        return 4 if self is WeightScheme.FLOAT32 else 2


@dataclass(frozen=True, slots=True)
class WeightCount:
    """Parameters on one card. `embedding`: with the head; `small`: norms, biases and routers."""

    attention: int
    mlp: int
    experts: int
    embedding: int
    small: int

    @property
    def total(self) -> int:
        """All parameters of the card."""
        return self.attention + self.mlp + self.experts + self.embedding + self.small

    def bytes(self, scheme: WeightScheme) -> int:
        """Return the bytes of the card's weights."""
        linear = scheme.linear_bytes(self.attention + self.mlp + self.experts)
        return linear + scheme.other_size * (self.embedding + self.small)


def stored_scheme(shape: ModelShape) -> WeightScheme:
    """How the checkpoint keeps linear layers: of packed ones, the next that has as many bits.

    Of packed ones that do not say their bits, bfloat16, which is never too little.
    """
    packed = shape.quantization
    if packed is None:
        return WeightScheme.FLOAT32 if shape.float32 else WeightScheme.BFLOAT16
    if packed.bits is None or packed.bits > 8:
        return WeightScheme.BFLOAT16
    if packed.bits <= 4:
        return WeightScheme.INT4
    return WeightScheme.FP8 if packed.floating else WeightScheme.INT8


def heads_per_card(shape: ModelShape, cards: int) -> tuple[int, int]:
    """Query heads and KV heads of each card; where there are fewer KV heads than cards, some are kept twice.

    Raises ValueError, one line, for a tensor-parallel size that does not divide the heads.
    """
    if shape.heads % cards:
        fitting = ", ".join(str(size) for size in range(1, shape.heads + 1) if shape.heads % size == 0)
        raise ValueError(
            f"tensor-parallel-size {cards} does not divide the {shape.heads} heads of {shape.name}: "
            f"choose one of {fitting}"
        )
    if shape.kv_heads % cards and cards % shape.kv_heads:
        raise ValueError(
            f"tensor-parallel-size {cards} and the {shape.kv_heads} KV heads of {shape.name} do not divide "
            "each other: choose a power of two"
        )
    return shape.heads // cards, max(1, shape.kv_heads // cards)


def count_weights(shape: ModelShape, cards: int = 1) -> WeightCount:
    """Return the parameters on each of so many cards. Raises ValueError as `heads_per_card` does."""
    heads, kv_heads = heads_per_card(shape, cards)
    hidden, layers, sparse = shape.hidden, shape.layers, shape.layers - shape.dense_layers
    matrices = 3 if shape.gated else 2
    attention, attention_small = _attention(shape, heads, kv_heads)
    mlp = shape.dense_layers * matrices * hidden * -(-shape.inner // cards)
    mlp += sparse * 3 * hidden * -(-shape.shared_inner // cards)
    experts = sparse * shape.experts * 3 * hidden * -(-shape.expert_inner // cards)
    # Each expert has a row of the router, and a bias where the choice is corrected.
    router = shape.experts * (hidden + shape.router_bias) + (hidden if shape.shared_gate else 0)
    small = layers * (attention_small + shape.norms_each * hidden) + hidden + sparse * router
    embedding = -(-shape.vocab // cards) * hidden * (1 if shape.tied else 2)
    return WeightCount(layers * attention, mlp, experts, embedding, small)


def active_parameters(shape: ModelShape) -> int:
    """Return the parameters that one token passes: chosen experts alone, and the head, not the embedding."""
    count = count_weights(shape)
    chosen = count.experts * shape.experts_chosen // shape.experts if shape.experts else 0
    return count.attention + count.mlp + chosen + count.small + shape.vocab * shape.hidden


def _attention(shape: ModelShape, heads: int, kv_heads: int) -> tuple[int, int]:
    """Return the matrices and small parameters of one layer's attention."""
    hidden, dim = shape.hidden, shape.head_dim
    if shape.latent is not None:
        latent = shape.latent
        query_dim = latent.plain_dim + latent.rotary_dim
        first = hidden * (latent.kv_rank + latent.rotary_dim)
        query = (latent.query_rank or hidden) * heads * query_dim + (latent.query_rank or 0) * hidden
        second = latent.kv_rank * heads * (latent.plain_dim + latent.value_dim)
        return first + query + second + heads * latent.value_dim * hidden, latent.kv_rank + (
            latent.query_rank or 0
        )
    matrices = hidden * (heads + 2 * kv_heads) * dim + heads * dim * hidden
    small = (heads + 2 * kv_heads) * dim if shape.query_bias else 0
    small += hidden if shape.output_bias else 0
    return matrices, small + (2 * dim if shape.head_norms else 0)
