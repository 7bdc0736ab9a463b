"""Sequences of which one engine computes the prompt and another one the rest: what happens between the two.

The client sees one sequence, and admission counts one. It is placed for its prompt first; with the offer that
this ends with, it is placed again. Whatever goes wrong in the first half, the second one computes the prompt.
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
from services.router.placement import Half

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
            if leader.handover is None or not self.in_first_half(leader):
                return False
            leader.handover.followers.append(sequence)
            sequence.apply(SequenceEvent.FOLLOW)
            return True
        spec = sequence.spec
        if not (resumed or sequence.alone) and divisible(spec) and self._divides(spec.model):
            sequence.request.half = Half.PROMPT
            sequence.handover = Handover()
        return False

    def _divides(self, model: str) -> bool:
        """Whether there are engines for prompts alone."""
        board = self._fleet.board(model)
        return _PREFILL in board.roles and bool(board.open_to(_PREFILL).any())

    def in_first_half(self, sequence: LiveSequence) -> bool:
        """Whether an engine computes its prompt for another one, or it waits for one that goes on with it."""
        queued = sequence.state is SequenceState.QUEUED
        return sequence.request.half is Half.PROMPT or (queued and sequence.request.half is Half.REST)

    def message(self, sequence: LiveSequence, submit: common_pb2.Submit) -> None:
        """Complete what is sent to the engine that was chosen; the sequence is placed there."""
        handover = sequence.handover
        if handover is None:
            return
        placed = sequence.request.placed
        if placed is Half.PROMPT:
            submit.prefill_only = True
            sequence.budget = 0
            self._metrics.count("begun")
        elif placed is Half.REST and handover.offer is not None:
            submit.kv_offer.CopyFrom(handover.offer)
        else:
            if sequence.request.half is Half.REST:
                self._metrics.count("recomputed")
            self.withdraw(sequence)

    def sent(self, sequence: LiveSequence) -> None:
        """Its engine was told: others that begin with its prompt go where it is computed to the end."""
        if sequence.handover is None or sequence.request.placed is Half.PROMPT:
            return
        sequence.request.half = sequence.request.placed
        self._go_together(sequence.handover)

    def started(self, sequence: LiveSequence) -> None:
        """It has its first tokens: what was offered has been fetched by now, or never will be."""
        handover = sequence.handover
        if handover is not None and sequence.request.placed is Half.REST:
            self._let_go(handover)

    def first_half_ended(self, sequence: LiveSequence, end: common_pb2.SequenceEnd) -> None:
        """An engine has ended its part: it is to be placed again, with the offer or without."""
        handover, offer = sequence.handover, end.kv_offer
        usable = end.reason == common_pb2.FINISH_REASON_STOP and end.HasField("kv_offer")
        if handover is None or not (usable and acceptable(offer, sequence.prompt_len)):
            self.go_whole(sequence, "failed")
            return
        handover.offer = common_pb2.KvOffer()
        handover.offer.CopyFrom(offer)
        handover.offered_by, handover.offer_handle = sequence.link, sequence.engine_handle
        handover.cached_tokens = min(end.usage.cached_tokens, sequence.prompt_len)
        sequence.request.half = Half.REST
        self._metrics.count("offered")

    def go_whole(self, sequence: LiveSequence, why: str) -> None:
        """The first half came to nothing: it is to be placed again, and another engine computes all of it."""
        sequence.request.half = Half.WHOLE
        self._metrics.count(why)
        _log.info("a prompt is not handed over", sequence=sequence.spec.request_id, why=why)

    def lost(self, sequence: LiveSequence) -> None:
        """Its engine is gone. It ends, so that its resumption counts a death, and goes on whole."""
        state = sequence.state
        if state is SequenceState.PREFILLING or (
            state is SequenceState.PLACED and sequence.request.placed is Half.REST
        ):
            self._metrics.count("lost")

    def ended(self, sequence: LiveSequence, end: common_pb2.SequenceEnd) -> None:
        """The whole sequence has ended, with this end, which is put right."""
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
        """It is over: the offer is fetched no longer, and its prompt is not waited for. Idempotent."""
        self._drop_follower(sequence)
        handover = sequence.handover
        if handover is None:
            return
        self.withdraw(sequence)
        sequence.request.half = Half.WHOLE
        self._go_together(handover)
        sequence.handover = None

    def withdraw(self, sequence: LiveSequence) -> None:
        """Tell the first engine that its offer is not wanted any more."""
        handover = sequence.handover
        if handover is not None and handover.offered_by is not None:
            self._let_go(handover)
            handover.offer = None

    def _let_go(self, handover: Handover) -> None:
        if handover.offered_by is not None and not handover.offered_by.closed:
            handover.offered_by.abort(handover.offer_handle)
        handover.offered_by = None

    def _drop_follower(self, sequence: LiveSequence) -> None:
        """A sequence that waits for its leader does so no longer."""
        leader = sequence.same_prompt_as
        handover = None if leader is None else leader.handover
        for waiting in (self.due, [] if handover is None else handover.followers):
            if sequence in waiting:
                waiting.remove(sequence)

    def _go_together(self, handover: Handover) -> None:
        """Have the followers placed, on their leader's engine if it has one."""
        self.due += handover.followers
        handover.followers = []


def divisible(spec: common_pb2.SequenceSpec) -> bool:
    """Whether another engine may compute the prompt: of sequences that sample, and begin here."""
    resumed = spec.HasField("prompt_len") and spec.prompt_len < len(spec.token_ids)
    others = spec.HasField("pooling") or spec.HasField("beam_search")
    return len(spec.token_ids) > 1 and not (resumed or others or spec.response.HasField("prompt_logprobs"))


def acceptable(offer: common_pb2.KvOffer, prompt_len: int) -> bool:
    """Whether an engine's offer keeps the contract."""
    return (
        well_formed(offer)
        and offer.connector != ""
        and offer.tokens == prompt_len - 1
        and 1 <= offer.blocks <= offer.tokens
    )
