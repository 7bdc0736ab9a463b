"""What one engine step computes, what came of it, and the scheduler's load for reports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from msgspec import Struct

from services.engine.bucketing import Bucket
from services.engine.domain import FinishReason
from services.engine.kv import BlockMove
from services.engine.scheduler.sequence import BeamGroup, Sequence


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
    """At most one prefill forward and one decode forward. A bucket is None if its forward has no rows.

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
        """All sequences of the step: those of chunks, then those of decode rows, in order."""
        for chunk in self.prefills:
            yield chunk.sequence
        for row in self.decodes:
            yield row.sequence

    def sampling(self) -> Iterator[Sequence]:
        """The sequences that get a token: those of sampling chunks, then those of decode rows, in order."""
        for chunk in self.prefills:
            if chunk.samples:
                yield chunk.sequence
        for row in self.decodes:
            yield row.sequence


class Advanced(Struct, frozen=True, gc=False):
    """The sequence got a token and goes on."""

    sequence: Sequence
    token_id: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The sequence ended. `token_id` is its last token of this step, None if it ended without one.

    `stop_token_id` is set for FinishReason.STOP: the token that ended it.
    """

    sequence: Sequence
    token_id: int | None
    reason: FinishReason
    stop_token_id: int | None = None


Outcome: TypeAlias = Advanced | Finished


@dataclass(frozen=True, slots=True)
class Scored:
    """All beams of a group wait for their next tokens: `Scheduler.branch` or `Scheduler.end` is to follow."""

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
    """Since the start: tokens of prompts that were started, those of them whose KV was there, preemptions."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    preemptions: int = 0

    def started(self, sequence: Sequence) -> None:
        """Counts one that has got its blocks, unless it only starts anew."""
        if not sequence.num_preemptions:
            self.prompt_tokens += sequence.prompt_len
            self.cached_prompt_tokens += sequence.num_cached_tokens
