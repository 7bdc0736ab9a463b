"""Connectors that do what the built-in ones never should, for engines to survive."""

from __future__ import annotations

import threading
from typing import ClassVar

from catenary.transfer import Fetch, Put, TcpConnector, TransferError, TransferFault


class PluggedConnector(TcpConnector):
    """One that an operator plugged in."""

    name: ClassVar[str] = "plugged"


class FaultyConnector(PluggedConnector):
    """Fetches as `fault` says: short, long, raising, refusing, busy (once), hanging; or as it should."""

    name: ClassVar[str] = "faulty"
    fault: ClassVar[str] = ""
    hold: ClassVar[threading.Event] = threading.Event()

    def fetch(self, fetch: Fetch, put: Put) -> None:
        match type(self).fault:
            case "short":
                return
            case "long":
                put(memoryview(bytes(fetch.block_bytes * (fetch.count + 1))))
            case "crooked":
                put(memoryview(bytes(fetch.block_bytes - 1)))
            case "raising":
                raise RuntimeError("a connector of poor quality")
            case "refusing":
                raise TransferError(TransferFault.CHECKSUM, "nothing here is what it was")
            case "busy":
                type(self).fault = ""
                raise TransferError(TransferFault.BUSY, "no room now")
            case "hanging":
                type(self).hold.wait(30)
            case "late":
                type(self).hold.wait(30)
                super().fetch(fetch, put)
            case _:
                super().fetch(fetch, put)
