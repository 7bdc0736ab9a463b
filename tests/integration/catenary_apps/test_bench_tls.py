"""The load tool over HTTPS."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from catenary_apps.load import BenchError, Conversation, LoadPlan, LoadResult, Target, Turn, run_load
from tests.support.certificates import make_authority, make_certificate
from tests.support.sse_origin import running_origin


async def _load(address: str, tls: ssl.SSLContext | None) -> LoadResult:
    target = Target(base_url=address, tls=tls, timeout_s=10)
    return await run_load(LoadPlan(target=target, conversations=[Conversation((Turn("a", 4),))] * 3))


async def test_a_server_must_show_a_certificate_of_a_known_authority(tmp_path: Path) -> None:
    make_authority(tmp_path, "authority")
    files = make_certificate(tmp_path, "server", "authority")
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    assert files.cert is not None
    serving.load_cert_chain(files.cert, files.key)
    async with running_origin(tls=serving) as origin:
        trusting = ssl.create_default_context(cafile=str(tmp_path / "authority.pem"))
        result = await _load(origin.address, trusting)
        assert (result.completed, result.output_tokens) == (3, 12)
        with pytest.raises(BenchError, match="certificate verify failed"):
            await _load(origin.address, None)
        with pytest.raises(BenchError, match="no answer from http://"):
            await _load(origin.address.replace("https", "http"), None)
