"""API keys: the file of them, which are valid, and the gate in front of every route."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from catenary.config import ConfigError
from gateway.caller import PRIORITY_CLASS, calling, read_caller
from gateway.errors import ApiError
from gateway.http.answers import send_error
from gateway.http.context import HEALTH_PATHS

# Thousands of keys; a larger file was named by mistake.
MAX_KEY_FILE_BYTES = 1 << 20
LIMITS = {
    "requests-per-minute": "requests_per_minute",
    "tokens-per-minute": "tokens_per_minute",
    "concurrent": "concurrent",
}
"""What may follow a key as NAME=NUMBER, and the fields of KeyLimits that these are."""

_LIMIT = re.compile(r"([a-z-]+)=([0-9]{1,12})")


def read_key_file(file: Path) -> dict[str, dict[str, int]]:
    """The keys of the file, and the limits by field that stand behind each. Raises StartRefused if it cannot
    be read, holds no key, limits without one, or something else behind one."""
    try:
        with file.open("rb") as stream:
            # Some editors begin a file with a byte order mark: it would be part of the first key.
            lines = stream.read(MAX_KEY_FILE_BYTES).decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError):
        raise ConfigError(f"--api-key-file {file}: cannot be read") from None
    keys: dict[str, dict[str, int]] = {}
    for number, line in enumerate(lines, 1):
        key, *words = line.split() or [""]
        if not key or key.startswith("#"):
            continue
        if (match := _LIMIT.fullmatch(key)) and match[1] in LIMITS:
            # What `$KEY concurrent=4` leaves behind without a KEY would be a key that is easily guessed.
            raise ConfigError(f"--api-key-file {file}: line {number}: has limits and no key before them")
        keys[key] = {}
        for word in words:
            match = _LIMIT.fullmatch(word)
            if match is None or match[1] not in LIMITS:
                # Not the word itself: it may be part of a key.
                names = ", ".join(f"{name}=N" for name in LIMITS)
                raise ConfigError(f"--api-key-file {file}: line {number}: behind a key may be {names}")
            keys[key][LIMITS[match[1]]] = int(match[2])
    if not keys:
        # An empty file must not open the server to everyone.
        raise ConfigError(f"--api-key-file {file}: holds no key")
    return keys


_CACHE_SALT = "catenary.cache_salt"
_OWNER = "catenary.owner"


class ApiKeys:
    """The valid keys. Only their SHA-256 is kept; comparison takes the same time for every wrong key."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in sorted(set(keys)))

    def __bool__(self) -> bool:
        return bool(self._digests)

    def accepts(self, key: bytes) -> bool:
        """Whether `key`, as it came in a header, is one of ours."""
        digest = hashlib.sha256(key).digest()
        found = False
        for known in self._digests:
            # No early exit: the time must not tell how many keys were compared.
            found |= hmac.compare_digest(digest, known)
        return found


def read_keys(given: Iterable[str], file: Path | None) -> ApiKeys:
    """Keys from options and from a file. Raises StartRefused if the file cannot be read or holds none, or if
    there is in a key what cannot be seen, like a zero-width space: clients would hardly ever send it."""
    keys = [*given, *(() if file is None else read_key_file(file))]
    if not all(key.isprintable() for key in keys):
        raise ConfigError("--api-key, --api-key-file: a key holds a character that cannot be printed")
    return ApiKeys(keys)


def owner_name(key: bytes) -> str:
    """The name under which usage and stored objects of a key are kept."""
    return hashlib.blake2b(key, digest_size=16, person=b"owner").hexdigest()


class AuthGate:
    """ASGI middleware: without a valid key only the page at / and the health routes answer. It looks at the
    very path that the router sees, never at one rebuilt from the Host header."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, *, metrics_public: bool) -> None:
        self._app = app
        self._keys = keys
        self._open = HEALTH_PATHS | {"/"} | ({"/metrics"} if metrics_public else frozenset())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._keys or scope["path"] in self._open:
            await self._app(scope, receive, send)
            return
        key = bearer_key(Headers(scope=scope))
        if key is None:
            await send_error(
                send, _unauthorized("You didn't provide an API key in an Authorization: Bearer header.")
            )
        elif not self._keys.accepts(key):
            await send_error(send, _unauthorized("Incorrect API key provided."))
        else:
            # A request under another key must not show by a hit, or its speed, what was asked under this one.
            salt = hashlib.blake2b(key, digest_size=16, person=b"cache salt").hexdigest()
            identify(scope, owner=owner_name(key), cache_salt=salt)
            await self._app(scope, receive, send)


class CallerGate:
    """ASGI middleware, behind AuthGate: says for whom a request is worked on, and how it is to be treated."""

    def __init__(self, app: ASGIApp, operators: ApiKeys) -> None:
        """`operators`: keys that may ask for the class system."""
        self._app = app
        self._operators = operators

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        key = bearer_key(headers) if PRIORITY_CLASS in headers else None
        try:
            operator = key is not None and self._operators.accepts(key)
            caller = read_caller(headers, owner_of(scope), operator=operator)
        except ApiError as refusal:
            await send_error(send, refusal)
            return
        with calling(caller):
            await self._app(scope, receive, send)


def identify(scope: Scope, *, owner: str, cache_salt: str) -> None:
    """Say whose request it is, for `owner_of` and `cache_salt_of`."""
    scope[_OWNER] = owner
    scope[_CACHE_SALT] = cache_salt


def cache_salt_of(scope: Scope) -> str:
    """The name under which a request shares cached KV: one for each API key, empty without keys."""
    salt: str = scope.get(_CACHE_SALT, "")
    return salt


def salted(key_salt: str, request_salt: str | None) -> str:
    """The salt of a request that may bring its own, which only divides what its key may share."""
    if request_salt is None:
        return key_salt
    both = f"{key_salt}\n{request_salt}".encode()
    return hashlib.blake2b(both, digest_size=16, person=b"request salt").hexdigest()


def owner_of(scope: Scope) -> str:
    """Whose a request's stored things are: a name for each API key, empty without keys."""
    owner: str = scope.get(_OWNER, "")
    return owner


def bearer_key(headers: Headers) -> bytes | None:
    """The key of exactly one `Authorization: Bearer` header, as bytes; None if there is no such header."""
    values = headers.getlist("authorization")
    if len(values) != 1:
        return None
    # Blanks of HTTP alone: a byte of a character in UTF-8, read as Latin-1, may be another blank.
    scheme, _, key = values[0].strip(" \t").partition(" ")
    key = key.strip(" \t")
    return key.encode("latin-1") if scheme.lower() == "bearer" and key else None


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers=(("www-authenticate", "Bearer"),))
