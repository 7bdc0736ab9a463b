"""Check the hypotheses of a beam search before they reach a client."""

from __future__ import annotations

import math
from itertools import pairwise

from catenary.columns import MalformedStep
from catenary.v1 import common_pb2
from services.router.dispatch.sequence import LiveSequence

_ENDS = (common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH)


def check_hypotheses(sequence: LiveSequence, end: common_pb2.SequenceEnd) -> None:
    """Checks the end of a sequence, and takes off hypotheses that were not asked for.

    Raises:
        MalformedStep: a search that ends well and has not 1 to as many hypotheses as were asked for, or one
            that breaks the contract: tokens, lengths, reasons, scores, log probabilities.
    """
    if not sequence.results or end.reason not in _ENDS:
        del end.hypotheses[:]
        return
    if not 1 <= len(end.hypotheses) <= sequence.results:
        raise MalformedStep("a beam search with no hypotheses, or more than were asked for")
    for one in end.hypotheses:
        _check(sequence, one)
    if any(better.score < worse.score for better, worse in pairwise(end.hypotheses)):
        raise MalformedStep("hypotheses that are not in the order of their scores")


def _check(sequence: LiveSequence, one: common_pb2.Hypothesis) -> None:
    vocab_size = sequence.link.engine.model.vocab_size
    if not 1 <= len(one.token_ids) <= sequence.budget:
        raise MalformedStep("a hypothesis without tokens, or with more than max_tokens or the context allow")
    if max(one.token_ids) >= vocab_size or one.stop_token_id >= vocab_size:
        raise MalformedStep("a token id of a hypothesis is not below the vocabulary's size")
    stopped = one.HasField("stop_token_id")
    if stopped and not (one.token_ids[-1] == one.stop_token_id and sequence.ends_at(one.stop_token_id)):
        raise MalformedStep("a hypothesis that stops by a token that is no stop token, or not its last")
    if one.reason not in _ENDS or not math.isfinite(one.score):
        raise MalformedStep("a hypothesis without a reason or a score")
    if sequence.alternatives is None:
        one.ClearField("logprobs")
    else:
        _check_logprobs(one, sequence.alternatives, vocab_size)


def _check_logprobs(one: common_pb2.Hypothesis, alternatives: int, vocab_size: int) -> None:
    values = one.logprobs
    if list(values.rows) != [0] or not len(one.token_ids) == len(values.sampled) == len(values.top_counts):
        raise MalformedStep("a hypothesis without the log probabilities of all its tokens")
    if max(values.top_counts) > alternatives:
        raise MalformedStep("more alternatives than were asked for")
    if not sum(values.top_counts) == len(values.top_ids) == len(values.top_logprobs):
        raise MalformedStep("columns of log probabilities differ in length")
    if max(values.top_ids, default=0) >= vocab_size:
        raise MalformedStep("a token id is not below the vocabulary's size")
