"""Whatever goes wrong with KV on its way: the same tokens, a cause that is counted, and nothing left."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from services.engine.domain import FinishReason
from services.engine.link import OfferedKv
from tests.support.handover import LIMIT_S, HandoverCores, check_empty, offer_of, run_both, transfers
from tests.support.kv_connectors import FaultyConnector
from tests.support.torch_engine import LocalCore, save_tiny_model

PROMPT = [3 + at * 7 % 120 for at in range(61)]
FAULTY = "tests.support.kv_connectors:FaultyConnector"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def cores(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HandoverCores]:
    cores = HandoverCores(model, tmp_path_factory.mktemp("kv"))
    yield cores
    cores.close()


@pytest.fixture(scope="module")
def prefill(cores: HandoverCores) -> LocalCore:
    return cores.start("prefill", kv_connector=FAULTY, kv_offer_ttl_s=600.0)


@pytest.fixture(scope="module")
def decode(cores: HandoverCores) -> LocalCore:
    return cores.start("decode", kv_connector=FAULTY, kv_transfer_timeout_s=1.5)


@pytest.fixture(scope="module")
def wanted(cores: HandoverCores) -> list[int]:
    """What a single engine says to the prompt."""
    core = cores.start("both")
    key = core.submit(PROMPT)
    core.run()
    return core.outputs[key].token_ids


@pytest.fixture(autouse=True)
def well(prefill: LocalCore, decode: LocalCore) -> Iterator[None]:
    FaultyConnector.fault = ""
    FaultyConnector.hold.clear()
    yield
    FaultyConnector.hold.set()
    FaultyConnector.fault = ""
    for core in (prefill, decode):
        for key in core.outputs:
            core.abort(key)
        core.turn()
        check_empty(core)


def faults(decode: LocalCore) -> dict[str, int]:
    return transfers(decode).faults


def computed_after(
    decode: LocalCore, prefill: LocalCore, offer: OfferedKv, wanted: list[int], salt: str
) -> dict[str, int]:
    """Serves the prompt with a bad offer. Returns the causes that this added."""
    before = faults(decode)
    key = decode.submit(PROMPT, kv_offer=offer, cache_salt=salt)
    deadline = time.monotonic() + LIMIT_S
    while decode.loop.work.busy:
        assert time.monotonic() < deadline
        prefill.turn()
        decode.turn()
    output = decode.outputs[key]
    assert output.token_ids == wanted
    assert output.end is not None
    assert (output.end.reason, output.end.transferred_tokens) == (FinishReason.LENGTH, 0)
    decode.engine.scheduler.check()
    after = faults(decode)
    return {
        cause: after[cause] - before.get(cause, 0) for cause in after if after[cause] > before.get(cause, 0)
    }


Change = Callable[[OfferedKv], OfferedKv]

CHANGES: dict[str, tuple[str, Change]] = {
    "unknown connector": ("connector", lambda offer: replace(offer, connector="pigeon")),
    "another host": ("host", lambda offer: replace(offer, connector="shm", host_id="elsewhere")),
    "another layout": ("layout", lambda offer: replace(offer, layout=b"x" * 16)),
    "another length": ("mismatch", lambda offer: replace(offer, tokens=offer.tokens - 1)),
    "other blocks": ("mismatch", lambda offer: replace(offer, blocks=offer.blocks + 1)),
    "a short ticket": ("mismatch", lambda offer: replace(offer, ticket=b"x")),
    "nothing at all": ("connector", lambda offer: OfferedKv("", "", b"", "", 0, 0, b"")),
    "a wrong ticket": ("gone", lambda offer: replace(offer, ticket=os.urandom(32))),
    "nobody there": ("unreachable", lambda offer: replace(offer, address="127.0.0.1:1")),
    "no address": ("unreachable", lambda offer: replace(offer, address="nowhere")),
    "no socket": (
        "unreachable",
        lambda offer: replace(offer, connector="shm", address="/nonexistent/socket"),
    ),
    "no path": ("unreachable", lambda offer: replace(offer, connector="shm", address="\0" + "x" * 300)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_bad_offers(prefill: LocalCore, decode: LocalCore, wanted: list[int], name: str) -> None:
    cause, change = CHANGES[name]
    offer = change(offer_of(prefill, PROMPT, cache_salt=name))
    assert computed_after(decode, prefill, offer, wanted, name) == {cause: 1}


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("short", "protocol"),
        ("long", "protocol"),
        ("crooked", "protocol"),
        ("raising", "protocol"),
        ("refusing", "checksum"),
        ("hanging", "timeout"),
    ],
)
def test_bad_connectors(
    prefill: LocalCore, decode: LocalCore, wanted: list[int], fault: str, cause: str
) -> None:
    offer = offer_of(prefill, PROMPT, cache_salt=fault)
    FaultyConnector.fault = fault
    assert computed_after(decode, prefill, offer, wanted, fault) == {cause: 1}


def test_a_busy_engine_is_asked_again(prefill: LocalCore, decode: LocalCore, wanted: list[int]) -> None:
    offer = offer_of(prefill, PROMPT, cache_salt="busy")
    before = faults(decode)
    FaultyConnector.fault = "busy"
    key = decode.submit(PROMPT, kv_offer=offer, cache_salt="busy")
    run_both(prefill, decode)
    output = decode.outputs[key]
    assert output.token_ids == wanted
    assert output.end is not None
    assert output.end.transferred_tokens == len(PROMPT) - 1
    assert faults(decode) == before


def test_a_prompt_that_is_cached_waits_for_nobody(prefill: LocalCore, decode: LocalCore) -> None:
    prompt = PROMPT[:57]
    first = decode.submit(prompt, kv_offer=offer_of(prefill, prompt, cache_salt="all"), cache_salt="all")
    run_both(prefill, decode)
    before = faults(decode)
    offer = offer_of(prefill, prompt, cache_salt="all")
    FaultyConnector.fault = "late"
    second = decode.submit(prompt, kv_offer=offer, cache_salt="all")
    decode.run()
    assert decode.outputs[second].token_ids == decode.outputs[first].token_ids
    end = decode.outputs[second].end
    assert end is not None
    assert end.cached_tokens == 56
    assert faults(decode) == before
    FaultyConnector.hold.set()
    run_both(prefill, decode)
    assert transfers(prefill).offers == 0


def test_an_offer_for_another_prompt_or_under_another_salt(
    prefill: LocalCore, decode: LocalCore, wanted: list[int]
) -> None:
    other = offer_of(prefill, [4, *PROMPT[1:]], cache_salt="theirs")
    assert computed_after(decode, prefill, other, wanted, "theirs") == {"mismatch": 1}
    salted = offer_of(prefill, PROMPT, cache_salt="theirs")
    assert computed_after(decode, prefill, salted, wanted, "ours") == {"mismatch": 1}


def test_an_offer_that_was_fetched_withdrawn_or_given_up(
    prefill: LocalCore, decode: LocalCore, wanted: list[int]
) -> None:
    offer = offer_of(prefill, PROMPT, cache_salt="once")
    key = decode.submit(PROMPT, kv_offer=offer, cache_salt="once")
    while decode.loop.work.busy or prefill.engine.scheduler.transfer_blocks.tables():
        prefill.turn()
        decode.turn()
    assert decode.outputs[key].token_ids == wanted
    assert computed_after(decode, prefill, offer, wanted, "twice") == {"gone": 1}
    given_up = offer_of(prefill, PROMPT, cache_salt="up")
    assert prefill.engine.scheduler.transfer_blocks.give_up()
    assert computed_after(decode, prefill, given_up, wanted, "up") == {"gone": 1}


def test_blocks_that_the_sender_s_memory_lost_do_not_pass(
    prefill: LocalCore, decode: LocalCore, wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read after it was checked is another thing than what was checked."""
    import catenary.transfer.tcp as tcp

    send = tcp.send_chunk

    def flip(sock: Any, digests: list[bytes], blocks: memoryview) -> None:
        changed = bytearray(blocks)
        changed[len(changed) // 2] ^= 1
        send(sock, digests, memoryview(changed))

    monkeypatch.setattr(tcp, "send_chunk", flip)
    book: Any = prefill.engine.handover.offers
    connector = FaultyConnector(prefill.engine.handover.connectors[0].settings)
    address = connector.serve(book)
    offer = replace(offer_of(prefill, PROMPT, cache_salt="flip"), address=address)
    assert computed_after(decode, prefill, offer, wanted, "flip") == {"checksum": 1}
    connector.close()


@pytest.mark.parametrize("side", ["read", "write"])
def test_a_device_that_fails_to_copy(
    prefill: LocalCore, decode: LocalCore, wanted: list[int], side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = prefill if side == "read" else decode
    offer = offer_of(prefill, PROMPT, cache_salt=side)

    def fail(*_: Any) -> None:
        raise RuntimeError("the device is tired")

    name = "_begin_read" if side == "read" else "_write"
    monkeypatch.setattr(core.engine.runner.copies, name, fail)
    # The sender hangs up; the receiver knows no more than that.
    cause = "protocol" if side == "read" else "device"
    assert computed_after(decode, prefill, offer, wanted, side) == {cause: 1}


def test_an_abort_while_the_kv_is_on_its_way(prefill: LocalCore, decode: LocalCore) -> None:
    offer = offer_of(prefill, PROMPT, cache_salt="abort")
    FaultyConnector.fault = "late"
    key = decode.submit(PROMPT, kv_offer=offer, cache_salt="abort")
    decode.turn()
    assert decode.engine.scheduler.load().used_blocks > 0
    decode.abort(key)
    decode.turn()
    end = decode.outputs[key].end
    assert end is not None
    assert end.reason is FinishReason.ABORT
    check_empty(decode)
    before = transfers(decode)
    FaultyConnector.hold.set()
    # Its thread finds that nobody wants what it would fetch, and the loop hears of that.
    deadline = time.monotonic() + LIMIT_S
    while decode.engine.handover.patience != 0:
        assert time.monotonic() < deadline
        prefill.turn()
    decode.turn()
    assert transfers(decode).arrived == before.arrived
    check_empty(decode)


def test_sequences_that_run_take_the_blocks_of_one_that_waits(
    cores: HandoverCores, prefill: LocalCore, wanted: list[int]
) -> None:
    size = prefill.engine.runner.copies.block_bytes
    decode = cores.start(
        "decode", kv_connector=FAULTY, kv_cache_gib=20 * size / 2**30, max_model_len=160, max_num_seqs=4
    )
    offer = offer_of(prefill, PROMPT, cache_salt="tight")
    FaultyConnector.fault = "late"
    key = decode.submit(PROMPT, kv_offer=offer, cache_salt="tight")
    decode.turn()
    assert transfers(decode).fetching == 1
    others = [decode.submit([seed + 5, *PROMPT[:60]], max_tokens=60) for seed in range(2)]
    while any(decode.outputs[one].end is None for one in others):
        decode.turn()
    FaultyConnector.hold.set()
    while decode.loop.work.busy:
        prefill.turn()
        decode.turn()
    assert decode.outputs[key].token_ids == wanted
    assert all(len(decode.outputs[one].token_ids) == 60 for one in others)
    assert faults(decode) == {"no_blocks": 1}
    # And one for which there is no room from the beginning gives its offer back.
    held = decode.engine.scheduler.pool.allocate(14)
    FaultyConnector.fault = ""
    before = transfers(prefill).fetched
    again = decode.submit(
        PROMPT[:55], kv_offer=offer_of(prefill, PROMPT[:55], cache_salt="n"), cache_salt="n"
    )
    deadline = time.monotonic() + LIMIT_S
    while transfers(prefill).fetched == before:
        assert time.monotonic() < deadline
        prefill.turn()
    decode.engine.scheduler.pool.free(held)
    decode.run()
    assert decode.outputs[again].end is not None
    assert faults(decode) == {"no_blocks": 2}
    check_empty(decode)
