"""The parameters and results of sampling for each row, and a sequence's state from step to step."""

from __future__ import annotations

import math
from collections.abc import Collection
from collections.abc import Sequence as Ids
from enum import IntEnum
from typing import Any, Final

import numpy as np
import torch
from msgspec import Struct

from services.engine.domain import SamplingOptions

Int64s = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float32]]

_FIRST_CAPACITY: Final = 64


class TokenCounts:
    """The different tokens of a growing sequence and how often each was generated."""

    def __init__(self, token_ids: Ids[int], prompt_len: int) -> None:
        self._token_ids = token_ids
        self._prompt_len = prompt_len
        self._seen = 0
        self._index: dict[int, int] = {}
        self._ids: Int64s = np.zeros(_FIRST_CAPACITY, dtype=np.int64)
        self._generated: Floats = np.zeros(_FIRST_CAPACITY, dtype=np.float32)

    def generated(self, token: int) -> float:
        """Return how often `update` counted a token in the output, -1 if it is not in the prompt either."""
        index = self._index.get(token)
        return -1.0 if index is None else float(self._generated[index])

    def update(self) -> tuple[Int64s, Floats]:
        """Count the tokens appended since the last call.

        Returns the ids of prompt and output, each once, and how often each is in the output.
        """
        for position in range(self._seen, len(self._token_ids)):
            token = self._token_ids[position]
            index = self._index.setdefault(token, len(self._index))
            if index == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._generated = np.concatenate((self._generated, np.zeros_like(self._generated)))
            self._ids[index] = token
            if position >= self._prompt_len:
                self._generated[index] += 1
        self._seen = len(self._token_ids)
        count = len(self._index)
        return self._ids[:count], self._generated[:count]


class SequenceState:
    """A sequence's options, prepared, and the counts of its tokens.

    `token_ids` is the sequence's own list, which grows. Ids must be below the vocabulary's size. bias_ids
    int64 [N], each once, with bias_values float32 [N]; banned_ids, allowed int64: bad words of one token, and
    the ids that alone may be sampled, if any. phrases: bad words of several tokens.
    """

    __slots__ = (
        "allowed",
        "banned_ids",
        "bias_ids",
        "bias_values",
        "counts",
        "edited",
        "greedy",
        "options",
        "penalized",
        "phrases",
        "simple",
        "token_ids",
    )

    def __init__(self, options: SamplingOptions, token_ids: Ids[int], prompt_len: int) -> None:
        self.options = options
        self.token_ids = token_ids
        self.greedy = options.temperature == 0.0
        self.bias_ids = np.array([token for token, _ in options.logit_bias], dtype=np.int64)
        self.bias_values = np.array([value for _, value in options.logit_bias], dtype=np.float32)
        self.banned_ids = np.array([word[0] for word in options.bad_words if len(word) == 1], dtype=np.int64)
        self.phrases = tuple(word for word in options.bad_words if len(word) > 1)
        self.allowed = np.array(options.allowed_token_ids, dtype=np.int64)
        self.penalized = bool(
            options.presence_penalty or options.frequency_penalty or options.repetition_penalty != 1.0
        )
        self.counts = TokenCounts(token_ids, prompt_len) if self.penalized else None
        # Single logits are changed.
        self.edited = self.penalized or bool(
            options.logit_bias or options.bad_words or options.allowed_token_ids
        )
        # The best token is taken as it is, and nothing more is told of it.
        self.simple = self.greedy and not self.edited and options.top_logprobs < 0

    def completions(self, *, pending: bool) -> list[tuple[int, int]]:
        """Return the tokens that complete a bad word of several tokens now, each with its condition.

        The condition is the pending token that has to come before; -1 is none. Without a pending token there
        are no conditions.
        """
        found: list[tuple[int, int]] = []
        for word in self.phrases:
            known = word[:-2] if pending else word[:-1]
            start = len(self.token_ids) - len(known)
            if start >= 0 and tuple(self.token_ids[start:]) == known:
                found.append((word[-1], word[-2] if pending else -1))
        return found


class SequenceStates:
    """The states of the running sequences, by their row."""

    def __init__(self, rows: int) -> None:
        self._states: list[SequenceState | None] = [None] * rows

    def get(self, row: int, options: SamplingOptions, token_ids: Ids[int], prompt_len: int) -> SequenceState:
        """Return the state of the sequence that has this row now, a new one if another had it before."""
        state = self._states[row]
        if state is None or state.token_ids is not token_ids:
            state = self._states[row] = SequenceState(options, token_ids, prompt_len)
        return state


# Columns of a packed result before the ids and values of the alternatives.
PACKED_HEAD = 3


class RowStatus(IntEnum):
    """Outcome of a row; the numbers travel in the packed result."""

    NOT_FINITE = 0
    SAMPLED = 1
    NOTHING_LEFT = 2


# One of each exists for each row and step: a Struct is built several times as fast as a dataclass.
class RowParams(Struct, gc=False):
    """One row of one step.

    `position` is the new token's index in its sequence. `masked_ids` cannot be sampled. `pending_row`: the
    sequence's newest token is not in `state.token_ids` yet; it is last_tokens[pending_row] on the device.
    `beam`: its best tokens are wanted by their log probabilities as penalties, biases and bans leave them.
    """

    state: SequenceState
    position: int
    masked_ids: Collection[int] = ()
    pending_row: int | None = None
    beam: bool = False


class SampledToken(Struct, frozen=True, gc=False):
    """One row's result. `token_id` is None unless `status` is SAMPLED.

    NOT_FINITE: a logit is NaN or positive infinity, or penalties made it so. NOTHING_LEFT: bans and allowed
    ids leave no token.
    `logprob` and `top` (ids with their log probabilities, best first) are of the model's own distribution,
    before bias, penalties, bans, temperature and filters; `logprob` is None if the row did not ask. Of a
    beam they are what bias, penalties and bans make of these log probabilities.
    """

    token_id: int | None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    status: RowStatus = RowStatus.SAMPLED


def unpack(host: torch.Tensor, rows: list[RowParams]) -> list[SampledToken]:
    """Read the packed result of a step, [R, 3 + 2 * n] with R at least the number of rows, on the host."""
    width = (host.shape[1] - PACKED_HEAD) // 2
    asked = [row.state.options.top_logprobs for row in rows]
    asking = [index for index, count in enumerate(asked) if count >= 0]
    # Only the rows that ask are read in full.
    details = iter(host[asking, PACKED_HEAD - 1 :].tolist())
    results: list[SampledToken] = []
    sampled = int(RowStatus.SAMPLED)
    for (token_id, status), count in zip(host[: len(rows), :2].long().tolist(), asked, strict=True):
        values = next(details) if count >= 0 else None
        if status != sampled:
            results.append(SampledToken(None, status=RowStatus(status)))
        elif values is None:
            results.append(SampledToken(token_id))
        else:
            results.append(SampledToken(token_id, values[0], best(values[1:], width, count)))
    return results


def read_best(tokens: torch.Tensor, logits: torch.Tensor) -> list[SampledToken]:
    """Return the results of rows that took their best tokens int64 [R], of these logits [R], on the host."""
    return [
        SampledToken(token) if -math.inf < logit < math.inf else SampledToken(None, status=_status(logit))
        for token, logit in zip(tokens.tolist(), logits.tolist(), strict=True)
    ]


def _status(best: float) -> RowStatus:
    """Return the status of a row whose best logit is not finite."""
    return RowStatus.NOTHING_LEFT if best == -math.inf else RowStatus.NOT_FINITE


def best(values: list[float], width: int, count: int) -> tuple[tuple[int, float], ...]:
    """Return the first `count` of `width` packed alternatives: ids, then as many log probabilities."""
    count = min(count, width)
    return tuple(zip(map(int, values[:count]), values[width : width + count], strict=True))


def unpack_prompt(host: torch.Tensor, top_n: int) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
    """Read scores of prompt tokens [N, 1 + 2 * n] on the host: log probability, and `top_n` alternatives.

    A value is NaN if the row's logits were not finite.
    """
    width = (host.shape[1] - 1) // 2
    return [(values[0], best(values[1:], width, top_n)) for values in host.tolist()]
