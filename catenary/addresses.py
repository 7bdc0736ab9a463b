"""Addresses as operators write them: `127.0.0.1:7070`, `[::1]:0`, `router:7070`, `unix:/run/router.sock`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

# sockaddr_un holds 108 bytes with the final zero.
MAX_UNIX_PATH_BYTES = 107

_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_IPV6 = re.compile(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?")


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """Host (no brackets) and port; port 0 asks for a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A unix socket's path."""

    path: Path

    def __str__(self) -> str:
        return f"unix:{self.path}"


Address = TcpAddress | UnixAddress


def parse_address(text: str) -> Address:
    """Read an address.

    Raises:
        ValueError: with a text that quotes the address and says what is wrong with it.
    """
    if text.startswith("unix:"):
        return _parse_unix(text)
    host, colon, port_text = text.rpartition(":")
    if not colon or not port_text.isascii() or not port_text.isdigit():
        raise ValueError(f"{text!r} is not an address: write HOST:PORT, [IPV6]:PORT or unix:/PATH")
    port = int(port_text[:6])
    if port > 65535:
        raise ValueError(f"{text!r}: the port is not between 0 and 65535")
    if host.startswith("[") and host.endswith("]"):
        if not _IPV6.fullmatch(host[1:-1]):
            raise ValueError(f"{text!r}: not an IPv6 address in the brackets")
        return TcpAddress(host[1:-1], port)
    if ":" in host:
        raise ValueError(f"{text!r}: an IPv6 address is written in brackets, as [::1]:7070")
    if not _HOST.fullmatch(host):
        raise ValueError(f"{text!r}: not a host name or address before the port")
    return TcpAddress(host, port)


def _parse_unix(text: str) -> UnixAddress:
    raw = text.removeprefix("unix:")
    path = raw.removeprefix("//")
    if not path or "\0" in path or path.endswith("/") or (raw.startswith("//") and not path.startswith("/")):
        raise ValueError(f"{text!r}: not a socket path after unix:")
    absolute = Path(path).absolute()
    if len(bytes(absolute)) > MAX_UNIX_PATH_BYTES:
        raise ValueError(f"{text!r}: a unix socket's path has at most {MAX_UNIX_PATH_BYTES} bytes")
    return UnixAddress(absolute)


def server_url(text: str) -> str:
    """Return the base URL of an HTTP server, with http:// where no scheme was written, as in HOST:PORT.

    Raises ValueError, one line, for a text that is none.
    """
    url = text.strip()
    if "://" not in url:
        url = f"http://{url.lstrip('/')}"
    try:
        parts = urlsplit(url)
        # Reading the port is what finds a wrong one, and encoding the name an impossible one.
        (parts.hostname or "").encode("idna")
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or any(c.isspace() for c in url) or parts.query or parts.fragment:
        raise ValueError("expected the URL of a server, such as http://127.0.0.1:8000")
    if parts.username or parts.password:
        raise ValueError("a URL with a name or password in it is not taken")
    return url.rstrip("/")
