"""Copies of KV blocks between the device and the host: so many at a time, in one static shape each way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from services.engine.device import Device, HostCopy, Submitted
from services.engine.graphs import Graphs, Phase
from services.engine.model.paged import PagedModel
from services.engine.runner.batches import KvLayout

# One copy moves so many bytes, or one block: large enough for the way to the device, and soon over for a step
# that waits behind it.
_COPY_BYTES: Final = 8 << 20
_MOST_BLOCKS: Final = 16
# Bytes and copies that a step waits for at the most, each way.
_TURN_BYTES: Final = 128 << 20
_MOST_COPIES: Final = 16

ReadDone = Callable[[HostCopy | Exception], None]
WriteDone = Callable[[Exception | None], None]


class BlockCopies:
    """Copies in the order of the device's stream: a read sees the writes of the steps before.

    Called from the thread that launches steps. `blocks` are copied at once, padded with the padding block;
    `block_bytes` is what one takes on the host. Between two steps there is time for `per_turn` copies.
    """

    def __init__(self, model: PagedModel, device: Device, graphs: Graphs, layout: KvLayout) -> None:
        self._model = model
        self._device = device
        self._graphs = graphs
        self._layout = layout
        self.block_bytes = model.kv_bytes_per_token() * layout.block_size
        self.blocks = max(1, min(_MOST_BLOCKS, _COPY_BYTES // self.block_bytes))
        self.per_turn = max(1, min(_MOST_COPIES, _TURN_BYTES // (self.blocks * self.block_bytes)))

    def read(self, ids: Sequence[int], done: ReadDone) -> None:
        """Begin a copy of at most `blocks` blocks to the host.

        `done` gets it, as [blocks, block_bytes] bytes, or the error; in the device's thread.
        """

        def work() -> None:
            try:
                done(self._begin_read(ids))
            except Exception as error:
                done(error)

        self._device.stream.submit(work)

    def write(self, ids: Sequence[int], data: memoryview, done: WriteDone) -> None:
        """Copy bytes that `read` gave into as many blocks, `blocks` at most. `done` is called as there."""

        def work() -> None:
            try:
                self._write(ids, data)
            except Exception as error:
                done(error)
            else:
                done(None)

        self._device.stream.submit(work)

    def rehearse(self, phase: Phase) -> Submitted[None]:
        """Copy padding alone, for warm-up."""
        if phase is Phase.READ:
            return self._device.stream.submit(self._rehearse_read)
        return self._device.stream.submit(partial(self._write, (), memoryview(b"")))

    def _rehearse_read(self) -> None:
        self._begin_read(()).wait()

    @torch.inference_mode()
    def _begin_read(self, ids: Sequence[int]) -> HostCopy:
        numbers = self._graphs.run(Phase.READ, self.blocks, self._model.read_blocks, (self._ids(ids),))
        return self._device.stream.begin_to_host(numbers)

    @torch.inference_mode()
    def _write(self, ids: Sequence[int], data: memoryview) -> None:
        # Padding writes zeros to the padding block, which holds them anyway or what padding left there.
        host = torch.empty(self.blocks * self.block_bytes, dtype=torch.uint8)
        host[len(data) :].zero_()
        if data:
            # numpy reads memory that may not be written, which shared memory may not.
            host.numpy()[: len(data)] = np.frombuffer(data, dtype=np.uint8)
        numbers = self._device.memory.to_device(host.view(self._model.dtype).view(self.blocks, -1))
        self._graphs.run(Phase.WRITE, self.blocks, self._model.write_blocks, (self._ids(ids), numbers))
        self._device.execution.flush()

    def _ids(self, ids: Sequence[int]) -> torch.Tensor:
        padded = torch.full((self.blocks,), self._layout.padding_block, dtype=torch.int64)
        padded[: len(ids)] = torch.tensor(ids, dtype=torch.int64)
        return self._device.memory.to_device(padded)


def host_bytes(copy: HostCopy, count: int, block_bytes: int) -> memoryview:
    """Return the first `count` blocks of a copy, once it is there."""
    flat = copy.wait().contiguous().view(torch.uint8).flatten()
    numbers: Any = flat.numpy()
    return memoryview(numbers)[: count * block_bytes]
