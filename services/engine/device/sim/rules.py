"""What a card refuses, and what makes it wait for the host. gaudi-facts.md 3.5, 4.2, 4.7 and 9."""

from __future__ import annotations

from typing import Any

import torch

from services.engine.device.sim.errors import (
    dynamic_in_capture,
    fallback_in_capture,
    host_copy_in_capture,
    host_read_in_capture,
    mixed_devices,
)
from services.engine.device.sim.operations import Operation
from services.engine.device.sim.tensor import SimTensor
from services.engine.device.sim.unwrapping import Call


def goes_to_host(operation: Operation, call: Call, args: tuple[Any, ...]) -> bool:
    """Whether the host gets the result. Raises SimError where host and device tensors are mixed."""
    if call.host and not operation.copies:
        raise mixed_devices(operation.name)
    if operation.copies and call.tensors:
        return call.device == "cpu" or (operation.name == "aten.copy_" and type(args[0]) is not SimTensor)
    return operation.host_read


def depends_on_data(operation: Operation, call: Call) -> bool:
    """Whether the result's shape is known only after computing it."""
    return operation.dynamic or (operation.indexing and call.bool_index)


def falls_back(operation: Operation, call: Call, *, wide_integers: bool) -> bool:
    """Whether the host computes it: no kernel at all, or none for float64 or int64."""
    if operation.fallback or (operation.reduces and not _reduces_on_card(call)):
        return True
    if call.double:
        # No kernel of the card takes float64; the copies cast it.
        return not operation.moves
    if operation.without_int64 and wide_integers and call.tensors:
        return call.tensors[0].raw.dtype is torch.int64
    return False


def _reduces_on_card(call: Call) -> bool:
    """Of index_reduce(self, dim, index, source, reduce, include_self) the bridge has one form alone."""
    reduce = call.args[4] if len(call.args) > 4 else call.kwargs["reduce"]
    dim = call.args[1] if len(call.args) > 1 else call.kwargs["dim"]
    return reduce == "amax" and dim == 0 and bool(call.kwargs.get("include_self", True))


def check_capture(operation: Operation, call: Call, *, to_host: bool, dynamic: bool, fallback: bool) -> None:
    """Raises SimError for what cannot be captured into an HPU graph (gaudi-facts.md 4.2)."""
    if call.host:
        raise host_copy_in_capture()
    if to_host:
        raise host_read_in_capture(operation.name)
    if dynamic:
        raise dynamic_in_capture(operation.name)
    if fallback:
        raise fallback_in_capture(operation.vendor)
