"""Collects what one step gives to its sequences, as the columns of one message."""

from __future__ import annotations

from msgspec.structs import replace

from services.engine.domain import CoreErrorCode, FinishReason
from services.engine.link import EndRow, HypothesisRow, OfferedKv, PromptColumns, StepColumns
from services.engine.runner import TokenScore
from services.engine.sampling import SampledToken
from services.engine.scheduler import Finished, Outcome, Sequence


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
        """Adds what the scheduler made of a sampled token, or of an end without one."""
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
        """Adds the end of a beam search with what it found, best first."""
        row, best = self._add_row(sequence.key), found[0]
        self.numbers += sum(len(one.token_ids) + 2 * len(one.top_ids or ()) for one in found)
        self._end(row, sequence, best.reason, stop_token_id=best.stop_token_id, hypotheses=found)

    def add_offer(self, sequence: Sequence, offer: OfferedKv | None) -> None:
        """Adds the end of a sequence whose prompt was computed for another engine. It emits nothing."""
        self._end(self._add_row(sequence.key), sequence, FinishReason.STOP, offer=offer)

    def add_failure(
        self, sequence: Sequence, code: CoreErrorCode, message: str, param: str | None = None
    ) -> None:
        """Adds the end of a sequence that was refused or failed. The text is for the caller."""
        row = self._add_row(sequence.key)
        self._end(row, sequence, FinishReason.ERROR, code=code, message=message, param=param)

    def add_prompt_scores(self, sequence: Sequence, scores: tuple[TokenScore, ...]) -> None:
        """Adds scores of prompt tokens that follow those that the sequence had before."""
        self._prompts.setdefault(sequence.key, []).extend(scores)

    def take(self) -> StepColumns:
        """Returns the step's columns and starts the next step's."""
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
        """A row without a token."""
        self._columns.keys.append(key)
        self._columns.token_counts.append(0)
        return len(self._columns.keys) - 1

    def _add_logprobs(self, logprob: float, top: tuple[tuple[int, float], ...]) -> None:
        """Log probabilities of the last row's token."""
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
            # Nothing else of a beam search reaches anybody.
            generated = sum(len(one.token_ids) for one in hypotheses or ())
        self._columns.ends.append(
            EndRow(
                row=row,
                reason=reason,
                # Who hands over has left the last token to the other engine.
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
