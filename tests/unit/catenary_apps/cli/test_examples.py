"""Examples against what `catenary up` does not run: services with TLS."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from catenary.v1 import router_pb2
from tests.support.certificates import make_authority, make_certificate
from tests.support.repository import ROOT

EXAMPLE = ROOT / "examples/grpc_client.py"


def empty_router() -> grpc.GenericRpcHandler:
    """A router without engines."""
    handler = grpc.unary_unary_rpc_method_handler(
        lambda _request, _context: router_pb2.ListModelsResponse(),
        router_pb2.ListModelsRequest.FromString,
        router_pb2.ListModelsResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler("catenary.v1.RouterService", {"ListModels": handler})


def test_grpc_client_over_tls(tmp_path: Path) -> None:
    make_authority(tmp_path, "authority")
    files = make_certificate(tmp_path, "server", "authority")
    assert files.cert is not None
    assert files.key is not None
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((empty_router(),))
    credentials = grpc.ssl_server_credentials([(files.key.read_bytes(), files.cert.read_bytes())])
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    (tmp_path / "secret").write_text("s\n")
    command = [sys.executable, str(EXAMPLE), "--secret-file", str(tmp_path / "secret")]
    command += ["--router", f"127.0.0.1:{port}", "--ca-file", str(files.ca)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    finally:
        server.stop(None).wait()
    assert done.stderr == "no engine has attached yet\n"
