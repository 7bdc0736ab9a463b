"""One text of a request in the making."""

from __future__ import annotations

from collections.abc import Sequence

from catenary.v1 import common_pb2
from gateway.errors import internal
from gateway.generation.plan import GenerationPlan
from gateway.generation.prompt import Prompt
from gateway.parsing import Part, TextParser
from gateway.streaming import ChoiceDelta, SequenceText, TextOptions, TokenLogprob, joined

_REASONS: dict[int, str] = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
}


class Choice:
    """Turns the tokens of one choice into deltas. The first one has what is told of the prompt."""

    __slots__ = (
        "_called",
        "_opened",
        "_parser",
        "_plan",
        "_prompt",
        "_prompt_only",
        "_ranks",
        "_reports",
        "_scored",
        "_single",
        "_tells_ids",
        "_text",
        "finish_reason",
        "index",
        "logprob",
    )

    def __init__(self, plan: GenerationPlan, index: int, prompt: Prompt, options: TextOptions) -> None:
        self._plan = plan
        self._prompt = prompt
        self._text = SequenceText(prompt.detokenizer(), options, len(prompt.text))
        self._parser = plan.parser(index)
        self._opened = False
        self._called = False
        # Looked at with every token.
        self._prompt_only = plan.prompt_only
        self._scored = plan.scored is not None
        self._reports = plan.top_count is not None
        self._ranks = plan.ranks
        self._tells_ids = bool(plan.fields.return_token_ids)
        self._single = plan.ends_with_call
        self.index = index
        self.finish_reason: str | None = None
        self.logprob = 0.0
        """Sum of the tokens' log probabilities, where candidates are ranked by it."""

    @property
    def tokens(self) -> int:
        """Tokens generated."""
        return self._text.tokens

    @property
    def reasoning_tokens(self) -> int:
        """How many of them are reasoning."""
        return 0 if self._parser is None else self._parser.reasoning_tokens(self._text.offsets)

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended it, or the one call that was wanted, and not the engine."""
        return self._text.stopped or self._called

    @property
    def mean_logprob(self) -> float:
        """Log probability per token."""
        return self.logprob / max(1, self.tokens)

    def read(
        self,
        ids: Sequence[int],
        logprobs: Sequence[TokenLogprob] | None,
        reason: common_pb2.FinishReason.ValueType | None,
        stop_token: int | None,
    ) -> ChoiceDelta:
        """The next tokens, and why they are the last ones.

        Raises ApiError if log probabilities are missing."""
        if not self._single or len(ids) < 2:
            return self._read(ids, logprobs, reason, stop_token)
        # One after the other: what stands behind the call does not count.
        deltas = []
        for place in range(len(ids)):
            last = place == len(ids) - 1
            some = slice(place, place + 1)
            deltas.append(
                self._read(
                    ids[some],
                    None if logprobs is None else logprobs[some],
                    reason if last else None,
                    stop_token if last else None,
                )
            )
            if self.finish_reason is not None:
                break
        return joined(deltas)

    def _read(
        self,
        ids: Sequence[int],
        logprobs: Sequence[TokenLogprob] | None,
        reason: common_pb2.FinishReason.ValueType | None,
        stop_token: int | None,
    ) -> ChoiceDelta:
        if self._prompt_only:
            ids, logprobs, stop_token = (), None, None
        elif not self._scored:
            logprobs = None
        elif len(logprobs or ()) != len(ids):
            raise internal()
        piece = self._text.feed(
            ids,
            logprobs if self._reports else None,
            ended=reason is not None,
            stop_token=stop_token is not None,
        )
        if self._ranks and logprobs is not None:
            self.logprob += sum(logprob.sampled for logprob in logprobs[: piece.count])
        stop_reason: str | int | None = piece.stop
        if piece.stop is not None:
            self.finish_reason = "stop"
        elif reason is not None:
            self.finish_reason = "length" if self._prompt_only else _REASONS[reason]
            if stop_token in (self._plan.fields.stop_token_ids or ()):
                stop_reason = stop_token
        text, entries, report = piece.text, piece.entries, None
        if not self._opened:
            self._opened = True
            text, entries = self._prompt.text + text, self._prompt.entries() + entries
            report = self._prompt.report()
        parts = None if self._parser is None else self._parse(self._parser, text)
        told = ids[: piece.count] if self._tells_ids else ()
        return ChoiceDelta(self.index, text, entries, self.finish_reason, stop_reason, told, report, parts)

    def _parse(self, parser: TextParser, text: str) -> list[Part]:
        """What new text says; a call makes a good end one of its own."""
        parts = parser.feed(text)
        if self._single and parser.called and self.tokens >= (self._plan.fields.min_tokens or 0):
            self._called = True
            self.finish_reason = "stop"
        if self.finish_reason is not None:
            parts += parser.finish()
            if self.finish_reason == "stop" and parser.called:
                self.finish_reason = self._plan.parsing.called_reason
        return parts


def text_options(plan: GenerationPlan, *, scores_stop_token: bool) -> TextOptions:
    """How the texts of a request end."""
    fields = plan.fields
    return TextOptions(
        fields.stops,
        fields.min_tokens or 0,
        bool(fields.include_stop_str_in_output),
        scores_stop_token,
        keeps_offsets=bool(plan.parsing.reasoning_parser),
    )
