"""`HPUGraph`: device work that was captured once and can be replayed (gaudi-facts.md 4.2)."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from services.engine.device.sim.card import Card, card
from services.engine.device.sim.compile_only import spoil
from services.engine.device.sim.graphs.program import Program
from services.engine.device.sim.memory import Block
from services.engine.device.sim.tensor import SimTensor

# What a graph takes: for itself, a share of what its products with weights give, and with a tensor cache a
# share of all its intermediate tensors. gaudi-facts.md 2.3 has 15 prefill graphs of an 8B model in 14.03
# GiB and 48 decode graphs, of far fewer tokens, in 161.9 MiB, without a tensor cache. Such a model's layer
# gives 86 kB for each token: 7,168 tokens then take 0.9 GiB, 64 tokens 9 MiB.
_GRAPH_BYTES = 2**20
_PRODUCT_SHARE = 1 / 20
_CACHED_SHARE = 1 / 4


class GraphError(RuntimeError):
    """A graph was used in a way that the bridge does not allow."""


class HPUGraph:
    """One captured graph, from `capture_begin` to `reset`. Only in lazy mode.

    A dry run leaves the launch of what it captures to the replay that has to follow it. In the simulator
    every capture computes: what a dry run's first replay would write is there before it.
    """

    def __init__(self) -> None:
        self._card = card()
        require_lazy(self._card)
        self._program: Program | None = None
        self._memory: Block | None = None
        self._cached_share = _CACHED_SHARE

    def capture_begin(self, dry_run: bool = False) -> None:
        """Begins to capture the work given to the current stream. Raises GraphError inside a capture."""
        if self._program is not None or self._card.recorders:
            raise GraphError("one capture at a time: end this one, or reset the graph, first")
        self._card.flush()
        self._program = Program()
        self._cached_share = 0.0 if dry_run else _CACHED_SHARE
        self._card.recorders.append(self._program)

    def capture_end(self) -> None:
        """Ends the capture: compiles it, and takes the memory that the graph keeps. Raises SimError."""
        program = self._captured()
        self._card.recorders.remove(program)
        program.end()
        for recipe in program.recipes:
            self._card.compile(("graph", recipe), operations=len(recipe))
        kept = program.product_bytes * _PRODUCT_SHARE + program.made_bytes * self._cached_share
        self._memory = self._card.hbm.take(_GRAPH_BYTES + int(kept))
        self._card.counters.captures += 1

    @contextmanager
    def capturing(self, dry_run: bool) -> Iterator[None]:
        """Captures what happens inside. An error there leaves no graph."""
        self.capture_begin(dry_run)
        try:
            yield
            self.capture_end()
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        if self._program in self._card.recorders:
            self._card.recorders.remove(self._program)
        self.reset()

    def mark_user_inputs(self, tensors: Sequence[torch.Tensor]) -> None:
        """Names, inside the capture and before its first operation, the inputs of `replayV3`."""
        self._captured().give(tensors)

    def mark_user_outputs(self, tensors: Sequence[torch.Tensor]) -> None:
        """Names the tensors that outlive a replay; everything else that was captured is freed.

        A view of part of a captured tensor is freed with it, and so is a captured tensor that is written but
        not named: what they show from now on is garbage.
        """
        for lost in self._captured().keep(tensors):
            spoil(lost)

    def get_user_input_match_indices(self) -> list[int]:
        """Which of the marked inputs the graph uses; `replayV3` finds the others in their captured place."""
        return sorted(self._captured().used_inputs)

    def replay(self, asynchronous: bool = False) -> None:
        """Runs the captured work again, on the tensors it was captured with."""
        self._replay([])

    def replayV2(
        self, static_tlist: Sequence[torch.Tensor], tlist: Sequence[torch.Tensor], asynchronous: bool = False
    ) -> None:
        """Copies the new tensors into the captured ones, then replays."""
        for captured, new in zip(static_tlist, tlist, strict=True):
            captured.copy_(new, non_blocking=True)
        self._replay([])

    def replayV3(self, tlistI: Sequence[torch.Tensor], asynchronous: bool = False) -> None:
        """Replays with these tensors in the place of the marked user inputs, without a copy."""
        self._replay([tensor.raw if isinstance(tensor, SimTensor) else tensor for tensor in tlistI])

    def _replay(self, inputs: list[torch.Tensor]) -> None:
        program = self._captured()
        self._card.flush()
        self._card.counters.replays += 1
        program.replay(self._card, inputs)

    def clear_inputs(self) -> None:
        """Forgets inputs that the graph holds because they were changed in place: here, it holds none."""

    def reset(self) -> None:
        """Frees the graph and its memory."""
        self._program = None
        self._memory = None

    def __del__(self) -> None:
        self.reset()

    def _captured(self) -> Program:
        if self._program is None:
            raise GraphError("this HPU graph holds no capture")
        return self._program


@contextmanager
def graph(hpu_graph: HPUGraph, stream: Any = None, dry_run: bool = False) -> Iterator[None]:
    """`with graph(g, stream):` captures the block into `g`; garbage is collected first, to make room."""
    gc.collect()
    with hpu_graph.capturing(dry_run):
        yield


def require_lazy(device: Card) -> None:
    """Raises GraphError in the modes that have no HPU graphs."""
    if not device.lazy:
        raise GraphError("HPU graphs need lazy mode: set PT_HPU_LAZY_MODE=1")
