"""Moves the KV of computed prompts from one engine to another, through connectors."""

from __future__ import annotations

from services.engine.transfer.connector import (
    BlockSource,
    Connector,
    Fetch,
    Offered,
    PendingBlocks,
    Put,
    TlsPaths,
    TransferSettings,
    load_connector,
)
from services.engine.transfer.faults import TransferError, TransferFault
from services.engine.transfer.hosts import host_id
from services.engine.transfer.shm import ShmConnector
from services.engine.transfer.tcp import TcpConnector
from services.engine.transfer.tickets import name_of, new_ticket
from services.engine.transfer.tls import TlsConnector
from services.engine.transfer.windows import window_of

BUILTIN: dict[str, type[Connector]] = {
    connector.name: connector for connector in (ShmConnector, TcpConnector, TlsConnector)
}

__all__ = [
    "BUILTIN",
    "BlockSource",
    "Connector",
    "Fetch",
    "Offered",
    "PendingBlocks",
    "Put",
    "ShmConnector",
    "TcpConnector",
    "TlsConnector",
    "TlsPaths",
    "TransferError",
    "TransferFault",
    "TransferSettings",
    "host_id",
    "load_connector",
    "name_of",
    "new_ticket",
    "window_of",
]
