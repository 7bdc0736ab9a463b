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
    TransferSettings,
    load_connector,
)
from catenary.transfer.faults import TransferError, TransferFault
from catenary.transfer.hosts import host_id
from catenary.transfer.shm import ShmConnector
from catenary.transfer.tcp import TcpConnector
from catenary.transfer.tickets import name_of, new_ticket
from catenary.transfer.tls import TlsConnector
from catenary.transfer.windows import window_of

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
