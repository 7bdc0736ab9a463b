"""The servicer's table of live sequences, with their spans, and of offers that routers may withdraw."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass

from catenary.columns import StepRow
from catenary.telemetry import record_span
from catenary.v1 import common_pb2

_REASONS = common_pb2.FinishReason
_FAILED = common_pb2.FINISH_REASON_ERROR


class SequenceTrace:
    """Of one sequence, begun when the core gets it. Prefill is all until its first tokens, decode the rest.

    Its spans are children of what the router decided.
    """

    __slots__ = ("_parent", "_prefilled", "_sequence_id", "_since")

    def __init__(self, spec: common_pb2.SequenceSpec) -> None:
        self._parent = spec.traceparent or None
        self._sequence_id = spec.request_id
        self._since = time.monotonic()
        self._prefilled = False

    def emitted(self) -> None:
        """End the span of the prefill at the first tokens."""
        if not self._prefilled:
            self._prefilled = True
            self._record("prefill", {"catenary.sequence_id": self._sequence_id})

    def ended(self, end: common_pb2.SequenceEnd) -> None:
        """Record the last span."""
        usage = end.usage
        attributes: dict[str, str | int] = {
            "catenary.sequence_id": self._sequence_id,
            "catenary.finish_reason": _REASONS.Name(end.reason).removeprefix("FINISH_REASON_").lower(),
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "catenary.usage.cached_tokens": usage.cached_tokens,
        }
        error = common_pb2.ErrorCode.Name(end.error.code) if end.reason == _FAILED else None
        self._record("decode" if self._prefilled else "prefill", attributes, error)

    def _record(self, name: str, attributes: dict[str, str | int], error: str | None = None) -> None:
        now = time.monotonic()
        record_span(name, self._parent, attributes, lasted_s=now - self._since, error=error)
        self._since = now


@dataclass(slots=True)
class LiveSequence:
    """A sequence that the core has. `link` is None once its router is gone and the core's end is awaited."""

    key: int
    link: int | None
    handle: int
    request_id: str
    prompt_tokens: int
    # Tokens after the prompt, those of an earlier life included.
    completion_tokens: int
    # Sequences that it is in the core.
    places: int = 1
    aborting: bool = False
    # Its router was told something of it.
    told: bool = False
    # None unless spans are exported.
    trace: SequenceTrace | None = None

    def take(self, row: StepRow) -> None:
        """Count what a step of the core has brought."""
        self.completion_tokens += len(row.token_ids)
        if self.trace is not None:
            if row.token_ids:
                self.trace.emitted()
            if row.end is not None:
                self.trace.ended(row.end)

    def fail(self, error: common_pb2.Error) -> common_pb2.SequenceEnd:
        """Return the end of a sequence for which the core makes none any more."""
        end = common_pb2.SequenceEnd(
            reason=common_pb2.FINISH_REASON_ERROR,
            usage=common_pb2.Usage(
                prompt_tokens=self.prompt_tokens, completion_tokens=self.completion_tokens
            ),
            error=error,
        )
        if self.trace is not None:
            self.trace.ended(end)
        return end


class SequenceTable:
    """Live sequences by key and by (link, handle), and the last handles that ended.

    Keys are never used twice, so a late row of a dead core cannot reach a newer sequence. A link is one
    attachment to a router: handles start anew with each. `places`: sequences in the core, of which a beam
    search is several.
    """

    def __init__(self, remember: int) -> None:
        self._remember = remember
        self._by_key: dict[int, LiveSequence] = {}
        self._by_handle: dict[tuple[int, int], LiveSequence] = {}
        self._ended: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._last_key = 0
        self.places = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def new_key(self) -> int:
        """Return a key that was never given out."""
        self._last_key += 1
        return self._last_key

    def add(self, sequence: LiveSequence) -> None:
        """Enter a sequence that the core took. Its handle must not be `known`."""
        self._by_key[sequence.key] = sequence
        self.places += sequence.places
        if sequence.link is not None:
            self._by_handle[sequence.link, sequence.handle] = sequence

    def known(self, link: int, handle: int) -> bool:
        """Whether the handle is live or among the last that ended."""
        return (link, handle) in self._by_handle or (link, handle) in self._ended

    def get(self, key: int) -> LiveSequence | None:
        """Return the live sequence of a core key."""
        return self._by_key.get(key)

    def find(self, link: int, handle: int) -> LiveSequence | None:
        """Return the live sequence of a handle."""
        return self._by_handle.get((link, handle))

    def ended(self, link: int, handle: int) -> bool:
        """Whether the handle is among the last that ended."""
        return (link, handle) in self._ended

    def end(self, sequence: LiveSequence) -> None:
        """Remove a sequence that ended; remember its handle for late aborts."""
        del self._by_key[sequence.key]
        self.places -= sequence.places
        if sequence.link is None:
            return
        place = (sequence.link, sequence.handle)
        del self._by_handle[place]
        self._ended[place] = None
        if len(self._ended) > self._remember:
            self._ended.popitem(last=False)

    def leave(self, link: int) -> list[int]:
        """Forget the handles of a link that is gone. Return the keys that the core still has to abort."""
        keys = []
        for sequence in self._by_key.values():
            if sequence.link == link:
                del self._by_handle[link, sequence.handle]
                sequence.link = None
                if not sequence.aborting:
                    sequence.aborting = True
                    keys.append(sequence.key)
        for place in [place for place in self._ended if place[0] == link]:
            del self._ended[place]
        return keys

    def take_all(self) -> list[LiveSequence]:
        """End every live sequence at once, for a core that died; returns those whose router is there."""
        live = list(self._by_key.values())
        for sequence in live:
            self.end(sequence)
        return [sequence for sequence in live if sequence.link is not None]


class OfferHandles:
    """Keys of the sequences that ended with an offer, by link and handle: an abort withdraws it.

    The oldest are forgotten; their offers expire.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._keys: OrderedDict[tuple[int, int], int] = OrderedDict()

    def add(self, link: int, handle: int, key: int) -> None:
        """Remember a sequence that has ended with an offer."""
        self._keys[link, handle] = key
        if len(self._keys) > self._limit:
            self._keys.popitem(last=False)

    def take(self, link: int, handle: int) -> int | None:
        """Forget a handle and return its key, None if it has no offer."""
        return self._keys.pop((link, handle), None)

    def leave(self, link: int) -> list[int]:
        """Forget a link; return its keys."""
        return [self._keys.pop(place) for place in [one for one in self._keys if one[0] == link]]

    def clear(self) -> None:
        """Forget all offers: the core that made them is gone."""
        self._keys.clear()
