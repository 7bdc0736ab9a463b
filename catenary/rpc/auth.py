"""Authorization of calls: two roles, granted per service, denied by default."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

import grpc

from catenary.rpc.config import Secrets

HEALTH_SERVICE = "grpc.health.v1.Health"
REFLECTION_SERVICE = "grpc.reflection.v1alpha.ServerReflection"


class Role(StrEnum):
    """The role of a caller. An engine attaches; a client asks for work."""

    CLIENT = "client"
    ENGINE = "engine"


ANY_ROLE = frozenset(Role)

# Common name or DNS name in a client certificate that grants a role.
CERTIFICATE_NAMES: Mapping[str, Role] = {
    "catenary-client": Role.CLIENT,
    "catenary-engine": Role.ENGINE,
}

Denial = tuple[grpc.StatusCode, str]

_NO_SECRET: Denial = (grpc.StatusCode.UNAUTHENTICATED, "A valid secret is required.")
_NO_CERTIFICATE: Denial = (grpc.StatusCode.UNAUTHENTICATED, "A certificate that names a role is required.")
_NOT_ALLOWED: Denial = (grpc.StatusCode.PERMISSION_DENIED, "The caller's role is not allowed to call this.")


class Authorizer:
    """Decides from a call's method and metadata, before a byte of its request is read.

    `access` maps a full method prefix ("/catenary.v1.FleetService/") to the roles that may call it. A service
    that is not listed is denied to everyone. With `certificates` and no secrets, a client's certificate
    gives the role, which is known only inside of the call: see `deny_certificate`.
    """

    def __init__(
        self,
        secrets: Secrets,
        access: Mapping[str, frozenset[Role]],
        *,
        insecure: bool = False,
        certificates: bool = False,
    ) -> None:
        for prefix in access:
            if not prefix.startswith("/") or not prefix.endswith("/") or prefix.count("/") != 2:
                raise ValueError(f"access prefix {prefix!r} is not of the form '/package.Service/'")
        self._access = {**access, f"/{REFLECTION_SERVICE}/": ANY_ROLE}
        self._digests = tuple(
            (role, _digest(value))
            for role, value in ((Role.CLIENT, secrets.client), (Role.ENGINE, secrets.engine))
            if value is not None
        )
        self._open = insecure and not self._digests
        self.by_certificate = certificates and not self._digests and not self._open

    def deny(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> Denial | None:
        """Return why the call is refused, or None."""
        prefix = _prefix(method)
        if prefix == f"/{HEALTH_SERVICE}/":
            return None
        if self._open or self.by_certificate:
            return None if prefix in self._access else _NOT_ALLOWED
        roles = self._roles([value for key, value in metadata if key == "authorization"])
        if not roles:
            return _NO_SECRET
        return None if roles & self._access.get(prefix, frozenset()) else _NOT_ALLOWED

    def deny_certificate(self, method: str, auth_context: Mapping[str, Iterable[bytes]]) -> Denial | None:
        """Return the same decision from the verified certificate of the peer, where certificates give the
        roles."""
        prefix = _prefix(method)
        if not self.by_certificate or prefix == f"/{HEALTH_SERVICE}/":
            return None
        names = {
            name.decode("utf-8", "replace")
            for key in ("x509_common_name", "x509_subject_alternative_name")
            for name in auth_context.get(key, ())
        }
        roles = {role for name, role in CERTIFICATE_NAMES.items() if name in names}
        if not roles:
            return _NO_CERTIFICATE
        return None if roles & self._access.get(prefix, frozenset()) else _NOT_ALLOWED

    def _roles(self, presented: Sequence[str | bytes]) -> frozenset[Role]:
        if len(presented) != 1 or not isinstance(presented[0], str):
            return frozenset()
        scheme, _, value = presented[0].partition(" ")
        if scheme.lower() != "bearer":
            return frozenset()
        digest = _digest(value)
        # Every secret is compared, in constant time: how long it takes tells nothing.
        matches = [(hmac.compare_digest(digest, known), role) for role, known in self._digests]
        return frozenset(role for matched, role in matches if matched)


def _digest(value: str) -> bytes:
    return hashlib.sha256(value.encode("utf-8", "surrogatepass")).digest()


def _prefix(method: str) -> str:
    """Return `/package.Service/` of a full method name; else "", which is granted to no role."""
    parts = method.split("/")
    return f"/{parts[1]}/" if len(parts) == 3 and not parts[0] and parts[1] and parts[2] else ""
