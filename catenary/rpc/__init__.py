"""The one place for gRPC: channels, servers, secrets, TLS, health, refusals."""

from __future__ import annotations

from catenary.addresses import TcpAddress, UnixAddress, parse_address
from catenary.config import CLIENT_SECRET_ENV, ENGINE_SECRET_ENV
from catenary.rpc.auth import Role
from catenary.rpc.calls import CallCount, recorded
from catenary.rpc.channel import open_channel
from catenary.rpc.config import RpcConfig, Secrets, TlsFiles, read_secret
from catenary.rpc.errors import ERROR_TRAILER, RpcError, error_of, refuse
from catenary.rpc.exposition import MetricsServer
from catenary.rpc.resolving import AddressFamilies, NamedAddresses, is_name, resolve
from catenary.rpc.server import AddressInUse, RpcServer

__all__ = [
    "CLIENT_SECRET_ENV",
    "ENGINE_SECRET_ENV",
    "ERROR_TRAILER",
    "AddressFamilies",
    "AddressInUse",
    "CallCount",
    "MetricsServer",
    "NamedAddresses",
    "Role",
    "RpcConfig",
    "RpcError",
    "RpcServer",
    "Secrets",
    "TcpAddress",
    "TlsFiles",
    "UnixAddress",
    "error_of",
    "is_name",
    "open_channel",
    "parse_address",
    "read_secret",
    "recorded",
    "refuse",
    "resolve",
]
