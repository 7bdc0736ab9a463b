"""Which server is measured, and by which of its routes."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from urllib.parse import SplitResult, urlsplit

_CONTROL = frozenset(map(chr, [*range(0x20), 0x7F]))
# They say where a body ends.
_FRAMING = frozenset(("content-length", "transfer-encoding"))


class BenchError(Exception):
    """A run that cannot be measured, with one line that says why."""


class Endpoint(Enum):
    """A route of the OpenAI API."""

    CHAT = "chat"
    COMPLETIONS = "completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server, and what each request to it says.

    `base_url` may have a path, and end with /v1 or not. `extra_body` is put into each body and wins over what
    is there; None takes a field out. `timeout_s` is how long one request may take, connecting included.
    `model` None: the server's first. `tls` None: the system's authorities, for https. `request_id_prefix`:
    beginning of each request's x-request-id, None: it has none.
    """

    base_url: str = "http://127.0.0.1:8000"
    endpoint: Endpoint = Endpoint.COMPLETIONS
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 600.0
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    request_id_prefix: str | None = None

    def __post_init__(self) -> None:
        """Raise ValueError."""
        parts = self._parts
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"{self.base_url[:100]!r} is not the URL of a server")
        if not _is_text(self.model or ""):
            raise ValueError(f"{(self.model or '')[:50]!r} is not the name of a model")
        if parts.username or parts.password:
            raise ValueError("a URL does not hold a name or a password; send a header")
        if not self.timeout_s > 0:
            raise ValueError("the time for a request is above 0")
        ours = {"authorization": self.api_key or "", "x-request-id": self.request_id_prefix or ""}
        for name, value in [*self.headers.items(), *ours.items()]:
            odd = not name or not name.isascii() or _CONTROL & set(name + value) or set(name) & set(" :")
            if odd or not _is_text(value) or name.lower() in _FRAMING:
                raise ValueError(f"{name[:50]!r} is not a header that can be sent")

    @property
    def host(self) -> str:
        """The host to connect to."""
        return self._parts.hostname or ""

    @property
    def port(self) -> int:
        """The port to connect to."""
        return self._parts.port or (443 if self._parts.scheme == "https" else 80)

    def context(self) -> ssl.SSLContext | None:
        """Return the TLS context of https; None for http."""
        if self._parts.scheme == "http":
            return None
        return self.tls or ssl.create_default_context()

    def path(self, route: str) -> str:
        """Return the path of a route such as /v1/models."""
        return self._parts.path.rstrip("/").removesuffix("/v1") + route

    def head(self, method: str, route: str, length: int | None, request_id: str | None = None) -> bytes:
        """Return a request up to its body, which has `length` bytes, None: it has none."""
        fields = {"Host": self._parts.netloc, "Accept": "text/event-stream, application/json"}
        if self.api_key:
            fields["Authorization"] = f"Bearer {self.api_key}"
        if request_id is not None:
            fields["X-Request-Id"] = request_id
        if length is not None:
            fields |= {"Content-Type": "application/json", "Content-Length": str(length)}
        given = {name.lower() for name in self.headers}
        fields = {name: value for name, value in fields.items() if name.lower() not in given}
        lines = "".join(f"{name}: {value}\r\n" for name, value in [*fields.items(), *self.headers.items()])
        return f"{method} {self.path(route)} HTTP/1.1\r\n{lines}\r\n".encode()

    @property
    def _parts(self) -> SplitResult:
        try:
            parts = urlsplit(self.base_url)
            parts.port  # noqa: B018 - it raises ValueError where it is no port
            # As the look-up of the name will.
            (parts.hostname or "").encode("idna")
            if _CONTROL & set(self.base_url) or " " in self.base_url or not _is_text(self.base_url):
                raise ValueError
        except ValueError:
            raise ValueError(f"{self.base_url[:100]!r} is not the URL of a server") from None
        return parts


def _is_text(text: str) -> bool:
    """Return whether it can be sent: arguments may have bytes that are no characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
