"""Which chat templates are so simple that what they do is bounded by how long the chat is.

Jinja's sandbox keeps a template from the interpreter, not from taking long or from growing what it writes. A
simple one has no means for either: it walks the messages and what is in them, compares, cuts and joins texts.
It calls nothing but a few methods of texts and objects, so it has no use for a hole in the sandbox either.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jinja2 import nodes

MAX_GROWTH = 64
"""How many times as long as the texts of a chat a text may become that the template puts together."""
_MAX_LOOPS = 2
_WIDEST_INDENT = 8

_PLAIN: tuple[type[nodes.Node], ...] = (
    *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.If, nodes.Break, nodes.Continue, nodes.Const),
    *(nodes.Name, nodes.List, nodes.Tuple, nodes.Slice, nodes.CondExpr, nodes.Compare, nodes.Operand),
    *(nodes.And, nodes.Or, nodes.Not, nodes.Neg, nodes.Getitem, nodes.Keyword, nodes.Add, nodes.Sub),
    nodes.Concat,
)
_GROWING_FILTERS = frozenset(("tojson", "string"))
_FILTERS = _GROWING_FILTERS | {
    *("trim", "length", "count", "lower", "upper", "default", "d", "first", "last", "safe"),
}
_TESTS = frozenset(
    (
        *("defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "boolean", "number"),
        *("integer", "true", "false", "in", "eq", "equalto", "==", "ne", "!="),
    )
)
_FUNCTIONS = frozenset(("raise_exception", "namespace", "strftime_now"))
_METHODS = frozenset(
    ("strip", "lstrip", "rstrip", "split", "startswith", "endswith", "lower", "upper", "get", "items", "keys")
)
# What a loop in a loop may walk: short in a chat without tools and documents.
_SHORT = frozenset(("content", "tool_calls", "tools", "documents"))


def is_simple(parsed: nodes.Template) -> bool:
    """Whether rendering takes time and memory in proportion to the chat's length."""
    if not _known(parsed, 0):
        return False
    given = list(_given(parsed))
    grown = _grown_names(given)
    growth = 1
    for target, value in given:
        if _grows(value):
            growth *= 1 + sum(1 for _ in value.find_all(nodes.Name))
        # What outlives a turn of a loop could grow in each of them.
        if isinstance(target, nodes.NSRef) and (_grows(value) or _mentions(value, grown)):
            return False
    escaped = (one.node for one in parsed.find_all(nodes.Filter) if one.name in _GROWING_FILTERS)
    # What is escaped again and again doubles each time.
    again = any(one is not None and (_grows(one) or _mentions(one, grown)) for one in escaped)
    return growth <= MAX_GROWTH and not again


def _known(node: nodes.Node, loops: int) -> bool:
    """Whether it, and all in it, is of the kinds that simple templates have; it stands in so many loops."""
    match node:
        case nodes.For():
            if node.recursive or loops >= _MAX_LOOPS or (loops and not _is_short(node.iter)):
                return False
            loops += 1
        case nodes.Assign() | nodes.NSRef():
            pass
        case nodes.Getattr():
            if node.attr.startswith("_"):
                return False
        case nodes.Call():
            if not _is_known_call(node):
                return False
            called = [node.node.node] if isinstance(node.node, nodes.Getattr) else []
            return all(_known(part, loops) for part in (*called, *node.args, *node.kwargs))
        case nodes.Filter():
            dynamic = node.dyn_args is not None or node.dyn_kwargs is not None
            if node.name not in _FILTERS or node.node is None or dynamic:
                return False
            if node.name == "tojson" and (node.args or not all(map(_is_modest, node.kwargs))):
                return False
        case nodes.Test():
            if node.name not in _TESTS:
                return False
        case _:
            if not isinstance(node, _PLAIN):
                return False
    return all(_known(child, loops) for child in node.iter_child_nodes())


def _is_known_call(call: nodes.Call) -> bool:
    if call.dyn_args is not None or call.dyn_kwargs is not None:
        return False
    if isinstance(call.node, nodes.Name):
        return call.node.name in _FUNCTIONS
    return isinstance(call.node, nodes.Getattr) and call.node.attr in _METHODS


def _is_short(walked: nodes.Node) -> bool:
    match walked:
        case nodes.Name(name=name) | nodes.Getattr(attr=name):
            return name in _SHORT
        case nodes.Getitem(arg=nodes.Const(value=name)):
            return name in _SHORT
        case nodes.Or(left=left, right=right):
            return _is_short(left) and _is_short(right)
        case nodes.List(items=items):
            return not items
    return False


def _is_modest(argument: nodes.Pair | nodes.Keyword) -> bool:
    """Return whether a filter's argument is small: an indent of a million blanks is not."""
    value = argument.value
    return isinstance(value, nodes.Const) and not (type(value.value) is int and value.value > _WIDEST_INDENT)


def _given(parsed: nodes.Template) -> Iterator[tuple[Any, nodes.Node]]:
    """Yield each target with its value, given by an assignment or by a loop."""
    for assigned in parsed.find_all(nodes.Assign):
        yield from ((target, assigned.node) for target in _targets(assigned.target))
    for loop in parsed.find_all(nodes.For):
        yield from ((target, loop.iter) for target in _targets(loop.target))


def _targets(target: nodes.Node) -> list[Any]:
    if not isinstance(target, nodes.Tuple):
        return [target]
    return [each for part in target.items for each in _targets(part)]


def _grown_names(given: list[tuple[Any, nodes.Node]]) -> set[str]:
    """Return the names of values that may be longer than what they were made of."""
    grown: set[str] = set()
    while True:
        more = {
            target.name
            for target, value in given
            if isinstance(target, nodes.Name) and (_grows(value) or _mentions(value, grown))
        }
        if more <= grown:
            return grown
        grown |= more


def _grows(node: nodes.Node) -> bool:
    match node:
        case nodes.Add(left=left, right=right):
            # A number, whatever the other is.
            here = not any(isinstance(one, nodes.Const) and type(one.value) is int for one in (left, right))
        case nodes.Concat():
            here = True
        case nodes.List(items=items) | nodes.Tuple(items=items):
            here = not all(isinstance(item, nodes.Const) for item in items)
        case nodes.Filter(name=name):
            here = name in _GROWING_FILTERS
        case _:
            here = False
    return here or any(map(_grows, node.iter_child_nodes()))


def _mentions(node: nodes.Node, names: set[str]) -> bool:
    if isinstance(node, nodes.Name) and node.name in names:
        return True
    return any(_mentions(child, names) for child in node.iter_child_nodes())
