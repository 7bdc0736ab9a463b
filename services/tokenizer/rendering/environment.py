"""The sandbox in which chat templates run: what Hugging Face's templates expect and no more.

Templates come with checkpoints, so they are foreign code. The environment is sandboxed, and all that a
template is given is plain data of one rendering.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# Of single operations of a template, beside the limits of a whole rendering, which are options of the service
# (task-timeout-s, worker-memory-mib, max-rendered-chars). No published template comes near them.
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
        """Of all that changes something, `append` and `pop` of a list that is not too long are allowed:
        templates keep ids in queues, and what they are given belongs to one rendering."""
        grows = type(obj) is list and attr in _LIST_METHODS and len(obj) < _MAX_LIST
        return grows or super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Raises SecurityError for a product of more than a million items or a hundred thousand bits."""
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
    """A fresh environment with the globals and filters that chat templates use."""
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
