"""Requests to token ids: the pure core of the service. It knows neither gRPC nor processes."""

from __future__ import annotations

from collections.abc import Sequence

from services.tokenizer.rendering.errors import RefusalCode, RenderRefused
from services.tokenizer.rendering.files import ModelFiles
from services.tokenizer.rendering.markers import Markers
from services.tokenizer.rendering.template import ChatTemplate, ChatTurn
from services.tokenizer.rendering.vocabulary import Vocabulary


class Renderer:
    """Renders for one model. Raises ModelFilesError if its files cannot be used.

    `max_rendered_chars` bounds what a template may write, `max_answer_tokens` the ids that one call gives.
    """

    def __init__(
        self, files: ModelFiles, *, max_rendered_chars: int, max_answer_tokens: int | None = None
    ) -> None:
        self.vocabulary = Vocabulary(files)
        self._max_answer_tokens = max_answer_tokens
        self._template = (
            ChatTemplate(files.chat_template, files.special_tokens, max_chars=max_rendered_chars)
            if files.chat_template is not None
            else None
        )

    @property
    def has_chat_template(self) -> bool:
        """Whether chats can be rendered."""
        return self._template is not None

    def chat(
        self, turns: Sequence[ChatTurn], *, add_generation_prompt: bool, max_prompt_tokens: int | None
    ) -> list[int]:
        """Token ids of a chat, at least one. What a caller wrote never becomes a control token.

        Raises RenderRefused.
        """
        if self._template is None:
            raise RenderRefused(
                "This model has no chat template: use completions, or have the server started with one.",
                param="messages",
                code=RefusalCode.UNSUPPORTED,
            )
        texts = [text for turn in turns for text in (turn.content, turn.name) if text]
        if not any(self.vocabulary.control.spans(text) for text in texts):
            # One pass over the whole prompt: exactly the ids of transformers' apply_chat_template.
            prompt = self._template.render(turns, add_generation_prompt=add_generation_prompt)
            self._refuse_early(prompt, param="messages", limit=max_prompt_tokens)
            ids = self.vocabulary.encode(prompt, add_special_tokens=False)
            return self._checked(ids, param="messages", limit=max_prompt_tokens)
        markers = Markers.draw(texts)
        marked = [self._mark(turn, markers) for turn in turns]
        prompt = self._template.render(marked, add_generation_prompt=add_generation_prompt)
        self._refuse_early(markers.strip(prompt), param="messages", limit=max_prompt_tokens)
        control = self.vocabulary.control
        pieces = markers.split(prompt, leading=control.leading, trailing=control.trailing)
        ids = self.vocabulary.encode_pieces(pieces)
        return self._checked(ids, param="messages", limit=max_prompt_tokens)

    def completion(
        self, prompts: Sequence[str], *, add_special_tokens: bool, max_prompt_tokens: int | None
    ) -> list[list[int]]:
        """Token ids of each prompt, in order, each at least one. Spelled control tokens become themselves.

        Raises RenderRefused.
        """
        answer: list[list[int]] = []
        given = 0
        for prompt in prompts:
            self._refuse_early(prompt, param="prompt", limit=max_prompt_tokens, given=given)
            ids = self.vocabulary.encode(prompt, add_special_tokens=add_special_tokens)
            answer.append(self._checked(ids, param="prompt", limit=max_prompt_tokens, given=given))
            given += len(ids)
        return answer

    def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`, perhaps none. Raises RenderRefused."""
        self._refuse_early(text, param="text", limit=None)
        ids = self.vocabulary.encode(text, add_special_tokens=add_special_tokens)
        self._check_count(len(ids), param="text", limit=None)
        return ids

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of `ids`. Raises RenderRefused for an id that the tokenizer does not have."""
        highest = self.vocabulary.max_id
        if any(not 0 <= index <= highest for index in ids):
            raise RenderRefused(f"Token ids must be between 0 and {highest}.", param="tokens")
        return self.vocabulary.decode(ids, skip_special_tokens=skip_special_tokens)

    def _mark(self, turn: ChatTurn, markers: Markers) -> ChatTurn:
        spans = self.vocabulary.control.spans
        name = turn.name and markers.wrap(turn.name, spans(turn.name))
        return ChatTurn(turn.role, markers.wrap(turn.content, spans(turn.content)), name)

    def _refuse_early(self, text: str, *, param: str, limit: int | None, given: int = 0) -> None:
        if limit is not None or self._max_answer_tokens is not None:
            least = self.vocabulary.least_tokens(text)
            self._check_count(least, param=param, limit=limit, given=given, exact=False)

    def _checked(self, ids: list[int], *, param: str, limit: int | None, given: int = 0) -> list[int]:
        if not ids:
            raise RenderRefused("The prompt is empty: it has no tokens.", param=param)
        self._check_count(len(ids), param=param, limit=limit, given=given)
        return ids

    def _check_count(
        self, count: int, *, param: str, limit: int | None, given: int = 0, exact: bool = True
    ) -> None:
        """Refuse a text of `count` tokens, or more if not `exact`, after `given` tokens of earlier texts."""
        least = "" if exact else "at least "
        if limit is not None and count > limit:
            raise RenderRefused(
                f"The prompt has {least}{count} tokens, but at most {limit} fit.",
                param=param,
                code=RefusalCode.CONTEXT_LENGTH_EXCEEDED,
            )
        if self._max_answer_tokens is not None and given + count > self._max_answer_tokens:
            raise RenderRefused(
                f"The text has {least}{given + count} tokens; the tokenizer answers with at most "
                f"{self._max_answer_tokens} (max-answer-tokens).",
                param=param,
            )
