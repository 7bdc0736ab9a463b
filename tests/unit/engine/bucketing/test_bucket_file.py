"""Bucket files: the grammar, nonsense, limits, and the coverage of what a file leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.bucketing import (
    Bucket,
    BucketLimits,
    build_plan,
    format_buckets,
    parse_buckets,
    plan_of,
    read_bucket_file,
)

LIMITS = BucketLimits(32, 1000, 8, 256, 100, max_prefill_seqs=2)


def test_the_grammar() -> None:
    text = """
    # prefill
    (1, [32, 64], range(0, 5, 2))   # a product
    2, 64, 3

    ([1, 2], 1, range(2, 4))
    (1, 1, 7)
    """
    assert parse_buckets(text) == tuple(
        sorted(
            [Bucket(1, query, context) for query in (32, 64) for context in (0, 2, 4)]
            + [Bucket(2, 64, 3), Bucket(1, 1, 7)]
            + [Bucket(batch, 1, blocks) for batch in (1, 2) for blocks in (2, 3)]
        )
    )


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("(1, 2)", r"expected \(batch, query, context_blocks\)"),
        ("(1, 2, 3, 4)", r"expected \(batch, query, context_blocks\)"),
        ("1", r"expected \(batch, query, context_blocks\)"),
        ("(1, 2, 3", r"expected \(batch, query, context_blocks\)"),
        ("buckets please", r"expected \(batch, query, context_blocks\)"),
        ("(1, 2\x00, 3)", r"expected \(batch, query, context_blocks\)"),
        ("(" * 500 + ")" * 500, r"expected \(batch, query, context_blocks\)"),
        ("(1, " + "9" * 5000 + ", 0)", r"expected \(batch|at most"),
        ("(0, 32, 0)", "batch must be at least 1, not 0"),
        ("(1, 0, 0)", "query must be at least 1, not 0"),
        ("(1, 32, -4)", "context_blocks must be at least 0, not -4"),
        ("(1, 32, [3, -1])", "context_blocks must be at least 0, not -1"),
        ("(1, 32, 9999999999)", "context_blocks must be at most"),
        ("(1, [], 0)", "query has no values"),
        ("(1, range(5, 5), 0)", "query has no values"),
        ("(1, range(1, 9, 0), 0)", "the range of query has a step of 0"),
        ("(1, range(1, 10002), 0)", "the range of query has more than 10000 elements"),
        ("(1, range(1, 10**12), 0)", "query must be an int, a list"),
        ("(1, range(1, 1000000000000), 0)", "more than 10000 elements"),
        ("(range(1, 9000), range(1, 9000), range(9000))", "more than 100000 buckets"),
        ("('1', 32, 0)", "batch must be an int, a list"),
        ("(True, 32, 0)", "batch must be an int, a list"),
        ("(1.5, 32, 0)", "batch must be an int, a list"),
        ("(x, 32, 0)", "batch must be an int, a list"),
        ("(1, [[32]], 0)", "query must be an int, a list"),
        ("(1, open('/etc/passwd'), 0)", "query must be an int, a list"),
        ("(1, range(stop=4), 0)", "query must be an int, a list"),
        ("(1, range(), 0)", "query must be an int, a list"),
        ("(1, 32, " + "1" * 11_000, "longer than 10000 characters"),
    ],
)
def test_nonsense_is_refused_with_its_line(line: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        parse_buckets(f"(1, 32, 0)\n\n{line}\n")
    assert str(caught.value).startswith("line 3: ")
    assert "\n" not in str(caught.value)


def test_a_range_of_ten_thousand_is_allowed() -> None:
    assert len(parse_buckets("(1, range(2, 10002), 0)")) == 10_000


def test_files_that_hold_nothing_of_use(tmp_path: Path) -> None:
    file = tmp_path / "buckets.txt"
    for content, reason in (
        (b"", "holds no buckets"),
        (b"# nothing\n\n", "holds no buckets"),
        (b"\x80\xff\x00\x01" * 50, "not text"),
        (b"(1, 32, 0)\n" * 200_000, "larger than 1048576 bytes"),
        (b"(1, 32, 0)\n(1, 0, 0)\n", "line 2: query must be at least 1, not 0"),
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=reason) as caught:
            build_plan("file", LIMITS, file=file)
        assert str(file) in str(caught.value)
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        read_bucket_file(tmp_path / "none.txt")
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        read_bucket_file(tmp_path)
    with pytest.raises(ValueError, match="needs a bucket file"):
        build_plan("file", LIMITS)


def test_buckets_beyond_the_limits_are_left_out_and_listed() -> None:
    beyond = [
        Bucket(1, 512, 0),  # more tokens than a step
        Bucket(2, 200, 0),  # with its rows as well
        Bucket(3, 32, 0),  # more rows than a prefill
        Bucket(1, 32, 33),  # more context than the model
        Bucket(9, 1, 20),  # more rows than may run
        Bucket(5, 1, 4),  # rows without a block
    ]
    plan = plan_of([Bucket(1, 256, 32), Bucket(8, 1, 100), *beyond], LIMITS)
    assert list(plan.omitted) == beyond
    assert plan.prefill == (Bucket(1, 256, 32),)
    assert plan.decode == (Bucket(8, 1, 100),)


def test_rows_have_no_more_blocks_than_their_longest() -> None:
    plan = plan_of([Bucket(1, 1, 64), Bucket(2, 1, 50)], LIMITS)
    assert plan.decode == (Bucket(1, 1, 32), Bucket(2, 1, 50), Bucket(8, 1, 100))


def test_what_a_file_leaves_out_is_one_last_bucket() -> None:
    plan = plan_of([Bucket(1, 64, 2), Bucket(2, 1, 40)], LIMITS)
    assert plan.prefill == (Bucket(1, 64, 2), Bucket(1, 256, 32))
    assert plan.decode == (Bucket(2, 1, 40), Bucket(8, 1, 100))
    shallow = plan_of([Bucket(1, 64, 32), Bucket(8, 1, 100)], LIMITS)
    assert shallow.prefill == (Bucket(1, 64, 32), Bucket(1, 256, 30))


def test_a_decode_corner_covers_the_most_rows_with_the_most_blocks() -> None:
    plan = plan_of([Bucket(1, 256, 32), Bucket(8, 1, 100), Bucket(6, 1, 180)], LIMITS)
    assert plan.decode_bucket(8, 180) == Bucket(8, 1, 180)


shapes = st.builds(
    Bucket, st.integers(1, 12), st.sampled_from([1, 1, 2, 32, 64, 100, 256, 300]), st.integers(0, 130)
)


@settings(max_examples=60, deadline=None)
@given(st.lists(shapes, min_size=1, max_size=20), st.integers(2, 1000), st.sampled_from([16, 33, 528]))
def test_any_file_is_completed_to_cover_every_step(
    buckets: list[Bucket], max_model_len: int, block_size: int
) -> None:
    limits = BucketLimits(block_size, max_model_len, 8, 256, 100, max_prefill_seqs=2)
    plan = plan_of(buckets, limits)
    for query in range(1, min(256, max_model_len - 1) + 1):
        found = plan.prefill_bucket(1, query, limits.context_before(query))
        assert found is not None
        assert found.covers(1, query, limits.context_before(query))
    for batch in range(1, plan.max_decode_batch + 1):
        most = min(plan.max_decode_blocks, batch * limits.blocks_per_sequence)
        for blocks in {batch, (batch + most) // 2, most}:
            if batch <= blocks <= most:
                assert plan.decode_bucket(batch, blocks) is not None
    assert plan.max_decode_batch >= min(limits.max_num_seqs, limits.max_distinct_decode_blocks)
    assert plan.max_decode_blocks >= limits.max_distinct_decode_blocks


@settings(max_examples=60, deadline=None)
@given(st.lists(shapes, min_size=1, max_size=30))
def test_a_written_file_reads_back(buckets: list[Bucket]) -> None:
    assert parse_buckets(format_buckets(buckets, ["made by a test"])) == tuple(sorted(set(buckets)))
