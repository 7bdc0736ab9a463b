"""Host memory in which a step's inputs are laid out: filled with numpy, sent to the device as one tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from services.engine.device import Device
from services.engine.sampling import MaskBuffer

Ints = np.ndarray[Any, np.dtype[np.int64]]

# Sections begin at multiples of so many numbers, 128 bytes: accelerators read aligned memory faster.
_ALIGNMENT = 16
_FIRST_CAPACITY = 1024


@dataclass(frozen=True, slots=True)
class Staged:
    """Inputs on the device: sections (start, length) of one int64 tensor, the only input of a graph."""

    tensor: torch.Tensor
    sections: tuple[tuple[int, int], ...]

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The sections."""
        return _split(self.sections, self.tensor)

    def taking(self, forward: Callable[..., Any]) -> Callable[[torch.Tensor], Any]:
        """`forward`, which takes the sections, as a function of the one tensor: it is cut up inside."""
        sections = self.sections
        return lambda tensor: forward(*_split(sections, tensor))


def _split(sections: tuple[tuple[int, int], ...], tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(tensor[start : start + length] for start, length in sections)


class StagingBuffer:
    """One group of int64 inputs. It may be filled again once the step that was sent from it is finished."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._host = device.host_buffer(_FIRST_CAPACITY)
        self._sections: list[tuple[int, int]] = []

    def lay_out(self, *lengths: int) -> tuple[Ints, ...]:
        """Sections of these lengths to be filled by the caller; what they hold before is undefined."""
        self._sections = []
        end = 0
        for length in lengths:
            self._sections.append((end, length))
            end += -(-length // _ALIGNMENT) * _ALIGNMENT
        if end > self._host.numel():
            # What was sent from the old one keeps it alive.
            self._host = self._device.host_buffer(1 << (end - 1).bit_length())
        array: Ints = self._host.numpy()
        return tuple(array[start : start + length] for start, length in self._sections)

    def send(self) -> Staged:
        """The sections on the device, after one copy."""
        start, length = self._sections[-1]
        return Staged(self._device.to_device(self._host[: start + length]), tuple(self._sections))


class StepStaging:
    """The groups of one step."""

    def __init__(self, device: Device) -> None:
        self.prefill = StagingBuffer(device)
        self.prompts = StagingBuffer(device)
        self.decode = StagingBuffer(device)
        self.moves = StagingBuffer(device)
        self.clear = StagingBuffer(device)
        self.rows = StagingBuffer(device)
        self.masks = MaskBuffer(device)
