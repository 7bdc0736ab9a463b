"""`make_graphed_callables`, for inference (gaudi-facts.md 4.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from services.engine.device.sim.graphs.graph import GraphError, HPUGraph

Function = Callable[..., Any]


def make_graphed_callables(
    callables: Function | tuple[Function, ...],
    sample_args: Any,
    warmups: int = 0,
    allow_unused_input: bool = False,
    asynchronous: bool = False,
    disable_tensor_cache: bool = False,
    dry_run: bool = False,
) -> Any:
    """Captures each function at once, with its own tuple of sample tensors, and returns what replays it.

    A single function may be given instead of tuples. The results are the captured tensors, which the next
    call overwrites. A module's `forward` is replaced. Gradients are not captured here, so `warmups` and
    `allow_unused_input` must stay as they are. Raises GraphError.
    """
    if warmups or allow_unused_input:
        raise GraphError("the simulator's graphed callables have no gradients, which these arguments are for")
    single = not isinstance(callables, tuple)
    functions = (callables,) if not isinstance(callables, tuple) else callables
    samples = (sample_args,) if single else sample_args
    made = [
        _graphed(function, args, asynchronous, disable_tensor_cache, dry_run)
        for function, args in zip(functions, samples, strict=True)
    ]
    return made[0] if single else tuple(made)


def _graphed(
    function: Function, args: Sequence[Any], asynchronous: bool, without_cache: bool, dry_run: bool
) -> Function:
    if not all(isinstance(arg, torch.Tensor) for arg in args):
        raise GraphError("sample_args for each callable must be a tuple of Tensors")
    captured = HPUGraph()
    with captured.capturing(dry_run or without_cache):
        if without_cache:
            captured.mark_user_inputs(args)
        outputs = function(*args)
    matched = captured.get_user_input_match_indices()

    def replay(*given: torch.Tensor) -> Any:
        for index, (own, new) in enumerate(zip(args, given, strict=True)):
            if index not in matched:
                own.copy_(new)
        if without_cache:
            captured.replayV3(given, asynchronous)
        else:
            captured.replay(asynchronous)
        return outputs

    if isinstance(function, torch.nn.Module):
        function.forward = replay
        return function
    return replay
