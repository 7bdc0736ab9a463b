"""TLS contexts out of certificate files that are renewed while an engine runs."""

from __future__ import annotations

import os
import ssl
import threading
from contextlib import suppress

from catenary.telemetry import get_logger
from catenary.transfer.connector import TlsPaths

log = get_logger(__name__)


class Certificates:
    """The context of one side: of the files as they are now, looked at for each connection.

    Where renewed files do not do, or are only half there, the last ones that did go on. For any thread.
    """

    def __init__(self, paths: TlsPaths | None, *, server: bool) -> None:
        self._paths = paths
        self._server = server
        self._lock = threading.Lock()
        self._seen: list[tuple[int, ...]] = []
        self._context: ssl.SSLContext | None = None

    def context(self) -> ssl.SSLContext:
        """The context of a new connection. Raises OSError if the files have never done."""
        if self._paths is None:
            raise OSError("connector tls needs tls_cert, tls_key and tls_ca")
        with self._lock:
            seen = _stamps(self._paths)
            if self._context is not None and seen == self._seen:
                return self._context
            try:
                self._context = _loaded(self._paths, server=self._server)
            except OSError as error:
                if self._context is None:
                    raise
                log.warning(
                    "the renewed certificates for KV do not do; the ones before go on", reason=str(error)
                )
            self._seen = seen
            return self._context


def _loaded(paths: TlsPaths, *, server: bool) -> ssl.SSLContext:
    """Raises OSError for files that do not do, or are not there."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(paths.cert, paths.key, password="")
    context.load_verify_locations(paths.ca)
    return context


def _stamps(paths: TlsPaths) -> list[tuple[int, ...]]:
    """What changes when a file is written anew or another takes its place."""
    stamps: list[tuple[int, ...]] = []
    for path in (paths.cert, paths.key, paths.ca):
        found: tuple[int, ...] = ()
        with suppress(OSError):
            status = os.stat(path)
            found = (status.st_mtime_ns, status.st_ino, status.st_size)
        stamps.append(found)
    return stamps
