"""What graphs take, against the logs and reports that the estimate is made of."""

from __future__ import annotations

import pytest

from catenary_apps.plan.planning import estimate_graphs
from services.engine.bucketing import Bucket, BucketPlan

MIB, GIB = 2**20, 2**30
# Of the published log: batches 1, 2 and 4 of 128 to 1,024 tokens, and 48 decode shapes.
PROMPTS = [Bucket(batch, 128 * step, 0) for batch in (1, 2, 4) for step in range(1, 9)]
DECODES = [Bucket(batch, 1, 128 * step) for batch in (1, 2, 4) for step in range(1, 17)]


def by_tokens(bucket: Bucket) -> tuple[int, int, int]:
    return bucket.batch * bucket.query, bucket.query, bucket.batch


def test_the_published_log_of_an_8b_model() -> None:
    """48 decode graphs took 161.9 MiB, 15 prefill graphs 14.03 GiB, and 72 graphs 49 s."""
    every = estimate_graphs(
        BucketPlan(PROMPTS, DECODES, 128), layers=32, hidden=4096, max_capture_tokens=4096, fp8=False
    )
    assert (every.prefill, every.decode, every.eager_prefills) == (24, 48, 0)
    assert every.cold_s.low == pytest.approx(49)
    # vLLM's rules: 10 MB for each; a user: 100 MiB for each.
    assert every.bytes.low == pytest.approx(161.9 * MIB + 24 * 10e6)
    assert every.bytes.high == pytest.approx(161.9 * MIB + 24 * 0.1 * GIB)
    fewest = BucketPlan(sorted(PROMPTS, key=by_tokens)[:15], DECODES, 128)
    some = estimate_graphs(fewest, layers=32, hidden=4096, max_capture_tokens=4096, fp8=False)
    assert some.kept_bytes - 161.9 * MIB == pytest.approx(14.03 * GIB)


def test_published_shares_of_a_recipe_cache_and_fp8() -> None:
    """66 s cold, 23 s cached in bfloat16; 504 s and 34 s in FP8."""

    def estimate(*, fp8: bool) -> tuple[float, float]:
        found = estimate_graphs(
            BucketPlan(PROMPTS, DECODES, 128), layers=32, hidden=4096, max_capture_tokens=4096, fp8=fp8
        )
        return found.cold_s.low, found.cached_s.low

    (cold, cached), (cold8, cached8) = estimate(fp8=False), estimate(fp8=True)
    assert cached / cold == pytest.approx(23 / 66)
    assert cold8 / cold == pytest.approx(504 / 66)
    assert cached8 / cached == pytest.approx(34 / 23)


def test_the_most_is_what_a_405b_model_took() -> None:
    """45 s a graph, 416 graphs."""
    buckets = [Bucket(1, 128 * step, 0) for step in range(1, 209)]
    decodes = [Bucket(1, 1, step) for step in range(1, 209)]
    found = estimate_graphs(
        BucketPlan(buckets, decodes, 128), layers=126, hidden=16_384, max_capture_tokens=1024, fp8=True
    )
    assert found.cold_s.high == pytest.approx(416 * 45)
    assert found.cold_s.low <= found.cold_s.high
    # Longer prefills are compiled, and not captured.
    assert (found.prefill, found.eager_prefills) == (8, 200)
