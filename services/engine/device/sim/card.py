"""The simulated card of this process: every operation on its tensors passes through `Card.dispatch`.

Results are computed on the CPU at once. What the card keeps of an HPU are its rules: what compiles, what
waits for the host, what cannot be done, and how much memory there is.
"""

from __future__ import annotations

import fcntl
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, TextIO

import torch

from services.engine.device.sim.compile_only import HostCopies, without_launch
from services.engine.device.sim.fused.library import provide
from services.engine.device.sim.operations import (
    Operation,
    Results,
    check_capture,
    depends_on_data,
    describe,
    falls_back,
    goes_to_host,
)
from services.engine.device.sim.recipes import open_cache
from services.engine.device.sim.settings import SimError, SimSettings, acquire_failed
from services.engine.device.sim.tensor import DEVICE, Call, Hbm, SimTensor, send_operations_to, unwrap


@dataclass(slots=True)
class Counters:
    """Since the card was reset. Seconds are virtual.

    fallback_ops: times by operation. recipe_hits, recipe_misses: of the recipe cache on disk.
    host_reads: results that went to the host. waits: those of them for which the host stood still until the
    device had caught up: all but copies that do not wait. blocking_uploads: copies from the host that it
    waited for. open_uploads: copies from the host into a recipe of lazy mode that was not flushed before,
    which is then another recipe than without what came before.
    """

    compilations: int = 0
    compile_seconds: float = 0.0
    fallbacks: int = 0
    fallback_ops: Counter[str] = field(default_factory=Counter)
    recipe_hits: int = 0
    recipe_misses: int = 0
    mark_steps: int = 0
    host_reads: int = 0
    waits: int = 0
    blocking_uploads: int = 0
    open_uploads: int = 0
    operations: int = 0
    captures: int = 0
    replays: int = 0
    backend_compilations: int = 0


# Seconds for each operation of a recipe, of which a decoder of 32 layers has about 1,500; and for each
# element of the tensors that they read: an 8B model's decode takes 23 s so, a prefill of 2,048 tokens 35 s.
SECONDS_PER_OPERATION: Final = 0.01
SECONDS_PER_ELEMENT: Final = 1e-9
# Loading a cached recipe (gaudi-facts.md 2.4: 504 to 34 s, 66 to 23 s).
CACHED_SHARE: Final = 0.1


def compile_seconds(operations: int, elements: int, *, recipe_s: float, cached: bool) -> float:
    """Virtual seconds for a recipe of so many operations that read so many elements."""
    seconds = recipe_s + operations * SECONDS_PER_OPERATION + elements * SECONDS_PER_ELEMENT
    return seconds * CACHED_SHARE if cached else seconds


def elements_of(recipe: Any) -> int:
    """The elements of all shapes in a recipe's key."""
    if isinstance(recipe, torch.Size):
        return math.prod(recipe)
    if isinstance(recipe, tuple):
        return sum(map(elements_of, recipe))
    return 0


def visible_modules(environment: Mapping[str, str], settings: SimSettings) -> list[int]:
    """The modules that this process may take: HLS_MODULE_ID, else HABANA_VISIBLE_MODULES, else all.

    Raises SimError for one that the host does not have.
    """
    text = environment.get("HLS_MODULE_ID") or environment.get("HABANA_VISIBLE_MODULES")
    if not text or text == "all":
        return list(range(settings.modules))
    modules = text.split(",")
    for module in modules:
        if not module.isdecimal() or int(module) >= settings.modules:
            raise acquire_failed(f"no module {module!r}")
    return [int(module) for module in modules]


def acquire(settings: SimSettings, environment: Mapping[str, str]) -> TextIO:
    """Take a module for the life of this process, as the bridge does at the first touch of the device.

    It is the first of the visible ones that no other process has.
    """
    if not settings.driver:
        raise acquire_failed("no driver is loaded")
    modules = visible_modules(environment, settings)
    for module in modules:
        file = _lock_file(settings.lock_directory / f"catenary-sim-{os.getuid()}-module-{module}.lock")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
        else:
            return file
    raise acquire_failed(f"module id {','.join(map(str, modules))}")


def _lock_file(path: Path) -> TextIO:
    """Open or make it. Raises SimError if it is not this user's: others can guess its name."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise acquire_failed(f"{path}: {error.strerror}") from None
    if os.fstat(descriptor).st_uid != os.getuid():
        os.close(descriptor)
        raise acquire_failed(f"{path} is another user's")
    return os.fdopen(descriptor, "r+")


Recipe = tuple[Any, ...]


class Collected:
    """The open recipe: for each operation its signature, and which of the recipe's results it reads.

    Two steps with the same operations on the same shapes are one recipe, whatever the tensors are.
    """

    def __init__(self) -> None:
        self._operations: list[int] = []
        self._numbers: dict[Recipe, int] = {}
        self._signatures: list[Recipe] = []
        # 0 marks tensors that no operation of lazy mode made.
        self._generation = 1

    def add(self, operation: Operation, call: Call, outputs: Any) -> None:
        """One more operation with what it made or changed."""
        generation = self._generation
        sources = tuple([made[1] if (made := one.made)[0] == generation else -1 for one in call.tensors])
        signature = (operation.vendor, call.signature(), sources)
        number = self._numbers.get(signature)
        if number is None:
            number = self._numbers[signature] = len(self._signatures)
            self._signatures.append(signature)
        self._operations.append(number)
        made = (generation, len(self._operations))
        for tensor in outputs if isinstance(outputs, (list, tuple)) else (outputs,):
            if isinstance(tensor, SimTensor):
                tensor.made = made

    def __len__(self) -> int:
        """Operations since the last flush."""
        return len(self._operations)

    def take(self) -> tuple[int, ...]:
        """Close the recipe and opens the next one. Returns the operations by number."""
        self._generation += 1
        taken, self._operations = tuple(self._operations), []
        return taken

    def written_out(self, recipe: tuple[int, ...]) -> Recipe:
        """The recipe as another process would know it."""
        return tuple(self._signatures[number] for number in recipe)


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
        """Keep it."""


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
        """Acquire the card if that was not done yet. Raises SimError if another process has it."""
        if self._lock is None:
            self._lock = acquire(self.settings, self._environment)
            self.disk = open_cache(self._environment, self.settings)

    def release(self) -> None:
        """Give the card to other processes, as the end of this one does."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def synchronize(self, upto: int | None = None) -> None:
        """Wait for the device: for all, or for the copies up to number `upto`."""
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
        """End the collected operations of lazy mode: they are one recipe."""
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
        """Compute one operation of torch on tensors of this device."""
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
        """Refuse what a card does not do, and tell whether the result goes to the host."""
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
        """Take note of a copy from the host."""
        self.counters.blocking_uploads += waited_for
        self.counters.open_uploads += bool(self.collected)

    def narrow(self, raw: torch.Tensor) -> None:
        """Change values that the device cannot hold, as it would."""
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
