"""The models that are served: those of all routers, their vocabularies, and models that are awaited."""

from __future__ import annotations

import asyncio
import json

import pytest

from catenary.text import Vocabulary
from catenary.v1 import common_pb2, router_pb2
from gateway.errors import ApiError
from gateway.text.models import ModelRegistry, merged
from tests.support.tiny_tokenizer import tokenizer_json

FILE = json.dumps(tokenizer_json()).encode()


def listed(engines: int, length: int = 100, created: int = 5, name: str = "m") -> router_pb2.ServedModel:
    info = common_pb2.ModelInfo(name=name, max_model_len=length, vocab_size=10)
    load = router_pb2.ModelLoad(running=engines, total_blocks=engines)
    return router_pb2.ServedModel(info=info, serving_engines=engines, created=created, load=load)


def test_models_of_several_routers() -> None:
    first, second = listed(3, 100, 9), listed(2, 50, 5)
    (one,) = merged([{"m": first}, {"m": second}, {}])
    assert (one.serving_engines, one.load.running, one.info.max_model_len, one.created) == (3, 3, 50, 5)
    assert (first.info.max_model_len, second.created) == (100, 5)
    # A context that no engine has does not count.
    (one,) = merged([{"m": listed(1, 100)}, {"m": listed(0, 10)}])
    assert one.info.max_model_len == 100
    (one,) = merged([{"m": listed(0, 100)}, {"m": listed(0, 10)}])
    assert (one.serving_engines, one.info.max_model_len) == (0, 10)


def test_an_awaited_model_is_listed_without_engines() -> None:
    gone = listed(2)
    (one,) = merged([{}], [gone])
    assert (one.info.name, one.serving_engines, one.load.running) == ("m", 0, 0)
    assert gone.serving_engines == 2
    (one,) = merged([{"m": listed(1)}], [gone])
    assert one.serving_engines == 1


def served(name: str = "m", engines: int = 1, sha: str = "") -> router_pb2.ServedModel:
    info = common_pb2.ModelInfo(name=name, max_model_len=10, vocab_size=512, tokenizer_sha256=sha)
    return router_pb2.ServedModel(info=info, serving_engines=engines)


class Shelf:
    """A tokenizer service whose file changes."""

    def __init__(self) -> None:
        self.sha = "a"
        self.fetches = 0

    async def fetch(self, model: str) -> Vocabulary:
        self.fetches += 1
        if model == "broken":
            raise ValueError("damaged")
        return Vocabulary(FILE, sha256=self.sha)


def status_of(registry: ModelRegistry, name: str = "m") -> int:
    try:
        registry.require(name)
    except ApiError as error:
        return error.status
    return 200


async def until(registry: ModelRegistry, status: int, name: str = "m") -> None:
    async with asyncio.timeout(5):
        while status_of(registry, name) != status:  # noqa: ASYNC110 - the registry calls nobody
            await asyncio.sleep(0.005)


async def test_a_model_needs_a_session_an_engine_and_its_own_tokenizer() -> None:
    shelf = Shelf()
    registry = ModelRegistry(shelf.fetch, wait_s=1000)
    running = asyncio.create_task(registry.run())
    try:
        assert status_of(registry) == 503
        registry.update([served(sha="a"), served("broken")])
        assert status_of(registry, "other") == 404
        await until(registry, 200)
        assert registry.ready
        assert status_of(registry, "broken") == 503
        registry.update([served(engines=0)])
        assert (status_of(registry), registry.ready) == (503, False)
        registry.update([served(sha="b")])
        assert status_of(registry) == 503
        shelf.sha = "b"
        await until(registry, 200)
        # A model that was served a moment ago is awaited.
        registry.take([{"m": served(sha="b")}])
        assert (status_of(registry), registry.ready, registry.serves("m")) == (200, True, True)
        registry.take([])
        assert (status_of(registry), registry.ready, registry.serves("m")) == (200, False, False)
        registry.take([{}])
        assert (status_of(registry), registry.ready, registry.serves("m")) == (200, False, False)
    finally:
        running.cancel()
        await asyncio.wait({running})


async def test_a_model_is_listed_once_its_tokenizer_is_loaded() -> None:
    shelf = Shelf()
    registry = ModelRegistry(shelf.fetch, {"alias": "m", "other": "broken"})
    registry.update([served(sha="a"), served("broken")])
    for name in ("m", "alias", "broken"):
        with pytest.raises(ApiError) as early:
            registry.listed(name)
        assert (early.value.status, early.value.code) == (503, "tokenizer_unavailable")
    assert registry.names == []
    await registry.refresh()
    assert [name for name, _ in registry.names] == ["m", "alias"]
    assert registry.listed("alias").info.name == "m"
    with pytest.raises(ApiError) as broken:
        registry.listed("other")
    assert broken.value.status == 503
    with pytest.raises(ApiError) as unknown:
        registry.listed("mm")
    assert unknown.value.message == (
        "The model 'mm' does not exist. Did you mean 'm'? Served models: 'm', 'alias'."
    )
    # One whose engines are away can be asked: the request waits for them.
    registry.update([served(sha="a", engines=0)])
    assert [name for name, _ in registry.names] == ["m", "alias"]


async def test_an_engine_without_a_checksum_takes_any_tokenizer() -> None:
    shelf = Shelf()
    registry = ModelRegistry(shelf.fetch)
    running = asyncio.create_task(registry.run())
    try:
        registry.update([served()])
        await until(registry, 200)
        registry.update([served()])
        await asyncio.sleep(0)
        assert shelf.fetches == 1
    finally:
        running.cancel()
        await asyncio.wait({running})


async def test_a_model_is_awaited_for_a_time_only() -> None:
    registry = ModelRegistry(Shelf().fetch)
    registry.take([{"m": served()}])
    assert not registry.awaits("m")
    registry.take([])
    assert not registry.awaits("m")
    # The list stands while no router is connected.
    assert registry.info("m").info.name == "m"
