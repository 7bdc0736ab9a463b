"""A core process without a model, for tests of the servicer's side of the link.

Run as `python stub_core.py MODE --link-fd N`. It answers each sequence with its key as the only token, except
that key 3 and above make it do what MODE says: `exit`, `hang` (never stops), or what it says at the
start: fail (`refuse`), take for ever (`load`).
"""

from __future__ import annotations

import signal
import socket
import sys
import time

from catenary.frames import LinkClosed
from services.engine.domain import FinishReason
from services.engine.link import (
    BlockingLink,
    CapacityFacts,
    CoreFailed,
    CoreLoad,
    CoreProgress,
    CoreReady,
    CoreStep,
    EndRow,
    ModelFacts,
    StartCore,
    StepColumns,
    StopCore,
    SubmitSequence,
)


def main(mode: str, fd: int) -> int:
    """Serve until the link closes or StopCore comes."""
    link = BlockingLink(socket.socket(fileno=fd))
    (start,) = link.poll(None)
    if not isinstance(start, StartCore):
        return 3
    if mode == "refuse":
        link.send(CoreFailed("the stub was told to refuse"))
        return 1
    if mode == "load":
        time.sleep(3600)
    link.send(CoreProgress("pretending", 0.5))
    link.send(
        CoreReady(ModelFacts(100, 1000, [2], "float32", ""), CapacityFacts(16, 8, 4, 4, 64)),
    )
    while True:
        try:
            messages = link.poll(None)
        except LinkClosed:
            return 0
        for message in messages:
            if isinstance(message, StopCore):
                return 0
            if isinstance(message, SubmitSequence):
                _answer(link, message, mode)


def _answer(link: BlockingLink, message: SubmitSequence, mode: str) -> None:
    if message.key >= 3 and mode == "exit":
        sys.exit(9)
    if message.key >= 3 and mode == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(3600)
    end = EndRow(0, FinishReason.LENGTH, message.prompt_len, 0, 1)
    columns = StepColumns(keys=[message.key], token_counts=[1], token_ids=[message.key], ends=[end])
    link.send(CoreStep(columns, CoreLoad(steps=message.key, generated_tokens=message.key)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[3])))
