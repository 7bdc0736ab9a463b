"""The interface of a device: kernels, memory, execution and a stream. This package alone names vendors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from catenary.devices import DEVICES
from catenary.telemetry import get_logger
from services.engine.device.attention import DecodeAttention, PrefillAttention
from services.engine.device.kernels import rms_norm, rotate, sorted_experts
from services.engine.device.memory import MemoryFigures, MemoryUse
from services.engine.device.native import NativeDecoder, NativeLinears, NativeSpec

log = get_logger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Result_co = TypeVar("Result_co", covariant=True)
Result = TypeVar("Result")
Function = TypeVar("Function", bound=Callable[..., Any])
Forward = Callable[..., Any]
"""A function of the tensors of one static shape. It returns a tensor, several or none, and may run twice."""


class DeviceError(Exception):
    """The device cannot do what was asked of it. One readable line."""


class ExecutionMode(Enum):
    """The four modes of Gaudi users; other devices have those that make sense there.

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
    """Return the mode that follows from the options `compile` and `enforce_eager`, and PT_HPU_LAZY_MODE.

    Only an HPU, real or simulated, reads `lazy`, with the meaning that Habana's bridge gives it: "0" (and
    absent) or "1". Raises ValueError for contradictions.
    """
    if compiled and enforce_eager:
        raise ValueError("compile and enforce-eager exclude each other: choose one")
    kind = DEVICES[device]
    if kind.gaudi:
        return _hpu_mode(compiled=compiled, enforce_eager=enforce_eager, lazy=lazy)
    if compiled:
        return ExecutionMode.COMPILE
    return ExecutionMode.EAGER if enforce_eager or not kind.records else ExecutionMode.GRAPH


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
    """Return what makes two forwards of a phase the same to a compiler: shapes and dtypes of their inputs.

    `name` is that of the static shape: inputs of several may lie in tensors of one length.
    """
    return phase, name, tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)


class ShapeCounter:
    """The forwards that a device has met, by the shapes and dtypes of their inputs."""

    def __init__(self) -> None:
        self._seen: set[ShapeKey] = set()

    def note(self, phase: str, tensors: Sequence[torch.Tensor]) -> bool:
        """Record one forward's inputs; True if their shapes are new."""
        return self.note_key(shape_key(phase, tensors))

    def note_key(self, key: ShapeKey) -> bool:
        """Record a key that `shape_key` made; True if it is new."""
        if key in self._seen:
            return False
        self._seen.add(key)
        return True

    @property
    def first_seen(self) -> int:
        """Number of different forwards so far."""
        return len(self._seen)


class Submitted(Protocol[Result_co]):
    """Work that was given to the device's stream."""

    def result(self) -> Result_co:
        """Return the work's result once it was run or enqueued. Raises what the work raised."""
        ...


class HostCopy(Protocol):
    """A copy to the host that was begun."""

    def wait(self) -> torch.Tensor:
        """Wait until the copy is complete; return the host's tensor."""
        ...


class FinishedCopy:
    """A copy that needs no waiting."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> torch.Tensor:
        return self._tensor


def run_now(work: Callable[[], Result]) -> Submitted[Result]:
    """Run work in the calling thread; keep its error for `result`, like that of a stream."""
    future: Future[Result] = Future()
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
    return future


def failed(error: Exception) -> Submitted[Result]:
    """Return work that could not even be submitted."""
    future: Future[Result] = Future()
    future.set_exception(error)
    return future


@dataclass(slots=True)
class Notices:
    """Messages of a device to the operator.

    progress: gets one line about each slow part of loading a model. notes: what an operator could mend, such
    as a slower way that was taken, and why; one line each.
    """

    progress: Callable[[str], None] = lambda _: None
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Tell the operator, in the log and wherever the engine's status is shown."""
        if text not in self.notes:
            log.warning(text)
            self.notes.append(text)


class Kernels(ABC):
    """Operations of a model's layers, and the dtypes to run them in.

    groups_products: whether torch's grouped matrix product runs here, with the sorting before it.
    needs_native: the option, as the operator wrote it, that `native_decoder` or `native_linears` alone meets.
    """

    attend_prefill: PrefillAttention
    attend_decode: DecodeAttention
    groups_products = True
    needs_native: str | None = None

    def adapt(self, config: Mapping[str, Any]) -> None:
        """Follow rules that depend on the model, from its config.json, before the model is loaded.

        Raises DeviceError if an option contradicts them.
        """
        return

    @abstractmethod
    def choose_dtype(self, requested: str, checkpoint: torch.dtype | None) -> torch.dtype:
        """Return the dtype to compute in for `auto`, `float32`, `bfloat16`, `float16`. Raises DeviceError."""

    def native_dtype(self, requested: str, checkpoint: torch.dtype | None) -> torch.dtype:
        """Return the dtype to compute in if `native_decoder` does it. Raises DeviceError."""
        return self.choose_dtype(requested, checkpoint)

    def weight_size(self, dtype: torch.dtype) -> float:
        """Return the bytes of one weight of a linear layer that is loaded for computing in `dtype`."""
        return dtype.itemsize

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, unit_offset: bool = False
    ) -> torch.Tensor:
        """Return x / sqrt(mean(x^2) + eps) over the last dimension, in float32, times the weight; like x.

        x [..., size], weight [size]. unit_offset: the scale is 1 + weight and applied in float32, before the
        result is rounded (gemma); otherwise rounding may come first (llama).
        """
        return rms_norm(x, weight, eps, unit_offset=unit_offset)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate the first r of d dimensions of x [T, heads, d], halves paired; cos, sin [T, 1, r]."""
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
        """Sum the gated MLPs of the experts that each token chose, by weight.

        x [T, hidden]; weights [T, k] and ids int64 [T, k] of the chosen experts; gate_up [experts, 2 * size,
        hidden], the gates first; down [experts, hidden, size]; activation: a name of `ACTIVATIONS`. Returns
        [T, hidden] like x. Shapes depend on the number of tokens alone.
        """
        return sorted_experts(x, weights, ids, gate_up, down, activation)

    def native_decoder(self, spec: NativeSpec) -> NativeDecoder | None:
        """Pack a decoder that the device computes by itself; None if it computes with the model's modules.

        Asks for weights only if it packs them. Raises DeviceError instead of None if `needs_native` is set.
        """
        return None

    def native_linears(self, dtype: torch.dtype) -> NativeLinears | None:
        """Return the packer of linear layers of a model that the device does not compute as a whole.

        None: torch computes them. Raises DeviceError instead of None if `needs_native` is set.
        """
        return None

    def rows_to_redo(self, needed: torch.Tensor) -> torch.Tensor:
        """Return the rows that a rare and costly computation runs for; `needed` bool [N] marks who needs it.

        All of them, by default: to learn which would be to wait for the device. A device that computes where
        the decision is taken may return those alone, repeated up to a power of two. int64, empty for none.
        """
        return torch.arange(needed.shape[0], device=needed.device)


class Memory(ABC):
    """Memory of the device: its size, tensors that live as long as the engine, copies to the device."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device

    @property
    def loading_device(self) -> torch.device:
        """Device of weights while they are loaded; a finished model moves to `torch_device`."""
        return self.torch_device

    @abstractmethod
    def figures(self) -> MemoryFigures:
        """Return total and free bytes as of now."""

    @abstractmethod
    def measure(self, work: Callable[[], object]) -> MemoryUse:
        """Run `work`, wait for the device and return the bytes that it took."""

    def out_of_memory(self, error: BaseException) -> bool:
        """Return True if the error means that no memory is left; the device goes on working then."""
        return isinstance(error, (MemoryError, torch.OutOfMemoryError))

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a zeroed tensor for the life of the engine, such as KV."""
        return torch.zeros(shape, dtype=dtype, device=self.torch_device)

    def host_buffer(self, count: int) -> torch.Tensor:
        """Allocate host memory for `count` int64 that copies fast; it may be filled again and again."""
        return torch.zeros(count, dtype=torch.int64)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a host tensor to the device."""
        return tensor.to(self.torch_device)


class Execution:
    """How forwards run: eagerly here; subclasses capture them, compile them or collect their operations."""

    def __init__(self, mode: ExecutionMode = ExecutionMode.EAGER) -> None:
        self.mode = mode
        self.shapes = ShapeCounter()

    @property
    def budgets_graphs(self) -> bool:
        """True if captures take device memory that has to be set aside."""
        return self.mode is ExecutionMode.GRAPH

    @property
    def reserves_graphs(self) -> bool:
        """True if captured or compiled code takes device memory that KV must leave to it."""
        return self.budgets_graphs

    @property
    def compiles_parts(self) -> bool:
        """True if a compiled model's norms and head are compiled too, and not its layers alone."""
        return False

    @property
    def regional_compilation(self) -> bool:
        """True if the parts of a compiled model are compiled apart, and not its forward as a whole."""
        return True

    def compile(self, function: Function) -> Function:
        """Compile a function that is called with static shapes; return it as it is in modes but COMPILE."""
        return function

    @property
    def keeps_code(self) -> bool:
        """True if compiled code can outlive the process, in the directory of `keep_code`."""
        return False

    def keep_code(self, directory: Path) -> None:
        """Keep compiled code in this directory. Called before anything is compiled, if `keeps_code`."""
        return

    def expect_shapes(self, count: int) -> None:
        """Prepare for so many buckets, before the first one is compiled."""
        return

    def warming(self, modules: Iterable[nn.Module] = ()) -> AbstractContextManager[None]:
        """Enclose a warm-up before serving. Every tensor of `Memory.zeros` may be zero again after it.

        modules: the model's. Raises DeviceError at the end if they keep results that were never computed.
        """
        return nullcontext()

    def capture(self, forward: Forward, tensors: Sequence[torch.Tensor]) -> Forward:
        """Make a forward replayable for the shapes of `tensors`, which hold valid inputs.

        The result is called with tensors of the same shapes; what it returns is valid until its next call. It
        reads the caches and buffers that `forward` closes over when it runs. May run `forward`. Raises
        whatever that raises, and what `Memory.out_of_memory` knows if there is no room.
        """
        return forward

    def run_eagerly(self, forward: Forward, tensors: Sequence[torch.Tensor]) -> Any:
        """Run a forward without capturing or compiling anything."""
        return forward(*tensors)

    def flush(self) -> None:
        """Hand over the operations that a lazy device has collected so far."""
        return

    def layer_done(self, index: int) -> None:
        """Note that a model's layer, counted from 0, is complete: a lazy device may flush here."""
        return

    def step(self, number: int) -> AbstractContextManager[None]:
        """Enclose the device's part of a step, in the thread that runs it."""
        return nullcontext()

    def compilations(self) -> int:
        """Return how often something was compiled or recompiled so far; 0 where nothing is."""
        return 0

    def counters(self) -> dict[str, int]:
        """Return counts since the start for metrics, as far as the device knows them.

        Names: captures, replays, mark_steps, backend_compilations, graph_compilations, cpu_fallbacks.
        """
        return {}


class Stream(ABC):
    """The device's queue of work, and copies back to the host in its order.

    host_copies: copies to the host since the start; each one waits for the device.
    """

    host_copies = 0

    def submit(self, work: Callable[[], Result]) -> Submitted[Result]:
        """Queue work; submitted work runs in order, one at a time.

        A device that has a queue of its own runs `work` here, which enqueues kernels and returns.
        """
        return run_now(work)

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done all that was given to it. Not for work that runs on the stream."""

    def close(self) -> None:
        """Wait for submitted work. The stream takes none afterwards."""
        self.synchronize()

    def begin_to_host(self, tensor: torch.Tensor) -> HostCopy:
        """Begin the copy of a tensor to the host, in the stream's order; `wait` is a step's one wait."""
        self.host_copies += 1
        return FinishedCopy(tensor.cpu())

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the host and wait for it."""
        return self.begin_to_host(tensor).wait()

    def profile(self) -> AbstractContextManager[list[dict[str, Any]]]:
        """Record the device's activities inside with its own profiler.

        Gives a list that holds events of Chrome's trace event format once it ends, in processes of their own,
        at times of `time.perf_counter`. Empty here: a device without a profiler.
        """
        return nullcontext([])

    def small_work(self) -> AbstractContextManager[None]:
        """Enclose computations on few numbers, in the thread that runs them.

        Several threads would wait for one another longer than they compute.
        """
        return nullcontext()


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Facts about a kind of device.

    wide_dtype: the widest float it computes in, for cumulative probabilities. static_shapes: each new shape
    costs a compilation, so all of a step runs in few static shapes. kv_limit: most bytes of KV unless the
    operator names a size. measures_activations: `Memory.measure` is exact and a large forward cheap, so that
    activations are measured at start. block_size: tokens of a KV block unless the operator names a size.
    """

    wide_dtype: torch.dtype = torch.float64
    static_shapes: bool = False
    kv_limit: int | None = None
    measures_activations: bool = True
    block_size: int = 32


@dataclass(slots=True)
class Device:
    """One accelerator, or the CPU. Users take the part that they need; a vendor makes each part."""

    name: str
    capabilities: Capabilities
    kernels: Kernels
    memory: Memory
    execution: Execution
    stream: Stream
    notices: Notices = field(default_factory=Notices)

    @property
    def torch_device(self) -> torch.device:
        return self.memory.torch_device
