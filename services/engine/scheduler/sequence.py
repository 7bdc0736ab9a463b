"""Sequences, whose status changes here alone; the plan of a step over them, and its outcomes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final, TypeAlias

from msgspec import Struct

from catenary.blockhash import BlockHashes
from services.engine.bucketing import Bucket
from services.engine.domain import CoreErrorCode, FinishReason, SamplingOptions
from services.engine.kv import BlockMove

if TYPE_CHECKING:
    from services.engine.link import SubmitSequence


class QueueFull(Exception):
    """The scheduler holds as many sequences as it may. `limit` names the option that sets the bound."""

    def __init__(self, limit: str, value: int) -> None:
        super().__init__(f"the engine's queue is full ({limit}={value})")
        self.limit = limit
        self.value = value


class SequenceRefused(Exception):
    """A sequence that can never run here. The text is for the caller, `param` the parameter it is about."""

    def __init__(self, code: CoreErrorCode, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


class SchedulerError(Exception):
    """Defect: the scheduler was driven wrongly, or its books do not add up."""


class SequenceStatus(Enum):
    """Status of a sequence. PREEMPTED: waits again, with its generated tokens and without blocks."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


_TRANSITIONS: Final = {
    SequenceStatus.WAITING: frozenset({SequenceStatus.RUNNING, SequenceStatus.FINISHED}),
    SequenceStatus.RUNNING: frozenset({SequenceStatus.PREEMPTED, SequenceStatus.FINISHED}),
    SequenceStatus.PREEMPTED: frozenset({SequenceStatus.RUNNING, SequenceStatus.FINISHED}),
    SequenceStatus.FINISHED: frozenset[SequenceStatus](),
}


class IllegalTransition(Exception):
    """Defect: a sequence was moved to a status that its present one does not lead to."""


@dataclass(frozen=True, slots=True)
class SequenceParams:
    """Sampling of a sequence, and the conditions of its end.

    `max_tokens` and `min_tokens` count generated tokens from the end of the prompt. `stop_ids` are all ids
    that end it: the caller's and, unless it ignores them, the model's own. A lower `priority` is more urgent.
    """

    max_tokens: int
    min_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    priority: int = 0


@dataclass(eq=False, slots=True)
class Sequence:
    """State of one sequence.

    `token_ids` holds the prompt and all generated tokens. KV of its first `num_computed_tokens` tokens is
    written by the steps planned so far, in the blocks of `block_table` in order; `num_cached_tokens` of them
    came from a cache. Plans that are not committed yet will add `num_pending` tokens: 0 or 1 when a step is
    planned, and one more until the earlier of two is committed. While it runs, `row` is its index among those
    that run, for buffers on the device. Cached KV is shared only between sequences of one `cache_salt`.
    `prompt_computed`: steps that are committed have computed all of its prompt into its own blocks.
    `num_transferred_tokens` of its prompt were computed by another engine. `hands_over`: its blocks are kept
    when it has ended well. `constrained`: what may follow is told by masks, which know `params.stop_ids` too.
    `group`: it is a beam of a search, or waits to be one. `shares_last`: it must not write to its last block.

    `highest_block` is the highest id in `block_table`, -1 if that is empty.
    `num_scored_tokens` counts the prompt's first token, which has no log probability, and those of which it
    was reported.

    The scheduler's own: it ends by a stop id only beyond the length `shortest`, and always at `longest`;
    `order` and `turn` are the keys by which it is served (see `settings`); `last_decode_step` is the last
    split step that decoded it; `hashes` name its first blocks for the prefix cache, as far as needed yet.
    """

    key: int
    token_ids: list[int]
    prompt_len: int
    params: SequenceParams
    cache_salt: bytes = b""
    constrained: bool = False
    hands_over: bool = False
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_transferred_tokens: int = 0
    num_scored_tokens: int = 1
    num_pending: int = 0
    num_preemptions: int = 0
    prompt_computed: bool = False
    group: BeamGroup | None = None
    shares_last: bool = False
    block_table: list[int] = field(default_factory=list)
    highest_block: int = -1
    row: int = -1
    shortest: int = 0
    longest: int = 0
    order: tuple[int, int] = (0, 0)
    turn: tuple[int, int] = (0, 0)
    last_decode_step: int = 0
    hashes: BlockHashes | None = None
    status: SequenceStatus = field(default=SequenceStatus.WAITING, init=False)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens after the prompt, those before a preemption or resumption included, pending ones not."""
        return len(self.token_ids) - self.prompt_len

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens, the pending ones included, whose KV no plan writes yet. A decoding sequence has one."""
        return len(self.token_ids) + self.num_pending - self.num_computed_tokens

    def masks_stops(self, index: int) -> bool:
        """Return True if the token at this index of the sequence may not be one of `params.stop_ids`."""
        return index < self.shortest

    @property
    def finished(self) -> bool:
        """True once the sequence has ended for whatever reason."""
        return self.status is SequenceStatus.FINISHED

    def run(self, block_table: list[int], computed: int = 0) -> None:
        """Start to run with these blocks, which hold KV of the first `computed` tokens already."""
        self._set_status(SequenceStatus.RUNNING)
        self.set_blocks(block_table)
        self.num_computed_tokens = computed

    def set_blocks(self, block_table: list[int]) -> None:
        """Replace the block table."""
        self.block_table = block_table
        self.highest_block = max(block_table, default=-1)

    def add_block(self, block: int) -> None:
        """Append a block."""
        self.block_table.append(block)
        if block > self.highest_block:
            self.highest_block = block

    def own_last(self, block: int) -> int:
        """Put an own block in the place of the last one, which is shared. Return that, to free."""
        shared = self.block_table[-1]
        self.set_blocks([*self.block_table[:-1], block])
        self.shares_last = False
        return shared

    def follow(self, parent: Sequence, block_size: int) -> list[int]:
        """Become a copy of another beam that shares its blocks. Return the own blocks, to free."""
        blocks = self.rest()
        self.token_ids = list(parent.token_ids)
        self.num_computed_tokens = parent.num_computed_tokens
        self.set_blocks(list(parent.block_table))
        self.shares_last = self.num_computed_tokens % block_size > 0
        return blocks

    def rest(self) -> list[int]:
        """Stop to be a beam. Return the blocks, to free."""
        self.token_ids = []
        self.hashes = None
        self.num_computed_tokens = 0
        return self._give_up_blocks()

    def preempt(self) -> list[int]:
        """Stop to run; the KV is to be computed again. Return the blocks, to free."""
        self._set_status(SequenceStatus.PREEMPTED)
        self.num_preemptions += 1
        self.num_computed_tokens = 0
        self.prompt_computed = False
        return self._give_up_blocks()

    def finish(self) -> list[int]:
        """End for good. Return the blocks, to free."""
        self._set_status(SequenceStatus.FINISHED)
        return self._give_up_blocks()

    def _give_up_blocks(self) -> list[int]:
        blocks = self.block_table
        self.set_blocks([])
        self.shares_last = False
        return blocks

    def _set_status(self, status: SequenceStatus) -> None:
        if status not in _TRANSITIONS[self.status]:
            raise IllegalTransition(
                f"sequence {self.key} cannot go from {self.status.value} to {status.value}"
            )
        self.status = status


@dataclass(eq=False, slots=True)
class BeamGroup:
    """Sequences of one search: one for each beam of its width, each with a row of its own.

    `members[0]`, the lead, is the one that the outside knows. `active` are the beams, best first: at first
    the lead alone, which computes the prompt. The others rest, without tokens. `scored` are the keys of
    those whose next token can be chosen.
    """

    members: list[Sequence]
    active: list[Sequence] = field(init=False)
    scored: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.active = self.members[:1]
        for member in self.members:
            member.group = self

    @property
    def lead(self) -> Sequence:
        """Member that stands for the group in queues and results."""
        return self.members[0]

    @property
    def trunk(self) -> Sequence:
        """Beam that is computed first when the group starts; the others begin with its blocks."""
        return self.active[0]

    def idle(self) -> list[Sequence]:
        """Return the members that are no beam."""
        return [member for member in self.members if member not in self.active]


def sequence_from(submit: SubmitSequence, eos_token_ids: Collection[int]) -> Sequence:
    """Build the waiting sequence that a submit asks for, given the model's end-of-sequence ids."""
    stop_ids = frozenset(submit.stop_token_ids)
    return Sequence(
        key=submit.key,
        token_ids=list(submit.token_ids),
        prompt_len=submit.prompt_len,
        params=SequenceParams(
            max_tokens=submit.max_tokens,
            min_tokens=submit.min_tokens,
            stop_ids=stop_ids if submit.ignore_eos else stop_ids | frozenset(eos_token_ids),
            sampling=submit.sampling,
            priority=submit.priority,
        ),
        cache_salt=submit.cache_salt.encode(),
        constrained=submit.constraint is not None,
    )


def finish_reason(sequence: Sequence) -> FinishReason | None:
    """Return the reason by which a sequence ends with its last token; None if it does not end.

    A stop id among the first `min_tokens` generated tokens does not end it; sampling masks it there anyway.
    Nor does it end a constrained text, of which it may be a part: the constraint decides that.
    """
    length = len(sequence.token_ids)
    if sequence.constrained:
        return FinishReason.LENGTH if length >= sequence.longest else None
    if sequence.token_ids[-1] in sequence.params.stop_ids and not sequence.masks_stops(length - 1):
        return FinishReason.STOP
    return FinishReason.LENGTH if length >= sequence.longest else None


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens [start, start + length) of a sequence in the prefill forward; the context is everything before.

    `samples` is set if the chunk ends with the sequence's last token: its logits give the next one.
    `mask_stops`: that next token may not be one of the sequence's stop ids.
    """

    sequence: Sequence
    start: int
    length: int
    samples: bool
    mask_stops: bool

    @property
    def end(self) -> int:
        """Position after the chunk's last token."""
        return self.start + self.length


# Rows and outcomes exist once for each sequence and step. A Struct is built several times as fast as a frozen
# dataclass, and holds nothing that could close a cycle for the collector to find.
class DecodeRow(Struct, frozen=True, gc=False):
    """A sequence's last token, at `position`, in the decode forward. Its logits give the next token.

    `token` is that last token, or None while the step that samples it is in flight: then it is on the device
    alone. `mask_stops`: the next token may not be one of the sequence's stop ids.
    """

    sequence: Sequence
    position: int
    mask_stops: bool
    token: int | None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: at most one prefill forward and one decode forward. A bucket is None without its forward.

    `preempted` lost their blocks while the step was planned; they are not in it. `moves` are block copies, to
    be done before anything else of the step: all sources are read before a target is written. `moved` are
    the sequences whose blocks those are, in the step or not.
    """

    prefills: tuple[PrefillChunk, ...]
    decodes: tuple[DecodeRow, ...]
    preempted: tuple[Sequence, ...]
    bucket_prefill: Bucket | None
    bucket_decode: Bucket | None
    moves: tuple[BlockMove, ...] = ()
    moved: tuple[Sequence, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens computed, without padding."""
        return sum(chunk.length for chunk in self.prefills) + len(self.decodes)

    def sequences(self) -> Iterator[Sequence]:
        """Yield all sequences of the step: those of chunks, then those of decode rows, in order."""
        for chunk in self.prefills:
            yield chunk.sequence
        for row in self.decodes:
            yield row.sequence

    def sampling(self) -> Iterator[Sequence]:
        """Yield the sequences that get a token: those of sampling chunks, then those of decode rows."""
        for chunk in self.prefills:
            if chunk.samples:
                yield chunk.sequence
        for row in self.decodes:
            yield row.sequence


class Advanced(Struct, frozen=True, gc=False):
    """Outcome: the sequence got a token and does not end."""

    sequence: Sequence
    token_id: int


@dataclass(frozen=True, slots=True)
class Finished:
    """Outcome: the sequence ended. `token_id` is its last token of this step, None if there is none.

    `stop_token_id` is set for FinishReason.STOP: the token that ended it.
    """

    sequence: Sequence
    token_id: int | None
    reason: FinishReason
    stop_token_id: int | None = None


Outcome: TypeAlias = Advanced | Finished


@dataclass(frozen=True, slots=True)
class Scored:
    """Outcome: all beams of a group await their next tokens, by `Scheduler.branch` or `Scheduler.end`."""

    group: BeamGroup


@dataclass(frozen=True, slots=True)
class SchedulerLoad:
    """Sequences that run and wait, blocks in use, and tokens that prefill has yet to compute.

    The preempted count as waiting, with all their tokens.
    """

    running: int
    waiting: int
    used_blocks: int
    pending_prefill_tokens: int


@dataclass(slots=True)
class StartCounts:
    """Counts since the start: tokens of admitted prompts, cached ones among them, preemptions."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    preemptions: int = 0

    def started(self, sequence: Sequence) -> None:
        """Count an admission, unless it follows a preemption."""
        if not sequence.num_preemptions:
            self.prompt_tokens += sequence.prompt_len
            self.cached_prompt_tokens += sequence.num_cached_tokens
