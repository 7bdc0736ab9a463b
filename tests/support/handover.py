"""Cores that hand KV to each other in this process."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from services.engine.domain import FinishReason
from services.engine.link import OfferedKv, TransferLoad
from tests.support.torch_engine import LocalCore, tiny_options

# Longer than what it stands for ever takes.
LIMIT_S = 20.0


class HandoverCores:
    """Starts cores of one model, and ends them together. Their sockets lie in one directory."""

    def __init__(self, model: Path, directory: Path) -> None:
        self.model = model
        self.directory = directory
        self._made: list[LocalCore] = []

    def start(self, role: str, **options: Any) -> LocalCore:
        """A core of this role."""
        values = {"kv_transfer_directory": str(self.directory), "kv_transfer_timeout_s": 5.0, **options}
        self._made.append(LocalCore(tiny_options(self.model, role=role, **values)))
        return self._made[-1]

    def close(self) -> None:
        """Ends all."""
        for core in self._made:
            core.engine.close()


def offer_of(core: LocalCore, prompt: list[int], **options: Any) -> OfferedKv:
    """Computes a prompt, and returns the offer of its KV."""
    key = core.submit(prompt, prefill_only=True, **options)
    core.run()
    end = core.outputs[key].end
    if end is None or end.reason is not FinishReason.STOP or end.kv_offer is None:
        raise AssertionError(f"the prompt ended with {end}")
    return end.kv_offer


def run_both(prefill: LocalCore, decode: LocalCore) -> None:
    """Turns both loops until the second one has nothing left and the first one's offers are over."""
    deadline = time.monotonic() + LIMIT_S
    while decode.loop.work.busy or prefill.engine.scheduler.transfer_blocks.tables():
        if time.monotonic() > deadline:
            raise AssertionError("the sequences do not end, or the offers")
        prefill.turn()
        decode.turn()


def computed(core: LocalCore) -> int:
    """Tokens that prefill forwards have computed."""
    return core.engine.graphs.padding.prefill.tokens


def transfers(core: LocalCore) -> TransferLoad:
    """What the core reports of its transfers."""
    return core.engine.handover.load()


def check_empty(*cores: LocalCore) -> None:
    """Raises if anything is left of sequences, offers or arrivals."""
    for core in cores:
        core.engine.scheduler.check()
        used, waiting = core.engine.scheduler.load().used_blocks, len(core.engine.handover)
        if used or waiting:
            raise AssertionError(f"{used} blocks are in use and {waiting} sequences wait")
