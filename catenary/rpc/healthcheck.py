"""`python -m catenary.rpc.healthcheck TARGET [SERVICE]`: exit 0 if it serves, else 1. For containers.

Without a service's name it asks for liveness. No secret is needed. With TLS, CATENARY_HEALTHCHECK_CA names
the authority's file; CATENARY_HEALTHCHECK_CERT and CATENARY_HEALTHCHECK_KEY are for servers that ask for a
certificate.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from catenary.rpc.channel import open_channel
from catenary.rpc.config import TlsFiles
from catenary.runtime import StartRefused

TIMEOUT_S = 5.0


async def check(
    target: str, service: str, *, tls: TlsFiles | None = None, timeout_s: float = TIMEOUT_S
) -> str:
    """Return the service's status by name (SERVING, NOT_SERVING), or the gRPC status of a failed check."""
    async with open_channel(target, secret=None, tls=tls) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            response = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


def _tls_from_environment() -> TlsFiles | None:
    ca, cert, key = (os.environ.get(f"CATENARY_HEALTHCHECK_{name}") for name in ("CA", "CERT", "KEY"))
    if not ca:
        return None
    return TlsFiles(Path(cert) if cert else None, Path(key) if key else None, Path(ca))


def main(argv: Sequence[str]) -> int:
    """Run the command. It prints nothing for a healthy service, else one line."""
    if len(argv) not in (1, 2):
        sys.stderr.write("usage: python -m catenary.rpc.healthcheck TARGET [SERVICE]\n")
        return 1
    try:
        status = asyncio.run(check(argv[0], argv[1] if len(argv) == 2 else "", tls=_tls_from_environment()))
    except (ValueError, StartRefused) as error:
        status = str(error)
    if status == "SERVING":
        return 0
    sys.stderr.write(f"{argv[0]}: {status}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
