from __future__ import annotations

import asyncio
import math
import socket
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary.frames import FrameBuffer, FrameTooLarge, LinkClosed, MalformedFrame
from services.engine.domain import CoreErrorCode, FinishReason, SamplingOptions
from services.engine.link import (
    AbortSequences,
    AsyncLink,
    BlockingLink,
    CapacityFacts,
    CoreFailed,
    CoreLoad,
    CoreProgress,
    CoreReady,
    CoreStep,
    EndRow,
    FollowKv,
    KvChanges,
    KvContents,
    Message,
    ModelFacts,
    StartCore,
    StepColumns,
    StopCore,
    SubmitSequence,
)
from services.engine.link.channel import decode_body, encode_frame

LIMIT = 1 << 20


def submit(key: int, tokens: int = 3) -> SubmitSequence:
    return SubmitSequence(
        key=key,
        token_ids=list(range(tokens)),
        prompt_len=tokens,
        sampling=SamplingOptions(
            temperature=0.7, seed=-(2**63), logit_bias=((3, -100.0),), bad_words=((1, 2),), prompt_logprobs=0
        ),
        max_tokens=5,
        min_tokens=0,
        stop_token_ids=[2],
        ignore_eos=False,
        priority=-3,
        cache_salt="tenant",
    )


MESSAGES: list[Message] = [
    StartCore(b'{"a": 1}'),
    submit(2**63 + 1),
    AbortSequences([1, 2]),
    FollowKv(),
    KvContents(b"0123456789abcdef", True, False),
    KvChanges(True, b"", b"0123456789abcdef"),
    StopCore(),
    CoreProgress("loading weights", 0.5),
    CoreProgress("profiling"),
    CoreReady(
        ModelFacts(2048, 49152, [2], "float32", "ab", {"temperature": 0.0, "top_k": 40}),
        CapacityFacts(32, 100, 32, 64, 512),
    ),
    CoreStep(StepColumns(), CoreLoad()),
    CoreStep(
        StepColumns(
            keys=[1, 2],
            token_counts=[1, 0],
            token_ids=[7],
            logprob_rows=[0],
            sampled=[-0.5],
            top_counts=[2],
            top_ids=[7, 8],
            top_logprobs=[-0.5, -math.inf],
            ends=[
                EndRow(0, FinishReason.STOP, 3, 0, 4, stop_token_id=7),
                EndRow(1, FinishReason.ERROR, 3, 0, 4, None, CoreErrorCode.INTERNAL, "broken"),
            ],
        ),
        CoreLoad(running=1, steps=9),
    ),
    CoreFailed("no such model"),
]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    yield left, right
    left.close()
    right.close()


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_every_message_survives_the_wire(message: Message) -> None:
    frame = encode_frame(message, LIMIT)
    assert decode_body(bytes(frame[4:])) == message


def test_whole_numbers_of_a_models_defaults_stay_whole() -> None:
    facts = ModelFacts(2048, 49152, [2], "float32", "ab", {"temperature": 1.0, "top_k": 40})
    found = msgspec.msgpack.decode(msgspec.msgpack.encode(facts), type=ModelFacts).sampling_defaults
    assert {name: type(value) for name, value in found.items()} == {"temperature": float, "top_k": int}


@given(st.lists(st.integers(1, 40), max_size=30))
def test_frames_cut_anywhere_give_the_same_messages(cuts: list[int]) -> None:
    stream = b"".join(bytes(encode_frame(message, LIMIT)) for message in MESSAGES)
    received: list[Any] = []
    buffer, at = FrameBuffer(LIMIT), 0
    for cut in [*cuts, len(stream)]:
        buffer.feed(stream[at : at + cut])
        at += cut
        received += map(decode_body, buffer.take())
    assert received == MESSAGES


def test_oversized_frames_are_refused_on_both_sides() -> None:
    with pytest.raises(FrameTooLarge, match="limit of 100 bytes"):
        encode_frame(submit(1, tokens=1000), 100)
    buffer = FrameBuffer(100)
    buffer.feed(b"\x00\x00\x01\x00")
    with pytest.raises(FrameTooLarge):
        buffer.take()


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x91\xa4nope", b"\x92\xa5start\x01", b"\x91\xa4stop\x00"])
def test_nonsense_is_malformed(body: bytes) -> None:
    with pytest.raises(MalformedFrame):
        decode_body(body)


def test_poll_returns_what_arrived_then_eof(pair: tuple[socket.socket, socket.socket]) -> None:
    link = BlockingLink(pair[0])
    assert link.poll() == []
    assert link.poll(0.01) == []
    first, second = submit(1), AbortSequences([1])
    pair[1].sendall(encode_frame(first, LIMIT) + encode_frame(second, LIMIT))
    pair[1].close()
    received = link.poll(5)
    if len(received) == 1:
        received += link.poll(5)
    assert received == [first, second]
    with pytest.raises(LinkClosed):
        link.poll(None)
    with pytest.raises(LinkClosed):
        link.send(CoreProgress("gone"))


def test_eof_inside_a_frame_is_closed(pair: tuple[socket.socket, socket.socket]) -> None:
    link = BlockingLink(pair[0])
    pair[1].sendall(encode_frame(submit(1), LIMIT)[:-1])
    pair[1].close()
    with pytest.raises(LinkClosed):
        link.poll(5)


def test_a_message_of_the_wrong_direction_is_malformed(pair: tuple[socket.socket, socket.socket]) -> None:
    link = BlockingLink(pair[0])
    pair[1].sendall(encode_frame(CoreProgress("me"), LIMIT))
    with pytest.raises(MalformedFrame, match="reached the core"):
        link.poll(5)


def test_core_reads_while_its_send_is_held_up(pair: tuple[socket.socket, socket.socket]) -> None:
    """Both sides send more than the socket holds before either receives: no deadlock."""
    link, peer = BlockingLink(pair[0]), pair[1]
    steps = [CoreStep(StepColumns(token_ids=list(range(100_000))), CoreLoad(steps=i)) for i in range(8)]
    submits = [submit(i, tokens=100_000) for i in range(8)]

    def send_all() -> None:
        for step in steps:
            link.send(step)

    sender = threading.Thread(target=send_all)
    sender.start()
    for message in submits:
        peer.sendall(encode_frame(message, LIMIT))
    received: list[Any] = []
    buffer = FrameBuffer(LIMIT)
    while len(received) < len(steps):
        buffer.feed(peer.recv(1 << 16))
        received += map(decode_body, buffer.take())
    sender.join(10)
    assert received == steps
    arrived: list[object] = []
    while len(arrived) < len(submits):
        arrived += link.poll(5)
    assert arrived == submits


async def test_async_link_round_trip_and_eof(pair: tuple[socket.socket, socket.socket]) -> None:
    core, servicer = BlockingLink(pair[0]), await AsyncLink.open(pair[1])
    await servicer.send(submit(4))
    assert await asyncio.to_thread(core.poll, 5) == [submit(4)]
    core.send(CoreProgress("loading", 0.1))
    core.send(CoreFailed("bad"))
    assert await servicer.receive() == CoreProgress("loading", 0.1)
    assert await servicer.receive() == CoreFailed("bad")
    core.close()
    with pytest.raises(LinkClosed):
        await servicer.receive()
    await servicer.aclose()
    with pytest.raises(LinkClosed):
        await servicer.send(StopCore())


async def test_async_link_refuses_large_and_wrong_frames(pair: tuple[socket.socket, socket.socket]) -> None:
    servicer = await AsyncLink.open(pair[1], max_frame_bytes=200)
    with pytest.raises(FrameTooLarge):
        await servicer.send(submit(1, tokens=1000))
    pair[0].sendall(encode_frame(StopCore(), LIMIT))
    with pytest.raises(MalformedFrame, match="reached the servicer"):
        await servicer.receive()
    pair[0].sendall((1 << 30).to_bytes(4, "big"))
    with pytest.raises(FrameTooLarge):
        await servicer.receive()
    await servicer.aclose()
