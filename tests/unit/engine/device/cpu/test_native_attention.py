"""The native attention gives what plain torch gives, for all shapes, and lets no token depend on another."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_testing.native.attention import NativeAttention, PagedCache, Span
from services.engine.device.cpu.native import open_library
from tests.support.native_kernels import LEVELS_HERE, library_of
from tests.support.reference_attention import AttentionCase, attention_case, reference_attention, slots_of

KINDS = (torch.float32, torch.bfloat16)
LENGTHS = st.lists(
    st.tuples(
        st.sampled_from((1, 1, 2, 5, 17, 70)),
        st.sampled_from((0, 1, 7, 31, 32, 127, 128, 129, 300)),
    ),
    min_size=1,
    max_size=4,
)
SHAPES = st.fixed_dictionaries(
    {
        "kv_heads": st.integers(1, 4),
        "group": st.sampled_from((1, 2, 3, 4, 7, 8, 16)),
        "head_dim": st.sampled_from((16, 24, 64, 72, 80, 96, 128, 256)),
        "block_size": st.sampled_from((1, 3, 8, 16, 32, 128, 256)),
    }
)
FEATURES = st.fixed_dictionaries(
    {
        "scale": st.sampled_from((0.05, 0.125, 0.2)),
        "window": st.sampled_from((0, 0, 1, 5, 64, 200)),
        "softcap": st.sampled_from((0.0, 0.0, 5.0, 30.0)),
    }
)


@pytest.fixture(scope="module", params=LEVELS_HERE)
def attention(request: pytest.FixtureRequest) -> NativeAttention:
    return NativeAttention(library_of(request.param))


@pytest.fixture(scope="module")
def best() -> NativeAttention:
    return NativeAttention(open_library())


def assert_like_reference(attention: NativeAttention, case: AttentionCase, **features: float) -> None:
    got = attention.attend(case.query, case.cache, case.spans, threads=2, **features)  # type: ignore[arg-type]
    if case.cache.key.dtype is torch.bfloat16 and attention.multiplies_pairs:
        # A weight is rounded by 2^-9 of itself at the most, and what its power of two is off by is less.
        expected = reference_attention(case, rounded=True, **features)  # type: ignore[arg-type]
        bound = 2.1e-3 * float(case.cache.value.nan_to_num().abs().max())
    else:
        expected = reference_attention(case, **features)  # type: ignore[arg-type]
        # Scores of 256 products are off by 2e-6 or so, and so are the weights, of themselves.
        bound = 5e-6 * float(case.cache.value.nan_to_num().abs().max())
    torch.testing.assert_close(got, expected, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", KINDS, ids=("float32", "bfloat16"))
def test_all_shapes_are_like_the_reference(attention: NativeAttention, dtype: torch.dtype) -> None:
    @settings(max_examples=60)
    @given(st.integers(0, 2**31), LENGTHS, SHAPES, FEATURES)
    def check(
        seed: int, lengths: list[tuple[int, int]], shape: dict[str, int], features: dict[str, float]
    ) -> None:
        assert_like_reference(attention, attention_case(seed, dtype, lengths, **shape), **features)

    check()


@pytest.mark.parametrize("dtype", KINDS, ids=("float32", "bfloat16"))
def test_a_token_depends_on_nothing_but_what_it_sees(attention: NativeAttention, dtype: torch.dtype) -> None:
    """Bit by bit: alone or in a batch, decoded or prefilled, on any number of threads."""
    case = attention_case(
        3, dtype, [(70, 200), (1, 900), (1, 0), (5, 126)], kv_heads=3, group=3, head_dim=64, block_size=16
    )
    features = {"scale": 0.125, "window": 150}
    together = attention.attend(case.query, case.cache, case.spans, **features)  # type: ignore[arg-type]
    for threads in (2, 16):
        torch.testing.assert_close(
            attention.attend(case.query, case.cache, case.spans, threads=threads, **features),  # type: ignore[arg-type]
            together,
            rtol=0,
            atol=0,
        )
    for span in case.spans:
        for i in range(0, span.tokens, 13):
            alone = [Span(span.first + i, 1, span.context + i, span.blocks)]
            got = attention.attend(case.query, case.cache, alone, **features)  # type: ignore[arg-type]
            assert torch.equal(got[:, span.first + i], together[:, span.first + i])


def test_what_many_threads_share_has_a_bound(attention: NativeAttention) -> None:
    """Sums of all chunks would take 100 GB here. Everyone sees itself alone, so it takes no time."""
    tokens, context, block_size = 360, 2**20, 1024
    keys, values = torch.randn(2, 1, block_size, 1, 256)
    cache = PagedCache(keys, values, block_size)
    blocks = (0,) * ((context + tokens) // block_size + 1)
    span = Span(0, tokens, context, blocks)
    got = attention.attend(torch.randn(tokens, 32, 256), cache, [span], scale=1.0, window=1, threads=64)
    expected = cache.value[0, :tokens].expand(tokens, 32, 256)
    torch.testing.assert_close(got[0], expected, rtol=0, atol=1e-6)


def test_contexts_are_divided_among_threads(attention: NativeAttention) -> None:
    case = attention_case(
        4, torch.float32, [(1, 2000), (3, 700)], kv_heads=1, group=4, head_dim=64, block_size=32, layers=2
    )
    whole = attention.attend(case.query, case.cache, case.spans, scale=0.125)
    divided = attention.attend(case.query, case.cache, case.spans, scale=0.125, threads=8)
    assert torch.equal(whole, divided)
    torch.testing.assert_close(divided, reference_attention(case, scale=0.125), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", KINDS, ids=("float32", "bfloat16"))
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_later_tokens_of_a_span_cannot_harm_earlier_ones(
    attention: NativeAttention, dtype: torch.dtype, poison: float
) -> None:
    case = attention_case(5, dtype, [(40, 100)], kv_heads=2, group=3, head_dim=80, block_size=16)
    clean = attention.attend(case.query, case.cache, case.spans, scale=0.1)
    poisoned = slots_of(case.spans[0].blocks, 16, 140)[125]
    for tensor in (case.cache.key, case.cache.value):
        tensor[:, poisoned] = poison
    got = attention.attend(case.query, case.cache, case.spans, scale=0.1)
    assert torch.equal(got[:, :25], clean[:, :25])
    # What does see it becomes no number, as it would elsewhere.
    assert got[:, 25:].isnan().all()


def test_blocks_before_the_window_may_be_anything(best: NativeAttention) -> None:
    case = attention_case(6, torch.bfloat16, [(20, 300)], kv_heads=1, group=2, head_dim=64, block_size=8)
    features = {"scale": 0.125, "window": 33}
    expected = best.attend(case.query, case.cache, case.spans, **features)  # type: ignore[arg-type]
    span = case.spans[0]
    # The first token looks back to position 268.
    forgotten = replace(span, blocks=[-(2**30)] * (268 // 8) + list(span.blocks[268 // 8 :]))
    got = best.attend(case.query, case.cache, [forgotten], **features)  # type: ignore[arg-type]
    assert torch.equal(got, expected)


def test_it_is_like_torchs_own(attention: NativeAttention) -> None:
    case = attention_case(7, torch.float32, [(150, 0)], kv_heads=3, group=3, head_dim=64, block_size=32)
    slots = slots_of(case.spans[0].blocks, 32, 150)
    key, value = (tensor[0, slots].transpose(0, 1) for tensor in (case.cache.key, case.cache.value))
    expected = torch.nn.functional.scaled_dot_product_attention(
        case.query.transpose(0, 1)[None], key[None], value[None], is_causal=True, enable_gqa=True
    )
    got = attention.attend(case.query, case.cache, case.spans, scale=0.125)
    torch.testing.assert_close(got[0], expected[0].transpose(0, 1), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "supported"),
    [
        (9, 3, 64, True),
        (9, 2, 64, False),
        (8, 8, 256, True),
        (8, 8, 264, False),
        (8, 8, 20, False),
        (2, 1, 8, True),
    ],
)
def test_what_is_supported(
    best: NativeAttention, heads: int, kv_heads: int, head_dim: int, supported: bool
) -> None:
    empty = torch.zeros(1, 4, kv_heads, head_dim)
    cache = PagedCache(empty, empty, block_size=4)
    assert best.supported(cache, heads) is supported
