"""Names of a request's blocks, made as far as they are read."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from catenary.blockhash import BlockHashes
from services.router.placement import BlockNames, PlacementRequest

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=200)


@given(TOKENS, st.integers(1, 5), st.binary(max_size=4), st.data())
def test_they_are_the_engines_names_in_whatever_order_they_are_read(tokens, block_size, salt, data):
    expected = BlockHashes(block_size, salt)
    expected.extend(tokens)
    names = BlockNames(tokens, block_size, salt)
    assert len(names) == len(expected.hashes)
    if expected.hashes:
        index = data.draw(st.integers(-len(names), len(names) - 1))
        assert names[index] == expected.hashes[index]
        part = data.draw(st.slices(len(names)))
        assert names[part] == expected.hashes[part]
    assert [name for part in names.parts() for name in part] == expected.hashes
    assert list(names) == list(names) == expected.hashes


def test_a_look_that_ends_early_names_little(monkeypatch):
    named = []
    extend = BlockHashes.extend
    monkeypatch.setattr(BlockHashes, "extend", lambda self, ids: named.extend(ids) or extend(self, ids))
    names = BlockNames(range(16_000), 16, b"")
    assert next(names.parts())[0] == names[0]
    assert len(named) < 1000


def test_a_request_names_its_blocks_once_for_each_block_size():
    request = PlacementRequest("r", "m", range(64), 64, salt=b"s")
    assert request.names(16) is request.names(16)
    assert len(request.names(8)) == 8
    assert list(request.names(16)) != list(PlacementRequest("r", "m", range(64), 64).names(16))
