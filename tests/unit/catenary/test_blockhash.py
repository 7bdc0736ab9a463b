"""Names of blocks of tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary.blockhash import DIGEST_BYTES, BlockHashes, chain

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_names_are_fixed_across_processes_and_machines() -> None:
    # A router may run another build on another machine: these may never change silently.
    first = chain(b"", [1, 2, 3, 4], salt=b"tenant")
    assert first.hex() == "3fde7155f2c8dc014e0becf402129b55"
    assert chain(first, [5, 6, 7, 8], salt=b"tenant").hex() == "920a19c91642213d99fcd8744de72fbd"
    assert len(first) == DIGEST_BYTES


@pytest.mark.advisory("CVE-2025-25183")
def test_every_part_of_a_block_tells() -> None:
    parent = chain(b"", [1, 2], salt=b"")
    names = [
        chain(b"", [1, 2], salt=b""),
        chain(b"", [2, 1], salt=b""),
        chain(b"", [1, 2], salt=b"a"),
        chain(b"", [1, 2], salt=b"b"),
        chain(b"", [1], salt=b""),
        chain(b"", [1, 2, 0], salt=b""),
        chain(parent, [1, 2], salt=b""),
        chain(parent, [1, 2], salt=b"a"),
        chain(parent, [], salt=b""),
    ]
    assert len(set(names)) == len(names)


def test_no_part_runs_into_the_next() -> None:
    word = (97).to_bytes(4, "little")
    names = {
        chain(b"", [97, 97], salt=b""),
        chain(b"", [97], salt=word),
        chain(b"", [], salt=word * 2),
        chain(word, [97], salt=b""),
        chain(word * 2, [], salt=b""),
        chain(word, [], salt=word),
    }
    assert len(names) == 6


@pytest.mark.parametrize("token", [-1, -2, 2**32])
def test_what_is_no_token_has_no_name(token: int) -> None:
    with pytest.raises(ValueError, match=r"0 \.\. 4294967295"):
        chain(b"", [1, token], salt=b"")


def test_a_block_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token, not 0"):
        BlockHashes(0)


@given(TOKENS, st.integers(1, 9), st.binary(max_size=5), st.data())
def test_pieces_give_the_names_of_the_whole(
    tokens: list[int], size: int, salt: bytes, data: st.DataObject
) -> None:
    hashes, made, start = BlockHashes(size, salt), list[bytes](), 0
    while start < len(tokens):
        end = data.draw(st.integers(start + 1, len(tokens)))
        new = hashes.extend(tokens[start:end])
        assert len(hashes.hashes) == end // size
        made += new
        start = end
    parent, expected = b"", list[bytes]()
    for i in range(0, len(tokens) - size + 1, size):
        parent = chain(parent, tokens[i : i + size], salt=salt)
        expected.append(parent)
    assert made == hashes.hashes == expected


@given(TOKENS, TOKENS, st.integers(1, 5))
def test_names_are_equal_exactly_as_far_as_the_tokens_are(a: list[int], b: list[int], size: int) -> None:
    ours, theirs = BlockHashes(size).extend(a), BlockHashes(size).extend(b)
    for i, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        assert (one == other) == (a[: (i + 1) * size] == b[: (i + 1) * size])
