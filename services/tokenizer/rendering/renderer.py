"""Render requests to token ids: the pure core of the service. It knows neither gRPC nor processes.

A prompt may end inside of its last message, as transformers' continue_final_message makes it: the text to be
continued is given to the template with a tag behind it, and the prompt is cut where the tag came out.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import msgspec

from services.tokenizer.rendering.control_tokens import Markers
from services.tokenizer.rendering.detection import Parsers
from services.tokenizer.rendering.files import ModelFiles, RefusalCode, RenderRefused
from services.tokenizer.rendering.inputs import (
    ChatInputs,
    ChatOptions,
    ChatTurn,
    JsonLimits,
    PromptLimits,
    read_inputs,
)
from services.tokenizer.rendering.template import ChatTemplate, TemplateBudget, Templates
from services.tokenizer.rendering.vocabulary import Vocabulary

PARAM = "continue_final_message"
_TAG_BYTES = 16


@dataclass(frozen=True, slots=True)
class Continuation:
    """`text`: that of the last message. `tag` cannot be guessed; its last character is a space."""

    text: str
    tag: str

    @classmethod
    def of(cls, messages: list[dict[str, Any]]) -> Self:
        """Continue the last of a template's messages. Raises RenderRefused if that one has no content."""
        content = messages[-1].get("content")
        text = content[-1]["text"] if isinstance(content, list) and content else content
        if not isinstance(text, str):
            raise RenderRefused("The last message has no content that could be gone on with.", param=PARAM)
        return cls(text, f"CONTINUE{secrets.token_hex(_TAG_BYTES)} ")

    def tagged(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages with the tag behind the last one's text."""
        *before, last = messages
        text = self.text + self.tag
        content = [{**last["content"][-1], "text": text}] if isinstance(last["content"], list) else text
        return [*before, {**last, "content": content}]

    def cut(self, prompt: str) -> str:
        """Return the rendered prompt up to the place at which its last message is continued. Raises
        RenderRefused."""
        place = prompt.rfind(self.tag.strip())
        if place < 0 or self.text.strip() not in prompt:
            raise RenderRefused(
                "The model's chat template changes the last message, so that it cannot be gone on with.",
                param=PARAM,
            )
        # Without the space after it, the template strips contents: so is what is gone on with.
        kept = prompt.startswith(self.tag, place)
        return prompt[:place] if kept else prompt[:place].rstrip()


TAIL_CHARS = 256
_NO_LIMITS = PromptLimits()


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """`ids`: at least one. `tail`: the prompt's last characters."""

    ids: list[int]
    tail: str


class Renderer:
    """Renders for one model. Raises ModelFilesError if its files cannot be used.

    `max_rendered_chars` bounds what a template may write, `max_answer_tokens` the ids that one call gives,
    `max_seconds` the time that tokenizing a text would take,
    `json_limits` the data in a request, `request_templates` the templates in one (None: there may be none).
    """

    def __init__(
        self,
        files: ModelFiles,
        *,
        max_rendered_chars: int,
        max_answer_tokens: int | None = None,
        max_seconds: float | None = None,
        json_limits: JsonLimits | None = None,
        request_templates: TemplateBudget | None = None,
    ) -> None:
        self.vocabulary = Vocabulary(files)
        self._max_answer_tokens = max_answer_tokens
        self._max_seconds = max_seconds
        self._json_limits = json_limits or JsonLimits()
        self._response_template = files.response_template
        self._templates = Templates(files, max_chars=max_rendered_chars, budget=request_templates)

    @property
    def has_chat_template(self) -> bool:
        """Whether chats can be rendered."""
        return bool(self._templates)

    @property
    def template_variables(self) -> tuple[str, ...]:
        """Variables of the chat template that a request may set."""
        return self._templates.variables

    @property
    def reads_tools(self) -> bool:
        """Whether the chat template shows a request's tools to the model."""
        return self._templates.read_tools

    @property
    def parsers(self) -> Parsers:
        """The parsers that the model's answers need, as far as its files tell."""
        return replace(self._templates.detect_parsers(), response_template=self._response_template)

    @property
    def is_simple(self) -> bool:
        """Whether there is a template for chats without tools that is simple."""
        return self.has_chat_template and self._templates.choose(None, has_tools=False).is_simple

    def chat(
        self, turns: Sequence[ChatTurn], options: ChatOptions, limits: PromptLimits = _NO_LIMITS
    ) -> RenderedChat:
        """Return a chat's prompt. What a caller wrote never becomes a control token.

        Raises RenderRefused.
        """
        template = self._templates.choose(options.chat_template, has_tools=bool(options.tools))
        inputs = read_inputs(turns, options, template.style, self._json_limits)
        texts = list(inputs.strings())
        markers = Markers.draw(texts) if self._spell_control(texts) else None
        return self._rendered(template, inputs, options, markers, limits)

    def simple_chat(
        self, turns: Sequence[ChatTurn], options: ChatOptions, limits: PromptLimits = _NO_LIMITS
    ) -> RenderedChat | None:
        """Render a chat as `chat` does, in time that is bounded by the chat's length. None for one that may
        take longer: its template is not simple, or it spells a control token."""
        template = self._templates.choose(options.chat_template, has_tools=bool(options.tools))
        if not template.is_simple:
            return None
        inputs = read_inputs(turns, options, template.style, self._json_limits)
        if self._spell_control(inputs.strings()):
            return None
        return self._rendered(template, inputs, options, None, limits)

    def _rendered(
        self,
        template: ChatTemplate,
        inputs: ChatInputs,
        options: ChatOptions,
        markers: Markers | None,
        limits: PromptLimits,
    ) -> RenderedChat:
        if markers is None:
            # One pass over the whole prompt: exactly the ids of transformers' apply_chat_template.
            prompt = shown = _prompt(template, inputs, options)
        else:
            prompt = _marked_prompt(template, self._marked(inputs, markers), options, markers)
            shown = markers.strip(prompt)
        if markers is None:
            prompt = self._part(prompt, limits)
            self._refuse_early(prompt, param="messages", limits=limits)
            ids = self.vocabulary.encode(prompt, add_special_tokens=options.add_special_tokens)
        else:
            self._refuse_early(shown, param="messages", limits=limits)
            control = self.vocabulary.control
            pieces = markers.split(prompt, leading=control.leading, trailing=control.trailing)
            ids = self.vocabulary.encode_pieces(pieces)
            ids = self.vocabulary.framed(ids, shown) if options.add_special_tokens else ids
        return RenderedChat(self._checked(ids, param="messages", limits=limits), shown[-TAIL_CHARS:])

    def completion(
        self, prompts: Sequence[str], *, add_special_tokens: bool, limits: PromptLimits = _NO_LIMITS
    ) -> list[list[int]]:
        """Return the token ids of each prompt, in order, each at least one. Spelled control tokens become
        themselves.

        Raises RenderRefused.
        """
        answer: list[list[int]] = []
        given = 0
        for whole in prompts:
            prompt = self._part(whole, limits)
            self._refuse_early(prompt, param="prompt", limits=limits, given=given)
            ids = self.vocabulary.encode(prompt, add_special_tokens=add_special_tokens)
            answer.append(self._checked(ids, param="prompt", limits=limits, given=given))
            given += len(answer[-1])
        return answer

    def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of `text`, perhaps none. Raises RenderRefused."""
        self._refuse_early(text, param="text", limits=_NO_LIMITS)
        ids = self.vocabulary.encode(text, add_special_tokens=add_special_tokens)
        self._check_count(len(ids), param="text", limits=_NO_LIMITS)
        return ids

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of `ids`. Raises RenderRefused for an id that the tokenizer does not have."""
        highest = self.vocabulary.max_id
        if any(not 0 <= index <= highest for index in ids):
            raise RenderRefused(f"Token ids must be between 0 and {highest}.", param="tokens")
        return self.vocabulary.decode(ids, skip_special_tokens=skip_special_tokens)

    def _spell_control(self, texts: Iterable[str]) -> bool:
        """Whether one of a chat's texts spells a control token."""
        return any(self.vocabulary.control.spans(text) for text in texts)

    def _marked(self, inputs: ChatInputs, markers: Markers) -> ChatInputs:
        spans = self.vocabulary.control.spans
        return inputs.map(lambda text: markers.wrap(text, spans(text)))

    def _part(self, text: str, limits: PromptLimits) -> str:
        """Return `text`, or the part of it that matters."""
        if limits.first_tokens is not None:
            return self.vocabulary.cutter.head(text, limits.first_tokens)
        if limits.truncate_to is not None:
            return self.vocabulary.cutter.tail(text, limits.truncate_to)
        return text

    def refuse_slow(self, text: str, *, param: str) -> None:
        """Raise RenderRefused for a text that cannot be tokenized within the limit of time."""
        limit = self._max_seconds
        if limit is not None and (seconds := self.vocabulary.seconds(text)) > limit:
            raise RenderRefused(
                f"To tokenize the text of {len(text.encode())} bytes would take about {seconds:.0f} s, but "
                f"the limit is {limit:g} s (task-timeout-s). Please shorten it.",
                param=param,
            )

    def _refuse_early(self, text: str, *, param: str, limits: PromptLimits, given: int = 0) -> None:
        if limits.max_tokens is not None or self._max_answer_tokens is not None:
            least = self.vocabulary.least_tokens(text)
            self._check_count(least, param=param, limits=limits, given=given, exact=False)
        self.refuse_slow(text, param=param)

    def _checked(self, ids: list[int], *, param: str, limits: PromptLimits, given: int = 0) -> list[int]:
        if not ids:
            raise RenderRefused("The prompt is empty: it has no tokens.", param=param)
        self._check_count(len(ids), param=param, limits=limits, given=given)
        return ids[len(ids) - limits.kept(len(ids)) :]

    def _check_count(
        self, count: int, *, param: str, limits: PromptLimits, given: int = 0, exact: bool = True
    ) -> None:
        """Refuse a text of `count` tokens, or more if not `exact`, after `given` tokens of earlier texts."""
        least = "" if exact else "at least "
        count = limits.kept(count)
        if limits.max_tokens is not None and count > limits.max_tokens:
            raise RenderRefused(
                f"The prompt has {least}{count} tokens, but at most {limits.max_tokens} fit.",
                param=param,
                code=RefusalCode.CONTEXT_LENGTH_EXCEEDED,
            )
        if self._max_answer_tokens is not None and given + count > self._max_answer_tokens:
            raise RenderRefused(
                f"The text has {least}{given + count} tokens; the tokenizer answers with at most "
                f"{self._max_answer_tokens} (max-answer-tokens).",
                param=param,
            )


def _prompt(template: ChatTemplate, inputs: ChatInputs, options: ChatOptions) -> str:
    if not options.continue_final_message:
        return template.render(inputs, add_generation_prompt=options.add_generation_prompt)
    continuation = Continuation.of(inputs.messages)
    tagged = inputs.with_messages(continuation.tagged(inputs.messages))
    return continuation.cut(template.render(tagged, add_generation_prompt=False))


def _marked_prompt(template: ChatTemplate, inputs: ChatInputs, options: ChatOptions, markers: Markers) -> str:
    try:
        return _prompt(template, inputs, options)
    except RenderRefused as refused:
        # A template that refuses in its own words may quote the messages.
        raise RenderRefused(markers.strip(refused.message), param=refused.param, code=refused.code) from None


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
        """Return the prompt of each pair, in order. Of one that is too long its second text is cut at the
        end, where `limits` says so.

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
