"""Moves the KV of computed prompts from one engine to another, through connectors."""

from __future__ import annotations

from catenary.transfer.connector import (
    BlockSource,
    Connector,
    Fetch,
    Offered,
    PendingBlocks,
    Put,
    TlsPaths,
    TransferError,
    TransferFault,
    TransferSettings,
    host_id,
    load_connector,
    name_of,
    new_ticket,
    window_of,
)
from catenary.transfer.shm import ShmConnector
from catenary.transfer.tcp import TcpConnector
from catenary.transfer.tls import TlsConnector

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
