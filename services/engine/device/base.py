"""The interface of a device. This package is the only place of the engine that names a vendor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from catenary.telemetry import get_logger
from services.engine.device.attention import NO_FEATURES, AttentionFeatures
from services.engine.device.kernels import rms_norm, rotate, sorted_experts
from services.engine.device.memory import MemoryFigures, MemoryUse
from services.engine.device.native import NativeDecoder, NativeLinears, NativeSpec


class ExecutionMode(Enum):
    """The four modes of Gaudi users; the other devices know the ones that make sense there.

    GRAPH: each bucket is recorded once and replayed. COMPILE: a compiler makes code for each bucket. LAZY:
    the device collects operations until a result is needed (Gaudi alone). EAGER: one kernel after the other.
    """

    GRAPH = "graph"
    COMPILE = "compile"
    LAZY = "lazy"
    EAGER = "eager"

    @property
    def captures(self) -> bool:
        """True if a bucket has to be captured before it runs at its full speed."""
        return self in (ExecutionMode.GRAPH, ExecutionMode.COMPILE)


def execution_mode(
    device: str, *, compiled: bool, enforce_eager: bool, lazy: str | None = None
) -> ExecutionMode:
    """The mode that follows from the options `compile` and `enforce_eager`; `lazy` is PT_HPU_LAZY_MODE.

    Only an HPU, real or simulated, reads `lazy`, with the meaning that Habana's bridge gives it: "0" (and
    absent) or "1". Raises ValueError for contradictions.
    """
    if compiled and enforce_eager:
        raise ValueError("compile and enforce-eager exclude each other: choose one")
    if device in ("hpu", "sim"):
        return _hpu_mode(compiled=compiled, enforce_eager=enforce_eager, lazy=lazy)
    if compiled:
        return ExecutionMode.COMPILE
    # A CPU has no graphs to replay: its kernels are the default.
    return ExecutionMode.EAGER if enforce_eager or device == "cpu" else ExecutionMode.GRAPH


def _hpu_mode(*, compiled: bool, enforce_eager: bool, lazy: str | None) -> ExecutionMode:
    if lazy not in (None, "0", "1"):
        raise ValueError(f"PT_HPU_LAZY_MODE must be 0 or 1, not {lazy!r}")
    if lazy == "1":
        if compiled:
            raise ValueError("compile and PT_HPU_LAZY_MODE=1 exclude each other: unset one")
        return ExecutionMode.LAZY if enforce_eager else ExecutionMode.GRAPH
    return ExecutionMode.EAGER if enforce_eager else ExecutionMode.COMPILE


ShapeKey = tuple[str, Hashable, tuple[tuple[tuple[int, ...], torch.dtype], ...]]


def shape_key(phase: str, tensors: Sequence[torch.Tensor], name: Hashable = None) -> ShapeKey:
    """What makes two forwards of a phase the same to a compiler: shapes and dtypes of their inputs.

    `name` is that of the static shape: inputs of several may lie in tensors of one length.
    """
    return phase, name, tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)


class ShapeCounter:
    """Remembers which forwards were already made, by the real shapes and dtypes of their inputs."""

    def __init__(self) -> None:
        self._seen: set[ShapeKey] = set()

    def note(self, phase: str, tensors: Sequence[torch.Tensor]) -> bool:
        """Records one forward's inputs; True if this device meets their shapes for the first time."""
        return self.note_key(shape_key(phase, tensors))

    def note_key(self, key: ShapeKey) -> bool:
        """The same for a key that `shape_key` made."""
        if key in self._seen:
            return False
        self._seen.add(key)
        return True

    @property
    def first_seen(self) -> int:
        """How many different forwards this device has met."""
        return len(self._seen)


Result_co = TypeVar("Result_co", covariant=True)
Result = TypeVar("Result")


class Submitted(Protocol[Result_co]):
    """Work that was given to the device's stream."""

    def result(self) -> Result_co:
        """What the work returned, once it was run or enqueued. Raises what it raised."""
        ...


class HostCopy(Protocol):
    """A copy to the host that was begun."""

    def wait(self) -> torch.Tensor:
        """The tensor on the host, once all of it is there."""
        ...


class FinishedCopy:
    """A copy that needs no waiting."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> torch.Tensor:
        """The tensor."""
        return self._tensor


def run_now(work: Callable[[], Result]) -> Submitted[Result]:
    """Runs work in the calling thread; its error is kept for `result`, like that of a stream."""
    future: Future[Result] = Future()
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
    return future


def failed(error: Exception) -> Submitted[Result]:
    """Work that could not even be submitted."""
    future: Future[Result] = Future()
    future.set_exception(error)
    return future


log = get_logger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Function = TypeVar("Function", bound=Callable[..., Any])
Forward = Callable[..., Any]
"""Takes the tensors of one static shape, returns a tensor, several or none. Running it again with the same
tensors changes nothing."""


class DeviceError(Exception):
    """The device cannot do what was asked of it. One readable line."""


class Device(ABC):
    """One accelerator, or the CPU, as the runner and the attention see it."""

    name: str
    torch_device: torch.device
    # The widest float it computes in, for cumulative probabilities.
    wide_dtype: torch.dtype
    # Most bytes of KV that the device gives unless the operator names a size.
    kv_limit: int | None = None
    # Whether `measure` is exact and a large forward cheap, so that activations are measured at start.
    measures_activations = True
    # Whether each new shape costs a compilation, so that all of a step runs in few static shapes.
    static_shapes = False
    # Whether torch's grouped product runs on it, with the sorting that goes before.
    groups_products = True
    # The option that can be met by `native_decoder` or `native_linears` alone, as the operator wrote it.
    needs_native: str | None = None
    # Tokens of a KV block unless the operator names a size.
    default_block_size = 32

    def __init__(self, mode: ExecutionMode = ExecutionMode.EAGER) -> None:
        self.mode = mode
        self.shapes = ShapeCounter()
        # Copies to the host since the start: each one waits for the device.
        self.host_copies = 0
        # Told in words what takes long while a model is loaded.
        self.tell: Callable[[str], None] = lambda _: None
        # What an operator could mend: a slower way that was taken, and why. One line each.
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        """Tell the operator, in the log and wherever the engine's status is shown."""
        if text not in self.notes:
            log.warning(text)
            self.notes.append(text)

    def adapt(self, config: Mapping[str, Any]) -> None:
        """Told a model's config.json before the model is loaded, for rules that depend on the model.

        Raises DeviceError if an option contradicts them.
        """
        return

    @abstractmethod
    def choose_dtype(self, requested: str, checkpoint: torch.dtype | None) -> torch.dtype:
        """The dtype to compute in for `auto`, `float32`, `bfloat16` or `float16`. Raises DeviceError."""

    def native_dtype(self, requested: str, checkpoint: torch.dtype | None) -> torch.dtype:
        """The same if `native_decoder` is to compute. Raises DeviceError."""
        return self.choose_dtype(requested, checkpoint)

    @abstractmethod
    def memory(self) -> MemoryFigures:
        """Memory figures as of now."""

    @property
    def budgets_graphs(self) -> bool:
        """True if captures take device memory that has to be set aside."""
        return self.mode is ExecutionMode.GRAPH

    @property
    def reserves_graphs(self) -> bool:
        """True if what is captured or compiled takes device memory that KV must leave to it."""
        return self.budgets_graphs

    @abstractmethod
    def measure(self, work: Callable[[], object]) -> MemoryUse:
        """Runs `work`, waits for the device and tells what memory that took."""

    @abstractmethod
    def attend_prefill(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float,
        features: AttentionFeatures = NO_FEATURES,
        lengths: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of a prefill bucket.

        query [B, heads, Q, d]; key [B, kv_heads, K, d]; value [B, kv_heads, K, dv] with dv <= d. mask: bool
        [B, 1, Q, K], True where a query may look; or float32 [B, heads, Q, K] to be added to the scores; or
        None for plain causal with K = Q. lengths: int64 [B], how many of a row's first queries are its own,
        where the caller knows; what comes out for the others may be anything. Returns [B, heads, Q, dv].
        """

    @abstractmethod
    def attend_decode(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        blocks: torch.Tensor,
        rows: torch.Tensor,
        bias: torch.Tensor,
        scale: float,
        features: AttentionFeatures = NO_FEATURES,
    ) -> torch.Tensor:
        """Attention of a decode bucket of B rows over J cached blocks.

        query [B, heads, d]; caches [slots, kv_heads, d | dv]; blocks [J] ids, or [0] for the caches' first J
        blocks as one slice; rows [J] the row that owns each block, B for padding; bias float32
        [J, 1 | heads, block_size] to be added to the scores, hugely negative where a row may not look.
        Returns [B, heads, dv].
        """

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, unit_offset: bool = False
    ) -> torch.Tensor:
        """x / sqrt(mean(x^2) + eps) over the last dimension, in float32, times the weight; like x.

        x [..., size], weight [size]. unit_offset: the scale is 1 + weight and applied in float32, before the
        result is rounded (gemma); otherwise rounding may come first (llama).
        """
        return rms_norm(x, weight, eps, unit_offset=unit_offset)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [T, heads, d]; cos, sin [T, 1, r]. The first r of d dimensions rotated, halves paired; like x."""
        return rotate(x, cos, sin)

    def experts(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        activation: str,
    ) -> torch.Tensor:
        """Gated MLPs of the experts that each token chose, summed by weight.

        x [T, hidden]; weights [T, k] and ids int64 [T, k] of the chosen experts; gate_up [experts, 2 * size,
        hidden], the gates first; down [experts, hidden, size]; activation: a name of `ACTIVATIONS`. Returns
        [T, hidden] like x. Shapes depend on the number of tokens alone.
        """
        return sorted_experts(x, weights, ids, gate_up, down, activation)

    def weight_size(self, dtype: torch.dtype) -> float:
        """Bytes that a number of a linear layer's weight takes when it is loaded for computing in `dtype`."""
        return dtype.itemsize

    def native_decoder(self, spec: NativeSpec) -> NativeDecoder | None:
        """Packs a decoder that the device computes by itself; None: it computes with the model's modules.

        Asks for weights only if it packs them. None only if `needs_native` is: raises DeviceError otherwise.
        """
        return None

    def native_linears(self, dtype: torch.dtype) -> NativeLinears | None:
        """What packs and computes the linear layers of a model that the device does not compute as a whole.

        None: torch is to compute them. None only if `needs_native` is: raises DeviceError otherwise.
        """
        return None

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocates a zeroed tensor for the life of the engine."""
        return torch.zeros(shape, dtype=dtype, device=self.torch_device)

    @property
    def loading_device(self) -> torch.device:
        """Where weights are put while they are loaded; a finished model moves to `torch_device`."""
        return self.torch_device

    @property
    def compiles_parts(self) -> bool:
        """True if a compiled model's norms and head are compiled too, and not its layers alone."""
        return False

    @property
    def regional_compilation(self) -> bool:
        """True if the parts of a compiled model are compiled apart, and not its forward as a whole."""
        return True

    def expect_shapes(self, count: int) -> None:
        """Told how many buckets there will be, before the first one is compiled."""
        return

    def warming(self, modules: Iterable[nn.Module] = ()) -> AbstractContextManager[None]:
        """Put around a warm-up before serving. Every tensor of `zeros` may be zero again after it.

        modules: the model's. Raises DeviceError at the end if they keep results that were never computed.
        """
        return nullcontext()

    def compile(self, function: Function) -> Function:
        """Compiles a function that is called with static shapes; as it is in all modes but COMPILE."""
        return function

    @property
    def keeps_code(self) -> bool:
        """True if compiled code can outlive the process, where `keep_code` says."""
        return False

    def keep_code(self, directory: Path) -> None:
        """Keeps compiled code in this directory. Called before anything is compiled, if `keeps_code`."""
        raise DeviceError(f"device {self.name} keeps no compiled code")

    def capture(self, forward: Forward, tensors: Sequence[torch.Tensor]) -> Forward:
        """Makes a forward replayable for the shapes of `tensors`, which hold valid inputs.

        The result is called with tensors of the same shapes; what it returns is valid until its next call. It
        reads the caches and buffers that `forward` closes over when it runs. May run `forward`. Raises
        whatever that raises, and what `out_of_memory` knows if there is no room.
        """
        return forward

    def run_eagerly(self, forward: Forward, tensors: Sequence[torch.Tensor]) -> Any:
        """Runs a forward without capturing or compiling anything."""
        return forward(*tensors)

    def out_of_memory(self, error: BaseException) -> bool:
        """True if the error says that the device has no memory left; it goes on working then."""
        return isinstance(error, (MemoryError, torch.OutOfMemoryError))

    def compilations(self) -> int:
        """How often something was compiled or recompiled so far; 0 where nothing is."""
        return 0

    def counters(self) -> dict[str, int]:
        """What the device did since its start, as far as it can tell, for metrics.

        Names: captures, replays, mark_steps, backend_compilations, graph_compilations, cpu_fallbacks.
        """
        return {}

    def flush(self) -> None:
        """Gives the device what a lazy one has collected so far; does nothing elsewhere."""
        return

    def layer_done(self, index: int) -> None:
        """Told by a model after each of its layers, from 0: a lazy device ends a piece of its graph here."""
        return

    def step(self, number: int) -> AbstractContextManager[None]:
        """Put around the device's part of a launched step, in the thread that runs it."""
        return nullcontext()

    def profile(self) -> AbstractContextManager[list[dict[str, Any]]]:
        """Records what the device does inside, with the device's own profiler.

        Gives a list that holds events of Chrome's trace event format once it ends, in processes of their own,
        at times of `time.perf_counter`. None here: a device without a profiler has nothing to tell.
        """
        return nullcontext([])

    def small_work(self) -> AbstractContextManager[None]:
        """Put around computations on few numbers, in the thread that runs them: threads that share them would
        wait for one another longer than they compute."""
        return nullcontext()

    @abstractmethod
    def synchronize(self) -> None:
        """Waits until the device has done all that was given to it. Not for work that runs on it."""

    def submit(self, work: Callable[[], Result]) -> Submitted[Result]:
        """Gives work to the device's stream; submitted work runs in order, one at a time.

        A device that has a queue of its own runs it here: it enqueues and returns.
        """
        return run_now(work)

    def close(self) -> None:
        """Waits for submitted work. The device takes none afterwards."""
        self.synchronize()

    def host_buffer(self, count: int) -> torch.Tensor:
        """Host memory for `count` int64 that the device reads well; it may be filled again and again."""
        return torch.zeros(count, dtype=torch.int64)

    def rows_to_redo(self, needed: torch.Tensor) -> torch.Tensor:
        """Which rows a rare and costly computation runs for, given the bool [N] rows that need it.

        All of them, by default: to learn which would be to wait for the device. A device that computes where
        the decision is taken may return those alone, repeated up to a power of two. int64, empty for none.
        """
        return torch.arange(needed.shape[0], device=needed.device)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copies a host tensor to the device."""
        return tensor.to(self.torch_device)

    def begin_to_host(self, tensor: torch.Tensor) -> HostCopy:
        """Begins the copy of a tensor to the host, in the stream's order; `wait` is a step's one wait."""
        self.host_copies += 1
        return FinishedCopy(tensor.cpu())

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copies a tensor to the host and waits for it."""
        return self.begin_to_host(tensor).wait()
