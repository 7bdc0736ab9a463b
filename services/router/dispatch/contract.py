"""The contract that an engine's messages satisfy before they reach a client, beyond their columns' shape.

What would put another sequence or the client's reading at risk is a breach, and the engine is given up. What
only describes (errors, texts, counters) is put right. All of it costs per step or per end, not per token.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from itertools import pairwise

from catenary.columns import MalformedStep, StepRow
from catenary.v1 import common_pb2
from services.router.dispatch.sequence import LiveSequence

_ENDS = (common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH)


def check_hypotheses(sequence: LiveSequence, end: common_pb2.SequenceEnd) -> None:
    """Check the end of a sequence, and take off hypotheses that were not asked for.

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


# Of an engine's refusal. Longer texts are cut: clients see them.
MAX_TEXT_LENGTH = 512
MAX_PARAM_LENGTH = 128
MAX_RETRY_AFTER_MS = 3_600_000

NO_REASON = common_pb2.Error(
    code=common_pb2.ERROR_CODE_INTERNAL,
    message="The engine failed the request and did not say why.",
    retryable=True,
)

_REASONS = frozenset(common_pb2.FinishReason.values()) - {common_pb2.FINISH_REASON_UNSPECIFIED}
_WITHOUT_RESULT = (common_pb2.FINISH_REASON_ABORT, common_pb2.FINISH_REASON_ERROR)
_CODES = frozenset(common_pb2.ErrorCode.values()) - {common_pb2.ERROR_CODE_UNSPECIFIED}


def check_step(step: common_pb2.StepOutput, vocab_size: int) -> None:
    """Check what can be said of a step as a whole.

    Raises:
        MalformedStep: a token that does not exist, an end without a known reason.
    """
    for ids in (step.token_ids, step.logprobs.top_ids, step.prompt_logprobs.top_ids):
        if max(ids, default=0) >= vocab_size:
            raise MalformedStep("a token id is not below the vocabulary's size")
    for end in step.ends:
        if end.reason not in _REASONS:
            raise MalformedStep("an end without a reason")
        if end.stop_token_id >= vocab_size:
            raise MalformedStep("a stop token id is not below the vocabulary's size")


def check_row(sequence: LiveSequence, row: StepRow) -> None:
    """Check a row that says something of tokens, which `sequence` has counted, against what was asked.

    Takes off what was not asked.

    Raises:
        MalformedStep: too many tokens, no log probabilities or too many alternatives.
    """
    if sequence.emitted > sequence.budget:
        raise MalformedStep("more tokens than max_tokens or the model's context allow")
    if sequence.results and row.token_ids:
        raise MalformedStep("tokens of a beam search before its end")
    _check_prompt(sequence, row)
    if sequence.alternatives is None or not row.token_ids:
        row.logprobs = None
    elif row.logprobs is None:
        raise MalformedStep("a row without the log probabilities that were asked for")
    elif max(row.logprobs.top_counts) > sequence.alternatives:
        raise MalformedStep("more alternatives than were asked for")


def _check_prompt(sequence: LiveSequence, row: StepRow) -> None:
    if sequence.prompt_alternatives is None:
        row.prompt_logprobs = None
        return
    if row.prompt_logprobs is not None:
        sequence.prompt_scored += len(row.prompt_logprobs.sampled)
        if max(row.prompt_logprobs.top_counts) > sequence.prompt_alternatives:
            raise MalformedStep("more alternatives of prompt tokens than were asked for")
    missing = sequence.prompt_len - 1 - sequence.prompt_scored
    if missing < 0 or (missing > 0 and row.token_ids):
        raise MalformedStep("not the log probabilities of all prompt tokens, or of too many")


def complete(
    sequence: LiveSequence, end: common_pb2.SequenceEnd, token_ids: Sequence[int] = ()
) -> common_pb2.SequenceEnd:
    """An engine's end, put right in place: an error if and only if it failed, counters as counted here.
    `token_ids` came with it.

    Raises:
        MalformedStep: not the vector or the hypotheses that were asked for, or a stop token that is none.
    """
    _check_stop(sequence, end, token_ids)
    _check_vector(sequence, end)
    check_hypotheses(sequence, end)
    if end.reason == common_pb2.FINISH_REASON_ERROR:
        end.error.CopyFrom(presentable(end.error))
    else:
        end.ClearField("error")
    counted = sequence.usage()
    counted.completion_tokens += sum(len(one.token_ids) for one in end.hypotheses)
    counted.cached_tokens = min(end.usage.cached_tokens, counted.prompt_tokens)
    counted.transferred_tokens = min(end.usage.transferred_tokens, counted.prompt_tokens)
    end.usage.CopyFrom(counted)
    return end


def _check_stop(sequence: LiveSequence, end: common_pb2.SequenceEnd, token_ids: Sequence[int]) -> None:
    """Check a stop token: one that is not the request's would take a token off the text."""
    if end.reason != common_pb2.FINISH_REASON_STOP:
        end.ClearField("stop_token_id")
    elif end.HasField("stop_token_id"):
        if not sequence.ends_at(end.stop_token_id):
            raise MalformedStep("a stop by a token that is none of the sequence's stop tokens")
        if token_ids and token_ids[-1] != end.stop_token_id:
            raise MalformedStep("a stop by a token that is not the last one")


def _check_vector(sequence: LiveSequence, end: common_pb2.SequenceEnd) -> None:
    if not sequence.vector_bytes or end.reason in _WITHOUT_RESULT:
        end.ClearField("vector")
    elif end.reason != common_pb2.FINISH_REASON_STOP:
        raise MalformedStep("a document that ends as if it had generated")
    elif len(end.vector) != sequence.vector_bytes:
        raise MalformedStep("an end without the vector that was asked for, or with one of another width")
    elif not all(map(math.isfinite, struct.unpack(f"<{len(end.vector) // 4}f", end.vector))):
        raise MalformedStep("a vector holds what is no number")


def presentable(error: common_pb2.Error) -> common_pb2.Error:
    """Return an engine's error as a client may see it: with a code and a text, of a bounded size."""
    if error.code not in _CODES:
        return NO_REASON
    return common_pb2.Error(
        code=error.code,
        message=error.message[:MAX_TEXT_LENGTH] or NO_REASON.message,
        param=error.param[:MAX_PARAM_LENGTH] if error.HasField("param") else None,
        retryable=error.retryable,
        retry_after_ms=min(error.retry_after_ms, MAX_RETRY_AFTER_MS)
        if error.HasField("retry_after_ms")
        else None,
    )
