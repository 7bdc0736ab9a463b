"""Getting addresses ready to be bound, and telling in one line why one cannot be."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

from catenary.addresses import Address, TcpAddress, UnixAddress
from catenary.config import ConfigError
from catenary.runtime import StartRefused


class AddressInUse(StartRefused):
    """Somebody else listens there."""

    def __init__(self, address: str) -> None:
        super().__init__(f"cannot listen on {address}: the address is in use")
        self.address = address


async def prepare(address: Address) -> None:
    """Check that the address can be bound; remove a socket file that nobody listens on any more.

    gRPC reports a failed bind with several lines of its own and no reason, so the check comes first.

    Raises:
        AddressInUse: somebody listens there.
        StartRefused: it cannot be bound for another reason.
    """
    if isinstance(address, TcpAddress):
        await _prepare_tcp(address)
    else:
        await asyncio.to_thread(_prepare_unix, address)


async def _prepare_tcp(address: TcpAddress) -> None:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ConfigError(f"cannot listen on {address}: {error.strerror or 'the host is unknown'}") from None
    for family, kind, protocol, _, sockaddr in found:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind(sockaddr)
                # Binding alone succeeds beside another bound socket that does not listen yet.
                probe.listen(1)
            except OSError as error:
                raise _bind_error(address, error) from None


def _prepare_unix(address: UnixAddress) -> None:
    path = address.path
    try:
        _make_private_directory(path.parent)
        mode = os.lstat(path).st_mode if os.path.lexists(path) else None
    except OSError as error:
        raise _bind_error(address, error) from None
    if mode is None:
        return
    if not stat.S_ISSOCK(mode):
        raise StartRefused(f"cannot listen on {address}: the path exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            with suppress(FileNotFoundError):
                path.unlink()
            return
        except OSError as error:
            # A full backlog or no permission: alive, or not ours to remove.
            if error.errno in (errno.EACCES, errno.EPERM):
                raise _bind_error(address, error) from None
    raise AddressInUse(str(address))


def _make_private_directory(directory: Path) -> None:
    if not directory.exists():
        directory.mkdir(mode=0o700, parents=True)
        # mkdir's mode passes through the umask.
        directory.chmod(0o700)


def _bind_error(address: Address, error: OSError) -> StartRefused:
    if error.errno == errno.EADDRINUSE:
        return AddressInUse(str(address))
    return StartRefused(f"cannot listen on {address}: {error.strerror or 'it cannot be bound'}")


def socket_identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of a socket file, to remove at the end what this process made and nothing else."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino
