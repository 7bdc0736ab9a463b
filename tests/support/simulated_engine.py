"""A device that only keeps books, and the reference that says what every sequence must come to."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from services.engine.bucketing import Bucket, BucketLimits, BucketPlan, build_plan
from services.engine.domain import FinishReason
from services.engine.kv import BlockPool
from services.engine.scheduler import SchedulerConfig, Sequence, SequenceParams, StepPlan

VOCABULARY = 50
STOP_ID = 7


@dataclass(frozen=True)
class Setup:
    """One engine: limits of the scheduler, its pool and its buckets, and how it is driven.

    `decode_maxima`: rows and blocks of the largest decode bucket. `overlapped`: steps are planned while the
    one before them is in flight. `alike`: the share of prompts that are one and the same. `forked`: the share
    of sequences that name another one with the same prompt. `beams`: the share of beam searches.
    """

    config: SchedulerConfig
    blocks: int
    block_size: int
    strategy: str = "exponential"
    decode_maxima: tuple[int, int] | None = None
    prefix_caching: bool = False
    overlapped: bool = False
    priorities: tuple[int, ...] = (0,)
    alike: float = 0.0
    forked: float = 0.2
    beams: float = 0.0

    def buckets(self) -> BucketPlan:
        plan = build_plan(
            self.strategy,
            BucketLimits(
                self.block_size,
                self.config.max_model_len,
                self.config.max_num_seqs,
                self.config.prompt_budget(0),
                self.blocks,
                self.config.max_prefill_seqs,
                self.config.contiguous,
            ),
        )
        if self.decode_maxima is None:
            return plan
        batch, blocks = self.decode_maxima
        decode = [Bucket(b, 1, c) for b in range(1, batch + 1) for c in range(1, blocks + 1)]
        return BucketPlan(plan.prefill, decode, self.block_size)


def first_state(salt: bytes) -> int:
    """The model's state before the first token."""
    return int.from_bytes(salt, "big") + 1


def next_state(state: int, token: int) -> int:
    """The model's state after a token."""
    # Python's hash of a tuple of ints is the same in every process.
    return hash((state, token))


def _sample(state: int, *, mask_stops: bool) -> int:
    token = state % VOCABULARY
    return token + 1 if mask_stops and token == STOP_ID else token


@dataclass(eq=False)
class Reference:
    """What a sequence must come to if nobody ends it.

    The model is a chain: each token's KV is a function of all tokens up to it, and so is the token sampled
    there. Any token that is counted twice, left out or read from a wrong place changes all that follows.
    `computed` and `length` are where the plans so far should have brought it.
    """

    sequence: Sequence
    limit: int
    tokens: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    reason: FinishReason = FinishReason.LENGTH
    computed: int = 0
    length: int = 0
    idle_decodes: int = 0
    idle_prefills: int = 0

    def __post_init__(self) -> None:
        params, prompt = self.sequence.params, self.sequence.prompt_len
        self.length = prompt
        state, self.tokens = first_state(self.sequence.cache_salt), list(self.sequence.token_ids)
        for token in self.tokens:
            state = next_state(state, token)
            self.states.append(state)
        while True:
            made = len(self.tokens) - prompt
            token = _sample(state, mask_stops=made < params.min_tokens)
            self.tokens.append(token)
            state = next_state(state, token)
            self.states.append(state)
            if token in params.stop_ids and made + 1 > params.min_tokens:
                self.reason = FinishReason.STOP
                return
            if made + 1 >= params.max_tokens or len(self.tokens) >= self.limit:
                return


class SimulatedDevice:
    """KV blocks that hold model states, and the last token of each row. Steps run in the order of launch."""

    def __init__(self, pool: BlockPool, rows: int) -> None:
        self._pool = pool
        self._size = pool.block_size
        self._kv: list[list[int]] = [[] for _ in range(pool.total)]
        self._last_tokens = [-1] * rows
        self._kept: Set[int] = frozenset()

    def launch(self, plan: StepPlan, references: dict[int, Reference], kept: Set[int]) -> dict[int, int]:
        """Computes a step from nothing but the plan and the KV. Returns the sampled tokens.

        `kept`: blocks of shared prompts, which have one more reference than those of the sequences.
        """
        self._kept = kept
        sources = [list(self._kv[move.source][: move.tokens]) for move in plan.moves]
        for move, contents in zip(plan.moves, sources, strict=True):
            self._kv[move.target] = contents
        fed = [
            self._last_tokens[row.sequence.row] if row.token is None else row.token for row in plan.decodes
        ]
        sampled: dict[int, int] = {}
        for chunk in plan.prefills:
            tokens = chunk.sequence.token_ids[chunk.start : chunk.end]
            state = self._compute(references[chunk.sequence.key], chunk.start, tokens)
            if chunk.samples:
                sampled[chunk.sequence.key] = _sample(state, mask_stops=chunk.mask_stops)
        for row, token in zip(plan.decodes, fed, strict=True):
            state = self._compute(references[row.sequence.key], row.position, [token])
            sampled[row.sequence.key] = _sample(state, mask_stops=row.mask_stops)
        assert list(sampled) == [sequence.key for sequence in plan.sampling()]
        for sequence in plan.sampling():
            self._last_tokens[sequence.row] = sampled[sequence.key]
        return sampled

    def _compute(self, reference: Reference, start: int, tokens: list[int]) -> int:
        """Reads the KV of all tokens before, as attention does, and writes that of the new ones."""
        size, table, states = self._size, reference.sequence.block_table, reference.states
        for index in range(-(-start // size)):
            first = index * size
            expected = states[first : min(first + size, start)]
            assert self._kv[table[index]][: len(expected)] == expected
        if start:
            state = self._kv[table[(start - 1) // size]][(start - 1) % size]
        else:
            state = first_state(reference.sequence.cache_salt)
        group = reference.sequence.group
        users = [reference.sequence] if group is None else group.members
        for position, token in enumerate(tokens, start):
            block, offset = table[position // size], position % size
            # Beams share the blocks that one of them fills, and none fills a slot that another has filled.
            sharers = sum(block in one.block_table for one in users)
            assert self._pool.references(block) == sharers + (block in self._kept)
            if not offset:
                self._kv[block] = []
            # What is there must be the sequence's own up to here: no slot is written twice.
            assert len(self._kv[block]) == offset
            state = next_state(state, token)
            assert state == states[position]
            self._kv[block].append(state)
        return state


def params(*, max_tokens: int, min_tokens: int = 0, stops: bool = False, priority: int = 0) -> SequenceParams:
    """Parameters of a simulated sequence; `stops`: STOP_ID ends it."""
    stop_ids = frozenset({STOP_ID} if stops else ())
    return SequenceParams(max_tokens, min_tokens, stop_ids, priority=priority)
