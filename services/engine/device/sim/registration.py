"""Make torch know the device `hpu`. Once per process, and for good."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch.utils import backend_registration

from services.engine.device.base import DeviceError
from services.engine.device.sim.card import card
from services.engine.device.sim.compile_only import spoil
from services.engine.device.sim.settings import host_copy_in_capture
from services.engine.device.sim.tensor import DEVICE, SimTensor

# A Library takes its operations away when it is collected.
_kept: list[Any] = []


def register(module: ModuleType) -> None:
    """`module` becomes torch.hpu. Raises DeviceError with a torch that lets no Python code be a device."""
    if _kept:
        return
    # Since torch 2.10. The card itself needs no such help: the vendor's bridge brings its own.
    setup = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
    if setup is None:
        raise DeviceError(f"the simulated HPU needs torch 2.10 or later, not torch {torch.__version__}")
    setup(DEVICE, backend_module=module)
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    _kept.append(library)
    # What makes a tensor of the device without one at hand; all else is dispatched by the subclass.
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    library.impl("empty.memory_format", _empty, "PrivateUse1")
    library.impl("_to_copy", _to_copy, "PrivateUse1")
    # Torch's own would resize an empty tensor of the device, which a wrapper does not notice.
    library.impl("arange", _arange_to, "PrivateUse1")
    library.impl("arange.start", _arange, "PrivateUse1")
    library.impl("arange.start_step", _arange, "PrivateUse1")
    library.impl("linspace", _linspace, "PrivateUse1")
    library.impl("eye.m", _eye, "PrivateUse1")
    # Torch has no pinned memory for a device of Python code.
    library.impl("_pin_memory", _pin_memory, "CPU")
    library.impl("is_pinned", _is_pinned, "CPU")


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> SimTensor:
    return _rubbish(torch.empty_strided(size, stride, dtype=dtype))


def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> SimTensor:
    return _rubbish(torch.empty(size, dtype=dtype, memory_format=memory_format))


def _pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    return card().copies.pin(tensor)


def _is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
    return card().copies.is_pinned(tensor)


def _rubbish(raw: torch.Tensor) -> SimTensor:
    spoil(raw)
    return card().adopt(raw)


def _to_copy(tensor: torch.Tensor, *, dtype: Any = None, non_blocking: bool = False, **_: Any) -> SimTensor:
    if card().recorders:
        raise host_copy_in_capture()
    card().count_upload(waited_for=not non_blocking)
    return card().adopt(tensor.to(dtype=dtype or tensor.dtype, copy=True))


def _arange_to(end: Any, *, dtype: Any = None, **_: Any) -> SimTensor:
    return card().adopt(torch.arange(end, dtype=dtype))


def _arange(start: Any, end: Any, step: Any = 1, *, dtype: Any = None, **_: Any) -> SimTensor:
    return card().adopt(torch.arange(start, end, step, dtype=dtype))


def _linspace(start: Any, end: Any, steps: int, *, dtype: Any = None, **_: Any) -> SimTensor:
    return card().adopt(torch.linspace(start, end, steps, dtype=dtype))


def _eye(n: int, m: int, *, dtype: Any = None, **_: Any) -> SimTensor:
    return card().adopt(torch.eye(n, m, dtype=dtype))
