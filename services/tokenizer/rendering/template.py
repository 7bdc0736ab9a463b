"""Chat templates: a model's by name, or the one that a request brings, compiled once and run in a sandbox.

Templates come with checkpoints, so they are foreign code. The sandbox has what Hugging Face's templates
expect and no more, and all that a template is given is plain data of one rendering. A template that came with
a request is bounded in time and memory besides, on top of the worker's own bounds.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Container, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import datetime
from typing import Any

import msgspec
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from catenary.memory import bounded_memory
from services.tokenizer.rendering.detection import Parsers, Written, detect_parsers, detect_style, written
from services.tokenizer.rendering.files import (
    DEFAULT_TEMPLATE,
    ModelFiles,
    ModelFilesError,
    RefusalCode,
    RenderRefused,
)
from services.tokenizer.rendering.inputs import ChatInputs
from services.tokenizer.rendering.simple import is_simple

# A signal may come where its exception is swallowed (in a finalizer): then it comes again.
_AGAIN_S = 0.25


class TemplateBudget(msgspec.Struct, frozen=True):
    """Bytes of the source; seconds of its compilation, and of its rendering; bytes that either may take."""

    max_bytes: int = 65_536
    seconds: float = 1.0
    memory_bytes: int = 256 << 20


class BudgetSpent(BaseException):
    """The time is up. Not an Exception: no handler of the template engine may take it for an error."""


@contextmanager
def bounded(budget: TemplateBudget) -> Iterator[None]:
    """Run the block under a budget. Raises BudgetSpent; memory ends as MemoryError.

    For the main thread alone: it is by a signal that the block is interrupted. A single step inside of the
    interpreter's own code cannot be; then the process is killed from outside.
    """
    armed = True

    def ring(_signal: int, _frame: object) -> None:
        if armed:
            raise BudgetSpent

    former = signal.signal(signal.SIGALRM, ring)
    try:
        with bounded_memory(budget.memory_bytes):
            signal.setitimer(signal.ITIMER_REAL, budget.seconds, _AGAIN_S)
            yield
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


# Limits of single operations of a template. Those of a whole rendering are options of the service
# (task-timeout-s, worker-memory-mib, max-rendered-chars). No published template comes near these.
_MAX_REPEATED = 1_000_000
_MAX_BITS = 100_000
_MAX_LIST = 100_000
_LIST_METHODS = frozenset(("append", "pop"))


class TemplateRefusal(TemplateError):
    """The template called raise_exception: its own words for what is wrong with the messages."""


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's strictest sandbox, but for lists that grow and shrink. No single product or power can take long
    or fill the memory."""

    intercepted_binops = frozenset({"*", "**"})

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Allow `append` and `pop` of a list that is not too long, and nothing else that changes a value:
        templates keep ids in queues, and their values belong to one rendering."""
        grows = type(obj) is list and attr in _LIST_METHODS and len(obj) < _MAX_LIST
        return grows or super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Raise SecurityError for a product of more than a million items or a hundred thousand bits."""
        if operator == "*":
            items, times = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(times, int) and isinstance(items, str | list | tuple):
                _check_size(len(items) * times, _MAX_REPEATED)
            elif isinstance(left, int) and isinstance(right, int):
                _check_size(left.bit_length() + right.bit_length(), _MAX_BITS)
        elif isinstance(left, int) and isinstance(right, int):
            _check_size(left.bit_length() * right, _MAX_BITS)
        return super().call_binop(context, operator, left, right)


def _check_size(size: int, most: int) -> None:
    if size > most:
        raise SecurityError(f"a product or power is too large: of more than {most} items or bits")


def sandbox() -> Sandbox:
    """Return a fresh environment with the globals and filters that chat templates use."""
    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _GuardedNamespace
    return environment


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; here its body is simply rendered."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render_body"), [], [], body).set_lineno(line)

    def _render_body(self, caller: Macro) -> str:
        return caller()


class _GuardedNamespace(Namespace):
    """Jinja's namespace without underscore names, which could reach interpreter internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # As in Jinja, so that a template may name an attribute `self`.
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError("a namespace attribute may not begin with an underscore")


def _raise_exception(message: object) -> None:
    raise TemplateRefusal(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which models were never trained on. What other filters give
    # (`tools | map(...)`) is a generator.
    value = list(value) if isinstance(value, Generator) else value
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


_OURS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
# Words of transformers' own call. A caller that sets one means that, not a variable of the template.
_RESERVED = frozenset(
    {
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "kwargs",
        "max_length",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer",
        "tokenizer_kwargs",
        "truncation",
    }
)
_SPECIAL_TOKENS = frozenset(
    f"{name}_token" for name in ("bos", "cls", "eos", "image", "mask", "pad", "sep", "unk")
)
_TESTS, _FILTERS = frozenset({"defined", "undefined", "none"}), frozenset({"default", "d"})


def names_read(parsed: nodes.Template) -> frozenset[str]:
    """Return the names that the template looks up outside of itself."""
    return frozenset(meta.find_undeclared_variables(parsed))


def settable_variables(parsed: nodes.Template, taken: Container[str]) -> frozenset[str]:
    """Return the names that the template reads and that only a request can give; `taken` are further ones
    that are given.

    A name that the template sets itself is one only if it asks whether it was given: jinja counts as read
    what is set in a branch and used after it.
    """
    own = {name.name for name in parsed.find_all(nodes.Name) if name.ctx == "store"} - set(_asked(parsed))
    return frozenset(
        name
        for name in names_read(parsed) - _OURS - _RESERVED - _SPECIAL_TOKENS - own
        if not name.startswith("_") and name not in taken
    )


def _asked(parsed: nodes.Template) -> Iterator[str]:
    """Yield the names of which the template asks whether they are defined, or for which it has a default."""
    for kind, names in ((nodes.Test, _TESTS), (nodes.Filter, _FILTERS)):
        for node in parsed.find_all(kind):
            if node.name in names and isinstance(node.node, nodes.Name):
                yield node.node.name


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
        """The output for small dialogues of ours, by which its model's formats are known."""
        return written(lambda inputs: self._run(inputs, True), self.style, self.variables)

    def render(self, inputs: ChatInputs, *, add_generation_prompt: bool) -> str:
        """Return the prompt text. Raises RenderRefused: in the template's own words, if it has any."""
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
    """Return `text` on one line of moderate length."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_TEMPLATE_MESSAGE else line[: MAX_TEMPLATE_MESSAGE - 3] + "..."


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
        """Return the parsers that the model's answers need, as far as its templates tell."""
        names = (TOOLS_TEMPLATE, DEFAULT_TEMPLATE, *sorted(self._own))
        own = [self._own[name] for name in dict.fromkeys(names) if name in self._own]
        return detect_parsers([(template.written(), template.variables) for template in own])

    def choose(self, asked: str | None, *, has_tools: bool) -> ChatTemplate:
        """Return the template for a chat that brings tools or none. Raises RenderRefused.

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
