"""Operations of lazy mode since the last flush, which make one recipe (gaudi-facts.md 4.1)."""

from __future__ import annotations

from typing import Any

from services.engine.device.sim.operations import Operation
from services.engine.device.sim.tensor import SimTensor
from services.engine.device.sim.unwrapping import Call

Recipe = tuple[Any, ...]


class Collected:
    """The open recipe: for each operation its signature, and which of the recipe's results it reads.

    Two steps with the same operations on the same shapes are one recipe, whatever the tensors are.
    """

    def __init__(self) -> None:
        self._operations: list[int] = []
        self._numbers: dict[Recipe, int] = {}
        self._signatures: list[Recipe] = []
        # 0 marks tensors that no operation of lazy mode made.
        self._generation = 1

    def add(self, operation: Operation, call: Call, outputs: Any) -> None:
        """One more operation with what it made or changed."""
        generation = self._generation
        sources = tuple([made[1] if (made := one.made)[0] == generation else -1 for one in call.tensors])
        signature = (operation.vendor, call.signature(), sources)
        number = self._numbers.get(signature)
        if number is None:
            number = self._numbers[signature] = len(self._signatures)
            self._signatures.append(signature)
        self._operations.append(number)
        made = (generation, len(self._operations))
        for tensor in outputs if isinstance(outputs, (list, tuple)) else (outputs,):
            if isinstance(tensor, SimTensor):
                tensor.made = made

    def __len__(self) -> int:
        """Operations since the last flush."""
        return len(self._operations)

    def take(self) -> tuple[int, ...]:
        """Closes the recipe and opens the next one. Returns the operations by number."""
        self._generation += 1
        taken, self._operations = tuple(self._operations), []
        return taken

    def written_out(self, recipe: tuple[int, ...]) -> Recipe:
        """The recipe as another process would know it."""
        return tuple(self._signatures[number] for number in recipe)
