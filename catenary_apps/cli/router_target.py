"""Which routers a command speaks to, and with what secret."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from catenary.config import ConfigError
from catenary.rpc import CLIENT_SECRET_ENV, TlsFiles, parse_address, read_secret
from catenary.runtime import StartRefused
from catenary_apps.cli.router_options import RouterAccess, RouterOptions, RoutersOptions
from catenary_apps.cli.runtime_directory import RuntimeDirectory, choices, running


@dataclass(frozen=True, slots=True)
class RouterTarget:
    """A router and how to reach it."""

    address: str
    secret: str | None = field(repr=False)
    tls: TlsFiles | None


def find_router(config: RouterOptions) -> RouterTarget:
    """Return the router that the options mean. Raises StartRefused if there is none, or more than one."""
    return _target(config.router or _router_here(), config)


def find_routers(config: RoutersOptions) -> tuple[RouterTarget, ...]:
    """Return the routers that the options mean, at least one. Raises StartRefused as `find_router`."""
    addresses = dict.fromkeys(config.router or _routers_here())
    return tuple(_target(address, config) for address in addresses)


def _target(address: str, config: RouterAccess) -> RouterTarget:
    try:
        parse_address(address)
    except ValueError as error:
        raise ConfigError(f"--router {address}: {error}") from None
    file = config.client_secret_file
    if file is None and address.startswith("unix:"):
        # Beside the sockets of a `catenary up`, in a directory that only its owner can enter.
        beside = RuntimeDirectory(Path(address.removeprefix("unix:")).parent).client_secret
        file = beside if beside.is_file() else None
    tls = None
    if config.tls_ca or config.tls_cert or config.tls_key:
        tls = TlsFiles(config.tls_cert, config.tls_key, config.tls_ca)
    return RouterTarget(address, read_secret(file, CLIENT_SECRET_ENV, option="client_secret_file"), tls)


def _router_here() -> str:
    """One router of the `catenary up` here. An engine that one of several tells to drain drains for all."""
    return _routers_here()[0]


def _routers_here() -> list[str]:
    runs = list(running())
    if len(runs) == 1:
        return runs[0].sockets("router")
    if runs:
        found = choices((run, address) for run in runs for address in run.sockets("router"))
        raise ConfigError(f"--router: more than one catenary up runs on this machine: choose one of {found}")
    raise StartRefused("no catenary up of yours runs on this machine: give --router the address of a router")
