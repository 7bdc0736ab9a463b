"""Frames of links: cut anywhere they give the same bodies, a limit holds, and a lost peer is LinkClosed."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary.frames import (
    HEADER_BYTES,
    AsyncFrames,
    BlockingFrames,
    FrameBuffer,
    FrameTooLarge,
    LinkClosed,
    body_size,
    fill,
    seal,
)

BODIES = [b"", b"a", b"bc" * 500, b"\x00\x00\x00\x05"]


def frame_of(body: bytes) -> bytearray:
    return seal(bytearray(HEADER_BYTES) + body)


STREAM = b"".join(map(frame_of, BODIES))


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


def dribble(sock: socket.socket, data: bytes, size: int) -> threading.Thread:
    """Send in pieces of `size` bytes, then close."""

    def send() -> None:
        for at in range(0, len(data), size):
            sock.sendall(data[at : at + size])
        sock.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@given(st.lists(st.integers(1, 40), max_size=30))
def test_a_buffer_gives_the_same_bodies_however_the_stream_is_cut(cuts: list[int]) -> None:
    buffer, received, at = FrameBuffer(), list[bytes](), 0
    for cut in [*cuts, len(STREAM)]:
        buffer.feed(STREAM[at : at + cut])
        at += cut
        received += buffer.take()
    assert received == BODIES
    assert buffer.take() == []


@given(st.binary(max_size=64), st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_partial_reads_fill_a_view(data: bytes, sizes: list[int]) -> None:
    rest, turn = memoryview(data), iter(sizes * (len(data) + 1))

    def receive_into(view: memoryview) -> int:
        nonlocal rest
        piece = rest[: min(next(turn), len(view))]
        view[: len(piece)] = piece
        rest = rest[len(piece) :]
        return len(piece)

    target = bytearray(len(data))
    fill(memoryview(target), receive_into)
    assert target == data
    with pytest.raises(LinkClosed):
        fill(memoryview(bytearray(1)), receive_into)


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_a_blocking_end_reads_frames_that_come_in_pieces(
    pair: tuple[socket.socket, socket.socket], size: int
) -> None:
    frames = BlockingFrames(pair[0])
    thread = dribble(pair[1], STREAM, size)
    assert [bytes(frames.receive()) for _ in BODIES] == BODIES
    with pytest.raises(LinkClosed):
        frames.receive()
    thread.join()


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
async def test_an_asyncio_end_reads_frames_that_come_in_pieces(
    pair: tuple[socket.socket, socket.socket], size: int
) -> None:
    frames = await AsyncFrames.over(pair[0])
    thread = dribble(pair[1], STREAM, size)
    assert [await frames.receive() for _ in BODIES] == BODIES
    with pytest.raises(LinkClosed):
        await frames.receive()
    await asyncio.to_thread(thread.join)
    await frames.aclose()


@pytest.mark.parametrize("kept", [1, HEADER_BYTES, HEADER_BYTES + 2])
async def test_an_end_inside_of_a_frame_is_closed(kept: int) -> None:
    cut = bytes(frame_of(b"abc"))[:kept]
    left, right = socket.socketpair()
    with left, right:
        dribble(right, cut, kept).join()
        with pytest.raises(LinkClosed):
            BlockingFrames(left).receive()
    left, right = socket.socketpair()
    with left, right:
        dribble(right, cut, kept).join()
        frames = await AsyncFrames.over(left)
        with pytest.raises(LinkClosed):
            await frames.receive()
        frames.abort()


async def test_frames_over_the_limit_are_neither_sent_nor_read() -> None:
    with pytest.raises(FrameTooLarge, match="of 101 bytes is over the limit of 100 bytes"):
        seal(bytearray(HEADER_BYTES + 101), 100)
    assert body_size(frame_of(bytes(100))[:HEADER_BYTES], 100) == 100
    buffer = FrameBuffer(100)
    buffer.feed(bytes(frame_of(bytes(101))))
    with pytest.raises(FrameTooLarge):
        buffer.take()
    left, right = socket.socketpair()
    with left, right:
        right.sendall(frame_of(bytes(101)))
        with pytest.raises(FrameTooLarge):
            BlockingFrames(left, 100).receive()
    left, right = socket.socketpair()
    with left, right:
        right.sendall(frame_of(bytes(101)))
        frames = await AsyncFrames.over(left, 100)
        with pytest.raises(FrameTooLarge):
            await frames.receive()


async def test_both_ends_talk_and_learn_that_the_other_is_gone() -> None:
    left, right = socket.socketpair()
    with left:
        blocking, frames = BlockingFrames(left), await AsyncFrames.over(right)
        await frames.send(frame_of(b"question"))
        assert blocking.receive() == b"question"
        blocking.send(frame_of(b"answer"))
        assert await frames.receive() == b"answer"
        frames.abort()
        await asyncio.sleep(0)
        with pytest.raises(LinkClosed):
            await frames.send(frame_of(b"late"))
        with pytest.raises(LinkClosed):
            blocking.receive()
        with pytest.raises(LinkClosed):
            blocking.send(frame_of(b"late"))
