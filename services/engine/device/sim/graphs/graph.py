"""`HPUGraph`: device work that was captured once and can be replayed, and what a capture records."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from services.engine.device.sim.card import Card, card
from services.engine.device.sim.compile_only import spoil
from services.engine.device.sim.settings import view_update_in_capture
from services.engine.device.sim.tensor import DEVICE, Block, SimTensor, unwrap

# Products with a model's weights; those of attention are batches of products.
_PRODUCTS = frozenset({torch.ops.aten.mm.default, torch.ops.aten.addmm.default})


@dataclass(frozen=True, slots=True)
class Made:
    """Stands for a tensor that an earlier step of the program makes."""

    index: int


@dataclass(frozen=True, slots=True)
class Given:
    """Stands for a user input that each replay brings anew."""

    index: int


@dataclass(frozen=True, slots=True)
class Step:
    """One operation. Among the arguments, tensors are `Made`, `Given`, or captured ones as they are."""

    operation: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    results: tuple[int | None, ...]


@dataclass(slots=True, eq=False)
class Program:
    """The steps of one capture. Replaying runs them again: no Python of the forward does.

    recipes: what is compiled, by the steps between two flushes. made_bytes: of new tensors, and product_bytes
    of those that are products with weights. used_inputs: which of the given ones the steps read or write.

    A replay makes the intermediate tensors anew and frees them at its end; in-place operations act on what
    was captured; results that somebody still holds get the new values. That is what is seen of a graph whose
    tensors all stay where they were captured.
    """

    steps: list[Step] = field(default_factory=list)
    recipes: list[tuple[Any, ...]] = field(default_factory=list)
    made_bytes: int = 0
    product_bytes: int = 0
    used_inputs: frozenset[int] = frozenset()
    _made: int = 0
    _open: list[Any] = field(default_factory=list)
    _first: int = 0
    _index: dict[int, tuple[weakref.ref[SimTensor], Made | Given]] = field(default_factory=dict)
    _held: dict[int, weakref.ref[SimTensor]] = field(default_factory=dict)
    _own: set[int] = field(default_factory=set)
    _inputs: set[int] = field(default_factory=set)
    _written: dict[int, torch.Tensor] = field(default_factory=dict)

    def give(self, inputs: Sequence[torch.Tensor]) -> None:
        """Make these tensors inputs that each replay replaces. Before the first step."""
        for index, tensor in enumerate(inputs):
            if isinstance(tensor, SimTensor):
                self._index[id(tensor)] = (weakref.ref(tensor), Given(index))
                self._inputs.add(_storage(tensor))

    def record(self, operation: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        """Add a step. Arguments and outputs are the device's tensors. Raises SimError for views' updates."""
        arguments = tree_map_only(SimTensor, self._reference, args)
        keywords = tree_map_only(SimTensor, self._reference, kwargs)
        read = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, SimTensor)]
        before = self.made_bytes
        results = tuple(self._result(item, read) for item in tree_flatten(outputs)[0])
        if operation in _PRODUCTS:
            self.product_bytes += self.made_bytes - before
        for tensor in _written(operation, args, kwargs):
            if _storage(tensor) in self._own:
                continue
            # The inputs are older than the capture as well, even if each replay brings others.
            if tensor.derived:
                raise view_update_in_capture(str(operation))
            if _storage(tensor) not in self._inputs:
                self._written[_storage(tensor)] = tensor.raw
        self.steps.append(Step(operation, tuple(arguments), dict(keywords), results))
        sources = tuple(self._source(tensor) for tensor in read)
        self._open.append((str(operation), unwrap(args, kwargs).signature(), sources))

    def mark_step(self) -> None:
        """End a recipe: the steps until here are one, those that follow another."""
        if self._open:
            self.recipes.append(tuple(self._open))
            self._open = []
            self._first = self._made

    def _source(self, tensor: SimTensor) -> int:
        """Which result of the open recipe this is, -1 for none: so that equal layers are one recipe."""
        reference = self._reference(tensor)
        made = isinstance(reference, Made) and reference.index >= self._first
        return reference.index - self._first if made else -1

    def _reference(self, tensor: SimTensor) -> Any:
        known = self._index.get(id(tensor))
        # An address can be that of a tensor that is gone.
        return known[1] if known is not None and known[0]() is tensor else tensor

    def _result(self, tensor: Any, read: Sequence[SimTensor]) -> int | None:
        """Number a new tensor; None for one that an operation changed in place, and for no tensor."""
        if not isinstance(tensor, SimTensor) or any(tensor.raw is other.raw for other in read):
            return None
        index = self._made
        self._made += 1
        reference = weakref.ref(tensor)
        self._index[id(tensor)] = (reference, Made(index))
        self._held[index] = reference
        if all(_storage(tensor) != _storage(other) for other in read):
            self._own.add(_storage(tensor))
            self.made_bytes += tensor.raw.untyped_storage().nbytes()
        return index

    def end(self) -> None:
        """End the last recipe, and forget what only the capture needed."""
        self.mark_step()
        leaves = (leaf for step in self.steps for leaf in tree_flatten((step.arguments, step.keywords))[0])
        self.used_inputs = frozenset(leaf.index for leaf in leaves if isinstance(leaf, Given))
        self._index.clear()
        self._held = {index: ref for index, ref in self._held.items() if ref() is not None}

    def keep(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Keep these tensors alone. Returns the host tensors that somebody may still look at in vain.

        They are results that were not named, results that are a view of part of something that is freed, and
        captured tensors that are neither named nor given but were written.
        """
        named = {id(tensor) for tensor in tensors}
        lost = []
        for index, reference in tuple(self._held.items()):
            tensor = reference()
            if tensor is None or id(tensor) not in named or _is_part(tensor.raw):
                del self._held[index]
                if tensor is not None:
                    lost.append(tensor.raw)
        storages = {_storage(tensor) for tensor in tensors if isinstance(tensor, SimTensor)}
        lost.extend(raw for storage, raw in self._written.items() if storage not in storages)
        self._written.clear()
        return lost

    def replay(self, device: Card, inputs: Sequence[torch.Tensor] = ()) -> None:
        """Run the steps; `inputs` are the host tensors for the given ones."""
        made: dict[int, torch.Tensor] = {}
        for step in self.steps:
            arguments = [_host(value, made, inputs) for value in step.arguments]
            keywords = {name: _host(value, made, inputs) for name, value in step.keywords.items()}
            results = device.compute(step.operation, arguments, keywords)
            several = results if isinstance(results, (list, tuple)) else (results,)
            for index, result in zip(step.results, several, strict=True):
                if index is not None:
                    device.narrow(result)
                    made[index] = result
        for index, reference in self._held.items():
            tensor = reference()
            if tensor is not None:
                tensor.raw.copy_(made[index])


def _host(value: Any, made: dict[int, torch.Tensor], inputs: Sequence[torch.Tensor]) -> Any:
    """An argument of a step with the host's tensors in it."""
    if isinstance(value, SimTensor):
        return value.raw
    if isinstance(value, Made):
        return made[value.index]
    if isinstance(value, Given):
        return inputs[value.index]
    if isinstance(value, (list, tuple)):
        return [_host(item, made, inputs) for item in value]
    if isinstance(value, torch.device) and value.type == DEVICE:
        return torch.device("cpu")
    return value


def _is_part(raw: torch.Tensor) -> bool:
    return raw.untyped_storage().nbytes() != raw.numel() * raw.itemsize


def _storage(tensor: SimTensor) -> int:
    return tensor.raw.untyped_storage().data_ptr()


def _written(operation: Any, args: Any, kwargs: Any) -> list[SimTensor]:
    found: list[SimTensor] = []
    for index, argument in enumerate(operation._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.extend(leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, SimTensor))
    return found


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
        """Begin to capture the work given to the current stream. Raises GraphError inside a capture."""
        if self._program is not None or self._card.recorders:
            raise GraphError("one capture at a time: end this one, or reset the graph, first")
        self._card.flush()
        self._program = Program()
        self._cached_share = 0.0 if dry_run else _CACHED_SHARE
        self._card.recorders.append(self._program)

    def capture_end(self) -> None:
        """End the capture: compile it, and take the memory that the graph keeps. Raises SimError."""
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
        """Capture what happens inside. An error there leaves no graph."""
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
        """Run the captured work again, on the tensors it was captured with."""
        self._replay([])

    def replayV2(
        self, static_tlist: Sequence[torch.Tensor], tlist: Sequence[torch.Tensor], asynchronous: bool = False
    ) -> None:
        """Copy the new tensors into the captured ones, then replays."""
        for captured, new in zip(static_tlist, tlist, strict=True):
            captured.copy_(new, non_blocking=True)
        self._replay([])

    def replayV3(self, tlistI: Sequence[torch.Tensor], asynchronous: bool = False) -> None:
        """Replay with these tensors in the place of the marked user inputs, without a copy."""
        self._replay([tensor.raw if isinstance(tensor, SimTensor) else tensor for tensor in tlistI])

    def _replay(self, inputs: list[torch.Tensor]) -> None:
        program = self._captured()
        self._card.flush()
        self._card.counters.replays += 1
        program.replay(self._card, inputs)

    def clear_inputs(self) -> None:
        """Forget inputs that the graph holds because they were changed in place: here, it holds none."""

    def reset(self) -> None:
        """Free the graph and its memory."""
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
    """Raise GraphError in the modes that have no HPU graphs."""
    if not device.lazy:
        raise GraphError("HPU graphs need lazy mode: set PT_HPU_LAZY_MODE=1")
