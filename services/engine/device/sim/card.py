"""The simulated card of this process: every operation on its tensors passes through `Card.dispatch`.

Results are computed on the CPU at once. What the card keeps of an HPU are its rules: what compiles, what
waits for the host, what cannot be done, and how much memory there is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

import torch

from services.engine.device.sim.compile_only import without_launch
from services.engine.device.sim.copies import HostCopies
from services.engine.device.sim.costs import compile_seconds, elements_of
from services.engine.device.sim.counters import Counters
from services.engine.device.sim.errors import SimError
from services.engine.device.sim.fused import provide
from services.engine.device.sim.lazy import Collected
from services.engine.device.sim.memory import Hbm
from services.engine.device.sim.modules import acquire, visible_modules
from services.engine.device.sim.operations import Operation, describe
from services.engine.device.sim.recipes import open_cache
from services.engine.device.sim.results import Results
from services.engine.device.sim.rules import check_capture, depends_on_data, falls_back, goes_to_host
from services.engine.device.sim.settings import SimSettings
from services.engine.device.sim.tensor import DEVICE, SimTensor, send_operations_to
from services.engine.device.sim.unwrapping import Call, unwrap

_TRUE = ("1", "true", "True")


class Recorder(Protocol):
    """Takes operations while a graph is captured."""

    def record(self, func: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        """One operation with the device's tensors."""

    def mark_step(self) -> None:
        """Here one recipe ends."""


class DiskCache(Protocol):
    """Recipes of earlier processes."""

    def lookup(self, recipe: str) -> bool:
        """True if it is there."""

    def store(self, recipe: str, size: int) -> None:
        """Keeps it."""


class Card:
    """One HPU. `lazy`: PT_HPU_LAZY_MODE=1 when the bridge was loaded.

    recorders: the captures that are going on, the innermost last. kernels: computations, on the CPU's
    tensors, of operations that have no implementation of torch's.
    """

    def __init__(self, settings: SimSettings, environment: Mapping[str, str]) -> None:
        self.settings = settings
        self._environment = environment
        self.lazy = environment.get("PT_HPU_LAZY_MODE", "0") == "1"
        # Unless it is told, the bridge has int64 outside of lazy mode alone: IsInt64Supported in common/utils
        # of gaudi-pytorch-bridge; gaudi-facts.md 4.7 speaks of lazy mode.
        self.wide_integers = environment.get("PT_ENABLE_INT64_SUPPORT", "0" if self.lazy else "1") in _TRUE
        self.hbm = Hbm(settings.hbm_bytes)
        self._results = Results(self.hbm, self.touch, wide_integers=self.wide_integers)
        self.counters = Counters()
        self.copies = HostCopies()
        self.recorders: list[Recorder] = []
        self.kernels: dict[Any, Callable[..., Any]] = {}
        self.disk: DiskCache | None = None
        # By identity, which is faster than an overload's hash.
        self._operations: dict[int, Operation] = {}
        self._recipes: set[Any] = set()
        self._collected = Collected()
        self._regions = 0
        self.compiling_only = False
        self._lock: TextIO | None = None

    # The device

    def device_count(self) -> int:
        """Modules that this process may take: none without a driver, or where a visible one is not there."""
        try:
            return len(visible_modules(self._environment, self.settings)) if self.settings.driver else 0
        except SimError:
            return 0

    def touch(self) -> None:
        """Acquires the card if that was not done yet. Raises SimError if another process has it."""
        if self._lock is None:
            self._lock = acquire(self.settings, self._environment)
            self.disk = open_cache(self._environment, self.settings)

    def release(self) -> None:
        """Gives the card to other processes, as the end of this one does."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def synchronize(self, upto: int | None = None) -> None:
        """Waits for the device: for all, or for the copies up to number `upto`."""
        self.copies.finish(upto)

    # Compilation

    def compile(self, recipe: Any, *, operations: int) -> None:
        """A recipe is wanted: compiled unless this process has it, or read where an earlier one stored it."""
        if recipe not in self._recipes:
            self._recipes.add(recipe)
            self._compile(recipe, operations)

    def _compile(self, recipe: Any, operations: int) -> None:
        cached = False
        if self.disk is not None:
            name = repr(recipe)
            cached = self.disk.lookup(name)
            if cached:
                self.counters.recipe_hits += 1
            else:
                self.counters.recipe_misses += 1
                self.disk.store(name, 1024 * max(1, operations))
        self.counters.compile_seconds += compile_seconds(
            operations, elements_of(recipe), recipe_s=self.settings.recipe_s, cached=cached
        )
        if not cached:
            self.counters.compilations += 1

    @property
    def collected(self) -> int:
        """Operations that lazy mode has collected and not flushed."""
        return len(self._collected)

    def flush(self) -> None:
        """Ends the collected operations of lazy mode: they are one recipe."""
        collected = self._collected.take()
        if collected and collected not in self._recipes:
            self._recipes.add(collected)
            self._compile(("lazy", self._collected.written_out(collected)), len(collected))

    @contextmanager
    def region(self) -> Iterator[None]:
        """Inside, operations belong to one compiled recipe, which somebody else accounts for."""
        self._regions += 1
        try:
            yield
        finally:
            self._regions -= 1

    @contextmanager
    def compile_only(self) -> Iterator[None]:
        """Inside, everything is compiled and nothing launched: what is written holds garbage."""
        before, self.compiling_only = self.compiling_only, True
        try:
            yield
        finally:
            self.compiling_only = before

    # Operations

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Computes one operation of torch on tensors of this device."""
        operation = self._operations.get(id(func))
        if operation is None:
            operation = self._operations[id(func)] = describe(func, self.settings)
        call = unwrap(args, kwargs)
        if call.tracing:
            return _wrap_traced(operation, func(*call.args, **call.kwargs), args)
        special = not operation.plain or call.host or call.double or self.recorders
        to_host = self._check(operation, call, args) if special else False
        self.counters.operations += 1
        result = self.compute(func, call.args, call.kwargs, copy=to_host or call.host)
        if to_host:
            return self._to_host(operation, call, args, result)
        if call.host:
            self.count_upload(waited_for=not call.non_blocking)
            if call.non_blocking:
                self.copies.lend(call.args[1])
        outputs = self._results.wrap(operation, call, args, kwargs, result)
        if self.recorders:
            self.recorders[-1].record(func, args, kwargs, outputs)
        elif not self._regions:
            self._account(operation, call, outputs)
        return outputs

    def _check(self, operation: Operation, call: Call, args: tuple[Any, ...]) -> bool:
        """Refuses what a card does not do, and tells whether the result goes to the host."""
        to_host = goes_to_host(operation, call, args)
        dynamic = depends_on_data(operation, call)
        fallback = falls_back(operation, call, wide_integers=self.wide_integers)
        if self.recorders:
            check_capture(operation, call, to_host=to_host, dynamic=dynamic, fallback=fallback)
        if fallback:
            self.counters.fallbacks += 1
            self.counters.fallback_ops[operation.vendor] += 1
        if to_host or dynamic or fallback:
            self.counters.host_reads += 1
            self.counters.waits += dynamic or fallback or not call.non_blocking
            self.flush()
        return to_host

    def compute(self, func: Any, args: Any, kwargs: Any, *, copy: bool = False) -> Any:
        """The results of an operation over the CPU's tensors; of a `copy` from or to the host, or a launch.

        In compile-only mode there are no launches.
        """
        if self.compiling_only and not copy:
            return without_launch(func, args, kwargs)
        return self.kernels.get(func, func)(*args, **kwargs)

    def _to_host(self, operation: Operation, call: Call, args: tuple[Any, ...], result: Any) -> Any:
        if call.non_blocking:
            self.copies.begin(result, result.clone())
        else:
            self.synchronize()
        return args[0] if operation.name == "aten.copy_" else result

    def adopt(self, raw: torch.Tensor) -> SimTensor:
        """A new tensor of the device with this data. Raises SimError if the memory is full."""
        return self._results.new(raw)

    def count_upload(self, *, waited_for: bool) -> None:
        """Takes note of a copy from the host."""
        self.counters.blocking_uploads += waited_for
        self.counters.open_uploads += bool(self.collected)

    def narrow(self, raw: torch.Tensor) -> None:
        """What becomes of values that the device cannot hold."""
        self._results.narrow(raw)

    def _account(self, operation: Operation, call: Call, outputs: Any) -> None:
        if self.lazy:
            self._collected.add(operation, call, outputs)
        elif not operation.view:
            self.compile(("eager", operation.vendor, call.signature()), operations=1)


def _wrap_traced(operation: Operation, result: Any, args: tuple[Any, ...]) -> Any:
    """While dynamo traces, tensors are fake and nothing runs."""
    if operation.writes:
        return args[operation.writes[0][0]]
    if isinstance(result, torch.Tensor):
        return SimTensor(result)
    if isinstance(result, (list, tuple)):
        return type(result)(SimTensor(one) if isinstance(one, torch.Tensor) else one for one in result)
    return result


_card: Card | None = None


def card() -> Card:
    """The card of this process. Raises SimError before `reset` made it."""
    if _card is None:
        raise SimError(f"the simulated {DEVICE} is not installed")
    return _card


def reset(settings: SimSettings | None = None, environment: Mapping[str, str] | None = None) -> Card:
    """A new card, as a new process would find it. Tensors of the one before stay usable."""
    global _card
    if _card is not None:
        _card.release()
    environment = os.environ if environment is None else environment
    _card = Card(settings or SimSettings.read(environment), environment)
    chosen = _card.settings
    _card.kernels.update(provide(chosen.version_tuple, chosen.device, chosen.missing))
    send_operations_to(_card.dispatch)
    return _card
