"""Handovers of split sequences: from the engine that computes the prompt to the one that computes the rest.

The client sees one sequence, and admission counts one. It is placed for its prompt first, and placed again
with the offer of KV that the prefill engine ends with. If the prefill fails, the next engine computes the
prompt, too.
"""

from __future__ import annotations

from catenary.kv_offer import well_formed
from catenary.resume import GOOD_ENDS
from catenary.telemetry import get_logger
from catenary.v1 import common_pb2, engine_pb2
from services.router.dispatch.sequence import Handover, LiveSequence
from services.router.dispatch.states import SequenceEvent, SequenceState
from services.router.fleet import Fleet
from services.router.metrics import HandoverMetrics
from services.router.placement import SplitPart

_log = get_logger(__name__)

_PREFILL = engine_pb2.ENGINE_ROLE_PREFILL


class Handovers:
    """Decides which sequences are split, and what becomes of both parts.

    `due`: sequences that have waited for the prompt which they share with another one, and may be placed.
    """

    def __init__(self, metrics: HandoverMetrics, fleet: Fleet) -> None:
        self._metrics = metrics
        self._fleet = fleet
        self.due: list[LiveSequence] = []

    def begin(self, sequence: LiveSequence, *, resumed: bool) -> bool:
        """Decide whether to split a new sequence. True: it follows another one that computes its prompt."""
        leader = sequence.same_prompt_as
        if leader is not None:
            if leader.handover is None or not self.prompt_pending(leader):
                return False
            leader.handover.followers.append(sequence)
            sequence.apply(SequenceEvent.FOLLOW)
            return True
        spec = sequence.spec
        if not (resumed or sequence.quarantined) and splittable(spec) and self._splits(spec.model):
            sequence.request.part = SplitPart.PROMPT
            sequence.handover = Handover()
        return False

    def _splits(self, model: str) -> bool:
        columns = self._fleet.columns(model)
        return _PREFILL in columns.roles and bool(columns.open_to(_PREFILL).any())

    def prompt_pending(self, sequence: LiveSequence) -> bool:
        """Whether the prompt of a sequence is not yet on the engine that will decode it."""
        queued = sequence.state is SequenceState.QUEUED
        return sequence.request.part is SplitPart.PROMPT or (
            queued and sequence.request.part is SplitPart.REST
        )

    def message(self, sequence: LiveSequence, submit: common_pb2.Submit) -> None:
        """Complete the submit to the engine on which a sequence was placed."""
        handover = sequence.handover
        if handover is None:
            return
        placed = sequence.request.placed_part
        if placed is SplitPart.PROMPT:
            submit.prefill_only = True
            sequence.budget = 0
            self._metrics.count("begun")
        elif placed is SplitPart.REST and handover.offer is not None:
            submit.kv_offer.CopyFrom(handover.offer)
        else:
            if sequence.request.part is SplitPart.REST:
                self._metrics.count("recomputed")
            self.withdraw(sequence)

    def sent(self, sequence: LiveSequence) -> None:
        """Let the followers of a sequence be placed, once its decode engine is known."""
        if sequence.handover is None or sequence.request.placed_part is SplitPart.PROMPT:
            return
        sequence.request.part = sequence.request.placed_part
        self._go_together(sequence.handover)

    def started(self, sequence: LiveSequence) -> None:
        """Withdraw the offer of a sequence that has its first tokens: it was fetched, or never will be."""
        handover = sequence.handover
        if handover is not None and sequence.request.placed_part is SplitPart.REST:
            self._let_go(handover)

    def prompt_ended(self, sequence: LiveSequence, end: common_pb2.SequenceEnd) -> None:
        """Take the end of the prefill engine: the offer of KV, or none if it failed."""
        handover, offer = sequence.handover, end.kv_offer
        usable = end.reason == common_pb2.FINISH_REASON_STOP and end.HasField("kv_offer")
        if handover is None or not (usable and acceptable(offer, sequence.prompt_len)):
            self.unsplit(sequence, "failed")
            return
        handover.offer = common_pb2.KvOffer()
        handover.offer.CopyFrom(offer)
        handover.offered_by, handover.offer_handle = sequence.link, sequence.engine_handle
        handover.cached_tokens = min(end.usage.cached_tokens, sequence.prompt_len)
        sequence.request.part = SplitPart.REST
        self._metrics.count("offered")

    def unsplit(self, sequence: LiveSequence, why: str) -> None:
        """Have the next engine compute all of a sequence, as its prefill failed. `why` labels a metric."""
        sequence.request.part = SplitPart.WHOLE
        self._metrics.count(why)
        _log.info("a prompt is not handed over", sequence=sequence.spec.request_id, why=why)

    def lost(self, sequence: LiveSequence) -> None:
        """Count the loss of an engine with a part of a sequence, which ends and is resumed whole."""
        state = sequence.state
        if state is SequenceState.PREFILLING or (
            state is SequenceState.PLACED and sequence.request.placed_part is SplitPart.REST
        ):
            self._metrics.count("lost")

    def ended(self, sequence: LiveSequence, end: common_pb2.SequenceEnd) -> None:
        """Correct the end of a sequence: its counts of cached and transferred tokens."""
        handover = sequence.handover
        end.ClearField("kv_offer")
        if handover is None or handover.offer is None:
            end.usage.transferred_tokens = 0
            return
        if end.usage.transferred_tokens:
            end.usage.cached_tokens = max(end.usage.cached_tokens, handover.cached_tokens)
            self._metrics.handed_over(end.usage.transferred_tokens)
        elif end.reason in GOOD_ENDS:
            self._metrics.count("recomputed")

    def forget(self, sequence: LiveSequence) -> None:
        """Drop the handover of a sequence that ends, and its place among the followers. Idempotent."""
        self._drop_follower(sequence)
        handover = sequence.handover
        if handover is None:
            return
        self.withdraw(sequence)
        sequence.request.part = SplitPart.WHOLE
        self._go_together(handover)
        sequence.handover = None

    def withdraw(self, sequence: LiveSequence) -> None:
        """Let the prefill engine drop its offer."""
        handover = sequence.handover
        if handover is not None and handover.offered_by is not None:
            self._let_go(handover)
            handover.offer = None

    def _let_go(self, handover: Handover) -> None:
        if handover.offered_by is not None and not handover.offered_by.closed:
            handover.offered_by.abort(handover.offer_handle)
        handover.offered_by = None

    def _drop_follower(self, sequence: LiveSequence) -> None:
        leader = sequence.same_prompt_as
        handover = None if leader is None else leader.handover
        for waiting in (self.due, [] if handover is None else handover.followers):
            if sequence in waiting:
                waiting.remove(sequence)

    def _go_together(self, handover: Handover) -> None:
        """Make the followers due: they are placed on their leader's engine, if it has one."""
        self.due += handover.followers
        handover.followers = []


def splittable(spec: common_pb2.SequenceSpec) -> bool:
    """Whether a prefill engine may compute the prompt: only of sequences that sample, and are not resumed."""
    resumed = spec.HasField("prompt_len") and spec.prompt_len < len(spec.token_ids)
    others = spec.HasField("pooling") or spec.HasField("beam_search")
    return len(spec.token_ids) > 1 and not (resumed or others or spec.response.HasField("prompt_logprobs"))


def acceptable(offer: common_pb2.KvOffer, prompt_len: int) -> bool:
    """Whether an offer of an engine keeps the contract."""
    return (
        well_formed(offer)
        and offer.connector != ""
        and offer.tokens == prompt_len - 1
        and 1 <= offer.blocks <= offer.tokens
    )
