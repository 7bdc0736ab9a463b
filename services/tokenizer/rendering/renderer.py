"""Requests to token ids: the pure core of the service. It knows neither gRPC nor processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from services.tokenizer.rendering.budget import TemplateBudget
from services.tokenizer.rendering.continuing import Continuation
from services.tokenizer.rendering.detection import Parsers
from services.tokenizer.rendering.errors import RefusalCode, RenderRefused
from services.tokenizer.rendering.files import ModelFiles
from services.tokenizer.rendering.inputs import ChatInputs, read_inputs
from services.tokenizer.rendering.markers import Markers
from services.tokenizer.rendering.template import ChatTemplate
from services.tokenizer.rendering.templates import Templates
from services.tokenizer.rendering.turns import ChatOptions, ChatTurn, PromptLimits
from services.tokenizer.rendering.values import JsonLimits
from services.tokenizer.rendering.vocabulary import Vocabulary

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
        """A chat's prompt. What a caller wrote never becomes a control token.

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
        """As `chat`, in time that is bounded by the chat's length; None for one that may take longer, since
        its template is not simple or it spells a control token."""
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
        """Token ids of each prompt, in order, each at least one. Spelled control tokens become themselves.

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
        """Token ids of `text`, perhaps none. Raises RenderRefused."""
        self._refuse_early(text, param="text", limits=_NO_LIMITS)
        ids = self.vocabulary.encode(text, add_special_tokens=add_special_tokens)
        self._check_count(len(ids), param="text", limits=_NO_LIMITS)
        return ids

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of `ids`. Raises RenderRefused for an id that the tokenizer does not have."""
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
        """`text`, or what matters of it."""
        if limits.first_tokens is not None:
            return self.vocabulary.cutter.head(text, limits.first_tokens)
        if limits.truncate_to is not None:
            return self.vocabulary.cutter.tail(text, limits.truncate_to)
        return text

    def refuse_slow(self, text: str, *, param: str) -> None:
        """Raises RenderRefused for a text that cannot be tokenized within the limit of time."""
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
