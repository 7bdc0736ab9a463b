"""API keys, the gate in front of every route, and the headers that admission reads."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from catenary.config import ConfigError
from catenary.v1 import common_pb2
from gateway.errors import ApiError, bad_request
from gateway.http.answers import send_error

# Thousands of keys; a larger file was named by mistake.
MAX_KEY_FILE_BYTES = 1 << 20
LIMITS = {
    "requests-per-minute": "requests_per_minute",
    "tokens-per-minute": "tokens_per_minute",
    "concurrent": "concurrent",
}
"""Limits that may follow a key as NAME=NUMBER, with the fields of KeyLimits."""

_LIMIT = re.compile(r"([a-z-]+)=([0-9]{1,12})")


def read_key_file(file: Path) -> dict[str, dict[str, int]]:
    """Return the keys of the file, and the limits by field that follow each. Raises StartRefused if it cannot
    be read, holds no key, limits without one, or anything else behind one."""
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
    """Valid keys. Only their SHA-256 is kept; comparison takes the same time for every wrong key."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in sorted(set(keys)))

    def __bool__(self) -> bool:
        return bool(self._digests)

    def accepts(self, key: bytes) -> bool:
        """Return whether `key`, as it came in a header, is valid."""
        digest = hashlib.sha256(key).digest()
        found = False
        for known in self._digests:
            # No early exit: the time must not tell how many keys were compared.
            found |= hmac.compare_digest(digest, known)
        return found


def read_keys(given: Iterable[str], file: Path | None) -> ApiKeys:
    """Return the keys from options and from a file. Raises StartRefused if the file cannot be read or holds
    none, or if a key contains an invisible character, like a zero-width space: clients would hardly ever send
    it."""
    keys = [*given, *(() if file is None else read_key_file(file))]
    if not all(key.isprintable() for key in keys):
        raise ConfigError("--api-key, --api-key-file: a key holds a character that cannot be printed")
    return ApiKeys(keys)


def owner_name(key: bytes) -> str:
    """Return the name under which usage and stored objects of a key are kept."""
    return hashlib.blake2b(key, digest_size=16, person=b"owner").hexdigest()


HeaderList = list[tuple[bytes, bytes]]


class Allowance:
    """Share of its key's limits that one request may use.

    `headers` go into its answer; they grow as more becomes known."""

    def __init__(
        self,
        spend: Callable[[int, HeaderList], Awaitable[None]] | None = None,
        charge: Callable[[int], None] | None = None,
    ) -> None:
        """Set how to `spend` prompt tokens, which may raise ApiError 429, and `charge` generated tokens."""
        self._spend = spend
        self._charge = charge
        self._spent = False
        self.headers: HeaderList = []

    async def spend(self, prompt_tokens: int) -> None:
        """Count the prompts' tokens, once however often the request is tried. Raises ApiError 429."""
        if self._spend is not None and not self._spent:
            await self._spend(prompt_tokens, self.headers)
            self._spent = True

    def charge(self, generated_tokens: int) -> None:
        """Count generated tokens; those beyond the limit are taken from the next minutes."""
        if self._charge is not None and generated_tokens:
            self._charge(generated_tokens)


UNLIMITED = Allowance()


@dataclass(frozen=True, slots=True)
class Caller:
    """Client of a request.

    owner: name of the API key, for usage and stored objects; empty without keys. session_id, max_wait_ms,
    priority_class: from the headers. bulk: the request is a line of a batch. cache_salt: requests with the
    same one share cached KV; one for each API key, empty without keys. allowance: the rest of the key's
    limits for this request."""

    owner: str = ""
    session_id: str = ""
    max_wait_ms: int | None = None
    priority_class: common_pb2.PriorityClass.ValueType = common_pb2.PRIORITY_CLASS_UNSPECIFIED
    bulk: bool = False
    cache_salt: str = ""
    allowance: Allowance = field(default=UNLIMITED, compare=False)


_CALLER = "catenary.caller"
_ANONYMOUS = Caller()


def caller_of(scope: Scope) -> Caller:
    """Return the caller of a request; an anonymous one in front of AccessGate."""
    caller: Caller = scope.get(_CALLER, _ANONYMOUS)
    return caller


def set_caller(scope: Scope, caller: Caller) -> None:
    scope[_CALLER] = caller


class AccessGate:
    """ASGI middleware that refuses requests without a valid key, and sets the caller of the others.

    It looks at the very path that the router sees, never at one rebuilt from the Host header."""

    def __init__(
        self, app: ASGIApp, keys: ApiKeys, operators: ApiKeys, *, open_paths: Collection[str]
    ) -> None:
        """Wrap `app`. `operators`: keys that may ask for the class system. `open_paths`: paths without
        key."""
        self._app = app
        self._keys = keys
        self._operators = operators
        self._open = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                set_caller(scope, self._identified(scope))
            except ApiError as refusal:
                await send_error(send, refusal)
                return
        await self._app(scope, receive, send)

    def _identified(self, scope: Scope) -> Caller:
        headers = Headers(scope=scope)
        key = bearer_key(headers)
        owner = salt = ""
        if self._keys and scope["path"] not in self._open:
            if key is None:
                raise _unauthorized("You didn't provide an API key in an Authorization: Bearer header.")
            if not self._keys.accepts(key):
                raise _unauthorized("Incorrect API key provided.")
            # A request under another key must not show by a hit, or its speed, what was asked under this one.
            salt = hashlib.blake2b(key, digest_size=16, person=b"cache salt").hexdigest()
            owner = owner_name(key)
        operator = PRIORITY_CLASS in headers and key is not None and self._operators.accepts(key)
        return read_caller(headers, owner, operator=operator, cache_salt=salt)


def salted(key_salt: str, request_salt: str | None) -> str:
    """Return the salt of a request. A salt of its own only divides what its key may share."""
    if request_salt is None:
        return key_salt
    both = f"{key_salt}\n{request_salt}".encode()
    return hashlib.blake2b(both, digest_size=16, person=b"request salt").hexdigest()


def bearer_key(headers: Headers) -> bytes | None:
    """Return the key of exactly one `Authorization: Bearer` header, as bytes; None if there is no such
    header."""
    values = headers.getlist("authorization")
    if len(values) != 1:
        return None
    # Blanks of HTTP alone: a byte of a character in UTF-8, read as Latin-1, may be another blank.
    scheme, _, key = values[0].strip(" \t").partition(" ")
    key = key.strip(" \t")
    return key.encode("latin-1") if scheme.lower() == "bearer" and key else None


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers=(("www-authenticate", "Bearer"),))


SESSION_ID = "x-session-id"
MAX_WAIT_MS = "x-max-wait-ms"
PRIORITY_CLASS = "x-priority-class"
# Of headers: their size is bounded by --max-header-kib, and no wait is allowed to be longer than a day.
MAX_SESSION_ID = 256
LONGEST_WAIT_MS = 86_400_000
_CLASSES: dict[str, common_pb2.PriorityClass.ValueType] = {
    "system": common_pb2.PRIORITY_CLASS_SYSTEM,
    "interactive": common_pb2.PRIORITY_CLASS_INTERACTIVE,
    "default": common_pb2.PRIORITY_CLASS_DEFAULT,
    "bulk": common_pb2.PRIORITY_CLASS_BULK,
}
PRIORITY_CLASSES = tuple(_CLASSES)


def read_caller(headers: Headers, owner: str, *, operator: bool, cache_salt: str = "") -> Caller:
    """Return the caller of a request. `operator`: its key may ask for the class system.

    Raises ApiError: 400 for an invalid header, 403 for a class that the key may not ask for."""
    session_id = _only(headers, SESSION_ID) or ""
    if len(session_id) > MAX_SESSION_ID:
        raise bad_request(f"The header {SESSION_ID} is longer than {MAX_SESSION_ID} characters.", SESSION_ID)
    name = _only(headers, PRIORITY_CLASS)
    if name is not None and name not in _CLASSES:
        raise bad_request(
            f"The header {PRIORITY_CLASS} must be one of: {', '.join(_CLASSES)}.", PRIORITY_CLASS
        )
    if name == "system" and not operator:
        raise ApiError(
            403,
            "This key may not ask for the class system; see the gateway's option operator-key.",
            kind="permission_error",
            code="class_not_allowed",
            param=PRIORITY_CLASS,
        )
    wanted = common_pb2.PRIORITY_CLASS_UNSPECIFIED if name is None else _CLASSES[name]
    return Caller(owner, session_id, _max_wait_ms(_only(headers, MAX_WAIT_MS)), wanted, cache_salt=cache_salt)


def _only(headers: Headers, name: str) -> str | None:
    """Return the value of a header that occurs at most once, without the blanks around it."""
    values = headers.getlist(name)
    if len(values) > 1:
        raise bad_request(f"The header {name} stands more than once.", name)
    return values[0].strip(" \t") if values else None


def _max_wait_ms(text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and int(text) <= LONGEST_WAIT_MS):
        raise bad_request(
            f"The header {MAX_WAIT_MS} must be a number of milliseconds, 0 to {LONGEST_WAIT_MS}.", MAX_WAIT_MS
        )
    return int(text)
