"""The rules by which vLLM's container sizes itself, against cases worked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from catenary_apps.plan.autocalc import AutocalcInputs, autocalc

# Llama 3.1 8B on a card of 128 GB, as the container's own table has it.
EIGHT = AutocalcInputs(
    device_gib=128, weights_gib=14.95752716, layers=32, head_dim=128, kv_heads=8, max_model_len=4352
)
SEVENTY = AutocalcInputs(
    device_gib=128,
    weights_gib=131.4165192,
    layers=80,
    head_dim=128,
    kv_heads=8,
    max_model_len=4352,
    tensor_parallel_size=4,
    free_target_gib=5,
    graph_mb=20,
)


def test_an_8b_model_by_hand() -> None:
    found = autocalc(EIGHT)
    # 128 - 2 - 14.9575; 1 - 9 / 111.0425 = 0.9189 down to hundredths.
    assert found.usable_gib == pytest.approx(111.0425, abs=1e-3)
    assert found.gpu_memory_utilization == 0.91
    # 2 * 4352 * 32 * 128 * 8 * 2 bytes.
    assert found.kv_per_sequence_gib == 0.53125
    # 190.2 sequences, 6,467 blocks. Rows: 1 .. 32 are 6, then 5 steps; blocks: 128, 256, then 25 steps.
    assert found.decode_graphs == (6 + 5) * (2 + 25)
    # One row; lengths 128 and 256, then 8 steps to 2,048; contexts between 18 and 33 blocks.
    assert found.prompt_graphs == 1 * (2 + 8) * (33 + 18) / 2
    assert found.graph_prompt_ratio == pytest.approx(255 / (255 + 297))
    # 297 graphs of 10 MB are 2.91 GB; 2.91 / (111.04 * 0.91 * 0.538) = 0.0535, up to hundredths.
    assert found.graph_reserved_mem == 0.06
    assert found.kv_gib == pytest.approx(111.0425 * 0.91 * 0.94, abs=1e-3)
    # 178.8 sequences, down to a multiple of 32.
    assert found.max_num_seqs == 160
    assert found.decode_block_max == 160 * 4352 // 128


def test_a_70b_model_on_4_cards_by_hand() -> None:
    found = autocalc(SEVENTY)
    # 128 - 2 - 131.4165 / 4; 1 - 5 / 93.1459 = 0.9463.
    assert found.usable_gib == pytest.approx(93.1459, abs=1e-3)
    assert found.gpu_memory_utilization == 0.94
    assert found.kv_per_sequence_gib == pytest.approx(1.328125)
    # 4 * 93.1459 * 0.94 / 1.328125 = 263.7 sequences: 6 + 8; 8,966 blocks: 2 + 35.
    assert found.decode_graphs == 14 * 37
    # 518 * 20 / 1024 = 10.12 up; prompt share 255 / 773; 10.12 / (87.557 * 0.670) = 0.1725.
    assert found.graph_reserved_mem == 0.18
    # 4 * 93.1459 * 0.94 * 0.82 / 1.328125 = 216.2.
    assert found.max_num_seqs == 192
    assert autocalc(replace(SEVENTY, lazy=False)).graph_reserved_mem == 0.1


def test_exponential_counts_bits() -> None:
    found = autocalc(replace(EIGHT, exponential=True, contiguous=False, max_prefill_batch=4))
    # 190.2 sequences have 8 bits, 6,467 blocks 13: 9 * 14, of which a gathered batch fills half.
    assert found.decode_graphs == 9 * 14 / 2
    # Rows 1 + 2, lengths 1 + 11, half of them within a step's tokens; contexts 6 and 5 bits.
    assert found.prompt_graphs == (3 * 12 / 2) * (6 + 5) / 2


def test_rows_of_prompts_and_long_models_weigh_more() -> None:
    several = autocalc(replace(EIGHT, max_prefill_batch=64))
    # Rows 1 .. 32 are 6, then 2 steps to 64; with several rows half of the shapes exceed a step's tokens.
    assert several.prompt_graphs == (6 + 2) * 10 / 2 * 25.5
    four = autocalc(replace(EIGHT, max_prefill_batch=4))
    assert four.prompt_graphs == 3 * 10 / 2 * 25.5
    longer = autocalc(replace(EIGHT, max_model_len=8704))
    plain = longer.prompt_graphs / (longer.prompt_graphs + longer.decode_graphs)
    assert longer.graph_prompt_ratio > plain


def test_few_sequences_are_a_power_of_two() -> None:
    # Half of 101.05 GB, since graphs take the most that they may, hold 3.2 sequences of 16.
    assert autocalc(replace(EIGHT, max_model_len=131_072)).max_num_seqs == 2
    # Half of 40.89 GB hold 7.7 of 2.66.
    assert autocalc(replace(EIGHT, device_gib=60, free_target_gib=2, max_model_len=21_760)).max_num_seqs == 4
    assert autocalc(replace(EIGHT, max_model_len=100)).decode_block_max > 128


def test_no_room_is_refused() -> None:
    with pytest.raises(ValueError, match=r"leave 3\.04 GiB beside the weights and want 9 of them free"):
        autocalc(replace(EIGHT, device_gib=20))
    with pytest.raises(ValueError, match="leave no KV for one sequence"):
        autocalc(replace(EIGHT, device_gib=30, max_model_len=131_072))
