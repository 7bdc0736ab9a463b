"""A worker process: reads tasks from its link, renders, answers. It holds no secret, opens no connection."""

from __future__ import annotations

import argparse
import gc
import os
import resource
import socket
import sys
import threading

import msgspec

from catenary.frames import BlockingFrames, LinkClosed
from services.tokenizer.rendering import ModelFilesError
from services.tokenizer.workers.messages import Task, WorkerFailed, WorkerSetup, framed
from services.tokenizer.workers.tools import TaskTools


def main() -> int:
    """Serve until the link ends."""
    parser = argparse.ArgumentParser(description="Worker of the tokenizer service; started by it.")
    parser.add_argument("--link-fd", type=int, required=True)
    options = parser.parse_args()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    frames = BlockingFrames(socket.socket(fileno=options.link_fd))
    try:
        setup = msgspec.msgpack.decode(frames.receive(), type=WorkerSetup)
        tools = _load(setup, frames)
        return 1 if tools is None else _serve(tools, frames)
    except LinkClosed:
        return 0


def _end_with_parent() -> None:
    # The service holds the other end of stdin: however it dies, this returns, even while a task runs.
    os.read(0, 1)
    os._exit(0)


def _load(setup: WorkerSetup, frames: BlockingFrames) -> TaskTools | None:
    if setup.memory_bytes:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        # A process may not raise its hard limit.
        bound = setup.memory_bytes if hard == resource.RLIM_INFINITY else min(setup.memory_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
    try:
        tools = TaskTools(setup)
    except ModelFilesError as error:
        frames.send(framed(WorkerFailed(str(error))))
        return None
    frames.send(framed(tools.ready))
    return tools


def _serve(tools: TaskTools, frames: BlockingFrames) -> int:
    decoder = msgspec.msgpack.Decoder(Task)
    gc.collect()
    gc.freeze()
    while True:
        task = decoder.decode(frames.receive())
        frames.send(framed(tools.answer(task)))


if __name__ == "__main__":
    sys.exit(main())
