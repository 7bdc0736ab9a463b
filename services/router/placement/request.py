"""A request for placement, and the names of its blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import overload

from catenary.blockhash import BlockHashes
from catenary.v1 import common_pb2
from services.router.admission import sequences_of
from services.router.fleet import Engine

# Blocks that are named at once: a look-up that misses at the first block has not named them all.
_AHEAD = 16


class BlockNames(Sequence[bytes]):
    """The names of a prompt's full blocks, made as far as they are read and kept.

    Most look-ups end long before the prompt does, and a name costs about a microsecond.
    """

    def __init__(self, token_ids: Sequence[int], block_size: int, salt: bytes) -> None:
        self._token_ids = token_ids
        self._hashes = BlockHashes(block_size, salt)
        self._count = len(token_ids) // block_size

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        """A name, or the list of some."""
        wanted = range(self._count)[index]
        if isinstance(wanted, range):
            self._reach(max(wanted, default=-1) + 1)
            return [self._hashes.hashes[each] for each in wanted]
        self._reach(wanted + 1)
        return self._hashes.hashes[wanted]

    def __iter__(self) -> Iterator[bytes]:
        self._reach(self._count)
        return iter(self._hashes.hashes)

    def parts(self) -> Iterator[list[bytes]]:
        """The names in pieces, which are made when they are asked for."""
        made = self._hashes.hashes
        for start in range(0, self._count, _AHEAD):
            if len(made) <= start:
                self._reach(start + 1)
            yield made[start : start + _AHEAD]

    def _reach(self, count: int) -> None:
        """Make at least the first `count` names."""
        made = len(self._hashes.hashes)
        if made >= count:
            return
        size = self._hashes.block_size
        stop = min(self._count, -(-count // _AHEAD) * _AHEAD)
        self._hashes.extend(self._token_ids[made * size : stop * size])


class Half(Enum):
    """The part of a sequence that an engine computes: all of it, its prompt, or what follows the prompt."""

    WHOLE = 1
    PROMPT = 2
    REST = 3


@dataclass(slots=True, eq=False)
class PlacementRequest:
    """The facts that a policy may look at. One object for a sequence's life: blocks are named once.

    `token_ids`: the prompt's, `prompt_len` of them, and those that were emitted in an earlier life.
    `salt`: of the block names. `session_id`: empty for none. `sequences`: as how many it counts. `beside`:
    the engine that has the same prompt, if one has; the placer prefers that one if it can take the request,
    and does not ask the policy then. `alone`: only an engine without work will do. `kv_tokens`: that it needs
    room for; 0 for what keeps no KV. `queued_ms`: how long it has waited, for the receipt.
    """

    request_id: str
    model: str
    token_ids: Sequence[int]
    prompt_len: int
    salt: bytes = b""
    session_id: str = ""
    sequences: int = 1
    beside: Engine | None = None
    alone: bool = False
    kv_tokens: int = 0
    queued_ms: int = 0
    # Kept by the placer: how often it was placed, and what its engine is to compute as far as is known.
    placements: int = 0
    uncached_tokens: int = 0
    # What an engine is to compute of it if that can be had, and what the one does that it was placed on.
    half: Half = Half.WHOLE
    placed: Half = Half.WHOLE
    _names: dict[int, BlockNames] = field(default_factory=dict, init=False, repr=False)

    def names(self, block_size: int) -> BlockNames:
        """Names of the full blocks of `token_ids`, as an engine with this block size gives them."""
        names = self._names.get(block_size)
        if names is None:
            names = self._names[block_size] = BlockNames(self.token_ids, block_size, self.salt)
        return names


def placement_request(spec: common_pb2.SequenceSpec, *, alone: bool = False) -> PlacementRequest:
    """The request for placement of a valid sequence."""
    return PlacementRequest(
        request_id=spec.request_id,
        model=spec.model,
        token_ids=spec.token_ids,
        prompt_len=spec.prompt_len if spec.HasField("prompt_len") else len(spec.token_ids),
        salt=spec.cache_salt.encode(),
        session_id=spec.session_id,
        sequences=sequences_of(spec),
        alone=alone,
        # One more than it has: nothing can be generated without room for it.
        kv_tokens=0 if spec.HasField("pooling") else len(spec.token_ids) + 1,
    )
