"""What is known of one request when it is over."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Record:
    """One request; moments are seconds from the start of the run.

    Attributes:
        conversation: number of its conversation, `turn` its number in there; both from 0.
        due_s: when it should have started: latencies count from here. In a closed loop, when it was sent.
        sent_s: when it was sent, connecting included.
        ended_s: when its last event came, or its failure was seen.
        moments: arrivals of chunks with something generated in them. An answer without any text (of control
            tokens only) has one: its end.
        prompt_tokens, cached_tokens, output_tokens: as the server, or a tokenizer at hand, counted; None: not
            known.
        asked_tokens: the longest answer that was asked for.
        failure: its kind (connect, timeout, cut, http_429, error_event, bad_answer, length), None for none.
        detail: one line about it.
        request_id: what was sent as x-request-id, None: nothing.
    """

    conversation: int
    turn: int
    due_s: float
    sent_s: float
    ended_s: float
    moments: array[float]
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    asked_tokens: int | None
    failure: str | None
    detail: str
    request_id: str | None = None

    @property
    def ttft_ms(self) -> float | None:
        """Time to the first chunk with something in it."""
        return 1e3 * (self.moments[0] - self.due_s) if self.moments else None

    @property
    def e2e_ms(self) -> float:
        """Time to the end."""
        return 1e3 * (self.ended_s - self.due_s)

    @property
    def tpot_ms(self) -> float | None:
        """Time per token from the first chunk to the last; None without a second token or a second chunk, or
        a count."""
        if self.output_tokens is None or self.output_tokens < 2 or len(self.moments) < 2:
            return None
        return 1e3 * (self.moments[-1] - self.moments[0]) / (self.output_tokens - 1)

    @property
    def gaps_ms(self) -> list[float]:
        """Times between chunks; of a failed answer also that between the last one and its failure."""
        moments = [*self.moments, self.ended_s] if self.failure and self.moments else self.moments
        return [1e3 * (after - before) for before, after in pairwise(moments)]

    @property
    def late_ms(self) -> float:
        """How much later than due it was sent."""
        return 1e3 * (self.sent_s - self.due_s)
