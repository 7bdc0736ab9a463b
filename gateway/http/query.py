"""Parameters in a URL's query: strict, like those of a body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from starlette.requests import Request

from gateway.errors import bad_request

_MAX_LENGTH = 512


def query_of(request: Request, known: Sequence[str], unsupported: Sequence[str] = ()) -> Mapping[str, str]:
    """The parameters of a URL, each at most once. Raises ApiError 400.

    Args:
        request: the request.
        known: names that are understood.
        unsupported: names that are refused as such, and not as unknown.
    """
    found: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        name = name.removesuffix("[]")
        if name in unsupported:
            raise bad_request(
                f"The parameter '{name}' is not supported by this server yet.", name, "unsupported_parameter"
            )
        if name not in known:
            raise bad_request("Unknown parameter in the URL.", None, "unknown_parameter")
        if name in found or len(value) > _MAX_LENGTH:
            raise bad_request(f"Invalid '{name}': given twice, or too long.", name)
        found[name] = value
    return found


def integer(query: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    """An integer parameter. Raises ApiError 400."""
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) <= 9 and least <= int(text) <= most):
        raise bad_request(f"Invalid '{name}': must be an integer from {least} to {most}.", name)
    return int(text)


def choice(query: Mapping[str, str], name: str, values: Sequence[str]) -> str:
    """One of `values`, the first by default. Raises ApiError 400."""
    text = query.get(name, values[0])
    if text not in values:
        raise bad_request(f"Invalid '{name}': must be one of {', '.join(values)}.", name)
    return text
