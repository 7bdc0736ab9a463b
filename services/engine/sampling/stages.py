"""A step's computations outside its forwards, from logits to tokens and log probabilities, on the device.

The order is that of transformers and vLLM: bias, bans, penalties, allowed ids, masks; temperature; top-k,
top-p of what it left, min-p; the draw. Whatever is in the batch, a row's result depends on its logits, its
parameters, its tokens and (seed, position) alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from catenary.sequence_limits import MAX_TOP_LOGPROBS
from services.engine.device import Device
from services.engine.sampling.draw import Search, first_argmax, invert
from services.engine.sampling.inputs import NO_TOKEN, NOT_SEEN
from services.engine.sampling.rows import RowStatus

Head = Callable[[torch.Tensor], torch.Tensor]


def penalized(
    scores: torch.Tensor,
    generated: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> torch.Tensor:
    """Penalise scores, all float32 [N].

    Repetition as in CTRL (arXiv 1909.05858), the others as OpenAI's reference defines them.
    """
    scores = torch.where(scores < 0, scores * repetition, scores / repetition)
    return scores - frequency * generated - presence.masked_fill(generated <= 0, 0.0)


def logprob_columns(
    logits: torch.Tensor, tokens: torch.Tensor, device: Device, *, alternatives: bool = True
) -> torch.Tensor:
    """logits float32 [A, V], tokens int64 [A] -> [A, 1 + 2 * n]: log probability, n best ids, their values.

    n is MAX_TOP_LOGPROBS (or V) or 0, whatever number a row asks for, so that ties are broken alike in every
    batch. Read by `unpack` and `unpack_prompt`.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    wide = device.capabilities.wide_dtype
    own = logprobs.gather(1, tokens.unsqueeze(1)).to(wide)
    if not alternatives:
        return own
    values, ids = logprobs.topk(min(MAX_TOP_LOGPROBS, logits.shape[1]), dim=-1)
    return torch.cat((own, ids.to(wide), values.to(wide)), dim=1)


def beam_columns(scores: torch.Tensor, device: Device) -> torch.Tensor:
    """scores float32 [B, V], adjusted log probabilities -> [B, 1 + 2 * n] as `logprob_columns` gives them.

    The first column is that of the best token.
    """
    values, ids = scores.topk(min(MAX_TOP_LOGPROBS, scores.shape[1]), dim=-1)
    wide = device.capabilities.wide_dtype
    columns = (values[:, :1].to(wide), ids.to(wide), values.to(wide))
    return torch.cat(columns, dim=1)


class Stages(ABC):
    """The computations of a program, named as its phases are.

    `head` gives logits; hidden [S, hidden_size] and last_tokens int64 [S] are the runner's. They leave for
    one another: raw float32 [S, V], the model's logits, of beams log probabilities; scores float32 [S, V],
    from which tokens are drawn; tokens int64 [S]. All may run twice in a row with the same inputs, as a
    capture does, and the second time changes nothing.

    Keyword arguments are facts that are known of a step; without them a computation does for any step. Of
    tensors, None: no row needs it.
    """

    search: Search
    raw: torch.Tensor
    scores: torch.Tensor
    tokens: torch.Tensor
    chunk: torch.Tensor

    def __init__(self, head: Head, hidden: torch.Tensor, last_tokens: torch.Tensor, device: Device) -> None:
        self._head = head
        self._hidden = hidden
        self._last_tokens = last_tokens
        self._device = device
        self._wide = device.capabilities.wide_dtype

    @abstractmethod
    def begin(self, logits: torch.Tensor, restricted: torch.Tensor | None) -> None:
        """Take logits float32 [R, V] as raw, and as scores but for rows of which no token is allowed yet."""

    @abstractmethod
    def edited(self) -> torch.Tensor:
        """Return scores that may be changed, [R + 1 or more, V]: the last row is none of the step's."""

    @abstractmethod
    def put(
        self,
        rows: torch.Tensor,
        ids: torch.Tensor,
        flat: torch.Tensor,
        values: torch.Tensor,
        fails: torch.Tensor | None,
    ) -> None:
        """Replace scores at rows and ids, and flat places, int64 [W] each, but where bool [W] is true."""

    @property
    @abstractmethod
    def restricted(self) -> bool:
        """False: no row has banned tokens that an edit could allow again."""

    @abstractmethod
    def normal(self, raw: torch.Tensor) -> torch.Tensor:
        """Return the log probabilities of logits [D, V]."""

    @abstractmethod
    def set_raw(self, index: torch.Tensor, raw: torch.Tensor) -> None:
        """Replace the raw logits of these rows, int64 [D], and their scores but for banned tokens."""

    @abstractmethod
    def shifted(self, index: torch.Tensor, *, every: bool) -> torch.Tensor:
        """Return a new tensor, the scores of these rows less their best one; every: they are all rows."""

    @abstractmethod
    def set_drawn(self, index: torch.Tensor, tokens: torch.Tensor) -> None:
        """Keep the tokens that were drawn for these rows, int64 [D] each."""

    @abstractmethod
    def chosen(self, drawn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and best scores [R]: where `drawn`, int64 [R], is 1 the drawn ones, else the best."""

    @abstractmethod
    def unusable(self, raw: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
        """Return bool [R]: a logit is NaN or positive infinity, or the best score is."""

    @abstractmethod
    def set_result(self, tokens: torch.Tensor, status: torch.Tensor) -> None:
        """Keep tokens and RowStatus, int64 [R] each."""

    @abstractmethod
    def set_columns(self, index: torch.Tensor, columns: torch.Tensor) -> None:
        """Keep log probabilities [D, 1 + 2 * n] of these rows."""

    @abstractmethod
    def set_prompts(self, turn: int, places: torch.Tensor, columns: torch.Tensor) -> None:
        """Keep log probabilities [N, 1 + 2 * n] of prompt tokens at these places, int64 [N]."""

    @abstractmethod
    def filter(self, ints: torch.Tensor, floats: torch.Tensor) -> None:
        """Draw from what filters leave.

        ints [3, D]: rows, top_k, exact; floats [4, D], wide: temperature, uniform, top_p, min_p.
        """

    def head(self, restricted: torch.Tensor, *, any_restricted: bool = True) -> None:
        """Score the first R hidden states. restricted bool [R]: rows of which nothing is allowed yet."""
        logits = self._head(self._hidden[: restricted.shape[0]]).float()
        self.begin(logits, restricted if any_restricted else None)

    def normalize(self, index: torch.Tensor) -> None:
        """Make the logits of these rows, int64 [D], log probabilities. Before they are edited."""
        self.set_raw(index, self.normal(self.raw.index_select(0, index)))

    def edit(
        self,
        ints: torch.Tensor,
        floats: torch.Tensor,
        penalties: torch.Tensor | None,
        pending_rows: torch.Tensor | None,
        *,
        any_conditions: bool = True,
    ) -> None:
        """Change the logits of a slice of `Entries`; penalties, pending_rows as of `pending`.

        What is banned already stays so, but for what is allowed, which therefore comes first.
        """
        rows, ids, conditions, allow = ints
        added, generated = floats
        scores, pending = self.edited(), self._waiting_at(rows, pending_rows)
        flat = rows * scores.shape[1] + ids
        values = self.raw.view(-1).index_select(0, flat).add_(added)
        if penalties is not None:
            values = self._penalized(values, rows, ids, generated, penalties, pending)
        if self.restricted:
            before = scores.view(-1).index_select(0, flat)
            values = values.masked_fill((before == -torch.inf) & (allow == 0), -torch.inf)
        fails = None
        if pending is not None and any_conditions:
            fails = (conditions != NO_TOKEN) & (conditions != pending)
        self.put(rows, ids, flat, values, fails)

    def penalize(
        self,
        rows: torch.Tensor,
        ids: torch.Tensor,
        generated: torch.Tensor,
        penalties: torch.Tensor,
        pending_rows: torch.Tensor | None,
        *,
        all_seen: bool = False,
    ) -> None:
        """Penalise a slice of `seen_slices`, all_seen: without padding that was not seen.

        penalties, pending_rows as of `pending`.
        """
        scores, pending = self.edited(), self._waiting_at(rows, pending_rows)
        flat = rows * scores.shape[1] + ids
        values = self.raw.view(-1).index_select(0, flat)
        values = self._penalized(values, rows, ids, generated, penalties, pending, all_seen=all_seen)
        self.put(rows, ids, flat, self._banned(values, scores, flat), None)

    def pending(self, penalties: torch.Tensor, pending_rows: torch.Tensor) -> None:
        """Penalise the tokens that wait on the device as if each were new; `penalize` knows better if not.

        penalties float32 [3, R + 1]: repetition, frequency and presence, 1, 0 and 0 where there is none.
        pending_rows int64 [R + 1]: place of a row's newest token among the last ones, NO_TOKEN if the host
        knows it.
        """
        scores, count = self.edited(), pending_rows.shape[0] - 1
        pending = self.waiting(pending_rows)[:count]
        rows = self._rows(count)
        ids = pending.clamp_min(0)
        flat = rows * scores.shape[1] + ids
        values = self.raw.view(-1).index_select(0, flat)
        values = penalized(values, torch.ones_like(values), *penalties[:, :count])
        values = self._banned(values, scores, flat)
        self.put(rows, ids, flat, values, pending < 0)

    def mask(self, index: torch.Tensor, allowed: torch.Tensor) -> None:
        """Ban all but the allowed tokens, bool [M, V], of rows int64 [M]."""
        edited = self.edited()
        scores = edited.index_select(0, index)
        edited.index_copy_(0, index, scores.masked_fill(~allowed, -torch.inf))

    def draw(self, index: torch.Tensor, floats: torch.Tensor, *, every: bool = False) -> None:
        """Draw from all tokens of rows int64 [D]; floats [2, D], wide: temperature, uniform."""
        temperature, uniform = floats
        weights = self._scaled(index, temperature, every=every).exp_()
        self.set_drawn(index, invert(weights, uniform, self._wide, self.search))

    def finish(self, ints: torch.Tensor) -> None:
        """Take the best tokens where none was drawn, and keep all of them for the next step.

        ints [2, R]: rows of the last tokens, and 1 where a row was drawn.
        """
        last_rows, drawn = ints
        tokens, best = self.chosen(drawn)
        self._keep(last_rows, tokens, best, self.raw[: last_rows.shape[0]])

    def greedy(self, last_rows: torch.Tensor) -> None:
        """Head and finish in one, for rows that take their best token as it is: int64 [R]."""
        logits = self._head(self._hidden[: last_rows.shape[0]]).float()
        tokens = first_argmax(logits)
        best = logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
        self._keep(last_rows, tokens, best, logits)

    def logprobs(self, index: torch.Tensor, *, alternatives: bool = True) -> None:
        """Note log probabilities of the sampled tokens, and the best alternatives, of rows int64 [D]."""
        raw, tokens = self.raw.index_select(0, index), self.tokens.index_select(0, index)
        self.set_columns(index, logprob_columns(raw, tokens, self._device, alternatives=alternatives))

    def beams(self, index: torch.Tensor) -> None:
        """Note the best tokens of rows int64 [D], by their edited log probabilities."""
        self.set_columns(index, beam_columns(self.scores.index_select(0, index), self._device))

    def score(self, turn: int, ints: torch.Tensor, *, alternatives: bool = True) -> None:
        """Note log probabilities of prompt tokens, for every other step.

        ints int64 [3, N]: hidden states of the last prefill, the tokens after them, places of the results.
        """
        picks, targets, places = ints
        logits = self._head(self.chunk.index_select(0, picks)).float()
        columns = logprob_columns(logits, targets, self._device, alternatives=alternatives)
        self.set_prompts(turn, places, columns)

    def _rows(self, count: int) -> torch.Tensor:
        return torch.arange(count, device=self._device.torch_device)

    def waiting(self, pending_rows: torch.Tensor) -> torch.Tensor:
        """Return each row's newest token, int64 [R + 1], or NO_TOKEN if the host knows it."""
        waiting = self._last_tokens.index_select(0, pending_rows.clamp_min(0))
        return waiting.masked_fill(pending_rows < 0, NO_TOKEN)

    def _waiting_at(self, rows: torch.Tensor, pending_rows: torch.Tensor | None) -> torch.Tensor | None:
        return None if pending_rows is None else self.waiting(pending_rows).index_select(0, rows)

    def _banned(self, values: torch.Tensor, scores: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        """Return values [W] but for banned tokens, at these places of the scores."""
        if not self.restricted:
            return values
        return values.masked_fill(scores.view(-1).index_select(0, flat) == -torch.inf, -torch.inf)

    @staticmethod
    def _penalized(
        values: torch.Tensor,
        rows: torch.Tensor,
        ids: torch.Tensor,
        generated: torch.Tensor,
        penalties: torch.Tensor,
        pending: torch.Tensor | None,
        *,
        all_seen: bool = False,
    ) -> torch.Tensor:
        """Penalise values [W] whose tokens were seen; pending ones once more than generated."""
        repeated = None if pending is None else ids == pending
        counts = generated if all_seen else generated.clamp_min(0.0)
        if repeated is not None:
            counts = counts + repeated
        after = penalized(values, counts, *penalties.index_select(1, rows))
        if all_seen:
            return after
        seen = generated > NOT_SEEN
        return torch.where(seen if repeated is None else seen | repeated, after, values)

    def _scaled(self, index: torch.Tensor, temperature: torch.Tensor, *, every: bool) -> torch.Tensor:
        """Return the scores of rows, less their best, by their temperature: new, to be changed in place.

        Shifted first: the best score stays 0 however small the temperature is.
        """
        shifted = self.shifted(index, every=every)
        return shifted.div_(temperature.float().clamp_min(1e-30).unsqueeze(1))

    def _keep(
        self, last_rows: torch.Tensor, tokens: torch.Tensor, best: torch.Tensor, raw: torch.Tensor
    ) -> None:
        status = torch.full_like(tokens, int(RowStatus.SAMPLED))
        status = status.masked_fill(best == -torch.inf, int(RowStatus.NOTHING_LEFT))
        status = status.masked_fill(self.unusable(raw, best), int(RowStatus.NOT_FINITE))
        self._last_tokens.index_copy_(0, last_rows, tokens)
        self.set_result(tokens, status)
