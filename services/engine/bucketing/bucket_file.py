"""Buckets from a text file: one `(batch, query, context_blocks)` a line, read without running anything."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Final

from services.engine.bucketing.bucket import Bucket

# Beyond these a file is no list of buckets: thousands of graphs would take days to capture.
MAX_FILE_BYTES: Final = 1 << 20
_MAX_LINE: Final = 10_000
_MAX_RANGE: Final = 10_000
_MAX_BUCKETS: Final = 100_000
_MAX_VALUE: Final = 2**31 - 1
_NAMES: Final = ("batch", "query", "context_blocks")
_LEAST: Final = (1, 1, 0)


def read_bucket_file(path: Path) -> tuple[Bucket, ...]:
    """Return the buckets of a file, sorted, each once.

    Raises ValueError, one line that names file and line.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"bucket file {path} cannot be read: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"bucket file {path} is larger than {MAX_FILE_BYTES} bytes")
    try:
        return parse_buckets(data.decode("utf-8"))
    except UnicodeDecodeError:
        raise ValueError(f"bucket file {path} is not text in UTF-8") from None
    except ValueError as error:
        raise ValueError(f"bucket file {path}: {error}") from None


def parse_buckets(text: str) -> tuple[Bucket, ...]:
    """Parse a bucket file. Each of a line's three items is an int, a list of ints or a range(...).

    A line stands for the product of its items; a query of 1 makes decode buckets; # starts a comment. Raises
    ValueError, one line that names the line's number.
    """
    found: set[Bucket] = set()
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.split("#", 1)[0].strip()
        if not stripped:
            continue
        try:
            batches, queries, contexts = _items(stripped)
            if len(batches) * len(queries) * len(contexts) > _MAX_BUCKETS:
                raise ValueError(f"more than {_MAX_BUCKETS} buckets")
            found.update(Bucket(*shape) for shape in product(batches, queries, contexts))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
        if len(found) > _MAX_BUCKETS:
            raise ValueError(f"line {number}: more than {_MAX_BUCKETS} buckets")
    if not found:
        raise ValueError("it holds no buckets")
    return tuple(sorted(found))


def format_buckets(buckets: Iterable[Bucket], comments: Sequence[str] = ()) -> str:
    """Return a bucket file's text: the comments, then a line for each row and query count of each phase."""
    lines = [f"# {comment}" for comment in comments]
    contexts: dict[tuple[int, int], list[int]] = {}
    for bucket in sorted(set(buckets)):
        contexts.setdefault((bucket.batch, bucket.query), []).append(bucket.context_blocks)
    for title, decode in (("prefill", False), ("decode", True)):
        lines.append(f"# {title}")
        for (batch, query), values in contexts.items():
            if (query == 1) is decode:
                lines.append(f"({batch}, {query}, {values[0] if len(values) == 1 else values})")
    return "\n".join(lines) + "\n"


def _items(line: str) -> list[Sequence[int]]:
    """Return the three items of a line as lists of values."""
    if len(line) > _MAX_LINE:
        raise ValueError(f"longer than {_MAX_LINE} characters")
    try:
        node = ast.parse(line, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError("expected (batch, query, context_blocks)") from None
    if not isinstance(node, ast.Tuple) or len(node.elts) != len(_NAMES):
        raise ValueError("expected (batch, query, context_blocks)")
    items = [_values(part, name) for part, name in zip(node.elts, _NAMES, strict=True)]
    for values, name, least in zip(items, _NAMES, _LEAST, strict=True):
        if not values:
            raise ValueError(f"{name} has no values")
        if min(values) < least:
            raise ValueError(f"{name} must be at least {least}, not {min(values)}")
        if max(values) > _MAX_VALUE:
            raise ValueError(f"{name} must be at most {_MAX_VALUE}")
    return items


def _values(node: ast.expr, name: str) -> Sequence[int]:
    match node:
        case ast.List(elts=elements):
            return [_integer(element, name) for element in elements]
        case ast.Call(func=ast.Name(id="range"), args=arguments, keywords=[]) if 1 <= len(arguments) <= 3:
            numbers = [_integer(argument, name) for argument in arguments]
            if len(numbers) == 3 and numbers[2] == 0:
                raise ValueError(f"the range of {name} has a step of 0")
            values = range(*numbers)
            # len() itself fails on a range that does not fit a machine word.
            if values and len(values[: _MAX_RANGE + 1]) > _MAX_RANGE:
                raise ValueError(f"the range of {name} has more than {_MAX_RANGE} elements")
            return values
        case _:
            return [_integer(node, name)]


def _integer(node: ast.expr, name: str) -> int:
    sign = 1
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node, sign = node.operand, -1
    if not isinstance(node, ast.Constant) or type(node.value) is not int:
        raise ValueError(f"{name} must be an int, a list of ints or range(...)")
    return sign * node.value
