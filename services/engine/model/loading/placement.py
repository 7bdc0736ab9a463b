"""Where a checkpoint's tensor goes in a parameter that holds several of them, or one rank's share."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Part:
    """One checkpoint tensor of a fused parameter.

    shape: of the whole tensor in the checkpoint. start, length: this rank's share along `axis`. offset: where
    along the parameter's `axis` that share begins.
    """

    name: str
    shape: tuple[int, ...]
    axis: int
    start: int
    length: int
    offset: int

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Part:
        """The only part of a parameter that every rank has as the checkpoint has it."""
        return cls("whole", shape, 0, 0, shape[0], 0)


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter, its parts in order, and how many experts are stacked in its first dimension (0: none)."""

    tensor: torch.Tensor
    parts: tuple[Part, ...]
    experts: int = 0

    def part(self, name: str) -> Part:
        """The part of that name."""
        return next(part for part in self.parts if part.name == name)

    def place(self, part: Part, source: torch.Tensor, expert: int | None) -> None:
        """Copies `source`, shaped as the part says, into the parameter; casts and moves it.

        With experts, `expert` None means that the source has all of them stacked.
        """
        target, axis = self.tensor, part.axis
        if self.experts and expert is None:
            axis += 1
        elif expert is not None:
            target = target[expert]
        share = source.narrow(axis, part.start, part.length)
        target.narrow(axis, part.offset, part.length).copy_(share)
