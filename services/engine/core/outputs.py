"""Messages after a step: the columns of its sequences, and the changes of the prefix cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from services.engine.domain import CoreErrorCode, FinishReason
from services.engine.kv import Cleared, KvEvent, KvEventLog, Stored
from services.engine.link import (
    EndRow,
    HypothesisRow,
    KvChanges,
    KvContents,
    OfferedKv,
    PromptColumns,
    StepColumns,
)
from services.engine.scheduler import Finished, Outcome, Sequence

if TYPE_CHECKING:
    # The scripted core takes `KvEventDelta` from here, and no torch.
    from services.engine.runner import TokenScore
    from services.engine.sampling import SampledToken


class StepBuilder:
    """Builds the StepColumns of one step. A sequence has at most one row in it."""

    def __init__(self) -> None:
        self._columns = StepColumns([], [], [], [], [], [], [], [], [])
        self._prompts: dict[int, list[TokenScore]] = {}
        # Numbers of the hypotheses in it.
        self.numbers = 0

    def __bool__(self) -> bool:
        return bool(self._columns.keys or self._prompts)

    def add_outcome(self, outcome: Outcome, token: SampledToken | None) -> None:
        """Add the outcome of a sampled token, or an end without one."""
        columns, sequence, token_id = self._columns, outcome.sequence, outcome.token_id
        columns.keys.append(sequence.key)
        if token_id is None:
            columns.token_counts.append(0)
        else:
            columns.token_counts.append(1)
            columns.token_ids.append(token_id)
            if token is not None and token.logprob is not None:
                self._add_logprobs(token.logprob, token.top)
        if isinstance(outcome, Finished):
            self._end(len(columns.keys) - 1, sequence, outcome.reason, stop_token_id=outcome.stop_token_id)

    def add_hypotheses(self, sequence: Sequence, found: list[HypothesisRow]) -> None:
        """Add the end of a beam search with its hypotheses, best first."""
        row, best = self._add_row(sequence.key), found[0]
        self.numbers += sum(len(one.token_ids) + 2 * len(one.top_ids or ()) for one in found)
        self._end(row, sequence, best.reason, stop_token_id=best.stop_token_id, hypotheses=found)

    def add_offer(self, sequence: Sequence, offer: OfferedKv | None) -> None:
        """Add the end, without a token, of a sequence whose prompt was computed for another engine."""
        self._end(self._add_row(sequence.key), sequence, FinishReason.STOP, offer=offer)

    def add_failure(
        self, sequence: Sequence, code: CoreErrorCode, message: str, param: str | None = None
    ) -> None:
        """Add the end of a sequence that was refused or failed. The text is for the caller."""
        row = self._add_row(sequence.key)
        self._end(row, sequence, FinishReason.ERROR, code=code, message=message, param=param)

    def add_document(
        self,
        key: int,
        tokens: int,
        reason: FinishReason,
        *,
        vector: bytes | None = None,
        code: CoreErrorCode | None = None,
        message: str | None = None,
    ) -> None:
        """Add the end of a document that had `tokens` tokens: it has no other rows."""
        self._columns.ends.append(
            EndRow(
                row=self._add_row(key),
                reason=reason,
                prompt_tokens=tokens,
                cached_tokens=0,
                completion_tokens=0,
                error_code=code,
                error_message=message,
                vector=vector,
            )
        )

    def add_prompt_scores(self, sequence: Sequence, scores: tuple[TokenScore, ...]) -> None:
        """Add scores of prompt tokens that follow those that the sequence had before."""
        self._prompts.setdefault(sequence.key, []).extend(scores)

    def take(self) -> StepColumns:
        """Return the step's columns and start the next step's."""
        if self._prompts:
            self._add_prompts()
        self.numbers = 0
        columns, self._columns = self._columns, StepColumns([], [], [], [], [], [], [], [], [])
        return columns

    def _add_prompts(self) -> None:
        rows = {key: row for row, key in enumerate(self._columns.keys)}
        for key in self._prompts:
            if key not in rows:
                rows[key] = self._add_row(key)
        prompts = PromptColumns([], [], [], [], [], [])
        for key in sorted(self._prompts, key=rows.__getitem__):
            scores = self._prompts[key]
            prompts.rows.append(rows[key])
            prompts.counts.append(len(scores))
            for logprob, top in scores:
                prompts.logprobs.append(logprob)
                prompts.top_counts.append(len(top))
                prompts.top_ids.extend(token_id for token_id, _ in top)
                prompts.top_logprobs.extend(value for _, value in top)
        self._columns = replace(self._columns, prompts=prompts)
        self._prompts = {}

    def _add_row(self, key: int) -> int:
        """Add a row without a token. Return its index."""
        self._columns.keys.append(key)
        self._columns.token_counts.append(0)
        return len(self._columns.keys) - 1

    def _add_logprobs(self, logprob: float, top: tuple[tuple[int, float], ...]) -> None:
        """Add the log probabilities of the last row's token."""
        columns = self._columns
        columns.logprob_rows.append(len(columns.keys) - 1)
        columns.sampled.append(logprob)
        columns.top_counts.append(len(top))
        columns.top_ids.extend(token_id for token_id, _ in top)
        columns.top_logprobs.extend(value for _, value in top)

    def _end(
        self,
        row: int,
        sequence: Sequence,
        reason: FinishReason,
        *,
        stop_token_id: int | None = None,
        code: CoreErrorCode | None = None,
        message: str | None = None,
        param: str | None = None,
        hypotheses: list[HypothesisRow] | None = None,
        offer: OfferedKv | None = None,
    ) -> None:
        generated = max(0, sequence.num_generated_tokens)
        if sequence.hands_over:
            generated = 0
        elif sequence.group is not None:
            # Beams emit their tokens at the end alone.
            generated = sum(len(one.token_ids) for one in hypotheses or ())
        self._columns.ends.append(
            EndRow(
                row=row,
                reason=reason,
                # The decode engine computes the last prompt token.
                prompt_tokens=sequence.prompt_len + sequence.hands_over,
                cached_tokens=sequence.num_cached_tokens,
                completion_tokens=generated,
                stop_token_id=stop_token_id,
                error_code=code,
                error_message=message,
                error_param=param,
                hypotheses=hypotheses or [],
                transferred_tokens=sequence.num_transferred_tokens,
                kv_offer=offer,
            )
        )


# Block hashes of one message: 1 MiB.
_NAMES_A_PART: Final = 65_536


class KvEventDelta:
    """Turns the events of a step into one message. Costs nothing until the servicer follows.

    The log keeps a bounded number of events. If a step made more, or the loop waited long, the contents
    are sent anew.
    """

    def __init__(self, log: KvEventLog) -> None:
        self._log = log
        self._followed = False
        # Number of the last event that was sent, or covered by contents. None: contents are due.
        self._told: int | None = None

    def follow(self) -> None:
        """Send the contents next, and from then on the changes."""
        self._followed = True
        self._told = None

    def due(self) -> Iterator[KvContents | KvChanges]:
        """Yield the messages that are to be sent after this step, if any."""
        if not self._followed or (self._told is not None and not len(self._log)):
            return
        events = self._log.drain()
        if self._told is None or (events and events[0].sequence_number != self._told + 1):
            yield from self._contents()
        elif (changes := net_changes(events)) is not None:
            yield changes
        self._told = self._log.number

    def _contents(self) -> Iterator[KvContents]:
        names = self._log.names()
        for start in range(0, len(names) or 1, _NAMES_A_PART):
            part = names[start : start + _NAMES_A_PART]
            yield KvContents(b"".join(part), start == 0, start + _NAMES_A_PART >= len(names))


def net_changes(events: list[KvEvent]) -> KvChanges | None:
    """Return the net changes of these events, None for none. Blocks stored and removed again cancel out.

    Events of one name take turns, so two that follow each other cancel out.
    """
    cleared = False
    net: dict[bytes, bool] = {}
    for event in events:
        if isinstance(event, Cleared):
            cleared = True
            net.clear()
        elif net.pop(event.block_hash, None) is None:
            net[event.block_hash] = isinstance(event, Stored)
    if not net and not cleared:
        return None
    return KvChanges(
        cleared,
        removed=b"".join([name for name, stored in net.items() if not stored]),
        stored=b"".join([name for name, stored in net.items() if stored]),
    )
