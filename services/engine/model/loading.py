"""Stream the tensors of safetensors checkpoints into the fused parameters of our own modules."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import torch
from safetensors import SafetensorError, safe_open

from services.engine.model.checks import ModelError, weight_files


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
        """Copy `source`, shaped as the part says, into the parameter; cast and move it.

        With experts, `expert` None means that the source has all of them stacked.
        """
        target, axis = self.tensor, part.axis
        if self.experts and expert is None:
            axis += 1
        elif expert is not None:
            target = target[expert]
        share = source.narrow(axis, part.start, part.length)
        target.narrow(axis, part.offset, part.length).copy_(share)


_WHOLE = ("whole",)


@dataclass(frozen=True, slots=True)
class Rule:
    """Maps tensor names to a parameter.

    source: the name, with `{layer}` and `{expert}` where the numbers are. target: the parameter, with
    `{layer}`; None for tensors that nobody needs. parts: what the tensor holds of the parameter, in its order
    along the parts' axis.
    """

    source: str
    target: str | None
    parts: tuple[str, ...] = _WHOLE
    pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        text = re.escape(self.source)
        for number in ("layer", "expert"):
            text = text.replace(rf"\{{{number}\}}", rf"(?P<{number}>\d+)")
        object.__setattr__(self, "pattern", re.compile(text))


@dataclass(frozen=True, slots=True)
class Match:
    """A rule's match of one tensor; `target` None: it is not needed."""

    target: str | None
    parts: tuple[str, ...]
    expert: int | None


def find(rules: Sequence[Rule], name: str) -> Match | None:
    """The first rule that knows the tensor, applied to it."""
    for rule in rules:
        found = rule.pattern.fullmatch(name)
        if found is None:
            continue
        numbers = found.groupdict()
        target = rule.target
        if target is not None and "layer" in numbers:
            target = target.replace("{layer}", str(int(numbers["layer"])))
        expert = int(numbers["expert"]) if "expert" in numbers else None
        return Match(target, rule.parts, expert)
    return None


def summary(names: Iterable[str]) -> str:
    """The first name in order, and how many more there are."""
    ordered = sorted(names)
    return ordered[0] if len(ordered) == 1 else f"{ordered[0]} and {len(ordered) - 1} more"


_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class Checkpoint:
    """The safetensors files of a directory, a single one or the shards that its index names.

    What the files hold counts, not which shard the index says a tensor lies in. Files are mapped, not read: a
    tensor takes memory while someone holds it. A context manager.
    """

    def __init__(self, directory: Path) -> None:
        """Open the files. Raises ModelError if one cannot be read or a tensor is in two of them."""
        self.directory = directory
        self._files = ExitStack()
        self._owners: dict[str, Any] = {}
        doubled: set[str] = set()
        try:
            for path in weight_files(directory):
                file = self._files.enter_context(_opened(path))
                names = list(file.keys())
                doubled.update(name for name in names if name in self._owners)
                self._owners.update(dict.fromkeys(names, file))
            if doubled:
                raise ModelError(
                    f"model {directory} has {min(doubled)} and {len(doubled) - 1} more tensors twice"
                )
        except ModelError:
            self._files.close()
            raise

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, in the files' order."""
        return tuple(self._owners)

    def read(self, name: str) -> torch.Tensor:
        """One tensor, on the host. Raises ModelError if it is not of floats."""
        try:
            tensor: torch.Tensor = self._owners[name].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"tensor {name} of model {self.directory} cannot be read: {error}") from None
        if tensor.dtype not in _FLOATS:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ModelError(f"tensor {name} of model {self.directory} is of type {kind}: quantized weights?")
        return tensor

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None


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
        """Judge all names before the first tensor is read; `placed` is called after each.

        Raises ModelError, one line, if a tensor has no place, two have the same, or a place stays empty.
        """
        self._left = _plan(checkpoint, rules, slots)
        self._place = partial(_place, checkpoint, slots)
        self._placed = placed
        self._on_host = all(slot.tensor.device.type == "cpu" for slot in slots.values())

    def load(self, prefix: str = "") -> None:
        """Fill the parameters whose names begin so, but for those that are filled already.

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
