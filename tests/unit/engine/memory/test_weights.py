"""Bytes of weights from a config alone: published sizes, shares of cards, and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from services.engine.memory import (
    WeightScheme,
    active_parameters,
    count_weights,
    estimate_profile,
    heads_per_card,
    read_shape,
)
from tests.support.llama_config import LLAMA

QWEN = LLAMA | {
    "model_type": "qwen2",
    "num_hidden_layers": 48,
    "hidden_size": 5120,
    "num_attention_heads": 40,
    "intermediate_size": 13_824,
    "vocab_size": 152_064,
}


@pytest.mark.parametrize(
    ("config", "size"),
    [
        pytest.param(LLAMA, 16_060_522_496, id="Llama-3.1-8B"),
        pytest.param(
            LLAMA | {"model_type": "mistral", "vocab_size": 32_000}, 14_483_464_192, id="Mistral-7B"
        ),
        pytest.param(
            LLAMA
            | {
                "model_type": "mixtral",
                "vocab_size": 32_000,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
            },
            93_405_585_408,
            id="Mixtral-8x7B",
        ),
        pytest.param(
            QWEN
            | {
                "num_hidden_layers": 28,
                "hidden_size": 3584,
                "num_attention_heads": 28,
                "num_key_value_heads": 4,
                "intermediate_size": 18_944,
            },
            15_231_233_024,
            id="Qwen2.5-7B",
        ),
        pytest.param(QWEN, 29_540_067_328, id="Qwen2.5-14B"),
        pytest.param(
            QWEN | {"num_hidden_layers": 64, "intermediate_size": 27_648}, 65_527_752_704, id="Qwen2.5-32B"
        ),
    ],
)
def test_published_sizes_in_bfloat16(config: dict[str, Any], size: int) -> None:
    assert count_weights(read_shape(config, "m")).bytes(WeightScheme.BFLOAT16) == size


def test_a_card_holds_its_share_and_a_copy_of_what_is_not_split() -> None:
    shape = read_shape(LLAMA, "m")
    whole, half = count_weights(shape), count_weights(shape, 2)
    assert half.attention == whole.attention // 2
    assert half.mlp == whole.mlp // 2
    assert half.embedding == whole.embedding // 2
    assert half.small == whole.small
    # 16 cards: 8 KV heads are kept twice, so each card has one and not half of one.
    assert heads_per_card(shape, 16) == (2, 1)
    assert count_weights(shape, 16).attention > whole.attention // 16


@pytest.mark.parametrize(
    ("cards", "words"),
    [
        (3, "tensor-parallel-size 3 does not divide the 32 heads of m: choose one of 1, 2, 4, 8, 16, 32"),
        (6, "does not divide the 32 heads"),
    ],
)
def test_cards_that_do_not_divide_the_heads_are_refused(cards: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        count_weights(read_shape(LLAMA, "m"), cards)
    odd = read_shape(LLAMA | {"num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128}, "m")
    with pytest.raises(ValueError, match="the 8 KV heads of m do not divide each other"):
        heads_per_card(odd, 12)


def test_schemes_shrink_linear_layers_alone() -> None:
    count = count_weights(read_shape(LLAMA, "m"))
    linear, rest = count.attention + count.mlp, count.embedding + count.small
    assert count.bytes(WeightScheme.FP8) == linear + 2 * rest
    # 4 bits, and a 16 bit scale and a 4 bit zero point for 128 weights.
    assert count.bytes(WeightScheme.INT4) == linear * 532 // 1024 + 2 * rest
    assert count.bytes(WeightScheme.FLOAT32) == 2 * count.bytes(WeightScheme.BFLOAT16)


def test_a_token_passes_the_chosen_experts_alone() -> None:
    config = LLAMA | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    shape = read_shape(config, "m")
    experts = count_weights(shape).experts
    everything = active_parameters(read_shape(config | {"num_experts_per_tok": 8}, "m"))
    assert everything - active_parameters(shape) == experts * 6 // 8


def test_configs_of_several_kinds_are_read() -> None:
    nested = read_shape({"model_type": "some_vl", "text_config": LLAMA}, "m")
    assert (nested.layers, nested.kv_values_per_token) == (32, 32 * 2 * 8 * 128)
    hybrid = read_shape(LLAMA | {"layer_types": ["linear_attention", "full_attention"] * 16}, "m")
    assert hybrid.recurrent
    assert not read_shape(
        LLAMA | {"layer_types": ["sliding_attention", "full_attention"] * 16}, "m"
    ).recurrent
    assert read_shape(LLAMA | {"quantization_config": {"quant_method": "fp8"}}, "m").quantized
    assert read_shape(LLAMA | {"torch_dtype": "float16"}, "m").float16
    with pytest.raises(ValueError, match="the config of m names no vocab_size"):
        read_shape({name: value for name, value in LLAMA.items() if name != "vocab_size"}, "m")


def test_a_profile_run_of_4_prompts_of_1024_tokens_takes_340_mib() -> None:
    """Published: 355 MiB, of which these are the MLP's 336 and the head's 4."""
    size = estimate_profile(tokens=4096, rows=4, mlp_width=14_336, hidden=4096, vocab=128_256, item_size=2)
    assert round(size / 2**20) == 340
