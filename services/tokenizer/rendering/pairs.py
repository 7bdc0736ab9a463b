"""Pairs of texts as one prompt, for models that judge how well the texts belong together."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import msgspec

from services.tokenizer.rendering.errors import RefusalCode, RenderRefused
from services.tokenizer.rendering.renderer import Renderer
from services.tokenizer.rendering.turns import ChatOptions, ChatTurn, PromptLimits

# What models of the kind of Qwen3-Reranker were trained to be asked.
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note "
    'that the answer can only be "yes" or "no".'
)
DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_THINKING = "enable_thinking"
# A text that was cut may become other tokens at its end, so it is cut again if need be.
_CUTS = 4


class TextPair(msgspec.Struct, frozen=True, array_like=True):
    """Two texts that are judged together: a query and a document."""

    first: str
    second: str


class RenderedPair(msgspec.Struct, frozen=True, array_like=True):
    """`second_start`: index of the first token of the second text, 0 where the tokenizer does not tell."""

    ids: list[int]
    second_start: int


class PairRenderer:
    """Renders pairs for the model of `renderer`.

    A model with a chat template is asked, with `instruction`, whether the second text fits the first one. Any
    other tokenizer puts its separators between the two.
    """

    def __init__(self, renderer: Renderer, *, instruction: str, max_answer_tokens: int | None = None) -> None:
        self._renderer = renderer
        self._instruction = instruction
        self._max_answer_tokens = max_answer_tokens
        thinks = _THINKING in renderer.template_variables
        self._options = ChatOptions(variables=json.dumps({_THINKING: False}) if thinks else "")

    @property
    def available(self) -> bool:
        """Whether pairs can be rendered."""
        return self._renderer.has_chat_template or self._renderer.vocabulary.separates_pairs

    def render(self, pairs: Sequence[TextPair], limits: PromptLimits) -> list[RenderedPair]:
        """The prompt of each pair, in order. Of one that is too long its second text is cut at the end, where
        `limits` says so.

        Raises RenderRefused.
        """
        if not self.available:
            raise RenderRefused(
                "This model's tokenizer has no way to put two texts together.",
                param="pairs",
                code=RefusalCode.UNSUPPORTED,
            )
        found: list[RenderedPair] = []
        given = 0
        for pair in pairs:
            found.append(self._fitting(pair, limits))
            given += len(found[-1].ids)
            if self._max_answer_tokens is not None and given > self._max_answer_tokens:
                raise RenderRefused(
                    f"The text has at least {given} tokens; the tokenizer answers with at most "
                    f"{self._max_answer_tokens} (max-answer-tokens).",
                    param="pairs",
                )
        return found

    def _fitting(self, pair: TextPair, limits: PromptLimits) -> RenderedPair:
        render: Callable[[TextPair], RenderedPair]
        render = self._judged if self._renderer.has_chat_template else self._separated
        if limits.truncate_to is None and limits.max_tokens is not None:
            least = sum(map(self._renderer.vocabulary.least_tokens, (pair.first, pair.second)))
            self._check(least, limits.max_tokens, exact=False)
        if limits.truncate_to is not None:
            # Only its second text is cut, at its end.
            second = self._renderer.vocabulary.cutter.head(pair.second, limits.truncate_to)
            pair = TextPair(pair.first, second)
        for text in (pair.first, pair.second):
            self._renderer.refuse_slow(text, param="pairs")
        rendered = render(pair)
        for _ in range(_CUTS):
            over = len(rendered.ids) - (limits.truncate_to or len(rendered.ids))
            if over <= 0:
                break
            pair = TextPair(pair.first, self._renderer.vocabulary.without_last(pair.second, over))
            rendered = render(pair)
        most = [limit for limit in (limits.max_tokens, limits.truncate_to) if limit is not None]
        self._check(len(rendered.ids), min(most, default=None))
        return rendered

    def _judged(self, pair: TextPair) -> RenderedPair:
        question = f"<Instruct>: {self._instruction}\n<Query>: {pair.first}\n<Document>: {pair.second}"
        turns = [ChatTurn("system", _SYSTEM), ChatTurn("user", question)]
        return RenderedPair(self._renderer.chat(turns, self._options).ids, 0)

    def _separated(self, pair: TextPair) -> RenderedPair:
        return RenderedPair(*self._renderer.vocabulary.encode_pair(pair.first, pair.second))

    def _check(self, count: int, most: int | None, *, exact: bool = True) -> None:
        if most is not None and count > most:
            least = "" if exact else "at least "
            raise RenderRefused(
                f"A pair of texts has {least}{count} tokens, but at most {most} fit.",
                param="pairs",
                code=RefusalCode.CONTEXT_LENGTH_EXCEEDED,
            )
