"""Why KV could not be moved. Whatever it is, the prompt is computed again."""

from __future__ import annotations

from enum import StrEnum


class TransferFault(StrEnum):
    """A closed set: it labels a metric."""

    # The offer names a connector that is not known here.
    CONNECTOR = "connector"
    # Shared memory with another host.
    HOST = "host"
    # Another block size, model, dtype or order of the numbers.
    LAYOUT = "layout"
    # The offer is malformed, or for another prompt.
    MISMATCH = "mismatch"
    # Nobody answers at the address.
    UNREACHABLE = "unreachable"
    # The offer was fetched before, expired or gave way; or the ticket is not its.
    GONE = "gone"
    # A block does not have the checksum that came with it.
    CHECKSUM = "checksum"
    # The peer broke the protocol or went away in the middle.
    PROTOCOL = "protocol"
    TIMEOUT = "timeout"
    # Too many transfers at once.
    BUSY = "busy"
    # No blocks were free here, or they were needed by others before the sequence could start.
    NO_BLOCKS = "no_blocks"
    # The device failed to copy.
    DEVICE = "device"


class TransferError(Exception):
    """KV was not moved. The text is for logs."""

    def __init__(self, fault: TransferFault, text: str) -> None:
        super().__init__(text)
        self.fault = fault
