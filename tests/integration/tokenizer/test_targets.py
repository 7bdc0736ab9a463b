"""Tokenizer services behind a name: all that it stands for are asked, each over a stream of its own."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from catenary.rpc import open_channel
from gateway.errors import ApiError
from gateway.text.pool import TokenizerPool
from tests.support.tokenizer_service import RunningTokenizer, chat_request, running_tokenizer
from tests.support.waiting import eventually

NAME = "tokenizers.test:7071"
HELLO = chat_request(("user", "hello"))


class Names:
    """Stands for addresses that are sockets."""

    def __init__(self) -> None:
        self.sockets: dict[str, str] = {}

    async def look_up(self, _name: str) -> tuple[str, ...]:
        return tuple(self.sockets)

    def dial(self, address: str, name: str) -> grpc.aio.Channel:
        assert name == NAME
        return open_channel(self.sockets[address], secret=None)


@asynccontextmanager
async def running_pool(names: Names, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TokenizerPool]:
    monkeypatch.setattr("catenary.rpc.resolving._LOOK_UP_S", 0.02)
    monkeypatch.setattr("catenary.rpc.resolving._LOOK_UP_ALONE_S", 0.02)
    pool = TokenizerPool(
        [f"dns:///{NAME}"],
        names.dial,
        render_timeout_s=20,
        wait_s=0,
        silence_s=0.5,
        max_message_mib=1,
        look_up=names.look_up,
    )
    running = asyncio.create_task(pool.run())
    try:
        yield pool
    finally:
        running.cancel()
        await asyncio.wait({running})
        await pool.close()


def streaming(pool: TokenizerPool) -> int:
    return sum(target.streams for target in pool.targets.all)


async def test_each_service_of_a_name_has_a_stream_and_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, seen = Names(), Counter[str]()

    def counted(name: str, running: RunningTokenizer) -> None:
        servicer: Any = running.service.servicer
        render = servicer.streams.render

        async def render_counted(request: Any) -> Any:
            seen[name] += 1
            return await render(request)

        servicer.streams.render = render_counted
        names.sockets[f"127.0.0.{len(names.sockets) + 1}:7071"] = running.target

    for name in "ab":
        (tmp_path / name).mkdir()
    async with running_tokenizer(tmp_path / "a") as first, running_pool(names, monkeypatch) as pool:
        with pytest.raises(ApiError) as early:
            await pool.render(HELLO)
        assert early.value.status == 503
        counted("a", first)
        await eventually(lambda: streaming(pool) == 1, "a stream")
        alone = await pool.render(HELLO)
        async with running_tokenizer(tmp_path / "b") as second:
            counted("b", second)
            await eventually(lambda: streaming(pool) == 2, "two streams")
            seen.clear()
            both = await asyncio.gather(*(pool.render(HELLO) for _ in range(40)))
            assert all(one == alone for one in both)
            assert seen == {"a": 20, "b": 20}
            del names.sockets["127.0.0.2:7071"]
        # It is gone, and its name knows it no more.
        await eventually(lambda: len(pool.targets.all) == 1, "one service")
        assert await pool.render(HELLO) == alone
