"""Fills parameters from a checkpoint, tensor by tensor: memory peaks at the model and a few tensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

import torch

from services.engine.model.errors import ModelError
from services.engine.model.loading.checkpoint import Checkpoint
from services.engine.model.loading.placement import Part, Slot
from services.engine.model.loading.rules import Match, Rule, find, summary

Unit = tuple[str, str, int]
"""What has to be filled once: parameter, part, expert (0 without experts)."""


# Pages of a mapped file come one after another to a thread, and a copy on the host lets others run.
_MOST_THREADS: Final = 8


class WeightLoader:
    """Copies a checkpoint's tensors to their places, all at once or a part of the model at a time.

    On the host several threads copy at once, whichever files their tensors are in.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        rules: Sequence[Rule],
        slots: Mapping[str, Slot],
        *,
        placed: Callable[[], None] = lambda: None,
    ) -> None:
        """Judges all names before the first tensor is read; `placed` is called after each.

        Raises ModelError, one line, if a tensor has no place, two have the same, or a place stays empty.
        """
        self._left = _plan(checkpoint, rules, slots)
        self._place = partial(_place, checkpoint, slots)
        self._placed = placed
        self._on_host = all(slot.tensor.device.type == "cpu" for slot in slots.values())

    def load(self, prefix: str = "") -> None:
        """Fills the parameters whose names begin so, but for those that are filled already.

        Raises ModelError, one line, if a shape is not what the config says.
        """
        chosen = {
            name: match for name, match in self._left.items() if (match.target or "").startswith(prefix)
        }
        self._left = {name: match for name, match in self._left.items() if name not in chosen}
        if self._on_host:
            self._load_in_threads(chosen)
            return
        for name, match in chosen.items():
            self._place(name, match)
            # A lazy device would hold every source until somebody asks it for a result.
            self._placed()

    def _load_in_threads(self, chosen: Mapping[str, Match]) -> None:
        inference = torch.is_inference_mode_enabled()

        def place(name: str, match: Match) -> None:
            # The mode is a thread's own, and parameters that were made in it are written in it alone.
            with torch.inference_mode(inference):
                self._place(name, match)

        with ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0)))) as pool:
            for _ in pool.map(place, chosen.keys(), chosen.values()):
                self._placed()


def _plan(checkpoint: Checkpoint, rules: Sequence[Rule], slots: Mapping[str, Slot]) -> dict[str, Match]:
    plan: dict[str, Match] = {}
    filled: dict[Unit, str] = {}
    unknown: list[str] = []
    doubled: list[str] = []
    for name in checkpoint.names:
        match = find(rules, name)
        if match is not None and match.target is None:
            continue
        units = _units(match, slots)
        if match is None or not units:
            unknown.append(name)
            continue
        if any(unit in filled for unit in units):
            doubled.append(name)
            continue
        filled.update(dict.fromkeys(units, name))
        plan[name] = match
    missing = {f"{unit[0]} ({unit[1]})" for unit in _all_units(slots) if unit not in filled}
    faults = [
        f"{fault}: {summary(names)}"
        for fault, names in (
            ("tensors without a place", unknown),
            ("tensors for a place that is taken", doubled),
            ("parameters without weights", missing),
        )
        if names
    ]
    if faults:
        raise ModelError(f"model {checkpoint.directory} does not match its config: {'; '.join(faults)}")
    return plan


def _units(match: Match | None, slots: Mapping[str, Slot]) -> list[Unit]:
    """The units that a tensor fills; none if it has no place."""
    slot = slots.get(match.target) if match is not None and match.target is not None else None
    if match is None or match.target is None or slot is None:
        return []
    known = {part.name for part in slot.parts}
    if (match.expert is not None and match.expert >= slot.experts) or not known.issuperset(match.parts):
        return []
    experts = [match.expert] if match.expert is not None else range(slot.experts or 1)
    return [(match.target, part, expert) for part in match.parts for expert in experts]


def _all_units(slots: Mapping[str, Slot]) -> list[Unit]:
    return [
        (name, part.name, expert)
        for name, slot in slots.items()
        for part in slot.parts
        for expert in range(slot.experts or 1)
    ]


@torch.no_grad()
def _place(checkpoint: Checkpoint, slots: Mapping[str, Slot], name: str, match: Match) -> None:
    slot = slots[match.target or ""]
    parts = [slot.part(part) for part in match.parts]
    source = checkpoint.read(name)
    stacked = slot.experts if match.expert is None else 0
    expected = _shape(parts, stacked)
    if tuple(source.shape) != expected:
        raise ModelError(
            f"tensor {name} of model {checkpoint.directory} has the shape {tuple(source.shape)}; "
            f"its config asks for {expected}"
        )
    start = 0
    for part in parts:
        axis = part.axis + 1 if stacked else part.axis
        length = part.shape[part.axis]
        slot.place(part, source.narrow(axis, start, length), match.expert)
        start += length


def _shape(parts: Sequence[Part], stacked: int) -> tuple[int, ...]:
    """Shape of a checkpoint tensor that holds these parts one after another."""
    shape = list(parts[0].shape)
    shape[parts[0].axis] = sum(part.shape[part.axis] for part in parts)
    return (stacked, *shape) if stacked else tuple(shape)
