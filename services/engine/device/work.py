"""Work given to a device, and results on their way to the host."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

import torch

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
