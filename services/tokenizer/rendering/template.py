"""A chat template, compiled once."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError

from services.tokenizer.rendering.budget import BudgetSpent, TemplateBudget, bounded
from services.tokenizer.rendering.environment import TemplateRefusal, sandbox
from services.tokenizer.rendering.errors import RenderRefused
from services.tokenizer.rendering.inputs import ChatInputs
from services.tokenizer.rendering.probes import Written, detect_style, written
from services.tokenizer.rendering.simple import is_simple
from services.tokenizer.rendering.variables import names_read, settable_variables

# Characters of a template's own message, and of a name, in an error: a caller reads a line.
MAX_TEMPLATE_MESSAGE = 500
MAX_SHOWN_NAME = 64
_REASONING = "reasoning"


class BadTemplate(Exception):
    """The source is no template, or breaks the sandbox. `reason` is one line; `line` is where, if known."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.line = line


class ChatTemplate:
    """Renders a chat to the prompt text.

    `special_tokens` are variables that the template may read (bos_token and so on), `max_chars` is what it
    may write, `budget` what its work may cost (None: it is a model's own and bounded by the worker alone).
    Raises BadTemplate.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        max_chars: int,
        budget: TemplateBudget | None = None,
    ) -> None:
        self._special_tokens = dict(special_tokens)
        self._max_chars = max_chars
        self._budget = budget
        self.source = source
        try:
            with self._bounds():
                self._compile(source)
                style = detect_style(lambda inputs: self._run(inputs, True))
            self.style = replace(style, reads_reasoning=self._reads_reasoning)
        except BadTemplate:
            raise
        except SecurityError as error:
            raise BadTemplate(f"breaks the sandbox: {one_line(str(error))}") from None
        except TemplateError as error:
            raise BadTemplate(
                f"is not valid: {one_line(str(error))}", getattr(error, "lineno", None)
            ) from None
        except BudgetSpent:
            raise self._spent() from None
        except Exception as error:
            # Deep nesting, memory, what Python's compiler refuses.
            raise BadTemplate(f"is not valid: {one_line(str(error))}") from None

    def written(self) -> Written:
        """What it writes for small dialogues of ours, by which its model's formats are known."""
        return written(lambda inputs: self._run(inputs, True), self.style, self.variables)

    def render(self, inputs: ChatInputs, *, add_generation_prompt: bool) -> str:
        """The prompt text. Raises RenderRefused: in the template's own words, if it has any."""
        unknown = sorted(inputs.variables.keys() - self.variables)
        if unknown:
            raise RenderRefused(
                "The model's chat template does not read this variable, or a request may not set it.",
                param=_param(unknown[0]),
            )
        if inputs.documents and not self.reads_documents:
            raise RenderRefused("The model's chat template does not read documents.", param="documents")
        try:
            with self._bounds():
                return self._run(inputs, add_generation_prompt)
        except RenderRefused:
            raise
        except TemplateRefusal as refusal:
            raise RenderRefused(one_line(str(refusal)), param="messages") from None
        except BudgetSpent:
            raise self._spent() from None
        except Exception:
            # Anything a template does wrong (a missing key, a type, a sandbox rule) is about these messages,
            # and what the interpreter says about it is not for the caller.
            raise RenderRefused(
                "The model's chat template cannot render these messages.", param="messages"
            ) from None

    def _compile(self, source: str) -> None:
        environment = sandbox()
        self._template = environment.from_string(source)
        parsed = environment.parse(source)
        taken = {*environment.globals, *self._special_tokens}
        self.variables = settable_variables(parsed, taken)
        """Names that a request may set."""
        names = names_read(parsed)
        self.reads_documents = "documents" in names
        self.reads_tools = "tools" in names
        self.is_simple = is_simple(parsed)
        """See there."""
        words = (node.attr for node in parsed.find_all(nodes.Getattr))
        texts = (node.value for node in parsed.find_all(nodes.Const))
        self._reads_reasoning = _REASONING in words or _REASONING in texts

    def _run(self, inputs: ChatInputs, add_generation_prompt: bool) -> str:
        chunks: list[str] = []
        size = 0
        variables = self._special_tokens | inputs.variables
        variables |= {"messages": inputs.messages, "add_generation_prompt": add_generation_prompt}
        variables |= {"tools": inputs.tools, "documents": inputs.documents}
        for chunk in self._template.generate(variables):
            size += len(chunk)
            if size > self._max_chars:
                raise RenderRefused(
                    f"The rendered prompt is longer than {self._max_chars} characters.", param="messages"
                )
            chunks.append(chunk)
        return "".join(chunks)

    def _bounds(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._budget is None else bounded(self._budget)

    def _spent(self) -> RenderRefused:
        seconds = 0 if self._budget is None else self._budget.seconds
        return RenderRefused(
            f"The request's chat template ran longer than {seconds:g} seconds.", param="chat_template"
        )


def _param(name: str) -> str:
    shown = name.isascii() and name.isidentifier() and len(name) <= MAX_SHOWN_NAME
    return f"chat_template_kwargs.{name}" if shown else "chat_template_kwargs"


def one_line(text: str) -> str:
    """`text` on one line of moderate length."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_TEMPLATE_MESSAGE else line[: MAX_TEMPLATE_MESSAGE - 3] + "..."
