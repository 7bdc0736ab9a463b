"""The templates of a model by name, and the one that a request brings."""

from __future__ import annotations

from services.tokenizer.rendering.budget import TemplateBudget
from services.tokenizer.rendering.detection import Parsers, detect_parsers
from services.tokenizer.rendering.errors import ModelFilesError, RefusalCode, RenderRefused
from services.tokenizer.rendering.files import DEFAULT_TEMPLATE, ModelFiles
from services.tokenizer.rendering.template import BadTemplate, ChatTemplate

TOOLS_TEMPLATE = "tool_use"


class Templates:
    """Chooses the template of a chat. Raises ModelFilesError if one of the model's own is not valid.

    `budget` bounds templates that come with requests; None: they are refused.
    """

    def __init__(self, files: ModelFiles, *, max_chars: int, budget: TemplateBudget | None) -> None:
        self._special_tokens = files.special_tokens
        self._max_chars = max_chars
        self._budget = budget
        self._own = {name: self._load(name, source) for name, source in files.templates.items()}

    def __bool__(self) -> bool:
        """Whether chats can be rendered."""
        return DEFAULT_TEMPLATE in self._own

    @property
    def variables(self) -> tuple[str, ...]:
        """Variables that the templates chosen without being named read, and a request may set."""
        chosen = (self._own[name] for name in (DEFAULT_TEMPLATE, TOOLS_TEMPLATE) if name in self._own)
        return tuple(sorted(frozenset().union(*(template.variables for template in chosen))))

    @property
    def read_tools(self) -> bool:
        """Whether the model sees the tools of a chat whose template is not named."""
        template = self._own.get(TOOLS_TEMPLATE) or self._own.get(DEFAULT_TEMPLATE)
        return template is not None and template.reads_tools

    def detect_parsers(self) -> Parsers:
        """The parsers that the model's answers need, as far as its templates tell."""
        names = (TOOLS_TEMPLATE, DEFAULT_TEMPLATE, *sorted(self._own))
        own = [self._own[name] for name in dict.fromkeys(names) if name in self._own]
        return detect_parsers([(template.written(), template.variables) for template in own])

    def choose(self, asked: str | None, *, has_tools: bool) -> ChatTemplate:
        """The template for a chat that brings tools or none. Raises RenderRefused.

        Args:
            asked: name of one of the model's own, or Jinja source; None: the model's for such a chat.
            has_tools: a model may have a template just for those.
        """
        if asked is not None:
            return self._own.get(asked) or self._requested(asked)
        name = TOOLS_TEMPLATE if has_tools and TOOLS_TEMPLATE in self._own else DEFAULT_TEMPLATE
        template = self._own.get(name)
        if template is None:
            raise RenderRefused(
                "This model has no chat template: use completions, or have the server started with one.",
                param="messages",
                code=RefusalCode.UNSUPPORTED,
            )
        return template

    def _load(self, name: str, source: str) -> ChatTemplate:
        try:
            return ChatTemplate(source, self._special_tokens, max_chars=self._max_chars)
        except BadTemplate as error:
            which = "" if name == DEFAULT_TEMPLATE else f" {name!r}"
            where = f" (line {error.line})" if error.line else ""
            raise ModelFilesError(f"the chat template{which} {error.reason}{where}") from None

    def _requested(self, source: str) -> ChatTemplate:
        budget = self._budget
        if budget is None:
            raise RenderRefused(
                "This server takes no chat templates from requests (allow-request-templates).",
                param="chat_template",
                code=RefusalCode.UNSUPPORTED,
            )
        if len(source.encode()) > budget.max_bytes:
            raise RenderRefused(
                f"The chat template has more than {budget.max_bytes} bytes.", param="chat_template"
            )
        try:
            return ChatTemplate(source, self._special_tokens, max_chars=self._max_chars, budget=budget)
        except BadTemplate as error:
            where = f" (line {error.line})" if error.line else ""
            raise RenderRefused(
                f"The request's chat template is not valid{where}.", param="chat_template"
            ) from None
