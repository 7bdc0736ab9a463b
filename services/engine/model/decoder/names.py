"""Names of checkpoint tensors, for all families at once: where each goes in our decoder."""

from __future__ import annotations

from services.engine.model.decoder.spec import DecoderSpec
from services.engine.model.loading import Rule

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
